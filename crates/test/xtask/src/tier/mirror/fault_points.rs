//! Nodes that die in every phase of a write, of a resync and of a reconfiguration (RFD 0010, 4 to
//! 6), at the fault points of their program (`rt::fault_point`).
//!
//! One node after the other is started so that it dies, as by `kill -9`, the count-th time it
//! passes a point. It is driven there under load, restarted, and the test waits until all data is
//! safe. A fault point that is never reached fails the test, and so does one of the program that no
//! group covers.

use super::{
    SAMPLE_PARTS, is_usable,
    load::{LoadControl, clients, run_extra_client, under_load, verify},
    longest, membership_faults,
    scenarios::PauseClass,
    trial_blocks,
};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    run_context::RunContext,
};
use anyhow::{Result, ensure};
use std::{
    collections::BTreeSet,
    ops::Range,
    time::{Duration, Instant},
};

/// How long a node may take to reach a point, including its start.
const FAULT_POINT_LIMIT: Duration = Duration::from_secs(40);
/// How often a node is driven to the point again: a retry may hit what was missed.
const RETRY_INTERVAL: Duration = Duration::from_secs(8);
const POLL: Duration = Duration::from_millis(20);

/// Blocks no other part uses, for writes in clean regions: 64 regions of 64 KiB.
const UNMARKED_REGION_TRIALS: u64 = 128;
/// How many trials' blocks this part uses.
pub(super) const TRIALS: u64 = GROUPS.len() as u64 + UNMARKED_REGION_TRIALS;

/// How a node reaches a point.
#[derive(Clone, Copy, PartialEq)]
enum RouteToPoint {
    /// As a replica under load, or while becoming one.
    Member,
    /// As the primary.
    Primary,
    /// As a primary that hands over to the other node.
    HandsOverPrimary,
    /// As the primary, writing to clean regions.
    WritesUnmarkedRegion,
    /// As the primary that resyncs the other node.
    ResyncSource,
}

/// A kill: the point, the count, and the route to it.
type FaultPointKill = (&'static str, u64, RouteToPoint);

/// Kills of one node under one load.
struct Group {
    name: &'static str,
    node: usize,
    pause: PauseClass,
    kills: &'static [FaultPointKill],
}

const GROUPS: [Group; 3] = [
    Group {
        name: "fault points of a member, and of one that becomes one",
        node: NODE_B,
        pause: PauseClass::Unplanned,
        kills: &[
            ("mirror.entering.taken", 60, RouteToPoint::Member),
            ("mirror.entering.ordered", 60, RouteToPoint::Member),
            ("mirror.entering.granted", 60, RouteToPoint::Member),
            ("mirror.entering.done", 60, RouteToPoint::Member),
            ("mirror.member.received", 300, RouteToPoint::Member),
            ("mirror.member.applied", 300, RouteToPoint::Member),
            ("mirror.member.confirmed", 300, RouteToPoint::Member),
            ("mirror.member.flushed", 6, RouteToPoint::Member),
            ("mirror.joiner.accepted", 1, RouteToPoint::Member),
            ("mirror.joiner.copied", 1, RouteToPoint::Member),
            // The first epoch is adopted before the node is a member.
            ("mirror.epoch.adopting", 2, RouteToPoint::Member),
            ("mirror.epoch.adopted", 2, RouteToPoint::Member),
            ("mirror.view.started", 1, RouteToPoint::Member),
        ],
    },
    Group {
        name: "fault points of a primary",
        node: NODE_A,
        pause: PauseClass::Unplanned,
        kills: &[
            ("mirror.primary.asked", 100, RouteToPoint::Primary),
            ("mirror.primary.announced", 100, RouteToPoint::Primary),
            ("mirror.primary.applied", 100, RouteToPoint::Primary),
            ("mirror.primary.committed", 100, RouteToPoint::Primary),
            ("mirror.leg.marked", 12, RouteToPoint::WritesUnmarkedRegion),
            ("mirror.view.copying", 1, RouteToPoint::Primary),
            ("mirror.view.settled", 1, RouteToPoint::Primary),
            ("mirror.view.opened", 1, RouteToPoint::Primary),
            ("mirror.record.putting", 1, RouteToPoint::HandsOverPrimary),
            ("mirror.record.put", 1, RouteToPoint::HandsOverPrimary),
        ],
    },
    // The node that dies is the last in sync: the volume waits for it.
    Group {
        name: "fault points of the source of a resync",
        node: NODE_A,
        pause: PauseClass::Outage,
        kills: &[
            ("mirror.resync.sent", 1, RouteToPoint::ResyncSource),
            ("mirror.resync.flushed", 1, RouteToPoint::ResyncSource),
            ("mirror.record.putting", 1, RouteToPoint::ResyncSource),
            ("mirror.record.put", 1, RouteToPoint::ResyncSource),
        ],
    },
];

/// Runs all groups; false if the cluster is unusable afterwards.
pub(super) fn run(
    context: &RunContext,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
    number: u64,
) -> bool {
    context.check("every fault point that the program has is come to", || {
        let planned = GROUPS.iter().flat_map(|group| group.kills).map(|(point, ..)| *point);
        let planned: BTreeSet<&str> = planned.chain(membership_faults::fault_points()).collect();
        let there = cluster.nodes[NODE_A].fault_points()?;
        let there: BTreeSet<&str> = there.iter().map(String::as_str).collect();
        let missing: Vec<_> = there.symmetric_difference(&planned).collect();
        ensure!(missing.is_empty(), "the program or this list lacks {missing:?}");
        Ok(())
    });
    let fresh =
        trial_blocks(number + GROUPS.len() as u64).start..trial_blocks(number + TRIALS).start;
    GROUPS.iter().zip(number..).all(|(group, number)| {
        let points = group.kills.iter().map(|(point, ..)| *point);
        let chosen = context.sample(group.name, points, SAMPLE_PARTS);
        let kills = group.kills.iter().filter(|(point, ..)| chosen.contains(point));
        let trial = Trial {
            volume,
            group,
            kills: kills.copied().collect(),
            blocks: trial_blocks(number),
            unmarked_blocks: fresh.clone(),
        };
        trial.run(context, cluster)
    })
}

/// One group in progress.
struct Trial<'a> {
    volume: &'a MirroredVolume,
    group: &'a Group,
    kills: Vec<FaultPointKill>,
    blocks: Range<u64>,
    unmarked_blocks: Range<u64>,
}

/// The results of a group.
#[derive(Default)]
struct GroupResult {
    /// When each kill began, by the clock of the history.
    begun: Vec<(Duration, &'static str)>,
    reached: Vec<&'static str>,
    missed: Vec<&'static str>,
}

impl GroupResult {
    /// The kill in progress at `when`.
    fn during(&self, when: Duration) -> &'static str {
        let begun = self.begun.iter().take_while(|(at, _)| *at <= when);
        begun.last().map_or("the beginning", |(_, point)| *point)
    }
}

impl Trial<'_> {
    fn run(&self, context: &RunContext, cluster: &mut Cluster) -> bool {
        let (mut result, mut figures) = (GroupResult::default(), String::new());
        let passed = context.check(self.group.name, || {
            let clock = Instant::now();
            let mut clients = clients(cluster, self.volume, &self.blocks, clock)?;
            let happened = under_load(&mut clients, |load| {
                for death in self.kills.iter().copied() {
                    result.begun.push((clock.elapsed(), death.0));
                    let reached = self.kill_at_point(cluster, load, death)?;
                    let list = if reached { &mut result.reached } else { &mut result.missed };
                    list.push(death.0);
                }
                Ok(())
            });
            let (when, longest) = longest(&mut clients);
            figures = super::describe(self.group.pause, longest, &clients);
            figures = format!("{figures}; the longest at {}", result.during(when));
            happened?;
            verify(&mut clients, &self.blocks)?;
            cluster.check_replicas_equal(self.volume)?;
            ensure!(result.missed.is_empty(), "never reached: {}", result.missed.join(", "));
            self.group.pause.check(longest)
        });
        context.display.line(&format!("        died at {}", result.reached.join(", ")));
        context.display.line(&format!("        {figures}"));
        is_usable(context, cluster, passed)
    }

    /// Lets the node die and restarts it; returns whether it reached the point.
    fn kill_at_point(
        &self,
        cluster: &mut Cluster,
        load: &LoadControl,
        death: FaultPointKill,
    ) -> Result<bool> {
        let (point, count, road) = death;
        let node = self.group.node;
        let status = cluster.nodes[node].stop()?;
        ensure!(status.success(), "the node ended with {status}");
        cluster.nodes[node].start_with_fault_point(point, count)?;
        let reached = self.drive_to_point(cluster, load, road)?;
        if !reached {
            cluster.nodes[node].stop()?;
        }
        cluster.nodes[node].start()?;
        cluster.await_safe()?;
        load.send_clients_home();
        Ok(reached)
    }

    /// Drives the node to the point; returns whether it died there.
    fn drive_to_point(
        &self,
        cluster: &mut Cluster,
        load: &LoadControl,
        road: RouteToPoint,
    ) -> Result<bool> {
        let begun = Instant::now();
        while begun.elapsed() < FAULT_POINT_LIMIT {
            if self.drive_once(cluster, load, road)?
                || self.wait_killed(cluster, RETRY_INTERVAL, |_| Ok(false))?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until the node has died, `enough` returns true or `limit` has passed; returns whether
    /// it died.
    fn wait_killed(
        &self,
        cluster: &mut Cluster,
        limit: Duration,
        enough: impl Fn(&Cluster) -> Result<bool>,
    ) -> Result<bool> {
        let begun = Instant::now();
        loop {
            if cluster.nodes[self.group.node].was_killed_by_fault()? {
                return Ok(true);
            }
            if begun.elapsed() > limit || enough(cluster)? {
                return Ok(false);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Drives the route once; returns whether the node is known to have died on it.
    fn drive_once(
        &self,
        cluster: &mut Cluster,
        load: &LoadControl,
        road: RouteToPoint,
    ) -> Result<bool> {
        let node = self.group.node;
        let other = if node == NODE_A { NODE_B } else { NODE_A };
        if road == RouteToPoint::Primary {
            // It takes over as soon as it is in sync: a second time, if it has done so before.
            cluster.request_primary_switch(self.volume, other, other)?;
            cluster.request_primary_switch(self.volume, other, node)?;
            return Ok(false);
        }
        if self.wait_killed(cluster, FAULT_POINT_LIMIT, Cluster::is_safe)? {
            return Ok(true);
        }
        let first = if road == RouteToPoint::Member { other } else { node };
        cluster.request_primary_switch(self.volume, other, first)?;
        match road {
            RouteToPoint::Member | RouteToPoint::Primary => load.send_clients_home(),
            RouteToPoint::HandsOverPrimary => {
                cluster.request_primary_switch(self.volume, other, other)?;
            }
            RouteToPoint::WritesUnmarkedRegion => {
                run_extra_client(cluster, self.volume, &self.unmarked_blocks, 60)?;
            }
            RouteToPoint::ResyncSource => {
                cluster.nodes[other].stop()?;
                cluster.nodes[other].start()?;
            }
        }
        Ok(false)
    }
}

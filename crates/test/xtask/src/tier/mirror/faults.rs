//! Nodes that die at every phase of a write, of a resync and of a change of the configuration (RFD 0010, 4 to 6): at points that
//! their program names (`rt::fault`).
//!
//! One node after the other is started so that it ends, as by `kill -9`, when it passes a point for the count-th time; it is
//! brought there under load, started again as usual, and waited for until all data are safe. A point that is never reached is a failure,
//! and so is one that the program has and nobody brings a node to.

use super::{
    blocks, is_fit,
    load::{Load, clients, touch, under_load, verify},
    longest, moves,
    scenarios::Pause,
};
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    house::House,
};
use anyhow::{Result, ensure};
use std::{
    collections::BTreeSet,
    ops::Range,
    time::{Duration, Instant},
};

/// How long a node may take to come to a point, its start included.
const PATIENCE: Duration = Duration::from_secs(40);
/// How often it is brought there anew: what has been missed once may be met the next time.
const AGAIN: Duration = Duration::from_secs(8);
const POLL: Duration = Duration::from_millis(20);

/// Blocks that nobody else touches, for writes in regions without a mark: 64 regions of 64 KiB.
const FRESH_TRIALS: u64 = 128;
/// How many trials' blocks all of this uses.
pub(super) const TRIALS: u64 = GROUPS.len() as u64 + FRESH_TRIALS;

/// How a node comes to a point.
#[derive(Clone, Copy, PartialEq)]
enum Road {
    /// As one of the members, under load; or on its way to become one.
    Member,
    /// As the primary.
    Primary,
    /// As a primary that hands over to the other node.
    HandsOver,
    /// As the primary, where nobody has written before.
    Fresh,
    /// As the primary that brings the other node in sync.
    Source,
}

/// A death: where, when it is passed for the how-many-th time, on which road.
type Death = (&'static str, u64, Road);

/// Deaths of one node under one load.
struct Group {
    name: &'static str,
    node: usize,
    pause: Pause,
    deaths: &'static [Death],
}

const GROUPS: [Group; 3] = [
    Group {
        name: "fault points of a member, and of one that becomes one",
        node: B,
        pause: Pause::Unplanned,
        deaths: &[
            ("mirror.entering.taken", 60, Road::Member),
            ("mirror.entering.ordered", 60, Road::Member),
            ("mirror.entering.granted", 60, Road::Member),
            ("mirror.entering.done", 60, Road::Member),
            ("mirror.member.received", 300, Road::Member),
            ("mirror.member.applied", 300, Road::Member),
            ("mirror.member.confirmed", 300, Road::Member),
            ("mirror.member.flushed", 6, Road::Member),
            ("mirror.joiner.accepted", 1, Road::Member),
            ("mirror.joiner.copied", 1, Road::Member),
            // The first one is adopted as one that is no member.
            ("mirror.epoch.adopting", 2, Road::Member),
            ("mirror.epoch.adopted", 2, Road::Member),
            ("mirror.view.started", 1, Road::Member),
        ],
    },
    Group {
        name: "fault points of a primary",
        node: A,
        pause: Pause::Unplanned,
        deaths: &[
            ("mirror.primary.asked", 100, Road::Primary),
            ("mirror.primary.announced", 100, Road::Primary),
            ("mirror.primary.applied", 100, Road::Primary),
            ("mirror.primary.committed", 100, Road::Primary),
            ("mirror.leg.marked", 12, Road::Fresh),
            ("mirror.view.copying", 1, Road::Primary),
            ("mirror.view.settled", 1, Road::Primary),
            ("mirror.view.opened", 1, Road::Primary),
            ("mirror.record.putting", 1, Road::HandsOver),
            ("mirror.record.put", 1, Road::HandsOver),
        ],
    },
    // The node that dies is the last in sync: the volume waits for it.
    Group {
        name: "fault points of the source of a resync",
        node: A,
        pause: Pause::Outage,
        deaths: &[
            ("mirror.resync.sent", 1, Road::Source),
            ("mirror.resync.flushed", 1, Road::Source),
            ("mirror.record.putting", 1, Road::Source),
            ("mirror.record.put", 1, Road::Source),
        ],
    },
];

/// All groups; false when the cluster is not fit for more.
pub(super) fn run(house: &House, cluster: &mut Cluster, volume: &Mirrored, number: u64) -> bool {
    house.check("every fault point that the program has is come to", || {
        let planned = GROUPS.iter().flat_map(|group| group.deaths).map(|(point, ..)| *point);
        let planned: BTreeSet<&str> = planned.chain(moves::points()).collect();
        let there = cluster.nodes[A].points()?;
        let there: BTreeSet<&str> = there.iter().map(String::as_str).collect();
        let missing: Vec<_> = there.symmetric_difference(&planned).collect();
        ensure!(missing.is_empty(), "the program or this list lacks {missing:?}");
        Ok(())
    });
    let fresh = blocks(number + GROUPS.len() as u64).start..blocks(number + TRIALS).start;
    GROUPS.iter().zip(number..).all(|(group, number)| {
        let trial = Trial { volume, group, blocks: blocks(number), fresh: fresh.clone() };
        trial.run(house, cluster)
    })
}

/// One group on its way.
struct Trial<'a> {
    volume: &'a Mirrored,
    group: &'a Group,
    blocks: Range<u64>,
    fresh: Range<u64>,
}

/// What came of a group.
#[derive(Default)]
struct Told {
    /// When each death was begun, by the clock of the history.
    begun: Vec<(Duration, &'static str)>,
    reached: Vec<&'static str>,
    missed: Vec<&'static str>,
}

impl Told {
    /// The death that was under way at `when`.
    fn during(&self, when: Duration) -> &'static str {
        let begun = self.begun.iter().take_while(|(at, _)| *at <= when);
        begun.last().map_or("the beginning", |(_, point)| *point)
    }
}

impl Trial<'_> {
    fn run(&self, house: &House, cluster: &mut Cluster) -> bool {
        let (mut told, mut figures) = (Told::default(), String::new());
        let passed = house.check(self.group.name, || {
            let clock = Instant::now();
            let mut clients = clients(cluster, self.volume, &self.blocks, clock)?;
            let happened = under_load(&mut clients, |load| {
                for death in self.group.deaths {
                    told.begun.push((clock.elapsed(), death.0));
                    let reached = self.die(cluster, load, *death)?;
                    let list = if reached { &mut told.reached } else { &mut told.missed };
                    list.push(death.0);
                }
                Ok(())
            });
            let (when, longest) = longest(&mut clients);
            figures = super::describe(self.group.pause, longest, &clients);
            figures = format!("{figures}; the longest at {}", told.during(when));
            happened?;
            verify(&mut clients, &self.blocks)?;
            cluster.copies_are_equal(self.volume)?;
            ensure!(told.missed.is_empty(), "never reached: {}", told.missed.join(", "));
            self.group.pause.check(longest)
        });
        house.display.line(&format!("        died at {}", told.reached.join(", ")));
        house.display.line(&format!("        {figures}"));
        is_fit(house, cluster, passed)
    }

    /// Has the node die and come back; whether it came to the point.
    fn die(&self, cluster: &mut Cluster, load: &Load, death: Death) -> Result<bool> {
        let (point, count, road) = death;
        let node = self.group.node;
        let status = cluster.nodes[node].stop()?;
        ensure!(status.success(), "the node ended with {status}");
        cluster.nodes[node].launch_to_die(point, count)?;
        let reached = self.bring(cluster, load, road)?;
        if !reached {
            cluster.nodes[node].stop()?;
        }
        cluster.nodes[node].start()?;
        cluster.await_safe()?;
        load.go_home();
        Ok(reached)
    }

    /// Brings the node to the point; whether it has died there.
    fn bring(&self, cluster: &mut Cluster, load: &Load, road: Road) -> Result<bool> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if self.go(cluster, load, road)? || self.dies(cluster, AGAIN, |_| Ok(false))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until the node has died, or `enough` says so, or `limit` has passed: whether it has died.
    fn dies(
        &self,
        cluster: &mut Cluster,
        limit: Duration,
        enough: impl Fn(&Cluster) -> Result<bool>,
    ) -> Result<bool> {
        let begun = Instant::now();
        loop {
            if cluster.nodes[self.group.node].has_died()? {
                return Ok(true);
            }
            if begun.elapsed() > limit || enough(cluster)? {
                return Ok(false);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Goes the road once; whether the node has died on it, as far as is known.
    fn go(&self, cluster: &mut Cluster, load: &Load, road: Road) -> Result<bool> {
        let node = self.group.node;
        let other = if node == A { B } else { A };
        if road == Road::Primary {
            // It takes over as soon as it is in sync: anew, if it has done so before.
            cluster.switch(self.volume, other, other)?;
            cluster.switch(self.volume, other, node)?;
            return Ok(false);
        }
        if self.dies(cluster, PATIENCE, Cluster::is_safe)? {
            return Ok(true);
        }
        let first = if road == Road::Member { other } else { node };
        cluster.switch(self.volume, other, first)?;
        match road {
            Road::Member | Road::Primary => load.go_home(),
            Road::HandsOver => cluster.switch(self.volume, other, other)?,
            Road::Fresh => touch(cluster, self.volume, &self.fresh, 60)?,
            Road::Source => {
                cluster.nodes[other].stop()?;
                cluster.nodes[other].start()?;
            }
        }
        Ok(false)
    }
}

//! The state of a volume's replicas, why one is not in sync, and the next step.

use api::{Backing, Finding, ReplicaState, Severity, VolumeName, VolumeReplica};
use cluster::identity::Role;
use cluster::nodes::NodeView;
use disk::format_utc;
use mirror::config::MirrorConfig;
use peer::NodeId;
use records::record::{PlacementStage, ReplicaPlacement, VolumeRecord, VolumeStage};
use uuid::Uuid;

use crate::cluster_view::{ClusterView, NodeState};
use crate::nodes::node_argument;
use crate::old_images::replace_hint;
use crate::placement::no_candidate_text_for;
use crate::report::{MissingReplica, ReportedMirror, ResyncReport};
use crate::{WAIT_HINT, finding};

/// Why a replica is not in sync, and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReplicaProblem {
    pub why: String,
    pub next_step: String,
}

impl ReplicaProblem {
    fn new(why: impl Into<String>, next: impl Into<String>) -> Self {
        Self { why: why.into(), next_step: next.into() }
    }
}

impl ClusterView {
    /// The replicas of a volume.
    pub fn replicas(&self, record: &VolumeRecord) -> Vec<VolumeReplica> {
        let primary = self.mirrors.get(&record.id).map(|m| m.primary);
        let replica = |placement: &ReplicaPlacement| {
            let state = self.replica_state(record, placement);
            let problem = self.replica_problem(record, placement, &state);
            let (reason, hint) = problem.map(|t| (t.why, t.next_step)).unzip();
            VolumeReplica {
                node: self.node_name(placement.node),
                backing: placement.backing.clone(),
                state,
                reason,
                hint,
                primary: primary == Some(placement.node),
            }
        };
        record.placements.iter().map(replica).collect()
    }

    fn replica_state(&self, record: &VolumeRecord, placement: &ReplicaPlacement) -> ReplicaState {
        match &placement.stage {
            PlacementStage::Creating { .. } => return ReplicaState::Creating,
            PlacementStage::Failed { reason } => {
                return ReplicaState::Failed { reason: reason.clone() };
            }
            PlacementStage::Removing { .. } => return ReplicaState::Removing,
            PlacementStage::Ready | PlacementStage::Superseded => {}
        }
        let Some(mirror) = self.mirrors.get(&record.id) else { return ReplicaState::Unknown };
        if mirror.member(placement.node).is_some() {
            // A replica that its node cannot open counts as holding nothing.
            return match self.open_error(placement.node, record.id) {
                Some(_) => ReplicaState::OutOfSync,
                None => ReplicaState::InSync,
            };
        }
        match self.resync(mirror, record.id, placement.node) {
            Some(r) => ReplicaState::Resyncing {
                done_bytes: r.done_bytes,
                total_bytes: r.total_bytes,
                eta_s: r.eta_s,
                unreadable: r.unreadable.ranges.clone(),
            },
            // It is removed once in sync, unless that happens before its replacement is in sync.
            None if placement.stage == PlacementStage::Superseded
                && !is_being_replaced(record, placement.node) =>
            {
                ReplicaState::Removing
            }
            None => ReplicaState::OutOfSync,
        }
    }

    fn resync(&self, mirror: &MirrorConfig, volume: Uuid, node: NodeId) -> Option<&ResyncReport> {
        self.reported_mirror(mirror.primary, volume)?.resyncs.iter().find(|r| r.node == node.0)
    }

    /// The problem of a replica, if it has one.
    fn replica_problem(
        &self,
        record: &VolumeRecord,
        placement: &ReplicaPlacement,
        state: &ReplicaState,
    ) -> Option<ReplicaProblem> {
        let node = self.node_name(placement.node);
        match state {
            ReplicaState::InSync => {
                let full = self
                    .reported_mirror(placement.node, record.id)
                    .is_some_and(|reported| reported.full);
                self.disk_problem(record, placement.node)
                    .or_else(|| full.then(|| self.full_problem(placement)))
            }
            ReplicaState::Removing => self.removal_problem(record, placement),
            ReplicaState::Resyncing { .. } => {
                let refused =
                    self.reported_mirror(placement.node, record.id).and_then(disk_error_text);
                refused.map(|why| ReplicaProblem::new(why, WAIT_HINT))
            }
            ReplicaState::OutOfSync if placement.stage == PlacementStage::Superseded => {
                self.removal_problem(record, placement)
            }
            ReplicaState::OutOfSync => Some(self.out_of_sync_problem(record, placement.node)),
            ReplicaState::Creating => match self.state_of(placement.node) {
                NodeState::Running => {
                    Some(ReplicaProblem::new("its node is creating it", WAIT_HINT))
                }
                NodeState::Down | NodeState::Unknown => Some(self.node_problem(placement.node)),
            },
            ReplicaState::Failed { reason } => Some(ReplicaProblem::new(
                reason.clone(),
                replace_hint(record, &placement.backing, &node, reason),
            )),
            ReplicaState::Unknown => Some(ReplicaProblem::new(
                "its mirror configuration is missing",
                "windrose cluster recover --dry-run",
            )),
        }
    }

    /// The problem of a replica that is to be removed and waits for its node.
    fn removal_problem(
        &self,
        record: &VolumeRecord,
        placement: &ReplicaPlacement,
    ) -> Option<ReplicaProblem> {
        let (node, name) = (self.node_name(placement.node), &record.name);
        let is_down = self.state_of(placement.node) == NodeState::Down;
        let called = self.nodes.get(&placement.node).map(|view| node_argument(&self.nodes, view));
        let start = format!(
            "start windrose on node {node}, or fix its network; if it is lost for good: windrose \
             cluster leave --node {} --force",
            called.unwrap_or_else(|| placement.node.to_string())
        );
        if placement.stage != PlacementStage::Superseded {
            return is_down
                .then(|| ReplicaProblem::new("its node removes it when it runs again", start));
        }
        let why = match is_being_replaced(record, placement.node) {
            true => {
                "its node was down, so a replacement is being created: the one that is in sync \
                 first is kept"
            }
            false => {
                "its node was down, so it was replaced: it is removed once its node is back and it \
                 is in sync"
            }
        };
        let go =
            format!("wait, or remove it now: windrose volume mirror remove {name} --on {node}");
        Some(ReplicaProblem::new(why, if is_down { start } else { go }))
    }

    /// The problem of a replica whose node is down.
    fn node_problem(&self, node: NodeId) -> ReplicaProblem {
        let name = self.node_name(node);
        match self.state_of(node) {
            NodeState::Down => ReplicaProblem::new(
                format!("node {name} is down, or cut off"),
                format!("start windrose on node {name}, or fix its network"),
            ),
            NodeState::Unknown | NodeState::Running => ReplicaProblem::new(
                format!("its state on node {name} is unknown here"),
                format!("`windrose status` on node {name} shows its state"),
            ),
        }
    }

    /// Why the replica on `node` is not being resynced.
    fn out_of_sync_problem(&self, record: &VolumeRecord, node: NodeId) -> ReplicaProblem {
        let (called, name) = (self.node_name(node), &record.name);
        if self.state_of(node) != NodeState::Running {
            return self.node_problem(node);
        }
        if self.nodes.get(&node).is_some_and(|view| view.record.is_drained) {
            return ReplicaProblem::new(
                format!("node {called} is drained"),
                format!("windrose node resume {called}"),
            );
        }
        if let Some(why) = self.open_error(node, record.id) {
            return ReplicaProblem::new(why, open_failed_hint(record, &called));
        }
        let Some(reported) = self.reported_mirror(node, record.id) else {
            return ReplicaProblem::new(
                format!("node {called} has not reported it yet"),
                WAIT_HINT,
            );
        };
        let disk = format!(
            "check that disk; if it is broken, replace it, then: windrose volume mirror replace \
             {name} --on {called}"
        );
        if let Some(lost) = &reported.image_lost {
            return ReplicaProblem::new(
                lost,
                format!("node {called} reopens it when the disk responds; {disk}"),
            );
        }
        if let Some(placement) = record.placement(node).filter(|_| reported.full) {
            let (full, room) = self.space_problem(placement);
            return ReplicaProblem::new(
                full,
                format!("{room}: the resync is retried within a minute"),
            );
        }
        if let Some(refused) = disk_error_text(reported) {
            return ReplicaProblem::new(
                refused,
                format!("the resync is retried within a minute; {disk}"),
            );
        }
        self.resync_problem(record, node)
    }

    /// The replica on `node` is open and healthy: the reason that its primary reports.
    fn resync_problem(&self, record: &VolumeRecord, node: NodeId) -> ReplicaProblem {
        let called = self.node_name(node);
        let Some(primary) = self.mirrors.get(&record.id).map(|mirror| mirror.primary) else {
            return ReplicaProblem::new("the volume has no primary", WAIT_HINT);
        };
        let (leads, name) = (self.node_name(primary), &record.name);
        let Some(reported) = self.reported_mirror(primary, record.id) else {
            let why = format!("it waits for a resync from node {leads}");
            return ReplicaProblem::new(why, self.node_problem(primary).next_step);
        };
        if reported.newer_replicas.contains(&node.0) {
            let why = format!("it is newer than the replica on {leads}, the current primary");
            let next = format!(
                "to give up its data: windrose volume mirror replace {name} --on {called}; to keep \
                 it: switch {leads} off, then windrose volume force-primary {name} at {called}"
            );
            return ReplicaProblem::new(why, next);
        }
        if !reported.peers_with_session.contains(&node.0) {
            return ReplicaProblem::new(
                format!("nodes {leads} and {called} cannot reach each other"),
                format!(
                    "check the network between {leads} and {called} (the addresses of \
                     cluster.listen, port 7480 by default)"
                ),
            );
        }
        match reported.failed_resyncs.get(&node.0) {
            Some(why) => ReplicaProblem::new(
                format!("the last resync from {leads} failed: {why}"),
                format!("it is retried within a minute; see the log of node {leads}"),
            ),
            None => ReplicaProblem::new(format!("{leads} is about to resync it"), WAIT_HINT),
        }
    }

    /// The problem of an in-sync replica without free space.
    fn full_problem(&self, placement: &ReplicaPlacement) -> ReplicaProblem {
        let (full, room) = self.space_problem(placement);
        let why = format!("{full}: writes that need more space are refused");
        let next = format!(
            "{room}, or free space in the volume (fstrim on its initiators): writes then succeed \
             again"
        );
        ReplicaProblem::new(why, next)
    }

    /// Where a replica lacks space, and how to make some.
    fn space_problem(&self, placement: &ReplicaPlacement) -> (String, String) {
        let node = self.node_name(placement.node);
        match &placement.backing {
            Backing::File { path } => (
                format!("the file system of {} is full (no space left)", path.display()),
                format!("free space in that file system on node {node}"),
            ),
            Backing::Device { path } => (
                format!("{} is full (no space left)", path.display()),
                format!("give that device more space on node {node}"),
            ),
            Backing::Pool { pool } => (
                format!("pool {pool} is full (no space left)"),
                format!("add disks on node {node}: windrose pool add {pool} DISK"),
            ),
        }
    }

    /// The problem of an in-sync replica whose disk fails reads.
    fn disk_problem(&self, record: &VolumeRecord, node: NodeId) -> Option<ReplicaProblem> {
        let failed = self.reported_mirror(node, record.id)?.failed_reads;
        if failed == 0 {
            return None;
        }
        let (called, name) = (self.node_name(node), &record.name);
        let others =
            record.placements.iter().filter(|p| p.node != node && p.stage.should_be_open());
        let (answered, next) = match others.count() {
            0 => (
                "",
                format!("check that disk; for another replica: {}", self.add_replica_hint(record)),
            ),
            _ => (
                "; other replicas served them",
                format!(
                    "check that disk. To replace it: windrose volume mirror remove {name} --on \
                     {called}, change the disk, then windrose volume mirror add {name} --on \
                     {called}. This finding clears an hour after the last failed read"
                ),
            ),
        };
        let why = format!("its disk failed {failed} reads in the last hour{answered}");
        Some(ReplicaProblem::new(why, next))
    }

    /// Findings about the replicas of a volume that serves; returns whether it added any.
    pub(crate) fn replica_findings(
        &self,
        record: &VolumeRecord,
        findings: &mut Vec<Finding>,
    ) -> bool {
        let subject = format!("volume {}", record.name);
        let replicas = self.replicas(record);
        for replica in replicas.iter().filter(|replica| replica.state == ReplicaState::InSync) {
            if let (Some(why), hint) = (&replica.reason, replica.hint.as_deref()) {
                let message = format!("the replica on {}: {why}", replica.node);
                findings.push(finding(Severity::Warning, &subject, message, hint));
            }
        }
        let pairs = record.placements.iter().zip(&replicas);
        let (superseded, counted): (Vec<_>, Vec<_>) =
            pairs.partition(|(placement, _)| placement.stage == PlacementStage::Superseded);
        let counted: Vec<_> = counted.into_iter().map(|(_, replica)| replica).collect();
        let mut lacking: Vec<_> =
            counted.iter().filter_map(|replica| deficiency_text(replica)).collect();
        if lacking.is_empty() {
            findings
                .extend(superseded.iter().map(|(_, replica)| surplus_finding(&subject, replica)));
            return true;
        }
        let mut next = Vec::new();
        for replica in counted.iter().filter(|replica| deficiency_text(replica).is_some()) {
            next.extend(replica.hint.as_deref().filter(|hint| !next.contains(hint)));
        }
        let missing = self.missing_replica(record).filter(|_| !is_short_of_replicas(record));
        lacking.extend(self.repair_progress_text(record));
        lacking.extend(missing.map(|missing| missing.why.clone()));
        next.extend(missing.and_then(|missing| missing.next_step.as_deref()));
        let all = counted.iter().filter(|replica| replica.state != ReplicaState::Removing).count();
        let good = replicas
            .iter()
            .filter(|replica| replica.state == ReplicaState::InSync)
            .count()
            .min(all);
        let message = format!("{good} of {all} replicas are in sync: {}", lacking.join("; "));
        let hint = if next.is_empty() { WAIT_HINT.to_owned() } else { next.join("; ") };
        findings.push(finding(Severity::Warning, subject, message, Some(&hint)));
        false
    }

    /// The finding that a serving volume has fewer replicas than wanted; returns whether that is
    /// so. Replicas that could not be made have findings of their own.
    pub(crate) fn missing_replica_finding(
        &self,
        record: &VolumeRecord,
        findings: &mut Vec<Finding>,
    ) -> bool {
        if !is_short_of_replicas(record) {
            return false;
        }
        let (name, has) = (&record.name, record.current_placements().count().max(1));
        let missing = self.missing_replica(record);
        let why = missing.map(|missing| format!(": {}", missing.why)).unwrap_or_default();
        let wanted = record.replicas_wanted;
        let message = format!("it has {has} of {wanted} replicas{why}");
        let fewer =
            format!("to be content with {has}: windrose volume mirror set {name} --replicas {has}");
        let hint = match missing {
            Some(MissingReplica { next_step: Some(next), .. }) => format!("{next}; {fewer}"),
            // The reporter has searched for a node.
            Some(MissingReplica { next_step: None, .. }) => {
                format!("windrose volume mirror add {name}; {fewer}")
            }
            None => format!("{}; {fewer}", self.add_replica_hint(record)),
        };
        let subject = format!("volume {name}");
        findings.push(finding(Severity::Warning, subject, message, Some(&hint)));
        true
    }

    /// Whether the findings about the replicas say why this node cannot open its own.
    pub(crate) fn covers_local_replica(&self, record: &VolumeRecord) -> bool {
        let is_made = |placement: &ReplicaPlacement| placement.stage == PlacementStage::Ready;
        record.placement(self.this_node).is_some_and(is_made)
            && !self.is_mirror_record_lost(record)
            && self.open_error(self.this_node, record.id).is_some()
    }

    /// The finding that a volume is being deleted and waits for nodes that are down.
    pub(crate) fn deletion_finding(&self, record: &VolumeRecord) -> Option<Finding> {
        let is_away =
            |placement: &&ReplicaPlacement| self.state_of(placement.node) == NodeState::Down;
        let away = record
            .placements
            .iter()
            .filter(is_away)
            .filter(|_| record.stage == VolumeStage::Deleting);
        let (names, called): (Vec<_>, Vec<_>) = away
            .map(|placement| {
                let called =
                    self.nodes.get(&placement.node).map(|view| node_argument(&self.nodes, view));
                (
                    self.node_name(placement.node),
                    called.unwrap_or_else(|| placement.node.to_string()),
                )
            })
            .unzip();
        if names.is_empty() {
            return None;
        }
        let leave = |node: &String| format!("windrose cluster leave --node {node} --force");
        let leave: Vec<_> = called.iter().map(leave).collect();
        let names = names.join(", ");
        let message = format!(
            "it is being deleted: the replica on {names} is erased when that node runs again; \
             until then the name cannot be reused"
        );
        let hint = format!(
            "start windrose on node {names}, or fix its network; if it is lost for good: {}",
            leave.join("; ")
        );
        Some(finding(Severity::Warning, format!("volume {}", record.name), message, Some(&hint)))
    }

    /// What the primary reports about a replica that a volume lacks.
    fn missing_replica(&self, record: &VolumeRecord) -> Option<&MissingReplica> {
        let mirror = self.mirrors.get(&record.id)?;
        self.reported_mirror(mirror.primary, record.id)?.missing_replica.as_ref()
    }

    /// Since when a replacement for a missing replica is being made.
    fn repair_progress_text(&self, record: &VolumeRecord) -> Option<String> {
        let repair = record.repair.as_ref()?;
        let (node, since) = (self.node_name(repair.node), format_utc(repair.since_s));
        let replaced = repair.replaces.map(|node| {
            format!(", to replace the one on {}, whose node is down", self.node_name(node))
        });
        Some(format!(
            "a replica is being created on {node} since {since}{}",
            replaced.unwrap_or_default()
        ))
    }

    /// The command that adds a replica, with what to do first if no node can keep one.
    pub(crate) fn add_replica_hint(&self, record: &VolumeRecord) -> String {
        let add = format!("windrose volume mirror add {}", record.name);
        match self.why_no_candidate(record) {
            Some(why) => format!("{why}: add a node (windrose cluster join), then: {add}"),
            None => add,
        }
    }

    /// Why no node can keep another replica of a volume, if so.
    fn why_no_candidate(&self, record: &VolumeRecord) -> Option<String> {
        let others = self.nodes.iter().filter(|(node, _)| record.placement(**node).is_none());
        let mut why = Vec::new();
        for (node, NodeView { record, .. }) in others {
            let name = &record.name;
            why.push(match self.state_of(*node) {
                _ if record.role == Role::Witness => format!("{name} is a witness"),
                NodeState::Down => format!("{name} is down, or cut off"),
                NodeState::Unknown => format!("{name} cannot be reached from here"),
                NodeState::Running if record.is_drained => format!("{name} is drained"),
                NodeState::Running => return None,
            });
        }
        Some(no_candidate_text_for(&why))
    }
}

/// The hint for a node that cannot open its replica of a volume.
pub fn open_failed_hint(record: &VolumeRecord, node: &str) -> String {
    let (name, has_others) = (&record.name, record.placements.len() > 1);
    let lost = match has_others {
        true => format!("if the disk is lost: windrose volume mirror replace {name} --on {node}"),
        false => lost_image_hint(name),
    };
    format!("remove the cause: node {node} retries every 30 seconds; {lost}")
}

/// The hint for a volume whose only image is lost.
pub(crate) fn lost_image_hint(name: &VolumeName) -> String {
    format!(
        "if the image is lost, restore it from a backup, or delete the volume: windrose volume \
         delete {name} --discard"
    )
}

/// Whether a volume has fewer replicas than wanted, counting those not made yet.
fn is_short_of_replicas(record: &VolumeRecord) -> bool {
    let failed =
        record.placements.iter().filter(|p| matches!(p.stage, PlacementStage::Failed { .. }));
    record.current_placements().count() + failed.count() < usize::from(record.replicas_wanted)
}

/// Whether the replica on `node` is being replaced.
fn is_being_replaced(record: &VolumeRecord, node: NodeId) -> bool {
    record.repair.as_ref().is_some_and(|repair| repair.replaces == Some(node))
}

/// The finding that a replica is surplus.
fn surplus_finding(subject: &str, replica: &VolumeReplica) -> Finding {
    let why = replica.reason.as_deref().unwrap_or("it is in sync, and about to be removed");
    let message = format!("the replica on {} is no longer needed: {why}", replica.node);
    finding(Severity::Note, subject, message, Some(replica.hint.as_deref().unwrap_or(WAIT_HINT)))
}

/// The error that the disk of a replica reported.
fn disk_error_text(reported: &ReportedMirror) -> Option<String> {
    let refused = reported.disk_error.as_ref()?;
    Some(format!("its disk failed an operation ({refused})"))
}

/// What a replica lacks, if anything, and why.
fn deficiency_text(replica: &VolumeReplica) -> Option<String> {
    let node = &replica.node;
    let why = replica.reason.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    match &replica.state {
        ReplicaState::InSync | ReplicaState::Removing => None,
        ReplicaState::Resyncing { done_bytes, total_bytes, eta_s, unreadable } => {
            let left = api::Size(total_bytes.saturating_sub(*done_bytes));
            let eta = match eta_s {
                Some(s) => format!(", {s} s"),
                None if unreadable.is_empty() => String::new(),
                None => ", some of it cannot be read from any replica".to_owned(),
            };
            Some(format!("the one on {node} is resyncing ({left} left{eta}){why}"))
        }
        ReplicaState::OutOfSync => Some(format!("the one on {node} is out of sync{why}")),
        ReplicaState::Creating => Some(format!("the one on {node} is being created{why}")),
        ReplicaState::Failed { reason } => {
            Some(format!("the one on {node} was not created: {reason}"))
        }
        ReplicaState::Unknown => Some(format!("the state of the one on {node} is unknown{why}")),
    }
}

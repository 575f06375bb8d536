//! When the cluster replaces a missing replica, and what happens to both: a pure function of the
//! volume's records, of which nodes are down since when, and of time (RFD 0039, 2.4).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mirror::config::{MAX_REPLICAS, MirrorConfig};
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use records::record::{
    MAX_PLACEMENTS, PendingRepair, PlacementStage, ReplicaPlacement, VolumeRecord, VolumeStage,
};

/// Longest pause between two observations that still count as continuous.
const MAX_OBSERVATION_GAP: Duration = Duration::from_secs(60);

/// Pause after a failed repair, and the longest pause after several failures.
const BACKOFF_MIN: Duration = Duration::from_secs(60);
const BACKOFF_MAX: Duration = Duration::from_secs(3600);

/// A point in time: monotonic, and as seconds since the Unix epoch for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timestamp {
    /// By the monotonic clock.
    pub at: Instant,
    /// By the wall clock, in seconds since the Unix epoch.
    pub wall_s: u64,
}

impl Timestamp {
    fn after(self, time: Duration) -> Self {
        Self { at: self.at + time, wall_s: self.wall_s.saturating_add(time.as_secs()) }
    }
}

/// Failed repairs of a volume.
#[derive(Clone, Debug)]
struct RepairFailures {
    times: u32,
    last: Timestamp,
    nodes: BTreeSet<NodeId>,
    why: String,
}

/// What one node has observed, and since when. In memory only: a node that has just started has
/// observed nothing.
#[derive(Debug, Default)]
pub struct RepairHistory {
    last_observation: Option<Instant>,
    down_since: BTreeMap<NodeId, Timestamp>,
    short_since: BTreeMap<Uuid, Timestamp>,
    failures: BTreeMap<Uuid, RepairFailures>,
}

impl RepairHistory {
    /// Records which nodes are down now; `None` if the store does not say. Time that was not
    /// observed does not count.
    pub fn observe_nodes(&mut self, now: Timestamp, down: Option<&BTreeSet<NodeId>>) {
        let watched =
            self.last_observation.is_some_and(|before| now.at - before <= MAX_OBSERVATION_GAP);
        let Some(down) = down.filter(|_| watched || self.last_observation.is_none()) else {
            // The observation starts again, now or when the store answers.
            let observed_at = down.map(|_| now.at);
            let failures = std::mem::take(&mut self.failures);
            *self = Self { last_observation: observed_at, failures, ..Self::default() };
            down.into_iter().flatten().for_each(|node| _ = self.down_since.insert(*node, now));
            return;
        };
        self.last_observation = Some(now.at);
        self.down_since.retain(|node, _| down.contains(node));
        down.iter().for_each(|node| _ = self.down_since.entry(*node).or_insert(now));
    }

    /// Records whether a volume lacks a replica.
    pub fn observe_volume(&mut self, record: &VolumeRecord, mirror: &MirrorConfig, now: Timestamp) {
        match self.deficit(record, mirror) {
            Some(_) => _ = self.short_since.entry(record.id).or_insert(now),
            None => _ = self.short_since.remove(&record.id),
        }
    }

    /// Forgets volumes that no longer exist.
    pub fn retain_volumes(&mut self, volumes: &BTreeSet<Uuid>) {
        self.short_since.retain(|id, _| volumes.contains(id));
        self.failures.retain(|id, _| volumes.contains(id));
    }

    /// Records that a replica could not be made on a node.
    pub fn record_failure(&mut self, volume: Uuid, node: NodeId, why: &str, now: Timestamp) {
        let (nodes, why) = (BTreeSet::new(), why.to_owned());
        let new = RepairFailures { times: 0, last: now, nodes, why: why.clone() };
        let failures = self.failures.entry(volume).or_insert(new);
        failures.nodes.insert(node);
        *failures =
            RepairFailures { times: failures.times + 1, last: now, why, ..failures.clone() };
    }

    /// A volume has all its replicas: forgets earlier failures.
    pub fn clear_failures(&mut self, volume: Uuid) {
        self.failures.remove(&volume);
    }

    /// Nodes on which a repair of a volume failed.
    pub fn failed_nodes(&self, volume: Uuid) -> BTreeSet<NodeId> {
        self.failures.get(&volume).map(|f| f.nodes.clone()).unwrap_or_default()
    }

    /// The down node whose replica a volume lacks, if that is the reason.
    pub fn node_to_replace(&self, record: &VolumeRecord, mirror: &MirrorConfig) -> Option<NodeId> {
        match self.deficit(record, mirror)? {
            Deficit::NodeDown(node) => Some(node),
            Deficit::Missing => None,
        }
    }

    /// Whether a node is down.
    pub fn is_down(&self, node: NodeId) -> bool {
        self.down_since.contains_key(&node)
    }

    fn down_for(&self, node: NodeId, now: Timestamp) -> Duration {
        self.down_since.get(&node).map_or(Duration::ZERO, |since| now.at - since.at)
    }

    /// The deficit of a volume, if any. A replica on a down node counts as lacking once it is out
    /// of sync, unless the replica that it replaces still exists.
    fn deficit(&self, record: &VolumeRecord, mirror: &MirrorConfig) -> Option<Deficit> {
        let wanted = usize::from(record.replicas_wanted);
        if record.current_placements().count() < wanted {
            return Some(Deficit::Missing);
        }
        let replaces = |placement: &ReplicaPlacement| {
            let stage = PlacementStage::Removing { replaced_by: Some(placement.node) };
            record.placements.iter().any(|p| p.stage == stage && !self.is_down(p.node))
        };
        let lost = |placement: &&ReplicaPlacement| {
            self.is_down(placement.node)
                && mirror.member(placement.node).is_none()
                && !replaces(placement)
        };
        let first = record.current_placements().find(lost)?.node;
        let left = record.current_placements().filter(|placement| !lost(placement)).count();
        (left < wanted).then_some(Deficit::NodeDown(first))
    }
}

/// What a volume lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deficit {
    /// A replica: it has fewer than wanted.
    Missing,
    /// The replica of this node, which is down.
    NodeDown(NodeId),
}

/// The settings, and the number of running repairs.
#[derive(Clone, Copy, Debug)]
pub struct RepairPolicy {
    /// How long a replica has to be missing; `None` for never.
    pub delay: Option<Duration>,
    /// Most repairs that this node runs at a time.
    pub max_concurrent: usize,
    /// Repairs that it runs now.
    pub running: usize,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepairAction {
    /// Nothing.
    Nothing,
    /// A replica is missing, and no repair starts yet.
    Wait(WaitReason),
    /// Start a repair, which may replace the replica of a down node.
    Start {
        /// The down node.
        replaces: Option<NodeId>,
    },
    /// The new replica is in sync, or an administrator has decided: it becomes an ordinary one.
    Complete,
    /// Give up the new replica.
    Abort {
        /// The node that was to get it.
        node: NodeId,
        /// The reason.
        why: AbortReason,
    },
    /// A replica that returned in sync is surplus: remove it.
    RemoveSurplus(NodeId),
    /// A replica that returned in sync becomes an ordinary one; the other one, whose node is down,
    /// is superseded.
    Reinstate {
        /// The node whose replica returned.
        node: NodeId,
        /// The node whose replica is superseded.
        supersedes: Option<NodeId>,
    },
}

/// Why no repair starts yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// Repairs are disabled.
    Disabled,
    /// The delay has not passed.
    NotDue(Timestamp),
    /// A repair failed, and the next attempt has to wait.
    Backoff {
        /// Until then.
        until: Timestamp,
        /// Why the repair failed.
        why: String,
    },
    /// Too many repairs are running.
    ConcurrencyLimit,
    /// Replicas that are down or being removed use all placements.
    NoFreePlacement,
}

/// Why a new replica is given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// It could not be made.
    Failed(String),
    /// An older one returned in sync before it.
    OriginalInSync(NodeId),
    /// Its node is down.
    NodeDown,
}

/// Decides what to do about the replicas of a volume, on its primary, which serves it.
pub fn decide_repair(
    (record, mirror): (&VolumeRecord, &MirrorConfig),
    history: &RepairHistory,
    policy: RepairPolicy,
    now: Timestamp,
) -> RepairAction {
    if record.stage != VolumeStage::Ready {
        return RepairAction::Nothing;
    }
    if let Some(repair) = &record.repair {
        return running_repair_action((record, mirror), repair, history, policy, now);
    }
    if let Some(node) = back_in_sync(record, mirror) {
        return surplus_action((record, mirror), node, history);
    }
    match history.deficit(record, mirror) {
        None => RepairAction::Nothing,
        Some(deficit) => deficit_action((record, mirror), deficit, history, policy, now),
    }
}

/// A superseded replica that is in sync.
fn back_in_sync(record: &VolumeRecord, mirror: &MirrorConfig) -> Option<NodeId> {
    let is_back = |p: &&ReplicaPlacement| {
        p.stage == PlacementStage::Superseded && mirror.member(p.node).is_some()
    };
    record.placements.iter().find(is_back).map(|placement| placement.node)
}

/// The action while a repair runs.
fn running_repair_action(
    (record, mirror): (&VolumeRecord, &MirrorConfig),
    repair: &PendingRepair,
    history: &RepairHistory,
    policy: RepairPolicy,
    now: Timestamp,
) -> RepairAction {
    let give_up = |why| RepairAction::Abort { node: repair.node, why };
    match record.placement(repair.node).map(|placement| &placement.stage) {
        None | Some(PlacementStage::Removing { .. } | PlacementStage::Superseded) => {
            RepairAction::Complete
        }
        Some(PlacementStage::Failed { reason }) => give_up(AbortReason::Failed(reason.clone())),
        Some(PlacementStage::Creating { .. } | PlacementStage::Ready) => {
            if mirror.member(repair.node).is_some() {
                return RepairAction::Complete;
            }
            if let Some(node) = back_in_sync(record, mirror) {
                return give_up(AbortReason::OriginalInSync(node));
            }
            let down_time = history.down_for(repair.node, now);
            match policy.delay {
                Some(after) if history.is_down(repair.node) && down_time >= after => {
                    give_up(AbortReason::NodeDown)
                }
                _ => RepairAction::Nothing,
            }
        }
    }
}

/// The action when a superseded replica is back in sync. The one that was in sync first stays.
fn surplus_action(
    (record, mirror): (&VolumeRecord, &MirrorConfig),
    node: NodeId,
    history: &RepairHistory,
) -> RepairAction {
    let in_sync = |placement: &&ReplicaPlacement| mirror.member(placement.node).is_some();
    if record.current_placements().filter(in_sync).count() >= usize::from(record.replicas_wanted) {
        return RepairAction::RemoveSurplus(node);
    }
    if record.current_placements().count() < usize::from(record.replicas_wanted) {
        return RepairAction::Reinstate { node, supersedes: None };
    }
    let down_placement = record
        .current_placements()
        .find(|placement| !in_sync(placement) && history.is_down(placement.node));
    // Otherwise the other replicas will be in sync soon, and this one serves until then.
    down_placement.map_or(RepairAction::Nothing, |down_placement| RepairAction::Reinstate {
        node,
        supersedes: Some(down_placement.node),
    })
}

/// The action when a replica is missing.
fn deficit_action(
    (record, mirror): (&VolumeRecord, &MirrorConfig),
    deficit: Deficit,
    history: &RepairHistory,
    policy: RepairPolicy,
    now: Timestamp,
) -> RepairAction {
    let Some(after) = policy.delay else { return RepairAction::Wait(WaitReason::Disabled) };
    let (replaces, since) = match deficit {
        Deficit::Missing => (None, history.short_since.get(&record.id)),
        Deficit::NodeDown(node) => (Some(node), history.down_since.get(&node)),
    };
    let due = since.copied().unwrap_or(now).after(after);
    if now.at < due.at {
        return RepairAction::Wait(WaitReason::NotDue(due));
    }
    if let Some(RepairFailures { times, last, why, .. }) = history.failures.get(&record.id) {
        let pause = BACKOFF_MIN * 2_u32.saturating_pow(times.saturating_sub(1));
        let until = last.after(pause.min(BACKOFF_MAX));
        if now.at < until.at {
            return RepairAction::Wait(WaitReason::Backoff { until, why: why.clone() });
        }
    }
    let failed =
        |placement: &&ReplicaPlacement| matches!(placement.stage, PlacementStage::Failed { .. });
    let placements = record.placements.len() - record.placements.iter().filter(failed).count();
    match () {
        () if placements >= MAX_PLACEMENTS || mirror.replicas.len() >= MAX_REPLICAS => {
            RepairAction::Wait(WaitReason::NoFreePlacement)
        }
        () if policy.running >= policy.max_concurrent => {
            RepairAction::Wait(WaitReason::ConcurrencyLimit)
        }
        () => RepairAction::Start { replaces },
    }
}

/// Adds the new replica `placement` to `record`, in place of the one of a down node. That one is
/// superseded but kept: when its node returns, the data is compared before anything is removed.
pub fn start_repair(
    record: &mut VolumeRecord,
    replaces: Option<NodeId>,
    placement: ReplicaPlacement,
    now: Timestamp,
) {
    let failed =
        record.placements.iter().filter(|p| matches!(p.stage, PlacementStage::Failed { .. }));
    let failed: Vec<_> = failed.map(|p| p.node).collect();
    failed.into_iter().for_each(|node| record.remove_placement(node));
    if let Some(node) = replaces {
        supersede(record, node);
    }
    record.repair = Some(PendingRepair { node: placement.node, replaces, since_s: now.wall_s });
    record.add_placement(placement);
}

/// The replica on `node` counts no more.
fn supersede(record: &mut VolumeRecord, node: NodeId) {
    match record.placement_mut(node) {
        Some(placement) if placement.stage == PlacementStage::Ready => {
            placement.stage = PlacementStage::Superseded;
        }
        // It may have been started: its node has to remove the remains.
        _ => record.mark_for_removal(node),
    }
}

/// The replica on `node` becomes an ordinary one.
fn restore(record: &mut VolumeRecord, node: NodeId) {
    if let Some(placement) =
        record.placement_mut(node).filter(|p| p.stage == PlacementStage::Superseded)
    {
        placement.stage = PlacementStage::Ready;
    }
}

/// Applies `action` to `record`, except for [`start_repair`].
pub fn apply_action(record: &mut VolumeRecord, action: &RepairAction) {
    match action {
        RepairAction::Nothing | RepairAction::Wait(_) | RepairAction::Start { .. } => {}
        RepairAction::Complete => record.repair = None,
        RepairAction::Abort { node, why } => {
            let replaces = record.repair.take().and_then(|repair| repair.replaces);
            record.mark_for_removal(*node);
            let back = match why {
                AbortReason::OriginalInSync(node) => Some(*node),
                AbortReason::Failed(_) | AbortReason::NodeDown => replaces,
            };
            back.into_iter().for_each(|node| restore(record, node));
        }
        RepairAction::RemoveSurplus(node) => record.mark_for_removal(*node),
        RepairAction::Reinstate { node, supersedes } => {
            restore(record, *node);
            supersedes.iter().for_each(|replaced| supersede(record, *replaced));
        }
    }
}

#[cfg(test)]
mod tests {
    use block::Epoch;
    use mirror::config::{ConfigReplica, CopyHistory, InSyncMember};
    use peer::Incarnation;
    use proptest::prelude::*;

    use super::*;
    use records::samples::{place, record};

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);
    const D: NodeId = NodeId(4);
    const HALF_HOUR: u64 = 1800;

    /// A volume, the history of its primary on node a, and a clock that ticks often.
    struct World {
        record: VolumeRecord,
        in_sync: BTreeSet<NodeId>,
        gone: BTreeSet<NodeId>,
        seen: RepairHistory,
        now: Timestamp,
        rule: RepairPolicy,
    }

    impl World {
        /// With two replicas wanted, on nodes a and b.
        fn new() -> Self {
            let mut record = record("v");
            record.placements = vec![place(A, "v"), place(B, "v")];
            record.replicas_wanted = 2;
            let rule = RepairPolicy {
                delay: Some(Duration::from_secs(HALF_HOUR)),
                max_concurrent: 2,
                running: 0,
            };
            Self {
                record,
                in_sync: [A, B].into(),
                gone: BTreeSet::new(),
                seen: RepairHistory::default(),
                now: Timestamp { at: Instant::now(), wall_s: 1_000_000 },
                rule,
            }
        }

        /// Node b has been down for half an hour, and a replica is being made on c.
        fn repairing() -> Self {
            let mut world = Self::new();
            world.lose(B);
            world.pass(HALF_HOUR);
            let action = world.decide();
            assert_eq!(action, RepairAction::Start { replaces: Some(B) });
            world.begin(&action, C);
            world
        }

        fn mirror(&self) -> MirrorConfig {
            let has_image = |p: &&ReplicaPlacement| {
                !matches!(p.stage, PlacementStage::Creating { .. } | PlacementStage::Failed { .. })
            };
            let replica = |p: &ReplicaPlacement| ConfigReplica {
                node: p.node,
                image: Uuid::nil(),
                is_new: false,
            };
            let member = |node: &NodeId| InSyncMember { node: *node, incarnation: Incarnation(1) };
            MirrorConfig {
                epoch: Epoch(1),
                config_id: 1,
                replicas: self.record.placements.iter().filter(has_image).map(replica).collect(),
                in_sync: self.in_sync.iter().map(member).collect(),
                primary: A,
                cold_start_epoch: Epoch::default(),
                history: CopyHistory::default(),
            }
        }

        fn look(&mut self) {
            self.seen.observe_nodes(self.now, Some(&self.gone));
            let mirror = self.mirror();
            self.seen.observe_volume(&self.record, &mirror, self.now);
        }

        fn pass(&mut self, seconds: u64) {
            let mut left = seconds;
            while left > 0 {
                self.look();
                let step = left.min(50);
                self.now = self.now.after(Duration::from_secs(step));
                left -= step;
            }
            self.look();
        }

        fn decide(&mut self) -> RepairAction {
            self.look();
            decide_repair((&self.record, &self.mirror()), &self.seen, self.rule, self.now)
        }

        fn begin(&mut self, action: &RepairAction, node: NodeId) {
            let RepairAction::Start { replaces: instead_of } = action else { panic!("{action:?}") };
            let stage = PlacementStage::Creating { force: false };
            start_repair(
                &mut self.record,
                *instead_of,
                ReplicaPlacement { stage, ..place(node, "v") },
                self.now,
            );
        }

        fn act(&mut self) -> RepairAction {
            let action = self.decide();
            apply_action(&mut self.record, &action);
            action
        }

        /// A node goes down, and the others go on.
        fn lose(&mut self, node: NodeId) {
            self.gone.insert(node);
            self.in_sync.remove(&node);
        }

        fn stage(&self, node: NodeId) -> Option<&PlacementStage> {
            self.record.placement(node).map(|place| &place.stage)
        }

        fn set_stage(&mut self, node: NodeId, stage: PlacementStage) {
            self.record.placement_mut(node).unwrap().stage = stage;
        }

        fn in_sync(&mut self, node: NodeId) {
            self.gone.remove(&node);
            self.in_sync.insert(node);
        }
    }

    fn gives_up(why: AbortReason) -> RepairAction {
        RepairAction::Abort { node: C, why }
    }

    const LEAVING: PlacementStage = PlacementStage::Removing { replaced_by: None };

    #[test]
    fn a_copy_is_made_once_a_node_was_gone_for_the_time_that_is_set() {
        let mut world = World::new();
        assert_eq!(world.decide(), RepairAction::Nothing);
        world.lose(B);
        let due = {
            world.look();
            world.now.after(Duration::from_secs(HALF_HOUR))
        };
        assert_eq!(world.decide(), RepairAction::Wait(WaitReason::NotDue(due)));
        world.pass(HALF_HOUR - 5);
        assert_eq!(world.decide(), RepairAction::Wait(WaitReason::NotDue(due)));
        world.pass(5);
        assert_eq!(world.decide(), RepairAction::Start { replaces: Some(B) });
        world.rule.delay = None;
        assert_eq!(world.decide(), RepairAction::Wait(WaitReason::Disabled));
    }

    #[test]
    fn a_node_that_comes_back_in_time_brings_its_copy_and_the_time_begins_anew() {
        let mut world = World::new();
        world.lose(B);
        world.pass(HALF_HOUR - 5);
        world.gone.remove(&B);
        assert_eq!(world.decide(), RepairAction::Nothing, "it is there, and is brought in sync");
        world.lose(B);
        world.pass(HALF_HOUR - 5);
        assert!(matches!(world.decide(), RepairAction::Wait(WaitReason::NotDue(_))));
    }

    #[test]
    fn what_was_not_watched_has_not_lasted() {
        let mut world = World::new();
        world.lose(B);
        world.pass(HALF_HOUR - 5);
        world.seen.observe_nodes(world.now, None);
        world.pass(HALF_HOUR - 5);
        assert!(
            matches!(world.decide(), RepairAction::Wait(WaitReason::NotDue(_))),
            "the store was away"
        );
        world.now = world.now.after(Duration::from_secs(HALF_HOUR));
        assert!(
            matches!(world.decide(), RepairAction::Wait(WaitReason::NotDue(_))),
            "the node was suspended"
        );
        world.pass(HALF_HOUR);
        assert_eq!(world.decide(), RepairAction::Start { replaces: Some(B) });
    }

    #[test]
    fn a_copy_that_is_in_sync_by_the_record_is_needed_whoever_is_gone() {
        let mut world = World::new();
        world.gone.insert(B);
        world.pass(2 * HALF_HOUR);
        assert_eq!(world.decide(), RepairAction::Nothing);
    }

    #[test]
    fn a_copy_that_was_taken_out_is_missing_since_its_node_was_gone() {
        let mut world = World::new();
        world.lose(B);
        world.pass(HALF_HOUR - 60);
        world.record.remove_placement(B);
        assert!(matches!(world.decide(), RepairAction::Wait(WaitReason::NotDue(_))));
        world.pass(60);
        assert_eq!(world.decide(), RepairAction::Start { replaces: None });
        // A replica that an administrator removed is not missing.
        world.record.lower_replicas_wanted();
        assert_eq!(world.decide(), RepairAction::Nothing);
    }

    #[test]
    fn a_copy_that_could_not_be_made_counts_as_missing_and_makes_room() {
        let mut world = World::new();
        world.in_sync.remove(&B);
        world.set_stage(B, PlacementStage::Failed { reason: "full".into() });
        world.pass(HALF_HOUR);
        let action = world.decide();
        assert_eq!(action, RepairAction::Start { replaces: None });
        world.begin(&action, C);
        assert_eq!((world.stage(B), world.record.placements.len()), (None, 2));
    }

    #[test]
    fn the_new_copy_is_one_like_others_once_it_is_in_sync_and_the_old_one_stays_until_it_is_known()
    {
        let mut world = World::repairing();
        assert_eq!(world.stage(B), Some(&PlacementStage::Superseded));
        assert_eq!(world.record.replicas_wanted, 2);
        assert_eq!(world.decide(), RepairAction::Nothing);
        world.set_stage(C, PlacementStage::Ready);
        assert_eq!(world.decide(), RepairAction::Nothing, "it is brought in sync");
        world.in_sync(C);
        assert_eq!(world.act(), RepairAction::Complete);
        assert_eq!((world.act(), world.record.repair.clone()), (RepairAction::Nothing, None));
        // Its node is back: the data is compared first.
        world.gone.remove(&B);
        world.pass(2 * HALF_HOUR);
        assert_eq!(world.decide(), RepairAction::Nothing);
        world.in_sync(B);
        assert_eq!(world.act(), RepairAction::RemoveSurplus(B));
        assert_eq!(world.stage(B), Some(&LEAVING));
        assert_eq!(world.decide(), RepairAction::Nothing);
    }

    #[test]
    fn a_node_that_is_back_in_sync_before_the_new_copy_keeps_its_own() {
        let mut world = World::repairing();
        world.set_stage(C, PlacementStage::Ready);
        world.gone.remove(&B);
        assert_eq!(world.decide(), RepairAction::Nothing, "nobody knows yet who is first");
        world.in_sync(B);
        assert_eq!(world.act(), gives_up(AbortReason::OriginalInSync(B)));
        assert_eq!(world.stage(B), Some(&PlacementStage::Ready));
        assert_eq!((world.stage(C), world.record.repair.clone()), (Some(&LEAVING), None));
        assert_eq!(world.act(), RepairAction::Nothing);
        // The whole delay passes again before the next repair.
        world.lose(B);
        world.pass(HALF_HOUR - 5);
        assert!(matches!(world.decide(), RepairAction::Wait(WaitReason::NotDue(_))));
    }

    #[test]
    fn both_in_sync_at_once_the_new_one_stays() {
        let mut world = World::repairing();
        world.set_stage(C, PlacementStage::Ready);
        world.in_sync(B);
        world.in_sync(C);
        assert_eq!(world.act(), RepairAction::Complete);
        assert_eq!(world.act(), RepairAction::RemoveSurplus(B));
        assert_eq!(world.act(), RepairAction::Nothing);
    }

    #[test]
    fn a_copy_that_cannot_be_made_is_given_up_and_tried_again_ever_more_rarely() {
        let mut world = World::repairing();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            world.set_stage(C, PlacementStage::Failed { reason: "no space".into() });
            assert_eq!(world.act(), gives_up(AbortReason::Failed("no space".into())));
            assert_eq!((world.stage(C), world.stage(B)), (None, Some(&PlacementStage::Ready)));
            world.seen.record_failure(world.record.id, C, "no space", world.now);
            let RepairAction::Wait(WaitReason::Backoff { until, why }) = world.decide() else {
                panic!()
            };
            assert_eq!(why, "no space");
            pauses.push((until.at - world.now.at).as_secs());
            world.pass(pauses[pauses.len() - 1]);
            let action = world.decide();
            world.begin(&action, C);
        }
        assert_eq!(pauses, [60, 120, 240, 480, 960, 1920, 3600, 3600]);
        assert_eq!(world.seen.failed_nodes(world.record.id), [C].into());
        world.seen.clear_failures(world.record.id);
        assert!(world.seen.failed_nodes(world.record.id).is_empty());
    }

    #[test]
    fn a_new_copy_whose_node_is_gone_is_given_up_for_another_one() {
        let mut world = World::repairing();
        world.set_stage(C, PlacementStage::Ready);
        world.gone.insert(C);
        world.pass(HALF_HOUR - 5);
        assert_eq!(world.decide(), RepairAction::Nothing, "it may come back");
        world.pass(5);
        assert_eq!(world.act(), gives_up(AbortReason::NodeDown));
        assert_eq!(
            (world.stage(B), world.stage(C)),
            (Some(&PlacementStage::Ready), Some(&LEAVING))
        );
        let action = world.decide();
        assert_eq!(action, RepairAction::Start { replaces: Some(B) });
        world.begin(&action, D);
        assert_eq!(world.record.placements.len(), MAX_PLACEMENTS);
    }

    #[test]
    fn a_copy_that_came_back_takes_the_place_of_one_that_is_gone_since() {
        let mut world = World::repairing();
        world.set_stage(C, PlacementStage::Ready);
        world.in_sync(C);
        world.act();
        world.lose(C);
        world.in_sync(B);
        assert_eq!(world.act(), RepairAction::Reinstate { node: B, supersedes: Some(C) });
        assert_eq!(world.stage(B), Some(&PlacementStage::Ready));
        assert_eq!(world.stage(C), Some(&PlacementStage::Superseded));
        world.pass(2 * HALF_HOUR);
        assert_eq!(world.decide(), RepairAction::Nothing, "nothing is missing");
        world.in_sync(C);
        assert_eq!(world.act(), RepairAction::RemoveSurplus(C));
    }

    #[test]
    fn a_copy_that_came_back_stays_while_another_one_is_brought_in_sync_and_is_kept_if_that_is_no_more()
     {
        let mut world = World::repairing();
        world.set_stage(C, PlacementStage::Ready);
        world.in_sync(C);
        world.act();
        world.in_sync.remove(&C);
        world.in_sync(B);
        assert_eq!(world.decide(), RepairAction::Nothing);
        world.record.remove_placement(C);
        assert_eq!(world.act(), RepairAction::Reinstate { node: B, supersedes: None });
        assert_eq!(world.stage(B), Some(&PlacementStage::Ready));
    }

    #[test]
    fn an_administrator_who_removes_the_new_copy_ends_it() {
        let mut world = World::repairing();
        world.set_stage(C, PlacementStage::Ready);
        world.record.mark_for_removal(C);
        assert_eq!(world.act(), RepairAction::Complete);
        assert_eq!(world.record.repair, None);
    }

    #[test]
    fn no_more_are_made_at_once_than_are_allowed_nor_than_there_is_room_for() {
        let mut world = World::new();
        world.lose(B);
        world.pass(HALF_HOUR);
        world.rule.running = 2;
        assert_eq!(world.decide(), RepairAction::Wait(WaitReason::ConcurrencyLimit));
        world.rule.running = 1;
        assert_eq!(world.decide(), RepairAction::Start { replaces: Some(B) });
        for node in [C, D] {
            world.record.add_placement(ReplicaPlacement { stage: LEAVING, ..place(node, "v") });
        }
        assert_eq!(world.decide(), RepairAction::Wait(WaitReason::NoFreePlacement));
    }

    #[test]
    fn a_copy_that_is_being_moved_is_not_missing_while_the_old_one_is_there() {
        let mut world = World::new();
        world
            .record
            .add_placement(ReplicaPlacement { stage: PlacementStage::Ready, ..place(C, "v") });
        world.set_stage(B, PlacementStage::Removing { replaced_by: Some(C) });
        world.gone.insert(C);
        world.pass(2 * HALF_HOUR);
        assert_eq!(world.decide(), RepairAction::Nothing);
        world.lose(B);
        world.pass(5);
        assert_eq!(world.decide(), RepairAction::Start { replaces: Some(C) });
    }

    #[test]
    fn nothing_is_made_of_a_volume_that_is_created_or_deleted() {
        for stage in [VolumeStage::Creating, VolumeStage::Deleting] {
            let mut world = World::new();
            world.lose(B);
            world.record.stage = stage;
            world.pass(HALF_HOUR);
            assert_eq!(world.decide(), RepairAction::Nothing);
        }
    }

    proptest! {
        /// Nodes fail and return and replicas get in sync in any order: no in-sync replica that the
        /// volume needs is removed, and the number of replicas wanted stays.
        #[test]
        fn no_copy_that_is_needed_ever_goes(events in proptest::collection::vec((0_u8..6, 2_u16..6), 1..120)) {
            let mut world = World::new();
            for (event, node) in events {
                let (node, there) = (NodeId(node), world.record.placement(NodeId(node)).cloned());
                match (event, there.map(|place| place.stage)) {
                    (0, _) => world.lose(node),
                    (1, _) => _ = world.gone.remove(&node),
                    (2, Some(PlacementStage::Creating { .. })) if !world.gone.contains(&node) => {
                        world.set_stage(node, PlacementStage::Ready);
                    }
                    (2 | 3, Some(PlacementStage::Ready | PlacementStage::Superseded))
                        if !world.gone.contains(&node) => world.in_sync(node),
                    (3, Some(LEAVING)) if !world.gone.contains(&node) => {
                        world.in_sync.remove(&node);
                        world.record.remove_placement(node);
                    }
                    (4, Some(PlacementStage::Creating { .. })) => {
                        world.set_stage(node, PlacementStage::Failed { reason: "full".into() });
                    }
                    (5, _) => world.pass(HALF_HOUR),
                    _ => {}
                }
                let before = world.record.clone();
                let action = world.act();
                if let RepairAction::Start { .. } = action
                    && let Some(free) = [B, C, D, NodeId(5)].into_iter().find(|n| world.record.placement(*n).is_none())
                {
                    world.begin(&action, free);
                }
                let record = &world.record;
                let is_in_sync = |p: &&ReplicaPlacement| world.in_sync.contains(&p.node);
                let stays = |r: &VolumeRecord| r.current_placements().filter(is_in_sync).count();
                prop_assert_eq!(record.replicas_wanted, 2);
                prop_assert!(record.placements.len() <= MAX_PLACEMENTS);
                prop_assert!(record.current_placements().count() <= 2, "{:?}", record.placements);
                prop_assert!(stays(record) >= stays(&before), "{action:?}: {before:?}");
                for place in before.placements.iter().filter(is_in_sync) {
                    let goes = record.placement(place.node).is_none_or(|p| p.stage == LEAVING);
                    let went = place.stage == LEAVING;
                    prop_assert!(!goes || went || stays(record) >= 2, "{action:?}: {before:?}");
                }
            }
        }
    }
}

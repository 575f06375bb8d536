//! When the cluster makes a copy of a volume in place of one that is missing, and what becomes of both: a pure function of
//! the volume's records, of which nodes have been gone since when, and of time (RFD 0039, 2.4).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mirror::record::{MAX_REPLICAS, Record};
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use crate::record::{MAX_PLACES, Place, PlaceStage, Repair, Stage, VolumeRecord};

/// Longest time between two looks for what both have seen to have been so in between.
const WATCHED: Duration = Duration::from_secs(60);

/// Pause after a copy could not be made, and the longest after several times.
const PAUSE_FIRST: Duration = Duration::from_secs(60);
const PAUSE_AT_MOST: Duration = Duration::from_secs(3600);

/// A moment: by the clock that only goes forward, and as people write it, in seconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) at: Instant,
    pub(super) wall_s: u64,
}

impl Moment {
    fn plus(self, time: Duration) -> Self {
        Self { at: self.at + time, wall_s: self.wall_s.saturating_add(time.as_secs()) }
    }
}

/// Copies of a volume that could not be made.
#[derive(Clone, Debug)]
struct Failures {
    times: u32,
    last: Moment,
    nodes: BTreeSet<NodeId>,
    why: String,
}

/// What one node has seen of all, and since when. It is in memory alone: a node that has just started has seen nothing.
#[derive(Debug, Default)]
pub(super) struct Seen {
    looked: Option<Instant>,
    gone: BTreeMap<NodeId, Moment>,
    lacking: BTreeMap<Uuid, Moment>,
    failures: BTreeMap<Uuid, Failures>,
}

impl Seen {
    /// Notes which nodes are gone now; `None` if the store does not say. What was not watched has not lasted.
    pub(super) fn look(&mut self, now: Moment, gone: Option<&BTreeSet<NodeId>>) {
        let watched = self.looked.is_some_and(|before| now.at - before <= WATCHED);
        let Some(gone) = gone.filter(|_| watched || self.looked.is_none()) else {
            // It begins anew, now or when the store answers.
            let looked = gone.map(|_| now.at);
            let failures = std::mem::take(&mut self.failures);
            *self = Self { looked, failures, ..Self::default() };
            gone.into_iter().flatten().for_each(|node| _ = self.gone.insert(*node, now));
            return;
        };
        self.looked = Some(now.at);
        self.gone.retain(|node, _| gone.contains(node));
        gone.iter().for_each(|node| _ = self.gone.entry(*node).or_insert(now));
    }

    /// Notes whether a volume lacks a copy.
    pub(super) fn note(&mut self, record: &VolumeRecord, mirror: &Record, now: Moment) {
        match self.lack(record, mirror) {
            Some(_) => _ = self.lacking.entry(record.id).or_insert(now),
            None => _ = self.lacking.remove(&record.id),
        }
    }

    /// Forgets volumes that are no more.
    pub(super) fn keep(&mut self, volumes: &BTreeSet<Uuid>) {
        self.lacking.retain(|id, _| volumes.contains(id));
        self.failures.retain(|id, _| volumes.contains(id));
    }

    /// A copy could not be made there.
    pub(super) fn failed(&mut self, volume: Uuid, node: NodeId, why: &str, now: Moment) {
        let (nodes, why) = (BTreeSet::new(), why.to_owned());
        let new = Failures { times: 0, last: now, nodes, why: why.clone() };
        let failures = self.failures.entry(volume).or_insert(new);
        failures.nodes.insert(node);
        *failures = Failures { times: failures.times + 1, last: now, why, ..failures.clone() };
    }

    /// A volume has all its copies: what has failed before is over.
    pub(super) fn succeeded(&mut self, volume: Uuid) {
        self.failures.remove(&volume);
    }

    /// Nodes that could not make a copy of a volume.
    pub(super) fn failed_at(&self, volume: Uuid) -> BTreeSet<NodeId> {
        self.failures.get(&volume).map(|f| f.nodes.clone()).unwrap_or_default()
    }

    /// The node that is gone with the copy which a volume lacks, if that is why.
    pub(super) fn instead_of(&self, record: &VolumeRecord, mirror: &Record) -> Option<NodeId> {
        match self.lack(record, mirror)? {
            Lack::Gone(node) => Some(node),
            Lack::Missing => None,
        }
    }

    /// Whether a node is gone.
    pub(super) fn is_gone(&self, node: NodeId) -> bool {
        self.gone.contains_key(&node)
    }

    fn gone_for(&self, node: NodeId, now: Moment) -> Duration {
        self.gone.get(&node).map_or(Duration::ZERO, |since| now.at - since.at)
    }

    /// The copy that a volume lacks, if it does. One whose node is gone counts as lacking once the others go on without
    /// it, unless the one that it replaces is still there.
    fn lack(&self, record: &VolumeRecord, mirror: &Record) -> Option<Lack> {
        let wanted = usize::from(record.copies_wanted);
        if record.standing().count() < wanted {
            return Some(Lack::Missing);
        }
        let replaces = |place: &Place| {
            let stage = PlaceStage::Leaving { instead_of: Some(place.node) };
            record.places.iter().any(|p| p.stage == stage && !self.is_gone(p.node))
        };
        let lost = |place: &&Place| {
            self.is_gone(place.node) && mirror.member(place.node).is_none() && !replaces(place)
        };
        let first = record.standing().find(lost)?.node;
        let left = record.standing().filter(|place| !lost(place)).count();
        (left < wanted).then_some(Lack::Gone(first))
    }
}

/// What a volume lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lack {
    /// A copy: it has fewer than it is to have.
    Missing,
    /// The copy of this node, which is gone.
    Gone(NodeId),
}

/// What the administrator has set, and what is going on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    /// How long a copy has to be missing; `None` for never.
    pub(super) after: Option<Duration>,
    /// Copies that this node has made at a time, at most, and those that it has made now.
    pub(super) most: usize,
    pub(super) running: usize,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing.
    Rest,
    /// A copy is missing, and none is made yet.
    Wait(Wait),
    /// Have a copy made, in place of the one of a node that is gone.
    Begin { instead_of: Option<NodeId> },
    /// The new copy is in sync, or somebody else has decided about it: it is one like others.
    Complete,
    /// The new copy is not to be.
    GiveUp { node: NodeId, why: GivenUp },
    /// A copy that came back in sync is one too many: it goes.
    Retire(NodeId),
    /// A copy that came back in sync is one like others again; the other one, whose node is gone, is not.
    Reinstate { node: NodeId, instead_of: Option<NodeId> },
}

/// Why no copy is made yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// It is not to be.
    Off,
    /// The time is not up.
    Until(Moment),
    /// A copy could not be made, and another attempt has to wait.
    Paused { until: Moment, why: String },
    /// Too many others are being made.
    ForOthers,
    /// Copies that are gone or to go have taken all places.
    Full,
}

/// Why a new copy is not to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GivenUp {
    /// It could not be made.
    Failed(String),
    /// An old one has come back in sync before it.
    Returned(NodeId),
    /// Its node is gone.
    Gone,
}

/// What is to be done about the copies of the volume of `record`, by its primary, which serves it.
pub(super) fn decide(
    (record, mirror): (&VolumeRecord, &Record),
    seen: &Seen,
    rule: Rule,
    now: Moment,
) -> Action {
    if record.stage != Stage::Ready {
        return Action::Rest;
    }
    if let Some(repair) = &record.repair {
        return running((record, mirror), repair, seen, rule, now);
    }
    if let Some(node) = back_in_sync(record, mirror) {
        return superseded((record, mirror), node, seen);
    }
    match seen.lack(record, mirror) {
        None => Action::Rest,
        Some(lack) => lacking((record, mirror), lack, seen, rule, now),
    }
}

/// A copy whose place another one has taken, and which is in sync.
fn back_in_sync(record: &VolumeRecord, mirror: &Record) -> Option<NodeId> {
    let is_back = |p: &&Place| p.stage == PlaceStage::Superseded && mirror.member(p.node).is_some();
    record.places.iter().find(is_back).map(|place| place.node)
}

/// A copy is being made.
fn running(
    (record, mirror): (&VolumeRecord, &Record),
    repair: &Repair,
    seen: &Seen,
    rule: Rule,
    now: Moment,
) -> Action {
    let give_up = |why| Action::GiveUp { node: repair.node, why };
    match record.place(repair.node).map(|place| &place.stage) {
        None | Some(PlaceStage::Leaving { .. } | PlaceStage::Superseded) => Action::Complete,
        Some(PlaceStage::Failed { reason }) => give_up(GivenUp::Failed(reason.clone())),
        Some(PlaceStage::Wanted { .. } | PlaceStage::Made) => {
            if mirror.member(repair.node).is_some() {
                return Action::Complete;
            }
            if let Some(node) = back_in_sync(record, mirror) {
                return give_up(GivenUp::Returned(node));
            }
            let gone = seen.gone_for(repair.node, now);
            match rule.after {
                Some(after) if seen.is_gone(repair.node) && gone >= after => give_up(GivenUp::Gone),
                _ => Action::Rest,
            }
        }
    }
}

/// A copy whose place another one has taken is back in sync. Whichever was in sync first stays.
fn superseded((record, mirror): (&VolumeRecord, &Record), node: NodeId, seen: &Seen) -> Action {
    let in_sync = |place: &&Place| mirror.member(place.node).is_some();
    if record.standing().filter(in_sync).count() >= usize::from(record.copies_wanted) {
        return Action::Retire(node);
    }
    if record.standing().count() < usize::from(record.copies_wanted) {
        return Action::Reinstate { node, instead_of: None };
    }
    let gone = record.standing().find(|place| !in_sync(place) && seen.is_gone(place.node));
    // Otherwise the others are about to come in sync, and it serves until then.
    gone.map_or(Action::Rest, |gone| Action::Reinstate { node, instead_of: Some(gone.node) })
}

/// A copy is missing.
fn lacking(
    (record, mirror): (&VolumeRecord, &Record),
    lack: Lack,
    seen: &Seen,
    rule: Rule,
    now: Moment,
) -> Action {
    let Some(after) = rule.after else { return Action::Wait(Wait::Off) };
    let (instead_of, since) = match lack {
        Lack::Missing => (None, seen.lacking.get(&record.id)),
        Lack::Gone(node) => (Some(node), seen.gone.get(&node)),
    };
    let due = since.copied().unwrap_or(now).plus(after);
    if now.at < due.at {
        return Action::Wait(Wait::Until(due));
    }
    if let Some(Failures { times, last, why, .. }) = seen.failures.get(&record.id) {
        let pause = PAUSE_FIRST * 2_u32.saturating_pow(times.saturating_sub(1));
        let until = last.plus(pause.min(PAUSE_AT_MOST));
        if now.at < until.at {
            return Action::Wait(Wait::Paused { until, why: why.clone() });
        }
    }
    let failed = |place: &&Place| matches!(place.stage, PlaceStage::Failed { .. });
    let places = record.places.len() - record.places.iter().filter(failed).count();
    match () {
        () if places >= MAX_PLACES || mirror.replicas.len() >= MAX_REPLICAS => {
            Action::Wait(Wait::Full)
        }
        () if rule.running >= rule.most => Action::Wait(Wait::ForOthers),
        () => Action::Begin { instead_of },
    }
}

/// Has `record` say that the copy `place` is made, in place of the one of a node that is gone. That one stays where it is:
/// when its node is back, what it holds is compared before anything becomes of it.
pub(super) fn begin(
    record: &mut VolumeRecord,
    instead_of: Option<NodeId>,
    place: Place,
    now: Moment,
) {
    let failed = record.places.iter().filter(|p| matches!(p.stage, PlaceStage::Failed { .. }));
    let failed: Vec<_> = failed.map(|p| p.node).collect();
    failed.into_iter().for_each(|node| record.remove_place(node));
    if let Some(node) = instead_of {
        supersede(record, node);
    }
    record.repair = Some(Repair { node: place.node, instead_of, since_s: now.wall_s });
    record.add_place(place);
}

/// The copy on `node` is none of those that count any more.
fn supersede(record: &mut VolumeRecord, node: NodeId) {
    match record.place_mut(node) {
        Some(place) if place.stage == PlaceStage::Made => place.stage = PlaceStage::Superseded,
        // It may have been begun: its node is to clear that away.
        _ => record.dismiss(node),
    }
}

/// The copy on `node` is one like others.
fn restore(record: &mut VolumeRecord, node: NodeId) {
    if let Some(place) = record.place_mut(node).filter(|p| p.stage == PlaceStage::Superseded) {
        place.stage = PlaceStage::Made;
    }
}

/// Has `record` say what `action` is to come of it. What is begun is [`begin`]'s.
pub(super) fn apply(record: &mut VolumeRecord, action: &Action) {
    match action {
        Action::Rest | Action::Wait(_) | Action::Begin { .. } => {}
        Action::Complete => record.repair = None,
        Action::GiveUp { node, why } => {
            let instead_of = record.repair.take().and_then(|repair| repair.instead_of);
            record.dismiss(*node);
            let back = match why {
                GivenUp::Returned(node) => Some(*node),
                GivenUp::Failed(_) | GivenUp::Gone => instead_of,
            };
            back.into_iter().for_each(|node| restore(record, node));
        }
        Action::Retire(node) => record.dismiss(*node),
        Action::Reinstate { node, instead_of } => {
            restore(record, *node);
            instead_of.iter().for_each(|gone| supersede(record, *gone));
        }
    }
}

#[cfg(test)]
mod tests {
    use block::Epoch;
    use mirror::record::{History, Member, Replica};
    use peer::Incarnation;
    use proptest::prelude::*;

    use super::*;
    use crate::record::tests::{place, record};

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);
    const D: NodeId = NodeId(4);
    const HALF_HOUR: u64 = 1800;

    /// A volume, what its primary on node a has seen, and a clock. It is looked at often.
    struct World {
        record: VolumeRecord,
        in_sync: BTreeSet<NodeId>,
        gone: BTreeSet<NodeId>,
        seen: Seen,
        now: Moment,
        rule: Rule,
    }

    impl World {
        /// Of two copies that are to be, on nodes a and b.
        fn new() -> Self {
            let mut record = record("v");
            record.places = vec![place(A, "v"), place(B, "v")];
            record.copies_wanted = 2;
            let rule = Rule { after: Some(Duration::from_secs(HALF_HOUR)), most: 2, running: 0 };
            Self {
                record,
                in_sync: [A, B].into(),
                gone: BTreeSet::new(),
                seen: Seen::default(),
                now: Moment { at: Instant::now(), wall_s: 1_000_000 },
                rule,
            }
        }

        /// Node b has been gone for half an hour, and a copy is made on c.
        fn repairing() -> Self {
            let mut world = Self::new();
            world.lose(B);
            world.pass(HALF_HOUR);
            let action = world.decide();
            assert_eq!(action, Action::Begin { instead_of: Some(B) });
            world.begin(&action, C);
            world
        }

        fn mirror(&self) -> Record {
            let has_image = |p: &&Place| {
                !matches!(p.stage, PlaceStage::Wanted { .. } | PlaceStage::Failed { .. })
            };
            let replica = |p: &Place| Replica { node: p.node, image: Uuid::nil(), new: false };
            let member = |node: &NodeId| Member { node: *node, incarnation: Incarnation(1) };
            Record {
                epoch: Epoch(1),
                config: 1,
                replicas: self.record.places.iter().filter(has_image).map(replica).collect(),
                in_sync: self.in_sync.iter().map(member).collect(),
                primary: A,
                born: Epoch::default(),
                history: History::default(),
            }
        }

        fn look(&mut self) {
            self.seen.look(self.now, Some(&self.gone));
            let mirror = self.mirror();
            self.seen.note(&self.record, &mirror, self.now);
        }

        fn pass(&mut self, seconds: u64) {
            let mut left = seconds;
            while left > 0 {
                self.look();
                let step = left.min(50);
                self.now = self.now.plus(Duration::from_secs(step));
                left -= step;
            }
            self.look();
        }

        fn decide(&mut self) -> Action {
            self.look();
            decide((&self.record, &self.mirror()), &self.seen, self.rule, self.now)
        }

        fn begin(&mut self, action: &Action, node: NodeId) {
            let Action::Begin { instead_of } = action else { panic!("{action:?}") };
            let stage = PlaceStage::Wanted { force: false };
            begin(&mut self.record, *instead_of, Place { stage, ..place(node, "v") }, self.now);
        }

        fn act(&mut self) -> Action {
            let action = self.decide();
            apply(&mut self.record, &action);
            action
        }

        /// A node is gone, and the others go on.
        fn lose(&mut self, node: NodeId) {
            self.gone.insert(node);
            self.in_sync.remove(&node);
        }

        fn stage(&self, node: NodeId) -> Option<&PlaceStage> {
            self.record.place(node).map(|place| &place.stage)
        }

        fn set_stage(&mut self, node: NodeId, stage: PlaceStage) {
            self.record.place_mut(node).unwrap().stage = stage;
        }

        fn in_sync(&mut self, node: NodeId) {
            self.gone.remove(&node);
            self.in_sync.insert(node);
        }
    }

    fn gives_up(why: GivenUp) -> Action {
        Action::GiveUp { node: C, why }
    }

    const LEAVING: PlaceStage = PlaceStage::Leaving { instead_of: None };

    #[test]
    fn a_copy_is_made_once_a_node_was_gone_for_the_time_that_is_set() {
        let mut world = World::new();
        assert_eq!(world.decide(), Action::Rest);
        world.lose(B);
        let due = {
            world.look();
            world.now.plus(Duration::from_secs(HALF_HOUR))
        };
        assert_eq!(world.decide(), Action::Wait(Wait::Until(due)));
        world.pass(HALF_HOUR - 5);
        assert_eq!(world.decide(), Action::Wait(Wait::Until(due)));
        world.pass(5);
        assert_eq!(world.decide(), Action::Begin { instead_of: Some(B) });
        world.rule.after = None;
        assert_eq!(world.decide(), Action::Wait(Wait::Off));
    }

    #[test]
    fn a_node_that_comes_back_in_time_brings_its_copy_and_the_time_begins_anew() {
        let mut world = World::new();
        world.lose(B);
        world.pass(HALF_HOUR - 5);
        world.gone.remove(&B);
        assert_eq!(world.decide(), Action::Rest, "it is there, and is brought in sync");
        world.lose(B);
        world.pass(HALF_HOUR - 5);
        assert!(matches!(world.decide(), Action::Wait(Wait::Until(_))));
    }

    #[test]
    fn what_was_not_watched_has_not_lasted() {
        let mut world = World::new();
        world.lose(B);
        world.pass(HALF_HOUR - 5);
        world.seen.look(world.now, None);
        world.pass(HALF_HOUR - 5);
        assert!(matches!(world.decide(), Action::Wait(Wait::Until(_))), "the store was away");
        world.now = world.now.plus(Duration::from_secs(HALF_HOUR));
        assert!(matches!(world.decide(), Action::Wait(Wait::Until(_))), "the node was suspended");
        world.pass(HALF_HOUR);
        assert_eq!(world.decide(), Action::Begin { instead_of: Some(B) });
    }

    #[test]
    fn a_copy_that_is_in_sync_by_the_record_is_needed_whoever_is_gone() {
        let mut world = World::new();
        world.gone.insert(B);
        world.pass(2 * HALF_HOUR);
        assert_eq!(world.decide(), Action::Rest);
    }

    #[test]
    fn a_copy_that_was_taken_out_is_missing_since_its_node_was_gone() {
        let mut world = World::new();
        world.lose(B);
        world.pass(HALF_HOUR - 60);
        world.record.remove_place(B);
        assert!(matches!(world.decide(), Action::Wait(Wait::Until(_))));
        world.pass(60);
        assert_eq!(world.decide(), Action::Begin { instead_of: None });
        // What an administrator has removed is not missing.
        world.record.want_as_removed();
        assert_eq!(world.decide(), Action::Rest);
    }

    #[test]
    fn a_copy_that_could_not_be_made_counts_as_missing_and_makes_room() {
        let mut world = World::new();
        world.in_sync.remove(&B);
        world.set_stage(B, PlaceStage::Failed { reason: "full".into() });
        world.pass(HALF_HOUR);
        let action = world.decide();
        assert_eq!(action, Action::Begin { instead_of: None });
        world.begin(&action, C);
        assert_eq!((world.stage(B), world.record.places.len()), (None, 2));
    }

    #[test]
    fn the_new_copy_is_one_like_others_once_it_is_in_sync_and_the_old_one_stays_until_it_is_known()
    {
        let mut world = World::repairing();
        assert_eq!(world.stage(B), Some(&PlaceStage::Superseded));
        assert_eq!(world.record.copies_wanted, 2);
        assert_eq!(world.decide(), Action::Rest);
        world.set_stage(C, PlaceStage::Made);
        assert_eq!(world.decide(), Action::Rest, "it is brought in sync");
        world.in_sync(C);
        assert_eq!(world.act(), Action::Complete);
        assert_eq!((world.act(), world.record.repair.clone()), (Action::Rest, None));
        // Its node is back: what it holds is compared first.
        world.gone.remove(&B);
        world.pass(2 * HALF_HOUR);
        assert_eq!(world.decide(), Action::Rest);
        world.in_sync(B);
        assert_eq!(world.act(), Action::Retire(B));
        assert_eq!(world.stage(B), Some(&LEAVING));
        assert_eq!(world.decide(), Action::Rest);
    }

    #[test]
    fn a_node_that_is_back_in_sync_before_the_new_copy_keeps_its_own() {
        let mut world = World::repairing();
        world.set_stage(C, PlaceStage::Made);
        world.gone.remove(&B);
        assert_eq!(world.decide(), Action::Rest, "nobody knows yet who is first");
        world.in_sync(B);
        assert_eq!(world.act(), gives_up(GivenUp::Returned(B)));
        assert_eq!(world.stage(B), Some(&PlaceStage::Made));
        assert_eq!((world.stage(C), world.record.repair.clone()), (Some(&LEAVING), None));
        assert_eq!(world.act(), Action::Rest);
        // It takes the whole time until there is another one.
        world.lose(B);
        world.pass(HALF_HOUR - 5);
        assert!(matches!(world.decide(), Action::Wait(Wait::Until(_))));
    }

    #[test]
    fn both_in_sync_at_once_the_new_one_stays() {
        let mut world = World::repairing();
        world.set_stage(C, PlaceStage::Made);
        world.in_sync(B);
        world.in_sync(C);
        assert_eq!(world.act(), Action::Complete);
        assert_eq!(world.act(), Action::Retire(B));
        assert_eq!(world.act(), Action::Rest);
    }

    #[test]
    fn a_copy_that_cannot_be_made_is_given_up_and_tried_again_ever_more_rarely() {
        let mut world = World::repairing();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            world.set_stage(C, PlaceStage::Failed { reason: "no space".into() });
            assert_eq!(world.act(), gives_up(GivenUp::Failed("no space".into())));
            assert_eq!((world.stage(C), world.stage(B)), (None, Some(&PlaceStage::Made)));
            world.seen.failed(world.record.id, C, "no space", world.now);
            let Action::Wait(Wait::Paused { until, why }) = world.decide() else { panic!() };
            assert_eq!(why, "no space");
            pauses.push((until.at - world.now.at).as_secs());
            world.pass(pauses[pauses.len() - 1]);
            let action = world.decide();
            world.begin(&action, C);
        }
        assert_eq!(pauses, [60, 120, 240, 480, 960, 1920, 3600, 3600]);
        assert_eq!(world.seen.failed_at(world.record.id), [C].into());
        world.seen.succeeded(world.record.id);
        assert!(world.seen.failed_at(world.record.id).is_empty());
    }

    #[test]
    fn a_new_copy_whose_node_is_gone_is_given_up_for_another_one() {
        let mut world = World::repairing();
        world.set_stage(C, PlaceStage::Made);
        world.gone.insert(C);
        world.pass(HALF_HOUR - 5);
        assert_eq!(world.decide(), Action::Rest, "it may come back");
        world.pass(5);
        assert_eq!(world.act(), gives_up(GivenUp::Gone));
        assert_eq!((world.stage(B), world.stage(C)), (Some(&PlaceStage::Made), Some(&LEAVING)));
        let action = world.decide();
        assert_eq!(action, Action::Begin { instead_of: Some(B) });
        world.begin(&action, D);
        assert_eq!(world.record.places.len(), MAX_PLACES);
    }

    #[test]
    fn a_copy_that_came_back_takes_the_place_of_one_that_is_gone_since() {
        let mut world = World::repairing();
        world.set_stage(C, PlaceStage::Made);
        world.in_sync(C);
        world.act();
        world.lose(C);
        world.in_sync(B);
        assert_eq!(world.act(), Action::Reinstate { node: B, instead_of: Some(C) });
        assert_eq!(world.stage(B), Some(&PlaceStage::Made));
        assert_eq!(world.stage(C), Some(&PlaceStage::Superseded));
        world.pass(2 * HALF_HOUR);
        assert_eq!(world.decide(), Action::Rest, "nothing is missing");
        world.in_sync(C);
        assert_eq!(world.act(), Action::Retire(C));
    }

    #[test]
    fn a_copy_that_came_back_stays_while_another_one_is_brought_in_sync_and_is_kept_if_that_is_no_more()
     {
        let mut world = World::repairing();
        world.set_stage(C, PlaceStage::Made);
        world.in_sync(C);
        world.act();
        world.in_sync.remove(&C);
        world.in_sync(B);
        assert_eq!(world.decide(), Action::Rest);
        world.record.remove_place(C);
        assert_eq!(world.act(), Action::Reinstate { node: B, instead_of: None });
        assert_eq!(world.stage(B), Some(&PlaceStage::Made));
    }

    #[test]
    fn an_administrator_who_removes_the_new_copy_ends_it() {
        let mut world = World::repairing();
        world.set_stage(C, PlaceStage::Made);
        world.record.dismiss(C);
        assert_eq!(world.act(), Action::Complete);
        assert_eq!(world.record.repair, None);
    }

    #[test]
    fn no_more_are_made_at_once_than_are_allowed_nor_than_there_is_room_for() {
        let mut world = World::new();
        world.lose(B);
        world.pass(HALF_HOUR);
        world.rule.running = 2;
        assert_eq!(world.decide(), Action::Wait(Wait::ForOthers));
        world.rule.running = 1;
        assert_eq!(world.decide(), Action::Begin { instead_of: Some(B) });
        for node in [C, D] {
            world.record.add_place(Place { stage: LEAVING, ..place(node, "v") });
        }
        assert_eq!(world.decide(), Action::Wait(Wait::Full));
    }

    #[test]
    fn a_copy_that_is_being_moved_is_not_missing_while_the_old_one_is_there() {
        let mut world = World::new();
        world.record.add_place(Place { stage: PlaceStage::Made, ..place(C, "v") });
        world.set_stage(B, PlaceStage::Leaving { instead_of: Some(C) });
        world.gone.insert(C);
        world.pass(2 * HALF_HOUR);
        assert_eq!(world.decide(), Action::Rest);
        world.lose(B);
        world.pass(5);
        assert_eq!(world.decide(), Action::Begin { instead_of: Some(C) });
    }

    #[test]
    fn nothing_is_made_of_a_volume_that_is_created_or_deleted() {
        for stage in [Stage::Creating, Stage::Deleting] {
            let mut world = World::new();
            world.lose(B);
            world.record.stage = stage;
            world.pass(HALF_HOUR);
            assert_eq!(world.decide(), Action::Rest);
        }
    }

    proptest! {
        /// Nodes come and go and copies come in sync in any order: no copy in sync goes that the volume needs, and it
        /// never wants another number of copies.
        #[test]
        fn no_copy_that_is_needed_ever_goes(events in proptest::collection::vec((0_u8..6, 2_u16..6), 1..120)) {
            let mut world = World::new();
            for (event, node) in events {
                let (node, there) = (NodeId(node), world.record.place(NodeId(node)).cloned());
                match (event, there.map(|place| place.stage)) {
                    (0, _) => world.lose(node),
                    (1, _) => _ = world.gone.remove(&node),
                    (2, Some(PlaceStage::Wanted { .. })) if !world.gone.contains(&node) => {
                        world.set_stage(node, PlaceStage::Made);
                    }
                    (2 | 3, Some(PlaceStage::Made | PlaceStage::Superseded))
                        if !world.gone.contains(&node) => world.in_sync(node),
                    (3, Some(LEAVING)) if !world.gone.contains(&node) => {
                        world.in_sync.remove(&node);
                        world.record.remove_place(node);
                    }
                    (4, Some(PlaceStage::Wanted { .. })) => {
                        world.set_stage(node, PlaceStage::Failed { reason: "full".into() });
                    }
                    (5, _) => world.pass(HALF_HOUR),
                    _ => {}
                }
                let before = world.record.clone();
                let action = world.act();
                if let Action::Begin { .. } = action
                    && let Some(free) = [B, C, D, NodeId(5)].into_iter().find(|n| world.record.place(*n).is_none())
                {
                    world.begin(&action, free);
                }
                let record = &world.record;
                let is_in_sync = |p: &&Place| world.in_sync.contains(&p.node);
                let stays = |r: &VolumeRecord| r.standing().filter(is_in_sync).count();
                prop_assert_eq!(record.copies_wanted, 2);
                prop_assert!(record.places.len() <= MAX_PLACES);
                prop_assert!(record.standing().count() <= 2, "{:?}", record.places);
                prop_assert!(stays(record) >= stays(&before), "{action:?}: {before:?}");
                for place in before.places.iter().filter(is_in_sync) {
                    let goes = record.place(place.node).is_none_or(|p| p.stage == LEAVING);
                    let went = place.stage == LEAVING;
                    prop_assert!(!goes || went || stays(record) >= 2, "{action:?}: {before:?}");
                }
            }
        }
    }
}

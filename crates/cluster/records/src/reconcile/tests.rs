//! Explores all states with crashes: volumes must reach the desired state.

use std::collections::BTreeMap;

use block::Epoch;
use mirror::config::{ConfigReplica, CopyHistory, InSyncMember};
use peer::Incarnation;
use uuid::Uuid;

use super::*;
use crate::record::FIRST_NODE;
use crate::samples::{place, record};

const OTHER: NodeId = NodeId(2);
const THIRD: NodeId = NodeId(3);

fn life(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

/// A node: its observed state, and its disk.
#[derive(Clone, Debug, Default)]
struct Node {
    life: u128,
    observed: Observed,
    image: Option<ImageInfo>,
    /// Whether creating an image fails here.
    full: bool,
    /// It has left the mirror and does not rejoin.
    stays_out: bool,
}

/// Nodes and a store. Steps take effect at once, and replicas come in sync as soon as they can.
#[derive(Clone, Debug)]
struct World {
    stored: Option<StoredVolumeRecord>,
    mirror: Option<MirrorConfig>,
    /// Whether the nodes form a cluster.
    clustered: bool,
    nodes: BTreeMap<NodeId, Node>,
    images: u128,
}

impl World {
    fn new(record: VolumeRecord, clustered: bool) -> Self {
        let ids = if clustered { vec![FIRST_NODE, OTHER, THIRD] } else { vec![FIRST_NODE] };
        Self {
            stored: Some(StoredVolumeRecord { record, revision: Revision(1) }),
            mirror: None,
            clustered,
            nodes: ids.into_iter().map(|id| (id, Node { life: 1, ..Node::default() })).collect(),
            images: 100,
        }
    }

    fn mirroring(&self) -> MirrorState<'_> {
        match &self.mirror {
            _ if !self.clustered => MirrorState::Standalone,
            None => MirrorState::Absent,
            Some(record) => MirrorState::Present(record, Revision(record.epoch.0)),
        }
    }

    fn next(&self, id: NodeId) -> Step {
        let node = &self.nodes[&id];
        let me = NodeProcess { node: id, process: life(node.life) };
        next_step(self.stored.as_ref(), self.mirroring(), me, &node.observed)
    }

    fn node(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(&id).unwrap()
    }

    fn record(&mut self) -> &mut VolumeRecord {
        let stored = self.stored.as_mut().unwrap();
        stored.revision.0 += 1;
        &mut stored.record
    }

    fn place(&mut self, id: NodeId) -> &mut ReplicaPlacement {
        self.record().placement_mut(id).unwrap()
    }

    fn put_mirror(&mut self, next: MirrorConfig) {
        assert_eq!(next.epoch.0, self.mirror.as_ref().map_or(0, |m| m.epoch.0) + 1);
        self.mirror = Some(next);
    }

    fn take(&mut self, id: NodeId, step: Step) {
        match step {
            Step::Idle => {}
            Step::CreateImage => self.make(id),
            Step::MarkReady => self.finish(),
            Step::AbortCreation => self.record().stage = VolumeStage::Deleting,
            Step::InspectImage => {
                let image = self.node(id).image;
                match image {
                    Some(image) => self.record().record_image(id, image),
                    None => self.node(id).observed = Observed::OpenFailed { reason: "gone".into() },
                }
            }
            Step::CreateMirror => {
                let image = self.place(id).image.unwrap();
                self.put_mirror(mirror(1, &[(id, image)], &[id]));
            }
            Step::AddToMirror => {
                let image = self.place(id).image.unwrap();
                let next = self.mirror.as_ref().unwrap().with_replica(id, image, 1).unwrap();
                self.put_mirror(next);
            }
            Step::LeaveMirror => self.leave(id),
            Step::RemoveFromMirror => {
                let next = self.mirror.as_ref().unwrap().without_replica(id, 1).unwrap();
                self.put_mirror(next);
            }
            Step::Open => {
                let node = self.node(id);
                node.stays_out = false;
                node.observed = match node.image {
                    Some(image) => Observed::Open { core: 0, image, published: None },
                    None => Observed::OpenFailed { reason: "no file".into() },
                };
            }
            Step::Publish => {
                let at = (self.stored.as_ref().unwrap().revision, self.mirroring().revision());
                if let Observed::Open { published, .. } = &mut self.node(id).observed {
                    *published = Some(at);
                }
            }
            Step::RecordImage(image) => self.record().record_image(id, image),
            Step::Close => self.node(id).observed = Observed::Closed,
            Step::Erase => {
                self.node(id).image = None;
                self.node(id).observed = Observed::Erased;
            }
            Step::RemovePlacement => {
                self.record().placements.retain(|p| p.node != id);
                self.node(id).observed = Observed::Closed;
            }
            Step::RemoveRecord => {
                self.stored = None;
                self.mirror = None;
            }
        }
    }

    fn make(&mut self, id: NodeId) {
        self.node(id).observed = Observed::Closed;
        if self.node(id).full {
            self.place(id).stage = PlacementStage::Failed { reason: "full".into() };
            return;
        }
        self.images += 1;
        let size_bytes = self.stored.as_ref().unwrap().record.size_bytes;
        let image = ImageInfo { id: Uuid::from_u128(self.images), size_bytes, generation: 2 };
        self.node(id).image = Some(image);
        self.record().record_image(id, image);
        self.place(id).stage = PlacementStage::Ready;
    }

    fn finish(&mut self) {
        let record = self.record();
        (record.stage, record.creator) = (VolumeStage::Ready, None);
        let images: Vec<_> = record.placements.iter().map(|p| (p.node, p.image.unwrap())).collect();
        if self.clustered {
            let all: Vec<_> = images.iter().map(|(node, _)| *node).collect();
            self.put_mirror(mirror(1, &images, &all));
        }
    }

    /// The mirror does not let its last member leave.
    fn leave(&mut self, id: NodeId) {
        let mut next = self.mirror.clone().unwrap();
        next.in_sync.retain(|m| m.node != id);
        if let Some(heir) = next.in_sync.first() {
            next.primary = heir.node;
            next.epoch.0 += 1;
            self.put_mirror(next);
            self.node(id).stays_out = true;
        }
    }

    /// Open replicas come in sync; members that are not open are excluded.
    fn resync(&mut self) {
        let Some(mut next) = self.mirror.clone() else { return };
        let is_open = |id: NodeId| {
            let node = self.nodes.get(&id);
            node.is_some_and(|n| matches!(n.observed, Observed::Open { .. }) && !n.stays_out)
        };
        if !next.in_sync.iter().any(|m| is_open(m.node)) {
            return;
        }
        let there = next.replicas.iter().filter(|r| is_open(r.node));
        next.in_sync =
            there.map(|r| InSyncMember { node: r.node, incarnation: Incarnation(1) }).collect();
        next.primary = next.in_sync[0].node;
        next.replicas.iter_mut().filter(|r| is_open(r.node)).for_each(|r| r.is_new = false);
        if Some(&next) != self.mirror.as_ref() {
            next.epoch.0 += 1;
            self.put_mirror(next);
        }
    }

    /// Lets all nodes take steps until none has one left; false if that never happens.
    fn settle(&mut self) -> bool {
        for _ in 0..60 {
            let ids: Vec<_> = self.nodes.keys().copied().collect();
            let before = self.mirror.clone();
            let mut idle = true;
            for id in ids {
                let step = self.next(id);
                // A node whose leave was refused asks again after a change.
                idle &= matches!(step, Step::Idle | Step::LeaveMirror);
                self.take(id, step);
            }
            self.resync();
            if idle && before == self.mirror {
                return true;
            }
        }
        false
    }

    fn restart(&mut self, id: NodeId) {
        let node = self.node(id);
        node.life += 1;
        node.observed = Observed::Closed;
    }

    fn is_open(&self, id: NodeId) -> bool {
        matches!(self.nodes[&id].observed, Observed::Open { .. })
    }

    fn in_sync(&self) -> Vec<NodeId> {
        self.mirror.iter().flat_map(|m| m.in_sync.iter().map(|m| m.node)).collect()
    }

    fn is_gone(&self) -> bool {
        self.stored.is_none()
            && self.mirror.is_none()
            && self.nodes.values().all(|n| n.image.is_none())
            && self.nodes.keys().all(|&id| !self.is_open(id))
    }
}

fn mirror(epoch: u64, images: &[(NodeId, Uuid)], in_sync: &[NodeId]) -> MirrorConfig {
    let incarnation = Incarnation(1);
    MirrorConfig {
        epoch: Epoch(epoch),
        config_id: 1,
        replicas: images
            .iter()
            .map(|&(node, image)| ConfigReplica { node, image, is_new: false })
            .collect(),
        in_sync: in_sync.iter().map(|&node| InSyncMember { node, incarnation }).collect(),
        primary: in_sync[0],
        cold_start_epoch: Epoch::default(),
        history: CopyHistory::default(),
    }
}

/// A volume that node 1 creates on `nodes`.
fn asked_for(nodes: &[NodeId]) -> VolumeRecord {
    let wanted = |&node: &NodeId| ReplicaPlacement {
        image: None,
        image_generation: 0,
        stage: PlacementStage::Creating { force: false },
        ..place(node, "v")
    };
    VolumeRecord {
        stage: VolumeStage::Creating,
        placements: nodes.iter().map(wanted).collect(),
        creator: Some(NodeProcess { node: FIRST_NODE, process: life(1) }),
        ..record("v")
    }
}

/// A cluster in which a volume on `nodes` is served.
fn serving(nodes: &[NodeId]) -> World {
    let mut world = World::new(asked_for(nodes), true);
    assert!(world.settle());
    assert_eq!(world.in_sync(), nodes);
    world
}

/// Runs `begin` with a crash of each node after each number of steps, and checks the final state.
fn with_crashes(begin: &World, check: impl Fn(&World, Option<NodeId>)) {
    let ids: Vec<_> = begin.nodes.keys().copied().collect();
    let mut uninterrupted = begin.clone();
    assert!(uninterrupted.settle());
    check(&uninterrupted, None);
    for &victim in &ids {
        for step_count in 0..12 {
            let mut world = begin.clone();
            for n in 0..step_count {
                let id = ids[n % ids.len()];
                let step = world.next(id);
                world.take(id, step);
            }
            world.restart(victim);
            assert!(world.settle(), "{victim} after {step_count}: {world:#?}");
            check(&world, Some(victim));
        }
    }
}

#[test]
fn a_volume_is_created_everywhere_or_nowhere() {
    for clustered in [false, true] {
        let nodes = if clustered { &[FIRST_NODE, OTHER][..] } else { &[FIRST_NODE][..] };
        let world = World::new(asked_for(nodes), clustered);
        with_crashes(&world, |end, victim| match &end.stored {
            None => {
                assert_eq!(victim, Some(FIRST_NODE), "only a dead creator gives it up");
                assert!(end.is_gone(), "{end:#?}");
            }
            Some(stored) => {
                assert_eq!(
                    (stored.record.stage, stored.record.creator),
                    (VolumeStage::Ready, None)
                );
                assert!(nodes.iter().all(|&id| end.is_open(id)), "{end:#?}");
                assert_eq!(end.in_sync(), if clustered { nodes } else { &[] });
            }
        });
    }
}

#[test]
fn one_that_cannot_be_made_on_one_node_is_taken_back_on_all() {
    let mut world = World::new(asked_for(&[FIRST_NODE, OTHER]), true);
    world.node(OTHER).full = true;
    with_crashes(&world, |end, _| assert!(end.is_gone(), "{end:#?}"));
}

#[test]
fn what_another_life_was_creating_is_not_touched_by_other_nodes() {
    let mut world = World::new(asked_for(&[FIRST_NODE, OTHER]), true);
    world.restart(OTHER);
    assert_eq!(world.next(OTHER), Step::CreateImage);
    world.place(OTHER).stage = PlacementStage::Ready;
    assert_eq!(world.next(OTHER), Step::Idle);
    assert_eq!(world.next(THIRD), Step::Idle);
}

#[test]
fn a_volume_is_deleted_everywhere() {
    let mut world = serving(&[FIRST_NODE, OTHER]);
    world.record().stage = VolumeStage::Deleting;
    with_crashes(&world, |end, _| assert!(end.is_gone(), "{end:#?}"));
}

#[test]
fn a_copy_is_added_and_comes_in_sync() {
    let mut world = serving(&[FIRST_NODE]);
    let wanted = asked_for(&[OTHER]).placements.remove(0);
    world.record().add_placement(wanted);
    with_crashes(&world, |end, _| {
        assert_eq!(end.in_sync(), [FIRST_NODE, OTHER], "{end:#?}");
        let images: Vec<_> = end.nodes.values().filter_map(|n| n.image).collect();
        assert_eq!(images.len(), 2);
    });
}

#[test]
fn a_copy_is_removed_and_the_last_one_stays() {
    let leaving = PlacementStage::Removing { replaced_by: None };
    let mut world = serving(&[FIRST_NODE, OTHER]);
    world.place(FIRST_NODE).stage = leaving.clone();
    with_crashes(&world, |end, _| {
        assert_eq!(end.in_sync(), [OTHER], "{end:#?}");
        assert_eq!(end.nodes[&FIRST_NODE].image, None);
        assert!(end.stored.as_ref().unwrap().record.placement(FIRST_NODE).is_none());
    });
    let mut world = serving(&[FIRST_NODE]);
    world.place(FIRST_NODE).stage = leaving;
    assert!(world.settle());
    assert_eq!(world.in_sync(), [FIRST_NODE]);
    assert!(world.nodes[&FIRST_NODE].image.is_some(), "the only copy is never erased");
}

#[test]
fn a_copy_moves_to_another_node_and_there_are_two_all_the_time() {
    let mut world = serving(&[FIRST_NODE, OTHER]);
    let wanted = asked_for(&[THIRD]).placements.remove(0);
    world.record().add_placement(wanted);
    world.place(OTHER).stage = PlacementStage::Removing { replaced_by: Some(THIRD) };
    assert_eq!(world.next(OTHER), Step::Publish, "it serves until then");
    with_crashes(&world, |end, _| {
        assert_eq!(end.in_sync(), [FIRST_NODE, THIRD], "{end:#?}");
        assert_eq!(end.nodes[&OTHER].image, None);
    });
}

#[test]
fn a_copy_whose_place_was_taken_serves_like_others_until_it_is_to_leave() {
    let mut world = serving(&[FIRST_NODE, OTHER]);
    let wanted = asked_for(&[THIRD]).placements.remove(0);
    world.record().add_placement(wanted);
    world.place(OTHER).stage = PlacementStage::Superseded;
    world.restart(OTHER);
    with_crashes(&world, |end, _| {
        assert_eq!(end.in_sync(), [FIRST_NODE, OTHER, THIRD], "{end:#?}");
    });
    assert!(world.settle());
    world.place(OTHER).stage = PlacementStage::Removing { replaced_by: None };
    with_crashes(&world, |end, _| {
        assert_eq!(end.in_sync(), [FIRST_NODE, THIRD], "{end:#?}");
        assert_eq!(end.nodes[&OTHER].image, None);
    });
}

#[test]
fn a_lost_image_is_replaced_by_a_new_one_on_the_same_node() {
    let mut world = serving(&[FIRST_NODE, OTHER]);
    let old = world.nodes[&OTHER].image.unwrap();
    world.node(OTHER).image = None;
    world.restart(OTHER);
    assert!(world.settle());
    assert_eq!(world.in_sync(), [FIRST_NODE]);
    let wanted = asked_for(&[OTHER]).placements.remove(0);
    *world.place(OTHER) = wanted;
    with_crashes(&world, |end, _| {
        assert_eq!(end.in_sync(), [FIRST_NODE, OTHER], "{end:#?}");
        assert_ne!(end.nodes[&OTHER].image.unwrap().id, old.id);
    });
}

#[test]
fn a_volume_of_a_lone_node_becomes_a_mirror_of_one() {
    let mut world = World::new(record("v"), false);
    let size_bytes = record("v").size_bytes;
    let image = ImageInfo { id: Uuid::from_u128(77), size_bytes, generation: 2 };
    world.node(FIRST_NODE).image = Some(image);
    world.record().placement_mut(FIRST_NODE).unwrap().image = None;
    let mut joined = World { clustered: true, ..World::new(record("v"), true) };
    joined.stored.clone_from(&world.stored);
    joined.node(FIRST_NODE).image = Some(image);
    with_crashes(&joined, |end, _| {
        assert_eq!(end.mirror.as_ref().unwrap().image(FIRST_NODE), Some(image.id));
        assert!(end.is_open(FIRST_NODE));
    });
}

#[test]
fn what_was_grown_before_a_crash_is_taken_over() {
    let size_bytes = record("v").size_bytes;
    let same = ImageInfo { id: Uuid::from_u128(1), size_bytes, generation: 2 };
    let mut world = World::new(record("v"), false);
    world.node(FIRST_NODE).image =
        Some(ImageInfo { size_bytes: 2 * size_bytes, generation: 3, ..same });
    assert!(world.settle());
    let record = &world.stored.as_ref().unwrap().record;
    assert_eq!((record.size_bytes, record.placements[0].image_generation), (2 * size_bytes, 3));
}

/// The record gets the new size first; a crash before the image has it keeps the old one.
#[test]
fn what_was_to_be_grown_before_a_crash_has_the_size_of_its_image() {
    let size_bytes = record("v").size_bytes;
    let image = ImageInfo { id: Uuid::from_u128(1), size_bytes, generation: 2 };
    let mut world = World::new(record("v"), false);
    world.node(FIRST_NODE).image = Some(image);
    assert!(world.settle());
    world.record().size_bytes = 2 * size_bytes;
    assert!(world.settle());
    assert_eq!(world.stored.as_ref().unwrap().record.size_bytes, size_bytes);
}

#[test]
fn a_volume_without_a_record_or_a_place_is_not_served() {
    let image = ImageInfo { id: Uuid::nil(), size_bytes: 1, generation: 2 };
    let open = Observed::Open { core: 0, image, published: None };
    let me = NodeProcess { node: FIRST_NODE, process: life(1) };
    assert_eq!(next_step(None, MirrorState::Standalone, me, &open), Step::Close);
    assert_eq!(next_step(None, MirrorState::Standalone, me, &Observed::Closed), Step::Idle);
    let mut world = serving(&[FIRST_NODE, OTHER]);
    world.record().placements.remove(1);
    assert_eq!(world.next(OTHER), Step::Close);
}

#[test]
fn nothing_is_made_or_erased_while_the_mirror_is_not_there() {
    let mut world = World::new(record("v"), true);
    let (wanted, leaving) =
        (PlacementStage::Creating { force: false }, PlacementStage::Removing { replaced_by: None });
    for stage in [wanted, leaving] {
        world.place(FIRST_NODE).stage = stage;
        assert_eq!(world.next(FIRST_NODE), Step::Idle);
    }
    world.place(FIRST_NODE).stage = PlacementStage::Ready;
    world.record().add_placement(place(OTHER, "v"));
    assert_eq!(world.next(FIRST_NODE), Step::Idle, "which of two begins is not known");
    world.record().placements.clear();
    world.record().stage = VolumeStage::Creating;
    world.record().creator = Some(NodeProcess { node: FIRST_NODE, process: life(1) });
    assert_eq!(world.next(FIRST_NODE), Step::Idle, "nothing is finished that has no copies");
}

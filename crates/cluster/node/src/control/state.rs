//! What the node knows of its volumes, in memory: their records, as last read, and what it does
//! with each. Reads are answered from here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::VolumeName;
use mirror::record::Record;
use peer::NodeId;
use target::catalog::Away;
use tokio::sync::watch;
use uuid::Uuid;

use super::steps::Records;
use crate::engine::BackingError;
use crate::meta::Revision;
use crate::publish::Here;
use crate::reconcile::Observed;
use crate::record::{PlaceStage, Stage, Stored};

#[derive(Default)]
pub(super) struct State {
    volumes: Mutex<BTreeMap<Uuid, Known>>,
    serving: AtomicBool,
    /// Whether the store has been read once.
    read: AtomicBool,
    /// Records that cannot be read, as errors tell of them.
    damaged: Mutex<Vec<String>>,
    /// Volumes that somebody is about to settle.
    queued: Mutex<BTreeSet<Uuid>>,
}

/// A volume that is ready.
pub(super) struct Listed {
    /// Its record.
    pub(super) stored: Stored,
    /// Its mirror's, in a cluster.
    pub(super) mirror: Option<(Record, Revision)>,
    /// Where it is, for this node's initiators.
    pub(super) here: Here,
}

/// One volume.
#[derive(Default)]
struct Known {
    stored: Option<Stored>,
    mirror: Option<(Record, Revision)>,
    observed: Observed,
    /// By which record it meets the other nodes, while it is open.
    met: Option<Revision>,
    /// By which record, and what, initiators were told last of where it is.
    told: Option<(Revision, Here)>,
    /// Why its image could not be made here.
    not_made: Option<BackingError>,
    gate: Arc<tokio::sync::Mutex<()>>,
    /// Counts what has become of it.
    changes: watch::Sender<u64>,
}

impl Known {
    fn has_changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Where the volume is, for the initiators of node `me`.
    fn here(&self, me: NodeId) -> Here {
        let place = self.stored.as_ref().and_then(|s| s.record.place(me)).map(|p| &p.stage);
        match (&self.observed, place) {
            (Observed::Open { core, .. }, _) => Here::Open { core: *core },
            (
                Observed::Closed,
                Some(
                    PlaceStage::Made
                    | PlaceStage::Superseded
                    | PlaceStage::Leaving { instead_of: Some(_) },
                ),
            ) => Here::Away(Away::Returning),
            (Observed::Broken { .. }, Some(stage)) if stage.has_image() => {
                Here::Away(Away::Unavailable)
            }
            _ => Here::Nowhere,
        }
    }

    fn is_ready(&self) -> bool {
        self.stored.as_ref().is_some_and(|s| s.record.stage == Stage::Ready)
    }
}

impl State {
    fn volumes(&self) -> MutexGuard<'_, BTreeMap<Uuid, Known>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_serving(&self, serving: bool) {
        self.serving.store(serving, Ordering::Release);
    }

    pub(super) fn is_serving(&self) -> bool {
        self.serving.load(Ordering::Acquire)
    }

    /// The store has been read: what is not known here was not there.
    pub(super) fn set_read(&self) {
        self.read.store(true, Ordering::Release);
    }

    /// Whether the store has been read once.
    pub(super) fn has_read(&self) -> bool {
        self.read.load(Ordering::Acquire)
    }

    pub(super) fn set_damaged(&self, damaged: Vec<String>) {
        *self.damaged.lock().unwrap_or_else(PoisonError::into_inner) = damaged;
    }

    pub(super) fn damaged(&self) -> Vec<String> {
        self.damaged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What must be held to take a step for a volume.
    pub(super) fn gate(&self, id: Uuid) -> Arc<tokio::sync::Mutex<()>> {
        Arc::clone(&self.volumes().entry(id).or_default().gate)
    }

    pub(super) fn ids(&self) -> Vec<Uuid> {
        self.volumes().keys().copied().collect()
    }

    /// Records what a list of the store has shown, unless something newer is known.
    pub(super) fn learn(&self, stored: Stored) {
        let mut volumes = self.volumes();
        let known = volumes.entry(stored.record.id).or_default();
        if known.stored.as_ref().is_none_or(|s| s.revision < stored.revision) {
            known.stored = Some(stored);
        }
    }

    /// Whether `records` are older than what is known.
    pub(super) fn is_behind(&self, id: Uuid, records: &Records) -> bool {
        let volumes = self.volumes();
        let Some(known) = volumes.get(&id) else { return false };
        let at = |stored: &Option<Stored>| stored.as_ref().map(|s| s.revision);
        let mirrored = |mirror: &Option<(Record, Revision)>| mirror.as_ref().map(|m| m.1);
        at(&known.stored) > at(&records.stored)
            || mirrored(&known.mirror) > mirrored(&records.mirror)
    }

    /// Has somebody settle a volume soon; false if that is so already, and has not begun.
    pub(super) fn enqueue(&self, id: Uuid) -> bool {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner).insert(id)
    }

    /// It begins: what changes from here on is to be looked at once more.
    pub(super) fn dequeue(&self, id: Uuid) {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// What tells of changes of a volume: what its records say, what this node does with it, and that
    /// its records are others now.
    pub(super) fn changes(&self, id: Uuid) -> watch::Receiver<u64> {
        self.volumes().entry(id).or_default().changes.subscribe()
    }

    /// The store has told that a volume's records have changed.
    pub(super) fn told(&self, id: Uuid) {
        if let Some(known) = self.volumes().get(&id) {
            known.has_changed();
        }
    }

    /// Records what the store says now.
    pub(super) fn know(&self, id: Uuid, records: &Records) {
        let mut volumes = self.volumes();
        let known = volumes.entry(id).or_default();
        known.stored.clone_from(&records.stored);
        known.mirror.clone_from(&records.mirror);
        known.has_changed();
    }

    /// Records why an image could not be made, or that it was.
    pub(super) fn make_failed(&self, id: Uuid, why: Option<BackingError>) {
        self.volumes().entry(id).or_default().not_made = why;
    }

    /// Why an image could not be made here.
    pub(super) fn not_made(&self, id: Uuid) -> Option<BackingError> {
        self.volumes().get(&id)?.not_made.clone()
    }

    /// All mirrors' records, as last read.
    pub(super) fn mirrors(&self) -> BTreeMap<Uuid, Record> {
        let volumes = self.volumes();
        let known = volumes.iter().filter_map(|(id, k)| Some((*id, k.mirror.as_ref()?.0.clone())));
        known.collect()
    }

    /// A volume's mirror's record, as last read.
    pub(super) fn mirror(&self, id: Uuid) -> Option<Record> {
        self.volumes().get(&id)?.mirror.as_ref().map(|(record, _)| record.clone())
    }

    /// Forgets a volume that is in neither the store nor the data plane, unless somebody waits at
    /// its gate.
    pub(super) fn drop_volume(&self, id: Uuid) {
        let mut volumes = self.volumes();
        // The map's and the caller's own.
        if volumes.get(&id).is_some_and(|k| Arc::strong_count(&k.gate) <= 2) {
            volumes.remove(&id);
        }
    }

    pub(super) fn observed(&self, id: Uuid) -> Observed {
        self.volumes().get(&id).map(|k| k.observed.clone()).unwrap_or_default()
    }

    pub(super) fn observe(&self, id: Uuid, observed: Observed) {
        let mut volumes = self.volumes();
        let known = volumes.entry(id).or_default();
        known.observed = observed;
        if !matches!(known.observed, Observed::Open { published: Some(_), .. }) {
            known.met = None;
        }
        known.has_changed();
    }

    /// An open volume meets the other nodes that its record of this revision names.
    pub(super) fn meets(&self, id: Uuid, revision: Revision) {
        self.volumes().entry(id).or_default().met = Some(revision);
    }

    /// Volumes that could not be opened.
    pub(super) fn broken(&self) -> Vec<Uuid> {
        let volumes = self.volumes();
        let broken = |k: &Known| matches!(k.observed, Observed::Broken { .. });
        volumes.iter().filter(|(_, k)| broken(k)).map(|(id, _)| *id).collect()
    }

    /// Has a step that failed tried again.
    pub(super) fn forget_failure(&self, id: Uuid) {
        if let Some(known) = self.volumes().get_mut(&id)
            && matches!(known.observed, Observed::Broken { .. } | Observed::Stuck { .. })
        {
            known.observed = Observed::Closed;
        }
    }

    /// The volumes that are ready, as node `me` tells of them.
    pub(super) fn listed(&self, me: NodeId) -> Vec<Listed> {
        let volumes = self.volumes();
        let ready = volumes.values().filter(|k| k.is_ready());
        let listed = ready.filter_map(|k| {
            let (stored, mirror) = (k.stored.clone()?, k.mirror.clone());
            Some(Listed { stored, mirror, here: k.here(me) })
        });
        listed.collect()
    }

    /// Those of them that are open here.
    pub(super) fn open(&self, me: NodeId) -> Vec<Listed> {
        let mut all = self.listed(me);
        all.retain(|l| matches!(l.here, Here::Open { .. }));
        all
    }

    /// Whether initiators know what there is to know of where a volume is.
    pub(super) fn is_told(&self, id: Uuid, me: NodeId) -> bool {
        let volumes = self.volumes();
        let Some(known) = volumes.get(&id) else { return true };
        let ready = known.stored.as_ref().filter(|_| known.is_ready());
        ready.map(|s| (s.revision, known.here(me))) == known.told
    }

    /// Whether initiators are served by the record that is known.
    pub(super) fn is_published(&self, id: Uuid) -> bool {
        match self.volumes().get(&id) {
            Some(Known {
                stored: Some(s),
                mirror,
                observed: Observed::Open { published, .. },
                ..
            }) => *published == Some((s.revision, mirror.as_ref().map(|m| m.1))),
            _ => false,
        }
    }

    /// Initiators are served by these records, and by no others. A volume that does not meet the other nodes yet by its record is
    /// not done with, whoever has told of it.
    pub(super) fn published(&self, all: &[Listed]) {
        let mut volumes = self.volumes();
        volumes.values_mut().for_each(|known| known.told = None);
        for Listed { stored, mirror, here } in all {
            let Stored { record, revision } = stored;
            let Some(known) = volumes.get_mut(&record.id) else { continue };
            // Wherever it is: discovery tells of what only other nodes have, too.
            known.told = Some((*revision, *here));
            if known.met == Some(*revision)
                && let (Observed::Open { published, .. }, Here::Open { .. }) =
                    (&mut known.observed, here)
            {
                *published = Some((*revision, mirror.as_ref().map(|m| m.1)));
            }
        }
    }

    pub(super) fn find(&self, name: &VolumeName) -> Option<Uuid> {
        let volumes = self.volumes();
        let called = |k: &Known| k.stored.as_ref().is_some_and(|s| s.record.name == *name);
        volumes.iter().find(|(_, k)| called(k)).map(|(id, _)| *id)
    }

    pub(super) fn get(&self, id: Uuid) -> Option<(Stored, Observed)> {
        let volumes = self.volumes();
        let known = volumes.get(&id)?;
        Some((known.stored.clone()?, known.observed.clone()))
    }

    /// All volumes that the store has, by name.
    pub(super) fn all(&self) -> Vec<(Stored, Observed)> {
        let volumes = self.volumes();
        let all = volumes.values().filter_map(|k| Some((k.stored.clone()?, k.observed.clone())));
        let mut all: Vec<_> = all.collect();
        all.sort_by(|(a, _), (b, _)| a.record.name.cmp(&b.record.name));
        all
    }

    pub(super) fn count(&self) -> usize {
        self.volumes().values().filter(|k| k.stored.is_some()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Image;
    use crate::record::tests::record;

    const ME: NodeId = NodeId(1);

    fn open(state: &State, name: &str) -> Uuid {
        let record = record(name);
        let id = record.id;
        state.learn(Stored { record, revision: Revision(7) });
        let image = Image { image: Uuid::nil(), size_bytes: 1, generation: 2 };
        state.observe(id, Observed::Open { core: 0, image, published: None });
        id
    }

    /// Two that open at the same time: one of them tells initiators of both.
    #[test]
    fn what_another_volume_has_told_does_not_spare_one_to_meet_the_other_nodes() {
        let state = State::default();
        let (a, b) = (open(&state, "a"), open(&state, "b"));
        state.meets(a, Revision(7));
        state.published(&state.listed(ME));
        assert!(state.is_published(a));
        assert!(!state.is_published(b), "it has to meet them first");
        state.meets(b, Revision(7));
        state.published(&state.listed(ME));
        assert!(state.is_published(b));
        // Opened again it has met nobody.
        state.observe(b, Observed::Closed);
        let b = open(&state, "b");
        state.published(&state.listed(ME));
        assert!(!state.is_published(b));
    }
}

//! The node's volumes in memory: their records as last read, and their observed states. Reads are
//! answered from here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::VolumeName;
use mirror::config::MirrorConfig;
use peer::NodeId;
use target::catalog::Unavailability;
use tokio::sync::watch;
use uuid::Uuid;

use cluster::store::Revision;
use engine::BackingError;
use records::catalog::LocalState;
use records::reconcile::Observed;
use records::record::{PlacementStage, StoredVolumeRecord, VolumeStage};
use status::report::MissingReplica;

/// The records of a volume in the store.
#[derive(Clone, Debug, Default)]
pub(crate) struct VolumeRecords {
    /// The volume record.
    pub(crate) stored: Option<StoredVolumeRecord>,
    /// The mirror record, in a cluster.
    pub(crate) mirror: Option<(MirrorConfig, Revision)>,
}

#[derive(Default)]
pub(crate) struct VolumeTable {
    volumes: Mutex<BTreeMap<Uuid, VolumeTableEntry>>,
    serving: AtomicBool,
    /// Whether the store has been read once.
    has_read_store: AtomicBool,
    /// Records that cannot be read, as error texts.
    damaged_records: Mutex<Vec<String>>,
    /// Volumes that are queued for reconciling.
    queued: Mutex<BTreeSet<Uuid>>,
    /// Why volumes with their primary here lack replicas that are not being made.
    missing_replicas: Mutex<BTreeMap<Uuid, MissingReplica>>,
}

/// A volume that is ready.
pub(crate) struct ReadyVolume {
    /// Its volume record.
    pub(crate) stored: StoredVolumeRecord,
    /// Its mirror record, in a cluster.
    pub(crate) mirror: Option<(MirrorConfig, Revision)>,
    /// Its state as this node's initiators see it.
    pub(crate) local_state: LocalState,
}

/// One volume.
#[derive(Default)]
struct VolumeTableEntry {
    stored: Option<StoredVolumeRecord>,
    mirror: Option<(MirrorConfig, Revision)>,
    observed: Observed,
    /// The revision of the record by which its peers were set, while it is open.
    peers_set_at: Option<Revision>,
    /// The revision and the state that were last announced to initiators.
    announced: Option<(Revision, LocalState)>,
    /// Why its image could not be created here.
    creation_error: Option<BackingError>,
    lock: Arc<tokio::sync::Mutex<()>>,
    /// Counts changes of the volume.
    changes: watch::Sender<u64>,
}

impl VolumeTableEntry {
    fn notify_changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// The state of the volume as initiators of node `me` see it.
    fn local_state(&self, me: NodeId) -> LocalState {
        let stage = self.stored.as_ref().and_then(|s| s.record.placement(me)).map(|p| &p.stage);
        match (&self.observed, stage) {
            (Observed::Open { core, .. }, _) => LocalState::Open { core: *core },
            (
                Observed::Closed,
                Some(
                    PlacementStage::Ready
                    | PlacementStage::Superseded
                    | PlacementStage::Removing { replaced_by: Some(_) },
                ),
            ) => LocalState::Unavailable(Unavailability::BecomingReady),
            (Observed::OpenFailed { .. }, Some(stage)) if stage.has_image() => {
                LocalState::Unavailable(Unavailability::Unavailable)
            }
            _ => LocalState::NotLocal,
        }
    }

    fn is_ready(&self) -> bool {
        self.stored.as_ref().is_some_and(|s| s.record.stage == VolumeStage::Ready)
    }
}

impl VolumeTable {
    fn volumes(&self) -> MutexGuard<'_, BTreeMap<Uuid, VolumeTableEntry>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_serving(&self, serving: bool) {
        self.serving.store(serving, Ordering::Release);
    }

    pub(crate) fn is_serving(&self) -> bool {
        self.serving.load(Ordering::Acquire)
    }

    /// The store has been read: volumes that are unknown here did not exist.
    pub(crate) fn set_has_read_store(&self) {
        self.has_read_store.store(true, Ordering::Release);
    }

    /// Whether the store has been read once.
    pub(crate) fn has_read_store(&self) -> bool {
        self.has_read_store.load(Ordering::Acquire)
    }

    pub(crate) fn set_damaged_records(&self, damaged: Vec<String>) {
        *self.damaged_records.lock().unwrap_or_else(PoisonError::into_inner) = damaged;
    }

    pub(crate) fn damaged_records(&self) -> Vec<String> {
        self.damaged_records.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records why volumes with their primary here lack replicas that are not being made.
    pub(crate) fn set_missing_replicas(&self, missing: BTreeMap<Uuid, MissingReplica>) {
        *self.missing_replicas.lock().unwrap_or_else(PoisonError::into_inner) = missing;
    }

    /// Why a replica that the volume lacks is not being made.
    pub(crate) fn missing_replica(&self, id: Uuid) -> Option<MissingReplica> {
        let missing = self.missing_replicas.lock().unwrap_or_else(PoisonError::into_inner);
        missing.get(&id).cloned()
    }

    /// The lock to hold while taking steps for a volume.
    pub(crate) fn lock_of(&self, id: Uuid) -> Arc<tokio::sync::Mutex<()>> {
        Arc::clone(&self.volumes().entry(id).or_default().lock)
    }

    pub(crate) fn ids(&self) -> Vec<Uuid> {
        self.volumes().keys().copied().collect()
    }

    /// Records a volume from a list of the store, unless a newer record is known.
    pub(crate) fn update_if_newer(&self, stored: StoredVolumeRecord) {
        let mut volumes = self.volumes();
        let known = volumes.entry(stored.record.id).or_default();
        if known.stored.as_ref().is_none_or(|s| s.revision < stored.revision) {
            known.stored = Some(stored);
        }
    }

    /// Whether `records` are older than the known ones.
    pub(crate) fn is_older_than_known(&self, id: Uuid, records: &VolumeRecords) -> bool {
        let volumes = self.volumes();
        let Some(known) = volumes.get(&id) else { return false };
        let at = |stored: &Option<StoredVolumeRecord>| stored.as_ref().map(|s| s.revision);
        let mirrored = |mirror: &Option<(MirrorConfig, Revision)>| mirror.as_ref().map(|m| m.1);
        at(&known.stored) > at(&records.stored)
            || mirrored(&known.mirror) > mirrored(&records.mirror)
    }

    /// Queues a volume for reconciling; false if it is queued already.
    pub(crate) fn enqueue(&self, id: Uuid) -> bool {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner).insert(id)
    }

    /// Its reconciling starts: later changes queue it again.
    pub(crate) fn dequeue(&self, id: Uuid) {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// Notifies of changes of a volume: its records, its observed state, and that newer records
    /// exist.
    pub(crate) fn changes(&self, id: Uuid) -> watch::Receiver<u64> {
        self.volumes().entry(id).or_default().changes.subscribe()
    }

    /// The store reported that a volume's records have changed.
    pub(crate) fn notify_changed(&self, id: Uuid) {
        if let Some(known) = self.volumes().get(&id) {
            known.notify_changed();
        }
    }

    /// Updates the known records.
    pub(crate) fn update_records(&self, id: Uuid, records: &VolumeRecords) {
        let mut volumes = self.volumes();
        let known = volumes.entry(id).or_default();
        known.stored.clone_from(&records.stored);
        known.mirror.clone_from(&records.mirror);
        known.notify_changed();
    }

    /// Records why an image could not be created; `None` if it was.
    pub(crate) fn set_creation_error(&self, id: Uuid, why: Option<BackingError>) {
        self.volumes().entry(id).or_default().creation_error = why;
    }

    /// Why an image could not be created here.
    pub(crate) fn creation_error(&self, id: Uuid) -> Option<BackingError> {
        self.volumes().get(&id)?.creation_error.clone()
    }

    /// All mirror records, as last read.
    pub(crate) fn mirrors(&self) -> BTreeMap<Uuid, MirrorConfig> {
        let volumes = self.volumes();
        let known = volumes.iter().filter_map(|(id, k)| Some((*id, k.mirror.as_ref()?.0.clone())));
        known.collect()
    }

    /// The mirror record of a volume, as last read.
    pub(crate) fn mirror(&self, id: Uuid) -> Option<MirrorConfig> {
        self.volumes().get(&id)?.mirror.as_ref().map(|(record, _)| record.clone())
    }

    /// Forgets a volume that is neither in the store nor in the data plane, unless a task waits for
    /// its lock.
    pub(crate) fn forget_volume(&self, id: Uuid) {
        let mut volumes = self.volumes();
        // One reference in the map, one of the caller.
        if volumes.get(&id).is_some_and(|k| Arc::strong_count(&k.lock) <= 2) {
            volumes.remove(&id);
        }
    }

    pub(crate) fn observed(&self, id: Uuid) -> Observed {
        self.volumes().get(&id).map(|k| k.observed.clone()).unwrap_or_default()
    }

    pub(crate) fn observe(&self, id: Uuid, observed: Observed) {
        let mut volumes = self.volumes();
        let known = volumes.entry(id).or_default();
        known.observed = observed;
        if !matches!(known.observed, Observed::Open { published: Some(_), .. }) {
            known.peers_set_at = None;
        }
        known.notify_changed();
    }

    /// Records that the peers of an open volume are set by its record of this revision.
    pub(crate) fn mark_peers_set(&self, id: Uuid, revision: Revision) {
        self.volumes().entry(id).or_default().peers_set_at = Some(revision);
    }

    /// Volumes that failed to open.
    pub(crate) fn failed_to_open(&self) -> Vec<Uuid> {
        let volumes = self.volumes();
        let broken = |k: &VolumeTableEntry| matches!(k.observed, Observed::OpenFailed { .. });
        volumes.iter().filter(|(_, k)| broken(k)).map(|(id, _)| *id).collect()
    }

    /// Clears a failed step, so that it is retried.
    pub(crate) fn clear_failure(&self, id: Uuid) {
        if let Some(known) = self.volumes().get_mut(&id)
            && matches!(known.observed, Observed::OpenFailed { .. } | Observed::EraseFailed { .. })
        {
            known.observed = Observed::Closed;
        }
    }

    /// The volumes that are ready, as seen by node `me`.
    pub(crate) fn ready_volumes(&self, me: NodeId) -> Vec<ReadyVolume> {
        let volumes = self.volumes();
        let ready = volumes.values().filter(|k| k.is_ready());
        let listed = ready.filter_map(|k| {
            let (stored, mirror) = (k.stored.clone()?, k.mirror.clone());
            Some(ReadyVolume { stored, mirror, local_state: k.local_state(me) })
        });
        listed.collect()
    }

    /// The ready volumes that are open here.
    pub(crate) fn open_volumes(&self, me: NodeId) -> Vec<ReadyVolume> {
        let mut all = self.ready_volumes(me);
        all.retain(|l| matches!(l.local_state, LocalState::Open { .. }));
        all
    }

    /// Whether initiators know the current state of a volume.
    pub(crate) fn is_announced(&self, id: Uuid, me: NodeId) -> bool {
        let volumes = self.volumes();
        let Some(known) = volumes.get(&id) else { return true };
        let ready = known.stored.as_ref().filter(|_| known.is_ready());
        ready.map(|s| (s.revision, known.local_state(me))) == known.announced
    }

    /// Whether initiators are served by the current record.
    pub(crate) fn is_published(&self, id: Uuid) -> bool {
        match self.volumes().get(&id) {
            Some(VolumeTableEntry {
                stored: Some(s),
                mirror,
                observed: Observed::Open { published, .. },
                ..
            }) => *published == Some((s.revision, mirror.as_ref().map(|m| m.1))),
            _ => false,
        }
    }

    /// Records that initiators are served by exactly these records. A volume whose peers are not
    /// set by its current record stays unpublished.
    pub(crate) fn mark_published(&self, all: &[ReadyVolume]) {
        let mut volumes = self.volumes();
        volumes.values_mut().for_each(|known| known.announced = None);
        for ReadyVolume { stored, mirror, local_state: here } in all {
            let StoredVolumeRecord { record, revision } = stored;
            let Some(known) = volumes.get_mut(&record.id) else { continue };
            // Also for volumes of other nodes: discovery names them too.
            known.announced = Some((*revision, *here));
            if known.peers_set_at == Some(*revision)
                && let (Observed::Open { published, .. }, LocalState::Open { .. }) =
                    (&mut known.observed, here)
            {
                *published = Some((*revision, mirror.as_ref().map(|m| m.1)));
            }
        }
    }

    pub(crate) fn id_by_name(&self, name: &VolumeName) -> Option<Uuid> {
        let volumes = self.volumes();
        let called =
            |k: &VolumeTableEntry| k.stored.as_ref().is_some_and(|s| s.record.name == *name);
        volumes.iter().find(|(_, k)| called(k)).map(|(id, _)| *id)
    }

    pub(crate) fn get(&self, id: Uuid) -> Option<(StoredVolumeRecord, Observed)> {
        let volumes = self.volumes();
        let known = volumes.get(&id)?;
        Some((known.stored.clone()?, known.observed.clone()))
    }

    /// All volumes in the store, by name.
    pub(crate) fn all(&self) -> Vec<(StoredVolumeRecord, Observed)> {
        let volumes = self.volumes();
        let all = volumes.values().filter_map(|k| Some((k.stored.clone()?, k.observed.clone())));
        let mut all: Vec<_> = all.collect();
        all.sort_by(|(a, _), (b, _)| a.record.name.cmp(&b.record.name));
        all
    }
    /// The volumes that cannot be opened here, and why.
    pub(crate) fn open_errors(&self) -> BTreeMap<Uuid, String> {
        let all = self.all();
        let errors = all.into_iter().filter_map(|(stored, observed)| match observed {
            Observed::OpenFailed { reason } | Observed::EraseFailed { reason } => {
                Some((stored.record.id, reason))
            }
            _ => None,
        });
        errors.collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.volumes().values().filter(|k| k.stored.is_some()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use records::record::ImageInfo;
    use records::samples::record;

    const ME: NodeId = NodeId(1);

    fn open(state: &VolumeTable, name: &str) -> Uuid {
        let record = record(name);
        let id = record.id;
        state.update_if_newer(StoredVolumeRecord { record, revision: Revision(7) });
        let image = ImageInfo { id: Uuid::nil(), size_bytes: 1, generation: 2 };
        state.observe(id, Observed::Open { core: 0, image, published: None });
        id
    }

    /// Two volumes open at the same time: one of them announces both.
    #[test]
    fn what_another_volume_has_told_does_not_spare_one_to_meet_the_other_nodes() {
        let state = VolumeTable::default();
        let (a, b) = (open(&state, "a"), open(&state, "b"));
        state.mark_peers_set(a, Revision(7));
        state.mark_published(&state.ready_volumes(ME));
        assert!(state.is_published(a));
        assert!(!state.is_published(b), "it has to meet them first");
        state.mark_peers_set(b, Revision(7));
        state.mark_published(&state.ready_volumes(ME));
        assert!(state.is_published(b));
        // Reopened, its peers are not set yet.
        state.observe(b, Observed::Closed);
        let b = open(&state, "b");
        state.mark_published(&state.ready_volumes(ME));
        assert!(!state.is_published(b));
    }
}

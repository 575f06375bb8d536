//! What the node knows of its volumes, in memory: their records, as last read, and what it does
//! with each. Reads are answered from here.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::VolumeName;
use layers::mirror::record::Record;
use uuid::Uuid;

use super::steps::Records;
use crate::engine::BackingError;
use crate::meta::Revision;
use crate::reconcile::Observed;
use crate::record::{Stage, Stored};

#[derive(Default)]
pub(super) struct State {
    volumes: Mutex<BTreeMap<Uuid, Known>>,
    serving: AtomicBool,
    /// Records that cannot be read, as errors tell of them.
    damaged: Mutex<Vec<String>>,
}

/// A volume that is exported.
pub(super) struct OpenVolume {
    /// Its record.
    pub(super) stored: Stored,
    /// Its mirror's, in a cluster.
    pub(super) mirror: Option<(Record, Revision)>,
    /// The core it lives on.
    pub(super) core: usize,
}

/// One volume.
#[derive(Clone, Default)]
struct Known {
    stored: Option<Stored>,
    mirror: Option<(Record, Revision)>,
    observed: Observed,
    /// Why its image could not be made here.
    not_made: Option<BackingError>,
    gate: Arc<tokio::sync::Mutex<()>>,
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

    /// Records what the store says now.
    pub(super) fn know(&self, id: Uuid, records: &Records) {
        let mut volumes = self.volumes();
        let known = volumes.entry(id).or_default();
        known.stored.clone_from(&records.stored);
        known.mirror.clone_from(&records.mirror);
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
        self.volumes().entry(id).or_default().observed = observed;
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

    /// Volumes to export: those that are open and ready, and their cores.
    pub(super) fn open(&self) -> Vec<OpenVolume> {
        let volumes = self.volumes();
        let open = volumes.values().filter_map(|k| match (&k.stored, &k.observed) {
            (Some(stored), Observed::Open { core, .. }) if stored.record.stage == Stage::Ready => {
                let (stored, mirror) = (stored.clone(), k.mirror.clone());
                Some(OpenVolume { stored, mirror, core: *core })
            }
            _ => None,
        });
        open.collect()
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

    /// Initiators are served by the records in `volume`.
    pub(super) fn published(&self, volume: &OpenVolume) {
        let OpenVolume { stored: Stored { record, revision }, mirror, .. } = volume;
        if let Some(Known { observed: Observed::Open { published, .. }, .. }) =
            self.volumes().get_mut(&record.id)
        {
            *published = Some((*revision, mirror.as_ref().map(|m| m.1)));
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

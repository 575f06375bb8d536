//! Takes the steps that [`records::reconcile`] decides, one volume at a time.

use std::sync::Arc;

use block::Epoch;
use cluster::mirror_records;
use mirror::config::{ConfigReplica, CopyHistory, InSyncMember, MirrorConfig};
use peer::{Incarnation, NodeId};
use rt::fault_point::{self, FaultPoint};
use uuid::Uuid;

use super::VolumeControl;
use crate::volume_table::VolumeRecords;
use cluster::store::{Revision, StoreError};
use engine::BackingError;
use records::reconcile::{MirrorState, Observed, Step, next_step};
use records::record::ImageInfo;
use records::record::{self, PlacementStage, StoredVolumeRecord, VolumeRecord, VolumeStage};

/// Most steps that one reconciliation of a volume takes; more means that it makes no progress.
const MAX_RECONCILE_STEPS: usize = 32;

/// Outcome of a step.
enum StepOutcome {
    /// The step is done.
    Done,
    /// The step must wait, and is retried later.
    RetryLater,
}

impl VolumeControl {
    /// Reconciles a volume: takes steps until none is left.
    pub(crate) async fn reconcile_volume(&self, id: Uuid) {
        let lock = self.0.context.volumes.lock_of(id);
        let _held = lock.lock().await;
        self.reconcile_locked(id).await;
    }

    /// [`Self::reconcile_volume`] for callers that hold the lock.
    pub(crate) async fn reconcile_locked(&self, id: Uuid) {
        if let Err(error) = self.try_reconcile_locked(id).await {
            tracing::error!(volume = %id, %error, "reconciliation of a volume failed");
        }
    }

    /// [`Self::reconcile_volume`] for callers that need errors of the store.
    ///
    /// # Errors
    /// [`StoreError`]; the volume then stays as it is.
    pub(super) async fn try_reconcile(&self, id: Uuid) -> Result<(), StoreError> {
        let lock = self.0.context.volumes.lock_of(id);
        let _held = lock.lock().await;
        self.try_reconcile_locked(id).await
    }

    /// [`Self::reconcile_volume`] with records from a list of the store.
    pub(crate) async fn reconcile_with(&self, id: Uuid, records: VolumeRecords) {
        let lock = self.0.context.volumes.lock_of(id);
        let _held = lock.lock().await;
        if let Err(error) = self.try_reconcile_with(id, Some(records)).await {
            tracing::error!(volume = %id, %error, "reconciliation of a volume failed");
        }
    }

    /// Reconciles a volume in a task of its own.
    pub(crate) fn reconcile_in_background(&self, id: Uuid) {
        if let Ok(change) = Arc::clone(&self.0.context.change_lock).try_read_owned() {
            // Changes that arrive while a task waits for the lock are handled by that task.
            if !self.0.context.volumes.enqueue(id) {
                return;
            }
            let control = self.clone();
            tokio::spawn(async move {
                let lock = control.0.context.volumes.lock_of(id);
                let guard = lock.lock().await;
                control.0.context.volumes.dequeue(id);
                control.reconcile_locked(id).await;
                drop(guard);
                drop(change);
            });
        }
    }

    async fn try_reconcile_locked(&self, id: Uuid) -> Result<(), StoreError> {
        self.try_reconcile_with(id, None).await
    }

    async fn try_reconcile_with(
        &self,
        id: Uuid,
        known: Option<VolumeRecords>,
    ) -> Result<(), StoreError> {
        let mut known =
            known.filter(|known| !self.0.context.volumes.is_older_than_known(id, known));
        for _ in 0..MAX_RECONCILE_STEPS {
            let records = match known.take() {
                Some(records) => records,
                None => self.read_records(id).await?,
            };
            self.0.context.volumes.update_records(id, &records);
            let mirror = self.mirror_state(&records);
            let observed = self.0.context.volumes.observed(id);
            if self.must_change_core(&records, &observed) {
                self.close_to_change_core(id).await;
                continue;
            }
            let step = next_step(
                records.stored.as_ref(),
                mirror,
                self.0.context.this_process(),
                &observed,
            );
            if matches!(step, Step::Idle | Step::Erase | Step::RemovePlacement | Step::RemoveRecord)
            {
                self.publish_unavailable(id).await;
            }
            if step == Step::Idle {
                if records.stored.is_none() {
                    self.0.context.volumes.forget_volume(id);
                }
                return Ok(());
            }
            // These steps do not change the records; the watch reports changes by other nodes.
            if matches!(step, Step::Open | Step::Publish) {
                known = Some(records.clone());
            }
            match self.take_step(step, id, records).await {
                // Another node changed the record first: the new record decides.
                Ok(StepOutcome::Done) | Err(StoreError::Conflict { .. }) => {}
                Ok(StepOutcome::RetryLater) => {
                    // Tell initiators now: the retry may take long.
                    self.publish_unavailable(id).await;
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        tracing::error!(volume = %id, "reconciliation of a volume makes no progress");
        Ok(())
    }

    /// Whether a volume is open on another core than its target.
    fn must_change_core(&self, records: &VolumeRecords, observed: &Observed) -> bool {
        let record = records.stored.as_ref().map(|stored| &stored.record);
        matches!(observed, Observed::Open { .. })
            && record.is_some_and(|r| {
                r.stage == VolumeStage::Ready
                    && self.0.context.engine.must_change_core(r.id, r.target_owner())
            })
    }

    /// Closes a volume so that it opens on another core. Other nodes go on without a pause.
    async fn close_to_change_core(&self, id: Uuid) {
        if self.joined_cluster().is_some()
            && let Err(error) = self.0.context.engine.leave_mirror(id).await
        {
            tracing::debug!(volume = %id, %error, "cannot leave the mirror before moving to \
                another core");
        }
        self.close_volume(id, false).await;
    }

    /// Reads the current records of a volume from the store.
    async fn read_records(&self, id: Uuid) -> Result<VolumeRecords, StoreError> {
        let stored = self.read_volume_record(id).await?;
        let mirror = match self.joined_cluster() {
            Some(_) => mirror_records::get_record(&*self.0.context.meta, id).await?,
            None => None,
        };
        Ok(VolumeRecords { stored, mirror })
    }

    fn mirror_state<'a>(&self, records: &'a VolumeRecords) -> MirrorState<'a> {
        match (&records.mirror, self.joined_cluster()) {
            (_, None) => MirrorState::Standalone,
            (None, Some(_)) => MirrorState::Absent,
            (Some((record, revision)), Some(_)) => MirrorState::Present(record, *revision),
        }
    }

    /// Takes one step. Errors are those of the store; errors of the backing are recorded.
    async fn take_step(
        &self,
        step: Step,
        id: Uuid,
        records: VolumeRecords,
    ) -> Result<StepOutcome, StoreError> {
        let mirror = records.mirror;
        match (step, records.stored) {
            (Step::Idle, _) => {}
            (Step::Close, stored) => {
                let erased = stored.is_some_and(|s| s.record.stage == VolumeStage::Deleting);
                self.close_volume(id, erased).await;
            }
            (Step::Publish, stored) => self.publish_volume(stored.as_ref()).await,
            (_, None) => {}
            (Step::CreateImage, Some(stored)) => self.create_image_step(stored).await?,
            (Step::MarkReady, Some(stored)) => self.mark_volume_ready(stored).await?,
            (Step::AbortCreation, Some(stored)) => {
                self.update_record(stored, |record| record.stage = VolumeStage::Deleting).await?;
            }
            (Step::InspectImage, Some(stored)) => return self.inspect_image(stored).await,
            (Step::Open, Some(stored)) => self.open_volume(&stored).await,
            (Step::RecordImage(image), Some(stored)) => {
                tracing::info!(volume = %stored.record.name, ?image, "recording a new image \
                    identity");
                self.update_record(stored, |record| record.record_image(self.this_node(), image))
                    .await?;
            }
            (Step::CreateMirror | Step::AddToMirror | Step::RemoveFromMirror, Some(stored)) => {
                return self.change_mirror_replicas(step, &stored.record, mirror).await;
            }
            (Step::LeaveMirror, Some(stored)) => {
                return Ok(self.leave_mirror(&stored.record).await);
            }
            (Step::Erase, Some(stored)) => self.erase_replica(&stored.record).await,
            (Step::RemovePlacement, Some(stored)) => {
                self.remove_own_placement(stored, mirror).await?;
            }
            (Step::RemoveRecord, Some(stored)) => {
                self.remove_volume_record(&stored, mirror).await?;
            }
        }
        Ok(StepOutcome::Done)
    }

    /// Replaces a volume's record by the result of `change`.
    async fn update_record(
        &self,
        stored: StoredVolumeRecord,
        change: impl FnOnce(&mut VolumeRecord),
    ) -> Result<(), StoreError> {
        let StoredVolumeRecord { mut record, revision } = stored;
        change(&mut record);
        self.0.context.meta.commit(record.replace_changes(revision)).await.map(drop)
    }

    /// Creates the image. Remains of an attempt by an earlier run are removed first.
    async fn create_image_step(&self, stored: StoredVolumeRecord) -> Result<(), StoreError> {
        let record = &stored.record;
        let force = record.placement(self.this_node()).is_some_and(|placement| {
            matches!(placement.stage, PlacementStage::Creating { force: true })
        });
        let created = self.create_image(record, force).await;
        self.0.context.volumes.observe(record.id, Observed::Closed);
        fault_point::reach(FaultPoint::VolumeImageCreated);
        self.record_image_creation(stored, created).await
    }

    async fn create_image(
        &self,
        record: &VolumeRecord,
        force: bool,
    ) -> Result<ImageInfo, BackingError> {
        self.0
            .pools
            .check_backing_usable(record)
            .await
            .map_err(|e| BackingError::refused(e.message))?;
        if let Some(e) = self.old_image_error(record).await {
            return Err(e);
        }
        self.erase_image(record).await?;
        self.0.context.engine.create_image(record, force).await
    }

    async fn record_image_creation(
        &self,
        stored: StoredVolumeRecord,
        created: Result<ImageInfo, BackingError>,
    ) -> Result<(), StoreError> {
        let (me, id) = (self.this_node(), stored.record.id);
        let stage = match &created {
            Ok(_) => PlacementStage::Ready,
            Err(e) => {
                tracing::warn!(volume = %stored.record.name, error = %e, "cannot create the image");
                PlacementStage::Failed { reason: e.to_string() }
            }
        };
        self.0.context.volumes.set_creation_error(id, created.as_ref().err().cloned());
        let image = created.ok();
        self.update_record(stored, |record| {
            if let Some(image) = image {
                record.record_image(me, image);
            }
            if let Some(placement) = record.placement_mut(me) {
                placement.stage = stage;
            }
        })
        .await
    }

    /// All replicas are made: the volume now exists.
    async fn mark_volume_ready(&self, stored: StoredVolumeRecord) -> Result<(), StoreError> {
        let StoredVolumeRecord { mut record, revision } = stored;
        record.stage = VolumeStage::Ready;
        record.creator = None;
        let mut changes = record.replace_changes(revision);
        if self.joined_cluster().is_some() {
            changes.push(mirror_records::creation(record.id, &initial_mirror_record(&record)));
        }
        fault_point::reach(FaultPoint::VolumeImagesComplete);
        self.0.context.meta.commit(changes).await?;
        fault_point::reach(FaultPoint::VolumeCreated);
        tracing::info!(volume = %record.name, id = %record.id, bytes = record.size_bytes, "created");
        Ok(())
    }

    async fn inspect_image(&self, stored: StoredVolumeRecord) -> Result<StepOutcome, StoreError> {
        let id = stored.record.id;
        let inspected = match self.0.pools.check_pool_of(&stored.record) {
            Ok(()) => self.0.context.engine.inspect_image(&stored.record).await,
            Err(e) => Err(e),
        };
        match inspected {
            Ok(image) => {
                self.update_record(stored, |record| record.record_image(self.this_node(), image))
                    .await?;
                Ok(StepOutcome::Done)
            }
            Err(e) => {
                self.0.context.volumes.observe(id, Observed::OpenFailed { reason: e.to_string() });
                Ok(StepOutcome::RetryLater)
            }
        }
    }

    async fn open_volume(&self, stored: &StoredVolumeRecord) {
        let record = &stored.record;
        let opened = match self.0.pools.check_pool_of(record) {
            Ok(()) => self.0.context.engine.open(record).await,
            Err(e) => Err(e),
        };
        let observed = match opened {
            Ok(opened) => {
                tracing::info!(volume = %record.name, core = opened.core, "open");
                Observed::Open { core: opened.core, image: opened.image, published: None }
            }
            Err(e) => Observed::OpenFailed { reason: e.to_string() },
        };
        if let Observed::OpenFailed { reason } = &observed {
            tracing::error!(volume = %record.name, reason, "volume is offline");
        }
        self.0.context.volumes.observe(record.id, observed);
        self.apply_drain(record.id).await;
    }

    /// Ends the export of a volume and closes it.
    pub(super) async fn close_volume(&self, id: Uuid, erased: bool) {
        self.0.context.volumes.observe(id, Observed::Closed);
        self.publish_unavailable(id).await;
        if let Err(error) = self.0.context.engine.close(id, erased).await {
            tracing::error!(volume = %id, %error, "a volume did not close cleanly");
        }
    }

    /// Adds this replica to the mirror, or removes it.
    async fn change_mirror_replicas(
        &self,
        step: Step,
        record: &VolumeRecord,
        mirror: Option<(MirrorConfig, Revision)>,
    ) -> Result<StepOutcome, StoreError> {
        let me = self.this_node();
        let image = record.placement(me).and_then(|placement| placement.image);
        let change = match (step, mirror, image) {
            (Step::CreateMirror, None, Some(_)) => {
                Ok(mirror_records::creation(record.id, &initial_mirror_record(record)))
            }
            (Step::AddToMirror, Some((current, at)), Some(image)) => {
                let next = current.with_replica(me, image, random_config_id());
                next.map(|next| mirror_records::replacement(record.id, at, &next))
            }
            (_, Some((current, at)), _) => {
                let next = current.without_replica(me, random_config_id());
                next.map(|next| mirror_records::replacement(record.id, at, &next))
            }
            _ => return Ok(StepOutcome::RetryLater),
        };
        match change {
            Ok(change) => self.0.context.meta.commit(vec![change]).await.map(|_| StepOutcome::Done),
            Err(why) => {
                tracing::warn!(volume = %record.name, %why, "cannot change the replicas of the \
                    volume now");
                Ok(StepOutcome::RetryLater)
            }
        }
    }

    /// Asks the mirror to go on without this replica; the mirror refuses if it is the last.
    async fn leave_mirror(&self, record: &VolumeRecord) -> StepOutcome {
        match self.0.context.engine.leave_mirror(record.id).await {
            Ok(true) => StepOutcome::Done,
            Ok(false) => {
                tracing::info!(volume = %record.name, "no other replica can take over; keeping \
                    this one");
                StepOutcome::RetryLater
            }
            Err(error) => {
                tracing::warn!(volume = %record.name, %error, "leaving the mirror failed");
                StepOutcome::RetryLater
            }
        }
    }

    async fn erase_image(&self, record: &VolumeRecord) -> Result<(), BackingError> {
        self.0.pools.check_pool_of(record)?;
        self.0.context.engine.erase_image_of(record).await
    }

    async fn erase_replica(&self, record: &VolumeRecord) {
        let erased = match self.0.pools.has_lost_pool(record) {
            true => Ok(()),
            false => self.erase_image(record).await,
        };
        let observed = match erased {
            Ok(()) => Observed::Erased,
            Err(e) => {
                tracing::warn!(volume = %record.name, error = %e, "cannot erase the image");
                Observed::EraseFailed { reason: e.to_string() }
            }
        };
        fault_point::reach(FaultPoint::VolumeImageErased);
        self.0.context.volumes.observe(record.id, observed);
    }

    /// Removes this replica from the record. The node that removes the last one of a volume that is
    /// being deleted removes the record too.
    async fn remove_own_placement(
        &self,
        stored: StoredVolumeRecord,
        mirror: Option<(MirrorConfig, Revision)>,
    ) -> Result<(), StoreError> {
        let me = self.this_node();
        let last = stored.record.placements.iter().all(|placement| placement.node == me);
        if stored.record.stage == VolumeStage::Deleting && last {
            return self.remove_volume_record(&stored, mirror).await;
        }
        let id = stored.record.id;
        self.update_record(stored, |record| {
            record.placements.retain(|placement| placement.node != me);
        })
        .await?;
        self.0.context.volumes.observe(id, Observed::Closed);
        Ok(())
    }

    async fn remove_volume_record(
        &self,
        stored: &StoredVolumeRecord,
        mirror: Option<(MirrorConfig, Revision)>,
    ) -> Result<(), StoreError> {
        let StoredVolumeRecord { record, revision } = stored;
        let name = self.0.context.meta.get(&record::name_key(&record.name)).await?;
        let name = name.map(|e| e.revision).unwrap_or_default();
        let mut changes = record.remove_changes(*revision, name);
        changes.extend(mirror.map(|(_, at)| mirror_records::removal(record.id, at)));
        self.0.context.meta.commit(changes).await?;
        self.0.context.volumes.observe(record.id, Observed::Closed);
        tracing::info!(volume = %record.name, id = %record.id, "deleted");
        Ok(())
    }
}

/// The first mirror record of a volume. All its images are new and equal, or there is only one, so
/// all are in sync. First primaries are spread over the nodes.
fn initial_mirror_record(record: &VolumeRecord) -> MirrorConfig {
    let replica = |node: NodeId, image: Uuid| ConfigReplica { node, image, is_new: false };
    let images = record.placements.iter().filter_map(|p| Some((p.node, p.image?)));
    let replicas: Vec<_> = images.map(|(node, image)| replica(node, image)).collect();
    let none_yet = Incarnation(0);
    let in_sync = replicas.iter().map(|r| InSyncMember { node: r.node, incarnation: none_yet });
    let count = replicas.len().max(1) as u128;
    let first = usize::try_from(record.id.as_u128() % count).unwrap_or(0);
    MirrorConfig {
        epoch: Epoch(1),
        config_id: random_config_id(),
        primary: replicas.get(first).map_or(NodeId(0), |r| r.node),
        cold_start_epoch: Epoch::default(),
        history: CopyHistory::default(),
        in_sync: in_sync.collect(),
        replicas,
    }
}

/// A unique name for a mirror record.
pub(crate) fn random_config_id() -> u128 {
    Uuid::new_v4().as_u128()
}

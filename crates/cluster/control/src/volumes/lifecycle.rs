//! Creating and deleting volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::{
    ApiError, CreateVolumeRequest, CreateVolumeResult, CreateVolumeResults, ErrorCode, NewBacking,
    Size, Volume, VolumeName,
};
use futures_util::{StreamExt, stream};
use tokio::sync::{OwnedRwLockReadGuard, watch};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::VolumeControl;
use super::edit::check_access;
use crate::context::now_s;
use crate::errors::{backing_error, store_error};
use crate::secrets::seal_chap;
use cluster::store::StoreError;
use records::reconcile::Observed;
use records::record::{
    self, LunMapping, MAX_REPLICAS_WANTED, PlacementStage, ReplicaPlacement, StoredVolumeRecord,
    VolumeRecord, VolumeStage,
};
use status::memory;
use wire::plural;

/// Longest wait until all nodes have made their replicas.
const CREATE_TIMEOUT: Duration = Duration::from_secs(60);

/// How many volumes of one request are created at a time.
const BATCH_CONCURRENCY: usize = 8;

/// Longest wait until a new volume serves.
const SERVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Longest wait until all nodes have erased their replicas.
const DELETE_TIMEOUT: Duration = Duration::from_secs(30);

/// How soon nodes that have just made replicas are asked again whether they serve.
const PEER_POLL: Duration = Duration::from_millis(50);

/// How often these waits check without a notification.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

impl VolumeControl {
    /// Creates a volume. A repeated request returns the existing volume.
    ///
    /// # Errors
    /// [`ErrorCode::Exists`] if the name belongs to another volume; errors of the request, or of
    /// the backing.
    pub async fn create_volume(&self, request: CreateVolumeRequest) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.run_to_completion(async move { control.create_volume_now(request).await }).await
    }

    /// Creates several volumes, some at a time, as creation mostly waits. A failure does not affect
    /// the others.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] for none or too many.
    pub async fn create_volumes(
        &self,
        requests: Vec<CreateVolumeRequest>,
    ) -> Result<CreateVolumeResults, ApiError> {
        if !(1..=api::MAX_VOLUMES_PER_REQUEST).contains(&requests.len()) {
            let message = format!("{} cannot be created at once", plural(requests.len(), "volume"));
            return Err(ApiError::new(ErrorCode::InvalidRequest, message)
                .with_hint(format!("ask for 1 to {} at once", api::MAX_VOLUMES_PER_REQUEST)));
        }
        let mut names = BTreeSet::new();
        if let Some(duplicate) = requests.iter().find(|request| !names.insert(&request.name)) {
            let message = format!("volume {} is named twice", duplicate.name);
            return Err(
                ApiError::new(ErrorCode::InvalidRequest, message).with_hint("nothing was created")
            );
        }
        // Volumes created concurrently are not in the count yet.
        let mut before = 0;
        let created = requests.into_iter().map(|request| {
            let limit = self.check_volume_limit(&request.name, before);
            before += usize::from(
                limit.is_ok() && self.0.context.volumes.id_by_name(&request.name).is_none(),
            );
            async move {
                let name = request.name.clone();
                let created = match limit {
                    Ok(()) => self.create_volume(request).await,
                    Err(full) => Err(full),
                };
                let (volume, error) = match created {
                    Ok(volume) => (Some(volume), None),
                    Err(error) => (None, Some(error)),
                };
                CreateVolumeResult { name, volume, error }
            }
        });
        let created: Vec<_> = created.collect();
        let volumes = stream::iter(created).buffered(BATCH_CONCURRENCY).collect().await;
        Ok(CreateVolumeResults { volumes })
    }

    /// Fails if there is no room for one more volume beside the existing ones and `others`. An
    /// existing volume needs no room.
    fn check_volume_limit(&self, name: &VolumeName, others: usize) -> Result<(), ApiError> {
        if self.0.context.volumes.id_by_name(name).is_some() {
            return Ok(());
        }
        let count = self.0.context.volumes.count() + others;
        let max_volumes = self.0.context.settings.max_volumes;
        if count >= max_volumes {
            let message =
                format!("the node already has its limit of {}", plural(max_volumes, "volume"));
            return Err(ApiError::new(ErrorCode::Conflict, message)
                .with_hint("raise limits.volumes in the configuration, or delete volumes"));
        }
        memory::check_memory(
            count,
            self.0.context.engine.cores(),
            self.0.context.settings.memory_bytes,
        )
    }

    async fn create_volume_now(&self, request: CreateVolumeRequest) -> Result<Volume, ApiError> {
        check_request(&request)?;
        let _leave = self.creation_permit()?;
        if let Some(id) = self.0.context.volumes.id_by_name(&request.name) {
            return self.existing_volume(id, &request).await;
        }
        self.check_volume_limit(&request.name, 0)?;
        let record = self.new_record(&request).await?;
        check_access(&record, record.required_auth())?;
        self.check_backing_unused(&record).await?;
        let committed = self.0.context.meta.commit(record.insert_changes()).await;
        match committed {
            Err(StoreError::Conflict { .. }) => return self.resolve_name_conflict(&request).await,
            committed => {
                // After an error the record may or may not exist: read it.
                let reconciled = self.try_reconcile(record.id).await;
                committed.and(reconciled).map_err(|e| store_error(&e))?;
            }
        }
        self.await_creation(record.id, &request.name).await?;
        self.await_open(record.id, &record.name).await
    }

    /// Waits until all replicas are made and the volume exists; rolls back on failure.
    async fn await_creation(&self, id: Uuid, name: &VolumeName) -> Result<(), ApiError> {
        let deadline = Instant::now() + CREATE_TIMEOUT;
        let mut changes = self.0.context.volumes.changes(id);
        loop {
            changes.mark_unchanged();
            match self.0.context.volumes.get(id) {
                Some((stored, _)) if stored.record.stage == VolumeStage::Ready => return Ok(()),
                Some((stored, _)) if stored.record.stage == VolumeStage::Creating => {
                    if Instant::now() >= deadline {
                        return Err(self.abort_creation(id, name).await);
                    }
                }
                Some((stored, _)) => return Err(self.creation_error(id, name, &stored)),
                None => return Err(self.creation_failure(id, name, None)),
            }
            // Changes are notified; check now and then all the same.
            if timeout(POLL_INTERVAL, changes.changed()).await.is_err() {
                self.try_reconcile(id).await.map_err(|e| store_error(&e))?;
            }
        }
    }

    /// Some node has not made its replica in time. Only the node that creates the volume rolls
    /// back.
    async fn abort_creation(&self, id: Uuid, name: &VolumeName) -> ApiError {
        let lock = self.0.context.volumes.lock_of(id);
        let _held = lock.lock().await;
        let stored = match self.read_volume_record(id).await {
            Ok(Some(stored)) if stored.record.stage == VolumeStage::Creating => stored,
            Ok(_) => {
                return ApiError::new(
                    ErrorCode::Conflict,
                    format!("volume {name} has just changed"),
                )
                .with_hint(format!("see `windrose volume show {name}`"));
            }
            Err(e) => return store_error(&e),
        };
        let StoredVolumeRecord { mut record, revision } = stored;
        let pending = record.placements.iter().filter(|p| p.stage != PlacementStage::Ready);
        let pending: Vec<_> = pending.map(|p| self.node_name(p.node)).collect();
        if record.creator == Some(self.0.context.this_process()) {
            record.stage = VolumeStage::Deleting;
            if let Err(e) = self.0.context.meta.commit(record.replace_changes(revision)).await {
                return store_error(&e);
            }
            self.reconcile_locked(id).await;
        }
        let message = format!(
            "volume {name}: node {} did not create its replica in time",
            pending.join(", ")
        );
        ApiError::new(ErrorCode::Backing, message).with_hint("see that node's log")
    }

    fn creation_error(&self, id: Uuid, name: &VolumeName, stored: &StoredVolumeRecord) -> ApiError {
        let reason = stored.record.placements.iter().find_map(|p| match &p.stage {
            PlacementStage::Failed { reason } => Some(match p.node {
                node if node == self.this_node() => reason.clone(),
                node => format!("node {}: {reason}", self.node_name(node)),
            }),
            _ => None,
        });
        self.creation_failure(id, name, reason)
    }

    /// Why a volume was not created, as far as is known.
    fn creation_failure(&self, id: Uuid, name: &VolumeName, reason: Option<String>) -> ApiError {
        match (self.0.context.volumes.creation_error(id), reason) {
            (Some(e), _) => backing_error(name, &e),
            (None, Some(reason)) => {
                ApiError::new(ErrorCode::Backing, format!("volume {name}: {reason}"))
            }
            (None, None) => deleted_just_now(name),
        }
    }

    /// The volume, if it could be opened; in a cluster once it serves, or after a short wait.
    pub(super) async fn await_open(&self, id: Uuid, name: &VolumeName) -> Result<Volume, ApiError> {
        let deadline = Instant::now() + SERVE_TIMEOUT;
        let mut changes = self.0.context.volumes.changes(id);
        while Instant::now() < deadline && !self.await_serving(id, &mut changes).await {}
        match self.0.context.volumes.observed(id) {
            Observed::OpenFailed { reason } | Observed::EraseFailed { reason } => Err(
                ApiError::new(ErrorCode::Backing, format!("volume {name} is offline: {reason}")),
            ),
            _ => self.volume_by_id(id).await,
        }
    }

    /// Waits briefly until a volume serves with all its replicas in sync; returns whether it does,
    /// or waiting is pointless. Until then the loss of one node stops the volume: no replica can go
    /// on alone.
    async fn await_serving(&self, id: Uuid, changes: &mut watch::Receiver<u64>) -> bool {
        changes.mark_unchanged();
        match self.0.context.volumes.get(id) {
            Some((stored, Observed::Open { .. })) => {
                let replicas = stored.record.placements.len();
                self.0.context.engine.wait_serving_with(id, replicas, POLL_INTERVAL).await
            }
            // A volume exists before its nodes open it.
            Some((stored, Observed::Closed))
                if stored.record.placement(self.this_node()).is_some() =>
            {
                let _ = timeout(POLL_INTERVAL, changes.changed()).await;
                false
            }
            Some((stored, _)) if stored.record.placement(self.this_node()).is_none() => {
                let serves = self.is_served_elsewhere(&stored.record).await;
                if !serves {
                    let _ = timeout(PEER_POLL, changes.changed()).await;
                }
                serves
            }
            _ => true,
        }
    }

    /// Whether a volume without a replica here serves with all replicas in sync, by fresh reports.
    async fn is_served_elsewhere(&self, record: &VolumeRecord) -> bool {
        if self.joined_cluster().is_none() || record.stage != VolumeStage::Ready {
            return true;
        }
        let mirror = self.0.context.volumes.mirror(record.id);
        let in_sync = mirror.is_some_and(|mirror| mirror.in_sync.len() == record.placements.len());
        in_sync && self.is_served(record).await.unwrap_or(false)
    }

    async fn new_record(&self, request: &CreateVolumeRequest) -> Result<VolumeRecord, ApiError> {
        let (id, settings) = (Uuid::new_v4(), &self.0.context.settings);
        let free = self.free_space_by_node(&request.backing).await;
        let count = usize::from(request.replicas).max(request.nodes.len());
        let nodes = match (request.nodes.is_empty(), count) {
            // Prefer the node that got the request.
            (true, 1) if self.is_data_node() => vec![self.this_node()],
            _ => self.choose_nodes(&request.nodes, count, (&[], &request.backing), &free)?,
        };
        let placement =
            |node| self.new_placement(id, &request.name, node, &request.backing, request.force);
        let mut placements = nodes.into_iter().map(placement).collect::<Result<Vec<_>, _>>()?;
        placements.sort_by_key(|p| p.node);
        let chap = match &request.chap {
            Some(chap) => {
                Some(seal_chap(chap, (id.into(), None), &self.0.secrets.sealing_keys().await?)?)
            }
            None => None,
        };
        Ok(VolumeRecord {
            id,
            name: request.name.clone(),
            stage: VolumeStage::Creating,
            size_bytes: request.size_bytes.unwrap_or(0),
            block_size: request.block_size,
            thin: request.thin,
            placements,
            replicas_wanted: u8::try_from(count).unwrap_or(MAX_REPLICAS_WANTED),
            repair: None,
            creator: Some(self.0.context.this_process()),
            preferred_primary: None,
            protocols: request.protocols,
            iscsi_target: format!("{}:{}", settings.iscsi_authority, request.name),
            mapping: LunMapping::default(),
            nvme_subsystem: format!("{}:{}", settings.nvme_authority, request.name),
            allow: request.allow.iter().cloned().collect(),
            chap,
            chap_by_initiator: BTreeMap::new(),
            dhchap_by_host: BTreeMap::new(),
            tls_by_host: BTreeMap::new(),
            created_s: now_s(),
        })
    }

    async fn check_backing_unused(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        let path =
            record.placement(self.this_node()).and_then(|placement| placement.backing.path());
        match path {
            Some(path) => self.0.pools.check_unused_paths(vec![path.to_owned()]).await,
            None => Ok(()),
        }
    }

    /// Another request took the name between the check and the commit.
    async fn resolve_name_conflict(
        &self,
        request: &CreateVolumeRequest,
    ) -> Result<Volume, ApiError> {
        let entry = self.0.context.meta.get(&record::name_key(&request.name)).await;
        match entry.map_err(|e| store_error(&e))? {
            Some(entry) => {
                let id = record::decode_name(&entry).map_err(|e| store_error(&e))?;
                self.existing_volume(id, request).await
            }
            None => Err(deleted_just_now(&request.name)),
        }
    }

    /// The volume that has the name already, if it matches the request.
    async fn existing_volume(
        &self,
        id: Uuid,
        request: &CreateVolumeRequest,
    ) -> Result<Volume, ApiError> {
        // Waits until a concurrent creation ends.
        self.reconcile_volume(id).await;
        let name = &request.name;
        if matches!(self.0.context.volumes.get(id), Some((s, _)) if s.record.stage == VolumeStage::Creating)
        {
            self.await_creation(id, name).await?;
        }
        let Some((stored, _)) = self.0.context.volumes.get(id) else {
            return Err(deleted_just_now(name));
        };
        if stored.record.stage != VolumeStage::Ready {
            return Err(ApiError::new(
                ErrorCode::Conflict,
                format!("volume {name} is being deleted"),
            )
            .with_hint("choose another name, or try again"));
        }
        let differences = self.volume_differences(&stored.record, request);
        if differences.is_empty() {
            return self.await_open(id, name).await;
        }
        let message =
            format!("volume {name} exists with another {}", differences.join(", another "));
        Err(ApiError::new(ErrorCode::Exists, message)
            .with_hint(format!("choose another name, or see `windrose volume show {name}`")))
    }

    /// Where the replica of a volume is, if not at the requested place.
    fn backing_difference(
        &self,
        record: &VolumeRecord,
        placement: &ReplicaPlacement,
        request: &CreateVolumeRequest,
    ) -> Option<String> {
        let NewBacking::Pool { pool } = &request.backing else {
            let same = self.new_placement(
                record.id,
                &record.name,
                placement.node,
                &request.backing,
                request.force,
            );
            // An unknown place counts as different.
            let differs = !same.is_ok_and(|same| same.backing == placement.backing);
            return differs.then(|| format!("place (it is in {})", placement.backing));
        };
        // Whether such a pool exists or not.
        let differs = placement.backing.pool() != Some(pool);
        differs.then(|| format!("place (it is in {}, not in pool {pool})", placement.backing))
    }

    /// The differences between a volume and a creation request.
    fn volume_differences(
        &self,
        record: &VolumeRecord,
        request: &CreateVolumeRequest,
    ) -> Vec<String> {
        let keyring = self.0.secrets.cached_keys();
        // A secret that cannot be read counts as different.
        let chap = record.chap.as_ref().and_then(|chap| chap.open(record.id, &keyring).ok());
        let unknown = record.chap.is_some() && chap.is_none();
        let replicas = usize::from(request.replicas).max(request.nodes.len());
        let kept_on =
            |name: &String| record.placements.iter().any(|p| self.node_name(p.node) == *name);
        let allow: BTreeSet<_> = request.allow.iter().cloned().collect();
        let nodes = || {
            let all: Vec<_> = record.placements.iter().map(|p| self.node_name(p.node)).collect();
            all.join(", ")
        };
        let thin = if record.thin { "thin" } else { "thick" };
        let elsewhere = record
            .placements
            .iter()
            .find_map(|placement| self.backing_difference(record, placement, request));
        let other_copies =
            replicas != usize::from(record.replicas_wanted) || !request.nodes.iter().all(kept_on);
        let size = request.size_bytes.filter(|size| *size != record.size_bytes);
        let differences = [
            size.map(|size| format!("size ({}, not {})", Size(record.size_bytes), Size(size))),
            (request.block_size != record.block_size)
                .then(|| format!("block size ({} bytes)", record.block_size.bytes())),
            (request.thin != record.thin).then(|| format!("provisioning (it is {thin})")),
            elsewhere,
            other_copies.then(|| format!("choice of replicas (they are on {})", nodes())),
            (request.protocols != record.protocols).then(|| "choice of protocols".to_owned()),
            (allow != record.allow).then(|| "list of initiators".to_owned()),
            (unknown || request.chap != chap).then(|| "CHAP user or secret".to_owned()),
        ];
        differences.into_iter().flatten().collect()
    }

    /// Deletes a volume and its data.
    ///
    /// # Errors
    /// [`ErrorCode::InUse`] while initiators are logged in at any node, or may be, unless `force`;
    /// [`ErrorCode::Conflict`] while no replica serves, unless `discard`; [`ErrorCode::Backing`]
    /// when the backing cannot be erased: the volume is then offline and can be deleted again.
    pub async fn delete_volume(
        &self,
        name: VolumeName,
        force: bool,
        discard: bool,
    ) -> Result<(), ApiError> {
        let control = self.clone();
        self.run_to_completion(
            async move { control.delete_volume_now(&name, force, discard).await },
        )
        .await
    }

    async fn delete_volume_now(
        &self,
        name: &VolumeName,
        force: bool,
        discard: bool,
    ) -> Result<(), ApiError> {
        let id = self.volume_id(name)?;
        let lock = self.0.context.volumes.lock_of(id);
        let _held = lock.lock().await;
        // Checked under the lock: a concurrent request may have deleted it.
        self.volume_id(name)?;
        if !force {
            self.check_unused(id, name).await?;
            self.check_unused_on_peers(id, name).await?;
        }
        if !discard && let Some((stored, _)) = self.0.context.volumes.get(id) {
            self.check_delete(&stored.record).await?;
        }
        self.mark_volume_deleting(id).await?;
        self.0.context.volumes.clear_failure(id);
        self.reconcile_locked(id).await;
        self.await_deletion(id, name).await
    }

    /// Marks a volume as being deleted, on all nodes.
    async fn mark_volume_deleting(&self, id: Uuid) -> Result<(), ApiError> {
        let stored = self.read_volume_record(id).await.map_err(|e| store_error(&e))?;
        let Some(StoredVolumeRecord { mut record, revision }) = stored else { return Ok(()) };
        if record.stage == VolumeStage::Deleting {
            return Ok(());
        }
        self.check_target_not_shared(&record)?;
        record.stage = VolumeStage::Deleting;
        // Its LUN is free for another volume from here on.
        let left = std::mem::take(&mut record.mapping).shared_target.map(|b| b.volume);
        let mut changes = record.replace_changes(revision);
        if let Some(owner) = left {
            let stored = self.read_volume_record(owner).await.map_err(|e| store_error(&e))?;
            if let Some(StoredVolumeRecord { record: mut owner, revision }) = stored {
                owner.mapping.other_luns.retain(|_, by| *by != id);
                changes.extend(owner.replace_changes(revision));
            }
        }
        let committed = self.0.context.meta.commit(changes).await;
        committed.map_err(|e| store_error(&e))?;
        if let Some(owner) = left {
            self.reconcile_in_background(owner);
        }
        Ok(())
    }

    fn check_target_not_shared(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        let other_luns = &record.mapping.other_luns;
        if other_luns.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = other_luns.values().map(|id| self.volume_display_name(*id)).collect();
        let name = &record.name;
        let message =
            format!("other volumes also use the target of volume {name}: {}", names.join(", "));
        Err(ApiError::new(ErrorCode::Conflict, message).with_hint(self.own_target_hint(record)))
    }

    /// Waits until all replicas are erased. The caller holds the lock.
    async fn await_deletion(&self, id: Uuid, name: &VolumeName) -> Result<(), ApiError> {
        let deadline = Instant::now() + DELETE_TIMEOUT;
        let mut changes = self.0.context.volumes.changes(id);
        loop {
            changes.mark_unchanged();
            let Some((stored, observed)) = self.0.context.volumes.get(id) else { return Ok(()) };
            if let Observed::EraseFailed { reason } = observed {
                let message = format!("volume {name} is offline, and {reason}");
                return Err(ApiError::new(ErrorCode::Backing, message)
                    .with_hint("remove the cause and delete it again"));
            }
            let others = stored.record.placements.iter().filter(|p| p.node != self.this_node());
            let others: Vec<_> = others.map(|p| self.node_name(p.node)).collect();
            if others.is_empty() || stored.record.placement(self.this_node()).is_some() {
                let message = format!("volume {name} is not deleted yet");
                return Err(ApiError::new(ErrorCode::Internal, message)
                    .with_hint("see the node's log, then delete it again"));
            }
            if self.only_down_nodes_remain(&stored.record) {
                // The deletion is committed: the remaining nodes erase theirs once they run, and
                // the status says so.
                return Ok(());
            }
            if Instant::now() >= deadline {
                let message = format!(
                    "volume {name} is being deleted, but its replica on {} is not erased yet",
                    others.join(", ")
                );
                return Err(ApiError::new(ErrorCode::Conflict, message).with_hint(
                    "see the log of that node; the name can be reused once the replica is erased",
                ));
            }
            // With or without a notification, the records decide.
            let _ = timeout(POLL_INTERVAL, changes.changed()).await;
            self.reconcile_locked(id).await;
        }
    }

    /// Whether only replicas on down nodes remain of a volume that is being deleted.
    fn only_down_nodes_remain(&self, record: &VolumeRecord) -> bool {
        let mut left = record.clone();
        while let Some(node) = self.down_replica_node(&left) {
            left.remove_placement(node);
        }
        record.stage == VolumeStage::Deleting && left.placements.is_empty()
    }

    pub(super) async fn check_unused(&self, id: Uuid, name: &VolumeName) -> Result<(), ApiError> {
        let sessions = self.sessions_of(id).await;
        let Some(first) = sessions.first() else { return Ok(()) };
        let (count, who) = (sessions.len(), &first.initiator);
        let message = match count {
            1 => format!("volume {name} is in use by {who}"),
            _ => format!("volume {name} is in use by {count} sessions, one of {who}"),
        };
        Err(ApiError::new(ErrorCode::InUse, message)
            .with_hint("log out there first, or delete with --force (`force=true`)"))
    }

    /// A permit to create a volume, valid while it is held.
    fn creation_permit(&self) -> Result<OwnedRwLockReadGuard<()>, ApiError> {
        // A volume created while the node enters a cluster would be in the store that it leaves
        // behind.
        let permit = Arc::clone(&self.0.context.creation_lock).try_read_owned().ok();
        permit.filter(|_| !*self.0.context.restart.borrow()).ok_or_else(|| {
            let message = "this node is about to join or leave a cluster";
            ApiError::new(ErrorCode::Conflict, message).with_hint(
                "create the volume when `windrose cluster nodes` shows that this has ended",
            )
        })
    }
}

fn deleted_just_now(name: &VolumeName) -> ApiError {
    ApiError::new(ErrorCode::Conflict, format!("volume {name} was deleted just now"))
        .with_hint("try again")
}

/// Checks a request by itself.
fn check_request(request: &CreateVolumeRequest) -> Result<(), ApiError> {
    let replicas = usize::from(request.replicas).max(request.nodes.len());
    if !(1..=usize::from(MAX_REPLICAS_WANTED)).contains(&replicas) {
        let message = format!("volume {} cannot have {replicas} replicas", request.name);
        return Err(ApiError::new(ErrorCode::InvalidRequest, message)
            .with_hint(format!("give replicas from 1 to {MAX_REPLICAS_WANTED}")));
    }
    if replicas > 1 && request.size_bytes.is_none() {
        let message =
            format!("volume {} needs a size, as its devices may differ in size", request.name);
        return Err(ApiError::new(ErrorCode::InvalidRequest, message)
            .with_hint("give size_bytes; it is optional only for one replica on a device"));
    }
    match (request.size_bytes, &request.backing) {
        (Some(size), _) => api::check_volume_size(size, request.block_size)?,
        (None, NewBacking::Device { .. }) => {}
        (None, NewBacking::File { .. } | NewBacking::Pool { .. }) => {
            let message = format!("volume {} needs a size", request.name);
            return Err(ApiError::new(ErrorCode::InvalidRequest, message)
                .with_hint("give size_bytes; it is optional only for a volume on a device"));
        }
    }
    Ok(())
}

/// Fails for a relative path.
pub(super) fn require_absolute(path: &Path) -> Result<&Path, ApiError> {
    if path.is_relative() || path.as_os_str().as_encoded_bytes().contains(&0) {
        let message = format!("{} is not an absolute path", path.display());
        return Err(ApiError::new(ErrorCode::InvalidRequest, message)
            .with_hint("give a path that begins with /"));
    }
    Ok(path)
}

//! Creating and deleting volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::{
    ApiError, Code, CreateVolume, CreatedVolume, CreatedVolumes, NewBacking, Size, Volume,
    VolumeName,
};
use futures_util::{StreamExt, stream};
use tokio::sync::{OwnedRwLockReadGuard, watch};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::change::check_access;
use super::secrets::sealed;
use super::{Control, backing_error, memory, store_error};
use crate::meta::MetaError;
use crate::reconcile::Observed;
use crate::record::{self, MAX_COPIES, Mapping, Place, PlaceStage, Stage, Stored, VolumeRecord};
use wire::count;

/// Longest time until all nodes have made their copies.
const CREATION: Duration = Duration::from_secs(60);

/// How many volumes of one request are created at a time.
const AT_ONCE: usize = 8;

/// Longest time that a new volume is waited for until it serves.
const SERVING: Duration = Duration::from_secs(20);

/// Longest time until all nodes have erased their copies.
const DELETION: Duration = Duration::from_secs(30);

/// How soon nodes that have just made the copies of a volume are asked again whether they serve it.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// How often is looked whether that is so, where nothing is told.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

impl Control {
    /// Creates a volume. Asked for the same again, gives the volume that there is.
    ///
    /// # Errors
    /// [`Code::Exists`] if the name belongs to another volume; what is wrong with the request or
    /// with the backing.
    pub async fn create(&self, ask: CreateVolume) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.detached(async move { control.create_now(ask).await }).await
    }

    /// Creates several volumes, some at a time: most of what each takes is waiting. What becomes of one is nothing to
    /// the others.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`] for none or too many.
    pub async fn create_all(&self, asks: Vec<CreateVolume>) -> Result<CreatedVolumes, ApiError> {
        if !(1..=api::MAX_BATCH).contains(&asks.len()) {
            let message = format!("{} cannot be created at once", count(asks.len(), "volume"));
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint(format!("ask for 1 to {} at once", api::MAX_BATCH)));
        }
        let mut names = BTreeSet::new();
        if let Some(twice) = asks.iter().find(|ask| !names.insert(&ask.name)) {
            let message = format!("volume {} is named twice", twice.name);
            return Err(ApiError::new(Code::InvalidRequest, message).hint("nothing was created"));
        }
        // Those that are created at one time do not see each other where they are counted.
        let mut before = 0;
        let created = asks.into_iter().map(|ask| {
            let room = self.check_room(&ask.name, before);
            before += usize::from(room.is_ok() && self.0.state.find(&ask.name).is_none());
            async move {
                let name = ask.name.clone();
                let created = match room {
                    Ok(()) => self.create(ask).await,
                    Err(full) => Err(full),
                };
                let (volume, error) = match created {
                    Ok(volume) => (Some(volume), None),
                    Err(error) => (None, Some(error)),
                };
                CreatedVolume { name, volume, error }
            }
        });
        let created: Vec<_> = created.collect();
        let volumes = stream::iter(created).buffered(AT_ONCE).collect().await;
        Ok(CreatedVolumes { volumes })
    }

    /// Whether there is room for one more volume beside those that there are and so many others; one that is there
    /// needs none.
    fn check_room(&self, name: &VolumeName, others: usize) -> Result<(), ApiError> {
        if self.0.state.find(name).is_some() {
            return Ok(());
        }
        let present = self.0.state.count() + others;
        let most = self.0.settings.max_volumes;
        if present >= most {
            let message = format!("the node has its {}", count(most, "volume"));
            return Err(ApiError::new(Code::Conflict, message)
                .hint("raise limits.volumes in the configuration, or delete volumes"));
        }
        memory::check_room(present, self.0.engine.cores(), self.0.settings.pool_bytes)
    }

    async fn create_now(&self, ask: CreateVolume) -> Result<Volume, ApiError> {
        check(&ask)?;
        let _leave = self.may_create()?;
        if let Some(id) = self.0.state.find(&ask.name) {
            return self.existing(id, &ask).await;
        }
        self.check_room(&ask.name, 0)?;
        let record = self.new_record(&ask).await?;
        check_access(&record, record.guard())?;
        self.check_backing_unused(&record).await?;
        let committed = self.0.meta.commit(record.insert()).await;
        match committed {
            Err(MetaError::Changed { .. }) => return self.lost_race(&ask).await,
            committed => {
                // If that failed, nobody knows whether the record is there: this finds out.
                let settled = self.try_settle(record.id).await;
                committed.and(settled).map_err(|e| store_error(&e))?;
            }
        }
        self.await_creation(record.id, &ask.name).await?;
        self.opened(record.id, &record.name).await
    }

    /// Waits until all copies are made and the volume exists. Takes it back if that fails.
    async fn await_creation(&self, id: Uuid, name: &VolumeName) -> Result<(), ApiError> {
        let deadline = Instant::now() + CREATION;
        let mut changes = self.0.state.changes(id);
        loop {
            changes.mark_unchanged();
            match self.0.state.get(id) {
                Some((stored, _)) if stored.record.stage == Stage::Ready => return Ok(()),
                Some((stored, _)) if stored.record.stage == Stage::Creating => {
                    if Instant::now() >= deadline {
                        return Err(self.give_up(id, name).await);
                    }
                }
                Some((stored, _)) => return Err(self.creation_error(id, name, &stored)),
                None => return Err(self.not_made(id, name, None)),
            }
            // What happens to it is told; it is looked for all the same, now and then.
            if timeout(LOOK_AGAIN, changes.changed()).await.is_err() {
                self.try_settle(id).await.map_err(|e| store_error(&e))?;
            }
        }
    }

    /// Some node has not made its copy in time. Only who creates the volume takes it back.
    async fn give_up(&self, id: Uuid, name: &VolumeName) -> ApiError {
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        let stored = match self.stored(id).await {
            Ok(Some(stored)) if stored.record.stage == Stage::Creating => stored,
            Ok(_) => {
                return ApiError::new(Code::Conflict, format!("volume {name} has just changed"))
                    .hint(format!("see `windrose volume show {name}`"));
            }
            Err(e) => return store_error(&e),
        };
        let Stored { mut record, revision } = stored;
        let late = record.places.iter().filter(|p| p.stage != PlaceStage::Made);
        let late: Vec<_> = late.map(|p| self.node_name(p.node)).collect();
        if record.creator == Some(self.life()) {
            record.stage = Stage::Deleting;
            if let Err(e) = self.0.meta.commit(record.replace(revision)).await {
                return store_error(&e);
            }
            self.settle_held(id).await;
        }
        let message =
            format!("volume {name}: node {} has not made its copy in time", late.join(", "));
        ApiError::new(Code::Backing, message).hint("see that node's log")
    }

    fn creation_error(&self, id: Uuid, name: &VolumeName, stored: &Stored) -> ApiError {
        let reason = stored.record.places.iter().find_map(|p| match &p.stage {
            PlaceStage::Failed { reason } => Some(match p.node {
                node if node == self.me() => reason.clone(),
                node => format!("node {}: {reason}", self.node_name(node)),
            }),
            _ => None,
        });
        self.not_made(id, name, reason)
    }

    /// Why a volume was not made, as well as that is known.
    fn not_made(&self, id: Uuid, name: &VolumeName, reason: Option<String>) -> ApiError {
        match (self.0.state.not_made(id), reason) {
            (Some(e), _) => backing_error(name, &e),
            (None, Some(reason)) => {
                ApiError::new(Code::Backing, format!("volume {name}: {reason}"))
            }
            (None, None) => deleted_just_now(name),
        }
    }

    /// The volume, if it could be opened; in a cluster once it serves, or soon.
    pub(super) async fn opened(&self, id: Uuid, name: &VolumeName) -> Result<Volume, ApiError> {
        let deadline = Instant::now() + SERVING;
        let mut changes = self.0.state.changes(id);
        while Instant::now() < deadline && !self.serves(id, &mut changes).await {}
        match self.0.state.observed(id) {
            Observed::Broken { reason } | Observed::Stuck { reason } => {
                Err(ApiError::new(Code::Backing, format!("volume {name} is offline: {reason}")))
            }
            _ => self.show_id(id).await,
        }
    }

    /// Waits for a moment until a volume serves with all its copies in sync; says whether it does, or
    /// there is nothing to wait for. Before that, one node that dies at once takes it along: no copy can go on alone.
    async fn serves(&self, id: Uuid, changes: &mut watch::Receiver<u64>) -> bool {
        changes.mark_unchanged();
        match self.0.state.get(id) {
            Some((stored, Observed::Open { .. })) => {
                let copies = stored.record.places.len();
                self.0.engine.serves_with(id, copies, LOOK_AGAIN).await
            }
            // A volume exists before its nodes open it.
            Some((stored, Observed::Closed)) if stored.record.place(self.me()).is_some() => {
                let _ = timeout(LOOK_AGAIN, changes.changed()).await;
                false
            }
            Some((stored, _)) if stored.record.place(self.me()).is_none() => {
                let serves = self.serves_elsewhere(&stored.record).await;
                if !serves {
                    let _ = timeout(ASK_AGAIN, changes.changed()).await;
                }
                serves
            }
            _ => true,
        }
    }

    /// Whether a volume without a copy here serves with all its copies in sync, as their nodes say when they are asked.
    async fn serves_elsewhere(&self, record: &VolumeRecord) -> bool {
        if self.membership().is_none() || record.stage != Stage::Ready {
            return true;
        }
        let mirror = self.0.state.mirror(record.id);
        let in_sync = mirror.is_some_and(|mirror| mirror.in_sync.len() == record.places.len());
        in_sync && self.is_served(record).await.unwrap_or(false)
    }

    async fn new_record(&self, ask: &CreateVolume) -> Result<VolumeRecord, ApiError> {
        let (id, settings) = (Uuid::new_v4(), &self.0.settings);
        let free = self.free_space(&ask.backing).await;
        let count = usize::from(ask.replicas).max(ask.on.len());
        let nodes = match (ask.on.is_empty(), count) {
            // Data is nearest where it was asked for.
            (true, 1) if self.keeps_data() => vec![self.me()],
            _ => self.choose(&ask.on, count, (&[], &ask.backing), &free)?,
        };
        let place = |node| self.wanted(id, &ask.name, node, &ask.backing, ask.force);
        let mut places = nodes.into_iter().map(place).collect::<Result<Vec<_>, _>>()?;
        places.sort_by_key(|p| p.node);
        let chap = match &ask.chap {
            Some(chap) => Some(sealed(chap, (id.into(), None), &self.sealing_keys().await?)?),
            None => None,
        };
        Ok(VolumeRecord {
            id,
            name: ask.name.clone(),
            stage: Stage::Creating,
            size_bytes: ask.size_bytes.unwrap_or(0),
            block_size: ask.block_size,
            thin: ask.thin,
            places,
            copies_wanted: u8::try_from(count).unwrap_or(MAX_COPIES),
            repair: None,
            creator: Some(self.life()),
            prefer: None,
            protocols: ask.protocols,
            iscsi_target: format!("{}:{}", settings.iscsi_authority, ask.name),
            mapping: Mapping::default(),
            nvme_subsystem: format!("{}:{}", settings.nvme_authority, ask.name),
            allow: ask.allow.iter().cloned().collect(),
            chap,
            proofs: BTreeMap::new(),
            hosts: BTreeMap::new(),
            tls: BTreeMap::new(),
            created_s: now_s(),
        })
    }

    async fn check_backing_unused(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        let path = record.place(self.me()).and_then(|place| place.backing.path());
        match path {
            Some(path) => self.check_unused_paths(vec![path.to_owned()]).await,
            None => Ok(()),
        }
    }

    /// Somebody else took the name between our look and our commit.
    async fn lost_race(&self, ask: &CreateVolume) -> Result<Volume, ApiError> {
        let entry = self.0.meta.get(&record::name_key(&ask.name)).await;
        match entry.map_err(|e| store_error(&e))? {
            Some(entry) => {
                let id = record::decode_name(&entry).map_err(|e| store_error(&e))?;
                self.existing(id, ask).await
            }
            None => Err(deleted_just_now(&ask.name)),
        }
    }

    /// The volume that has the name already, if it is what is asked for.
    async fn existing(&self, id: Uuid, ask: &CreateVolume) -> Result<Volume, ApiError> {
        // Waits for whoever is creating it.
        self.settle(id).await;
        let name = &ask.name;
        if matches!(self.0.state.get(id), Some((s, _)) if s.record.stage == Stage::Creating) {
            self.await_creation(id, name).await?;
        }
        let Some((stored, _)) = self.0.state.get(id) else {
            return Err(deleted_just_now(name));
        };
        if stored.record.stage != Stage::Ready {
            return Err(ApiError::new(Code::Conflict, format!("volume {name} is being deleted"))
                .hint("choose another name, or try again"));
        }
        let differences = self.differences(&stored.record, ask);
        if differences.is_empty() {
            return self.opened(id, name).await;
        }
        let message =
            format!("volume {name} exists with another {}", differences.join(", another "));
        Err(ApiError::new(Code::Exists, message)
            .hint(format!("choose another name, or see `windrose volume show {name}`")))
    }

    /// Where the copy of a volume is, if it is not where it is asked for.
    fn elsewhere(
        &self,
        record: &VolumeRecord,
        place: &Place,
        ask: &CreateVolume,
    ) -> Option<String> {
        let NewBacking::Pool { pool } = &ask.backing else {
            let same = self.wanted(record.id, &record.name, place.node, &ask.backing, ask.force);
            // What is not known is not what is asked for, as far as anybody can know.
            let differs = !same.is_ok_and(|same| same.backing == place.backing);
            return differs.then(|| format!("place (it is in {})", place.backing));
        };
        // Whether there is such a pool or not.
        let differs = place.backing.pool() != Some(pool);
        differs.then(|| format!("place (it is in {}, not in pool {pool})", place.backing))
    }

    /// In what a volume differs from what is asked for.
    fn differences(&self, record: &VolumeRecord, ask: &CreateVolume) -> Vec<String> {
        let ring = self.0.vault.known();
        // What cannot be read is not what is asked for, as far as anybody can know.
        let chap = record.chap.as_ref().and_then(|chap| chap.open(record.id, &ring).ok());
        let unknown = record.chap.is_some() && chap.is_none();
        let copies = usize::from(ask.replicas).max(ask.on.len());
        let kept_on = |name: &String| record.places.iter().any(|p| self.node_name(p.node) == *name);
        let allow: BTreeSet<_> = ask.allow.iter().cloned().collect();
        let nodes = || {
            let all: Vec<_> = record.places.iter().map(|p| self.node_name(p.node)).collect();
            all.join(", ")
        };
        let thin = if record.thin { "thin" } else { "thick" };
        let elsewhere = record.places.iter().find_map(|place| self.elsewhere(record, place, ask));
        let other_copies =
            copies != usize::from(record.copies_wanted) || !ask.on.iter().all(kept_on);
        let size = ask.size_bytes.filter(|size| *size != record.size_bytes);
        let differences = [
            size.map(|size| format!("size ({}, not {})", Size(record.size_bytes), Size(size))),
            (ask.block_size != record.block_size)
                .then(|| format!("block size ({} bytes)", record.block_size.bytes())),
            (ask.thin != record.thin).then(|| format!("provisioning (it is {thin})")),
            elsewhere,
            other_copies.then(|| format!("choice of copies (they are on {})", nodes())),
            (ask.protocols != record.protocols).then(|| "choice of protocols".to_owned()),
            (allow != record.allow).then(|| "list of initiators".to_owned()),
            (unknown || ask.chap != chap).then(|| "CHAP user or secret".to_owned()),
        ];
        differences.into_iter().flatten().collect()
    }

    /// Deletes a volume and its data.
    ///
    /// # Errors
    /// [`Code::InUse`] while initiators are logged in at any node, or may be, unless `force`; [`Code::Conflict`] while no
    /// copy serves, unless it may be `discard`ed; [`Code::Backing`] when the backing cannot be erased: the volume is
    /// then offline and can be deleted again.
    pub async fn delete(
        &self,
        name: VolumeName,
        force: bool,
        discard: bool,
    ) -> Result<(), ApiError> {
        let control = self.clone();
        self.detached(async move { control.delete_now(&name, force, discard).await }).await
    }

    async fn delete_now(
        &self,
        name: &VolumeName,
        force: bool,
        discard: bool,
    ) -> Result<(), ApiError> {
        let id = self.find(name)?;
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        // Under the gate, as somebody may just have deleted it.
        self.find(name)?;
        if !force {
            self.check_unused(id, name).await?;
            self.check_unused_elsewhere(id, name).await?;
        }
        if !discard && let Some((stored, _)) = self.0.state.get(id) {
            self.check_delete(&stored.record).await?;
        }
        self.delete_record(id).await?;
        self.0.state.forget_failure(id);
        self.settle_held(id).await;
        self.await_deletion(id, name).await
    }

    /// Has a volume vanish, whoever has a copy.
    async fn delete_record(&self, id: Uuid) -> Result<(), ApiError> {
        let stored = self.stored(id).await.map_err(|e| store_error(&e))?;
        let Some(Stored { mut record, revision }) = stored else { return Ok(()) };
        if record.stage == Stage::Deleting {
            return Ok(());
        }
        self.check_no_guests(&record)?;
        record.stage = Stage::Deleting;
        // Its number is free for another volume from here on.
        let left = std::mem::take(&mut record.mapping).behind.map(|b| b.volume);
        let mut changes = record.replace(revision);
        if let Some(owner) = left {
            let stored = self.stored(owner).await.map_err(|e| store_error(&e))?;
            if let Some(Stored { record: mut owner, revision }) = stored {
                owner.mapping.guests.retain(|_, by| *by != id);
                changes.extend(owner.replace(revision));
            }
        }
        let committed = self.0.meta.commit(changes).await;
        committed.map_err(|e| store_error(&e))?;
        if let Some(owner) = left {
            self.settle_later(owner);
        }
        Ok(())
    }

    fn check_no_guests(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        let guests = &record.mapping.guests;
        if guests.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = guests.values().map(|id| self.name_of(*id)).collect();
        let name = &record.name;
        let message = format!(
            "the target of volume {name} is that of other volumes too: {}",
            names.join(", ")
        );
        Err(ApiError::new(Code::Conflict, message).hint(self.leave_targets(record)))
    }

    /// Waits until all copies are gone. For those who hold the gate.
    async fn await_deletion(&self, id: Uuid, name: &VolumeName) -> Result<(), ApiError> {
        let deadline = Instant::now() + DELETION;
        let mut changes = self.0.state.changes(id);
        loop {
            changes.mark_unchanged();
            let Some((stored, observed)) = self.0.state.get(id) else { return Ok(()) };
            if let Observed::Stuck { reason } = observed {
                let message = format!("volume {name} is offline, and {reason}");
                return Err(ApiError::new(Code::Backing, message)
                    .hint("remove the obstacle and delete it again"));
            }
            let others = stored.record.places.iter().filter(|p| p.node != self.me());
            let others: Vec<_> = others.map(|p| self.node_name(p.node)).collect();
            if others.is_empty() || stored.record.place(self.me()).is_some() {
                let message = format!("volume {name} is not deleted yet");
                return Err(ApiError::new(Code::Internal, message)
                    .hint("see the node's log, then delete it again"));
            }
            if self.is_left_to_nodes_away(&stored.record) {
                // What is decided is done: the rest is theirs, once they run, and status tells of it.
                return Ok(());
            }
            if Instant::now() >= deadline {
                let message = format!(
                    "volume {name} is being deleted, but its copy on {} is not erased yet",
                    others.join(", ")
                );
                return Err(ApiError::new(Code::Conflict, message)
                    .hint("see the log of that node; the name is free once it is erased"));
            }
            // Told or not, the records decide.
            let _ = timeout(LOOK_AGAIN, changes.changed()).await;
            self.settle_held(id).await;
        }
    }

    /// Whether all that is left of a volume which is being deleted are copies on nodes that do not run.
    fn is_left_to_nodes_away(&self, record: &VolumeRecord) -> bool {
        let mut left = record.clone();
        while let Some(node) = self.away_of(&left) {
            left.remove_place(node);
        }
        record.stage == Stage::Deleting && left.places.is_empty()
    }

    pub(super) async fn check_unused(&self, id: Uuid, name: &VolumeName) -> Result<(), ApiError> {
        let sessions = self.sessions_of(id).await;
        let Some(first) = sessions.first() else { return Ok(()) };
        let (count, who) = (sessions.len(), &first.initiator);
        let message = match count {
            1 => format!("volume {name} is in use by {who}"),
            _ => format!("volume {name} is in use by {count} sessions, one of {who}"),
        };
        Err(ApiError::new(Code::InUse, message)
            .hint("log out there first, or delete with --force (`force=true`)"))
    }

    /// Leave to create a volume, for as long as the answer is held.
    fn may_create(&self) -> Result<OwnedRwLockReadGuard<()>, ApiError> {
        // What a node creates while it becomes another one would be in a store that it leaves behind.
        let leave = Arc::clone(&self.0.creating).try_read_owned().ok();
        leave.filter(|_| !*self.0.restart.borrow()).ok_or_else(|| {
            let message = "this node is about to become part of a cluster, or to leave one";
            ApiError::new(Code::Conflict, message)
                .hint("create the volume when `windrose cluster nodes` shows what has become of it")
        })
    }
}

fn deleted_just_now(name: &VolumeName) -> ApiError {
    ApiError::new(Code::Conflict, format!("volume {name} was deleted just now")).hint("try again")
}

/// Checks what a request says by itself.
fn check(ask: &CreateVolume) -> Result<(), ApiError> {
    let copies = usize::from(ask.replicas).max(ask.on.len());
    if !(1..=usize::from(MAX_COPIES)).contains(&copies) {
        let message = format!("volume {} cannot have {copies} copies", ask.name);
        return Err(ApiError::new(Code::InvalidRequest, message)
            .hint(format!("give replicas from 1 to {MAX_COPIES}")));
    }
    if copies > 1 && ask.size_bytes.is_none() {
        let message = format!("volume {} needs a size, as devices differ", ask.name);
        return Err(ApiError::new(Code::InvalidRequest, message)
            .hint("give size_bytes; only a volume with one copy, on a device, can do without"));
    }
    match (ask.size_bytes, &ask.backing) {
        (Some(size), _) => api::check_volume_size(size, ask.block_size)?,
        (None, NewBacking::Device { .. }) => {}
        (None, NewBacking::File { .. } | NewBacking::Pool { .. }) => {
            let message = format!("volume {} needs a size", ask.name);
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint("give size_bytes; only a volume on a device can do without"));
        }
    }
    Ok(())
}

/// A path that means the same whatever directory somebody works in.
pub(super) fn absolute(path: &Path) -> Result<&Path, ApiError> {
    if path.is_relative() || path.as_os_str().as_encoded_bytes().contains(&0) {
        let message = format!("{} is not an absolute path", path.display());
        return Err(ApiError::new(Code::InvalidRequest, message).hint("give a path from / on"));
    }
    Ok(path)
}

#[expect(clippy::disallowed_methods, reason = "the control plane is no core")]
pub(super) fn now_s() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map(|d| d.as_secs()).unwrap_or_default()
}

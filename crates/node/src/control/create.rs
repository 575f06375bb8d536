//! Creating and deleting volumes.

use std::collections::BTreeSet;

use api::{ApiError, Backing, Code, CreateVolume, NewBacking, Volume, VolumeName};
use uuid::Uuid;

use super::change::check_access;
use super::{Control, backing_error, store_error};
use crate::meta::MetaError;
use crate::reconcile::Observed;
use crate::record::{self, Place, PlaceStage, Stage, Stored, VolumeRecord};

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

    async fn create_now(&self, ask: CreateVolume) -> Result<Volume, ApiError> {
        check(&ask)?;
        if let Some(id) = self.0.state.find(&ask.name) {
            return self.existing(id, &ask).await;
        }
        if self.0.state.count() >= self.0.settings.max_volumes {
            let message = format!("the node has its {} volumes", self.0.settings.max_volumes);
            return Err(ApiError::new(Code::Conflict, message)
                .hint("raise limits.volumes in the configuration, or delete volumes"));
        }
        let mut record = self.new_record(&ask);
        check_access(&record)?;
        self.check_backing_unused(&record)?;
        let gate = self.0.state.gate(record.id);
        let _held = gate.lock().await;
        let revision = match self.0.meta.commit(record.insert()).await {
            Ok(revision) => revision,
            Err(MetaError::Changed { .. }) => return self.lost_race(&ask).await,
            Err(e) => {
                self.settle_held(record.id).await;
                return Err(store_error(&e));
            }
        };
        self.0.state.know(record.id, Some(Stored { record: record.clone(), revision }));
        match self.0.engine.make(&record, ask.force).await {
            Ok(image) => {
                record.see(self.me(), image);
                record.place_mut(self.me()).into_iter().for_each(|p| p.stage = PlaceStage::Made);
            }
            Err(e) => {
                // There is nothing to erase; takes the record back.
                self.0.state.observe(record.id, Observed::Erased);
                self.settle_held(record.id).await;
                return Err(backing_error(&record.name, &e));
            }
        }
        record.stage = Stage::Ready;
        let committed = self.0.meta.commit(record.replace(revision)).await;
        // If that failed, nobody knows whether the volume exists: this finds out.
        self.settle_held(record.id).await;
        committed.map_err(|e| store_error(&e))?;
        tracing::info!(volume = %record.name, id = %record.id, bytes = record.size_bytes, "created");
        self.opened(record.id, &record.name).await
    }

    /// The volume, if it could be opened.
    async fn opened(&self, id: Uuid, name: &VolumeName) -> Result<Volume, ApiError> {
        match self.0.state.observed(id) {
            Observed::Broken { reason } | Observed::Stuck { reason } => {
                Err(ApiError::new(Code::Backing, format!("volume {name} is offline: {reason}")))
            }
            _ => self.show_id(id).await,
        }
    }

    fn new_record(&self, ask: &CreateVolume) -> VolumeRecord {
        let (id, settings) = (Uuid::new_v4(), &self.0.settings);
        let backing = match &ask.backing {
            NewBacking::File { path: None } => self.own_file(&ask.name, id),
            NewBacking::File { path: Some(path) } => Backing::File { path: path.clone() },
            NewBacking::Device { path } => Backing::Device { path: path.clone() },
        };
        let (node, stage) = (self.me(), PlaceStage::Wanted { force: ask.force });
        let place = Place { node, backing, image: None, image_generation: 0, stage };
        VolumeRecord {
            id,
            name: ask.name.clone(),
            stage: Stage::Creating,
            size_bytes: ask.size_bytes.unwrap_or(0),
            block_size: ask.block_size,
            thin: ask.thin,
            places: vec![place],
            creator: None,
            prefer: None,
            protocols: ask.protocols,
            iscsi_target: format!("{}:{}", settings.iscsi_authority, ask.name),
            nvme_subsystem: format!("{}:{}", settings.nvme_authority, ask.name),
            allow: ask.allow.iter().cloned().collect(),
            chap: ask.chap.clone(),
            created_s: now_s(),
        }
    }

    /// The file of a volume that was not given one. No other volume ever has the same.
    fn own_file(&self, name: &VolumeName, id: Uuid) -> Backing {
        let path = self.0.settings.data_dir.join("volumes").join(format!("{name}-{id}.img"));
        Backing::File { path }
    }

    fn check_backing_unused(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        let me = self.me();
        let Some(place) = record.place(me) else { return Ok(()) };
        let path = place.backing.path();
        let all = self.0.state.all();
        let uses = |s: &Stored| s.record.place(me).is_some_and(|p| p.backing.path() == path);
        let user = all.iter().find(|(s, _)| uses(s));
        user.map_or(Ok(()), |(stored, _)| {
            let (path, user) = (path.display(), &stored.record.name);
            Err(ApiError::new(Code::Backing, format!("{path} belongs to volume {user}"))
                .hint("choose another file or device"))
        })
    }

    /// Somebody else took the name between our look and our commit.
    async fn lost_race(&self, ask: &CreateVolume) -> Result<Volume, ApiError> {
        let entry = self.0.meta.get(&record::name_key(&ask.name)).await;
        match entry.map_err(|e| store_error(&e))? {
            Some(entry) => {
                let id = record::decode_name(&entry).map_err(|e| store_error(&e))?;
                self.existing(id, ask).await
            }
            None => Err(ApiError::new(
                Code::Conflict,
                format!("volume {} was deleted just now", ask.name),
            )
            .hint("try again")),
        }
    }

    /// The volume that has the name already, if it is what is asked for.
    async fn existing(&self, id: Uuid, ask: &CreateVolume) -> Result<Volume, ApiError> {
        // Waits for whoever is creating it.
        self.settle(id).await;
        let name = &ask.name;
        let Some((stored, _)) = self.0.state.get(id) else {
            return Err(ApiError::new(
                Code::Conflict,
                format!("volume {name} was deleted just now"),
            )
            .hint("try again"));
        };
        if stored.record.stage != Stage::Ready {
            return Err(ApiError::new(Code::Conflict, format!("volume {name} is being deleted"))
                .hint("choose another name, or try again"));
        }
        match self.difference(&stored.record, ask) {
            None => self.opened(id, name).await,
            Some(what) => Err(ApiError::new(
                Code::Exists,
                format!("volume {name} exists with another {what}"),
            )
            .hint(format!("choose another name, or see `windrose volume show {name}`"))),
        }
    }

    /// In what a volume differs from what is asked for.
    fn difference(&self, record: &VolumeRecord, ask: &CreateVolume) -> Option<&'static str> {
        let backing = match &ask.backing {
            NewBacking::File { path: None } => self.own_file(&record.name, record.id),
            NewBacking::File { path: Some(path) } => Backing::File { path: path.clone() },
            NewBacking::Device { path } => Backing::Device { path: path.clone() },
        };
        let allow: BTreeSet<_> = ask.allow.iter().cloned().collect();
        let differences = [
            (ask.size_bytes.is_some_and(|size| size != record.size_bytes), "size"),
            (ask.block_size != record.block_size, "block size"),
            (ask.thin != record.thin, "provisioning"),
            (record.place(self.me()).is_none_or(|p| p.backing != backing), "backing"),
            (ask.protocols != record.protocols, "choice of protocols"),
            (allow != record.allow, "list of initiators"),
            (ask.chap != record.chap, "CHAP user or secret"),
        ];
        differences.into_iter().find(|(differs, _)| *differs).map(|(_, what)| what)
    }

    /// Deletes a volume and its data.
    ///
    /// # Errors
    /// [`Code::InUse`] while initiators are logged in, unless `force`; [`Code::Backing`] when the
    /// backing cannot be erased: the volume is then offline and can be deleted again.
    pub async fn delete(&self, name: VolumeName, force: bool) -> Result<(), ApiError> {
        let control = self.clone();
        self.detached(async move { control.delete_now(&name, force).await }).await
    }

    async fn delete_now(&self, name: &VolumeName, force: bool) -> Result<(), ApiError> {
        let id = self.find(name)?;
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        // Under the gate, as somebody may just have deleted it.
        self.find(name)?;
        if !force {
            self.check_unused(id, name).await?;
        }
        let stored = self.stored(id).await.map_err(|e| store_error(&e))?;
        if let Some(Stored { mut record, revision }) = stored
            && record.stage == Stage::Ready
        {
            record.stage = Stage::Deleting;
            let committed = self.0.meta.commit(record.replace(revision)).await;
            committed.map_err(|e| store_error(&e))?;
        }
        self.0.state.forget_failure(id);
        self.settle_held(id).await;
        match self.0.state.get(id) {
            None => Ok(()),
            Some((_, Observed::Stuck { reason })) => {
                Err(ApiError::new(Code::Backing, format!("volume {name} is offline, and {reason}"))
                    .hint("remove the obstacle and delete it again"))
            }
            Some(_) => {
                Err(ApiError::new(Code::Internal, format!("volume {name} is not deleted yet"))
                    .hint("see the node's log, then delete it again"))
            }
        }
    }

    async fn check_unused(&self, id: Uuid, name: &VolumeName) -> Result<(), ApiError> {
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
}

/// Checks what a request says by itself.
fn check(ask: &CreateVolume) -> Result<(), ApiError> {
    match (ask.size_bytes, &ask.backing) {
        (Some(size), _) => api::check_volume_size(size, ask.block_size)?,
        (None, NewBacking::Device { .. }) => {}
        (None, NewBacking::File { .. }) => {
            let message = format!("volume {} needs a size", ask.name);
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint("give size_bytes; only a volume on a device can do without"));
        }
    }
    let path = match &ask.backing {
        NewBacking::File { path } => path.as_deref(),
        NewBacking::Device { path } => Some(path.as_path()),
    };
    if let Some(path) = path
        && (path.is_relative() || path.as_os_str().as_encoded_bytes().contains(&0))
    {
        let message = format!("{} is not an absolute path", path.display());
        return Err(ApiError::new(Code::InvalidRequest, message).hint("give a path from / on"));
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "the control plane is no core")]
fn now_s() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map(|d| d.as_secs()).unwrap_or_default()
}

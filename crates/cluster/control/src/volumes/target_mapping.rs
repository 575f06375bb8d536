//! Choosing the target and the LUN of a volume (RFD 0017, 3).

use std::collections::{BTreeMap, BTreeSet};

use api::{ApiError, ErrorCode, MapVolume, Volume, VolumeName};
use uuid::Uuid;

use super::VolumeControl;
use super::edit::check_access;
use crate::errors::store_error;
use records::record::lun_mapping::{MAX_LUN, MapError, assign_lun};
use records::record::{StoredVolumeRecord, VolumeRecord, VolumeStage};

impl VolumeControl {
    /// Maps a volume to the target of another one or to its own, or changes its LUN.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`], [`ErrorCode::InUse`] while initiators use it unless `force`,
    /// [`ErrorCode::Conflict`] if another volume has the LUN.
    pub async fn map_target(
        &self,
        name: VolumeName,
        request: MapVolume,
        force: bool,
    ) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.run_to_completion(async move { control.map_target_now(&name, &request, force).await })
            .await
    }

    async fn map_target_now(
        &self,
        name: &VolumeName,
        request: &MapVolume,
        force: bool,
    ) -> Result<Volume, ApiError> {
        let id = self.volume_id(name)?;
        let (now, _) =
            self.0.context.volumes.get(id).ok_or_else(|| no_such_target(name.as_str()))?;
        let owner = match &request.target {
            Some(target) => self.find_target(target, &now.record)?,
            None => now.record.target_owner(),
        };
        let involved = BTreeSet::from([id, owner, now.record.target_owner()]);
        // In a fixed order, to avoid deadlocks.
        let locks: Vec<_> = involved.iter().map(|id| self.0.context.volumes.lock_of(*id)).collect();
        let mut guards = Vec::new();
        for lock in &locks {
            guards.push(lock.lock().await);
        }
        let (before, revisions) = self.read_ready_records(&involved).await?;
        let volume = before.get(&id).ok_or_else(|| no_such_target(name.as_str()))?;
        if volume.target_owner() != now.record.target_owner() {
            return Err(ApiError::new(
                ErrorCode::Conflict,
                format!("volume {name} has just changed"),
            )
            .with_hint("check its state and try again"));
        }
        let mut after = before.clone();
        assign_lun(&mut after, id, owner, request.lun)
            .map_err(|why| self.map_error(name, request, why))?;
        if after == before {
            return self.volume_by_id(id).await;
        }
        self.check_target_auth(&after, id, owner)?;
        if !force {
            self.check_unused(id, name).await?;
            self.check_unused_on_peers(id, name).await?;
        }
        let changed = after.iter().filter(|(id, record)| before.get(id) != Some(record));
        let changed: Vec<_> = changed.map(|(id, record)| (*id, record)).collect();
        let replace = |(id, record): &(Uuid, &VolumeRecord)| {
            Some(record.replace_changes(*revisions.get(id)?))
        };
        let changes = changed.iter().filter_map(replace).flatten().collect();
        let committed = self.0.context.meta.commit(changes).await;
        for (id, _) in &changed {
            self.reconcile_locked(*id).await;
        }
        committed.map_err(|e| store_error(&e))?;
        let (target, lun) = (after[&id].target_name(), after[&id].mapping.lun);
        tracing::info!(volume = %name, target, lun, "target or LUN of the volume changed");
        self.volume_by_id(id).await
    }

    /// The volume that owns the target named by `target`, which names a volume or the target
    /// itself. The name of `volume` means its own target; the names of other volumes mean the
    /// targets they use.
    fn find_target(&self, target: &str, volume: &VolumeRecord) -> Result<Uuid, ApiError> {
        let all = self.0.context.volumes.all();
        let wanted = target.to_ascii_lowercase();
        let means = |r: &VolumeRecord| r.name.as_str() == target || r.iscsi_target == wanted;
        if means(volume) {
            return Ok(volume.id);
        }
        let found = all.iter().map(|(stored, _)| &stored.record).find(|r| means(r));
        found.map(VolumeRecord::target_owner).ok_or_else(|| no_such_target(target))
    }

    /// Reads the current records of these volumes from the store.
    async fn read_ready_records(
        &self,
        ids: &BTreeSet<Uuid>,
    ) -> Result<(BTreeMap<Uuid, VolumeRecord>, BTreeMap<Uuid, cluster::store::Revision>), ApiError>
    {
        let (mut records, mut revisions) = (BTreeMap::new(), BTreeMap::new());
        for &id in ids {
            let stored = self.read_volume_record(id).await.map_err(|e| store_error(&e))?;
            let Some(StoredVolumeRecord { record, revision }) = stored else { continue };
            if record.stage != VolumeStage::Ready {
                let message = format!("volume {} is being created or deleted", record.name);
                return Err(
                    ApiError::new(ErrorCode::Conflict, message).with_hint("choose another target")
                );
            }
            records.insert(id, record);
            revisions.insert(id, revision);
        }
        Ok((records, revisions))
    }

    /// A volume on a target needs the same authentication as the target (RFD 0008, 6; RFD 0020, 2).
    fn check_target_auth(
        &self,
        after: &BTreeMap<Uuid, VolumeRecord>,
        id: Uuid,
        owner: Uuid,
    ) -> Result<(), ApiError> {
        match (after.get(&id), after.get(&owner)) {
            (Some(volume), Some(owner)) => check_access(volume, owner.required_auth()),
            _ => Ok(()),
        }
    }

    /// The name of a volume, for people.
    pub(super) fn volume_display_name(&self, id: Uuid) -> String {
        self.0
            .context
            .volumes
            .get(id)
            .map_or_else(|| id.to_string(), |(s, _)| s.record.name.to_string())
    }

    /// The hint: how volumes on another volume's target get targets of their own.
    pub(super) fn own_target_hint(&self, owner: &VolumeRecord) -> String {
        let other_volumes = owner.mapping.other_luns.values();
        let commands: Vec<_> = other_volumes
            .map(|id| format!("windrose volume target {} --own", self.volume_display_name(*id)))
            .collect();
        format!("give each of them its own target first: {}", commands.join("; "))
    }

    fn map_error(&self, name: &VolumeName, request: &MapVolume, why: MapError) -> ApiError {
        let target = request.target.as_deref().unwrap_or(name.as_str());
        match why {
            MapError::OwnTargetShared => {
                let message = format!("other volumes use the target of volume {name}");
                let owner = self
                    .0
                    .context
                    .volumes
                    .id_by_name(name)
                    .and_then(|id| self.0.context.volumes.get(id));
                let hint = owner.map(|(stored, _)| self.own_target_hint(&stored.record));
                ApiError::new(ErrorCode::Conflict, message).with_hint(hint.unwrap_or_default())
            }
            MapError::TargetNotOwn => {
                let message = format!("the target of {target} has just changed");
                ApiError::new(ErrorCode::Conflict, message)
                    .with_hint("check its state and try again")
            }
            MapError::HasChap => {
                let message = format!("volume {name} has CHAP secrets of its own");
                ApiError::new(ErrorCode::Conflict, message).with_hint(format!(
                    "a target uses the CHAP secrets of the volume that owns it; first turn off \
                     those of volume {name} (`windrose volume chap {name} --off`)"
                ))
            }
            MapError::HasHostSecrets => {
                let message = format!("volume {name} has NVMe host secrets of its own");
                ApiError::new(ErrorCode::Conflict, message).with_hint(format!(
                    "a subsystem uses the secrets of the volume that owns it; first turn off those \
                     of volume {name} (`windrose volume dhchap {name} --host NQN --off`)"
                ))
            }
            MapError::HasTlsKeys => {
                let message = format!("volume {name} has NVMe TLS keys of its own");
                ApiError::new(ErrorCode::Conflict, message).with_hint(format!(
                    "a subsystem uses the keys of the volume that owns it; first turn off those of \
                     volume {name} (`windrose volume tls {name} --host NQN --off`)"
                ))
            }
            MapError::LunInUse(by) => {
                let lun = request.lun.unwrap_or(0);
                let message =
                    format!("LUN {lun} of that target is volume {}", self.volume_display_name(by));
                ApiError::new(ErrorCode::Conflict, message)
                    .with_hint("choose another number, or none for the lowest free one")
            }
            MapError::NoFreeLun => ApiError::new(
                ErrorCode::Conflict,
                format!("the target of {target} has no LUN left"),
            )
            .with_hint("choose another target"),
            MapError::LunTooLarge => {
                let message = format!("a LUN is a number from 0 to {MAX_LUN}");
                ApiError::new(ErrorCode::InvalidRequest, message)
            }
        }
    }
}

fn no_such_target(target: &str) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("there is no volume or target {target}"))
        .with_hint("`windrose volume list` shows the volumes")
}

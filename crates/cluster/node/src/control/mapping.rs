//! Choosing the target and the number of a volume (RFD 0017, 3).

use std::collections::{BTreeMap, BTreeSet};

use api::{ApiError, Code, MapVolume, Volume, VolumeName};
use uuid::Uuid;

use super::change::check_access;
use super::{Control, store_error};
use crate::record::mapping::{MAX_LUN, NotMapped, remap};
use crate::record::{Stage, Stored, VolumeRecord};

impl Control {
    /// Puts a volume behind the target of another one, or its own, or gives it another number.
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::InUse`] while initiators use it unless `force`, [`Code::Conflict`] if the number is
    /// another volume's.
    pub async fn map(
        &self,
        name: VolumeName,
        ask: MapVolume,
        force: bool,
    ) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.detached(async move { control.map_now(&name, &ask, force).await }).await
    }

    async fn map_now(
        &self,
        name: &VolumeName,
        ask: &MapVolume,
        force: bool,
    ) -> Result<Volume, ApiError> {
        let id = self.find(name)?;
        let (now, _) = self.0.state.get(id).ok_or_else(|| not_there(name.as_str()))?;
        let owner = match &ask.target {
            Some(target) => self.find_target(target, &now.record)?,
            None => now.record.owner(),
        };
        let involved = BTreeSet::from([id, owner, now.record.owner()]);
        // In one order, so that nobody waits for somebody who waits for him.
        let gates: Vec<_> = involved.iter().map(|id| self.0.state.gate(*id)).collect();
        let mut held = Vec::new();
        for gate in &gates {
            held.push(gate.lock().await);
        }
        let (before, revisions) = self.involved(&involved).await?;
        let volume = before.get(&id).ok_or_else(|| not_there(name.as_str()))?;
        if volume.owner() != now.record.owner() {
            return Err(ApiError::new(Code::Conflict, format!("volume {name} has just changed"))
                .hint("look at it and try again"));
        }
        let mut after = before.clone();
        remap(&mut after, id, owner, ask.lun).map_err(|why| self.not_mapped(name, ask, why))?;
        if after == before {
            return self.show_id(id).await;
        }
        self.check_guards(&after, id, owner)?;
        if !force {
            self.check_unused(id, name).await?;
            self.check_unused_elsewhere(id, name).await?;
        }
        let changed = after.iter().filter(|(id, record)| before.get(id) != Some(record));
        let changed: Vec<_> = changed.map(|(id, record)| (*id, record)).collect();
        let replace =
            |(id, record): &(Uuid, &VolumeRecord)| Some(record.replace(*revisions.get(id)?));
        let changes = changed.iter().filter_map(replace).flatten().collect();
        let committed = self.0.meta.commit(changes).await;
        for (id, _) in &changed {
            self.settle_held(*id).await;
        }
        committed.map_err(|e| store_error(&e))?;
        let (target, lun) = (after[&id].target(), after[&id].mapping.lun);
        tracing::info!(volume = %name, target, lun, "it is another unit now");
        self.show_id(id).await
    }

    /// The volume whose target a name means: of a volume, or of the target itself. `volume`'s own name means its own target,
    /// other names the target behind which these volumes stand.
    fn find_target(&self, target: &str, volume: &VolumeRecord) -> Result<Uuid, ApiError> {
        let all = self.0.state.all();
        let wanted = target.to_ascii_lowercase();
        let means = |r: &VolumeRecord| r.name.as_str() == target || r.iscsi_target == wanted;
        if means(volume) {
            return Ok(volume.id);
        }
        let found = all.iter().map(|(stored, _)| &stored.record).find(|r| means(r));
        found.map(VolumeRecord::owner).ok_or_else(|| not_there(target))
    }

    /// These records, as the store has them now.
    async fn involved(
        &self,
        ids: &BTreeSet<Uuid>,
    ) -> Result<(BTreeMap<Uuid, VolumeRecord>, BTreeMap<Uuid, crate::meta::Revision>), ApiError>
    {
        let (mut records, mut revisions) = (BTreeMap::new(), BTreeMap::new());
        for &id in ids {
            let stored = self.stored(id).await.map_err(|e| store_error(&e))?;
            let Some(Stored { record, revision }) = stored else { continue };
            if record.stage != Stage::Ready {
                let message = format!("volume {} is being created or deleted", record.name);
                return Err(ApiError::new(Code::Conflict, message).hint("choose another target"));
            }
            records.insert(id, record);
            revisions.insert(id, revision);
        }
        Ok((records, revisions))
    }

    /// A volume behind a guarded target is as guarded as that (RFD 0008, 6; RFD 0020, 2).
    fn check_guards(
        &self,
        after: &BTreeMap<Uuid, VolumeRecord>,
        id: Uuid,
        owner: Uuid,
    ) -> Result<(), ApiError> {
        match (after.get(&id), after.get(&owner)) {
            (Some(volume), Some(owner)) => check_access(volume, owner.guard()),
            _ => Ok(()),
        }
    }

    /// The name of a volume, for people.
    pub(super) fn name_of(&self, id: Uuid) -> String {
        self.0.state.get(id).map_or_else(|| id.to_string(), |(s, _)| s.record.name.to_string())
    }

    /// How the volumes that stand behind the target of another get one of their own.
    pub(super) fn leave_targets(&self, owner: &VolumeRecord) -> String {
        let guests = owner.mapping.guests.values();
        let commands: Vec<_> = guests
            .map(|id| format!("windrose volume target {} --own", self.name_of(*id)))
            .collect();
        format!("give each of them its own target first: {}", commands.join("; "))
    }

    fn not_mapped(&self, name: &VolumeName, ask: &MapVolume, why: NotMapped) -> ApiError {
        let target = ask.target.as_deref().unwrap_or(name.as_str());
        match why {
            NotMapped::HasGuests => {
                let message = format!("other volumes stand behind the target of volume {name}");
                let owner = self.0.state.find(name).and_then(|id| self.0.state.get(id));
                let hint = owner.map(|(stored, _)| self.leave_targets(&stored.record));
                ApiError::new(Code::Conflict, message).hint(hint.unwrap_or_default())
            }
            NotMapped::IsGuest => {
                let message = format!("{target} has just got another target itself");
                ApiError::new(Code::Conflict, message).hint("look at it and try again")
            }
            NotMapped::HasChap => {
                let message = format!("volume {name} asks for CHAP of its own");
                ApiError::new(Code::Conflict, message).hint(format!(
                    "a target has the CHAP of the volume that it belongs to; turn this one off first \
                     (`windrose volume chap {name} --off`)"
                ))
            }
            NotMapped::HasHostSecrets => {
                let message = format!("volume {name} asks NVMe hosts for secrets of its own");
                ApiError::new(Code::Conflict, message).hint(format!(
                    "a subsystem has the secrets of the volume that it belongs to; turn those of this one off \
                     first (`windrose volume dhchap {name} --host NQN --off`)"
                ))
            }
            NotMapped::HasTlsKeys => {
                let message = format!("volume {name} has TLS keys of NVMe hosts of its own");
                ApiError::new(Code::Conflict, message).hint(format!(
                    "a subsystem has the keys of the volume that it belongs to; turn those of this one off first \
                     (`windrose volume tls {name} --host NQN --off`)"
                ))
            }
            NotMapped::Taken(by) => {
                let lun = ask.lun.unwrap_or(0);
                let message = format!("LUN {lun} of that target is volume {}", self.name_of(by));
                ApiError::new(Code::Conflict, message)
                    .hint("choose another number; without one the lowest that is free is taken")
            }
            NotMapped::Full => {
                ApiError::new(Code::Conflict, format!("the target of {target} has no LUN left"))
                    .hint("choose another target")
            }
            NotMapped::Beyond => {
                let message = format!("a LUN is a number from 0 to {MAX_LUN}");
                ApiError::new(Code::InvalidRequest, message)
            }
        }
    }
}

fn not_there(target: &str) -> ApiError {
    ApiError::new(Code::NotFound, format!("there is no volume or target {target}"))
        .hint("`windrose volume list` shows what there is")
}

//! Changing existing volumes.

use std::collections::BTreeMap;

use api::{
    ApiError, Chap, ErrorCode, HostDhchap, HostTls, Initiator, InitiatorChap, Protocols, Volume,
    VolumeName,
};
use nvme::tls::TlsKey;
use uuid::Uuid;

use super::VolumeControl;
use crate::errors::{backing_error, store_error};
use crate::secrets::{seal_chap, seal_dhchap, seal_tls};
use records::reconcile::Observed;
use records::record::{
    ChapContext, HostSecretContext, StoredVolumeRecord, VolumeAuthMethod, VolumeRecord,
    VolumeStage, dhchap,
};

/// Most initiators that may be allowed to use a volume, and most with secrets of their own.
const MAX_INITIATORS: usize = 1024;

impl VolumeControl {
    /// Grows a volume to `size_bytes`. If it has this size already, nothing happens.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] for a smaller size, [`ErrorCode::Conflict`] for a volume that
    /// is offline, errors of the backing.
    pub async fn grow(&self, name: VolumeName, size_bytes: u64) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.run_to_completion(async move { control.grow_now(&name, size_bytes).await }).await
    }

    async fn grow_now(&self, name: &VolumeName, size_bytes: u64) -> Result<Volume, ApiError> {
        let id = self.volume_id(name)?;
        let lock = self.0.context.volumes.lock_of(id);
        let _held = lock.lock().await;
        let StoredVolumeRecord { mut record, revision } = self.ready_volume(id, name).await?;
        if self.joined_cluster().is_some() {
            let message =
                format!("volume {name} cannot be made larger while its node is in a cluster");
            return Err(ApiError::new(ErrorCode::Conflict, message)
                .with_hint("create a larger volume and copy the data"));
        }
        api::check_volume_size(size_bytes, record.block_size)?;
        if size_bytes < record.size_bytes {
            let has = api::Size(record.size_bytes);
            let message = format!("volume {name} has {has} and cannot be made smaller");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message)
                .with_hint("create a smaller volume and copy the data"));
        }
        if size_bytes == record.size_bytes {
            return self.volume_by_id(id).await;
        }
        let Observed::Open { core, .. } = self.0.context.volumes.observed(id) else {
            return Err(ApiError::new(ErrorCode::Conflict, format!("volume {name} is offline"))
                .with_hint(format!("`windrose volume show {name}` shows why")));
        };
        // Steps that may fail come before any that initiators see. After a crash, the size in the
        // image is adopted, grown or not.
        let before = std::mem::replace(&mut record.size_bytes, size_bytes);
        let revision = match self.0.context.meta.commit(record.replace_changes(revision)).await {
            Ok(revision) => revision,
            Err(e) => {
                self.reconcile_locked(id).await;
                return Err(store_error(&e));
            }
        };
        let image = match self.0.context.engine.grow(&record, size_bytes).await {
            Ok(image) => image,
            Err(e) => {
                record.size_bytes = before;
                if let Err(error) =
                    self.0.context.meta.commit(record.replace_changes(revision)).await
                {
                    tracing::warn!(volume = %name, %error, "cannot revert the size in the record after a failed grow");
                }
                self.reconcile_locked(id).await;
                return Err(backing_error(name, &e));
            }
        };
        let published = Some((revision, None));
        self.0.context.volumes.observe(id, Observed::Open { core, image, published });
        record.record_image(self.this_node(), image);
        if let Err(error) = self.0.context.meta.commit(record.replace_changes(revision)).await {
            // The image has the new size: the record adopts it later.
            tracing::warn!(volume = %name, %error, "cannot record the new size of the image yet");
        }
        self.reconcile_locked(id).await;
        tracing::info!(volume = %name, bytes = size_bytes, "grown");
        self.volume_by_id(id).await
    }

    /// Sets the protocols that export a volume.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`], [`ErrorCode::Conflict`], [`ErrorCode::InvalidRequest`].
    pub async fn set_protocols(
        &self,
        name: VolumeName,
        protocols: Protocols,
    ) -> Result<Volume, ApiError> {
        self.edit_record(name, move |record| {
            record.protocols = protocols;
            Ok(())
        })
        .await
    }

    /// Allows initiators to use a volume.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`], [`ErrorCode::Conflict`], [`ErrorCode::InvalidRequest`].
    pub async fn allow(
        &self,
        name: VolumeName,
        initiators: Vec<Initiator>,
    ) -> Result<Volume, ApiError> {
        self.edit_record(name, move |record| {
            record.allow.extend(initiators);
            Ok(())
        })
        .await
    }

    /// Denies initiators the use of a volume.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`], [`ErrorCode::Conflict`].
    pub async fn deny(
        &self,
        name: VolumeName,
        initiators: Vec<Initiator>,
    ) -> Result<Volume, ApiError> {
        self.edit_record(name, move |record| {
            record.allow.retain(|i| !initiators.contains(i));
            Ok(())
        })
        .await
    }

    /// Requires CHAP from iSCSI initiators, or only their name.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`], [`ErrorCode::Conflict`], [`ErrorCode::InvalidRequest`].
    pub async fn set_chap(&self, name: VolumeName, chap: Option<Chap>) -> Result<Volume, ApiError> {
        let Some(chap) = chap else {
            return self
                .edit_record(name, |record| {
                    record.chap = None;
                    Ok(())
                })
                .await;
        };
        let (control, keyring) = (self.clone(), self.0.secrets.sealing_keys().await?);
        self.edit_record(name, move |record| {
            control.check_owns_target(record, VolumeAuthMethod::Chap)?;
            let existing = (record.id.into(), record.chap.as_ref());
            record.chap = Some(seal_chap(&chap, existing, &keyring)?);
            Ok(())
        })
        .await
    }

    /// Requires CHAP with its own secret from one iSCSI initiator, or the volume's common rule.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`], [`ErrorCode::Conflict`], [`ErrorCode::InvalidRequest`].
    pub async fn set_initiator_chap(
        &self,
        name: VolumeName,
        request: InitiatorChap,
    ) -> Result<Volume, ApiError> {
        let InitiatorChap { initiator, chap } = request;
        let Initiator::Iscsi(initiator) = initiator else {
            let message = format!("{initiator} is not the name of one iSCSI initiator");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message)
                .with_hint("CHAP is for iSCSI only; give an IQN, EUI or NAA name"));
        };
        let keyring = match &chap {
            Some(_) => Some(self.0.secrets.sealing_keys().await?),
            None => None,
        };
        let control = self.clone();
        self.edit_record(name, move |record| {
            let (Some(chap), Some(keyring)) = (&chap, &keyring) else {
                record.chap_by_initiator.remove(&initiator);
                return Ok(());
            };
            control.check_owns_target(record, VolumeAuthMethod::Chap)?;
            check_initiator_limit(
                record,
                &record.chap_by_initiator,
                &initiator,
                ("secrets", "initiators"),
            )?;
            let of = ChapContext { volume: record.id, initiator: Some(&initiator) };
            let sealed = seal_chap(chap, (of, record.chap_by_initiator.get(&initiator)), keyring)?;
            record.chap_by_initiator.insert(initiator, sealed);
            Ok(())
        })
        .await
    }

    /// Requires DH-HMAC-CHAP from one NVMe host, or only its name (RFD 0020, 2).
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`], [`ErrorCode::Conflict`], [`ErrorCode::InvalidRequest`].
    pub async fn set_host_dhchap(
        &self,
        name: VolumeName,
        request: HostDhchap,
    ) -> Result<Volume, ApiError> {
        let HostDhchap { host, secrets } = request;
        let host = require_nqn(host, "DH-HMAC-CHAP is for NVMe only")?;
        let Some(secrets) = secrets else {
            return self
                .edit_record(name, move |record| {
                    record.dhchap_by_host.remove(&host);
                    Ok(())
                })
                .await;
        };
        dhchap::parse_secrets(&secrets).map_err(|why| {
            ApiError::new(ErrorCode::InvalidRequest, why.to_string()).with_hint(
                "make a secret with `nvme gen-dhchap-key`, and give its output unchanged",
            )
        })?;
        let (control, keyring) = (self.clone(), self.0.secrets.sealing_keys().await?);
        self.edit_record(name, move |record| {
            control.check_owns_target(record, VolumeAuthMethod::Dhchap)?;
            check_initiator_limit(record, &record.dhchap_by_host, &host, ("secrets", "hosts"))?;
            let of = HostSecretContext { volume: record.id, host: &host };
            let sealed = seal_dhchap(&secrets, (of, record.dhchap_by_host.get(&host)), &keyring)?;
            record.dhchap_by_host.insert(host, sealed);
            Ok(())
        })
        .await
    }

    /// Requires, allows or ends TLS for one NVMe host (RFD 0022, 3).
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`], [`ErrorCode::Conflict`], [`ErrorCode::InvalidRequest`].
    pub async fn set_host_tls(
        &self,
        name: VolumeName,
        request: HostTls,
    ) -> Result<Volume, ApiError> {
        let HostTls { host, key } = request;
        let host = require_nqn(host, "TLS is for NVMe only")?;
        let Some(tls) = key else {
            return self
                .edit_record(name, move |record| {
                    record.tls_by_host.remove(&host);
                    Ok(())
                })
                .await;
        };
        TlsKey::parse(tls.key.expose()).map_err(|why| {
            let message = format!("the TLS key of the host is invalid: {why}");
            ApiError::new(ErrorCode::InvalidRequest, message)
                .with_hint("make a key with `nvme gen-tls-key`, and give its output unchanged")
        })?;
        let (control, keyring) = (self.clone(), self.0.secrets.sealing_keys().await?);
        self.edit_record(name, move |record| {
            control.check_owns_target(record, VolumeAuthMethod::Tls)?;
            check_initiator_limit(record, &record.tls_by_host, &host, ("TLS keys", "hosts"))?;
            let of = HostSecretContext { volume: record.id, host: &host };
            let sealed = seal_tls(&tls, (of, record.tls_by_host.get(&host)), &keyring)?;
            record.tls_by_host.insert(host, sealed);
            Ok(())
        })
        .await
    }

    /// Changes a volume's record, and publishes the result. Without a difference nothing happens.
    async fn edit_record<F>(&self, name: VolumeName, edit: F) -> Result<Volume, ApiError>
    where
        F: FnOnce(&mut VolumeRecord) -> Result<(), ApiError> + Send + 'static,
    {
        let control = self.clone();
        self.run_to_completion(async move {
            let id = control.volume_id(&name)?;
            let lock = control.0.context.volumes.lock_of(id);
            let _held = lock.lock().await;
            let StoredVolumeRecord { record: before, revision } =
                control.ready_volume(id, &name).await?;
            let mut record = before.clone();
            edit(&mut record)?;
            if record != before {
                control.check_target_access(&record)?;
                let committed =
                    control.0.context.meta.commit(record.replace_changes(revision)).await;
                control.reconcile_locked(id).await;
                committed.map_err(|e| store_error(&e))?;
                tracing::info!(volume = %name, access = ?record.allow, "access changed");
            }
            control.volume_by_id(id).await
        })
        .await
    }

    /// [`check_access`] for a volume and for the volumes on its target.
    fn check_target_access(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        let of = |id: &Uuid| self.0.context.volumes.get(*id).map(|(stored, _)| stored.record);
        if record.target_owner() != record.id {
            // The owner is unknown here: assume that it requires authentication.
            let guard = of(&record.target_owner())
                .map_or(Some(VolumeAuthMethod::Chap), |owner| owner.required_auth());
            return check_access(record, guard);
        }
        let guard = record.required_auth();
        check_access(record, guard)?;
        let mut other_volumes = record.mapping.other_luns.values().filter_map(of);
        other_volumes.try_for_each(|other| check_access(&other, guard))
    }

    /// Fails unless the volume owns its target: only the owner sets authentication.
    fn check_owns_target(
        &self,
        record: &VolumeRecord,
        method: VolumeAuthMethod,
    ) -> Result<(), ApiError> {
        if record.target_owner() == record.id {
            return Ok(());
        }
        let (name, owner) = (&record.name, self.volume_display_name(record.target_owner()));
        let (target_kind, whose, command) = match method {
            VolumeAuthMethod::Chap => ("target", "change the CHAP secrets of that volume", "chap"),
            VolumeAuthMethod::Dhchap => {
                ("subsystem", "change the host secrets of that volume", "dhchap")
            }
            VolumeAuthMethod::Tls => ("subsystem", "change the TLS keys of that volume", "tls"),
        };
        let message = format!("volume {name} uses the {target_kind} of volume {owner}");
        Err(ApiError::new(ErrorCode::Conflict, message)
            .with_hint(format!("{whose} instead: `windrose volume {command} {owner} …`")))
    }

    /// The record of a volume that is neither being created nor deleted.
    pub(super) async fn ready_volume(
        &self,
        id: Uuid,
        name: &VolumeName,
    ) -> Result<StoredVolumeRecord, ApiError> {
        let stored = self.read_volume_record(id).await.map_err(|e| store_error(&e))?;
        match stored {
            Some(stored) if stored.record.stage == VolumeStage::Ready => Ok(stored),
            Some(_) => {
                Err(ApiError::new(ErrorCode::Conflict, format!("volume {name} is being deleted"))
                    .with_hint(format!("`windrose volume show {name}` shows the progress")))
            }
            None => Err(ApiError::new(ErrorCode::NotFound, format!("there is no volume {name}"))
                .with_hint("`windrose volume list` shows the volumes")),
        }
    }
}

/// The name of an NVMe host; fails for other initiators.
fn require_nqn(host: Initiator, why: &str) -> Result<String, ApiError> {
    match host {
        Initiator::Nvme(host) => Ok(host),
        Initiator::Any | Initiator::Iscsi(_) => {
            let message = format!("{host} is not the name of one NVMe host");
            Err(ApiError::new(ErrorCode::InvalidRequest, message)
                .with_hint(format!("{why}; give the host's NQN")))
        }
    }
}

/// Fails if a volume has the most entries for single initiators or hosts, and none for this one.
fn check_initiator_limit<S>(
    record: &VolumeRecord,
    has: &BTreeMap<String, S>,
    name: &str,
    (what, of_whom): (&str, &str),
) -> Result<(), ApiError> {
    if has.len() >= MAX_INITIATORS && !has.contains_key(name) {
        let message = format!(
            "volume {} already has {what} of {MAX_INITIATORS} {of_whom}, the limit",
            record.name
        );
        return Err(ApiError::new(ErrorCode::InvalidRequest, message));
    }
    Ok(())
}

/// Checks that the access rules of a volume have no way around them, given the authentication that
/// its target requires.
pub(super) fn check_access(
    record: &VolumeRecord,
    guard: Option<VolumeAuthMethod>,
) -> Result<(), ApiError> {
    if record.allow.len() > MAX_INITIATORS {
        let message =
            format!("volume {} allows more than {MAX_INITIATORS} initiators", record.name);
        return Err(ApiError::new(ErrorCode::InvalidRequest, message));
    }
    let Some(method) = guard else { return Ok(()) };
    if !record.allow.contains(&Initiator::Any) || !record.protocols.nvme {
        return Ok(());
    }
    let why = match method {
        VolumeAuthMethod::Chap => "CHAP is for iSCSI only, and 'any' would admit every NVMe host",
        // A host that must authenticate could use another name.
        VolumeAuthMethod::Dhchap => {
            "its NVMe hosts must authenticate, and 'any' would admit every other host without \
             authentication"
        }
        VolumeAuthMethod::Tls => {
            "its NVMe hosts must use TLS, and 'any' would admit every other host without TLS"
        }
    };
    let message = format!("volume {}: {why}", record.name);
    Err(ApiError::new(ErrorCode::InvalidRequest, message)
        .with_hint("export it by iSCSI only, or allow the NVMe hosts by name"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use records::record::{StoredDhchap, StoredTls};
    use records::samples::{HOST, KEYS, dhchap, record, ring, tls};

    fn check(record: &VolumeRecord) -> Result<(), ApiError> {
        check_access(record, record.required_auth())
    }

    #[test]
    fn chap_with_any_is_refused_where_nvme_would_be_open() {
        let chap = r#"{"user":"u","secret":"0123456789ab","mutual":null}"#;
        let mut record = record("v");
        record.chap = Some(serde_json::from_str(chap).unwrap());
        check(&record).unwrap();
        record.allow.insert(Initiator::Any);
        let refused = check(&record).unwrap_err();
        assert!(refused.message.contains("CHAP is for iSCSI only"), "{refused}");
        record.protocols.nvme = false;
        check(&record).unwrap();
        record.protocols.nvme = true;
        record.chap = None;
        check(&record).unwrap();
    }

    /// RFD 0020, 2.
    #[test]
    fn any_beside_secrets_of_hosts_is_refused_where_nvme_would_be_open() {
        let mut record = record("v");
        let of = HostSecretContext { volume: record.id, host: HOST };
        let sealed = StoredDhchap::seal(&dhchap(), of, &ring(1)).unwrap();
        record.dhchap_by_host.insert(HOST.to_owned(), sealed);
        check(&record).unwrap();
        record.allow.insert(Initiator::Any);
        let refused = check(&record).unwrap_err();
        assert!(refused.message.contains("every other host without authentication"), "{refused}");
        record.protocols.nvme = false;
        check(&record).unwrap();
        record.protocols.nvme = true;
        let chap = r#"{"user":"u","secret":"0123456789ab","mutual":null}"#;
        record.chap = Some(serde_json::from_str(chap).unwrap());
        let refused = check(&record).unwrap_err();
        assert!(refused.message.contains("CHAP is for iSCSI only"), "{refused}");
        (record.chap, record.dhchap_by_host) = (None, [].into());
        check(&record).unwrap();
    }

    /// RFD 0022, 3: as with secrets, but a host with optional TLS has no reason to use another
    /// name.
    #[test]
    fn any_beside_required_tls_is_refused_where_nvme_would_be_open() {
        let mut record = record("v");
        let of = HostSecretContext { volume: record.id, host: HOST };
        let set = |record: &mut VolumeRecord, host: &str, required| {
            let sealed = StoredTls::seal(&tls(KEYS[0], required), of, &ring(1)).unwrap();
            record.tls_by_host.insert(host.to_owned(), sealed);
        };
        set(&mut record, HOST, true);
        check(&record).unwrap();
        record.allow.insert(Initiator::Any);
        let refused = check(&record).unwrap_err();
        assert!(refused.message.contains("every other host without TLS"), "{refused}");
        assert!(refused.message.contains("must use TLS"), "{refused}");
        record.protocols.nvme = false;
        check(&record).unwrap();
        record.protocols.nvme = true;
        set(&mut record, HOST, false);
        check(&record).expect("it is possible only");
        set(&mut record, "nqn.2014-08.org.nvmexpress:other", true);
        check(&record).unwrap_err();
    }

    #[test]
    fn secrets_of_hosts_are_bounded() {
        let mut record = record("v");
        let of = HostSecretContext { volume: record.id, host: HOST };
        let sealed = StoredDhchap::seal(&dhchap(), of, &ring(1)).unwrap();
        record.dhchap_by_host.insert(HOST.to_owned(), sealed.clone());
        let check = |record: &VolumeRecord, host: &str| {
            check_initiator_limit(record, &record.dhchap_by_host, host, ("secrets", "hosts"))
        };
        for i in 2..=MAX_INITIATORS {
            check(&record, &format!("nqn.{i}")).unwrap();
            record.dhchap_by_host.insert(format!("nqn.{i}"), sealed.clone());
        }
        check(&record, HOST).expect("it has some already");
        let refused = check(&record, "nqn.x").unwrap_err();
        assert!(refused.message.contains("has secrets of 1024 hosts"), "{refused}");
        check_initiator_limit(&record, &record.tls_by_host, "nqn.x", ("TLS keys", "hosts"))
            .expect("they are counted apart");
    }
}

//! Changing volumes that exist.

use std::collections::BTreeMap;

use api::{
    ApiError, Chap, Code, HostDhchap, HostTls, Initiator, InitiatorChap, Protocols, Volume,
    VolumeName,
};
use nvme::tls::TlsKey;
use uuid::Uuid;

use super::secrets::{sealed, sealed_of_host, sealed_tls};
use super::{Control, backing_error, store_error};
use crate::reconcile::Observed;
use crate::record::{Method, Of, OfHost, Stage, Stored, VolumeRecord, dhchap};

/// Most initiators that a volume may be allowed to, and that may have secrets of their own.
const MAX_INITIATORS: usize = 1024;

impl Control {
    /// Makes a volume larger. Its size already: nothing happens.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`] for a smaller size, [`Code::Conflict`] for a volume that is
    /// offline, what is wrong with the backing.
    pub async fn grow(&self, name: VolumeName, size_bytes: u64) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.detached(async move { control.grow_now(&name, size_bytes).await }).await
    }

    async fn grow_now(&self, name: &VolumeName, size_bytes: u64) -> Result<Volume, ApiError> {
        let id = self.find(name)?;
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        let Stored { mut record, revision } = self.ready(id, name).await?;
        if self.membership().is_some() {
            let message =
                format!("volume {name} cannot be made larger while its node is in a cluster");
            return Err(ApiError::new(Code::Conflict, message)
                .hint("create a larger volume and copy the data"));
        }
        api::check_volume_size(size_bytes, record.block_size)?;
        if size_bytes < record.size_bytes {
            let has = api::Size(record.size_bytes);
            let message = format!("volume {name} has {has} and cannot be made smaller");
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint("create a smaller volume and copy the data"));
        }
        if size_bytes == record.size_bytes {
            return self.show_id(id).await;
        }
        let Observed::Open { core, .. } = self.0.state.observed(id) else {
            return Err(ApiError::new(Code::Conflict, format!("volume {name} is offline"))
                .hint(format!("`windrose volume show {name}` says why")));
        };
        // What may be refused comes before anything that initiators see. After a crash what the image says is adopted,
        // whether it was grown by then or not.
        let before = std::mem::replace(&mut record.size_bytes, size_bytes);
        let revision = match self.0.meta.commit(record.replace(revision)).await {
            Ok(revision) => revision,
            Err(e) => {
                self.settle_held(id).await;
                return Err(store_error(&e));
            }
        };
        let image = match self.0.engine.grow(&record, size_bytes).await {
            Ok(image) => image,
            Err(e) => {
                record.size_bytes = before;
                if let Err(error) = self.0.meta.commit(record.replace(revision)).await {
                    tracing::warn!(volume = %name, %error, "its record names a size that it does not have yet");
                }
                self.settle_held(id).await;
                return Err(backing_error(name, &e));
            }
        };
        let published = Some((revision, None));
        self.0.state.observe(id, Observed::Open { core, image, published });
        record.see(self.me(), image);
        if let Err(error) = self.0.meta.commit(record.replace(revision)).await {
            // The image says it, and the record has the size: the rest is adopted later.
            tracing::warn!(volume = %name, %error, "it is not noted yet that its image was grown");
        }
        self.settle_held(id).await;
        tracing::info!(volume = %name, bytes = size_bytes, "grown");
        self.show_id(id).await
    }

    /// Chooses the protocols that export a volume.
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::Conflict`], [`Code::InvalidRequest`].
    pub async fn set_protocols(
        &self,
        name: VolumeName,
        protocols: Protocols,
    ) -> Result<Volume, ApiError> {
        self.edit(name, move |record| {
            record.protocols = protocols;
            Ok(())
        })
        .await
    }

    /// Lets initiators reach a volume.
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::Conflict`], [`Code::InvalidRequest`].
    pub async fn allow(
        &self,
        name: VolumeName,
        initiators: Vec<Initiator>,
    ) -> Result<Volume, ApiError> {
        self.edit(name, move |record| {
            record.allow.extend(initiators);
            Ok(())
        })
        .await
    }

    /// Stops initiators from reaching a volume.
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::Conflict`].
    pub async fn deny(
        &self,
        name: VolumeName,
        initiators: Vec<Initiator>,
    ) -> Result<Volume, ApiError> {
        self.edit(name, move |record| {
            record.allow.retain(|i| !initiators.contains(i));
            Ok(())
        })
        .await
    }

    /// Asks iSCSI initiators for CHAP, or for their name alone.
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::Conflict`], [`Code::InvalidRequest`].
    pub async fn set_chap(&self, name: VolumeName, chap: Option<Chap>) -> Result<Volume, ApiError> {
        let Some(chap) = chap else {
            return self
                .edit(name, |record| {
                    record.chap = None;
                    Ok(())
                })
                .await;
        };
        let (control, ring) = (self.clone(), self.sealing_keys().await?);
        self.edit(name, move |record| {
            control.may_have_its_own(record, Method::Chap)?;
            let held = (record.id.into(), record.chap.as_ref());
            record.chap = Some(sealed(&chap, held, &ring)?);
            Ok(())
        })
        .await
    }

    /// Asks one iSCSI initiator for CHAP of its own, or for what all are asked for.
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::Conflict`], [`Code::InvalidRequest`].
    pub async fn set_initiator_chap(
        &self,
        name: VolumeName,
        ask: InitiatorChap,
    ) -> Result<Volume, ApiError> {
        let InitiatorChap { initiator, chap } = ask;
        let Initiator::Iscsi(initiator) = initiator else {
            let message = format!("{initiator} is not the name of one iSCSI initiator");
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint("CHAP guards iSCSI only; give an IQN, EUI or NAA name"));
        };
        let ring = match &chap {
            Some(_) => Some(self.sealing_keys().await?),
            None => None,
        };
        let control = self.clone();
        self.edit(name, move |record| {
            let (Some(chap), Some(ring)) = (&chap, &ring) else {
                record.proofs.remove(&initiator);
                return Ok(());
            };
            control.may_have_its_own(record, Method::Chap)?;
            check_room(record, &record.proofs, &initiator, ("secrets", "initiators"))?;
            let of = Of { volume: record.id, initiator: Some(&initiator) };
            let sealed = sealed(chap, (of, record.proofs.get(&initiator)), ring)?;
            record.proofs.insert(initiator, sealed);
            Ok(())
        })
        .await
    }

    /// Asks one NVMe host to prove that it has a secret, or for its name alone (RFD 0020, 2).
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::Conflict`], [`Code::InvalidRequest`].
    pub async fn set_host_dhchap(
        &self,
        name: VolumeName,
        ask: HostDhchap,
    ) -> Result<Volume, ApiError> {
        let HostDhchap { host, secrets } = ask;
        let host = nqn(host, "DH-HMAC-CHAP guards NVMe only")?;
        let Some(secrets) = secrets else {
            return self
                .edit(name, move |record| {
                    record.hosts.remove(&host);
                    Ok(())
                })
                .await;
        };
        dhchap::parse(&secrets).map_err(|why| {
            ApiError::new(Code::InvalidRequest, why.to_string())
                .hint("`nvme gen-dhchap-key` makes secrets; give its answer as it is")
        })?;
        let (control, ring) = (self.clone(), self.sealing_keys().await?);
        self.edit(name, move |record| {
            control.may_have_its_own(record, Method::Dhchap)?;
            check_room(record, &record.hosts, &host, ("secrets", "hosts"))?;
            let of = OfHost { volume: record.id, host: &host };
            let sealed = sealed_of_host(&secrets, (of, record.hosts.get(&host)), &ring)?;
            record.hosts.insert(host, sealed);
            Ok(())
        })
        .await
    }

    /// Has one NVMe host come by TLS, or lets it, or has it come without (RFD 0022, 3).
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::Conflict`], [`Code::InvalidRequest`].
    pub async fn set_host_tls(&self, name: VolumeName, ask: HostTls) -> Result<Volume, ApiError> {
        let HostTls { host, key } = ask;
        let host = nqn(host, "TLS is for NVMe only")?;
        let Some(tls) = key else {
            return self
                .edit(name, move |record| {
                    record.tls.remove(&host);
                    Ok(())
                })
                .await;
        };
        TlsKey::parse(tls.key.expose()).map_err(|why| {
            let message = format!("the TLS key of the host is no good: {why}");
            ApiError::new(Code::InvalidRequest, message)
                .hint("`nvme gen-tls-key` makes keys; give its answer as it is")
        })?;
        let (control, ring) = (self.clone(), self.sealing_keys().await?);
        self.edit(name, move |record| {
            control.may_have_its_own(record, Method::Tls)?;
            check_room(record, &record.tls, &host, ("TLS keys", "hosts"))?;
            let of = OfHost { volume: record.id, host: &host };
            let sealed = sealed_tls(&tls, (of, record.tls.get(&host)), &ring)?;
            record.tls.insert(host, sealed);
            Ok(())
        })
        .await
    }

    /// Changes a volume's record and serves by it. Without a difference nothing happens.
    async fn edit<F>(&self, name: VolumeName, edit: F) -> Result<Volume, ApiError>
    where
        F: FnOnce(&mut VolumeRecord) -> Result<(), ApiError> + Send + 'static,
    {
        let control = self.clone();
        self.detached(async move {
            let id = control.find(&name)?;
            let gate = control.0.state.gate(id);
            let _held = gate.lock().await;
            let Stored { record: before, revision } = control.ready(id, &name).await?;
            let mut record = before.clone();
            edit(&mut record)?;
            if record != before {
                control.check_target(&record)?;
                let committed = control.0.meta.commit(record.replace(revision)).await;
                control.settle_held(id).await;
                committed.map_err(|e| store_error(&e))?;
                tracing::info!(volume = %name, access = ?record.allow, "access changed");
            }
            control.show_id(id).await
        })
        .await
    }

    /// [`check_access`] of a volume and of those behind its target.
    fn check_target(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        let of = |id: &Uuid| self.0.state.get(*id).map(|(stored, _)| stored.record);
        if record.owner() != record.id {
            // What nobody here knows may ask for it.
            let guard = of(&record.owner()).map_or(Some(Method::Chap), |owner| owner.guard());
            return check_access(record, guard);
        }
        let guard = record.guard();
        check_access(record, guard)?;
        let mut guests = record.mapping.guests.values().filter_map(of);
        guests.try_for_each(|guest| check_access(&guest, guard))
    }

    /// Checks that what hosts prove to a volume is its own to say, and not its target's owner's.
    fn may_have_its_own(&self, record: &VolumeRecord, method: Method) -> Result<(), ApiError> {
        if record.owner() == record.id {
            return Ok(());
        }
        let (name, owner) = (&record.name, self.name_of(record.owner()));
        let (door, whose, command) = match method {
            Method::Chap => ("target", "that one's CHAP is", "chap"),
            Method::Dhchap => ("subsystem", "that one's secrets are", "dhchap"),
            Method::Tls => ("subsystem", "that one's TLS keys are", "tls"),
        };
        let message = format!("volume {name} stands behind the {door} of volume {owner}");
        Err(ApiError::new(Code::Conflict, message)
            .hint(format!("{whose} asked for: `windrose volume {command} {owner} …`")))
    }

    /// The record of a volume that is neither being created nor deleted.
    pub(super) async fn ready(&self, id: Uuid, name: &VolumeName) -> Result<Stored, ApiError> {
        let stored = self.stored(id).await.map_err(|e| store_error(&e))?;
        match stored {
            Some(stored) if stored.record.stage == Stage::Ready => Ok(stored),
            Some(_) => {
                Err(ApiError::new(Code::Conflict, format!("volume {name} is being deleted"))
                    .hint(format!("`windrose volume show {name}` says how far that is")))
            }
            None => Err(ApiError::new(Code::NotFound, format!("there is no volume {name}"))
                .hint("`windrose volume list` shows what there is")),
        }
    }
}

/// The name of an NVMe host, and of nobody else.
fn nqn(host: Initiator, why: &str) -> Result<String, ApiError> {
    match host {
        Initiator::Nvme(host) => Ok(host),
        Initiator::Any | Initiator::Iscsi(_) => {
            let message = format!("{host} is not the name of one NVMe host");
            Err(ApiError::new(Code::InvalidRequest, message)
                .hint(format!("{why}; give the host's NQN")))
        }
    }
}

/// Checks that a volume may have one of these, which it `has` of single initiators or hosts, of this one.
fn check_room<S>(
    record: &VolumeRecord,
    has: &BTreeMap<String, S>,
    name: &str,
    (what, of_whom): (&str, &str),
) -> Result<(), ApiError> {
    if has.len() >= MAX_INITIATORS && !has.contains_key(name) {
        let message = format!("volume {} has {what} of {MAX_INITIATORS} {of_whom}", record.name);
        return Err(ApiError::new(Code::InvalidRequest, message));
    }
    Ok(())
}

/// Checks that the rules of access of a volume say what they seem to say, where its target's owner asks for this.
pub(super) fn check_access(record: &VolumeRecord, guard: Option<Method>) -> Result<(), ApiError> {
    if record.allow.len() > MAX_INITIATORS {
        let message =
            format!("volume {} allows more than {MAX_INITIATORS} initiators", record.name);
        return Err(ApiError::new(Code::InvalidRequest, message));
    }
    let Some(method) = guard else { return Ok(()) };
    if !record.allow.contains(&Initiator::Any) || !record.protocols.nvme {
        return Ok(());
    }
    let why = match method {
        Method::Chap => "CHAP guards iSCSI only, and 'any' would let every NVMe host in",
        // Who is asked for a proof would come by another name.
        Method::Dhchap => {
            "NVMe hosts have to prove who they are, and 'any' would let every other one in without a proof"
        }
        Method::Tls => {
            "NVMe hosts have to come by TLS, and 'any' would let every other one in without"
        }
    };
    let message = format!("volume {}: {why}", record.name);
    Err(ApiError::new(Code::InvalidRequest, message)
        .hint("export it by iSCSI only, or allow the NVMe hosts by name"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::{HOST, KEYS, dhchap, record, ring, tls};
    use crate::record::{StoredDhchap, StoredTls};

    fn check(record: &VolumeRecord) -> Result<(), ApiError> {
        check_access(record, record.guard())
    }

    #[test]
    fn chap_with_any_is_refused_where_nvme_would_be_open() {
        let chap = r#"{"user":"u","secret":"0123456789ab","mutual":null}"#;
        let mut record = record("v");
        record.chap = Some(serde_json::from_str(chap).unwrap());
        check(&record).unwrap();
        record.allow.insert(Initiator::Any);
        let refused = check(&record).unwrap_err();
        assert!(refused.message.contains("CHAP guards iSCSI only"), "{refused}");
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
        let of = OfHost { volume: record.id, host: HOST };
        let sealed = StoredDhchap::seal(&dhchap(), of, &ring(1)).unwrap();
        record.hosts.insert(HOST.to_owned(), sealed);
        check(&record).unwrap();
        record.allow.insert(Initiator::Any);
        let refused = check(&record).unwrap_err();
        assert!(refused.message.contains("every other one in without a proof"), "{refused}");
        record.protocols.nvme = false;
        check(&record).unwrap();
        record.protocols.nvme = true;
        let chap = r#"{"user":"u","secret":"0123456789ab","mutual":null}"#;
        record.chap = Some(serde_json::from_str(chap).unwrap());
        let refused = check(&record).unwrap_err();
        assert!(refused.message.contains("CHAP guards iSCSI only"), "{refused}");
        (record.chap, record.hosts) = (None, [].into());
        check(&record).unwrap();
    }

    /// RFD 0022, 3: as beside secrets, but who does not have to use his key has no reason to come by another name.
    #[test]
    fn any_beside_required_tls_is_refused_where_nvme_would_be_open() {
        let mut record = record("v");
        let of = OfHost { volume: record.id, host: HOST };
        let set = |record: &mut VolumeRecord, host: &str, required| {
            let sealed = StoredTls::seal(&tls(KEYS[0], required), of, &ring(1)).unwrap();
            record.tls.insert(host.to_owned(), sealed);
        };
        set(&mut record, HOST, true);
        check(&record).unwrap();
        record.allow.insert(Initiator::Any);
        let refused = check(&record).unwrap_err();
        assert!(refused.message.contains("every other one in without"), "{refused}");
        assert!(refused.message.contains("come by TLS"), "{refused}");
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
        let of = OfHost { volume: record.id, host: HOST };
        let sealed = StoredDhchap::seal(&dhchap(), of, &ring(1)).unwrap();
        record.hosts.insert(HOST.to_owned(), sealed.clone());
        let check = |record: &VolumeRecord, host: &str| {
            check_room(record, &record.hosts, host, ("secrets", "hosts"))
        };
        for i in 2..=MAX_INITIATORS {
            check(&record, &format!("nqn.{i}")).unwrap();
            record.hosts.insert(format!("nqn.{i}"), sealed.clone());
        }
        check(&record, HOST).expect("it has some already");
        let refused = check(&record, "nqn.x").unwrap_err();
        assert!(refused.message.contains("has secrets of 1024 hosts"), "{refused}");
        check_room(&record, &record.tls, "nqn.x", ("TLS keys", "hosts"))
            .expect("they are counted apart");
    }
}

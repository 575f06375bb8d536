//! This node's part in a rotation of the cluster's secret and authority (RFD 0038, 2.4): it
//! performs the actions that [`credential_rotation::next_action`] decides, one at a time.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cluster::admission::{self, AdmissionError};
use cluster::credential_rotation::{
    self, NodeProgress, OneTimeKey, RotationAction, RotationProgress, RotationRecord, RotationView,
    SealingContext, StoredRotation,
};
use cluster::etcd_member::InitialClusterState;
use cluster::identity::{
    ClusterCredentials, ClusterIdentity, IdentityError, MembershipStage, TransportSecurity,
};
use cluster::nodes;
use cluster::secrets::{self, RandomnessUnavailable};
use cluster::store::etcd::MemberResponse;
use cluster::store::{MetadataStore, StoreError};
use peer::NodeId;
use rt::fault_point::{self, FaultPoint};
use tokio::sync::Notify;
use tokio::time::sleep;
use uuid::Uuid;

use super::{ClusterMembership, MembershipError, etcd_tls, lock};
use crate::certificates::{self, CertificateError};

/// Poll interval while no rotation is in progress.
const IDLE_POLL: Duration = Duration::from_secs(5);

/// First and longest pause while waiting for other nodes.
const WAIT_BACKOFF: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(2)];

/// Pause after a step that failed.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Why a step of a rotation failed.
#[derive(Debug, thiserror::Error)]
pub enum RotationError {
    /// A rotation is in progress.
    #[error("the secret of the cluster is already being replaced")]
    AlreadyInProgress,
    /// The node is joining the cluster or leaving it.
    #[error("this node is joining or leaving the cluster")]
    NotAMember,
    /// A store member does not answer; restarting another one could cost the store its quorum.
    #[error("member {0} of the store does not respond")]
    StoreMemberDown(String),
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Join tokens could not be revoked.
    #[error(transparent)]
    Tokens(#[from] AdmissionError),
    /// The identity file could not be written.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The node's certificates could not be replaced.
    #[error(transparent)]
    Certificates(#[from] CertificateError),
    /// The node's store member could not be restarted.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// No key could be generated.
    #[error(transparent)]
    NoRandom(#[from] RandomnessUnavailable),
}

/// The credentials that a node uses and accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CredentialsInUse {
    current: ClusterCredentials,
    other: Option<ClusterCredentials>,
    /// The authorities that its store member was started with; `None` if it runs none.
    store_member_trusts: Option<String>,
}

impl CredentialsInUse {
    /// The credentials of a node that starts with this identity and has not started a store member.
    pub(super) fn new(identity: &ClusterIdentity) -> Self {
        let (own, other) = (identity.credentials(), identity.also_accepted_credentials().cloned());
        Self { current: own, other, store_member_trusts: None }
    }

    /// Records the authorities that its store member is started with.
    pub(super) fn set_store_member_trust(&mut self, authorities: String) {
        self.store_member_trusts = Some(authorities);
    }

    fn matches(&self, identity: &ClusterIdentity) -> bool {
        let Self { current: own, other, .. } = self;
        *own == identity.credentials()
            && other.as_ref() == identity.also_accepted_credentials()
            && !self.is_store_member_stale(identity)
    }

    fn is_store_member_stale(&self, identity: &ClusterIdentity) -> bool {
        let now = certificates::trusted_authorities(identity);
        self.store_member_trusts
            .as_ref()
            .is_some_and(|authorities| !is_same_certificate_set(authorities, &now))
    }
}

/// Whether both contain the same certificates, in any order.
fn is_same_certificate_set(one: &str, other: &str) -> bool {
    const END: &str = "-----END CERTIFICATE-----";
    let set =
        |text: &str| text.split(END).map(|pem| pem.trim().to_owned()).collect::<BTreeSet<_>>();
    set(one) == set(other)
}

/// The node's own transport security, and the other one that it accepts.
pub(super) fn current_and_other_protection(
    identity: &ClusterIdentity,
) -> (&TransportSecurity, Option<&TransportSecurity>) {
    (
        &identity.transport_security,
        identity.also_accepted_credentials().map(|other| &other.transport_security),
    )
}

/// State of this node's part in rotations.
#[derive(Debug, Default)]
pub(super) struct RotationDriver {
    /// Held during each step.
    step_lock: tokio::sync::Mutex<()>,
    /// Opens the credentials that this process has requested.
    one_time_key: Mutex<Option<OneTimeKey>>,
    /// Wakes the driver when there may be work.
    wake: Notify,
    /// Why the last step failed.
    last_error: Mutex<Option<String>>,
}

impl ClusterMembership {
    /// The state of a rotation in the store.
    pub async fn rotation(&self) -> Result<StoredRotation, StoreError> {
        credential_rotation::read_rotation(&self.store).await
    }

    /// Why this node makes no progress in the current rotation.
    pub fn rotation_error(&self) -> Option<String> {
        lock(&self.rotation.last_error).clone()
    }

    /// Starts a rotation to these credentials; `began_s` is the current time, in seconds since
    /// 1970.
    pub async fn begin_rotation(
        &self,
        new: ClusterCredentials,
        began_s: u64,
    ) -> Result<(), RotationError> {
        let _steps = self.rotation.step_lock.lock().await;
        let identity = self.identity();
        if identity.stage != MembershipStage::Member {
            return Err(RotationError::NotAMember);
        }
        if identity.rotation.is_some() || self.rotation().await?.record.is_some() {
            return Err(RotationError::AlreadyInProgress);
        }
        let (id, by) = (Uuid::new_v4(), identity.node.0);
        let record = RotationRecord {
            id,
            stage: credential_rotation::RotationStage::Distribute,
            started_by: by,
            started_s: began_s,
        };
        self.update_identity(|own| own.receive_new_credentials(id, new))?;
        fault_point::reach(FaultPoint::RotationStarted);
        let committed = self.store.commit(vec![record.creation()]).await;
        self.rotation.wake.notify_one();
        match committed {
            Ok(_) => Ok(()),
            // The next step discards the new credentials here.
            Err(StoreError::Conflict { .. }) => Err(RotationError::AlreadyInProgress),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes part in rotations while the node is a member.
    pub async fn drive_rotation(self: Arc<Self>) {
        let mut waiting = WAIT_BACKOFF[0];
        loop {
            let result = self.rotation_step().await;
            let error = result.as_ref().err().map(ToString::to_string);
            let previous = std::mem::replace(&mut *lock(&self.rotation.last_error), error.clone());
            if let Some(why) = error.filter(|why| previous.as_ref() != Some(why)) {
                tracing::debug!(why, "a step of the credential rotation must wait");
            }
            let pause = match result {
                Ok(Some(RotationAction::Wait)) => {
                    let pause = waiting;
                    waiting = (waiting * 2).min(WAIT_BACKOFF[1]);
                    pause
                }
                Ok(Some(_)) => {
                    waiting = WAIT_BACKOFF[0];
                    continue;
                }
                Ok(None) => IDLE_POLL,
                Err(_) => RETRY_PAUSE,
            };
            tokio::select! {
                () = sleep(pause) => {}
                () = self.rotation.wake.notified() => {}
            }
        }
    }

    /// Performs the next action; `None` if no rotation is in progress.
    async fn rotation_step(&self) -> Result<Option<RotationAction>, RotationError> {
        let _steps = self.rotation.step_lock.lock().await;
        let identity = self.identity();
        let stored = self.rotation().await?;
        let is_applied = lock(&self.credentials_in_use).matches(&identity);
        let is_idle = stored.record.is_none() && identity.rotation.is_none() && is_applied;
        if identity.stage != MembershipStage::Member || is_idle {
            return Ok(None);
        }
        let (present, _) = nodes::list_readable(&self.store).await?;
        let present: BTreeSet<_> = present.into_keys().collect();
        let view = RotationView {
            node: identity.node,
            local: identity.rotation.as_ref(),
            is_applied,
            one_time_key: lock(&self.rotation.one_time_key).as_ref().map(OneTimeKey::public),
            stored: &stored,
            nodes: &present,
        };
        let action = credential_rotation::next_action(&view);
        match self.perform_rotation_action(action, &identity, &stored).await {
            // Another node was faster: decide again from what the store holds now.
            Ok(()) | Err(RotationError::Store(StoreError::Conflict { .. })) => Ok(Some(action)),
            Err(error) => Err(error),
        }
    }

    async fn perform_rotation_action(
        &self,
        action: RotationAction,
        identity: &ClusterIdentity,
        stored: &StoredRotation,
    ) -> Result<(), RotationError> {
        let Some((record, revision)) = &stored.record else {
            // Credentials not in use yet are dropped; those in use stay.
            self.update_identity(|own| own.rotation = None)?;
            return self.apply_credentials().await;
        };
        let (id, node) = (record.id, identity.node.0);
        let report = |progress, key| NodeProgress {
            node,
            rotation: id,
            progress,
            sealing_key: key,
            sealed_credentials: None,
        };
        match action {
            RotationAction::Wait => {}
            RotationAction::DiscardLocal => {
                self.update_identity(|own| own.rotation = None)?;
                self.apply_credentials().await?;
            }
            RotationAction::RequestCredentials => {
                let key = OneTimeKey::new()?;
                let public = key.public();
                *lock(&self.rotation.one_time_key) = Some(key);
                credential_rotation::write_progress(
                    &self.store,
                    stored,
                    &report(RotationProgress::NeedsCredentials, Some(public)),
                )
                .await?;
            }
            RotationAction::SealFor(to) => self.seal_credentials_for(to, identity, stored).await?,
            RotationAction::ReceiveCredentials => {
                self.take_new_credentials(id, identity, stored)?;
            }
            RotationAction::Apply => self.apply_credentials().await?,
            RotationAction::ReportProgress(progress) => {
                credential_rotation::write_progress(&self.store, stored, &report(progress, None))
                    .await?;
                tracing::info!(rotation = %id, ?progress, "credential rotation progressed on this node");
            }
            RotationAction::ActivateNew => {
                self.update_identity(ClusterIdentity::activate_new_credentials)?;
                fault_point::reach(FaultPoint::RotationNewFirst);
            }
            RotationAction::DropOld => {
                if let Some((new, old)) = identity.new_credentials_and_old_secret() {
                    secrets::rewrap(&self.store, identity.cluster, &new.secret, &old).await?;
                }
                self.update_identity(ClusterIdentity::drop_old_credentials)?;
                fault_point::reach(FaultPoint::RotationOldDropped);
            }
            RotationAction::AdvanceStage(stage) => {
                if stage == credential_rotation::RotationStage::Activate {
                    // Tokens admit nodes by the credentials that are about to be dropped.
                    admission::revoke_all_tokens(&self.store).await?;
                }
                self.store.commit(vec![record.stage_change(stage, *revision)]).await?;
            }
            RotationAction::RemoveRecords => {
                credential_rotation::remove_records(&self.store, stored).await?;
                tracing::info!(rotation = %id, "credential rotation completed: all nodes use only the new secret and authority");
            }
        }
        Ok(())
    }

    async fn seal_credentials_for(
        &self,
        to: NodeId,
        identity: &ClusterIdentity,
        stored: &StoredRotation,
    ) -> Result<(), RotationError> {
        let progress = stored.progress.get(&to).map(|(progress, _)| progress.clone());
        let (Some(progress), Some((new, old))) =
            (progress, identity.new_credentials_and_old_secret())
        else {
            return Ok(());
        };
        let Some(key) = progress.sealing_key else { return Ok(()) };
        let context = SealingContext {
            cluster: identity.cluster,
            rotation: progress.rotation,
            node: to.0,
            secret: &old,
        };
        let sealed = Some(credential_rotation::seal_credentials(&new, &context, key)?);
        Ok(credential_rotation::write_progress(
            &self.store,
            stored,
            &NodeProgress { sealed_credentials: sealed, ..progress },
        )
        .await?)
    }

    fn take_new_credentials(
        &self,
        id: Uuid,
        identity: &ClusterIdentity,
        stored: &StoredRotation,
    ) -> Result<(), RotationError> {
        let (node, secret) = (identity.node, &identity.secret);
        let sealed = stored
            .progress
            .get(&node)
            .and_then(|(progress, _)| progress.sealed_credentials.as_ref());
        // The key opens one message. If this is not that message, the next step requests another
        // one.
        let key = lock(&self.rotation.one_time_key).take();
        let (Some(sealed), Some(key)) = (sealed, key) else { return Ok(()) };
        let context =
            SealingContext { cluster: identity.cluster, rotation: id, node: node.0, secret };
        match key.open(&context, sealed) {
            Ok(new) if is_same_kind(&new.transport_security, &identity.transport_security) => {
                self.update_identity(|own| own.receive_new_credentials(id, new))?;
                fault_point::reach(FaultPoint::RotationReceived);
            }
            Ok(_) => tracing::error!("rejected new cluster credentials of another kind"),
            Err(error) => {
                tracing::warn!(%error, "cannot use the new credentials from another node");
            }
        }
        Ok(())
    }

    /// Uses and accepts the credentials of the node's identity, for all connections.
    async fn apply_credentials(&self) -> Result<(), RotationError> {
        let identity = self.identity();
        let (own, other) = current_and_other_protection(&identity);
        let path = self.data_dir.path();
        let files =
            certificates::prepare_certificates((own, other), &self.name, &self.config, path)?;
        if let (Some(files), Some(tls)) = (&files, &self.tls) {
            tls.replace(&certificates::peer_tls(files)?);
            self.store.set_tls(&etcd_tls(files))?;
        }
        let other = identity.also_accepted_credentials();
        identity.secret.install_in(&self.secret, other.map(|other| &other.secret));
        if lock(&self.credentials_in_use).is_store_member_stale(&identity) {
            self.restart_store_member(&identity).await?;
        }
        let mut in_use = lock(&self.credentials_in_use);
        (in_use.current, in_use.other) = (identity.credentials(), other.cloned());
        Ok(())
    }

    /// Restarts this node's store member, if all other members answer.
    async fn restart_store_member(&self, identity: &ClusterIdentity) -> Result<(), RotationError> {
        let name = identity.member.as_ref().map(|own| &own.name);
        let others = self.refresh_store_health().await;
        let others = others.iter().filter(|other| Some(&other.member.name) != name);
        let runs = |answer: &MemberResponse| {
            matches!(answer, MemberResponse::Running { leader: Some(_), .. })
        };
        if let Some(down) = others.into_iter().find(|other| !runs(&other.response)) {
            return Err(RotationError::StoreMemberDown(down.member.name.clone()));
        }
        self.stop_store_member().await;
        let own = identity.member.iter();
        let all = own.map(|own| (own.name.clone(), own.peer_url.clone())).collect();
        Ok(self.start_store_member(identity, InitialClusterState::Existing, all)?)
    }
}

/// Whether `new` may replace `old`: the kind of a cluster's transport security never changes.
fn is_same_kind(new: &TransportSecurity, old: &TransportSecurity) -> bool {
    match old {
        TransportSecurity::ClusterAuthority(_) => {
            matches!(new, TransportSecurity::ClusterAuthority(_))
        }
        TransportSecurity::AdministratorCertificates | TransportSecurity::PlainText => new == old,
    }
}

#[cfg(test)]
mod tests {
    use cluster::certificate_authority::CertificateAuthority;
    use cluster::identity::{ClusterSecret, NodeIndex, Role};

    use super::*;

    fn credentials(byte: u8) -> ClusterCredentials {
        let protection = TransportSecurity::ClusterAuthority(CertificateAuthority::new().unwrap());
        ClusterCredentials {
            secret: ClusterSecret::new([byte; 32]),
            transport_security: protection,
        }
    }

    #[test]
    fn a_member_starts_again_where_it_believes_other_authorities() {
        let ClusterCredentials { secret, transport_security: protection } = credentials(1);
        let mut identity = ClusterIdentity {
            stage: MembershipStage::Member,
            cluster: Uuid::nil(),
            node: NodeId(1),
            index: NodeIndex::new(0),
            role: Role::Data,
            secret,
            transport_security: protection,
            rotation: None,
            endpoints: vec!["https://192.0.2.1:2379".into()],
            member: None,
        };
        let mut in_use = CredentialsInUse::new(&identity);
        assert!(in_use.matches(&identity));
        in_use.set_store_member_trust(certificates::trusted_authorities(&identity));
        identity.receive_new_credentials(Uuid::nil(), credentials(2));
        assert!(in_use.is_store_member_stale(&identity) && !in_use.matches(&identity));
        in_use.set_store_member_trust(certificates::trusted_authorities(&identity));
        assert!(!in_use.matches(&identity), "the node itself does not accept both yet");
        identity.activate_new_credentials();
        assert!(!in_use.is_store_member_stale(&identity), "the same two");
        identity.drop_old_credentials();
        assert!(in_use.is_store_member_stale(&identity));
    }

    #[test]
    fn the_kind_of_a_cluster_stays_what_it_is() {
        let own = || credentials(1).transport_security;
        assert!(is_same_kind(&own(), &own()));
        assert!(is_same_kind(&TransportSecurity::PlainText, &TransportSecurity::PlainText));
        assert!(
            !is_same_kind(&TransportSecurity::PlainText, &own())
                && !is_same_kind(&own(), &TransportSecurity::AdministratorCertificates)
        );
    }
}

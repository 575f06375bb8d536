//! How a node takes part when the cluster's secret and authority are replaced (RFD 0038, 2.4): it does what
//! [`rotation::decide`] says, one thing at a time.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::cluster::admission::{self, AdmissionError};
use ::cluster::identity::{Credentials, Identity, IdentityError, Protection, Stage};
use ::cluster::member::Origin;
use ::cluster::meta::etcd::MemberAnswer;
use ::cluster::meta::{Meta, MetaError};
use ::cluster::nodes;
use ::cluster::rotation::{
    self, Action, For, Held, NodeProgress, OneTimeKey, Progress, RotationRecord, View,
};
use ::cluster::vault::{self, NoRandom};
use peer::NodeId;
use rt::fault::{self, Point};
use tokio::sync::Notify;
use tokio::time::sleep;
use uuid::Uuid;

use super::{Part, PartError, etcd_tls, lock};
use crate::protection::{self, ProtectionError};

/// Pause between two looks while nothing is under way.
const IDLE: Duration = Duration::from_secs(5);

/// First and longest pause while others are waited for.
const WAITING: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(2)];

/// Pause after a step that failed.
const AGAIN: Duration = Duration::from_secs(1);

/// Why a step of a rotation was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RotateError {
    /// Another one is under way.
    #[error("the secret of the cluster is being replaced already")]
    UnderWay,
    /// The node is on its way into the cluster or out of it.
    #[error("this node is on its way into the cluster, or out of it")]
    NoMember,
    /// A member of the store does not answer; with one more that starts again it could be without most of them.
    #[error("member {0} of the store does not answer")]
    MemberAway(String),
    /// The store.
    #[error(transparent)]
    Store(#[from] MetaError),
    /// The tokens.
    #[error(transparent)]
    Tokens(#[from] AdmissionError),
    /// The file of the node's identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The node's certificates.
    #[error(transparent)]
    Protection(#[from] ProtectionError),
    /// The node's member of the store.
    #[error(transparent)]
    Part(#[from] PartError),
    /// No key can be drawn.
    #[error(transparent)]
    Random(#[from] NoRandom),
}

/// What a node shows and accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InEffect {
    own: Credentials,
    other: Option<Credentials>,
    /// The authorities that its member of the store was started with; `None` if it runs none.
    member_believes: Option<String>,
}

impl InEffect {
    /// As a node begins that has this identity; its member of the store is not started yet.
    pub(super) fn of(identity: &Identity) -> Self {
        let (own, other) = (identity.credentials(), identity.other_credentials().cloned());
        Self { own, other, member_believes: None }
    }

    /// Its member of the store starts, and believes these authorities.
    pub(super) fn member_starts(&mut self, believes: String) {
        self.member_believes = Some(believes);
    }

    fn is(&self, identity: &Identity) -> bool {
        let Self { own, other, .. } = self;
        *own == identity.credentials()
            && other.as_ref() == identity.other_credentials()
            && !self.has_stale_member(identity)
    }

    fn has_stale_member(&self, identity: &Identity) -> bool {
        let now = protection::believed(identity);
        self.member_believes.as_ref().is_some_and(|believes| !is_same(believes, &now))
    }
}

/// Whether the same authorities are believed, in whatever order.
fn is_same(one: &str, other: &str) -> bool {
    const END: &str = "-----END CERTIFICATE-----";
    let set =
        |text: &str| text.split(END).map(|pem| pem.trim().to_owned()).collect::<BTreeSet<_>>();
    set(one) == set(other)
}

/// What protects the connections of a node, and what else it accepts.
pub(super) fn protections(identity: &Identity) -> (&Protection, Option<&Protection>) {
    (&identity.protection, identity.other_credentials().map(|other| &other.protection))
}

/// A node's part in rotations.
#[derive(Debug, Default)]
pub(super) struct Rotation {
    /// Held for each step.
    steps: tokio::sync::Mutex<()>,
    /// Opens what this process has asked for.
    key: Mutex<Option<OneTimeKey>>,
    /// That there may be something to do.
    wake: Notify,
    /// Why the last step was not taken.
    trouble: Mutex<Option<String>>,
}

impl Part {
    /// What the store holds of a rotation.
    pub(crate) async fn rotation(&self) -> Result<Held, MetaError> {
        rotation::read(&self.store).await
    }

    /// Why this node does not get on with the one that is under way.
    pub(crate) fn rotation_trouble(&self) -> Option<String> {
        lock(&self.rotation.trouble).clone()
    }

    /// Begins to replace the cluster's secret, and what protects its connections, by these; `began_s` is the time now, in
    /// seconds since 1970.
    pub(crate) async fn rotate(&self, new: Credentials, began_s: u64) -> Result<(), RotateError> {
        let _steps = self.rotation.steps.lock().await;
        let identity = self.identity();
        if identity.stage != Stage::Member {
            return Err(RotateError::NoMember);
        }
        if identity.rotation.is_some() || self.rotation().await?.record.is_some() {
            return Err(RotateError::UnderWay);
        }
        let (id, by) = (Uuid::new_v4(), identity.node.0);
        let record = RotationRecord { id, stage: rotation::Stage::Spread, by, began_s };
        self.update(|own| own.take(id, new))?;
        fault::pass(Point::RotateBegun);
        let begun = self.store.commit(vec![record.begin()]).await;
        self.rotation.wake.notify_one();
        match begun {
            Ok(_) => Ok(()),
            // It is forgotten by the next step.
            Err(MetaError::Changed { .. }) => Err(RotateError::UnderWay),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes part in rotations, for as long as the node is a member.
    pub(crate) async fn follow_rotation(self: Arc<Self>) {
        let mut waiting = WAITING[0];
        loop {
            let taken = self.step().await;
            let trouble = taken.as_ref().err().map(ToString::to_string);
            let before = std::mem::replace(&mut *lock(&self.rotation.trouble), trouble.clone());
            if let Some(why) = trouble.filter(|why| before.as_ref() != Some(why)) {
                tracing::debug!(why, "a step of replacing the secret of the cluster has to wait");
            }
            let pause = match taken {
                Ok(Some(Action::Rest)) => {
                    let pause = waiting;
                    waiting = (waiting * 2).min(WAITING[1]);
                    pause
                }
                Ok(Some(_)) => {
                    waiting = WAITING[0];
                    continue;
                }
                Ok(None) => IDLE,
                Err(_) => AGAIN,
            };
            tokio::select! {
                () = sleep(pause) => {}
                () = self.rotation.wake.notified() => {}
            }
        }
    }

    /// Does what is to be done next; `None` if nothing is under way.
    async fn step(&self) -> Result<Option<Action>, RotateError> {
        let _steps = self.rotation.steps.lock().await;
        let identity = self.identity();
        let held = self.rotation().await?;
        let in_effect = lock(&self.in_effect).is(&identity);
        let is_idle = held.record.is_none() && identity.rotation.is_none() && in_effect;
        if identity.stage != Stage::Member || is_idle {
            return Ok(None);
        }
        let (present, _) = nodes::list(&self.store).await?;
        let present: BTreeSet<_> = present.into_keys().collect();
        let view = View {
            node: identity.node,
            own: identity.rotation.as_ref(),
            in_effect,
            key: lock(&self.rotation.key).as_ref().map(OneTimeKey::public),
            held: &held,
            present: &present,
        };
        let action = rotation::decide(&view);
        match self.act(action, &identity, &held).await {
            // Another node was faster: what there is now counts.
            Ok(()) | Err(RotateError::Store(MetaError::Changed { .. })) => Ok(Some(action)),
            Err(error) => Err(error),
        }
    }

    async fn act(
        &self,
        action: Action,
        identity: &Identity,
        held: &Held,
    ) -> Result<(), RotateError> {
        let Some((record, revision)) = &held.record else {
            // What is not shown is over; what is shown stays.
            self.update(|own| own.rotation = None)?;
            return self.put_in_effect().await;
        };
        let (id, node) = (record.id, identity.node.0);
        let said = |progress, key| NodeProgress { node, id, progress, key, sealed: None };
        match action {
            Action::Rest => {}
            Action::Clear => {
                self.update(|own| own.rotation = None)?;
                self.put_in_effect().await?;
            }
            Action::Ask => {
                let key = OneTimeKey::new()?;
                let public = key.public();
                *lock(&self.rotation.key) = Some(key);
                rotation::say(&self.store, held, &said(Progress::Wants, Some(public))).await?;
            }
            Action::Seal(to) => self.seal(to, identity, held).await?,
            Action::Take => self.take(id, identity, held)?,
            Action::PutInEffect => self.put_in_effect().await?,
            Action::Say(progress) => {
                rotation::say(&self.store, held, &said(progress, None)).await?;
                tracing::info!(rotation = %id, ?progress, "new secret and authority of the cluster");
            }
            Action::Use => {
                self.update(Identity::use_new)?;
                fault::pass(Point::RotateUsed);
            }
            Action::Forget => {
                if let Some((new, old)) = identity.new_and_old() {
                    vault::wrap_anew(&self.store, identity.cluster, &new.secret, &old).await?;
                }
                self.update(Identity::forget_old)?;
                fault::pass(Point::RotateForgotten);
            }
            Action::Advance(stage) => {
                if stage == rotation::Stage::Use {
                    // They let in who shows what is about to be forgotten.
                    admission::revoke_all(&self.store).await?;
                }
                self.store.commit(vec![record.advance(stage, *revision)]).await?;
            }
            Action::End => {
                rotation::end(&self.store, held).await?;
                tracing::info!(rotation = %id, "all nodes use the new secret and authority of the cluster only");
            }
        }
        Ok(())
    }

    async fn seal(&self, to: NodeId, identity: &Identity, held: &Held) -> Result<(), RotateError> {
        let said = held.progress.get(&to).map(|(said, _)| said.clone());
        let (Some(said), Some((new, old))) = (said, identity.new_and_old()) else { return Ok(()) };
        let Some(key) = said.key else { return Ok(()) };
        let of = For { cluster: identity.cluster, rotation: said.id, node: to.0, secret: &old };
        let sealed = Some(rotation::seal(&new, &of, key)?);
        Ok(rotation::say(&self.store, held, &NodeProgress { sealed, ..said }).await?)
    }

    fn take(&self, id: Uuid, identity: &Identity, held: &Held) -> Result<(), RotateError> {
        let (node, secret) = (identity.node, &identity.secret);
        let sealed = held.progress.get(&node).and_then(|(said, _)| said.sealed.as_ref());
        // It opens one message. If that is not this one, the next step asks with another one.
        let key = lock(&self.rotation.key).take();
        let (Some(sealed), Some(key)) = (sealed, key) else { return Ok(()) };
        let of = For { cluster: identity.cluster, rotation: id, node: node.0, secret };
        match key.open(&of, sealed) {
            Ok(new) if is_of_kind(&new.protection, &identity.protection) => {
                self.update(|own| own.take(id, new))?;
                fault::pass(Point::RotateTaken);
            }
            Ok(_) => tracing::error!(
                "the new credentials of the cluster are of another kind: they are not taken"
            ),
            Err(error) => tracing::warn!(%error, "a message of another node"),
        }
        Ok(())
    }

    /// Shows and accepts what the node's identity says, everywhere.
    async fn put_in_effect(&self) -> Result<(), RotateError> {
        let identity = self.identity();
        let (own, other) = protections(&identity);
        let path = self.data_dir.path();
        let files = protection::certificates((own, other), &self.name, &self.config, path)?;
        if let (Some(files), Some(tls)) = (&files, &self.tls) {
            tls.replace(&protection::peer_tls(files)?);
            self.store.set_tls(&etcd_tls(files))?;
        }
        let other = identity.other_credentials();
        identity.secret.replace_in(&self.secret, other.map(|other| &other.secret));
        if lock(&self.in_effect).has_stale_member(&identity) {
            self.restart_member(&identity).await?;
        }
        let mut in_effect = lock(&self.in_effect);
        (in_effect.own, in_effect.other) = (identity.credentials(), other.cloned());
        Ok(())
    }

    /// Has this node's member of the store end and start again, while all others answer.
    async fn restart_member(&self, identity: &Identity) -> Result<(), RotateError> {
        let name = identity.member.as_ref().map(|own| &own.name);
        let others = self.look_at_health().await;
        let others = others.iter().filter(|other| Some(&other.member.name) != name);
        let runs =
            |answer: &MemberAnswer| matches!(answer, MemberAnswer::Runs { leader: Some(_), .. });
        if let Some(away) = others.into_iter().find(|other| !runs(&other.answer)) {
            return Err(RotateError::MemberAway(away.member.name.clone()));
        }
        self.stop_member().await;
        let own = identity.member.iter();
        let all = own.map(|own| (own.name.clone(), own.peer_url.clone())).collect();
        Ok(self.run_member(identity, Origin::Joins, all)?)
    }
}

/// Whether one takes the place of the other: the kind of a cluster never changes.
fn is_of_kind(new: &Protection, old: &Protection) -> bool {
    match old {
        Protection::Own(_) => matches!(new, Protection::Own(_)),
        Protection::Given | Protection::Plain => new == old,
    }
}

#[cfg(test)]
mod tests {
    use ::cluster::authority::Authority;
    use ::cluster::identity::{ClusterSecret, NodeIndex, Role};

    use super::*;

    fn credentials(byte: u8) -> Credentials {
        let protection = Protection::Own(Authority::new().unwrap());
        Credentials { secret: ClusterSecret::new([byte; 32]), protection }
    }

    #[test]
    fn a_member_starts_again_where_it_believes_other_authorities() {
        let Credentials { secret, protection } = credentials(1);
        let mut identity = Identity {
            stage: Stage::Member,
            cluster: Uuid::nil(),
            node: NodeId(1),
            index: NodeIndex::new(0),
            role: Role::Data,
            secret,
            protection,
            rotation: None,
            endpoints: vec!["https://192.0.2.1:2379".into()],
            member: None,
        };
        let mut in_effect = InEffect::of(&identity);
        assert!(in_effect.is(&identity));
        in_effect.member_starts(protection::believed(&identity));
        identity.take(Uuid::nil(), credentials(2));
        assert!(in_effect.has_stale_member(&identity) && !in_effect.is(&identity));
        in_effect.member_starts(protection::believed(&identity));
        assert!(!in_effect.is(&identity), "the node itself does not accept both yet");
        identity.use_new();
        assert!(!in_effect.has_stale_member(&identity), "the same two");
        identity.forget_old();
        assert!(in_effect.has_stale_member(&identity));
    }

    #[test]
    fn the_kind_of_a_cluster_stays_what_it_is() {
        let own = || credentials(1).protection;
        assert!(is_of_kind(&own(), &own()));
        assert!(is_of_kind(&Protection::Plain, &Protection::Plain));
        assert!(!is_of_kind(&Protection::Plain, &own()) && !is_of_kind(&own(), &Protection::Given));
    }
}

//! Joining: an out-of-sync replica asks the primary to resync it (RFD 0010, 6.6).

use std::rc::Rc;
use std::time::Duration;

use block::Error;
use intent_log::{ConfigAdoption, OtherImage};
use peer::{Incarnation, Message, NodeId, Role};
use rt::fault_point::{self, FaultPoint};
use uuid::Uuid;

use super::config::MirrorConfig;
use super::membership::Event;
use super::replica::Replica;
use super::state::ReplicaState;
use super::state::join::{AttemptEnd, JoinAttempt};

/// How often an out-of-sync replica checks whether it should ask again.
pub(super) const JOIN_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How long the primary may take to accept.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);

impl Replica {
    /// Begins an attempt, unless one is in progress.
    pub(super) async fn attempt_join(self: &Rc<Self>) {
        let Some((config, link)) = self.join_target() else { return };
        if let Some(attempt) = self.join_attempt() {
            let timed_out = self.core.now() > attempt.started_at + ACCEPT_TIMEOUT
                && attempt.accepted_view.is_none();
            if attempt.session == link.session() && !timed_out {
                return;
            }
        }
        // From here on nothing of an earlier attempt is accepted, and its writes must reach the
        // disk before the new one begins.
        self.step(|s, _| s.end_join_attempt(AttemptEnd::Failed));
        if !self.join_backoff().is_ready(self.core.now()) {
            return;
        }
        self.step(ReplicaState::stop_accepting);
        self.signal.until(|| self.state().prepared.is_drained().then_some(())).await;
        if self.join_target().is_none_or(|(now, l)| now != config || l.session() != link.session())
        {
            return;
        }
        self.step(|s, _| s.prepared.clear());
        if !self.adopt_before_join(&config).await {
            return;
        }
        if self.join_target().is_none_or(|(now, _)| now != config) {
            return;
        }
        let incarnation = Incarnation(self.core.random_u64());
        self.handle_event(Event::JoinStarted(incarnation));
        let Some(image) = config.image(config.primary) else { return };
        let Some(bitmap) = self.leg.log.export_bitmap(image) else { return };
        let (primary, session) = (config.primary, link.session());
        let started_at = self.core.now();
        let attempt =
            JoinAttempt { incarnation, primary, session, started_at, accepted_view: None };
        self.step(|s, _| s.join_attempt = Some(attempt));
        link.send(Message::Join {
            incarnation,
            epoch: config.epoch,
            volume_bytes: bitmap.volume_bytes,
            region_shift: bitmap.region_shift,
            generations: self.leg.log.generations_with(image),
            dirty_bits: bitmap.bits,
        });
    }

    /// The configuration and the session with its primary, if this replica is out of sync and may
    /// join.
    fn join_target(&self) -> Option<(MirrorConfig, peer::Link)> {
        let state = self.state();
        let membership = &state.membership;
        let config = membership.config().filter(|_| membership.role() == Role::OutOfSync)?;
        let may_join = state.leg_loss.is_none() && config.image(self.me).is_some();
        let link = self.link(config.primary).filter(|_| may_join && config.primary != self.me)?;
        // Members that do not reach each other cannot all stay (`state::reachability`).
        config.in_sync.iter().all(|m| self.link(m.node).is_some()).then(|| (config.clone(), link))
    }

    async fn adopt_before_join(self: &Rc<Self>, config: &MirrorConfig) -> bool {
        let adopted = self.leg.log.adopted().map_or(0, |a| a.epoch);
        adopted >= config.epoch.0 || self.adopt_config(config, false).await
    }

    /// Records durably that this replica knows `config`, as a member or not.
    pub(super) async fn adopt_config(
        self: &Rc<Self>,
        config: &MirrorConfig,
        is_member: bool,
    ) -> bool {
        fault_point::reach(FaultPoint::BeforeConfigAdoption);
        let adopted = self.leg.log.adopt_config(self.config_adoption(config, is_member)).await;
        fault_point::reach(FaultPoint::ConfigAdopted);
        if let Err(error) = &adopted {
            tracing::error!(%error, epoch = config.epoch.0, "adopting a configuration failed");
            self.on_leg_error(Error::Gone);
        }
        adopted.is_ok()
    }

    /// The superblock update for `config`, in which this replica is a member or not.
    fn config_adoption(&self, config: &MirrorConfig, is_member: bool) -> ConfigAdoption {
        let others = config.replicas.iter().filter(|r| r.node != self.me);
        let members = config.others(self.me).filter_map(|m| config.image(m.node));
        ConfigAdoption {
            epoch: config.epoch.0,
            config_id: Uuid::from_u128(config.config_id),
            other_images: others.map(|r| OtherImage { image: r.image, is_new: r.is_new }).collect(),
            in_sync_images: members.collect(),
            inherited_generations: self.state().generations_inherited_for(config),
            in_sync_hint: if is_member { in_sync_hint(config, self.me) } else { [None; 3] },
            boot_id: is_member.then(|| self.leg.log.boot(&self.core)),
        }
    }
}

/// What an image in sync by `config` notes of it: the nodes in sync, its own first. An image that
/// is not in sync notes none.
fn in_sync_hint(config: &MirrorConfig, me: NodeId) -> [Option<Uuid>; 3] {
    let all = std::iter::once(me).chain(config.others(me).map(|m| m.node));
    let mut hint = [None; 3];
    for (slot, node) in hint.iter_mut().zip(all) {
        *slot = Some(Uuid::from_u128(node.0.into()));
    }
    hint
}

//! Joining: an out-of-sync replica asks the primary to resync it (RFD 0010, 6.6).

use std::rc::Rc;
use std::time::Duration;

use block::Error;
use intent_log::{ConfigAdoption, OtherImage};
use peer::{DataGeneration, Incarnation, Message, NodeId, Role, View};
use rt::fault_point::{self, FaultPoint};
use uuid::Uuid;

use super::config::MirrorConfig;
use super::membership::Event;
use super::replica::Replica;
use super::state::ReplicaState;

/// How often an out-of-sync replica checks whether it should ask again.
pub(super) const JOIN_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How long the primary may take to accept.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);

/// The least and the longest pause after a failed attempt.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// A failure this long after the previous one counts as the first of a row.
const FAILURE_RESET_AFTER: Duration = Duration::from_secs(120);

/// A member that is excluded this soon after its admission counts as a failed attempt. Longer than
/// the other members take to exclude it.
const MIN_MEMBERSHIP: Duration = Duration::from_secs(30);

/// When an out-of-sync replica may begin a join attempt. Repeated failures are spaced out, so that
/// they do not take all the time of disks and network; an attempt after a success need not wait.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct JoinBackoff {
    /// Attempts in a row that failed after the primary had accepted them: they cost copying.
    failures: u32,
    /// Attempts in a row that the primary did not answer.
    timeouts: u32,
    /// When the last attempt failed.
    last_failed_at: Duration,
    /// When the last attempt was admitted, if this replica has not been excluded since.
    admitted_at: Option<Duration>,
    /// Until when no attempt begins, because the leg failed one.
    leg_cooldown_until: Duration,
}

impl JoinBackoff {
    pub(super) fn is_ready(&self, now: Duration) -> bool {
        let pause = backoff_delay(self.failures.max(self.timeouts));
        now >= self.leg_cooldown_until && now >= self.last_failed_at + pause
    }

    /// An accepted attempt has failed.
    pub(super) fn after_failure(self, now: Duration) -> Self {
        let failures =
            if now > self.last_failed_at + FAILURE_RESET_AFTER { 0 } else { self.failures };
        Self { failures: failures.saturating_add(1), timeouts: 0, last_failed_at: now, ..self }
    }

    /// The primary has not answered an attempt.
    pub(super) fn after_timeout(self, now: Duration) -> Self {
        Self { timeouts: self.timeouts.saturating_add(1), last_failed_at: now, ..self }
    }

    /// The primary serves and invites joiners, or there is a new session with it.
    pub(super) fn after_invitation(self) -> Self {
        Self { timeouts: 0, ..self }
    }

    /// The leg has failed an attempt: the next begins after `pause` at the earliest.
    pub(super) fn with_leg_cooldown(self, now: Duration, pause: Duration) -> Self {
        Self { leg_cooldown_until: now + pause, ..self }
    }

    /// An attempt has succeeded: this replica is a member.
    pub(super) fn after_admission(self, now: Duration) -> Self {
        Self { admitted_at: Some(now), timeouts: 0, ..self }
    }

    /// This replica was excluded. If that was soon after its admission, the attempt counts as
    /// failed.
    pub(super) fn after_exclusion(self, now: Duration) -> Self {
        match self.admitted_at {
            None => self,
            Some(admitted_at) if now < admitted_at + MIN_MEMBERSHIP => {
                Self { admitted_at: None, ..self }.after_failure(now)
            }
            Some(_) => Self { admitted_at: None, failures: 0, ..self },
        }
    }
}

/// The pause after so many failures in a row.
fn backoff_delay(failures: u32) -> Duration {
    match failures {
        0 | 1 => Duration::ZERO,
        n => (BACKOFF_MIN * (1 << (n - 2).min(16))).min(BACKOFF_MAX),
    }
}

/// Why an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttemptEnd {
    /// The configuration or the view changed; not counted as a failure.
    Superseded,
    /// The session, the primary or the leg failed, or the primary aborted it.
    Failed,
}

/// An accepted attempt, and the data generations that the primary had recorded with other images.
pub(super) type InheritedGenerations = (Incarnation, Vec<(Uuid, DataGeneration)>);

/// A join attempt, at the joiner.
#[derive(Clone, Copy, Debug)]
pub(super) struct JoinAttempt {
    pub(super) incarnation: Incarnation,
    pub(super) primary: NodeId,
    pub(super) session: u64,
    pub(super) started_at: Duration,
    /// The view of the primary, once it has accepted.
    pub(super) accepted_view: Option<View>,
}

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
        // Members that do not reach each other cannot all stay (`reachability`).
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// How long after `now` the next attempt may begin, in whole seconds.
    fn pause_after(attempts: &JoinBackoff, now: Duration) -> u64 {
        let waited = (0..=100).find(|n| attempts.is_ready(now + SECOND * *n));
        u64::from(waited.expect("it may begin at some time"))
    }

    #[test]
    fn repeated_join_failures_back_off() {
        let (mut attempts, mut now) = (JoinBackoff::default(), SECOND);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            now += SECOND / 10;
            attempts = attempts.after_failure(now);
            pauses.push(pause_after(&attempts, now));
            now += SECOND * u32::try_from(pauses[pauses.len() - 1]).unwrap();
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        now += FAILURE_RESET_AFTER + SECOND;
        assert_eq!(
            pause_after(&attempts.after_failure(now), now),
            0,
            "what is long ago is forgiven"
        );
    }

    #[test]
    fn repeated_early_exclusions_back_off() {
        let (mut attempts, mut now) = (JoinBackoff::default(), SECOND);
        let mut pauses = Vec::new();
        for _ in 0..4 {
            attempts = attempts.after_admission(now).after_exclusion(now + SECOND);
            now += SECOND;
            pauses.push(pause_after(&attempts, now));
            now += SECOND * 8;
        }
        assert_eq!(pauses, [0, 1, 2, 4]);
    }

    #[test]
    fn successful_joins_in_quick_succession_do_not_back_off() {
        let (mut attempts, mut now) = (JoinBackoff::default(), SECOND);
        for _ in 0..20 {
            attempts = attempts.after_admission(now);
            now += MIN_MEMBERSHIP;
            attempts = attempts.after_exclusion(now);
            assert!(attempts.is_ready(now));
        }
        // One success ends a row of failures.
        let failing =
            attempts.after_failure(now).after_failure(now).after_failure(now).after_failure(now);
        assert_eq!(pause_after(&failing, now), 4);
        let admitted = failing.after_admission(now).after_exclusion(now + MIN_MEMBERSHIP);
        assert_eq!(
            pause_after(&admitted.after_failure(now + MIN_MEMBERSHIP), now + MIN_MEMBERSHIP),
            0
        );
    }

    #[test]
    fn a_primary_that_serves_again_is_asked_immediately() {
        let mut attempts = JoinBackoff::default();
        for _ in 0..8 {
            attempts = attempts.after_timeout(SECOND);
        }
        assert_eq!(pause_after(&attempts, SECOND), 60);
        assert_eq!(pause_after(&attempts.after_invitation(), SECOND), 0);
        let both = attempts
            .after_failure(SECOND)
            .after_failure(SECOND)
            .after_failure(SECOND)
            .after_timeout(SECOND)
            .after_invitation();
        assert_eq!(pause_after(&both, SECOND), 2, "what has cost copies is not forgiven by it");
    }

    #[test]
    fn a_leg_that_failed_a_join_backs_off() {
        let attempts =
            JoinBackoff::default().after_failure(SECOND).with_leg_cooldown(SECOND, SECOND * 10);
        assert_eq!(pause_after(&attempts, SECOND), 10);
        assert_eq!(pause_after(&attempts.after_admission(SECOND), SECOND), 10);
    }
}

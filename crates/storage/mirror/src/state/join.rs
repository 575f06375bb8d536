//! The attempts of this replica to join (RFD 0010, 6.6).

use std::time::Duration;

use peer::{DataGeneration, Incarnation, Message, NodeId, View};
use rt::fault_point::FaultPoint;
use uuid::Uuid;

use super::super::config::MirrorConfig;
use super::ReplicaState;
use super::effects::Effects;
use super::join_backoff::JoinBackoff;

/// Why an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum AttemptEnd {
    /// The configuration or the view changed; not counted as a failure.
    Superseded,
    /// The session, the primary or the leg failed, or the primary aborted it.
    Failed,
}

/// An accepted attempt, and the data generations that the primary had recorded with other images.
pub(in super::super) type InheritedGenerations = (Incarnation, Vec<(Uuid, DataGeneration)>);

/// A join attempt, at the joiner.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct JoinAttempt {
    pub(in super::super) incarnation: Incarnation,
    pub(in super::super) primary: NodeId,
    pub(in super::super) session: u64,
    pub(in super::super) started_at: Duration,
    /// The view of the primary, once it has accepted.
    pub(in super::super) accepted_view: Option<View>,
}

impl ReplicaState {
    /// Whether the primary is resyncing this replica.
    pub(in super::super) fn is_resync_target(&self) -> bool {
        self.join_attempt.is_some_and(|j| j.accepted_view.is_some())
    }

    /// Whether messages of `from` in `view` belong to the present attempt.
    pub(in super::super) fn is_join_view(&self, from: NodeId, view: View) -> bool {
        self.join_attempt.is_some_and(|j| j.primary == from && j.accepted_view == Some(view))
    }

    /// Makes this replica check soon whether it may join.
    pub(in super::super) fn request_join(&mut self, effects: &mut Effects) {
        self.join_wanted = true;
        effects.wake_join();
    }

    /// Whether it was made to check since this was last asked.
    pub(in super::super) fn take_join_wanted(&mut self) -> bool {
        std::mem::take(&mut self.join_wanted)
    }

    /// From here on no message of a view or an earlier attempt is accepted.
    pub(in super::super) fn stop_accepting(&mut self, effects: &mut Effects) {
        self.view = View::default();
        effects.wake();
    }

    /// The primary serves, and invites this replica.
    pub(in super::super) fn on_rejoin(&mut self, effects: &mut Effects) {
        self.end_join_attempt(AttemptEnd::Superseded);
        self.join_backoff = JoinBackoff::after_invitation(self.join_backoff);
        self.request_join(effects);
    }

    /// Ends the attempt in progress.
    pub(in super::super) fn end_join_attempt(&mut self, reason: AttemptEnd) {
        let Some(attempt) = self.join_attempt.take() else { return };
        match (reason, attempt.accepted_view) {
            (AttemptEnd::Superseded, _) => {}
            (AttemptEnd::Failed, Some(_)) => {
                self.join_backoff = self.join_backoff.after_failure(self.now);
            }
            (AttemptEnd::Failed, None) => {
                self.join_backoff = self.join_backoff.after_timeout(self.now);
            }
        }
    }

    /// The leg of a joiner has failed: tells the primary not to wait for it.
    pub(super) fn fail_join_attempt(&mut self, effects: &mut Effects) {
        let Some(attempt) = self.join_attempt else { return };
        self.end_join_attempt(AttemptEnd::Failed);
        self.join_backoff =
            self.join_backoff.with_leg_cooldown(self.now, self.settings.rejoin_delay);
        if let Some(primary) = self.primary() {
            effects.send(primary, Message::JoinAborted { incarnation: attempt.incarnation });
        }
    }

    /// The primary has accepted, and sends every new write here from now on.
    pub(in super::super) fn on_join_accepted(
        &mut self,
        from: NodeId,
        view: View,
        incarnation: Incarnation,
        generations: Vec<(Uuid, DataGeneration)>,
        effects: &mut Effects,
    ) {
        let is_current = |attempt: &&mut JoinAttempt| {
            (attempt.primary, attempt.incarnation) == (from, incarnation)
        };
        let Some(attempt) = self.join_attempt.as_mut().filter(is_current) else { return };
        attempt.accepted_view = Some(view);
        self.inherited_generations = Some((incarnation, generations));
        self.view = view;
        effects.reach(FaultPoint::JoinerAccepted);
        effects.wake();
    }

    /// The primary has aborted the attempt.
    pub(in super::super) fn on_join_aborted(&mut self, incarnation: Incarnation) {
        if self.join_attempt.is_some_and(|j| j.incarnation == incarnation) {
            self.end_join_attempt(AttemptEnd::Failed);
        }
    }

    /// The generations that the primary of the resync had recorded with other images; this image
    /// holds what that one held (RFD 0032, 3.5).
    pub(in super::super) fn generations_inherited_for(
        &self,
        config: &MirrorConfig,
    ) -> Vec<(Uuid, DataGeneration)> {
        let inherited = self.inherited_generations.as_ref();
        let for_config = inherited.filter(|(attempt, _)| config.has_member(self.me, *attempt));
        for_config.map(|(_, generations)| generations.clone()).unwrap_or_default()
    }
}

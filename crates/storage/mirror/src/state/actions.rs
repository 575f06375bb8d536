//! The actions of the membership state machine, errors of the leg, sessions, joiners.

use std::time::Duration;

use block::Error;
use peer::{Incarnation, Message, NodeId, Role, View};

use super::super::LegLoss;
use super::super::config::MirrorConfig;
use super::super::membership::{Action, ConfigChange, Event, MembershipMessage};
use super::ReplicaState;
use super::effects::{ConfigPut, Effect, Effects};
use super::join::AttemptEnd;
use super::join_backoff::JoinBackoff;
use super::lease_messages::is_lease_message;

/// How often a replica that does not serve reads its configuration from the store.
const CONFIG_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Whether the event occurs all the time on an idle replica, and usually changes nothing.
fn is_periodic(event: &Event) -> bool {
    matches!(
        event,
        Event::Tick
            | Event::Received(
                _,
                MembershipMessage::LeaseRequest { .. } | MembershipMessage::LeaseGrant { .. }
            )
    )
}

impl ReplicaState {
    /// Passes an event to the membership state machine, and performs the actions it returns.
    pub(in super::super) fn handle_event(&mut self, event: Event, effects: &mut Effects) {
        if self.is_closed {
            return;
        }
        let mut is_periodic = is_periodic(&event);
        let was_serving = self.was_serving;
        self.membership.set_generations(self.image.recorded_generations());
        for action in self.membership.apply(self.now, event) {
            is_periodic &= matches!(action, Action::Send(..));
            self.perform(action, effects);
        }
        effects.wake_timer();
        let is_serving = self.serving_view().is_some();
        if !is_periodic || was_serving != is_serving {
            effects.wake();
        }
        if is_periodic && was_serving && !is_serving {
            // A lease has expired: what to tell initiators depends on whether the store answers.
            self.handle_event(Event::ConfigChanged, effects);
        }
    }

    /// Passes a message to the membership state machine.
    pub(in super::super) fn on_membership_message(
        &mut self,
        from: NodeId,
        message: Message,
        effects: &mut Effects,
    ) {
        if self.lease_dedup.is_duplicate(from, &message) {
            return;
        }
        self.lease_dedup.note_received(from, &message);
        let message = match message {
            Message::ReplicaReport(report) => MembershipMessage::ReplicaReport(report),
            Message::LeaseRequest { epoch, incarnation, stamp } => {
                let requests = self.lease_requests.entry(from).or_default();
                requests.record(incarnation, stamp, self.now);
                MembershipMessage::LeaseRequest { epoch, incarnation, stamp }
            }
            Message::LeaseGrant { epoch, incarnation, stamp } => {
                MembershipMessage::LeaseGrant { epoch, incarnation, stamp }
            }
            Message::NewerEpoch { epoch } => MembershipMessage::NewerEpoch(epoch),
            Message::RevokeLease { view, incarnation } => {
                MembershipMessage::RevokeLease { view, incarnation }
            }
            Message::LeaseRevoked { view, incarnation } => {
                MembershipMessage::LeaseRevoked { view, incarnation }
            }
            Message::StartViewChange { view, config } => match MirrorConfig::parse(&config) {
                Ok(config) => MembershipMessage::StartViewChange { view, config },
                Err(error) => {
                    tracing::error!(%error, node = from.0, "a view change carries an invalid configuration");
                    return;
                }
            },
            _ => return,
        };
        self.handle_event(Event::Received(from, message), effects);
    }

    fn perform(&mut self, action: Action, effects: &mut Effects) {
        match action {
            Action::ReadConfig => {
                self.note_store_request();
                effects.push(Effect::ReadConfig);
            }
            Action::PutConfig { epoch, config_id, next } => {
                self.note_store_request();
                self.put_count += 1;
                let number = self.put_count;
                effects.push(Effect::PutConfig(ConfigPut { number, epoch, config_id, next }));
            }
            Action::Send(node, message) => self.send_membership(node, message.into(), effects),
            Action::BeginView { view, config } => self.begin_view(view, config, effects),
            Action::SendDoViewChange(view) => self.send_do_view_change(view, effects),
            Action::Reconcile(view) => effects.push(Effect::Reconcile(view)),
            Action::ActivateView(view) => self.activate_view(view, effects),
            Action::BecomeOutOfSync => {
                self.on_out_of_sync(effects);
                self.request_join(effects);
            }
            Action::Refuse(reason) => {
                tracing::error!(why = %reason, "this replica stops serving: its configuration is contradicted");
                self.on_out_of_sync(effects);
            }
            Action::Decline(change) => {
                tracing::warn!(?change, "a configuration change was declined");
                match change {
                    ConfigChange::Admit(node) => {
                        self.joiners.clear_admission_proposed(node);
                        self.drop_joiner(node, effects);
                    }
                    ConfigChange::Leave => self.declined_leaves += 1,
                    _ => {}
                }
            }
        }
    }

    /// Sends a membership message; lease messages go over all paths.
    fn send_membership(&mut self, node: NodeId, message: Message, effects: &mut Effects) {
        self.lease_dedup.note_sent(node, &message);
        effects.push(match is_lease_message(&message) {
            true => Effect::SendLease(node, message),
            false => Effect::Send(node, message),
        });
    }

    /// While it does not serve, it reads the store repeatedly: it may have missed the change notice
    /// of the configuration it waits for.
    pub(in super::super) fn poll_config(&mut self, effects: &mut Effects) {
        if self.serving_view().is_none()
            && self.awake_clock >= self.config_polled_at + CONFIG_POLL_INTERVAL
        {
            self.config_polled_at = self.awake_clock;
            self.handle_event(Event::ConfigChanged, effects);
        }
    }

    /// The store has answered a request.
    pub(in super::super) fn on_store_answer(&mut self) {
        self.store_silent_since = None;
    }

    /// Notes that a request is sent to the store.
    pub(in super::super) fn note_store_request(&mut self) {
        self.store_silent_since.get_or_insert(self.now);
    }

    /// The leg has failed an operation. Returns whether this is the last member, whose clients get
    /// the error; any other member leaves, and the rest go on.
    pub(in super::super) fn on_leg_error(&mut self, e: Error, effects: &mut Effects) -> bool {
        self.on_leg_error_with_loss(e, LegLoss::DiskFailed, effects)
    }

    /// As [`Self::on_leg_error`]; `loss` is why the leg is lost, if it is.
    pub(in super::super) fn on_leg_error_with_loss(
        &mut self,
        e: Error,
        loss: LegLoss,
        effects: &mut Effects,
    ) -> bool {
        if e == Error::NoSpace {
            self.note_no_space(effects);
        }
        let is_member = self.membership.role() == Role::Member;
        if !is_member {
            self.fail_join_attempt(effects);
        }
        let is_sole_member =
            is_member && self.others().is_empty() && self.membership.pending_admission().is_none();
        if is_sole_member {
            // A joiner may have applied the write that failed here: it has to begin again.
            let joiners: Vec<_> = self.joiners.attached().collect();
            joiners.into_iter().for_each(|node| self.drop_joiner(node, effects));
        }
        if e == Error::Gone && self.leg_loss.is_none() {
            tracing::error!("the leg of this replica is lost");
            self.leg_loss = Some(loss);
            self.handle_event(Event::LegLost, effects);
        } else if e != Error::Gone {
            tracing::error!(error = %e, alone = is_sole_member, "the leg of this replica has failed an operation");
            self.leg_error = Some(e);
            self.handle_event(Event::LegFailed, effects);
        }
        effects.wake();
        is_sole_member
    }

    /// Ends the commands of waiting clients. Their writes may still be applied, so the sessions end
    /// too: the next view reconciles those writes, and no client repeats them. An out-of-sync
    /// replica has done so already, and needs its sessions to join.
    pub(in super::super) fn reject_clients(&mut self, effects: &mut Effects) {
        if self.serving_view().is_none() {
            self.close_sessions(effects);
        }
    }

    /// A write that holds a range was abandoned in `view` because clients were rejected. If the
    /// lease came back at once, the view would go on and the range would stay locked; so the
    /// sessions end all the same.
    pub(in super::super) fn abandon_view(&mut self, view: View, effects: &mut Effects) {
        if self.view == view {
            self.close_sessions(effects);
        }
        effects.wake();
    }

    fn close_sessions(&mut self, effects: &mut Effects) {
        if !self.is_out_of_sync() {
            effects.push(Effect::CloseSessions);
            self.local_writes.fence();
            self.sequencer.abandon_writes();
            effects.wake();
        }
    }

    /// A session with `node` is up; the older one, if any, has ended.
    pub(in super::super) fn on_session_up(&mut self, node: NodeId, effects: &mut Effects) {
        self.note_session_message(node);
        self.unlinked_since.remove(&node);
        self.drop_joiner(node, effects);
        self.handle_event(Event::LinkUp(node), effects);
        self.join_backoff = JoinBackoff::after_invitation(self.join_backoff);
        self.request_join(effects);
    }

    /// The session with `node` has ended.
    pub(in super::super) fn on_session_down(
        &mut self,
        node: NodeId,
        session: u64,
        effects: &mut Effects,
    ) {
        self.unlinked_since.insert(node, self.awake_clock);
        self.drop_joiner(node, effects);
        if self.join_attempt.is_some_and(|j| j.session == session) {
            self.end_join_attempt(AttemptEnd::Failed);
        }
        self.handle_event(Event::LinkDown(node), effects);
    }

    /// At the primary: an out-of-sync replica asks to be resynced. Returns the view in which that
    /// is done, if it is.
    pub(in super::super) fn on_join(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
        epoch: block::Epoch,
        effects: &mut Effects,
    ) -> Option<View> {
        let config = self.membership.config();
        let is_listed = config.is_some_and(|r| r.epoch == epoch && r.image(node).is_some());
        let view = self.serving_view().filter(|_| is_listed && self.is_primary())?;
        if self.joiners.current(node).is_some_and(|j| j.admission_proposed) {
            return None;
        }
        self.drop_joiner(node, effects);
        self.join_requests.insert(node, incarnation);
        Some(view)
    }

    /// Ends the attempt of `node`: no write waits for it any more.
    pub(in super::super) fn drop_joiner(&mut self, node: NodeId, effects: &mut Effects) {
        let admitting = self.membership.pending_admission().is_some_and(|m| m.node == node);
        let proposed = self.joiners.current(node).is_some_and(|j| j.admission_proposed);
        if proposed && !admitting {
            // The put has not been sent yet, and is not to be.
            self.joiners.clear_admission_proposed(node);
            self.handle_event(Event::CancelAdmission(node), effects);
        }
        let Some(joiner) = self.joiners.detach(node) else { return };
        effects.send(node, Message::JoinAborted { incarnation: joiner.incarnation });
        let view = self.view;
        let unacknowledged = self.sequencer.unacknowledged_by(node);
        unacknowledged.into_iter().for_each(|seq| self.on_applied(view, seq, node, effects));
        effects.wake();
    }

    /// The joiner has ended its attempt.
    pub(in super::super) fn drop_joiner_attempt(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
        effects: &mut Effects,
    ) {
        if self.joiners.get(node, incarnation).is_some() {
            self.drop_joiner(node, effects);
        }
    }
}

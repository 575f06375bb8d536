//! View changes: how a member comes from one view to the next (RFD 0010, 5.7).

use std::time::Duration;

use peer::{DataGeneration, NodeId, View};

use super::super::config::MirrorConfig;
use super::lease::PeerLease;
use super::{Action, ConfigChange, ConfigRefusal, LegState, MembershipMessage, MirrorMembership};

/// The state of a member in a view of an epoch that lists it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct MemberState {
    pub(super) view: View,
    pub(super) phase: ViewPhase,
    /// The other members, once the epoch has been adopted: leases run from then on.
    pub(super) peer_leases: Option<Vec<PeerLease>>,
    /// When leases are requested next.
    pub(super) renew_at: Duration,
    /// Since when it does not serve because it is leaving (5.4).
    pub(super) stopped_serving_at: Option<Duration>,
    /// The last view in which its lease was revoked (5.5).
    pub(super) revoked_view: Option<View>,
}

/// The progress of a member in its view.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum ViewPhase {
    /// The driver ends the older views. `start_received`: START VIEW CHANGE of this view has come.
    Draining { start_received: bool },
    /// Not the primary: the entries have been reported, or START VIEW CHANGE has yet to come.
    AwaitingPrimary,
    /// The primary: START VIEW CHANGE was sent, and these have answered.
    CollectingEntries { reported: Vec<NodeId> },
    /// The primary: reconciliation is in progress.
    Reconciling,
    /// START VIEW was sent, or received.
    Active,
    /// The leg has failed: takes part in nothing until it is removed, or the last.
    NotParticipating,
}

impl MemberState {
    fn new(view: View) -> Self {
        let phase = ViewPhase::Draining { start_received: false };
        Self {
            view,
            phase,
            peer_leases: None,
            renew_at: Duration::ZERO,
            stopped_serving_at: None,
            revoked_view: None,
        }
    }

    /// Whether its view has been announced to the linked members; a member that does not take part
    /// has nothing to announce.
    pub(super) fn is_announced(&self) -> bool {
        !matches!(self.phase, ViewPhase::Draining { .. } | ViewPhase::NotParticipating)
    }

    /// Whether its lease was revoked in its view.
    pub(super) fn is_lease_revoked(&self) -> bool {
        self.revoked_view.is_some_and(|view| view >= self.view)
    }

    pub(super) fn peer_leases(&self) -> &[PeerLease] {
        self.peer_leases.as_deref().unwrap_or_default()
    }

    pub(super) fn peer_lease_mut(&mut self, node: NodeId) -> Option<&mut PeerLease> {
        self.peer_leases.iter_mut().flatten().find(|p| p.node() == node)
    }

    /// Stops serving: grants requested from now on prove to a leaving member that the grantor is
    /// alive.
    pub(super) fn stop_serving(&mut self, now: Duration) {
        self.stopped_serving_at = Some(now);
        self.renew_at = now;
        self.peer_leases.iter_mut().flatten().for_each(|p| p.proof_of_life = None);
    }
}

impl MirrorMembership {
    /// Learns a newer configuration: from the store, from START VIEW CHANGE, or of its own put.
    pub(super) fn learn_config(&mut self, now: Duration, config: MirrorConfig) {
        self.pending_put = None;
        self.refusal = None;
        self.pending_requests.drop_at_epoch_end();
        if self.config.is_some() && std::mem::take(&mut self.pending_requests.force_primary) {
            // Another member may have gone on: the operator must see that first.
            self.actions.push(Action::Decline(ConfigChange::ForcePrimary));
        }
        self.config_reads.require_fresh_read();
        self.rolled_back.retain(|node| !config.history.rolled_back.contains(node));
        let view = View::first(config.epoch);
        let is_sole_member = config.in_sync.len() == 1;
        self.config = Some(config);
        self.member_state = self.config_as_member().map(|_| MemberState::new(view));
        if self.member_state.is_some() && is_sole_member && self.leg_state == LegState::Failed {
            // Its copy is the volume.
            self.leg_state = LegState::Healthy;
        }
        if self.member_state.is_some() && self.leg_state == LegState::Healthy {
            self.begin_view(view, false);
            return;
        }
        self.pending_requests.leave &= self.member_state.is_some();
        self.stop_participating(now);
        self.actions.push(Action::BecomeOutOfSync);
    }

    /// Begins `view`, of the known epoch.
    fn begin_view(&mut self, view: View, start_received: bool) {
        let has_pending_put = self.pending_put.is_some();
        let config = self.config.clone().filter(|r| r.epoch > self.image_summary.epoch);
        let Some(state) = &mut self.member_state else { return };
        state.view = view;
        state.phase = ViewPhase::Draining { start_received };
        if !has_pending_put {
            state.peer_leases.iter_mut().flatten().for_each(PeerLease::cancel_exclusion);
            self.pending_requests.admit = None;
        }
        self.actions.push(Action::BeginView { view, config });
    }

    pub(super) fn on_view_begun(&mut self, now: Duration, view: View) {
        let (Some(state), Some(config)) = (&mut self.member_state, &self.config) else { return };
        if state.view != view {
            return;
        }
        if self.image_summary.epoch < config.epoch {
            self.image_summary.epoch = config.epoch;
            self.image_summary.config_id = config.config_id;
        }
        // From here on its leg may be ahead of other members.
        self.image_summary.is_clean = false;
        let ViewPhase::Draining { start_received } = state.phase else { return };
        if state.peer_leases.is_none() {
            state.peer_leases =
                Some(config.others(self.me).map(|m| PeerLease::new(m, now)).collect());
            state.renew_at = now;
        }
        if config.primary == self.me {
            state.phase = ViewPhase::CollectingEntries { reported: Vec::new() };
            let config = config.clone();
            for node in config.others(self.me).map(|m| m.node) {
                if self.linked.contains(&node) {
                    let message =
                        MembershipMessage::StartViewChange { view, config: config.clone() };
                    self.actions.push(Action::Send(node, message));
                }
            }
            self.reconcile_if_complete();
        } else {
            state.phase = ViewPhase::AwaitingPrimary;
            if start_received {
                self.actions.push(Action::SendDoViewChange(view));
            }
        }
    }

    /// The primary begins a round when the session of a member comes up. Not with a pending
    /// reconfiguration, which may rely on this very view (5.7); nor while it drains for a view that
    /// it has not announced.
    pub(super) fn begin_next_round(&mut self, node: NodeId) {
        let (Some(state), Some(config)) = (&self.member_state, &self.config) else { return };
        let is_concerned =
            config.primary == self.me && config.others(self.me).any(|m| m.node == node);
        if is_concerned && self.pending_put.is_none() && state.is_announced() {
            self.begin_view(state.view.next_round(), false);
        }
    }

    pub(super) fn on_start_view_change(
        &mut self,
        now: Duration,
        from: NodeId,
        view: View,
        config: MirrorConfig,
    ) {
        if config.primary != from || config.epoch != view.epoch || from == self.me {
            return;
        }
        let known = self.config.as_ref().map_or(self.image_summary.epoch, |r| r.epoch);
        if view.epoch < known {
            self.actions.push(Action::Send(from, MembershipMessage::NewerEpoch(known)));
            return;
        }
        if let Some(refusal) = self.config_conflict(&config) {
            self.refuse(refusal);
            return;
        }
        if self.config.as_ref().is_none_or(|known| known.epoch < config.epoch) {
            self.learn_config(now, config);
        }
        let Some(state) =
            self.member_state.as_mut().filter(|s| s.phase != ViewPhase::NotParticipating)
        else {
            return;
        };
        if view > state.view {
            self.begin_view(view, true);
        } else if view == state.view {
            match &mut state.phase {
                ViewPhase::Draining { start_received } => *start_received = true,
                _ => self.actions.push(Action::SendDoViewChange(view)),
            }
        }
    }

    /// Why `config` contradicts what is known for certain.
    pub(super) fn config_conflict(&self, config: &MirrorConfig) -> Option<ConfigRefusal> {
        if self.settings.trusts_store() {
            return None;
        }
        let (store, image) = (config.epoch, self.image_summary.epoch);
        if image > store {
            return Some(ConfigRefusal::ImageAhead { image, store });
        }
        let known = self.config.as_ref().is_some_and(|r| r.epoch == store && *r != *config);
        if known || image == store && self.image_summary.config_id != config.config_id {
            return Some(ConfigRefusal::ConfigMismatch { epoch: store });
        }
        None
    }

    pub(super) fn refuse(&mut self, refusal: ConfigRefusal) {
        if self.refusal == Some(refusal) {
            return;
        }
        // Its state as a member is gone: it can become one again only with another incarnation.
        self.is_incarnation_void |= self.member_state.take().is_some();
        self.pending_put = None;
        self.refusal = Some(refusal);
        self.actions.push(Action::Refuse(refusal));
    }

    pub(super) fn on_do_view_change(&mut self, from: NodeId, view: View) {
        let Some(state) = self.member_state.as_mut().filter(|s| s.view == view) else { return };
        let is_listed = state.peer_leases().iter().any(|p| p.node() == from);
        let ViewPhase::CollectingEntries { reported } = &mut state.phase else { return };
        if is_listed && !reported.contains(&from) {
            reported.push(from);
            reported.sort_unstable();
        }
        self.reconcile_if_complete();
    }

    fn reconcile_if_complete(&mut self) {
        let Some(state) = &mut self.member_state else { return };
        let ViewPhase::CollectingEntries { reported } = &state.phase else { return };
        if reported.len() == state.peer_leases().len() {
            state.phase = ViewPhase::Reconciling;
            self.actions.push(Action::Reconcile(state.view));
        }
    }

    pub(super) fn on_reconciled(&mut self, view: View) {
        let Some(state) = self.member_state.as_mut().filter(|s| s.view == view) else { return };
        if state.phase == ViewPhase::Reconciling {
            state.phase = ViewPhase::Active;
            self.note_common_generation(DataGeneration::first(view.epoch));
            self.actions.push(Action::ActivateView(view));
        }
    }

    pub(super) fn on_start_view(&mut self, from: NodeId, view: View) {
        let primary = self.primary();
        let Some(state) = self.member_state.as_mut().filter(|s| s.view == view) else { return };
        if primary == Some(from) && state.phase == ViewPhase::AwaitingPrimary {
            state.phase = ViewPhase::Active;
            // All members have adopted the epoch.
            self.note_common_generation(DataGeneration::first(view.epoch));
            self.actions.push(Action::ActivateView(view));
        }
    }
}

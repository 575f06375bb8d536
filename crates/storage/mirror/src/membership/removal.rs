//! Removal: how members leave, and are excluded (RFD 0010, 5.4 and 5.5).
//!
//! The volume is never left to dead members. A member that leaves first stops serving; then it
//! needs proof, requested after that, that every remaining member is alive.

use std::time::Duration;

use peer::NodeId;

use super::super::config::{InSyncMember as Listed, MirrorConfig};
use super::view::ViewPhase;
use super::{Action, ConfigChange, LegState, MemberState, MirrorMembership, PeerLease};

impl MirrorMembership {
    /// The leg failed an operation. A sole member stays: its copy is the volume, and no joiner may
    /// hold anything else. With a pending admission it may not be the sole member any more.
    pub(super) fn on_leg_failed(&mut self, now: Duration) {
        let is_sole_member = self.config_as_member().is_some_and(|r| r.in_sync.len() == 1);
        if is_sole_member && self.pending_admission().is_none() {
            if let Some(joiner) = self.pending_requests.admit.take() {
                self.actions.push(Action::Decline(ConfigChange::Admit(joiner.node)));
            }
        } else if self.leg_state == LegState::Healthy {
            self.leg_state = LegState::Failed;
            self.stop_participating(now);
        }
    }

    /// Takes part in no view of this epoch from now on, because the contents of the leg are wrong.
    /// It grants no leases either, so that the others go on without it even if it cannot reach the
    /// store.
    pub(super) fn stop_participating(&mut self, now: Duration) {
        let (me, Some(state), Some(config)) = (self.me, &mut self.member_state, &self.config)
        else {
            return;
        };
        state.phase = ViewPhase::NotParticipating;
        if state.stopped_serving_at.is_none() {
            state.stop_serving(now);
        }
        if state.peer_leases.is_none() {
            // This replica may never adopt the epoch.
            state.peer_leases = Some(config.others(me).map(|m| PeerLease::new(m, now)).collect());
        }
        self.config_reads.require_fresh_read();
    }

    /// The configuration with the members that remain, if it can be put now.
    pub(super) fn next_members(
        &mut self,
        now: Duration,
        config: &MirrorConfig,
    ) -> Option<MirrorConfig> {
        self.exclude_suspects(now);
        self.begin_leaving(now, config);
        let in_sync = self.remaining_members(now)?;
        let stays = |node| in_sync.iter().any(|m| m.node == node);
        let primary = if stays(config.primary) {
            config.primary
        } else if stays(self.me) {
            self.me
        } else {
            let linked = in_sync.iter().find(|m| self.is_linked_member(m));
            linked.or(in_sync.first())?.node
        };
        Some(MirrorConfig { in_sync, primary, ..config.clone() })
    }

    /// Handles a request to leave: stops serving, or declines.
    fn begin_leaving(&mut self, now: Duration, config: &MirrorConfig) {
        if !self.pending_requests.leave || self.leg_state != LegState::Healthy {
            return;
        }
        let has_successor = self.has_successor(config);
        let Some(state) = &mut self.member_state else { return };
        if !has_successor {
            state.stopped_serving_at = None;
            self.decline_leave();
        } else if state.peer_leases.is_some() && state.stopped_serving_at.is_none() {
            state.stop_serving(now);
        }
    }

    pub(super) fn decline_leave(&mut self) {
        if std::mem::take(&mut self.pending_requests.leave) {
            self.actions.push(Action::Decline(ConfigChange::Leave));
        }
    }

    /// Whether there is a member to leave the volume to.
    fn has_successor(&self, config: &MirrorConfig) -> bool {
        let is_excluded = |node| self.excluded_nodes().any(|n| n == node);
        config.others(self.me).any(|m| self.is_linked_member(&m) && !is_excluded(m.node))
    }

    /// Whether a request to leave needs a read of the configuration.
    pub(super) fn leave_needs_read(&self) -> bool {
        let Some(state) = &self.member_state else { return self.pending_requests.leave };
        let has_successor = self.config.as_ref().is_some_and(|r| self.has_successor(r));
        self.pending_requests.leave
            && self.leg_state == LegState::Healthy
            && (!has_successor || state.peer_leases.is_some() && state.stopped_serving_at.is_none())
    }

    /// 5.5: excludes suspects.
    fn exclude_suspects(&mut self, now: Duration) {
        for node in self.suspects(now) {
            let Some(state) = &mut self.member_state else { return };
            // Ask it at once to stop serving.
            state.renew_at = now;
            if let Some(peer) = state.peer_lease_mut(node) {
                peer.is_excluded = true;
            }
        }
    }

    /// How much longer a member whose leg has failed waits before it excludes others: they exclude
    /// it first, if they can.
    pub(super) fn exclusion_delay(&self) -> Duration {
        if self.leg_state == LegState::Healthy { Duration::ZERO } else { self.settings.grace() }
    }

    /// The suspects not excluded yet. A member with a lost leg excludes no other unless one of the
    /// rest is alive.
    pub(super) fn suspects(&self, now: Duration) -> Vec<NodeId> {
        let Some(state) = &self.member_state else { return Vec::new() };
        let settings = &self.settings;
        let is_leg_healthy = self.leg_state == LegState::Healthy;
        if self.leg_state == LegState::Lost
            && !state.peer_leases().iter().any(|p| p.is_proven_alive(now, settings))
        {
            return Vec::new();
        }
        let is_overdue = |p: &PeerLease| now >= p.suspect_at(settings) + self.exclusion_delay();
        let is_suspect =
            |p: &&PeerLease| !p.is_excluded && (is_leg_healthy && p.is_stuck || is_overdue(p));
        state.peer_leases().iter().filter(is_suspect).map(PeerLease::node).collect()
    }

    /// The members to remain in sync, if there is a change to make and nothing to wait for: all
    /// excluded members have stopped serving, and all members that a leaving one leaves behind are
    /// alive.
    pub(super) fn remaining_members(&self, now: Duration) -> Option<Vec<Listed>> {
        let (state, config) = (self.member_state.as_ref()?, self.config.as_ref()?);
        let has_stopped = |p: &PeerLease| p.has_stopped_serving(now, &self.settings);
        if !state.peer_leases().iter().filter(|p| p.is_excluded).all(has_stopped) {
            return None;
        }
        let rest: Vec<_> = state.peer_leases().iter().filter(|p| !p.is_excluded).collect();
        let leaves = state.stopped_serving_at.is_some() && !rest.is_empty();
        if leaves && !rest.iter().all(|p| self.is_alive(p, now)) {
            return None;
        }
        // A sole member is hindered only by its own lost leg.
        let has_changed =
            leaves || rest.len() < state.peer_leases().len() && self.leg_state != LegState::Lost;
        let stays = |m: &Listed| {
            if m.node == self.me { !leaves } else { rest.iter().any(|p| p.node() == m.node) }
        };
        has_changed.then(|| config.in_sync.iter().copied().filter(stays).collect())
    }

    /// Whether the member has proved that it is alive since this one stopped serving, and has not
    /// reported since then that it restarted.
    fn is_alive(&self, peer: &PeerLease, now: Duration) -> bool {
        let has_restarted = |s: &peer::ReplicaReport| s.incarnation != peer.member.incarnation;
        let restarted = self.peer_reports.get(&peer.node()).is_some_and(has_restarted);
        peer.is_proven_alive(now, &self.settings)
            && !restarted
            && !self.claims_non_membership(&peer.member)
    }

    pub(super) fn excluded_nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        let peers = self.member_state.iter().flat_map(MemberState::peer_leases);
        peers.filter(|p| p.is_excluded).map(PeerLease::node)
    }
}

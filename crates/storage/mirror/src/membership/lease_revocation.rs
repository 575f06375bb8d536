//! Lease revocation: the primary asks a live member that it excludes to stop serving (RFD 0010,
//! 5.5).
//!
//! A member may serve while it holds leases, so an exclusion waits for the grace time. But a member
//! can be excluded although it holds valid leases: it answers lease requests, but no writes,
//! flushes or view changes. Such a member can confirm that it has stopped serving, and then the
//! primary need not wait.

use peer::{Incarnation, NodeId, View};

use super::{Action, MembershipMessage, MirrorMembership};

impl MirrorMembership {
    /// At the primary: asks each excluded member to stop serving. This is called with each renewal
    /// of leases, so a member is asked again until it has confirmed.
    ///
    /// Nothing is sent before the primary has announced its view (`StartViewChange`). A member that
    /// has obeyed serves only in a later view. If it obeyed and then entered this view all the
    /// same, it would never serve: the primary would have no reason to begin a later view.
    pub(super) fn revoke_leases(&mut self) {
        if !self.is_primary() {
            return;
        }
        let Some(state) = self.member_state.as_ref().filter(|s| s.is_announced()) else { return };
        let view = state.view;
        for peer in state.peer_leases().iter().filter(|p| p.is_excluded && !p.is_revoked) {
            let message =
                MembershipMessage::RevokeLease { view, incarnation: peer.member.incarnation };
            self.actions.push(Action::Send(peer.node(), message));
        }
    }

    /// The primary excludes this member and asks it to stop serving: it serves in no view up to
    /// `view` any more. If the primary drops the exclusion, it begins a later view with this
    /// member.
    pub(super) fn on_revoke_lease(&mut self, from: NodeId, view: View, incarnation: Incarnation) {
        let config = self.config.as_ref().filter(|config| config.epoch == view.epoch);
        if config.is_none_or(|config| config.primary != from) || incarnation != self.incarnation {
            return;
        }
        // It is in this view, or it has yet to enter it.
        let Some(state) = self.member_state.as_mut().filter(|s| s.view <= view) else { return };
        state.revoked_view = state.revoked_view.max(Some(view));
        self.actions
            .push(Action::Send(from, MembershipMessage::LeaseRevoked { view, incarnation }));
    }

    /// At the primary: a member confirms that it has stopped serving in `view`. Its exclusion need
    /// not wait for the grace time, only for a fresh read of the configuration.
    pub(super) fn on_lease_revoked(&mut self, from: NodeId, view: View, incarnation: Incarnation) {
        let Some(state) = self.member_state.as_mut().filter(|s| s.view == view) else { return };
        let Some(peer) = state.peer_lease_mut(from) else { return };
        if peer.is_excluded && !peer.is_revoked && peer.member.incarnation == incarnation {
            peer.is_revoked = true;
            self.config_reads.require_fresh_read();
        }
    }
}

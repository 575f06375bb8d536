//! Excluding a member that is alive, and has stopped because it was asked to (RFD 0010, 5.5).
//!
//! If the data path gives up a member whose leases are valid, the primary need not wait for them to
//! expire: the member confirms that it serves no more.

use peer::{Incarnation, NodeId, View};

use super::{Action, MembershipMessage, MirrorMembership};

impl MirrorMembership {
    /// The primary asks excluded members to stop serving, repeatedly until they have. Not before it
    /// has announced the view to them: they could still join it, and nothing would begin another.
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

    /// The primary goes on without this member. It serves again once the primary has begun another
    /// view with it.
    pub(super) fn on_revoke_lease(&mut self, from: NodeId, view: View, incarnation: Incarnation) {
        let config = self.config.as_ref().filter(|r| r.epoch == view.epoch);
        if config.is_none_or(|r| r.primary != from) || incarnation != self.incarnation {
            return;
        }
        let Some(state) = self.member_state.as_mut().filter(|s| s.view <= view) else { return };
        state.revoked_view = state.revoked_view.max(Some(view));
        self.actions
            .push(Action::Send(from, MembershipMessage::LeaseRevoked { view, incarnation }));
    }

    /// A member has stopped serving in this view: its leases need not expire.
    pub(super) fn on_lease_revoked(&mut self, from: NodeId, view: View, incarnation: Incarnation) {
        let Some(state) = self.member_state.as_mut().filter(|s| s.view == view) else { return };
        let Some(peer) = state.peer_lease_mut(from) else { return };
        if peer.is_excluded && !peer.is_revoked && peer.member.incarnation == incarnation {
            peer.is_revoked = true;
            self.config_reads.require_fresh_read();
        }
    }
}

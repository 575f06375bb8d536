//! Going on without a member that lives, and has stopped because it was told to (RFD 0010, 5.5).
//!
//! Whom the data path gives up while its leases come through need not be waited for until they have run
//! out: it says itself that it serves no more.

use peer::{Incarnation, NodeId, View};

use super::{Action, Member, Say};

impl Member {
    /// The primary asks whom it has excluded to stop serving, again and again until they have. Not
    /// before they were told of the view: they might come to it, and nobody would begin another.
    pub(super) fn ask_to_yield(&mut self) {
        if !self.is_primary() {
            return;
        }
        let Some(seat) = self.seat.as_ref().filter(|s| s.is_announced()) else { return };
        let view = seat.view;
        for peer in seat.peers().iter().filter(|p| p.excluded && !p.yielded) {
            let say = Say::Yield { view, incarnation: peer.listed.incarnation };
            self.actions.push(Action::Send(peer.node(), say));
        }
    }

    /// The primary goes on without this member. It serves again when the primary has begun another
    /// view with it.
    pub(super) fn asked_to_yield(&mut self, from: NodeId, view: View, incarnation: Incarnation) {
        let record = self.record.as_ref().filter(|r| r.epoch == view.epoch);
        if record.is_none_or(|r| r.primary != from) || incarnation != self.incarnation {
            return;
        }
        let Some(seat) = self.seat.as_mut().filter(|s| s.view <= view) else { return };
        seat.yielded = seat.yielded.max(Some(view));
        self.actions.push(Action::Send(from, Say::Yielded { view, incarnation }));
    }

    /// A member serves no more in this view: nobody waits for the end of its leases.
    pub(super) fn has_yielded(&mut self, from: NodeId, view: View, incarnation: Incarnation) {
        let Some(seat) = self.seat.as_mut().filter(|s| s.view == view) else { return };
        let Some(peer) = seat.peer_mut(from) else { return };
        if peer.excluded && !peer.yielded && peer.listed.incarnation == incarnation {
            peer.yielded = true;
            self.reads.evidence();
        }
    }
}

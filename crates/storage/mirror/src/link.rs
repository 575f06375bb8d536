//! The mirror as an owner of sessions (RFD 0010, 8.1).

use block::Account;
use peer::{Handler, Link, Message, NO_SESSION, NodeId, Received};

use super::Mirror;

impl Handler for Mirror {
    fn up(&self, link: Link) {
        self.0.up(link);
    }

    fn down(&self, node: NodeId, session: u64) {
        self.0.down(node, session);
    }

    async fn deliver(&self, node: NodeId, session: u64, received: Received) {
        if session == NO_SESSION {
            self.0.take_lease(node, received.message);
            return;
        }
        let Some(link) = self.0.link(node).filter(|l| l.session() == session) else { return };
        self.0.receive(link, received).await;
    }

    fn memory(&self) -> &Account {
        &self.0.account
    }

    fn overhead(&self) -> usize {
        self.0.leg.dev.info().overhead as usize
    }
}

/// Whether it may travel on any connection between two nodes.
pub(super) fn is_lease(message: &Message) -> bool {
    matches!(
        message,
        Message::Renew { .. }
            | Message::Promise { .. }
            | Message::Newer { .. }
            | Message::Yield { .. }
            | Message::Yielded { .. }
    )
}

//! The mirror as the handler of its sessions (RFD 0010, 8.1).

use block::Account;
use peer::{Link, NO_SESSION, NodeId, ReceivedMessage, SessionHandler};

use super::Mirror;

impl SessionHandler for Mirror {
    fn session_up(&self, link: Link) {
        self.0.on_session_up(link);
    }

    fn session_down(&self, node: NodeId, session: u64) {
        self.0.on_session_down(node, session);
    }

    async fn deliver(&self, node: NodeId, session: u64, received: ReceivedMessage) {
        if session == NO_SESSION {
            self.0.on_lease_message(node, received.message);
            return;
        }
        let Some(link) = self.0.link(node).filter(|l| l.session() == session) else { return };
        self.0.receive(link, received).await;
    }

    fn account(&self) -> &Account {
        &self.0.account
    }

    fn overhead_bytes(&self) -> usize {
        self.0.leg.dev.info().overhead_bytes as usize
    }
}

//! The open sessions with other replicas, and the lease connections.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use peer::{Link, Message, NodeId};

/// The lease connections to a node, besides its session.
type LeasePaths = Rc<dyn Fn(NodeId) -> Vec<Link>>;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Sessions(RefCell<SessionTable>);

#[derive(Default)]
struct SessionTable {
    links: BTreeMap<NodeId, Link>,
    lease_paths: Option<LeasePaths>,
}

impl Sessions {
    /// Sets how to find the lease connections.
    pub(super) fn set_lease_paths(&self, paths: impl Fn(NodeId) -> Vec<Link> + 'static) {
        self.0.borrow_mut().lease_paths = Some(Rc::new(paths));
    }

    /// The link to `node`, while there is a session.
    pub(super) fn link(&self, node: NodeId) -> Option<Link> {
        self.0.borrow().links.get(&node).filter(|link| !link.is_closed()).cloned()
    }

    /// The nodes with sessions that are open or have not been reported as ended.
    pub(super) fn nodes(&self) -> Vec<NodeId> {
        self.0.borrow().links.keys().copied().collect()
    }

    /// The links of these sessions.
    pub(super) fn links(&self) -> Vec<Link> {
        self.0.borrow().links.values().cloned().collect()
    }

    /// Adds a session. Ends the older one with that node, if there is one.
    pub(super) fn insert(&self, link: Link) {
        let old = self.0.borrow_mut().links.insert(link.node(), link);
        old.iter().for_each(Link::close);
    }

    /// Removes a session that has ended. False if it is not the present one with `node`.
    pub(super) fn remove(&self, node: NodeId, session: u64) -> bool {
        let is_current = self.0.borrow().links.get(&node).is_some_and(|l| l.session() == session);
        if is_current {
            let old = self.0.borrow_mut().links.remove(&node);
            old.iter().for_each(Link::close);
        }
        is_current
    }

    /// Sends `message` over the session with `node`, if there is one.
    pub(super) fn send(&self, node: NodeId, message: Message) {
        if let Some(link) = self.0.borrow().links.get(&node) {
            link.send(message);
        }
    }

    /// Sends a lease message over all paths to `node`.
    pub(super) fn send_lease(&self, node: NodeId, message: Message) {
        let paths = self.0.borrow().lease_paths.clone();
        let paths = paths.map(|paths| paths(node)).unwrap_or_default();
        paths.iter().for_each(|path| path.send(message.clone()));
        self.send(node, message);
    }

    /// Ends all sessions. They stay listed until their ends are reported.
    pub(super) fn close_all(&self) {
        self.links().iter().for_each(Link::close);
    }

    /// Ends all sessions for good.
    pub(super) fn clear(&self) {
        let table = std::mem::take(&mut *self.0.borrow_mut());
        table.links.values().for_each(Link::close);
    }
}

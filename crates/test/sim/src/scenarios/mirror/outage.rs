//! Outages of the metadata store.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use peer::NodeId;

/// A client of the store: the node itself, or a clone of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StoreClientId {
    pub(super) node: NodeId,
    pub(super) is_clone: bool,
}

/// Nodes that the store does not answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Outage(Arc<Mutex<OutageState>>);

#[derive(Debug, Default)]
pub(super) struct OutageState {
    /// No node gets an answer.
    pub(super) is_down: bool,
    /// These nodes get no answer; their clones do.
    pub(super) isolated_nodes: Vec<NodeId>,
}

impl Outage {
    /// The nodes that get no answer.
    pub(super) fn lock(&self) -> MutexGuard<'_, OutageState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the client gets an answer.
    pub(super) fn answers(&self, caller: StoreClientId) -> bool {
        let unanswered = self.lock();
        !unanswered.is_down
            && (caller.is_clone || !unanswered.isolated_nodes.contains(&caller.node))
    }
}

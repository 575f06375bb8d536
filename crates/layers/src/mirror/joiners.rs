//! The replicas that the primary is bringing in sync, in its present view (RFD 0010, 6.6).

use std::collections::BTreeMap;

use peer::{Incarnation, NodeId};

/// One attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joiner {
    pub(super) incarnation: Incarnation,
    /// Whether it takes part in flushes.
    pub(super) behind_barrier: bool,
    /// Whether the record may list it already: it cannot be dropped any more in this view.
    pub(super) proposed: bool,
    /// Bytes to copy in all, and copied.
    pub(super) todo: u64,
    pub(super) done: u64,
}

/// All of one primary.
#[derive(Debug, Default)]
pub(super) struct Joiners {
    all: BTreeMap<NodeId, Joiner>,
    /// Bytes to copy in all, and copied, of attempts that have ended.
    ended: (u64, u64),
}

impl Joiners {
    /// `node` begins an attempt: every write goes to it from now on.
    pub(super) fn attach(&mut self, node: NodeId, incarnation: Incarnation) {
        let fresh =
            Joiner { incarnation, behind_barrier: false, proposed: false, todo: 0, done: 0 };
        if let Some(old) = self.all.insert(node, fresh) {
            self.count(old);
        }
    }

    /// The attempt of `node`, if it is this one.
    pub(super) fn get(&mut self, node: NodeId, incarnation: Incarnation) -> Option<&mut Joiner> {
        self.all.get_mut(&node).filter(|j| j.incarnation == incarnation)
    }

    /// The attempt of `node`.
    pub(super) fn of(&self, node: NodeId) -> Option<Joiner> {
        self.all.get(&node).copied()
    }

    /// Whose acknowledgement every write needs beside the members'.
    pub(super) fn attached(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.all.keys().copied()
    }

    /// Who takes part in every flush beside the members.
    pub(super) fn behind_barrier(&self) -> Vec<NodeId> {
        self.all.iter().filter(|(_, j)| j.behind_barrier).map(|(node, _)| *node).collect()
    }

    /// The record will not list the attempt of `node`.
    pub(super) fn not_proposed(&mut self, node: NodeId) {
        if let Some(joiner) = self.all.get_mut(&node) {
            joiner.proposed = false;
        }
    }

    /// Ends the attempt of `node`, unless the record may list it; says whether there was one.
    pub(super) fn detach(&mut self, node: NodeId) -> Option<Joiner> {
        if self.all.get(&node).is_none_or(|j| j.proposed) {
            return None;
        }
        let ended = self.all.remove(&node);
        ended.into_iter().for_each(|joiner| self.count(joiner));
        ended
    }

    fn count(&mut self, ended: Joiner) {
        self.ended.0 += ended.todo;
        self.ended.1 += ended.done;
    }

    /// The view is over, and all attempts with it.
    pub(super) fn end(&mut self) {
        let ended = std::mem::take(&mut self.all);
        ended.into_values().for_each(|joiner| self.count(joiner));
    }

    /// Bytes to copy in all, and copied, of all attempts that there ever were.
    pub(super) fn totals(&self) -> (u64, u64) {
        let add = |(todo, done), joiner: &Joiner| (todo + joiner.todo, done + joiner.done);
        self.all.values().fold(self.ended, add)
    }

    /// All attempts, for status.
    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeId, Joiner)> + '_ {
        self.all.iter().map(|(node, joiner)| (*node, *joiner))
    }
}

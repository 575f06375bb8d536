//! Ordering at the primary: numbers writes, counts acknowledgements, batches commits.

use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use peer::{NodeId, Seq};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// The outcome of an ordered write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum ReplicationOutcome {
    /// All members have applied it.
    Committed,
    /// All have answered, and these nodes have no space for it.
    NoSpace(SmallVec<[NodeId; 4]>),
    /// The view ended; the next one decides.
    ViewEnded,
}

/// What an acknowledgement completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum AckProgress {
    /// Nothing to send.
    Pending,
    /// All but its origin have applied it: tell the origin.
    OnlyOriginLeft(NodeId),
    /// All have applied it. The origin, if it is another node.
    Committed(Option<NodeId>),
}

/// The ordered writes of the present view, at its primary.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Sequencer {
    last_seq: u64,
    writes: FxHashMap<Seq, OrderedWrite>,
    /// By member: commits not sent to it yet.
    pending_commits: BTreeMap<NodeId, Vec<Seq>>,
}

#[derive(Clone, Debug)]
struct OrderedWrite {
    /// The nodes that have not applied it.
    unacknowledged: SmallVec<[NodeId; 4]>,
    /// The nodes that have no space for it.
    no_space: SmallVec<[NodeId; 4]>,
    /// Its origin, if that is another node, which waits to hear from the primary.
    origin: Option<NodeId>,
    /// Whether it is a copy, whose commit is not announced.
    is_copy: bool,
    /// When it was ordered, by the awake clock.
    ordered_at: Duration,
    outcome: Option<ReplicationOutcome>,
    waker: Option<Waker>,
}

impl Sequencer {
    /// The next sequence number.
    pub(in super::super) fn next_seq(&mut self) -> Seq {
        self.last_seq += 1;
        Seq(self.last_seq)
    }

    /// The last sequence number assigned.
    pub(in super::super) fn last_seq(&self) -> Seq {
        Seq(self.last_seq)
    }

    /// Tracks the write `seq`, which `nodes` must apply.
    pub(in super::super) fn track_write(
        &mut self,
        seq: Seq,
        nodes: impl IntoIterator<Item = NodeId>,
        origin: Option<NodeId>,
        ordered_at: Duration,
    ) {
        let nodes = nodes.into_iter().collect();
        let write = OrderedWrite {
            unacknowledged: nodes,
            no_space: SmallVec::new(),
            origin,
            is_copy: false,
            ordered_at,
            outcome: None,
            waker: None,
        };
        self.writes.insert(seq, write);
    }

    /// Tracks the copy `seq`, which `nodes` must apply.
    pub(in super::super) fn track_copy(
        &mut self,
        seq: Seq,
        nodes: impl IntoIterator<Item = NodeId>,
        ordered_at: Duration,
    ) {
        self.track_write(seq, nodes, None, ordered_at);
        if let Some(write) = self.writes.get_mut(&seq) {
            write.is_copy = true;
        }
    }

    /// `node` has applied it.
    pub(in super::super) fn acknowledge(&mut self, seq: Seq, node: NodeId) -> AckProgress {
        let Some(write) = self.writes.get_mut(&seq) else { return AckProgress::Pending };
        let before = write.unacknowledged.len();
        write.unacknowledged.retain(|n| *n != node);
        if write.unacknowledged.len() == before {
            return AckProgress::Pending;
        }
        if !write.no_space.is_empty() {
            write.reject_if_all_answered();
            return AckProgress::Pending;
        }
        if write.unacknowledged.is_empty() {
            write.complete(ReplicationOutcome::Committed);
            let origin = write.origin;
            return if write.is_copy {
                AckProgress::Pending
            } else {
                AckProgress::Committed(origin)
            };
        }
        match write.origin {
            Some(origin) if write.unacknowledged[..] == [origin] => {
                AckProgress::OnlyOriginLeft(origin)
            }
            _ => AckProgress::Pending,
        }
    }

    /// `node` has no space for it.
    pub(in super::super) fn reject(&mut self, seq: Seq, node: NodeId) {
        let Some(write) = self.writes.get_mut(&seq) else { return };
        if !write.is_copy && write.unacknowledged.contains(&node) {
            write.unacknowledged.retain(|n| *n != node);
            write.no_space.push(node);
            write.reject_if_all_answered();
        }
    }

    /// The writes that wait for `node`, which is not required any more, in order.
    pub(in super::super) fn unacknowledged_by(&self, node: NodeId) -> Vec<Seq> {
        let waiting = self.writes.iter().filter(|(_, a)| a.unacknowledged.contains(&node));
        let mut seqs: Vec<_> = waiting.map(|(seq, _)| *seq).collect();
        seqs.sort_unstable();
        seqs
    }

    /// The nodes that have not applied a write ordered before `before`.
    pub(in super::super) fn overdue(&self, before: Duration) -> Vec<NodeId> {
        let late = self.writes.values().filter(|a| a.ordered_at < before);
        late.flat_map(|a| a.unacknowledged.iter().copied()).collect()
    }

    /// The outcome of the write `seq`, which it forgets; the task is woken once there is one.
    pub(in super::super) fn poll_outcome(
        &mut self,
        seq: Seq,
        cx: &mut Context<'_>,
    ) -> Poll<ReplicationOutcome> {
        let Some(write) = self.writes.get_mut(&seq) else {
            return Poll::Ready(ReplicationOutcome::ViewEnded);
        };
        let Some(outcome) = write.outcome.take() else {
            write.waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        self.writes.remove(&seq);
        Poll::Ready(outcome)
    }

    /// Queues a commit notice for `nodes`. Returns whether the queue was empty before.
    pub(in super::super) fn queue_commit(
        &mut self,
        seq: Seq,
        nodes: impl IntoIterator<Item = NodeId>,
    ) -> bool {
        let first = self.pending_commits.is_empty();
        for node in nodes {
            self.pending_commits.entry(node).or_default().push(seq);
        }
        first && !self.pending_commits.is_empty()
    }

    /// Takes the queued commits, by node.
    pub(in super::super) fn take_pending_commits(&mut self) -> BTreeMap<NodeId, Vec<Seq>> {
        std::mem::take(&mut self.pending_commits)
    }

    /// Ends the waits for clients' writes: the next view decides their outcome.
    pub(in super::super) fn abandon_writes(&mut self) {
        self.end_matching(|write| !write.is_copy && write.outcome.is_none());
    }

    /// Forgets the write `seq`, which failed at the primary: no task waits for its outcome.
    pub(in super::super) fn forget(&mut self, seq: Seq) {
        self.writes.remove(&seq);
    }

    /// How many writes are tracked.
    #[cfg(feature = "testing")]
    pub(in super::super) fn len(&self) -> usize {
        self.writes.len()
    }

    /// Ends the view.
    pub(in super::super) fn end_view(&mut self) {
        self.pending_commits.clear();
        self.end_matching(|_| true);
        self.writes.clear();
        self.last_seq = 0;
    }

    /// Ends these with the outcome that the view ended, in their order.
    fn end_matching(&mut self, which: impl Fn(&OrderedWrite) -> bool) {
        let mut ended: Vec<_> = self.writes.iter_mut().filter(|(_, a)| which(a)).collect();
        ended.sort_unstable_by_key(|(seq, _)| **seq);
        ended.into_iter().for_each(|(_, write)| write.complete(ReplicationOutcome::ViewEnded));
    }
}

impl OrderedWrite {
    fn reject_if_all_answered(&mut self) {
        if self.unacknowledged.is_empty() {
            self.complete(ReplicationOutcome::NoSpace(self.no_space.clone()));
        }
    }

    fn complete(&mut self, outcome: ReplicationOutcome) {
        self.outcome = Some(outcome);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

//! The writes that entered at this node and are not answered yet.

use std::collections::BTreeSet;
use std::task::{Context, Poll, Waker};

use block::{Ctx, Error};
use peer::{CompareAndWriteOutcome, NodeId, WriteId, WriteOp};
use rustc_hash::FxHashMap;

use super::prepared_list::OpNumber;

/// The outcome of a write in a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum LocalWriteOutcome {
    /// All members have applied it.
    Committed,
    /// The primary has executed the compare-and-write.
    CompareAndWrite(CompareAndWriteOutcome),
    /// No member has a trace of it: send it again.
    Retry,
    /// The request came too late to be ordered: send it again with a new clock stamp.
    RetryWithNewStamp,
    /// It may have been applied; this node will not learn whether.
    Fenced,
    /// The leg of the only member that is left failed it.
    Failed(Error),
}

/// The local writes of one node.
#[derive(Clone, Debug)]
pub(in super::super) struct LocalWrites {
    node: NodeId,
    next_number: u64,
    pending: FxHashMap<u64, LocalWriteState>,
}

/// The state of a local write.
#[derive(Clone, Debug, Default)]
struct LocalWriteState {
    /// The operation, while another node is asked to order it. `None` for a forwarded
    /// compare-and-write, which this node does not apply itself.
    op: Option<(WriteOp, Ctx)>,
    /// Its op number, once the primary has ordered an operation that was kept.
    op_number: Option<OpNumber>,
    applied: bool,
    peers_applied: bool,
    outcome: Option<LocalWriteOutcome>,
    waker: Option<Waker>,
}

impl LocalWriteState {
    /// Its op number, once all members have applied it.
    fn committed(&self) -> Option<OpNumber> {
        self.op_number.filter(|_| self.applied && self.peers_applied)
    }

    /// Sets its outcome in this view. The first one counts, but a retry may be replaced.
    fn complete(&mut self, outcome: LocalWriteOutcome) {
        if self.outcome.is_none_or(|v| {
            matches!(v, LocalWriteOutcome::Retry | LocalWriteOutcome::RetryWithNewStamp)
        }) {
            self.outcome = Some(outcome);
        }
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl LocalWrites {
    /// An empty table. Numbers begin at half of `first`, which is random: no two incarnations use
    /// the same, and none wraps.
    pub(in super::super) fn new(node: NodeId, first: u64) -> Self {
        Self { node, next_number: first >> 1, pending: FxHashMap::default() }
    }

    /// Adds a write, and returns its id.
    pub(in super::super) fn begin(&mut self) -> WriteId {
        let number = self.next_number;
        self.next_number += 1;
        self.pending.insert(number, LocalWriteState::default());
        WriteId { origin: self.node, number }
    }

    /// Forgets the write `number`. Returns the operation, if it was kept.
    pub(in super::super) fn end(&mut self, number: u64) -> Option<(WriteOp, Ctx)> {
        self.pending.remove(&number)?.op
    }

    /// Keeps the operation until the primary has ordered it. Returns what was kept before.
    pub(super) fn keep_op(&mut self, number: u64, op: WriteOp, ctx: Ctx) -> Option<(WriteOp, Ctx)> {
        self.pending.get_mut(&number)?.op.replace((op, ctx))
    }

    /// Resets the write `number`, to be sent in a new view.
    pub(in super::super) fn reset(&mut self, number: u64) {
        if let Some(write) = self.pending.get_mut(&number) {
            (write.op_number, write.outcome) = (None, None);
            (write.applied, write.peers_applied) = (false, false);
        }
    }

    /// The outcome of the write `number`; the task is woken once there is one.
    pub(in super::super) fn poll_outcome(
        &mut self,
        number: u64,
        cx: &mut Context<'_>,
    ) -> Poll<LocalWriteOutcome> {
        let Some(write) = self.pending.get_mut(&number) else { return Poll::Pending };
        match write.outcome {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                write.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The primary has ordered the write `number`: returns the operation, if it is to be applied
    /// here.
    pub(super) fn on_op_assigned(
        &mut self,
        number: u64,
        op_number: OpNumber,
    ) -> Option<(WriteOp, Ctx)> {
        let write = self.pending.get_mut(&number)?;
        let op = write.op.take()?;
        write.op_number = Some(op_number);
        Some(op)
    }

    /// The local leg has applied `op_number`. Returns whether it is a write of this node that all
    /// members have applied.
    pub(super) fn on_applied(&mut self, write_id: WriteId, op_number: OpNumber) -> bool {
        if write_id.origin != self.node {
            return false;
        }
        let Some(write) = self.pending.get_mut(&write_id.number) else { return false };
        write.applied |= write.op_number == Some(op_number);
        write.committed() == Some(op_number)
    }

    /// All other members have applied the write `number`. `None` if it is not pending; else its op
    /// number, once this member has applied it too.
    pub(super) fn on_peers_applied(&mut self, number: u64) -> Option<Option<OpNumber>> {
        let write = self.pending.get_mut(&number)?;
        write.peers_applied = true;
        Some(write.committed())
    }

    /// Completes the write `number`, if it is not answered yet.
    pub(super) fn complete(&mut self, number: u64, outcome: LocalWriteOutcome) {
        if let Some(write) = self.pending.get_mut(&number) {
            write.complete(outcome);
        }
    }

    /// Completes the write with this id, if it entered here and is not answered yet.
    pub(super) fn complete_by_id(&mut self, write_id: WriteId, outcome: LocalWriteOutcome) {
        if write_id.origin == self.node {
            self.complete(write_id.number, outcome);
        }
    }

    /// A view is active: writes in `committed` are committed; all others are sent again, oldest
    /// first.
    pub(super) fn on_view_active(&mut self, committed: &BTreeSet<WriteId>) {
        for number in self.numbers() {
            let write_id = WriteId { origin: self.node, number };
            let is_committed = committed.contains(&write_id);
            self.complete(
                number,
                if is_committed { LocalWriteOutcome::Committed } else { LocalWriteOutcome::Retry },
            );
        }
    }

    /// Fences all writes: this node will not learn their outcome.
    pub(super) fn fence(&mut self) {
        self.numbers().into_iter().for_each(|n| self.complete(n, LocalWriteOutcome::Fenced));
    }

    /// The numbers of the writes that are not answered, in order.
    fn numbers(&self) -> Vec<u64> {
        let mut numbers: Vec<_> = self.pending.keys().copied().collect();
        numbers.sort_unstable();
        numbers
    }

    /// How many are not answered.
    pub(in super::super) fn len(&self) -> usize {
        self.pending.len()
    }
}

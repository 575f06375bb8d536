//! The writes that entered at this node and are not answered yet.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block::{Ctx, Error};
use peer::{CompareAndWriteOutcome, NodeId, WriteId, WriteOp};
use rustc_hash::FxHashMap;

use super::prepared_list::OpNumber;

/// The outcome of a write in a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LocalWriteOutcome {
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
    /// The leg of the last member failed it.
    Failed(Error),
}

/// The local writes of one node.
#[derive(Debug)]
pub(super) struct LocalWrites {
    node: NodeId,
    table: RefCell<LocalWriteTable>,
}

#[derive(Debug, Default)]
struct LocalWriteTable {
    next_number: u64,
    pending: FxHashMap<u64, LocalWriteState>,
}

/// One write, from its acceptance to its answer.
#[derive(Debug)]
pub(super) struct LocalWrite {
    all: Rc<LocalWrites>,
    number: u64,
}

/// The state of a local write.
#[derive(Debug, Default)]
struct LocalWriteState {
    /// The operation, while another node is asked to order it. `None` for a forwarded
    /// compare-and-write, which this node does not apply itself.
    op: Option<(WriteOp, Ctx)>,
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
    /// An empty table. Numbers begin at `first`, which is random, so that no two incarnations use
    /// the same.
    pub(super) fn new(node: NodeId, first: u64) -> Rc<Self> {
        let table = LocalWriteTable { next_number: first >> 1, ..LocalWriteTable::default() };
        Rc::new(Self { node, table: RefCell::new(table) })
    }

    /// Adds a write.
    pub(super) fn begin(self: &Rc<Self>) -> LocalWrite {
        let mut table = self.table.borrow_mut();
        let number = table.next_number;
        table.next_number += 1;
        table.pending.insert(number, LocalWriteState::default());
        LocalWrite { all: Rc::clone(self), number }
    }

    /// Accesses the write with this number, if it is not answered yet.
    fn with<T>(&self, number: u64, access: impl FnOnce(&mut LocalWriteState) -> T) -> Option<T> {
        self.table.borrow_mut().pending.get_mut(&number).map(access)
    }

    /// The write `number` has got its op number: returns the operation, if it is to be applied
    /// here.
    pub(super) fn on_op_assigned(
        &self,
        number: u64,
        op_number: OpNumber,
    ) -> Option<(WriteOp, Ctx)> {
        self.with(number, |write| {
            let op = write.op.take()?;
            write.op_number = Some(op_number);
            Some(op)
        })?
    }

    /// The local leg has applied `op_number`. Returns whether it is a write of this node that all
    /// members have applied.
    pub(super) fn on_applied(&self, write_id: WriteId, op_number: OpNumber) -> bool {
        if write_id.origin != self.node {
            return false;
        }
        let committed = self.with(write_id.number, |write| {
            write.applied |= write.op_number == Some(op_number);
            write.committed()
        });
        committed.flatten() == Some(op_number)
    }

    /// All other members have applied the write `number`. Returns its op number, once all members
    /// have applied it; `None` twice if it is not pending.
    pub(super) fn on_peers_applied(&self, number: u64) -> Option<Option<OpNumber>> {
        self.with(number, |write| {
            write.peers_applied = true;
            write.committed()
        })
    }

    /// Completes the write `number`, if it is not answered yet.
    pub(super) fn complete(&self, number: u64, outcome: LocalWriteOutcome) {
        self.with(number, |write| write.complete(outcome));
    }

    /// Completes the write with this id, if it entered here and is not answered yet.
    pub(super) fn complete_by_id(&self, write_id: WriteId, outcome: LocalWriteOutcome) {
        if write_id.origin == self.node {
            self.complete(write_id.number, outcome);
        }
    }

    /// A view is active: writes in `committed` are committed; all others are sent again, oldest
    /// first.
    pub(super) fn on_view_active(&self, committed: &BTreeSet<WriteId>) {
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
    pub(super) fn fence(&self) {
        self.numbers().into_iter().for_each(|n| self.complete(n, LocalWriteOutcome::Fenced));
    }

    /// The numbers of the writes that are not answered, in order.
    fn numbers(&self) -> Vec<u64> {
        let mut numbers: Vec<_> = self.table.borrow().pending.keys().copied().collect();
        numbers.sort_unstable();
        numbers
    }

    /// How many are not answered.
    pub(super) fn len(&self) -> usize {
        self.table.borrow().pending.len()
    }
}

impl LocalWrite {
    /// Its id.
    pub(super) fn id(&self) -> WriteId {
        WriteId { origin: self.all.node, number: self.number }
    }

    /// Keeps the operation until the primary has ordered it.
    pub(super) fn keep_op(&self, op: WriteOp, ctx: Ctx) {
        let old = self.all.with(self.number, |write| write.op.replace((op, ctx)));
        drop(old);
    }

    /// Resets it, to be sent in a new view.
    pub(super) fn reset(&self) {
        self.all.with(self.number, |write| {
            (write.op_number, write.outcome) = (None, None);
            (write.applied, write.peers_applied) = (false, false);
        });
    }

    /// Waits for its outcome.
    pub(super) async fn outcome(&self) -> LocalWriteOutcome {
        let poll = |write: &mut LocalWriteState, cx: &mut Context<'_>| {
            if write.outcome.is_none() {
                write.waker = Some(cx.waker().clone());
            }
            write.outcome
        };
        poll_fn(|cx| match self.all.with(self.number, |write| poll(write, cx)).flatten() {
            Some(outcome) => Poll::Ready(outcome),
            None => Poll::Pending,
        })
        .await
    }
}

impl Drop for LocalWrite {
    fn drop(&mut self) {
        let ended = self.all.table.borrow_mut().pending.remove(&self.number);
        drop(ended);
    }
}

//! The writes that entered at this node and are not answered yet.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use block::{Ctx, Error};
use peer::{CompareAndWriteOutcome, NodeId, Seq, View, WriteId, WriteOp};
use rustc_hash::FxHashMap;

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
    next_number: Cell<u64>,
    pending: RefCell<FxHashMap<u64, Rc<LocalWriteState>>>,
}

/// One write, from its acceptance to its answer.
#[derive(Debug)]
pub(super) struct LocalWrite {
    all: Rc<LocalWrites>,
    state: Rc<LocalWriteState>,
}

/// The state of a local write.
#[derive(Debug)]
pub(super) struct LocalWriteState {
    number: u64,
    /// The operation, while another node is asked to order it. `None` for a forwarded
    /// compare-and-write, which this node does not apply itself.
    op: RefCell<Option<(WriteOp, Ctx)>>,
    op_number: Cell<Option<(View, Seq)>>,
    applied: Cell<bool>,
    peers_applied: Cell<bool>,
    outcome: Cell<Option<LocalWriteOutcome>>,
    waker: RefCell<Option<Waker>>,
}

impl LocalWrites {
    /// An empty table. Numbers begin at `first`, which is random, so that no two incarnations use
    /// the same.
    pub(super) fn new(node: NodeId, first: u64) -> Rc<Self> {
        let next = Cell::new(first >> 1);
        Rc::new(Self { node, next_number: next, pending: RefCell::default() })
    }

    /// Adds a write.
    pub(super) fn begin(self: &Rc<Self>) -> LocalWrite {
        let number = self.next_number.get();
        self.next_number.set(number + 1);
        let pending = Rc::new(LocalWriteState {
            number,
            op: RefCell::default(),
            op_number: Cell::default(),
            applied: Cell::default(),
            peers_applied: Cell::default(),
            outcome: Cell::default(),
            waker: RefCell::default(),
        });
        self.pending.borrow_mut().insert(number, Rc::clone(&pending));
        LocalWrite { all: Rc::clone(self), state: pending }
    }

    /// The write with this number, if it is not answered yet.
    pub(super) fn by_number(&self, number: u64) -> Option<Rc<LocalWriteState>> {
        self.pending.borrow().get(&number).cloned()
    }

    /// The write with this id, if it entered here and is not answered yet.
    pub(super) fn by_id(&self, write_id: WriteId) -> Option<Rc<LocalWriteState>> {
        (write_id.origin == self.node).then(|| self.by_number(write_id.number)).flatten()
    }

    /// A view is active: writes in `committed` are committed; all others are sent again, oldest
    /// first.
    pub(super) fn on_view_active(&self, committed: &BTreeSet<WriteId>) {
        for pending in self.sorted() {
            let write_id = WriteId { origin: self.node, number: pending.number };
            let is_committed = committed.contains(&write_id);
            pending.complete(if is_committed {
                LocalWriteOutcome::Committed
            } else {
                LocalWriteOutcome::Retry
            });
        }
    }

    /// Fences all writes: this node will not learn their outcome.
    pub(super) fn fence(&self) {
        self.sorted().iter().for_each(|p| p.complete(LocalWriteOutcome::Fenced));
    }

    fn sorted(&self) -> Vec<Rc<LocalWriteState>> {
        let mut all: Vec<_> = self.pending.borrow().values().map(Rc::clone).collect();
        all.sort_unstable_by_key(|pending| pending.number);
        all
    }

    /// How many are not answered.
    pub(super) fn len(&self) -> usize {
        self.pending.borrow().len()
    }
}

impl LocalWrite {
    /// Its id.
    pub(super) fn id(&self) -> WriteId {
        WriteId { origin: self.all.node, number: self.state.number }
    }

    /// Keeps the operation until the primary has ordered it.
    pub(super) fn keep_op(&self, op: WriteOp, ctx: Ctx) {
        self.state.op.replace(Some((op, ctx)));
    }

    /// Resets it, to be sent in a new view.
    pub(super) fn reset(&self) {
        self.state.outcome.set(None);
        self.state.op_number.set(None);
        self.state.applied.set(false);
        self.state.peers_applied.set(false);
    }

    /// Waits for its outcome.
    pub(super) async fn outcome(&self) -> LocalWriteOutcome {
        poll_fn(|cx| match self.state.outcome.get() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                self.state.waker.replace(Some(cx.waker().clone()));
                Poll::Pending
            }
        })
        .await
    }
}

impl Drop for LocalWrite {
    fn drop(&mut self) {
        self.all.pending.borrow_mut().remove(&self.state.number);
    }
}

impl LocalWriteState {
    /// Sets its op number; returns the operation, if it is to be applied here.
    pub(super) fn on_op_assigned(&self, view: View, seq: Seq) -> Option<(WriteOp, Ctx)> {
        let op = self.op.take()?;
        self.op_number.set(Some((view, seq)));
        Some(op)
    }

    /// Its op number, if known.
    pub(super) fn op_number(&self) -> Option<(View, Seq)> {
        self.op_number.get()
    }

    /// The local leg has applied it; returns whether all members have.
    pub(super) fn on_applied(&self) -> bool {
        self.applied.set(true);
        self.peers_applied.get()
    }

    /// All other members have applied it; returns whether all members have.
    pub(super) fn on_peers_applied(&self) -> bool {
        self.peers_applied.set(true);
        self.applied.get()
    }

    /// Sets its outcome in this view. The first one counts, but a retry may be replaced.
    pub(super) fn complete(&self, outcome: LocalWriteOutcome) {
        if self.outcome.get().is_none_or(|v| {
            matches!(v, LocalWriteOutcome::Retry | LocalWriteOutcome::RetryWithNewStamp)
        }) {
            self.outcome.set(Some(outcome));
        }
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

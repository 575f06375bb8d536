//! The writes that entered at this node and are not answered yet.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use block::{Ctx, Error};
use peer::{Change, NodeId, Outcome, Seq, Tag, View};
use rustc_hash::FxHashMap;

/// What became of a write in a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// All members have it.
    Committed,
    /// The primary has carried out the request it was a part of.
    Outcome(Outcome),
    /// It left no trace at any member: ask again.
    Again,
    /// It came too late to be put in order: ask again under a new stamp.
    Late,
    /// It may have been carried out; this node will not learn it.
    Fenced,
    /// The last member's leg refused it.
    Failed(Error),
}

/// All of one node.
#[derive(Debug)]
pub(super) struct OwnWrites {
    node: NodeId,
    next: Cell<u64>,
    pending: RefCell<FxHashMap<u64, Rc<Pending>>>,
}

/// One write, from its acceptance to its answer.
#[derive(Debug)]
pub(super) struct Own {
    all: Rc<OwnWrites>,
    pending: Rc<Pending>,
}

/// What is known of it.
#[derive(Debug)]
pub(super) struct Pending {
    number: u64,
    /// What it changes, while another node is asked for its place. A forwarded request, which this node never
    /// applies itself, has none.
    change: RefCell<Option<(Change, Ctx)>>,
    place: Cell<Option<(View, Seq)>>,
    applied: Cell<bool>,
    done: Cell<bool>,
    verdict: Cell<Option<Verdict>>,
    waker: RefCell<Option<Waker>>,
}

impl OwnWrites {
    /// None yet. Numbers begin at `first`, which is random: no two incarnations use the same.
    pub(super) fn new(node: NodeId, first: u64) -> Rc<Self> {
        let next = Cell::new(first >> 1);
        Rc::new(Self { node, next, pending: RefCell::default() })
    }

    /// A new one.
    pub(super) fn begin(self: &Rc<Self>) -> Own {
        let number = self.next.get();
        self.next.set(number + 1);
        let pending = Rc::new(Pending {
            number,
            change: RefCell::default(),
            place: Cell::default(),
            applied: Cell::default(),
            done: Cell::default(),
            verdict: Cell::default(),
            waker: RefCell::default(),
        });
        self.pending.borrow_mut().insert(number, Rc::clone(&pending));
        Own { all: Rc::clone(self), pending }
    }

    /// The one of this number, if it is not answered yet.
    pub(super) fn get(&self, number: u64) -> Option<Rc<Pending>> {
        self.pending.borrow().get(&number).cloned()
    }

    /// The one of this tag, if it is ours and not answered yet.
    pub(super) fn tagged(&self, tag: Tag) -> Option<Rc<Pending>> {
        (tag.node == self.node).then(|| self.get(tag.number)).flatten()
    }

    /// A view is open: those in `settled` are committed, all others ask again, first come, first served.
    pub(super) fn opened(&self, settled: &BTreeSet<Tag>) {
        for pending in self.in_order() {
            let tag = Tag { node: self.node, number: pending.number };
            let found = settled.contains(&tag);
            pending.ends(if found { Verdict::Committed } else { Verdict::Again });
        }
    }

    /// This node has to do with none of them any more.
    pub(super) fn fence(&self) {
        self.in_order().iter().for_each(|p| p.ends(Verdict::Fenced));
    }

    fn in_order(&self) -> Vec<Rc<Pending>> {
        let mut all: Vec<_> = self.pending.borrow().values().map(Rc::clone).collect();
        all.sort_unstable_by_key(|pending| pending.number);
        all
    }

    /// How many are not answered.
    pub(super) fn len(&self) -> usize {
        self.pending.borrow().len()
    }
}

impl Own {
    /// Its name.
    pub(super) fn tag(&self) -> Tag {
        Tag { node: self.all.node, number: self.pending.number }
    }

    /// Another node is about to be asked for its place: what it changes is kept for then.
    pub(super) fn waits_with(&self, change: Change, ctx: Ctx) {
        self.pending.change.replace(Some((change, ctx)));
    }

    /// It is asked for in a new view.
    pub(super) fn renew(&self) {
        self.pending.verdict.set(None);
        self.pending.place.set(None);
        self.pending.applied.set(false);
        self.pending.done.set(false);
    }

    /// Waits for what becomes of it.
    pub(super) async fn verdict(&self) -> Verdict {
        poll_fn(|cx| match self.pending.verdict.get() {
            Some(verdict) => Poll::Ready(verdict),
            None => {
                self.pending.waker.replace(Some(cx.waker().clone()));
                Poll::Pending
            }
        })
        .await
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.all.pending.borrow_mut().remove(&self.pending.number);
    }
}

impl Pending {
    /// It has its place; what it changes, if that is to be applied here.
    pub(super) fn granted(&self, view: View, seq: Seq) -> Option<(Change, Ctx)> {
        let change = self.change.take()?;
        self.place.set(Some((view, seq)));
        Some(change)
    }

    /// Its place, if it was told.
    pub(super) fn place(&self) -> Option<(View, Seq)> {
        self.place.get()
    }

    /// This node's leg has it; says whether all have.
    pub(super) fn applied(&self) -> bool {
        self.applied.set(true);
        self.done.get()
    }

    /// All other members have it; says whether all have.
    pub(super) fn done(&self) -> bool {
        self.done.set(true);
        self.applied.get()
    }

    /// Its fate in this view is known. The first word counts, but for a repetition.
    pub(super) fn ends(&self, verdict: Verdict) {
        if self.verdict.get().is_none_or(|v| matches!(v, Verdict::Again | Verdict::Late)) {
            self.verdict.set(Some(verdict));
        }
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

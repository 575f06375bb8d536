//! The primary's side of a write: its place, who has applied it, who is to be told.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};
use std::time::Duration;

use peer::{NodeId, Seq};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// What became of a write that got a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// All members have applied it.
    Committed,
    /// All have answered, and these have no space for it.
    Refused(SmallVec<[NodeId; 4]>),
    /// The view has ended; the next one knows.
    Ended,
}

/// What a confirmation brought about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nobody is to be told anything.
    Waits,
    /// All but its origin have it: tell the origin.
    Done(NodeId),
    /// All have it. It entered at this other node, if at any.
    Committed(Option<NodeId>),
}

/// The writes of the present view that have a place, at its primary.
#[derive(Debug, Default)]
pub(super) struct Order {
    last: u64,
    awaited: FxHashMap<Seq, Awaited>,
    /// By member: commits that it has not been told.
    untold: BTreeMap<NodeId, Vec<Seq>>,
}

#[derive(Debug)]
struct Awaited {
    /// Who has not applied it.
    left: SmallVec<[NodeId; 4]>,
    /// Who has no space for it.
    refused: SmallVec<[NodeId; 4]>,
    /// Where it entered, if that is another node that waits for our word.
    origin: Option<NodeId>,
    /// Whether it brings nothing new: nobody is told when all have it.
    copies: bool,
    /// When it got its place, by the replica's pulse.
    since: Duration,
    fate: Option<Fate>,
    waker: Option<Waker>,
}

impl Order {
    /// The next place.
    pub(super) fn next(&mut self) -> Seq {
        self.last += 1;
        Seq(self.last)
    }

    /// The last place given out.
    pub(super) fn last(&self) -> Seq {
        Seq(self.last)
    }

    /// The write at `seq` waits for `left`.
    pub(super) fn await_all(
        &mut self,
        seq: Seq,
        left: impl IntoIterator<Item = NodeId>,
        origin: Option<NodeId>,
        since: Duration,
    ) {
        let left = left.into_iter().collect();
        let awaited = Awaited {
            left,
            refused: SmallVec::new(),
            origin,
            copies: false,
            since,
            fate: None,
            waker: None,
        };
        self.awaited.insert(seq, awaited);
    }

    /// The copy at `seq` waits for `left`.
    pub(super) fn await_copies(
        &mut self,
        seq: Seq,
        left: impl IntoIterator<Item = NodeId>,
        since: Duration,
    ) {
        self.await_all(seq, left, None, since);
        if let Some(awaited) = self.awaited.get_mut(&seq) {
            awaited.copies = true;
        }
    }

    /// `node` has applied it.
    pub(super) fn confirmed(&mut self, seq: Seq, node: NodeId) -> Step {
        let Some(awaited) = self.awaited.get_mut(&seq) else { return Step::Waits };
        let before = awaited.left.len();
        awaited.left.retain(|n| *n != node);
        if awaited.left.len() == before {
            return Step::Waits;
        }
        if !awaited.refused.is_empty() {
            awaited.may_be_refused();
            return Step::Waits;
        }
        if awaited.left.is_empty() {
            awaited.ends(Fate::Committed);
            let origin = awaited.origin;
            return if awaited.copies { Step::Waits } else { Step::Committed(origin) };
        }
        match awaited.origin {
            Some(origin) if awaited.left[..] == [origin] => Step::Done(origin),
            _ => Step::Waits,
        }
    }

    /// `node` has no space for it.
    pub(super) fn refused(&mut self, seq: Seq, node: NodeId) {
        let Some(awaited) = self.awaited.get_mut(&seq) else { return };
        if !awaited.copies && awaited.left.contains(&node) {
            awaited.left.retain(|n| *n != node);
            awaited.refused.push(node);
            awaited.may_be_refused();
        }
    }

    /// The writes that wait for `node`, which is required no more, in their order.
    pub(super) fn waiting_for(&self, node: NodeId) -> Vec<Seq> {
        let waiting = self.awaited.iter().filter(|(_, a)| a.left.contains(&node));
        let mut seqs: Vec<_> = waiting.map(|(seq, _)| *seq).collect();
        seqs.sort_unstable();
        seqs
    }

    /// Who has not applied what got its place before `before`.
    pub(super) fn late(&self, before: Duration) -> Vec<NodeId> {
        let late = self.awaited.values().filter(|a| a.since < before);
        late.flat_map(|a| a.left.iter().copied()).collect()
    }

    /// Waits for the fate of the write at `seq`, and forgets it.
    pub(super) async fn fate(order: &std::cell::RefCell<Self>, seq: Seq) -> Fate {
        poll_fn(|cx| {
            let mut order = order.borrow_mut();
            let Some(awaited) = order.awaited.get_mut(&seq) else {
                return Poll::Ready(Fate::Ended);
            };
            let Some(fate) = awaited.fate.take() else {
                awaited.waker = Some(cx.waker().clone());
                return Poll::Pending;
            };
            order.awaited.remove(&seq);
            Poll::Ready(fate)
        })
        .await
    }

    /// `nodes` are to be told of a commit. Says whether there was nothing to tell before.
    pub(super) fn tell(&mut self, seq: Seq, nodes: impl IntoIterator<Item = NodeId>) -> bool {
        let first = self.untold.is_empty();
        for node in nodes {
            self.untold.entry(node).or_default().push(seq);
        }
        first && !self.untold.is_empty()
    }

    /// What is to be told, by node.
    pub(super) fn untold(&mut self) -> BTreeMap<NodeId, Vec<Seq>> {
        std::mem::take(&mut self.untold)
    }

    /// Nobody waits for the fate of clients' writes any more: the next view learns it.
    pub(super) fn abandon(&mut self) {
        self.end_those(|awaited| !awaited.copies && awaited.fate.is_none());
    }

    /// The write at `seq` has failed where it got its place: its fate is known, and nobody asks for it.
    pub(super) fn forget(&mut self, seq: Seq) {
        self.awaited.remove(&seq);
    }

    /// How many wait for somebody.
    #[cfg(feature = "testing")]
    pub(super) fn len(&self) -> usize {
        self.awaited.len()
    }

    /// The view has ended.
    pub(super) fn end(&mut self) {
        self.untold.clear();
        self.end_those(|_| true);
        self.awaited.clear();
        self.last = 0;
    }

    /// The fate of these is that the view has ended; they learn it in their order.
    fn end_those(&mut self, which: impl Fn(&Awaited) -> bool) {
        let mut ended: Vec<_> = self.awaited.iter_mut().filter(|(_, a)| which(a)).collect();
        ended.sort_unstable_by_key(|(seq, _)| **seq);
        ended.into_iter().for_each(|(_, awaited)| awaited.ends(Fate::Ended));
    }
}

impl Awaited {
    fn may_be_refused(&mut self) {
        if self.left.is_empty() {
            self.ends(Fate::Refused(self.refused.clone()));
        }
    }

    fn ends(&mut self, fate: Fate) {
        self.fate = Some(fate);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

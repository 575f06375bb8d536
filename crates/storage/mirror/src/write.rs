//! Writes: their place in the order, and their application everywhere (RFD 0010, 4.2).

use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Ctx, Error, RangeLock};
use peer::{Change, Entry, Link, Message, NodeId, Seq, Tag, View};
use rt::fault::{self, Point};

use super::Mistake;
use super::entries::Of;
use super::order::{Fate, Order, Step};
use super::own::{Own, Verdict};
use super::replica::Replica;

/// How long a commit may wait for others to be told with it.
const TELLING: Duration = Duration::from_millis(1);

/// Most commits that one message tells.
const TOLD: usize = 1024;

/// Where the contents of a change are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Brought {
    /// The node that its tag names has them, and waits for its place.
    ByOrigin,
    /// Only the primary has them.
    Here,
}

/// What became of a change at the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placed {
    /// All members have it.
    Committed,
    /// The view was over before it had a place.
    Missed,
    /// The view is over; the next one knows what became of it.
    Ended,
    /// Its leg, the last one, refused it.
    Failed(Error),
}

impl Replica {
    /// A change that enters at this node.
    pub(super) async fn write(self: &Rc<Self>, change: Change, ctx: &Ctx) -> Result<(), Error> {
        let own = self.own.begin();
        fault::pass(Point::EnteringTaken);
        loop {
            let view = self.serving(ctx).await?;
            own.renew();
            if self.is_primary() {
                match self.place(view, own.tag(), &change, ctx).await {
                    Placed::Committed => return Ok(()),
                    Placed::Failed(e) => return Err(e),
                    Placed::Missed => continue,
                    Placed::Ended => {}
                }
            } else {
                self.ask_for_place(view, &own, &change, ctx);
            }
            match own.verdict().await {
                Verdict::Committed | Verdict::Outcome(_) => return Ok(()),
                Verdict::Again => {}
                Verdict::Late => self.renewed(view).await,
                Verdict::Fenced => return Err(Error::Fenced),
                Verdict::Failed(e) => return Err(e),
            }
        }
    }

    fn ask_for_place(&self, view: View, own: &Own, change: &Change, ctx: &Ctx) {
        let Some(link) = self.primary_link() else { return };
        own.waits_with(change.clone(), ctx.clone());
        let (number, stamp) = (own.tag().number, self.answered(link.node()));
        link.send(Message::Order { view, number, stamp, change: change.clone() });
        fault::pass_when_sent(Point::EnteringOrdered);
    }

    /// An order of another member, at the primary.
    pub(super) async fn place_for_peer(
        self: Rc<Self>,
        link: Link,
        view: View,
        tag: Tag,
        change: Change,
        ctx: Ctx,
    ) {
        // Once it has a place, its origin learns what becomes of it by DONE or in the next view.
        if self.place(view, tag, &change, &ctx).await == Placed::Missed {
            // If the view goes on all the same, it is asked again.
            link.send(Message::Late { view, number: tag.number });
        }
    }

    /// Gives `change` its place and sees it applied by all.
    pub(super) async fn place(
        self: &Rc<Self>,
        view: View,
        tag: Tag,
        change: &Change,
        ctx: &Ctx,
    ) -> Placed {
        let lock = self.locks.enter(change.range, true);
        if !lock.is_held() {
            let over = || self.view.get() != view || self.turns_away();
            if Box::pin(self.signal.unless(over, lock.held())).await.is_none() {
                return Placed::Missed;
            }
        }
        if self.view.get() != view {
            return Placed::Missed;
        }
        if ctx.is_aborted() {
            return Placed::Failed(Error::Aborted);
        }
        self.place_locked(view, tag, Brought::ByOrigin, change, lock, ctx).await
    }

    /// The same for one who holds the range already.
    pub(super) async fn place_locked(
        self: &Rc<Self>,
        view: View,
        tag: Tag,
        brought: Brought,
        change: &Change,
        lock: RangeLock,
        ctx: &Ctx,
    ) -> Placed {
        fault::pass(Point::PrimaryAsked);
        let seq = self.order.borrow_mut().next();
        let Change { range, kind, fua, .. } = *change;
        let entry = Entry { view, seq, tag, range, kind, fua };
        self.entries.borrow_mut().insert(entry, Some(lock), self.touch(range), Of::Client);
        if self.announce(view, seq, tag, brought, change) {
            // The contents get on their way before the own disk is asked, which may answer at once. Who has them is told
            // its place along with that answer.
            rt::give_way().await;
        }
        let place = (view, seq);
        let bytes = self.bytes(range);
        match self.leg.apply(change, bytes, ctx, self.pulse.get()).await {
            Ok(()) => self.entries.borrow_mut().applied(place),
            Err(Error::NoSpace) if self.refuses(&entry) => {
                self.order.borrow_mut().refused(seq, self.me);
                return self.ended(entry).await;
            }
            Err(e) => {
                self.entries.borrow_mut().failed(place, e);
                if self.view.get() == view {
                    self.order.borrow_mut().forget(seq);
                }
                let alone = self.leg_failed(e);
                if alone {
                    self.entries.borrow_mut().commit(place);
                }
                self.signal.raise();
                // What this leg refused it never confirms: the next view goes on without it.
                return if alone { Placed::Failed(e) } else { Placed::Ended };
            }
        }
        if self.view.get() != view {
            // It was applied while the view ended: those who drain look again.
            self.signal.raise();
            return Placed::Ended;
        }
        fault::pass(Point::PrimaryApplied);
        self.confirmed(view, seq, self.me);
        if self.settings.makes(Mistake::AcknowledgesAlone) {
            return Placed::Committed;
        }
        self.ended(entry).await
    }

    /// What becomes of a change that has its place.
    async fn ended(self: &Rc<Self>, entry: Entry) -> Placed {
        match Order::fate(&self.order, entry.seq).await {
            Fate::Committed => Placed::Committed,
            Fate::Refused(refused) => Box::pin(self.end_refused(entry, refused)).await,
            Fate::Ended => Placed::Ended,
        }
    }

    /// Sends a change with its place to all who must apply it; says whether there is anybody who did not have it.
    fn announce(&self, view: View, seq: Seq, tag: Tag, brought: Brought, change: &Change) -> bool {
        let mut nodes = self.others();
        if !self.settings.makes(Mistake::ResyncsWithoutNewWrites) {
            nodes.extend(self.joiners.borrow().attached());
        }
        let waits = brought == Brought::ByOrigin && tag.node != self.me;
        let foreign = waits && nodes.contains(&tag.node);
        let all = nodes.iter().copied().chain([self.me]);
        self.order.borrow_mut().await_all(seq, all, foreign.then_some(tag.node), self.pulse.get());
        let mut sent = false;
        for node in nodes {
            let Some(link) = self.link(node) else { continue };
            if foreign && node == tag.node {
                link.send(Message::Grant { view, number: tag.number, seq });
            } else {
                link.send(Message::Write { view, seq, tag, copy: false, change: change.clone() });
                sent = true;
            }
            fault::pass_when_sent(Point::PrimaryAnnounced);
        }
        sent
    }

    /// `node` has applied the change at `seq`.
    pub(super) fn confirmed(self: &Rc<Self>, view: View, seq: Seq, node: NodeId) {
        let step = self.order.borrow_mut().confirmed(seq, node);
        match step {
            Step::Waits => {}
            Step::Done(origin) => self.tell_origin(view, seq, origin),
            Step::Committed(origin) => {
                // If it was the first to have it, it has not been told that the others do.
                if let Some(first) = origin.filter(|origin| *origin != node) {
                    self.tell_origin(view, seq, first);
                }
                self.committed(view, seq, origin);
            }
        }
    }

    fn tell_origin(&self, view: View, seq: Seq, origin: NodeId) {
        let tag = self.entries.borrow().tag((view, seq));
        if let (Some(tag), Some(link)) = (tag, self.link(origin)) {
            link.send(Message::Done { view, number: tag.number });
        }
    }

    fn committed(self: &Rc<Self>, view: View, seq: Seq, origin: Option<NodeId>) {
        let Some(ended) = self.entries.borrow_mut().commit((view, seq)) else { return };
        fault::pass(Point::PrimaryCommitted);
        // Said at once: if the view ends before its task has its turn, nobody has a trace of it.
        if let Some(own) = self.own.tagged(ended.entry.tag) {
            own.ends(Verdict::Committed);
        }
        // Its origin knows by itself.
        let mut nodes = self.others();
        nodes.retain(|node| Some(*node) != origin);
        nodes.extend(self.joiners.borrow().attached());
        if self.order.borrow_mut().tell(seq, nodes) {
            let this = Rc::clone(self);
            self.spawn(async move {
                tokio::time::sleep(TELLING).await;
                this.tell(view);
            });
        }
    }

    /// Tells the members what has been committed.
    pub(super) fn tell(&self, view: View) {
        if self.view.get() != view {
            return;
        }
        let untold = self.order.borrow_mut().untold();
        for (node, seqs) in untold {
            let Some(link) = self.link(node) else { continue };
            for seqs in seqs.chunks(TOLD) {
                link.send(Message::Commit { view, seqs: seqs.to_vec() });
            }
        }
    }

    /// A change with its place has come from the primary.
    pub(super) fn take_write(
        self: &Rc<Self>,
        link: Link,
        entry: Entry,
        copy: bool,
        change: Change,
        ctx: Ctx,
    ) {
        let from = link.node();
        // A joiner that has not got the write takes what takes its place for any other copy.
        if copy && self.entries.borrow().has((entry.view, entry.seq)) {
            return self.take_replacement(link, entry, change, ctx);
        }
        if copy && !self.is_joining() {
            self.entries.borrow_mut().yield_to(entry.range);
        } else {
            self.settled_by(entry.range);
        }
        fault::pass(Point::MemberReceived);
        let of = match copy {
            false => Of::Client,
            true if self.is_joining() => Of::Resync,
            true => Of::Settling,
        };
        self.take_place(entry, of, change, ctx, from);
    }

    /// Our own order has its place.
    pub(super) fn take_grant(self: &Rc<Self>, from: NodeId, view: View, number: u64, seq: Seq) {
        let Some(pending) = self.own.get(number) else { return };
        let Some((change, ctx)) = pending.granted(view, seq) else { return };
        fault::pass(Point::EnteringGranted);
        let tag = Tag { node: self.me, number };
        let Change { range, kind, fua, .. } = change;
        self.settled_by(range);
        self.take_place(Entry { view, seq, tag, range, kind, fua }, Of::Client, change, ctx, from);
    }

    /// The primary gives a range out only when the view is open, and all have applied what was
    /// there: what is there is committed.
    fn settled_by(&self, range: Blocks) {
        if self.locks.is_free(range) && !self.entries.borrow().have_yielded() {
            debug_assert!(self.entries.borrow().overlapped(range).is_empty(), "without a lock");
            return;
        }
        let before = self.entries.borrow().overlapped(range);
        before.into_iter().for_each(|(view, seq)| self.learned_commit(view, seq));
    }

    fn take_place(self: &Rc<Self>, entry: Entry, of: Of, change: Change, ctx: Ctx, from: NodeId) {
        if self.entries.borrow().has((entry.view, entry.seq)) {
            tracing::error!(node = from.0, "a place in the order is given out twice");
            return;
        }
        // It waits for readers that are at work, never for those that wait: they may wait for writes
        // that wait, elsewhere, for others of the kind (attack 61).
        let lock = self.locks.enter_ahead(entry.range);
        let (held, awaited) = if lock.is_held() { (Some(lock), None) } else { (None, Some(lock)) };
        self.entries.borrow_mut().insert(entry, held, self.touch(entry.range), of);
        self.start(Rc::clone(self).apply_for_primary(from, (entry, of), change, awaited, ctx));
    }

    /// Applies a change that has its place, once it has its range: `awaited`, if it does not yet.
    async fn apply_for_primary(
        self: Rc<Self>,
        from: NodeId,
        (entry, of): (Entry, Of),
        change: Change,
        awaited: Option<RangeLock>,
        ctx: Ctx,
    ) {
        let place = (entry.view, entry.seq);
        if let Some(lock) = awaited {
            lock.held().await;
            self.entries.borrow_mut().locked(place, lock);
        }
        let bytes = self.bytes(entry.range);
        let mut applied = self.leg.apply(&change, bytes.clone(), &ctx, self.pulse.get()).await;
        if applied == Err(Error::NoSpace) {
            if of != Of::Client {
                // What others have there needs no more space than it has there.
                applied = self.leg.apply_thin(&change, bytes, &ctx, self.pulse.get()).await;
            } else if self.refuses(&entry) {
                if let Some(link) = self.link(from) {
                    link.send(Message::NoSpace { view: entry.view, seq: entry.seq });
                }
                return;
            }
        }
        fault::pass(if self.is_joining() { Point::JoinerCopied } else { Point::MemberApplied });
        if let Err(e) = applied {
            self.entries.borrow_mut().failed(place, e);
            self.leg_failed(e);
            self.signal.raise();
            return;
        }
        self.entries.borrow_mut().applied(place);
        if self.view.get() != entry.view {
            self.signal.raise();
            return;
        }
        // Its client first, who waits for it.
        if let Some(own) = self.own.tagged(entry.tag)
            && own.place() == Some(place)
            && own.applied()
        {
            self.learned_commit(entry.view, entry.seq);
        }
        if let Some(link) = self.link(from) {
            link.send(Message::Applied { view: entry.view, seq: entry.seq });
            fault::pass_when_sent(Point::MemberConfirmed);
        }
    }

    /// All other members have applied our own order.
    pub(super) fn take_done(&self, number: u64) {
        let Some(own) = self.own.get(number) else { return };
        fault::pass(Point::EnteringDone);
        if own.done()
            && let Some((view, seq)) = own.place()
        {
            self.learned_commit(view, seq);
        }
    }

    /// All members have applied the change at this place.
    pub(super) fn learned_commit(&self, view: View, seq: Seq) {
        let Some(ended) = self.entries.borrow_mut().commit((view, seq)) else { return };
        if let Some(own) = self.own.tagged(ended.entry.tag) {
            let refused = Verdict::Failed(Error::NoSpace);
            own.ends(if ended.refused { refused } else { Verdict::Committed });
        }
    }
}

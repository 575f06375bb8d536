//! The beginning of a view: everybody stops and tells what it has, the primary makes the members
//! equal (RFD 0010, 5.7 and 5.8).

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use block::{Bufs, Class, Ctx, Error};
use peer::{Change, Entry, Kind, Message, NodeId, Seq, Tag, View};
use rt::fault::{self, Point};

use super::Mistake;
use super::entries::Of;
use super::join::Ending;
use super::member::Event;
use super::order::{Fate, Order};
use super::own::Verdict;
use super::record::Record;
use super::replica::Replica;
use super::settle::{Copy, settle};

/// What the members have told the primary about a view.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    view: View,
    entries: BTreeMap<NodeId, Vec<Entry>>,
}

/// What OPEN says.
#[derive(Debug)]
pub(super) struct Tidings {
    view: View,
    /// The last place that was given out to make the members equal.
    through: Seq,
    /// The writes that are committed by it.
    settled: BTreeSet<Tag>,
}

impl Replica {
    /// Begins `view`: nothing of an older one is taken or begun from here on. When what was begun
    /// has reached the disk, and the configuration is durable if it is a new one, the member is
    /// told.
    pub(super) fn begin(self: &Rc<Self>, view: View, record: Option<Record>) {
        self.view.set(view);
        self.began.set(self.pulse.get());
        if self.joining.take().is_some() {
            // Only who is listed begins a view.
            self.attempts.update(|attempts| attempts.admitted(self.core.now()));
        }
        self.order.borrow_mut().end();
        self.joiners.borrow_mut().end();
        // Members were others when these were reported, or have sessions by now.
        self.gaps.take();
        self.leg.forget_flushes();
        self.clearing.take();
        // Readers and orders that still wait leave the queue.
        self.signal.raise();
        let this = Rc::clone(self);
        self.spawn(async move {
            let adopted = async || match &record {
                Some(record) => this.adopt(record, true).await,
                None => true,
            };
            let careless = this.settings.makes(Mistake::TellsRefused);
            let sound = this.drain(view).await && (careless || this.fail_refused());
            if sound && adopted().await {
                this.event(Event::Began(view));
            }
        });
    }

    /// Waits until every entry has reached the disk; false if a later view begins meanwhile.
    async fn drain(&self, view: View) -> bool {
        let look = || {
            if self.view.get() != view {
                return Some(false);
            }
            if self.leg.is_dead() {
                // What it has is nobody's to tell (attack 62).
                return Some(false);
            }
            let careless = self.settings.makes(Mistake::TellsUndrained);
            (careless || self.entries.borrow().is_drained()).then_some(true)
        };
        self.signal.until(look).await
    }

    /// Tells the primary what this member has.
    pub(super) fn send_started(&self, view: View) {
        let failed = self.entries.borrow_mut().end_failed();
        self.refused(&failed);
        if let Some(link) = self.primary_link() {
            let entries = self.entries.borrow().list();
            link.send(Message::Started { view, entries });
            fault::pass_when_sent(Point::ViewStarted);
        }
    }

    /// Writes that the leg refused, of a replica that is a member all the same: it is the last.
    fn refused(&self, failed: &[(Tag, Error)]) {
        for (tag, e) in failed {
            if let Some(own) = self.own.tagged(*tag) {
                own.ends(Verdict::Failed(*e));
            }
        }
    }

    /// A member has told what it has.
    pub(super) fn take_started(self: &Rc<Self>, from: NodeId, view: View, entries: Vec<Entry>) {
        let sound = entries.iter().all(|e| self.is_inside(e.range));
        if view != self.view.get() || !self.others().contains(&from) || !sound {
            return;
        }
        {
            let mut gathered = self.gathered.borrow_mut();
            if gathered.view != view {
                *gathered = Gathered { view, entries: BTreeMap::new() };
            }
            gathered.entries.insert(from, entries);
        }
        self.event(Event::Started(from, view));
    }

    /// All members have told what they have: makes them equal.
    pub(super) fn begin_settling(self: &Rc<Self>, view: View) {
        let this = Rc::clone(self);
        self.spawn(async move {
            let Some(settled) = this.settle(view).await else { return };
            fault::pass(Point::ViewSettled);
            let through = this.order.borrow().last();
            this.tidings.replace(Some(Tidings { view, through, settled }));
            this.event(Event::Settled(view));
        });
    }

    /// `None` if the view is over first.
    async fn settle(self: &Rc<Self>, view: View) -> Option<BTreeSet<Tag>> {
        let failed = self.entries.borrow_mut().end_failed();
        self.refused(&failed);
        let mine: Vec<_> = self.entries.borrow().list().iter().map(|e| (self.me, *e)).collect();
        let theirs = self.told(view);
        let settlement = match settle(mine.into_iter().chain(theirs)) {
            Ok(settlement) => settlement,
            Err(error) => {
                // Nothing may be served that members contradict each other about.
                tracing::error!(%error, %view, "the members' writes contradict each other");
                return None;
            }
        };
        let equal = self.settings.makes(Mistake::OpensUnequal);
        // Alone there is nobody to be made equal.
        let equal = equal || self.others().is_empty();
        for copy in settlement.copies.iter().filter(|_| !equal) {
            self.spread(view, copy).await?;
        }
        Some(settlement.settled.into_iter().collect())
    }

    fn told(&self, view: View) -> Vec<(NodeId, Entry)> {
        let gathered = self.gathered.borrow();
        let of_view = (gathered.view == view).then_some(&gathered.entries);
        let all = of_view.into_iter().flatten();
        all.flat_map(|(node, entries)| entries.iter().map(|e| (*node, *e))).collect()
    }

    /// Brings to all members what some have.
    async fn spread(self: &Rc<Self>, view: View, copy: &Copy) -> Option<()> {
        let entry = copy.entry;
        let bytes = if entry.kind == Kind::Write { self.len(entry.range) } else { 0 };
        let ctx = self.in_view(view, self.memory(bytes, Class::Restore)).await?.ok()?;
        let data = match entry.kind {
            Kind::Write => self.contents(view, copy, &ctx).await?,
            Kind::Zero { .. } => Bufs::new(),
        };
        let Entry { range, kind, fua, tag, .. } = entry;
        let change = Change { range, kind, fua, data };
        let seq = self.order.borrow_mut().next();
        let others = self.others();
        // Nobody is told before OPEN: until then the copy is an entry that names what it carries.
        self.order.borrow_mut().await_copies(seq, others.iter().copied(), self.pulse.get());
        for link in self.links_to(others.iter().copied()) {
            let change = change.clone();
            link.send(Message::Write { view, seq, tag, copy: true, change });
            fault::pass_when_sent(Point::ViewCopying);
        }
        if !copy.holders.contains(&self.me) {
            self.take_copy(Entry { view, seq, tag, range, kind, fua }, &change, &ctx).await?;
        }
        if others.is_empty() {
            return Some(());
        }
        (Order::fate(&self.order, seq).await == Fate::Committed).then_some(())
    }

    /// The primary's own leg lacks what others have.
    async fn take_copy(self: &Rc<Self>, entry: Entry, change: &Change, ctx: &Ctx) -> Option<()> {
        let place = (entry.view, entry.seq);
        self.entries.borrow_mut().yield_to(entry.range);
        let lock = self.locks.enter_ahead(entry.range);
        self.entries.borrow_mut().insert(entry, None, self.touch(entry.range), Of::Settling);
        lock.held().await;
        self.entries.borrow_mut().locked(place, lock);
        let bytes = self.bytes(entry.range);
        let mut applied = self.leg.apply(change, bytes.clone(), ctx, self.pulse.get()).await;
        if applied == Err(Error::NoSpace) {
            applied = self.leg.apply_thin(change, bytes, ctx, self.pulse.get()).await;
        }
        match applied {
            Ok(()) => {
                self.entries.borrow_mut().applied(place);
                self.signal.raise();
                Some(())
            }
            Err(e) => {
                self.entries.borrow_mut().failed(place, e);
                self.leg_failed(e);
                self.signal.raise();
                None
            }
        }
    }

    /// What an entry's holders have in its range.
    async fn contents(self: &Rc<Self>, view: View, copy: &Copy, ctx: &Ctx) -> Option<Bufs> {
        let range = copy.entry.range;
        if copy.holders.contains(&self.me) {
            match self.leg.read(range, ctx, self.pulse.get()).await {
                Ok(data) => return Some(data),
                Err(e) => {
                    // It has written this moments ago (attack 44).
                    self.leg_failed(e);
                    return None;
                }
            }
        }
        for node in &copy.holders {
            if let Some(data) = self.fetch(view, *node, range, ctx).await {
                return Some(data);
            }
        }
        // Its holder is silent: its lease ends, or it leaves, and another view begins.
        self.in_view(view, std::future::pending::<()>()).await;
        None
    }

    /// The primary says that the members are equal.
    pub(super) fn take_open(
        self: &Rc<Self>,
        from: NodeId,
        view: View,
        through: Seq,
        settled: Vec<Tag>,
    ) {
        if self.view.get() == view && self.primary() == Some(from) {
            let settled = settled.into_iter().collect();
            self.tidings.replace(Some(Tidings { view, through, settled }));
            self.event(Event::Open(from, view));
        }
    }

    /// The view is open: all entries up to the end of settling are everywhere.
    pub(super) fn open(self: &Rc<Self>, view: View) {
        let Some(tidings) = self.tidings.take().filter(|t| t.view == view) else { return };
        let Tidings { through, settled, .. } = tidings;
        if self.is_primary() {
            for link in self.links_to(self.others()) {
                let settled = settled.iter().copied().collect();
                link.send(Message::Open { view, through, settled });
                fault::pass_when_sent(Point::ViewOpened);
            }
            for link in self.links_to(self.outsiders()) {
                link.send(Message::Rejoin { view });
            }
        }
        self.opened.set(Some(view));
        self.refused.set(None);
        self.entries.borrow_mut().end_through((view, through));
        self.own.opened(&settled);
        self.signal.raise();
    }

    /// This replica is no member any more: it has to do with none of its writes.
    pub(super) fn outside(self: &Rc<Self>) {
        // Nothing of a view is taken any more; what it left on the leg is marked.
        self.view.set(View::default());
        self.end_attempt(Ending::Overtaken);
        self.attempts.update(|attempts| attempts.put_out(self.core.now()));
        self.clearing.take();
        self.newer.take();
        self.entries.borrow_mut().end_applied();
        self.own.fence();
        self.order.borrow_mut().end();
        self.joiners.borrow_mut().end();
        self.signal.raise();
    }
}

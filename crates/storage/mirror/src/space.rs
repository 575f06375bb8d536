//! Writes that members have no space for (RFD 0040).
//!
//! What a thin leg has no space for it has made in part, or not at all. If another member has it and room for more, the
//! leg has failed, and its member leaves. If nobody has room, nobody need leave: the primary has all members put the
//! same into the range, which needs no space, and the write is refused.

use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use block::{Bufs, Class, Ctx, Error};
use futures_util::future::join_all;
use peer::{Change, Entry, Kind, Link, Message, NodeId, Seq, View};
use rt::fault::{self, Point};

use super::Mistake;
use super::entries::Place;
use super::order::{Fate, Order};
use super::own::Verdict;
use super::replica::{Nodes, Replica, is_aside};
use super::requests::Answer;
use super::write::Placed;

/// How long the system may take to tell how much space is left.
const TELLING: Duration = Duration::from_secs(1);

/// How long after a write that a copy had no space for status says so.
const FULL_FOR: Duration = Duration::from_secs(60);

/// How often it looks meanwhile whether there is room.
const LOOKING: Duration = Duration::from_secs(5);

/// Tells how much space there is for more of a copy.
pub trait FreeSpace: fmt::Debug {
    /// Bytes that are free where the copy lies; `None` where nobody can tell.
    fn free_bytes(&self) -> FreeBytes<'_>;
}

/// What [`FreeSpace`] tells.
pub type FreeBytes<'a> = Pin<Box<dyn Future<Output = Option<u64>> + 'a>>;

/// What a member says of a write that some have no space for.
#[derive(Debug)]
pub(super) struct Assessment {
    /// Bytes that are free where its copy lies.
    pub(super) free_bytes: u64,
    /// Blocks of the write that read as zeroes there, first block and count, if its leg has refused it.
    pub(super) zeroes: Result<Vec<(u64, u64)>, Error>,
}

/// What becomes of such a write.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Decision {
    /// Members that have it keep it, and the others leave.
    Keep,
    /// All refuse it. These blocks of it, first block and count, are to be zeroes.
    Refuse(Vec<(u64, u64)>),
}

impl Replica {
    /// Whether a client's change that this leg has no space for may wait for what the others say. (What lies beside
    /// the volume is a table, of which a mixture of old and new is nothing that anybody should keep.)
    fn may_refuse(&self, entry: &Entry) -> bool {
        let somebody =
            !self.others().is_empty() || self.joiners.borrow().attached().next().is_some();
        self.view.get() == entry.view && somebody && !self.is_joining() && !is_aside(entry.range)
    }

    /// The leg has no space for a client's change. Says whether it waits for what the others say.
    pub(super) fn refuses(&self, entry: &Entry) -> bool {
        let waits =
            self.may_refuse(entry) && self.entries.borrow_mut().refuse((entry.view, entry.seq));
        if waits {
            self.note_full();
        }
        waits
    }

    /// This leg has no space for a write.
    pub(super) fn note_full(&self) {
        let now = self.pulse.get();
        if self.full_since.replace(Some(now)).is_none_or(|last| now >= last + FULL_FOR) {
            tracing::warn!("this copy has no space for a write");
        }
        self.signal.raise();
    }

    /// A copy that has room again is not full any more.
    pub(super) fn look_for_room(self: &Rc<Self>) {
        let now = self.pulse.get();
        if !self.is_full() || now < self.looked_for_room.get() + LOOKING {
            return;
        }
        self.looked_for_room.set(now);
        let this = Rc::clone(self);
        self.spawn(async move {
            if this.free_bytes().await >= this.settings.scarce_bytes {
                this.full_since.set(None);
                this.signal.raise();
            }
        });
    }

    /// Whether this leg has had no space for a write of late.
    pub(super) fn is_full(&self) -> bool {
        self.full_since.get().is_some_and(|last| self.pulse.get() < last + FULL_FOR)
    }

    /// Where members wait to hear what is to be in the ranges of writes that were refused, and will not hear it: this
    /// leg has failed. Says whether this member takes part in the view.
    pub(super) fn fail_refused(self: &Rc<Self>) -> bool {
        let any = self.entries.borrow_mut().fail_refused();
        !any || self.leg_failed(Error::NoSpace)
    }

    /// At the primary: all members have answered the write, and `refused` have no space for it.
    pub(super) async fn end_refused(self: &Rc<Self>, entry: Entry, refused: Nodes) -> Placed {
        let zeroes = match self.decide(&entry, &refused).await {
            Some(Decision::Refuse(zeroes)) => zeroes,
            Some(Decision::Keep) => return self.keep(&entry, &refused),
            None => return self.give_up(&entry),
        };
        let careless = self.settings.makes(Mistake::RefusesUnequal);
        // Until then no joiner is admitted.
        let joiners = self.joiners.borrow_mut().await_replacements();
        let replaced = match careless {
            true => Placed::Committed,
            false => self.replace_everywhere(&entry, &zeroes).await,
        };
        self.joiners.borrow_mut().have_replaced(&joiners);
        self.signal.raise();
        if replaced != Placed::Committed {
            return replaced;
        }
        self.entries.borrow_mut().commit((entry.view, entry.seq));
        fault::pass(Point::PrimaryCommitted);
        if let Some(own) = self.own.tagged(entry.tag) {
            own.ends(Verdict::Failed(Error::NoSpace));
        }
        // All have the same there: whoever asked for it may hear that.
        self.order.borrow_mut().tell(entry.seq, self.all_that_write());
        self.tell(entry.view);
        Placed::Failed(Error::NoSpace)
    }

    /// What becomes of it; `None` if the view is over first.
    async fn decide(self: &Rc<Self>, entry: &Entry, refused: &Nodes) -> Option<Decision> {
        let (view, others) = (entry.view, self.others());
        let asked = others.iter().map(|node| self.assess(view, *node, entry.seq));
        let (assessed, own) = futures_util::join!(join_all(asked), self.free_bytes());
        let assessed = assessed.into_iter().collect::<Option<Vec<_>>>()?;
        if self.is_over(view) {
            return None;
        }
        let has_room =
            |node: NodeId, free| !refused.contains(&node) && free >= self.settings.scarce_bytes;
        let mut keeps = has_room(self.me, own);
        let mut zeroes = Vec::new();
        for (node, assessment) in others.into_iter().zip(assessed) {
            keeps |= has_room(node, assessment.free_bytes);
            match assessment.zeroes {
                Ok(ranges) => zeroes.extend(ranges),
                Err(_) => keeps = true,
            }
        }
        // What this image has not marked a joiner would not be given.
        keeps |= !self.leg.log.is_hot(self.bytes(entry.range));
        // A joiner whose admission is asked for must not differ. If the store has been asked, it may be a member
        // that has applied the write.
        let proposed: Vec<_> = self.joiners.borrow().iter().filter(|(_, j)| j.proposed).collect();
        proposed.into_iter().for_each(|(node, _)| self.drop_joiner(node));
        keeps |= self.joiners.borrow().iter().any(|(_, joiner)| joiner.proposed);
        Some(if keeps { Decision::Keep } else { Decision::Refuse(zeroes) })
    }

    /// Who applies what this primary puts in order, but for itself.
    fn all_that_write(&self) -> Nodes {
        let mut nodes = self.others();
        nodes.extend(self.joiners.borrow().attached());
        nodes
    }

    /// The members that have no space for a write leave, as others have it, and room for more.
    fn keep(self: &Rc<Self>, entry: &Entry, refused: &Nodes) -> Placed {
        let Entry { view, seq, .. } = *entry;
        for link in self.links_to(refused.iter().copied()) {
            link.send(Message::NoSpace { view, seq });
        }
        if self.others().is_empty() && self.member.borrow().admitting().is_none() {
            // What the last one has is what the volume has.
            return self.alone_refuses((view, seq), Error::NoSpace);
        }
        if refused.contains(&self.me) {
            self.fail_refused();
        }
        Placed::Ended
    }

    /// The leg of a primary has refused a write, or what takes its place. Joiners of a lone one begin again.
    fn alone_refuses(self: &Rc<Self>, place: Place, e: Error) -> Placed {
        if !self.leg_failed(e) {
            return Placed::Ended;
        }
        self.entries.borrow_mut().commit(place);
        Placed::Failed(e)
    }

    /// Has all members and joiners put the same into the range of a write: what this member has there, but for `zeroes`.
    /// Nobody needs space for that.
    async fn replace_everywhere(self: &Rc<Self>, entry: &Entry, zeroes: &[(u64, u64)]) -> Placed {
        let Entry { view, seq, tag, range, .. } = *entry;
        let place = (view, seq);
        // From here on this member has to do with no other view until all have it.
        if !self.entries.borrow_mut().replace(entry) {
            return Placed::Ended;
        }
        let (change, ctx) = match self.replacement(entry, zeroes).await {
            Ok(replacement) if !self.is_over(view) => replacement,
            Err(e) if !self.is_over(view) => return self.replacing_failed(place, e),
            _ => {
                self.entries.borrow_mut().applied(place);
                return self.give_up(entry);
            }
        };
        let all = self.all_that_write().into_iter().chain([self.me]);
        self.order.borrow_mut().await_copies(seq, all, self.pulse.get());
        for link in self.links_to(self.all_that_write()) {
            let change = change.clone();
            link.send(Message::Write { view, seq, tag, copy: true, change });
            fault::pass_when_sent(Point::PrimaryAnnounced);
        }
        let bytes = self.bytes(range);
        if let Err(e) = self.leg.apply_thin(&change, bytes, &ctx, self.pulse.get()).await {
            return self.replacing_failed(place, e);
        }
        drop((change, ctx));
        self.entries.borrow_mut().applied(place);
        if self.is_over(view) {
            return self.give_up(entry);
        }
        self.confirmed(view, seq, self.me);
        let all = Order::fate(&self.order, seq);
        match self.signal.unless(|| self.is_over(view), all).await {
            Some(Fate::Committed) => Placed::Committed,
            Some(_) => Placed::Ended,
            None => self.give_up(entry),
        }
    }

    /// It is not waited for any more: the next view settles what is in its range. There is one, whether clients are still
    /// turned away or not.
    fn give_up(&self, entry: &Entry) -> Placed {
        self.give_up_in(entry.view);
        self.signal.raise();
        Placed::Ended
    }

    /// What all members are to have in the range of a write that is refused, and memory to put it there.
    async fn replacement(
        &self,
        entry: &Entry,
        zeroes: &[(u64, u64)],
    ) -> Result<(Change, Ctx), Error> {
        let Entry { view, range, kind, .. } = *entry;
        if kind != Kind::Write {
            // Zeroes need no space, if they need not keep any.
            let memory = self.memory(0, Class::Answer);
            let ctx = self.in_view(view, memory).await.ok_or(Error::Fenced)??;
            let kind = Kind::Zero { unmap: true };
            return Ok((Change { range, kind, fua: false, data: Bufs::new() }, ctx));
        }
        let ctx = self.answering(view, range).await?;
        let found = self.leg.read(range, &ctx, self.pulse.get()).await?;
        let block = self.leg.dev.info().block_size as usize;
        let mut data = Bufs::new();
        for (n, at) in (range.at.0..).zip((0..found.len()).step_by(block)) {
            let is_zero = zeroes.iter().any(|&(first, count)| n >= first && n - first < count);
            let part = if is_zero { Bufs::zeroes(block) } else { found.slice(at..at + block) };
            data.append(part);
        }
        Ok((Change { range, kind, fua: false, data }, ctx))
    }

    /// This leg cannot even do what needs no space.
    fn replacing_failed(self: &Rc<Self>, place: Place, e: Error) -> Placed {
        self.entries.borrow_mut().failed(place, e);
        if self.view.get() == place.0 {
            self.order.borrow_mut().forget(place.1);
        }
        self.alone_refuses(place, e)
    }

    /// What has begun in `view` cannot end in it any more, or nobody waits for it.
    fn is_over(&self, view: View) -> bool {
        self.view.get() != view || self.turns_away()
    }

    /// Bytes that this copy finds beside those on their way to it.
    async fn free_bytes(&self) -> u64 {
        let told = tokio::time::timeout(TELLING, self.free_space.free_bytes()).await;
        let block = u64::from(self.leg.dev.info().block_size);
        let applying = self.entries.borrow().applying_blocks().saturating_mul(block);
        // What nobody can tell is no reason to refuse anything.
        told.ok().flatten().map_or(u64::MAX, |free| free.saturating_sub(applying))
    }

    /// Asks `node` about a write; `None` if the view is over first.
    async fn assess(&self, view: View, node: NodeId, seq: Seq) -> Option<Assessment> {
        let request = self.requests.number();
        let asked = self.requests.ask(request, node, self.pulse.get());
        if let Some(link) = self.link(node) {
            link.send(Message::Assess { view, request, seq });
        }
        // Another session of that node begins another view.
        match self.signal.unless(|| self.is_over(view), asked.answered()).await? {
            Answer::Assessed(assessment) => Some(assessment),
            _ => None,
        }
    }

    /// Answers an ASSESS.
    pub(super) async fn serve_assess(
        self: Rc<Self>,
        link: Link,
        view: View,
        request: u64,
        seq: Seq,
    ) {
        let zeroes = self.zeroes_of((view, seq)).await;
        let free_bytes = self.free_bytes().await;
        link.send(Message::Assessed { view, request, free_bytes, zeroes });
    }

    /// Which blocks of a write that was refused here read as zeroes.
    async fn zeroes_of(&self, place: Place) -> Result<Vec<(u64, u64)>, Error> {
        let ended = self.entries.borrow().get(place).ok_or(Error::Fenced)?;
        let Entry { range, kind, view, .. } = ended.entry;
        if !ended.refused || kind != Kind::Write {
            return Ok(Vec::new());
        }
        let ctx = self.answering(view, range).await?;
        let found = self.leg.read(range, &ctx, self.pulse.get()).await?;
        let block = self.leg.dev.info().block_size as usize;
        let zeroes = parts(&found, block).into_iter().filter(|(_, zero)| *zero);
        let blocks = |bytes: Range<usize>| {
            (range.at.0 + (bytes.start / block) as u64, (bytes.len() / block) as u64)
        };
        Ok(zeroes.map(|(part, _)| blocks(part)).collect())
    }

    /// The primary has said what all members are to have in the range of a write that is refused.
    pub(super) fn take_replacement(
        self: &Rc<Self>,
        from: Link,
        entry: Entry,
        change: Change,
        ctx: Ctx,
    ) {
        if !self.entries.borrow_mut().replace(&entry) {
            tracing::error!(
                node = from.node().0,
                "a write is replaced that does not wait for that"
            );
            return;
        }
        let this = Rc::clone(self);
        self.start(async move {
            let (place, bytes) = ((entry.view, entry.seq), this.bytes(entry.range));
            let applied = this.leg.apply_thin(&change, bytes, &ctx, this.pulse.get()).await;
            drop((change, ctx));
            if let Err(e) = applied {
                this.replacing_failed(place, e);
                return;
            }
            this.entries.borrow_mut().applied(place);
            fault::pass(Point::MemberApplied);
            if this.view.get() == entry.view {
                from.send(Message::Applied { view: entry.view, seq: entry.seq });
            } else {
                this.signal.raise();
            }
        });
    }

    /// A member has no space for a write; or others keep one that this member has none for.
    pub(super) fn take_no_space(self: &Rc<Self>, from: NodeId, view: View, seq: Seq) {
        if self.is_primary() {
            self.order.borrow_mut().refused(seq, from);
        } else if self.primary() == Some(from)
            && self.entries.borrow().get((view, seq)).is_some_and(|held| held.refused)
        {
            self.fail_refused();
        }
    }
}

/// Whether there is nothing but zeroes. Without a branch for each byte.
pub(super) fn is_zero(data: &Bufs) -> bool {
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |any, byte| any | byte) == 0;
    data.iter().all(|piece| piece.chunks(4096).all(is_zero))
}

/// Parts of `data`, in whole blocks and in order, that are zeroes or hold none of them.
pub(super) fn parts(data: &Bufs, block: usize) -> Vec<(Range<usize>, bool)> {
    let mut parts: Vec<(Range<usize>, bool)> = Vec::new();
    for at in (0..data.len()).step_by(block) {
        let end = (at + block).min(data.len());
        let zero = is_zero(&data.slice(at..end));
        match parts.last_mut().filter(|(_, last)| *last == zero) {
            Some((part, _)) => part.end = end,
            None => parts.push((at..end, zero)),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use rt::buf::{Pool, copy_in};

    use super::*;

    #[test]
    fn data_are_parted_by_blocks_of_zeroes() {
        let pool = Pool::new(1 << 20).unwrap();
        let credit = pool.account().try_credit(8 * 512, Class::Read).unwrap();
        let mut bytes = vec![0; 6 * 512];
        bytes[2 * 512 + 511] = 1;
        bytes[3 * 512] = 1;
        let data = copy_in(&credit, &bytes);
        let expected = [(0..1024, true), (1024..2048, false), (2048..3072, true)];
        assert_eq!(parts(&data, 512), expected);
        assert_eq!(parts(&Bufs::zeroes(512), 512), [(0..512, true)]);
        assert_eq!(parts(&Bufs::new(), 512), []);
    }
}

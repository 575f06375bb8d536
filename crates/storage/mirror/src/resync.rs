//! The primary brings a replica in sync: copies what may differ, mirrors what is new, and has it
//! admitted (RFD 0010, 6.6).

use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Bufs, Class, Ctx, Epoch, Error, Lba};
use futures_util::{StreamExt, stream};
use intent_log::{Advance, Bitmap, Region};
use peer::{Change, Incarnation, Kind, Message, NodeId, SharedLineage, Tag, View};
use rt::fault::{self, Point};

use super::joiners::{Joiner, Unreadable};
use super::member::Event;
use super::order::{Fate, Order};
use super::record::Member as Listed;
use super::replica::{Replica, is_aside};
use super::space::is_zero;
use super::sweep::send_clear;

/// Most that is copied in one piece, in bytes.
const CHUNK: u64 = 256 * 1024;

/// Pieces under way at once.
const DEPTH: usize = 4;

/// How often it is tried again to read what nobody can read,
const LOOKING_AGAIN: Duration = Duration::from_secs(5);

/// and most ranges of that kind that an attempt remembers.
const MOST_LACKING: usize = 4096;

/// Blocks of such a range: no more bytes than are copied in one piece, whatever the length of a block.
const MOST_TOGETHER: u64 = CHUNK / 4096;

/// How often progress is made durable.
const SAVING: Duration = Duration::from_secs(30);

/// What nobody can read: a copy lacks it.
#[derive(Debug, Default)]
struct Lacking {
    ranges: Vec<Blocks>,
    /// Whether there is more of it than is remembered.
    is_too_much: bool,
}

impl Lacking {
    /// These as well. What touches is one range, as long as a piece that is copied may be.
    fn add(&mut self, ranges: Vec<Blocks>) {
        for range in ranges {
            let has_room = self.ranges.len() < MOST_LACKING;
            let touches = |last: &&mut Blocks| {
                last.at.0 + last.count == range.at.0 && last.count + range.count <= MOST_TOGETHER
            };
            match self.ranges.last_mut().filter(touches) {
                Some(last) => last.count += range.count,
                None if has_room => self.ranges.push(range),
                None => self.is_too_much = true,
            }
        }
    }
}

/// An attempt, as those who work on it name it.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    view: View,
    node: NodeId,
    incarnation: Incarnation,
}

impl Replica {
    /// A replica outside asks to be brought in sync.
    pub(super) fn take_join(
        self: &Rc<Self>,
        node: NodeId,
        incarnation: Incarnation,
        epoch: Epoch,
        told: (SharedLineage, Bitmap),
    ) {
        let known = {
            let member = self.member.borrow();
            let record = member.record();
            record.is_some_and(|r| r.epoch == epoch && r.image(node).is_some())
        };
        let Some(view) = self.serves().filter(|_| known && self.is_primary()) else { return };
        if self.joiners.borrow().of(node).is_some_and(|j| j.proposed) {
            return;
        }
        self.drop_joiner(node);
        self.asked_to_join.borrow_mut().insert(node, incarnation);
        let attempt = Attempt { view, node, incarnation };
        let this = Rc::clone(self);
        self.spawn(async move {
            if let Err(why) = this.resync(attempt, told).await {
                tracing::info!(node = node.0, why, "a resync has ended");
                this.drop_attempt(node, incarnation);
                this.joiners.borrow_mut().failed(node, why);
            }
        });
    }

    /// Ends the attempt of `node`: nothing waits for it any more.
    pub(super) fn drop_joiner(self: &Rc<Self>, node: NodeId) {
        let admitting = self.member.borrow().admitting().is_some_and(|m| m.node == node);
        let proposed = self.joiners.borrow().of(node).is_some_and(|j| j.proposed);
        if proposed && !admitting {
            // The store has not been asked yet, and now is not to be.
            self.joiners.borrow_mut().not_proposed(node);
            self.event(Event::Withdraw(node));
        }
        let Some(joiner) = self.joiners.borrow_mut().detach(node) else { return };
        if let Some(link) = self.link(node) {
            link.send(Message::Detached { incarnation: joiner.incarnation });
        }
        let view = self.view.get();
        let waiting = self.order.borrow().waiting_for(node);
        waiting.into_iter().for_each(|seq| self.confirmed(view, seq, node));
        self.signal.raise();
    }

    /// The replicas outside whose last attempt has failed, and why.
    pub(super) fn failed_resyncs(&self) -> Vec<(NodeId, &'static str)> {
        let outside = self.outsiders();
        let joiners = self.joiners.borrow();
        outside.into_iter().filter_map(|node| Some((node, joiners.failure(node)?))).collect()
    }

    async fn resync(
        self: &Rc<Self>,
        attempt: Attempt,
        (shared, marks): (SharedLineage, Bitmap),
    ) -> Result<(), &'static str> {
        let Attempt { view, node, incarnation } = attempt;
        let link = self.link(node).ok_or("there is no session")?;
        let image = self.image(node).ok_or("it is no replica any more")?;
        self.judge_joiner(node, image, shared).await?;
        self.leg.log.merge(image, &marks).await.map_err(|error| {
            tracing::warn!(%error, node = node.0, "a replica's marks are refused");
            "its marks are refused"
        })?;
        if self.serves() != Some(view) || link.is_closed() {
            return Err("the view is over");
        }
        if self.asked_to_join.borrow().get(&node) != Some(&incarnation) {
            return Err("it has begun anew");
        }
        self.joiners.borrow_mut().attach(node, incarnation);
        // From here on every write goes there too; those before have marked their regions.
        let work = self.leg.log.marked(image);
        if let Some(joiner) = self.joiners.borrow_mut().get(node, incarnation) {
            joiner.todo = work.len() as u64 * self.leg.log.geometry().region_bytes();
        }
        tracing::info!(node = node.0, regions = work.len(), %view, "a resync begins");
        let others = self.leg.log.shared().into_iter().filter(|(of, _)| *of != image);
        let reached = others.map(|(of, shared)| (of, shared.reached)).collect();
        link.send(Message::Accept { view, incarnation, reached });
        let lacking = self.copy_all(attempt, image, work).await?;
        self.wait_for_contents(attempt, lacking).await?;
        self.cross_barrier(attempt).await?;
        fault::pass(Point::ResyncFlushed);
        let equal = || match self.joiner(attempt, |joiner| joiner.refused == 0) {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(why) => Some(Err(why)),
        };
        self.signal.until(equal).await?;
        self.propose(attempt)
    }

    /// What is known of the joiner, as long as this attempt lasts.
    fn joiner<T>(
        &self,
        attempt: Attempt,
        look: impl FnOnce(&mut Joiner) -> T,
    ) -> Result<T, &'static str> {
        let mut joiners = self.joiners.borrow_mut();
        joiners.get(attempt.node, attempt.incarnation).map(look).ok_or("it was given up")
    }

    /// From here on the joiner takes part in every flush; and all that was written before is
    /// durable everywhere.
    async fn cross_barrier(self: &Rc<Self>, attempt: Attempt) -> Result<(), &'static str> {
        self.joiner(attempt, |joiner| joiner.behind_barrier = true)?;
        match self.flush_in(attempt.view, 0).await {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err("the view is over"),
            Err(_) => Err("the flush failed"),
        }
    }

    fn propose(self: &Rc<Self>, attempt: Attempt) -> Result<(), &'static str> {
        let Attempt { view, node, incarnation } = attempt;
        if self.view.get() != view {
            return Err("the view is over");
        }
        self.joiner(attempt, |joiner| joiner.proposed = true)?;
        self.event(Event::Admit(Listed { node, incarnation }));
        Ok(())
    }

    /// Copies what the joiner lacks, when it is this mirror's turn; returns what nobody can read.
    async fn copy_all(
        self: &Rc<Self>,
        attempt: Attempt,
        image: uuid::Uuid,
        work: Vec<Region>,
    ) -> Result<Lacking, &'static str> {
        let turn = Box::pin(self.in_view(attempt.view, self.turns.acquire())).await;
        let _turn = turn.ok_or("the view is over")?.map_err(|_| "nobody copies any more")?;
        let mut saved = self.core.now();
        let (mut copied, mut lacking) = (Vec::new(), Lacking::default());
        let batches = work.chunks(DEPTH * 4);
        for batch in batches {
            let mut pieces =
                stream::iter(batch.iter().flat_map(|r| self.chunks(*r)).collect::<Vec<_>>())
                    .map(|range| self.copy(attempt, range))
                    .buffer_unordered(DEPTH);
            // All come to their end, also those that are in vain: what is under way is not dropped.
            let mut all = Ok(());
            while let Some(done) = pieces.next().await {
                all = all.and(done.map(|left_out| lacking.add(left_out)));
            }
            all?;
            self.tell_lacking(attempt, &lacking, false)?;
            // Of more than it remembers nobody knows where it is.
            if !lacking.is_too_much {
                copied.extend(batch.iter().filter(|r| !self.meets(**r, &lacking.ranges)));
            }
            if self.core.now() >= saved + SAVING {
                self.save(attempt, image, std::mem::take(&mut copied)).await?;
                saved = self.core.now();
            }
        }
        Ok(lacking)
    }

    fn meets(&self, region: Region, ranges: &[Blocks]) -> bool {
        let bytes = self.leg.log.geometry().bytes_of(region);
        let meets = |r: &Blocks| {
            let (range, region) = (self.bytes(*r), bytes.clone().unwrap_or_default());
            range.start < region.end && region.start < range.end
        };
        ranges.iter().any(meets)
    }

    /// Nobody has anything in these ranges that could be copied: the joiner has all else, and gets what is
    /// new. When they have been written it is equal there as well.
    async fn wait_for_contents(
        self: &Rc<Self>,
        attempt: Attempt,
        mut lacking: Lacking,
    ) -> Result<(), &'static str> {
        let mut told = 0;
        while let Some(first) = lacking.ranges.first() {
            let (node, at, ranges) = (attempt.node.0, first.at.0, lacking.ranges.len());
            if told != ranges {
                tracing::error!(
                    node,
                    at,
                    ranges,
                    "no replica can read this: another is not in sync before it has been written"
                );
                told = ranges;
            }
            self.tell_lacking(attempt, &lacking, true)?;
            let pause = tokio::time::sleep(LOOKING_AGAIN);
            self.in_view(attempt.view, pause).await.ok_or("the view is over")?;
            for range in std::mem::take(&mut lacking.ranges) {
                lacking.add(self.copy(attempt, range).await?);
            }
        }
        self.tell_lacking(attempt, &lacking, true)?;
        match lacking.is_too_much {
            true => Err("more could not be read anywhere than it remembered: it begins anew"),
            false => Ok(()),
        }
    }

    /// Has status say what nobody can read.
    fn tell_lacking(
        &self,
        attempt: Attempt,
        lacking: &Lacking,
        waited_for: bool,
    ) -> Result<(), &'static str> {
        self.joiner(attempt, |_| ())?;
        let mut ranges: Vec<Blocks> =
            lacking.ranges.iter().copied().filter(|range| !is_aside(*range)).collect();
        ranges.sort_by_key(|range| range.at.0);
        let what = Unreadable::of(ranges.iter().map(|range| self.bytes(*range)), waited_for);
        self.joiners.borrow_mut().lacks(attempt.node, what);
        Ok(())
    }

    /// Takes the marks of what has been copied, so that the next attempt goes on from there.
    async fn save(
        self: &Rc<Self>,
        attempt: Attempt,
        image: uuid::Uuid,
        copied: Vec<Region>,
    ) -> Result<(), &'static str> {
        let Attempt { view, node, .. } = attempt;
        let Ok(Some((_, stamp))) = self.flush_in(view, 0).await else {
            return Err("the view is over");
        };
        // After the stamp: what is quiet since was applied there before this begins.
        let request = self.requests.number();
        let lineage = self.next_lineage(view);
        self.flush_as(view, node, request, lineage.count).await.ok_or("the view is over")?;
        self.joiner(attempt, |_| ())?;
        let (together, cleared) = (vec![image], Some((lineage, vec![image])));
        let advance = Advance { reached: lineage, together, cleared };
        self.leg.log.advance(advance).await.map_err(|_| "the source's log failed")?;
        self.joiner(attempt, |_| ())?;
        let quiet = self.quiet(copied, stamp);
        // At the joiner too, or its own marks bring them back with its next attempt (attack 65).
        if let Some(link) = self.link(node) {
            send_clear(&link, view, request, &self.extents(&quiet));
        }
        self.leg.log.clear(&[image], quiet, stamp);
        self.leg.log.write_back().await.map_err(|_| "the source's log failed")
    }

    fn chunks(&self, region: Region) -> Vec<Blocks> {
        let block = u64::from(self.leg.dev.info().block_size);
        let Some(bytes) = self.leg.log.geometry().bytes_of(region) else { return Vec::new() };
        let starts = (bytes.start..bytes.end).step_by(CHUNK as usize);
        let inside = |at| Blocks::new(Lba(at / block), CHUNK.min(bytes.end - at) / block);
        // What lies beside the volume is marked with its first block.
        let aside = self.aside().filter(|_| bytes.start == 0);
        aside.into_iter().chain(starts.map(inside)).collect()
    }

    /// Copies one piece, but for the blocks that nobody can read: which these are.
    async fn copy(
        self: &Rc<Self>,
        attempt: Attempt,
        range: Blocks,
    ) -> Result<Vec<Blocks>, &'static str> {
        let (mut left, mut lacking) = (vec![range], Vec::new());
        while let Some(part) = left.pop() {
            if self.copy_part(attempt, part).await? {
                continue;
            }
            if part.count == 1 {
                lacking.push(part);
                continue;
            }
            let half = part.count / 2;
            let rest = Lba(part.at.0 + half);
            left.push(Blocks::new(rest, part.count - half));
            left.push(Blocks::new(part.at, half));
        }
        Ok(lacking)
    }

    /// Copies a part of it, unless nobody can read it: readers go on, writers wait.
    async fn copy_part(
        self: &Rc<Self>,
        attempt: Attempt,
        range: Blocks,
    ) -> Result<bool, &'static str> {
        let Attempt { view, node, .. } = attempt;
        let began = self.core.now();
        self.joiner(attempt, |_| ())?;
        let ctx = self.memory(self.len(range), Class::Restore).await.map_err(|_| "no memory")?;
        let lock = self.locks.enter(range, false);
        self.in_view(view, lock.held()).await.ok_or("the view is over")?;
        let Some(change) = self.to_copy(view, range, &ctx).await? else { return Ok(false) };
        self.joiner(attempt, |_| ())?;
        let link = self.link(node).ok_or("there is no session")?;
        let seq = self.order.borrow_mut().next();
        self.order.borrow_mut().await_copies(seq, [node], self.pulse.get());
        let tag = Tag { node: NodeId(0), number: 0 };
        link.send(Message::Write { view, seq, tag, copy: true, change });
        fault::pass_when_sent(Point::ResyncSent);
        let fate = Order::fate(&self.order, seq).await;
        drop(lock);
        if fate != Fate::Committed {
            return Err("the view is over");
        }
        // Nobody waits for one that was given up: that says nothing about what it has.
        // What lies beside the volume is no part of what was marked.
        let copied = if is_aside(range) { 0 } else { self.len(range) as u64 };
        self.joiner(attempt, |joiner| joiner.done += copied)?;
        self.yield_to_clients(self.core.now().saturating_sub(began)).await;
        Ok(true)
    }

    /// The contents to copy, from whoever can read them; nothing if nobody can. (Zeroes in their place
    /// would be answered as if they had been written: attack 68.)
    async fn to_copy(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        ctx: &Ctx,
    ) -> Result<Option<Change>, &'static str> {
        let change = |data| bringing(range, data);
        match self.leg.read(range, ctx, self.pulse.get()).await {
            Ok(data) => Ok(Some(change(data))),
            Err(Error::Unreadable { .. } | Error::Corrupt { .. }) => {
                let found = self.fetch_elsewhere(view, range, ctx).await;
                if found.is_none() && self.view.get() != view {
                    return Err("the view is over");
                }
                Ok(found.map(change))
            }
            Err(e) => {
                self.leg_failed(e);
                Err("the source's disk failed")
            }
        }
    }

    /// Leaves three quarters of the time to clients that are there, down to a floor.
    async fn yield_to_clients(&self, took: Duration) {
        if self.own.len() == 0 && self.entries.borrow().len() == 0 {
            return;
        }
        let longest = Duration::from_secs_f64(CHUNK as f64 / self.settings.resync_floor as f64);
        tokio::time::sleep((took * 3).min(longest)).await;
    }
}

/// What brings `data` to `range`. Zeroes need neither a way nor a place on the disk: a copy of a thin volume is
/// as thin.
fn bringing(range: Blocks, data: Bufs) -> Change {
    let (kind, data) = if is_zero(&data) {
        (Kind::Zero { unmap: true }, Bufs::new())
    } else {
        (Kind::Write, data)
    };
    Change { range, kind, fua: false, data }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_travel_as_zeroes_and_one_byte_among_them_as_data() {
        let range = Blocks::new(Lba(3), 16);
        let change = bringing(range, Bufs::zeroes(8192));
        assert_eq!((change.kind, change.data.len()), (Kind::Zero { unmap: true }, 0));
        let mut bytes = vec![0; 8192];
        bytes[8191] = 1;
        let pool = rt::buf::Pool::new(1 << 20).unwrap();
        let credit = pool.account().try_credit(8192, Class::Read).unwrap();
        let change = bringing(range, rt::buf::copy_in(&credit, &bytes));
        assert_eq!((change.kind, change.data.len()), (Kind::Write, 8192));
    }
}

//! A member's own stack: the device, and the log that knows what of it may differ.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use block::{Aside, Blocks, Bufs, Ctx, Dev, Error, Lba, Op, Run};
use intent_log::{FlushStamp, IntentLog};
use peer::{Change, Kind};
use rt::fault::{self, Point};
use slab::Slab;

use super::replica::is_aside;
use super::space::parts;
use super::{Loss, Mistake, Settings};

/// Flushes whose stamps are remembered, for a CLEAR that names one.
const REMEMBERED: usize = 8;

/// How long after the last read that the disk has failed status still tells of those reads.
const TELL_OF_READS: Duration = Duration::from_secs(3600);

/// See the [module](self).
pub(super) struct Leg {
    pub(super) dev: Dev,
    pub(super) log: IntentLog,
    /// Who is told what changes beside the volume.
    keeper: Rc<dyn Aside>,
    /// Why it was given up, once it is.
    loss: Cell<Option<Loss>>,
    /// Reads that the disk has failed, and when the last one was, by the replica's pulse.
    failed_reads: Cell<(u64, Duration)>,
    /// Mistakes, for tests: nothing is marked; the keeper is told late.
    careless: bool,
    tells_late: bool,
    /// When the operations in flight began, by the replica's pulse.
    running: RefCell<Slab<Duration>>,
    /// The flushes that were asked for by number, oldest first, what they cover, and the count of the
    /// lineage that was recorded after them.
    flushed: RefCell<VecDeque<(u64, FlushStamp, u32)>>,
}

impl Leg {
    pub(super) fn new(dev: Dev, log: IntentLog, keeper: Rc<dyn Aside>, settings: Settings) -> Self {
        Self {
            dev,
            log,
            keeper,
            loss: Cell::default(),
            failed_reads: Cell::default(),
            careless: settings.makes(Mistake::SkipsIntentLog),
            tells_late: settings.makes(Mistake::TellsAsideLate),
            running: RefCell::default(),
            flushed: RefCell::default(),
        }
    }

    /// Whether it can be relied on no more.
    pub(super) fn is_dead(&self) -> bool {
        self.loss.get().is_some()
    }

    /// Why it cannot be relied on any more, if that is so.
    pub(super) fn loss(&self) -> Option<Loss> {
        self.loss.get()
    }

    /// It cannot be relied on any more.
    pub(super) fn give_up(&self, loss: Loss) {
        self.loss.set(Some(loss));
    }

    /// Makes `change`, with its regions marked before (RFD 0010, 6.3). The caller holds their
    /// [`Touch`](intent_log::Touch).
    pub(super) async fn apply(
        &self,
        change: &Change,
        bytes: Range<u64>,
        ctx: &Ctx,
        now: Duration,
    ) -> Result<(), Error> {
        let _running = self.runs(now);
        self.mark(bytes).await?;
        // What has a place in the order happens, whatever its client asks by now.
        let ctx = ctx.shielded();
        let Change { range, fua, .. } = *change;
        match change.kind {
            Kind::Write => {
                let data = change.data.clone();
                self.dev.submit(Op::Write { at: range.at, data, fua }, &ctx).await?;
            }
            Kind::Zero { unmap } => self.zero(range, unmap, fua, &ctx).await?,
        }
        if is_aside(range) {
            // Before anybody hears that it is here.
            self.tell_keeper(range, &change.data);
        }
        Ok(())
    }

    /// The same with space for nothing but what is not zero: zeroes give back theirs first.
    pub(super) async fn apply_thin(
        &self,
        change: &Change,
        bytes: Range<u64>,
        ctx: &Ctx,
        now: Duration,
    ) -> Result<(), Error> {
        let Change { range, fua, .. } = *change;
        if change.kind != Kind::Write {
            let kind = Kind::Zero { unmap: true };
            let freed = Change { range, kind, fua, data: Bufs::new() };
            return self.apply(&freed, bytes, ctx, now).await;
        }
        let _running = self.runs(now);
        self.mark(bytes).await?;
        let ctx = ctx.shielded();
        let block = self.dev.info().block_size as usize;
        let parts = parts(&change.data, block);
        let at = |part: &Range<usize>| Lba(range.at.0 + (part.start / block) as u64);
        for (part, _) in parts.iter().filter(|(_, zero)| *zero) {
            let blocks = Blocks::new(at(part), (part.len() / block) as u64);
            self.zero(blocks, true, fua, &ctx).await?;
        }
        for (part, _) in parts.iter().filter(|(_, zero)| !zero) {
            let data = change.data.slice(part.clone());
            self.dev.submit(Op::Write { at: at(part), data, fua }, &ctx).await?;
        }
        if is_aside(range) {
            self.tell_keeper(range, &change.data);
        }
        Ok(())
    }

    /// Marks what is about to change.
    async fn mark(&self, bytes: Range<u64>) -> Result<(), Error> {
        if !self.careless && !self.log.is_hot(bytes.clone()) {
            Box::pin(self.log.mark(bytes)).await?;
            fault::pass(Point::LegMarked);
        }
        Ok(())
    }

    fn tell_keeper(&self, range: Blocks, data: &Bufs) {
        if !self.tells_late {
            return self.keeper.changed(range, data);
        }
        let (keeper, data) = (Rc::clone(&self.keeper), data.clone());
        tokio::task::spawn_local(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            keeper.changed(range, &data);
        });
    }

    async fn zero(&self, range: Blocks, unmap: bool, fua: bool, ctx: &Ctx) -> Result<(), Error> {
        let blocks = u32::try_from(range.count).map_err(|_| Error::OutOfRange)?;
        self.dev.submit(Op::Zero { at: range.at, blocks, unmap, fua }, ctx).await.map(drop)
    }

    /// Reads `range`.
    pub(super) async fn read(
        &self,
        range: Blocks,
        ctx: &Ctx,
        now: Duration,
    ) -> Result<Bufs, Error> {
        let _running = self.runs(now);
        let blocks = u32::try_from(range.count).map_err(|_| Error::OutOfRange)?;
        let found = self.dev.submit(Op::Read { at: range.at, blocks }, ctx).await;
        if matches!(found, Err(Error::Unreadable { .. } | Error::Corrupt { .. })) {
            self.failed_reads.update(|(count, _)| (count.saturating_add(1), now));
        }
        found
    }

    /// Reads that the disk has failed, if the last of them is not long ago.
    pub(super) fn failed_reads(&self, now: Duration) -> u64 {
        match self.failed_reads.get() {
            (count, last) if now < last + TELL_OF_READS => count,
            _ => {
                self.failed_reads.take();
                0
            }
        }
    }

    /// How `range` begins.
    pub(super) async fn map(&self, range: Blocks, ctx: &Ctx, now: Duration) -> Result<Run, Error> {
        let _running = self.runs(now);
        let blocks = u32::try_from(range.count).map_err(|_| Error::OutOfRange)?;
        let found = self.dev.submit(Op::Map { at: range.at, blocks }, ctx).await?;
        Ok(Run::all_of(&found).first().copied().unwrap_or(Run { blocks, mapped: true }))
    }

    /// Makes durable what has completed; `request` is the number it was asked for under, if a
    /// CLEAR may name it, and the count of the lineage that is to be recorded.
    pub(super) async fn flush(
        &self,
        request: Option<(u64, u32)>,
        ctx: &Ctx,
        now: Duration,
    ) -> Result<FlushStamp, Error> {
        let _running = self.runs(now);
        let stamp = self.log.flush_begins();
        self.dev.submit(Op::Flush, &ctx.shielded()).await?;
        if let Some((request, lineage)) = request {
            let mut flushed = self.flushed.borrow_mut();
            flushed.push_back((request, stamp, lineage));
            if flushed.len() > REMEMBERED {
                flushed.pop_front();
            }
        }
        Ok(stamp)
    }

    /// What the flush of this number covers, if it is remembered.
    pub(super) fn covered_by(&self, request: u64) -> Option<(FlushStamp, u32)> {
        let flushed = self.flushed.borrow();
        let found = flushed.iter().find(|(r, ..)| *r == request);
        found.map(|(_, stamp, lineage)| (*stamp, *lineage))
    }

    /// Flushes of an earlier view mean nothing in a new one: its primary numbers anew.
    pub(super) fn forget_flushes(&self) {
        self.flushed.borrow_mut().clear();
    }

    /// When the oldest operation in flight began.
    pub(super) fn oldest(&self) -> Option<Duration> {
        self.running.borrow().iter().map(|(_, began)| *began).min()
    }

    fn runs(&self, now: Duration) -> Running<'_> {
        Running { leg: self, key: self.running.borrow_mut().insert(now) }
    }
}

/// An operation in flight.
struct Running<'a> {
    leg: &'a Leg,
    key: usize,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.leg.running.borrow_mut().remove(self.key);
    }
}

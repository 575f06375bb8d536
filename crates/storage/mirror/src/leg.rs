//! The local device stack of a replica: the device, and its write-intent log.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use block::{BlockStatus, Blocks, Bufs, Ctx, Dev, Epoch, Error, Info, Lba, MetadataObserver, Op};
use intent_log::{FlushStamp, IntentLog, RegionGuard};
use peer::{WriteKind, WriteOp};
use rt::fault_point::{self, FaultPoint};
use slab::Slab;

use super::membership::RecordedGenerations;
use super::state::{ReplicaImage, is_metadata};
use super::zeroes::split_by_zeroes;
use super::{MirrorSettings, Mistake};

/// Number of flushes whose stamps are remembered, for a CLEAR REGIONS that names one.
const MAX_REMEMBERED_FLUSHES: usize = 8;

/// How long after the last read error of the disk the status still counts read errors.
const READ_ERROR_WINDOW: Duration = Duration::from_secs(3600);

/// See the [module](self).
pub(super) struct Leg {
    pub(super) dev: Dev,
    pub(super) log: IntentLog,
    /// Is told of changes of the metadata blocks.
    metadata_observer: Rc<dyn MetadataObserver>,
    /// Mistakes, for tests: no region is marked dirty; the metadata observer is told late.
    skips_intent_log: bool,
    delays_metadata: bool,
    /// Mistake, for tests: the image claims to have recorded every generation.
    claims_latest: bool,
    state: RefCell<LegState>,
}

/// What is known of the leg.
#[derive(Debug, Default)]
struct LegState {
    /// Reads that the disk failed, and when the last one was, by the awake clock.
    read_errors: (u64, Duration),
    /// When the operations in flight began, by the awake clock.
    in_flight: Slab<Duration>,
    /// Recent flushes with a request number, oldest first: what they cover, and the count of the
    /// data generation that was recorded after them.
    recent_flushes: VecDeque<(u64, FlushStamp, u32)>,
}

impl Leg {
    pub(super) fn new(
        dev: Dev,
        log: IntentLog,
        metadata_observer: Rc<dyn MetadataObserver>,
        settings: MirrorSettings,
    ) -> Self {
        Self {
            dev,
            log,
            metadata_observer,
            skips_intent_log: settings.has_mistake(Mistake::SkipsIntentLog),
            delays_metadata: settings.has_mistake(Mistake::AppliesMetadataLate),
            claims_latest: settings.has_mistake(Mistake::TakesOverWhenRolledBack),
            state: RefCell::default(),
        }
    }

    /// Applies `op`, after marking its regions dirty (RFD 0010, 6.3). The caller holds their
    /// [`RegionGuard`](intent_log::RegionGuard).
    pub(super) async fn apply(
        &self,
        op: &WriteOp,
        bytes: Range<u64>,
        ctx: &Ctx,
        now: Duration,
    ) -> Result<(), Error> {
        let _running = self.track(now);
        self.mark(bytes).await?;
        // An ordered write is applied, even if its client has aborted it.
        let ctx = ctx.shielded();
        let WriteOp { range, fua, .. } = *op;
        match op.kind {
            WriteKind::Data => {
                let data = op.data.clone();
                self.dev.submit(Op::Write { at: range.at, data, fua }, &ctx).await?;
            }
            WriteKind::Zero { unmap } => self.zero(range, unmap, fua, &ctx).await?,
        }
        if is_metadata(range) {
            // Before the write is acknowledged.
            self.notify_metadata(range, &op.data);
        }
        Ok(())
    }

    /// The same, but allocates space only for nonzero blocks; frees the zeroed ones first.
    pub(super) async fn apply_thin(
        &self,
        op: &WriteOp,
        bytes: Range<u64>,
        ctx: &Ctx,
        now: Duration,
    ) -> Result<(), Error> {
        let WriteOp { range, fua, .. } = *op;
        if op.kind != WriteKind::Data {
            let kind = WriteKind::Zero { unmap: true };
            let freed = WriteOp { range, kind, fua, data: Bufs::new() };
            return self.apply(&freed, bytes, ctx, now).await;
        }
        let _running = self.track(now);
        self.mark(bytes).await?;
        let ctx = ctx.shielded();
        let block = self.dev.info().block_size as usize;
        let parts = split_by_zeroes(&op.data, block);
        let at = |part: &Range<usize>| Lba(range.at.0 + (part.start / block) as u64);
        for (part, _) in parts.iter().filter(|(_, is_zero)| *is_zero) {
            let blocks = Blocks::new(at(part), (part.len() / block) as u64);
            self.zero(blocks, true, fua, &ctx).await?;
        }
        for (part, _) in parts.iter().filter(|(_, is_zero)| !is_zero) {
            let data = op.data.slice(part.clone());
            self.dev.submit(Op::Write { at: at(part), data, fua }, &ctx).await?;
        }
        if is_metadata(range) {
            self.notify_metadata(range, &op.data);
        }
        Ok(())
    }

    /// Marks the regions of `bytes` dirty.
    async fn mark(&self, bytes: Range<u64>) -> Result<(), Error> {
        if !self.skips_intent_log && !self.log.is_hot(bytes.clone()) {
            Box::pin(self.log.mark(bytes)).await?;
            fault_point::reach(FaultPoint::RegionsMarked);
        }
        Ok(())
    }

    fn notify_metadata(&self, range: Blocks, data: &Bufs) {
        if !self.delays_metadata {
            return self.metadata_observer.on_applied(range, data);
        }
        let (observer, data) = (Rc::clone(&self.metadata_observer), data.clone());
        tokio::task::spawn_local(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            observer.on_applied(range, &data);
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
        let _running = self.track(now);
        let blocks = u32::try_from(range.count).map_err(|_| Error::OutOfRange)?;
        let result = self.dev.submit(Op::Read { at: range.at, blocks }, ctx).await;
        if matches!(result, Err(Error::Unreadable { .. } | Error::Corrupt { .. })) {
            let read_errors = &mut self.state.borrow_mut().read_errors;
            *read_errors = (read_errors.0.saturating_add(1), now);
        }
        result
    }

    /// Reads that the disk failed, if the last of them is recent.
    pub(super) fn recent_read_errors(&self, now: Duration) -> u64 {
        let read_errors = &mut self.state.borrow_mut().read_errors;
        if now >= read_errors.1 + READ_ERROR_WINDOW {
            *read_errors = (0, Duration::ZERO);
        }
        read_errors.0
    }

    /// Whether the first blocks of `range` are mapped, and how many.
    pub(super) async fn map(
        &self,
        range: Blocks,
        ctx: &Ctx,
        now: Duration,
    ) -> Result<BlockStatus, Error> {
        let _running = self.track(now);
        let blocks = u32::try_from(range.count).map_err(|_| Error::OutOfRange)?;
        let runs = self.dev.submit(Op::BlockStatus { at: range.at, blocks }, ctx).await?;
        Ok(BlockStatus::from_bufs(&runs)
            .first()
            .copied()
            .unwrap_or(BlockStatus { blocks, mapped: true }))
    }

    /// Makes completed writes durable. `request` is the number of the flush, if a CLEAR REGIONS may
    /// name it, and the count of the data generation to be recorded.
    pub(super) async fn flush(
        &self,
        request: Option<(u64, u32)>,
        ctx: &Ctx,
        now: Duration,
    ) -> Result<FlushStamp, Error> {
        let _running = self.track(now);
        let stamp = self.log.begin_flush();
        self.dev.submit(Op::Flush, &ctx.shielded()).await?;
        if let Some((request, generation)) = request {
            let recent = &mut self.state.borrow_mut().recent_flushes;
            recent.push_back((request, stamp, generation));
            if recent.len() > MAX_REMEMBERED_FLUSHES {
                recent.pop_front();
            }
        }
        Ok(stamp)
    }

    /// What the flush `request` covers, if it is remembered.
    pub(super) fn flush_coverage(&self, request: u64) -> Option<(FlushStamp, u32)> {
        let state = self.state.borrow();
        let found = state.recent_flushes.iter().find(|(r, ..)| *r == request);
        found.map(|(_, stamp, generation)| (*stamp, *generation))
    }

    /// When the oldest operation in flight began.
    pub(super) fn oldest_started_at(&self) -> Option<Duration> {
        self.state.borrow().in_flight.iter().map(|(_, started_at)| *started_at).min()
    }

    fn track(&self, now: Duration) -> InFlightOp<'_> {
        InFlightOp { leg: self, key: self.state.borrow_mut().in_flight.insert(now) }
    }
}

impl fmt::Debug for Leg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leg").field("state", &self.state.borrow()).finish_non_exhaustive()
    }
}

impl ReplicaImage for Leg {
    fn info(&self) -> Info {
        self.dev.info()
    }

    fn recorded_generations(&self) -> RecordedGenerations {
        let (mut generation, is_log_lost, mut by_image) =
            (self.log.data_generation(), self.log.was_lost(), self.log.generations());
        if self.claims_latest {
            generation.epoch = Epoch(u64::MAX);
            by_image
                .iter_mut()
                .for_each(|(_, generations)| generations.common.epoch = Epoch(u64::MAX));
        }
        RecordedGenerations { generation, is_log_lost, by_image }
    }

    fn guard_regions(&self, bytes: Range<u64>) -> Option<RegionGuard> {
        Some(self.log.begin_op(bytes))
    }

    fn forget_flushes(&self) {
        self.state.borrow_mut().recent_flushes.clear();
    }
}

/// An operation in flight.
struct InFlightOp<'a> {
    leg: &'a Leg,
    key: usize,
}

impl Drop for InFlightOp<'_> {
    fn drop(&mut self) {
        self.leg.state.borrow_mut().in_flight.remove(self.key);
    }
}

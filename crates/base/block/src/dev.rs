//! `Layer`, what an implementer writes, and `Dev`, the only way to call one.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use rt::buf::Bufs;

use crate::{ASIDE, ASIDE_BYTES, Blocks, Changes, Ctx, Error, Op, Run, crash};

/// What a device is, as of now. Only [`Info::blocks`] changes while it lives, and only upwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Size of a logical block in bytes: 512 or 4096.
    pub block_size: u32,
    /// Size of the device in logical blocks.
    pub blocks: u64,
    /// Blocks beside it, from [`ASIDE`] on: as many as [`ASIDE_BYTES`](crate::ASIDE_BYTES) are, or none.
    pub aside_blocks: u32,
    /// Size in bytes of what the medium writes at once; a multiple of `block_size`. Smaller or
    /// misaligned writes work and cost more.
    pub physical_block_size: u32,
    /// Largest operation that carries data, in blocks; in bytes it fits a `u32`.
    pub max_transfer_blocks: u32,
    /// Granularity of [`Op::Unmap`] in blocks: smaller pieces keep their space and are treated
    /// as `unmap_zeroes` says. 0 where nothing can be freed.
    pub unmap_granularity_blocks: u32,
    /// Whether unmapped blocks read as zeroes.
    pub unmap_zeroes: bool,
    /// Whether completed writes may be lost at power loss until flushed. Where not, every write
    /// is durable when it completes and a flush does nothing.
    pub volatile_cache: bool,
    /// Whether the layer itself honours `fua`; otherwise [`Dev`] adds a flush.
    pub native_fua: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Memory in bytes that one operation may take from its credit beyond its data (a read's
    /// rounded up to 4 KiB): a multiple of 4 KiB, as memory comes in pages.
    pub overhead: u32,
}

impl Info {
    /// Size of the device in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_size))
    }

    /// Whether `range` is not empty and lies in the device, or beside it.
    #[must_use]
    pub fn has(&self, range: Blocks) -> bool {
        let within = |first: u64, count: u64| {
            let last = first.checked_add(count);
            range.at.0 >= first && range.end().is_some_and(|end| last.is_some_and(|l| end <= l))
        };
        let aside = || within(ASIDE.0, u64::from(self.aside_blocks));
        range.count > 0 && (within(0, self.blocks) || aside())
    }

    fn is_consistent(&self) -> bool {
        let transfer = u64::from(self.max_transfer_blocks) * u64::from(self.block_size);
        matches!(self.block_size, 512 | 4096)
            && self.physical_block_size.is_multiple_of(self.block_size)
            && self.physical_block_size > 0
            && self.blocks <= ASIDE.0
            && [0, ASIDE_BYTES / self.block_size].contains(&self.aside_blocks)
            && (1..=u64::from(u32::MAX)).contains(&transfer)
            && self.overhead.is_multiple_of(4096)
    }
}

/// A part of a storage stack. Lives on one core; called through [`Dev`] only.
///
/// The obligations of both sides are the contract in the [crate documentation](crate). Besides:
/// the caller keeps polling what it submitted; the layer completes every operation in finite time
/// after its disks do, never panics on any `Op` that [`Dev`] let through, and passes on `ctx`.
pub trait Layer: 'static {
    /// Kind of layer, for logs and statistics.
    fn name(&self) -> &'static str;

    /// What the device is now.
    fn info(&self) -> Info;

    /// Does `op`; a read returns its data, [`Op::Map`] a [`Run`], everything else nothing.
    fn submit(&self, op: Op, ctx: Ctx) -> impl Future<Output = Result<Bufs, Error>>;
}

/// [`Layer`] behind a pointer.
trait Boxed {
    fn name(&self) -> &'static str;
    fn info(&self) -> Info;
    fn submit(self: Rc<Self>, op: Op, ctx: Ctx) -> Completion;
}

type Completion = Pin<Box<dyn Future<Output = Result<Bufs, Error>>>>;

impl<L: Layer> Boxed for L {
    fn name(&self) -> &'static str {
        Layer::name(self)
    }

    fn info(&self) -> Info {
        Layer::info(self)
    }

    fn submit(self: Rc<Self>, op: Op, ctx: Ctx) -> Completion {
        Box::pin(async move { Layer::submit(&*self, op, ctx).await })
    }
}

/// Counters of one device since it was assembled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Reads submitted.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes submitted.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// `Zero` and `Unmap` operations submitted.
    pub zeroes: u64,
    /// Flushes submitted, those for emulated FUA included.
    pub flushes: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Operations in flight.
    pub in_flight: u64,
}

/// A device: the checkpoint in front of a layer, which checks ranges, alignment and limits,
/// emulates FUA and counts, once for all layers. Cheap to clone.
#[derive(Clone)]
pub struct Dev {
    layer: Rc<dyn Boxed>,
    shared: Rc<Shared>,
}

#[derive(Default)]
struct Shared {
    stats: Cell<Stats>,
    changes: Changes,
    /// What is in flight and whether it writes; kept in debug builds only.
    ranges: RefCell<Vec<(Blocks, bool)>>,
}

impl Shared {
    fn count(&self, f: impl FnOnce(&mut Stats)) {
        let mut s = self.stats.get();
        f(&mut s);
        self.stats.set(s);
    }
}

/// An operation that has begun: poll it to completion. It can be moved meanwhile.
pub struct Submission {
    flight: InFlight,
    running: Completion,
    /// Bytes that it answers with.
    bytes: usize,
    /// A flush follows, with this, where FUA is emulated.
    flush: Option<Ctx>,
}

impl Future for Submission {
    type Output = Result<Bufs, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            let result = ready!(this.running.as_mut().poll(cx));
            if result.is_ok()
                && let Some(ctx) = this.flush.take()
            {
                let dev = &this.flight.dev;
                dev.shared.count(|s| s.flushes += 1);
                this.running = Rc::clone(&dev.layer).submit(Op::Flush, ctx.shielded());
                continue;
            }
            this.flight.end(result.is_err());
            if let Ok(data) = &result {
                let name = this.flight.dev.name();
                assert_eq!(data.len(), this.bytes, "{name} broke the contract");
            }
            return Poll::Ready(result);
        }
    }
}

impl Submission {
    /// Nobody believes what it answers any more: its range may be read and written meanwhile. It is still to be polled to
    /// completion.
    pub fn forsake(&mut self) {
        self.flight.forget_range();
    }
}

impl fmt::Debug for Submission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submission").field("dev", &self.flight.dev).finish_non_exhaustive()
    }
}

/// One operation between its start and its completion.
struct InFlight {
    dev: Dev,
    range: Option<(Blocks, bool)>,
    completed: bool,
}

impl InFlight {
    fn begin(dev: &Dev, op: &Op, info: &Info, is_believed: bool) -> Self {
        let uses = is_believed && !matches!(op, Op::Map { .. });
        let range = op.range(info.block_size).filter(|_| uses).map(|r| (r, op.writes()));
        if cfg!(debug_assertions)
            && let Some((new, writes)) = range
        {
            let mut ranges = dev.shared.ranges.borrow_mut();
            let clash = ranges.iter().find(|(r, w)| (writes || *w) && r.overlaps(&new));
            assert!(clash.is_none(), "{op:?} on {} overlaps {clash:?} in flight", dev.name());
            ranges.push((new, writes));
        }
        dev.shared.count(|s| {
            s.in_flight += 1;
            count_op(s, op, info.block_size);
        });
        Self { dev: dev.clone(), range, completed: false }
    }

    fn end(&mut self, failed: bool) {
        self.completed = true;
        self.dev.shared.count(|s| s.errors += u64::from(failed));
    }

    fn forget_range(&mut self) {
        if cfg!(debug_assertions)
            && let Some(range) = self.range.take()
        {
            let mut ranges = self.dev.shared.ranges.borrow_mut();
            if let Some(i) = ranges.iter().position(|r| *r == range) {
                ranges.swap_remove(i);
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.dev.shared.count(|s| s.in_flight -= 1);
        self.forget_range();
        if !self.completed && crash::is_forbidden() {
            panic!("an operation on {} was dropped in flight", self.dev.name());
        }
    }
}

impl Dev {
    /// The device that `layer` is.
    ///
    /// # Panics
    /// If the layer's [`Info`] contradicts itself.
    #[must_use]
    pub fn new(layer: impl Layer) -> Self {
        Self::shared(Rc::new(layer))
    }

    /// The device of a layer that its owner keeps a handle to.
    ///
    /// # Panics
    /// If the layer's [`Info`] contradicts itself.
    #[must_use]
    pub fn shared<L: Layer>(layer: Rc<L>) -> Self {
        let info = Layer::info(&*layer);
        assert!(info.is_consistent(), "{} declares {info:?}", Layer::name(&*layer));
        Self { layer, shared: Rc::default() }
    }

    /// Kind of layer.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.layer.name()
    }

    /// What the device is now.
    #[must_use]
    pub fn info(&self) -> Info {
        self.layer.info()
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.stats.get()
    }

    /// What is changed of it through this and its clones.
    #[must_use]
    pub fn changes(&self) -> Changes {
        self.shared.changes.clone()
    }

    /// Does `op`; poll it to completion.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a range outside the device, an empty one, more than
    /// [`Info::max_transfer_blocks`] of data or data that is not whole blocks;
    /// [`Error::ReadOnly`]; [`Error::Aborted`] when that was asked for before the start; what the
    /// layer reports.
    pub async fn submit(&self, op: Op, ctx: &Ctx) -> Result<Bufs, Error> {
        self.start(op, ctx)?.await
    }

    /// Begins `op`, as [`Self::submit`] does.
    ///
    /// # Errors
    /// Those of [`Self::submit`] that are found before the layer is asked.
    pub fn start(&self, op: Op, ctx: &Ctx) -> Result<Submission, Error> {
        self.begin(op, ctx, true)
    }

    /// As [`Self::start`], of a read that nobody may believe in the end: its range is not checked against others in flight. For a layer
    /// whose caller may have [forsaken](Submission::forsake) its own operation before the layer was polled.
    ///
    /// # Errors
    /// Those of [`Self::start`].
    pub fn start_forsaken(&self, op: Op, ctx: &Ctx) -> Result<Submission, Error> {
        self.begin(op, ctx, false)
    }

    fn begin(&self, op: Op, ctx: &Ctx, is_believed: bool) -> Result<Submission, Error> {
        let info = self.layer.info();
        check(&op, &info)?;
        if ctx.is_aborted() {
            return Err(Error::Aborted);
        }
        let bytes = match op {
            Op::Read { blocks, .. } => blocks as usize * info.block_size as usize,
            Op::Map { .. } => Run::BYTES,
            _ => 0,
        };
        let flight = InFlight::begin(self, &op, &info, is_believed);
        self.shared.changes.begins(&op, info.block_size);
        let (op, flush_after) = split_fua(op, &info);
        let flush = flush_after.then(|| ctx.clone());
        let running = Rc::clone(&self.layer).submit(op, ctx.clone());
        Ok(Submission { flight, running, bytes, flush })
    }
}

impl fmt::Debug for Dev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dev").field("layer", &self.name()).field("info", &self.info()).finish()
    }
}

fn count_op(s: &mut Stats, op: &Op, block_size: u32) {
    match op {
        Op::Read { blocks, .. } => {
            s.reads += 1;
            s.read_bytes += u64::from(*blocks) * u64::from(block_size);
        }
        Op::Write { data, .. } => {
            s.writes += 1;
            s.write_bytes += data.len() as u64;
        }
        Op::Zero { .. } | Op::Unmap { .. } => s.zeroes += 1,
        Op::Map { .. } => {}
        Op::Flush => s.flushes += 1,
    }
}

fn check(op: &Op, info: &Info) -> Result<(), Error> {
    if let Some(range) = op.range(info.block_size) {
        if !info.has(range) {
            return Err(Error::OutOfRange);
        }
        let carries_data = matches!(op, Op::Read { .. } | Op::Write { .. });
        if carries_data && range.count > u64::from(info.max_transfer_blocks) {
            return Err(Error::OutOfRange);
        }
    }
    if let Op::Write { data, .. } = op
        && !data.len().is_multiple_of(info.block_size as usize)
    {
        return Err(Error::OutOfRange);
    }
    if op.writes() && info.read_only {
        return Err(Error::ReadOnly);
    }
    Ok(())
}

/// Takes `fua` off an operation whose layer does not know it; says whether a flush must follow.
fn split_fua(mut op: Op, info: &Info) -> (Op, bool) {
    match &mut op {
        Op::Write { fua, .. } | Op::Zero { fua, .. } => {
            let emulate = *fua && !info.native_fua;
            *fua &= info.native_fua;
            (op, emulate && info.volatile_cache)
        }
        Op::Read { .. } | Op::Unmap { .. } | Op::Map { .. } | Op::Flush => (op, false),
    }
}

#[cfg(test)]
mod tests;

//! [`Layer`], which a layer implements, and [`Dev`], the only way to call one.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use rt::buf::Bufs;

use crate::{
    BlockStatus, Blocks, ChangeTracker, Ctx, Error, METADATA_BYTES, METADATA_LBA, Op, drop_permit,
};

/// Properties of a device. Only [`Info::blocks`] changes while the device is open, and it only
/// grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Size of a logical block in bytes: 512 or 4096.
    pub block_size: u32,
    /// Size of the device in logical blocks.
    pub blocks: u64,
    /// Blocks of the metadata area, which starts at [`METADATA_LBA`]: those of [`METADATA_BYTES`],
    /// or none.
    pub metadata_blocks: u32,
    /// Size in bytes of an atomic unit of the medium; a multiple of `block_size`. Smaller or
    /// misaligned writes work, at a higher cost.
    pub physical_block_size: u32,
    /// Largest operation that carries data, in blocks; in bytes it fits a `u32`.
    pub max_transfer_blocks: u32,
    /// Granularity of [`Op::Unmap`] in blocks: smaller ranges keep their space and behave as
    /// `unmap_zeroes` says. 0 if no space can be freed.
    pub unmap_granularity_blocks: u32,
    /// Whether unmapped blocks read as zeroes.
    pub unmap_zeroes: bool,
    /// Whether completed writes may be lost at power loss until flushed. If not, every write is
    /// durable when it completes, and a flush does nothing.
    pub volatile_cache: bool,
    /// Whether the layer implements `fua`; otherwise [`Dev`] adds a flush.
    pub native_fua: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Memory in bytes that one operation may take from its credit in addition to its data (a
    /// read's rounded up to 4 KiB): a multiple of 4 KiB.
    pub overhead_bytes: u32,
}

impl Info {
    /// Size of the device in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_size))
    }

    /// Whether `range` is not empty and lies in the device or in the metadata area.
    #[must_use]
    pub fn contains(&self, range: Blocks) -> bool {
        let within = |first: u64, count: u64| {
            let last = first.checked_add(count);
            range.at.0 >= first && range.end().is_some_and(|end| last.is_some_and(|l| end <= l))
        };
        let aside = || within(METADATA_LBA.0, u64::from(self.metadata_blocks));
        range.count > 0 && (within(0, self.blocks) || aside())
    }

    fn is_consistent(&self) -> bool {
        let transfer = u64::from(self.max_transfer_blocks) * u64::from(self.block_size);
        matches!(self.block_size, 512 | 4096)
            && self.physical_block_size.is_multiple_of(self.block_size)
            && self.physical_block_size > 0
            && self.blocks <= METADATA_LBA.0
            && [0, METADATA_BYTES / self.block_size].contains(&self.metadata_blocks)
            && (1..=u64::from(u32::MAX)).contains(&transfer)
            && self.overhead_bytes.is_multiple_of(4096)
    }
}

/// A layer of a storage stack. It belongs to one core and is called only through [`Dev`].
///
/// The [crate documentation](crate) is the contract for both sides. In addition: the caller polls
/// every submitted operation to completion; the layer completes every operation in finite time
/// after its disks do, never panics on an `Op` that [`Dev`] let through, and passes on `ctx`.
pub trait Layer: 'static {
    /// Kind of layer, for logs and statistics.
    fn name(&self) -> &'static str;

    /// The device's current properties.
    fn info(&self) -> Info;

    /// Performs `op`. A read returns its data, [`Op::BlockStatus`] a [`BlockStatus`], everything
    /// else nothing.
    fn submit(&self, op: Op, ctx: Ctx) -> impl Future<Output = Result<Bufs, Error>>;
}

/// Object-safe form of [`Layer`].
trait DynLayer {
    fn name(&self) -> &'static str;
    fn info(&self) -> Info;
    fn submit(self: Rc<Self>, op: Op, ctx: Ctx) -> BoxedCompletion;
}

type BoxedCompletion = Pin<Box<dyn Future<Output = Result<Bufs, Error>>>>;

impl<L: Layer> DynLayer for L {
    fn name(&self) -> &'static str {
        Layer::name(self)
    }

    fn info(&self) -> Info {
        Layer::info(self)
    }

    fn submit(self: Rc<Self>, op: Op, ctx: Ctx) -> BoxedCompletion {
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

/// A device: checks range, alignment and limits of every operation, emulates FUA and counts, once
/// for all layers. Cheap to clone.
#[derive(Clone)]
pub struct Dev {
    layer: Rc<dyn DynLayer>,
    shared: Rc<Shared>,
}

#[derive(Default)]
struct Shared {
    stats: Cell<Stats>,
    change_tracker: ChangeTracker,
    /// Ranges in flight and whether each writes; in debug builds only.
    in_flight_ranges: RefCell<Vec<(Blocks, bool)>>,
}

impl Shared {
    fn update_stats(&self, f: impl FnOnce(&mut Stats)) {
        let mut s = self.stats.get();
        f(&mut s);
        self.stats.set(s);
    }
}

/// An operation in flight: poll it to completion. It may be moved.
pub struct Submission {
    in_flight: InFlight,
    completion: BoxedCompletion,
    /// Length of the expected answer in bytes.
    reply_bytes: usize,
    /// Context of the flush that follows, where FUA is emulated.
    fua_flush: Option<Ctx>,
}

impl Future for Submission {
    type Output = Result<Bufs, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            let result = ready!(this.completion.as_mut().poll(cx));
            if result.is_ok()
                && let Some(ctx) = this.fua_flush.take()
            {
                let dev = &this.in_flight.dev;
                dev.shared.update_stats(|s| s.flushes += 1);
                this.completion = Rc::clone(&dev.layer).submit(Op::Flush, ctx.shielded());
                continue;
            }
            this.in_flight.end(result.is_err());
            if let Ok(data) = &result {
                let name = this.in_flight.dev.name();
                assert_eq!(data.len(), this.reply_bytes, "{name} broke the contract");
            }
            return Poll::Ready(result);
        }
    }
}

impl Submission {
    /// Declares that the result will be ignored: other operations may read and write its range
    /// meanwhile. The operation must still be polled to completion.
    pub fn detach(&mut self) {
        self.in_flight.release_range();
    }
}

impl fmt::Debug for Submission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submission").field("dev", &self.in_flight.dev).finish_non_exhaustive()
    }
}

/// The accounting of one operation from start to completion.
struct InFlight {
    dev: Dev,
    range: Option<(Blocks, bool)>,
    completed: bool,
}

impl InFlight {
    fn begin(dev: &Dev, op: &Op, info: &Info, is_believed: bool) -> Self {
        let uses = is_believed && !matches!(op, Op::BlockStatus { .. });
        let range = op.range(info.block_size).filter(|_| uses).map(|r| (r, op.is_write()));
        if cfg!(debug_assertions)
            && let Some((new, writes)) = range
        {
            let mut ranges = dev.shared.in_flight_ranges.borrow_mut();
            let clash = ranges.iter().find(|(r, w)| (writes || *w) && r.overlaps(&new));
            assert!(clash.is_none(), "{op:?} on {} overlaps {clash:?} in flight", dev.name());
            ranges.push((new, writes));
        }
        dev.shared.update_stats(|s| {
            s.in_flight += 1;
            count_op(s, op, info.block_size);
        });
        Self { dev: dev.clone(), range, completed: false }
    }

    fn end(&mut self, failed: bool) {
        self.completed = true;
        self.dev.shared.update_stats(|s| s.errors += u64::from(failed));
    }

    fn release_range(&mut self) {
        if cfg!(debug_assertions)
            && let Some(range) = self.range.take()
        {
            let mut ranges = self.dev.shared.in_flight_ranges.borrow_mut();
            if let Some(i) = ranges.iter().position(|r| *r == range) {
                ranges.swap_remove(i);
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.dev.shared.update_stats(|s| s.in_flight -= 1);
        self.release_range();
        if !self.completed && drop_permit::is_drop_forbidden() {
            panic!("an operation on {} was dropped in flight", self.dev.name());
        }
    }
}

impl Dev {
    /// A device on `layer`.
    ///
    /// # Panics
    /// If the layer's [`Info`] contradicts itself.
    #[must_use]
    pub fn new(layer: impl Layer) -> Self {
        Self::shared(Rc::new(layer))
    }

    /// A device on a layer to which its owner keeps a handle.
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

    /// The device's current properties.
    #[must_use]
    pub fn info(&self) -> Info {
        self.layer.info()
    }

    /// The device's counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.stats.get()
    }

    /// The tracker of changes made through this handle and its clones.
    #[must_use]
    pub fn change_tracker(&self) -> ChangeTracker {
        self.shared.change_tracker.clone()
    }

    /// Performs `op`; poll it to completion.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a range outside the device, an empty one, more than
    /// [`Info::max_transfer_blocks`] of data or data that is not whole blocks; [`Error::ReadOnly`];
    /// [`Error::Aborted`] if an abort was requested before the start; what the layer reports.
    pub async fn submit(&self, op: Op, ctx: &Ctx) -> Result<Bufs, Error> {
        self.start(op, ctx)?.await
    }

    /// Starts `op`, as [`Self::submit`] does.
    ///
    /// # Errors
    /// Those of [`Self::submit`] that are found before the layer is called.
    pub fn start(&self, op: Op, ctx: &Ctx) -> Result<Submission, Error> {
        self.begin(op, ctx, true)
    }

    /// As [`Self::start`], for a read whose result may be discarded: its range is not checked
    /// against other operations in flight. For a layer whose caller may have
    /// [detached](Submission::detach) its own operation before the layer was polled.
    ///
    /// # Errors
    /// Those of [`Self::start`].
    pub fn start_detached(&self, op: Op, ctx: &Ctx) -> Result<Submission, Error> {
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
            Op::BlockStatus { .. } => BlockStatus::BYTES,
            _ => 0,
        };
        let flight = InFlight::begin(self, &op, &info, is_believed);
        self.shared.change_tracker.on_begin(&op, info.block_size);
        let (op, flush_after) = split_fua(op, &info);
        let flush = flush_after.then(|| ctx.clone());
        let running = Rc::clone(&self.layer).submit(op, ctx.clone());
        Ok(Submission {
            in_flight: flight,
            completion: running,
            reply_bytes: bytes,
            fua_flush: flush,
        })
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
        Op::BlockStatus { .. } => {}
        Op::Flush => s.flushes += 1,
    }
}

fn check(op: &Op, info: &Info) -> Result<(), Error> {
    if let Some(range) = op.range(info.block_size) {
        if !info.contains(range) {
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
    if op.is_write() && info.read_only {
        return Err(Error::ReadOnly);
    }
    Ok(())
}

/// Clears `fua` if the layer does not implement it; returns whether a flush must follow.
fn split_fua(mut op: Op, info: &Info) -> (Op, bool) {
    match &mut op {
        Op::Write { fua, .. } | Op::Zero { fua, .. } => {
            let emulate = *fua && !info.native_fua;
            *fua &= info.native_fua;
            (op, emulate && info.volatile_cache)
        }
        Op::Read { .. } | Op::Unmap { .. } | Op::BlockStatus { .. } | Op::Flush => (op, false),
    }
}

#[cfg(test)]
mod tests;

//! Discards: the metadata of many of them is made durable together.

use futures_util::stream;
use geometry::Redundancy;

use super::*;

/// A member whose operations take one millisecond of simulated time.
struct Timed {
    below: Dev,
    /// Number of flushes and FUA writes.
    durable: Rc<Cell<u64>>,
}

impl Layer for Timed {
    fn name(&self) -> &'static str {
        "timed"
    }

    fn info(&self) -> Info {
        self.below.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        if matches!(op, Op::Flush | Op::Write { fua: true, .. }) {
            self.durable.set(self.durable.get() + 1);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.below.submit(op, &ctx).await
    }
}

/// Frees extents, which takes as long as two disk operations.
#[derive(Debug, Default)]
struct FreeRecorder(RefCell<BTreeSet<u32>>);

impl ExtentAllocator for FreeRecorder {
    fn allocate(&self, _: u32) -> Pin<Box<dyn Future<Output = Result<Extent, Error>> + '_>> {
        Box::pin(std::future::ready(Err(Error::NoSpace)))
    }

    fn free(&self, index: u32) -> MetadataFuture<'_> {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            assert!(self.0.borrow_mut().insert(index), "it is given back once");
            Ok(())
        })
    }

    fn record_lost_rows(&self, _: u32, _: Range<u32>) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn record_rewritten_rows(&self, _: u32, _: Range<u32>) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn record_unrepaired_rows(&self, _: u32, _: Range<u32>) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The cost of an operation.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Flushes and FUA writes on all members.
    durable: u64,
    /// Length of the chain of dependent operations.
    chain: u64,
}

/// A thin RAID 5 volume with volatile caches, all of whose stripes were written by full-stripe
/// writes.
struct Bench {
    raid: Rc<RaidVolume>,
    room: Rc<FreeRecorder>,
    client: TestClient,
    ctx: Ctx,
    durable: Rc<Cell<u64>>,
}

const EXTENTS: u64 = 8;

impl Bench {
    async fn new() -> Self {
        let disks = TestDisks::sized(Redundancy::Parity, 5, 4, 4096, true, 4 << 20);
        disks.extents.replace(EXTENTS);
        disks.recover().await;
        let (durable, room) = (Rc::new(Cell::new(0)), Rc::new(FreeRecorder::default()));
        let counted = Rc::clone(&durable);
        let timed = move |_, below| Dev::new(Timed { below, durable: Rc::clone(&counted) });
        let array = disks.array(disks.book.generation.get(), timed, Mistake::None).await;
        let extents = disks.extents(&array).await;
        let settings = RaidSettings { is_thick: false, ..disks.settings() };
        let allocator: Rc<dyn ExtentAllocator> = Rc::<FreeRecorder>::clone(&room);
        let raid = Rc::new(RaidVolume::new(array, settings, (0..).zip(extents), allocator));
        let pool = BufferPool::new(MIN_POOL).unwrap();
        let credit = pool.account().try_credit(4096, block::MemoryClass::LocalIo).unwrap();
        let client = TestClient::new(&Dev::shared(Rc::clone(&raid)), &pool);
        let ctx = Ctx::new(credit, block::Epoch::default());
        let bench = Self { raid, room, client, ctx, durable };
        let blocks = bench.blocks();
        for at in (0..blocks).step_by(256) {
            bench.client.write(at, &vec![7; 256 * 4096], false).await.unwrap();
        }
        bench
    }

    fn blocks(&self) -> u64 {
        self.raid.info().blocks
    }

    /// Discards each of these ranges by an operation of its own, `at_once` at a time.
    async fn discard(&self, ranges: Vec<Blocks>, at_once: usize) -> Cost {
        let (durable, begun) = (self.durable.get(), tokio::time::Instant::now());
        let each = stream::iter(ranges).map(|range| {
            let blocks = u32::try_from(range.count).unwrap();
            self.raid.submit(Op::Unmap { at: range.at, blocks }, self.ctx.clone())
        });
        let outcomes: Vec<_> = each.buffer_unordered(at_once).collect().await;
        outcomes.into_iter().for_each(|outcome| drop(outcome.unwrap()));
        let chain = u64::try_from(begun.elapsed().as_millis()).unwrap();
        Cost { durable: self.durable.get() - durable, chain }
    }

    async fn expect_contents(&self, at: u64, byte: u8) {
        assert!(self.client.read(at, 1).await.unwrap().to_vec() == [byte; 4096], "block {at}");
    }
}

fn run_scene(scene: impl AsyncFnOnce()) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, scene());
}

/// A file system that trims freed space: single blocks, each in a stripe of its own.
#[test]
fn small_discards_share_log_batches_and_flushes() {
    run_scene(async || {
        let few = || (0..255u64).map(|n| Blocks::new(Lba(n * 16 + n % 16), 1)).collect::<Vec<_>>();
        let alone = Bench::new().await.discard(few(), 1).await;
        let bench = Bench::new().await;
        let together = bench.discard(few(), 64).await;
        assert!(together.durable * 4 < alone.durable, "{together:?} after {alone:?}");
        assert!(together.chain * 8 < alone.chain, "{together:?} after {alone:?}");
        for (at, byte) in [(0, 0), (1, 7), (17, 0), (16, 7), (254 * 16 + 14, 0)] {
            bench.expect_contents(at, byte).await;
        }
        assert!(bench.room.0.borrow().is_empty());
    });
}

#[test]
fn extents_freed_by_one_discard_are_released_together() {
    run_scene(async || {
        let bench = Bench::new().await;
        let each = bench.blocks() / EXTENTS;
        let one = bench.discard(vec![Blocks::new(Lba(0), each)], 1).await;
        // Includes the last block of one extent and the first of another.
        let (first, end) = (2 * each - 1, (EXTENTS - 1) * each + 1);
        let all = bench.discard(vec![Blocks::new(Lba(first), end - first)], 1).await;
        assert_eq!(bench.room.0.borrow().len() as u64, EXTENTS - 2, "but for the ends");
        assert!(all.chain < (EXTENTS - 3) * one.chain, "{all:?} after {one:?}");
        for (at, byte) in [(0, 0), (first - 1, 7), (first, 0), (end - 1, 0), (end, 7)] {
            bench.expect_contents(at, byte).await;
        }
    });
}

/// WRITE SAME of zeroes, or a discard on a thick volume: several full-stripe writes at a time.
#[test]
fn a_long_zero_write_uses_concurrent_full_stripes() {
    run_scene(async || {
        let bench = Bench::new().await;
        let zero = |blocks| Op::Zero { at: Lba(0), blocks, unmap: false, fua: false };
        let begun = tokio::time::Instant::now();
        bench.raid.submit(zero(1024), bench.ctx.clone()).await.unwrap();
        let chain = begun.elapsed().as_millis();
        // 64 stripes of 16 blocks. Each needs data, a flush and a log entry; there are free slots
        // for two.
        assert!(chain < 64 * 2, "{chain} one after the other");
        bench.expect_contents(1023, 0).await;
        bench.expect_contents(1024, 7).await;
    });
}

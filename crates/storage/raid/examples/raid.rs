//! The cost of RAID over disks in memory, for `./run bench raid`: one line of JSON for each case.
//!
//! Times are those of one thread that does nothing else. For 4 KiB, the layer's own time counts:
//! since no processor copies what a real disk transfers, these disks hand out memory that they
//! have, and ignore what they are given. For 1 MiB, the time is compared with that of the transfer,
//! so these disks copy, as disks in memory do, and are larger than caches. The client's data is
//! that of as many operations as it would have in flight, or of so many that it comes from memory.
//! Operations on disks are counted with 100 µs of simulated time for each, since requests that
//! arrive meanwhile share a batch of the log.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{
    BufferPool, Bufs, BufsMut, Credit, Ctx, Dev, Epoch, Error, Info, Layer, Lba, Mem, MemOptions,
    MemoryClass, Op, Stats,
};
use checksum::ChecksumLayer;
use checksum::format::{ChecksumOwner, DIRTY_LIST_BLOCKS};
use checksum::layout::{AREA_ROWS, COPIES, ChecksumLayout};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use geometry::{ALL_REGIONS, Column, RaidGeometry, Redundancy, RowChecksums};
use parity::Parity;
use raid::log_batch::RingId;
use raid::{
    Array, ArrayMember, Damage, DetachFuture, Extent, ExtentAllocator, MaintenancePace,
    MetadataFuture, PoolMetadata, RING_BLOCKS, RaidSettings, RaidVolume, for_contiguous_runs,
    stripe_map_format,
};
use serde_json::json;
use uuid::Uuid;

const STRIP_ROWS: u32 = 16;
const STRIPES: u32 = 512;
const BLOCK: u64 = 4096;

/// Blocks of a disk outside of the volume.
const RAW_BLOCKS: u64 = STRIPES as u64 * STRIP_ROWS as u64;

/// Number of rounds, in which volume and bare disks take turns.
const ROUNDS: u32 = 5;

/// Records nothing: no member fails.
#[derive(Debug)]
struct NullMetadata;

impl PoolMetadata for NullMetadata {
    fn detach_member(&self, _: u16) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Err(Error::Gone)))
    }

    fn mark_regions_stale(&self, _: u64, _: u32) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn detach_unresponsive(&self, _: u16, _: u128) -> DetachFuture<'_> {
        Box::pin(std::future::ready(Ok(false)))
    }

    fn set_slow(&self, _: u16, _: bool) {}

    fn report_damage(&self, _: Damage) {}
}

impl ExtentAllocator for NullMetadata {
    fn allocate(&self, _: u32) -> Pin<Box<dyn Future<Output = Result<Extent, Error>> + '_>> {
        Box::pin(std::future::ready(Err(Error::NoSpace)))
    }

    fn free(&self, _: u32) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn record_lost_rows(&self, _: u32, _: std::ops::Range<u32>) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn record_rewritten_rows(&self, _: u32, _: std::ops::Range<u32>) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn record_unrepaired_rows(&self, _: u32, _: std::ops::Range<u32>) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Bytes of the largest operation.
const LONGEST: usize = 1 << 20;

/// The memory of a disk.
enum Memory {
    /// All of its contents: data is copied in and out.
    Copied(RefCell<Pages>),
    /// Some data for all reads, shared; written data is ignored.
    Shared(Bufs),
}

/// Page-aligned memory, as a disk in memory has: copies to other memory take longer.
struct Pages {
    memory: Vec<u8>,
    skip: usize,
}

impl Pages {
    fn new(bytes: usize) -> Self {
        // Zeroes, with all pages resident.
        let mut memory = vec![7; bytes + BLOCK as usize];
        memory.fill(0);
        let skip = memory.as_ptr().align_offset(BLOCK as usize);
        Self { memory, skip }
    }

    fn from(&mut self, at: usize) -> &mut [u8] {
        &mut self.memory[self.skip + at..]
    }
}

/// A disk in memory.
struct Ram {
    info: Info,
    memory: Memory,
}

impl Ram {
    fn new(blocks: u64, copies: bool, pool: &BufferPool) -> Self {
        let info = Mem::new(MemOptions::new(4096, blocks)).info();
        let memory = match copies {
            true => Memory::Copied(RefCell::new(Pages::new((blocks * BLOCK) as usize))),
            false => Memory::Shared(filled(&credit(pool, LONGEST), LONGEST)),
        };
        Self { info, memory }
    }

    fn read(&self, at: usize, len: usize, ctx: &Ctx) -> Bufs {
        match &self.memory {
            Memory::Shared(memory) => memory.slice(0..len),
            Memory::Copied(memory) => {
                let (mut memory, mut copy) = (memory.borrow_mut(), ctx.alloc(len));
                let mut rest = &*memory.from(at);
                for part in &mut copy {
                    let found;
                    (found, rest) = rest.split_at(part.len());
                    part.copy_from_slice(found);
                }
                copy.into()
            }
        }
    }

    fn write(&self, at: usize, data: &Bufs) {
        if let Memory::Copied(memory) = &self.memory {
            data.copy_to(&mut memory.borrow_mut().from(at)[..data.len()]);
        }
    }
}

fn credit(pool: &BufferPool, bytes: usize) -> Credit {
    pool.account().try_credit(bytes, MemoryClass::LocalIo).expect("memory")
}

fn filled(credit: &Credit, len: usize) -> Bufs {
    let mut memory = credit.alloc(len);
    memory.iter_mut().for_each(|part| part.fill(7));
    memory.into()
}

impl Layer for Ram {
    fn name(&self) -> &'static str {
        "ram"
    }

    fn info(&self) -> Info {
        self.info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let offset = |at: Lba| at.0 as usize * BLOCK as usize;
        match op {
            Op::Read { at, blocks } => {
                return Ok(self.read(offset(at), blocks as usize * BLOCK as usize, &ctx));
            }
            Op::Write { at, data, .. } => self.write(offset(at), &data),
            _ => {}
        }
        Ok(Bufs::new())
    }
}

/// Simulated time is this many times slower than what it stands for, since timers count
/// milliseconds.
const SLOWER: f64 = 100.0;

/// Latency of an operation on a slow disk, beside its transfer: 100 µs.
const LATENCY: Duration = Duration::from_millis(10);

/// Bandwidth of a slow disk per second: 2 GB.
const BANDWIDTH: f64 = 2e9 / SLOWER;

/// A disk with latency and limited bandwidth.
struct Slow(Dev, Cell<Option<tokio::time::Instant>>);

impl Layer for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn info(&self) -> Info {
        self.0.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let bytes = op.range(4096).map_or(0, |range| range.count * BLOCK);
        let begins = self.1.get().unwrap_or_else(tokio::time::Instant::now);
        let begins = begins.max(tokio::time::Instant::now());
        let ends = begins + Duration::from_secs_f64(bytes as f64 / BANDWIDTH);
        self.1.set(Some(ends));
        tokio::time::sleep_until(ends + LATENCY).await;
        self.0.submit(op, &ctx).await
    }
}

const STRIP_BYTES: usize = STRIP_ROWS as usize * BLOCK as usize;

/// Full stripes with their parities, written to disks by the same kernels without anything else:
/// the lower bound for any RAID.
struct Plain {
    info: Info,
    disks: Vec<Dev>,
    parities: usize,
    at: u64,
}

impl Plain {
    fn new(scene: &Scene, parities: usize) -> Self {
        let blocks = RAW_BLOCKS * (scene.disks.len() - parities) as u64;
        let info = Mem::new(MemOptions::new(4096, blocks)).info();
        Self { info, disks: scene.disks.clone(), parities, at: scene.bare_at }
    }

    fn parities_of(&self, strips: &[Bufs], ctx: &Ctx) -> Vec<Bufs> {
        let mut parities: Vec<BufsMut> =
            (0..self.parities).map(|_| ctx.alloc(STRIP_BYTES)).collect();
        for_contiguous_runs(strips, &mut parities, |data, parities| match parities {
            [p, q] => Parity::best().pq(data, p, q),
            parities => parities.iter_mut().for_each(|p| Parity::best().xor(data, p)),
        });
        parities.into_iter().map(Bufs::from).collect()
    }
}

impl Layer for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn info(&self) -> Info {
        self.info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let Op::Write { at, data, .. } = op else { return Err(Error::Gone) };
        let width = self.disks.len() - self.parities;
        let mut row = self.at + at.0 / width as u64;
        for begin in (0..data.len()).step_by(width * STRIP_BYTES) {
            let strips = (begin..).step_by(STRIP_BYTES).take(width);
            let mut strips: Vec<Bufs> =
                strips.map(|begin| data.slice(begin..begin + STRIP_BYTES)).collect();
            strips.extend(self.parities_of(&strips, &ctx));
            for (disk, data) in self.disks.iter().zip(strips) {
                disk.submit(Op::Write { at: Lba(row), data, fua: false }, &ctx).await?;
            }
            row += u64::from(STRIP_ROWS);
        }
        Ok(Bufs::new())
    }
}

/// A kind of volume to measure.
struct Kind {
    name: &'static str,
    level: Redundancy,
    columns: u16,
    checks: bool,
}

const KINDS: [Kind; 3] = [
    Kind { name: "RAID 5, 4+1", level: Redundancy::Parity, columns: 5, checks: false },
    Kind { name: "RAID 6, 4+2", level: Redundancy::DoubleParity, columns: 6, checks: false },
    Kind { name: "RAID 5, 4+1, checksums", level: Redundancy::Parity, columns: 5, checks: true },
];

/// A volume and the disks below it.
struct Scene {
    dev: Dev,
    raid: Rc<RaidVolume>,
    disks: Vec<Dev>,
    /// The first of the blocks that are in no volume: as many as an extent has.
    bare_at: u64,
    pool: BufferPool,
}

impl Scene {
    async fn new(kind: &Kind, copies: bool, is_slow: bool) -> Self {
        let Kind { level, columns, checks, .. } = *kind;
        let pool = BufferPool::new(1 << 30).expect("memory");
        let geometry =
            RaidGeometry::new(level, columns, STRIP_ROWS, STRIPES).expect("a possible geometry");
        let maps = 2 * u64::from(stripe_map_format::map_rows(&geometry));
        let rows = u64::from(geometry.slots()) * u64::from(STRIP_ROWS) + maps;
        let unit = u32::try_from(rows).expect("few") + COPIES * (rows as u32 / AREA_ROWS + 1);
        let layout = ChecksumLayout { first_row: RING_BLOCKS, unit_rows: unit, units: 1 };
        let list_at = RING_BLOCKS + u64::from(unit);
        let bare_at = list_at + DIRTY_LIST_BLOCKS;
        let disk = || {
            // Unwritten blocks must be zeroes if they are checked.
            let ram = Ram::new(bare_at + RAW_BLOCKS, copies || checks, &pool);
            if is_slow { Dev::new(Slow(Dev::new(ram), Cell::new(None))) } else { Dev::new(ram) }
        };
        let disks: Vec<Dev> = (0..columns).map(|_| disk()).collect();
        let array = Array::new(1, Rc::new(NullMetadata), &pool).await.expect("an array");
        for (n, disk) in (0u16..).zip(&disks) {
            let member_id = Uuid::from_u128(n.into());
            let (mut dev, mut checksums) = (disk.clone(), None);
            if checks {
                let owner = ChecksumOwner { pool: Uuid::nil(), member: member_id, ring: 0 };
                let (memory, corrupt_reads) = (pool.account(), Arc::default());
                let layer =
                    ChecksumLayer::new(dev, layout, (owner, ""), list_at, &memory, corrupt_reads)
                        .await;
                let layer = Rc::new(layer.expect("checksums"));
                (dev, checksums) =
                    (Dev::shared(Rc::clone(&layer)), Some(layer as Rc<dyn RowChecksums>));
            }
            let ring = RingId { pool: Uuid::nil(), member: member_id, generation: 1, number: 0 };
            let counters = Arc::default();
            let member = ArrayMember {
                dev,
                ring,
                ring_lba: Lba(0),
                is_detached: false,
                counters,
                checksums,
            };
            array.set_member(n, member).expect("a new one");
        }
        let column = |member| Column { member, first_row: RING_BLOCKS };
        let extent = Extent::new(1, geometry, (0..columns).map(column));
        let bytes = geometry.total_rows() * BLOCK;
        let settings = RaidSettings { geometry, block_size: 4096, bytes, is_thick: true };
        let raid = RaidVolume::new(Rc::new(array), settings, [(0, extent)], Rc::new(NullMetadata));
        let raid = Rc::new(raid);
        Self { dev: Dev::shared(Rc::clone(&raid)), raid, disks, bare_at, pool }
    }

    fn ctx(&self) -> Ctx {
        Ctx::new(credit(&self.pool, 4 << 20), Epoch::default())
    }

    fn stats(&self) -> Stats {
        self.disks.iter().map(Dev::stats).fold(Stats::default(), |sum, s| Stats {
            reads: sum.reads + s.reads,
            read_bytes: sum.read_bytes + s.read_bytes,
            writes: sum.writes + s.writes,
            write_bytes: sum.write_bytes + s.write_bytes,
            ..sum
        })
    }
}

/// The position of the next operation: random, but never that of another.
struct Places {
    seed: Cell<u64>,
    count: u64,
    step: u64,
    is_random: bool,
}

impl Places {
    fn new(dev: &Dev, bytes: u64, is_random: bool) -> Self {
        let step = bytes / BLOCK;
        Self { seed: Cell::new(1), count: dev.info().blocks / step, step, is_random }
    }

    fn next(&self) -> u64 {
        // Visits each number once before any repeats: a full cycle modulo the next power of two.
        loop {
            let modulus = self.count.next_power_of_two();
            let factor = if self.is_random { (0x5_DEEC_E66D % modulus) | 5 } else { 1 };
            let next = (self.seed.get().wrapping_mul(factor / 4 * 4 + 1) + 1) % modulus;
            self.seed.set(next);
            if next < self.count {
                return next * self.step;
            }
        }
    }
}

fn op(at: u64, bytes: u64, is_write: bool, ctx: &Ctx) -> Op {
    match is_write {
        true => Op::Write { at: Lba(at), data: ctx.alloc(bytes as usize).into(), fua: false },
        false => Op::Read { at: Lba(at), blocks: (bytes / BLOCK) as u32 },
    }
}

/// Number of operations whose data a client has: few enough to stay in caches,
const FEW: usize = 8;
/// or too many.
const MANY: usize = 64;

/// A client with the data of several operations; it uses the least recently used one each time.
struct Client {
    ctx: Ctx,
    bytes: u64,
    is_write: bool,
    data: RefCell<VecDeque<Bufs>>,
}

impl Client {
    fn new(scene: &Scene, bytes: u64, is_write: bool, operations: usize) -> Self {
        let credit = credit(&scene.pool, operations * bytes as usize + (4 << 20));
        let data = (0..operations).map(|_| filled(&credit, bytes as usize)).collect();
        let ctx = Ctx::new(credit, Epoch::default());
        Self { ctx, bytes, is_write, data: RefCell::new(data) }
    }

    async fn ask(&self, dev: &Dev, at: u64) {
        let oldest = self.data.borrow_mut().pop_front().expect("data");
        let (op, kept) = match self.is_write {
            true => (Op::Write { at: Lba(at), data: oldest.clone(), fua: false }, Some(oldest)),
            // Its memory is used for the next one.
            false => (Op::Read { at: Lba(at), blocks: (self.bytes / BLOCK) as u32 }, None),
        };
        let found = dev.submit(op, &self.ctx).await.expect("an operation");
        self.data.borrow_mut().push_back(kept.unwrap_or(found));
    }
}

/// Microseconds per operation, without concurrency.
#[derive(Default)]
struct Times {
    volume: f64,
    /// On bare disks, in turn.
    bare: f64,
    /// Of a large write with its parities and nothing else.
    plain: Option<f64>,
}

async fn times(client: &Client, scene: &Scene, parities: usize, seconds: f64) -> Times {
    let step = client.bytes / BLOCK;
    let places = Places::new(&scene.dev, client.bytes, client.bytes == BLOCK);
    let mut of_volume = std::iter::repeat_with(|| (&scene.dev, places.next()));
    let bare = (0..RAW_BLOCKS / step).map(|n| scene.bare_at + n * step);
    let of_disks = bare.flat_map(|at| scene.disks.iter().map(move |disk| (disk, at)));
    let mut of_disks = of_disks.cycle();
    let plain = Dev::new(Plain::new(scene, parities));
    let stripes = Places::new(&plain, client.bytes, false);
    let mut of_stripes = std::iter::repeat_with(|| (&plain, stripes.next()));
    let mut times = Times::default();
    // In turn, because a machine's speed varies.
    for _ in 0..ROUNDS {
        let (seconds, turns) = (seconds / f64::from(ROUNDS), f64::from(ROUNDS));
        times.volume += time(client, &mut of_volume, seconds).await / turns;
        times.bare += time(client, &mut of_disks, seconds).await / turns;
        if client.is_write && client.bytes > BLOCK {
            let us = time(client, &mut of_stripes, seconds).await / turns;
            *times.plain.get_or_insert_default() += us;
        }
    }
    times
}

async fn time<'a>(
    client: &Client,
    asked: &mut impl Iterator<Item = (&'a Dev, u64)>,
    seconds: f64,
) -> f64 {
    let (begun, mut count) = (tokio::time::Instant::now(), 0u32);
    while begun.elapsed().as_secs_f64() < seconds {
        for (dev, at) in asked.take(64) {
            client.ask(dev, at).await;
        }
        count += 64;
    }
    begun.elapsed().as_secs_f64() * 1e6 / f64::from(count)
}

/// Disk operations and bytes per client operation, at this depth.
async fn counted(scene: &Scene, bytes: u64, depth: usize) -> serde_json::Value {
    let places = Places::new(&scene.dev, bytes, bytes == BLOCK);
    let mut running = FuturesUnordered::new();
    let (before, count) = (scene.stats(), 4000 * BLOCK / bytes.min(64 * BLOCK));
    for _ in 0..count {
        if running.len() >= depth {
            running.next().await;
        }
        let (at, dev, ctx) = (places.next(), scene.dev.clone(), scene.ctx());
        running
            .push(async move { dev.submit(op(at, bytes, true, &ctx), &ctx).await.expect("write") });
    }
    while running.next().await.is_some() {}
    let (after, each) = (scene.stats(), |n: u64| n as f64 / count as f64);
    json!({
        "reads": each(after.reads - before.reads),
        "writes": each(after.writes - before.writes),
        "read_bytes": each(after.read_bytes - before.read_bytes) / bytes as f64,
        "written_bytes": each(after.write_bytes - before.write_bytes) / bytes as f64,
    })
}

/// Microseconds of small operations, one at a time, while `goes_on`: the mean and the longest.
async fn one_by_one(scene: &Scene, goes_on: impl Fn(u32) -> bool) -> (f64, f64) {
    let places = Places::new(&scene.dev, BLOCK, true);
    let (begun, mut longest, mut count, ctx) =
        (tokio::time::Instant::now(), 0f64, 0u32, scene.ctx());
    while goes_on(count) {
        let one = tokio::time::Instant::now();
        let op = op(places.next(), BLOCK, count % 2 == 0, &ctx);
        scene.dev.submit(op, &ctx).await.expect("an operation");
        longest = longest.max(one.elapsed().as_secs_f64() * 1e6);
        count += 1;
    }
    let mean = begun.elapsed().as_secs_f64() * 1e6 / f64::from(count);
    (mean / SLOWER, longest / SLOWER)
}

/// What a client sees during the rebuild of a column, and how long the disk would need to write
/// that column.
async fn rebuild(kind: &Kind) -> serde_json::Value {
    let scene = Scene::new(kind, false, true).await;
    let normal = one_by_one(&scene, |count| count < 4000).await;
    scene.raid.extent(0).expect("an extent").add_stale_regions(0, ALL_REGIONS);
    let (raid, begun) = (Rc::clone(&scene.raid), tokio::time::Instant::now());
    let rebuilding = tokio::task::spawn_local(async move {
        let report =
            raid.rebuild(0, MaintenancePace { rest_factor: 0.5 }).await.expect("a rebuild");
        assert_eq!(report.failed_stripes, 0);
    });
    let busy = one_by_one(&scene, |_| !rebuilding.is_finished()).await;
    rebuilding.await.expect("a rebuild");
    let bytes = u64::from(STRIP_ROWS) * u64::from(STRIPES) * BLOCK;
    json!({
        "normal_us": normal.0, "busy_us": busy.0, "longest_us": busy.1,
        "rebuild_ms": begun.elapsed().as_secs_f64() * 1e3 / SLOWER,
        "stream_ms": bytes as f64 / BANDWIDTH * 1e3 / SLOWER,
    })
}

fn run<F: Future>(is_paused: bool, work: F) -> F::Output {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(is_paused).build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, work)
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(1.0);
    for kind in &KINDS {
        let name = kind.name;
        for (what, bytes, is_write, operations) in [
            ("read", BLOCK, false, FEW),
            ("write", BLOCK, true, FEW),
            ("read", 1 << 20, false, FEW),
            ("write", 1 << 20, true, FEW),
            ("read", 1 << 20, false, MANY),
            ("write", 1 << 20, true, MANY),
        ] {
            let times = run(false, async {
                let scene = Scene::new(kind, bytes > BLOCK, false).await;
                let client = Client::new(&scene, bytes, is_write, operations);
                times(&client, &scene, kind.level.parity_strips().into(), seconds).await
            });
            println!(
                "{}",
                json!({
                    "level": name, "op": what, "bytes": bytes, "operations": operations,
                    "us": times.volume, "raw_us": times.bare, "plain_us": times.plain,
                })
            );
        }
        let rebuilt = run(true, rebuild(kind));
        println!("{}", json!({ "level": name, "bytes": BLOCK, "rebuild": rebuilt }));
        for (bytes, depth) in [(BLOCK, 1), (BLOCK, 32), (BLOCK, 128), (1 << 20, 1), (1 << 20, 8)] {
            let counts = run(true, async {
                let scene = Scene::new(kind, false, true).await;
                counted(&scene, bytes, depth).await
            });
            println!(
                "{}",
                json!({ "level": name, "bytes": bytes, "depth": depth, "counts": counts })
            );
        }
    }
}

//! What RAID costs above disks in memory, for `./run bench raid`: one line of JSON for each case.
//!
//! Time is that of one thread which does nothing else. Of 4 KiB the layer's own time counts: as nobody's processor copies what a disk
//! moves, these disks hand over memory that they have, and take what they are given without a look. Of 1 MiB it is compared with
//! what is moved, so they copy it, as disks in memory do. Operations on disks
//! are counted where each takes 100 µs of simulated time, as what comes meanwhile shares a batch of the log.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{
    Bufs, Class, Ctx, Dev, Epoch, Error, Info, Layer, Lba, Mem, MemOptions, Op, Pool, Stats,
};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use layers::raid::batch::Ring;
use layers::raid::geometry::{Level, Shape};
use layers::raid::{
    ALL_REGIONS, Answered, Array, Column, Extent, Keeper, Kept, Member, Pace, RING_BLOCKS, Raid,
    Room, Settings, stored_map,
};
use serde_json::json;
use uuid::Uuid;

const STRIP_ROWS: u32 = 16;
const STRIPES: u32 = 128;
const BLOCK: u64 = 4096;

/// Nobody keeps anything: no member fails.
#[derive(Debug)]
struct Nobody;

impl Keeper for Nobody {
    fn out(&self, _: u16) -> Kept<'_> {
        Box::pin(std::future::ready(Err(Error::Gone)))
    }

    fn changed(&self, _: u64, _: u32) -> Kept<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn gives_up(&self, _: u16, _: u128) -> Answered<'_> {
        Box::pin(std::future::ready(Ok(false)))
    }

    fn slow(&self, _: u16, _: bool) {}
}

impl Room for Nobody {
    fn extent(&self, _: u32) -> Pin<Box<dyn Future<Output = Result<Extent, Error>> + '_>> {
        Box::pin(std::future::ready(Err(Error::NoSpace)))
    }

    fn free(&self, _: u32) -> Kept<'_> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Memory of a disk: what it holds at an address is what it holds so many bytes further on.
const MEMORY: usize = 8 << 20;

/// A disk of memory.
struct Ram {
    info: Info,
    memory: Bufs,
    /// What is written, if that is copied, and what is read as well.
    copies: Option<RefCell<Vec<u8>>>,
}

impl Ram {
    fn new(blocks: u64, copies: bool, pool: &Pool) -> Self {
        let info = Mem::new(MemOptions::new(4096, blocks)).info();
        let credit = pool.account().try_credit(MEMORY, Class::Immediate).expect("memory");
        let mut memory = credit.alloc(MEMORY);
        memory.iter_mut().for_each(|part| part.fill(7));
        let copies = copies.then(|| RefCell::new(vec![7; MEMORY]));
        Self { info, memory: memory.into(), copies }
    }

    fn read(&self, at: usize, len: usize, ctx: &Ctx) -> Bufs {
        let found = self.memory.slice(at..at + len);
        if self.copies.is_none() {
            return found;
        }
        let (mut copy, mut done) = (ctx.alloc(len), 0);
        for part in &mut copy {
            let end = done + part.len();
            found.slice(done..end).copy_to(part);
            done = end;
        }
        copy.into()
    }
}

impl Layer for Ram {
    fn name(&self) -> &'static str {
        "ram"
    }

    fn info(&self) -> Info {
        self.info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        // Nothing is longer than 1 MiB.
        let place = |at: Lba| at.0 as usize * BLOCK as usize % (MEMORY - (1 << 20));
        match op {
            Op::Read { at, blocks } => {
                return Ok(self.read(place(at), blocks as usize * BLOCK as usize, &ctx));
            }
            Op::Write { at, data, .. } => {
                if let Some(copies) = &self.copies {
                    let start = place(at);
                    data.copy_to(&mut copies.borrow_mut()[start..start + data.len()]);
                }
            }
            _ => {}
        }
        Ok(Bufs::new())
    }
}

/// Simulated time goes so many times slower than what it stands for: timers count milliseconds.
const SLOWER: f64 = 100.0;

/// What a slow disk takes for an operation, beside moving its bytes one operation after the other: 100 µs.
const LATENCY: Duration = Duration::from_millis(10);

/// Bytes that a slow disk moves in a second: 2 GB.
const BANDWIDTH: f64 = 2e9 / SLOWER;

/// A disk that takes its time.
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

/// A volume and the disks below it.
struct Scene {
    dev: Dev,
    raid: Rc<Raid>,
    disks: Vec<Dev>,
    pool: Pool,
}

impl Scene {
    async fn new(level: Level, columns: u16, copies: bool, is_slow: bool) -> Self {
        let pool = Pool::new(1 << 30).expect("memory");
        let shape = Shape::new(level, columns, STRIP_ROWS, STRIPES).expect("a shape");
        let maps = 2 * u64::from(stored_map::rows(&shape));
        let rows = u64::from(shape.places()) * u64::from(STRIP_ROWS) + maps;
        let disk = || {
            let ram = Dev::new(Ram::new(RING_BLOCKS + rows, copies, &pool));
            if is_slow { Dev::new(Slow(ram, Cell::new(None))) } else { ram }
        };
        let disks: Vec<Dev> = (0..columns).map(|_| disk()).collect();
        let member = |(n, dev): (u128, &Dev)| Member {
            dev: dev.clone(),
            ring: Ring { pool: Uuid::nil(), member: Uuid::from_u128(n), era: 1, number: 0 },
            ring_at: Lba(0),
            is_out: false,
            errors: Arc::default(),
            integrity: None,
        };
        let array = Array::new(1, Rc::new(Nobody), &pool).await.expect("an array");
        let members = (0u128..).zip(&disks).map(member);
        (0u16..).zip(members).for_each(|(n, member)| array.put(n, member).expect("a new one"));
        let column = |member| Column { member, at: RING_BLOCKS };
        let extent = Extent::new(1, shape, (0..columns).map(column));
        let bytes = shape.rows() * BLOCK;
        let settings = Settings { shape, block_size: 4096, bytes, thick: true };
        let raid = Raid::new(Rc::new(array), settings, [(0, extent)], Rc::new(Nobody));
        let raid = Rc::new(raid);
        Self { dev: Dev::shared(Rc::clone(&raid)), raid, disks, pool }
    }

    fn ctx(&self) -> Ctx {
        let credit = self.pool.account().try_credit(4 << 20, Class::Immediate);
        Ctx::new(credit.expect("memory"), Epoch::default())
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

/// Where the next operation begins: at random, but not where another is.
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
        // Each number once before any comes again: a full cycle modulo the next power of two.
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

/// Microseconds of one operation, which waits for nothing.
async fn time(dev: &Dev, ctx: &Ctx, bytes: u64, is_write: bool, seconds: f64) -> f64 {
    let places = Places::new(dev, bytes, bytes == BLOCK);
    let (begun, mut count) = (tokio::time::Instant::now(), 0u32);
    while begun.elapsed().as_secs_f64() < seconds {
        for _ in 0..64 {
            let op = op(places.next(), bytes, is_write, ctx);
            dev.submit(op, ctx).await.expect("an operation");
            count += 1;
        }
    }
    begun.elapsed().as_secs_f64() * 1e6 / f64::from(count)
}

/// The same bytes by strips on one disk after the other, in microseconds.
async fn time_raw(scene: &Scene, bytes: u64, is_write: bool, seconds: f64) -> f64 {
    let strip = u64::from(STRIP_ROWS) * BLOCK;
    let (ctx, each) = (scene.ctx(), bytes.min(strip));
    let (begun, mut count, mut row) = (tokio::time::Instant::now(), 0u32, 0);
    let rows = u64::from(STRIPES) * u64::from(STRIP_ROWS);
    while begun.elapsed().as_secs_f64() < seconds {
        for disk in scene.disks.iter().cycle().take(64 * (bytes / each) as usize) {
            row = (row + each / BLOCK * 7) % rows;
            let op = op(RING_BLOCKS + row / (each / BLOCK) * (each / BLOCK), each, is_write, &ctx);
            disk.submit(op, &ctx).await.expect("an operation");
        }
        count += 64;
    }
    begun.elapsed().as_secs_f64() * 1e6 / f64::from(count)
}

/// Operations and bytes of disks for each of a client's, so many at a time.
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

/// Microseconds of small operations one after the other, as long as `goes_on`: the mean, and the longest.
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

/// What a client sees while a column is rebuilt, in whose time the disk could have written so many of it.
async fn rebuild(level: Level, columns: u16) -> serde_json::Value {
    let scene = Scene::new(level, columns, false, true).await;
    let normal = one_by_one(&scene, |count| count < 4000).await;
    scene.raid.extent(0).expect("an extent").lacks_also(0, ALL_REGIONS);
    let (raid, begun) = (Rc::clone(&scene.raid), tokio::time::Instant::now());
    let rebuilding = tokio::task::spawn_local(async move {
        let rebuilt = raid.rebuild(0, Pace { rest: 0.5 }).await.expect("a rebuild");
        assert_eq!(rebuilt.failed, 0);
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
    let levels = [("RAID 5, 4+1", Level::Parity, 5), ("RAID 6, 4+2", Level::DoubleParity, 6)];
    for (name, level, columns) in levels {
        for (what, bytes, is_write) in [
            ("read", BLOCK, false),
            ("write", BLOCK, true),
            ("read", 1 << 20, false),
            ("write", 1 << 20, true),
        ] {
            let us = run(false, async {
                let scene = Scene::new(level, columns, bytes > BLOCK, false).await;
                let raw = time_raw(&scene, bytes, is_write, seconds).await;
                let ctx = scene.ctx();
                (time(&scene.dev, &ctx, bytes, is_write, seconds).await, raw)
            });
            println!(
                "{}",
                json!({ "level": name, "op": what, "bytes": bytes, "us": us.0, "raw_us": us.1 })
            );
        }
        let rebuilt = run(true, rebuild(level, columns));
        println!("{}", json!({ "level": name, "bytes": BLOCK, "rebuild": rebuilt }));
        for (bytes, depth) in [(BLOCK, 1), (BLOCK, 32), (BLOCK, 128), (1 << 20, 1), (1 << 20, 8)] {
            let counts = run(true, async {
                let scene = Scene::new(level, columns, false, true).await;
                counted(&scene, bytes, depth).await
            });
            println!(
                "{}",
                json!({ "level": name, "bytes": bytes, "depth": depth, "counts": counts })
            );
        }
    }
}

//! Volumes on pools in memory: the suite of every layer, with members lost and power cut in the middle of everything.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use block::testing::conformance::{self, MIN_BYTES, MIN_POOL, Subject};
use block::testing::faulty::{Effect, Faulty, Kind, Rule};
use block::testing::register::{Checker, Initially, Loss};
use block::testing::workload::Workload;
use block::testing::{Client, Rng};
use block::{Dev, Lba, Mem, MemOptions, Pool};
use futures_util::StreamExt;
use uuid::Uuid;

use super::batch::Ring;
use super::geometry::Level;
use super::*;

/// Where extents begin on a member.
const DATA_AT: u64 = RING_BLOCKS;

/// What is known of a pool, whatever becomes of its process.
#[derive(Debug, Default)]
struct Book {
    /// Members that are out.
    out: RefCell<Vec<u16>>,
    era: Cell<u64>,
    /// A member that is being filled, and the extents whose column it has.
    filling: RefCell<Option<(u16, BTreeSet<u64>)>>,
    /// How many members have been filled.
    filled: Cell<u64>,
    /// Where stripes lie, as far as that is durable.
    maps: RefCell<BTreeMap<u64, Map>>,
}

impl Keeper for Rc<Book> {
    fn out(&self, member: u16) -> std::pin::Pin<Box<dyn Future<Output = Result<(), Error>> + '_>> {
        self.out.borrow_mut().push(member);
        self.filling.borrow_mut().take_if(|(filling, _)| *filling == member);
        Box::pin(std::future::ready(Ok(())))
    }

    fn map(
        &self,
        extent: u64,
        map: Map,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<(), Error>> + '_>> {
        self.maps.borrow_mut().insert(extent, map);
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A pool of disks in memory.
struct Disks {
    shape: Shape,
    block_size: u32,
    mems: RefCell<Vec<Rc<Mem>>>,
    options: MemOptions,
    book: Rc<Book>,
    extents: RefCell<u64>,
    scratch: Pool,
}

impl Disks {
    fn new(level: Level, columns: u16, strip_rows: u32, block_size: u32, volatile: bool) -> Self {
        Self::sized(level, columns, strip_rows, block_size, volatile, 2 << 20)
    }

    /// With extents of so many bytes, or a little more.
    fn sized(
        level: Level,
        columns: u16,
        strip_rows: u32,
        block_size: u32,
        volatile: bool,
        bytes: u64,
    ) -> Self {
        let shape = Shape::new(level, columns, strip_rows, 1).unwrap();
        let stripes = bytes.div_ceil(shape.stripe_rows() * u64::from(ROW_BYTES));
        let shape = Shape::new(level, columns, strip_rows, stripes as u32).unwrap();
        let blocks = DATA_AT + 8 * u64::from(shape.places()) * u64::from(strip_rows);
        let options = MemOptions { volatile_cache: volatile, ..MemOptions::new(4096, blocks) };
        let mems = (0..columns).map(|_| Rc::new(Mem::new(options))).collect();
        let scratch = Pool::new(16 << 20).unwrap();
        let mems = RefCell::new(mems);
        Self {
            shape,
            block_size,
            mems,
            options,
            book: Rc::default(),
            extents: RefCell::new(3),
            scratch,
        }
    }

    fn count(&self) -> usize {
        self.mems.borrow().len()
    }

    fn extent(&self, number: u64) -> Extent {
        let rows = u64::from(self.shape.places()) * u64::from(self.shape.strip_rows());
        let count = self.count() as u64;
        // Columns of an extent are on other members than those of the one before.
        let column =
            |n: u64| Column { member: ((n + number) % count) as u16, at: DATA_AT + number * rows };
        let extent = Extent::new(number, self.shape, (0..count).map(column));
        let extent = match self.book.maps.borrow().get(&number) {
            Some(map) => extent
                .mapped(Map::of(map.era(), map.stripes().to_vec(), self.shape.places()).unwrap()),
            None => extent,
        };
        match &*self.book.filling.borrow() {
            Some((member, filled)) if !filled.contains(&number) => {
                let lacks = extent.columns().iter().position(|c| c.member == *member).unwrap();
                extent.lacking(lacks as u16, Places::all(self.shape.places()))
            }
            _ => extent,
        }
    }

    fn extents(&self) -> Vec<Extent> {
        (0..*self.extents.borrow()).map(|n| self.extent(n)).collect()
    }

    fn ring(&self, member: u16, era: u64) -> Ring {
        let member = Uuid::from_u128(100 + u128::from(member));
        Ring { pool: Uuid::from_u128(1), member, era, number: 0 }
    }

    async fn array(&self, era: u64, wrap: impl Fn(u16, Dev) -> Dev, mistake: Mistake) -> Rc<Array> {
        let out = self.book.out.borrow().clone();
        let member = |(n, mem): (u16, &Rc<Mem>)| Member {
            dev: wrap(n, Dev::shared(Rc::clone(mem))),
            ring: self.ring(n, era),
            ring_at: Lba(0),
            is_out: out.contains(&n),
        };
        let members = (0..).zip(&*self.mems.borrow()).map(member).collect();
        let keeper = Rc::new(Rc::clone(&self.book));
        let array = Array::new(members, keeper, &self.scratch).await.unwrap();
        Rc::new(array.mistaken(mistake))
    }

    /// Mends what a crash has left; then a new era begins.
    async fn mend(&self) -> Mended {
        let old = self.book.era.get();
        let array = self.array(old + 1, |_, dev| dev, Mistake::None).await;
        let rings: Vec<_> = (0..self.count() as u16)
            .map(|member| OldRing { member, ring: self.ring(member, old), at: Lba(0) })
            .collect();
        let extents: Vec<_> =
            self.extents().into_iter().map(|extent| (self.shape, Rc::new(extent))).collect();
        let mended = mend_rings(&array, &rings, &extents).await.unwrap();
        self.book.era.set(old + 1);
        mended
    }

    /// The volume, on members that misbehave.
    async fn serve(&self, wrap: impl Fn(u16, Dev) -> Dev, mistake: Mistake) -> Rc<Raid> {
        let array = self.array(self.book.era.get(), wrap, mistake).await;
        let settings = Settings { shape: self.shape, block_size: self.block_size };
        Rc::new(Raid::new(array, settings, self.extents()))
    }

    fn cut_power(&self, rng: &mut Rng) {
        for mem in &*self.mems.borrow() {
            mem.cut_power(|n| rng.below(n as u64) as usize);
        }
    }
}

struct Suite {
    make: fn() -> Disks,
    disks: RefCell<Rc<Disks>>,
    raid: RefCell<Option<Rc<Raid>>>,
    pool: Pool,
}

impl Suite {
    async fn open(&self) -> Dev {
        let disks = Rc::clone(&self.disks.borrow());
        disks.mend().await;
        let raid = disks.serve(|_, dev| dev, Mistake::None).await;
        self.raid.replace(Some(Rc::clone(&raid)));
        Dev::shared(raid)
    }
}

impl Subject for Suite {
    fn pool(&self) -> Pool {
        self.pool.clone()
    }

    async fn fresh(&self) -> Dev {
        self.raid.take();
        self.disks.replace(Rc::new((self.make)()));
        self.open().await
    }

    async fn grow(&self) -> bool {
        let disks = self.disks.borrow();
        let number = *disks.extents.borrow();
        *disks.extents.borrow_mut() += 1;
        self.raid.borrow().as_ref().unwrap().grow(disks.extent(number));
        true
    }

    async fn space_used(&self) -> Option<u64> {
        None
    }

    async fn cut_power(&self, seed: u64) -> Option<Dev> {
        self.raid.take();
        self.disks.borrow().cut_power(&mut Rng::new(seed));
        Some(self.open().await)
    }

    async fn fail_next(&self, _: Kind, _: Error) -> bool {
        false
    }
}

fn conforms(make: fn() -> Disks) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let pool = Pool::new(MIN_POOL).unwrap();
    let suite =
        Suite { make, disks: RefCell::new(Rc::new(make())), raid: RefCell::default(), pool };
    assert!(suite.disks.borrow().shape.rows() * 3 * 4096 >= MIN_BYTES);
    tokio::task::LocalSet::new().block_on(&runtime, conformance::check(&suite, 1));
}

#[test]
fn raid_5() {
    conforms(|| Disks::new(Level::Parity, 5, 16, 4096, false));
}

#[test]
fn raid_5_with_volatile_caches() {
    conforms(|| Disks::new(Level::Parity, 3, 4, 4096, true));
}

#[test]
fn raid_5_in_blocks_of_512() {
    conforms(|| Disks::new(Level::Parity, 4, 2, 512, true));
}

#[test]
fn raid_6() {
    conforms(|| Disks::new(Level::DoubleParity, 6, 3, 4096, true));
}

#[test]
fn raid_1() {
    conforms(|| Disks::new(Level::Copies(2), 2, 16, 512, true));
}

#[test]
fn raid_10() {
    conforms(|| Disks::new(Level::Copies(2), 6, 16, 4096, false));
}

#[test]
fn raid_0() {
    conforms(|| Disks::new(Level::Copies(1), 3, 16, 4096, true));
}

/// A pool through crashes, with as many members lost as its level bears, and blocks that cannot be read.
struct Ordeal {
    disks: Disks,
    rng: Rng,
    mistake: Mistake,
    checker: RefCell<Checker>,
    pool: Pool,
}

impl Ordeal {
    fn new(make: fn(bool) -> Disks, seed: u64, mistake: Mistake) -> Self {
        let mut rng = Rng::new(seed);
        let disks = make(rng.one_in(2));
        let mut checker = Checker::new(1, disks.block_size, Initially::Zeroes);
        if !disks.mems.borrow()[0].info().volatile_cache {
            checker = checker.write_through();
        }
        let pool = Pool::new(MIN_POOL).unwrap();
        Self { disks, rng, mistake, checker: RefCell::new(checker), pool }
    }

    /// Whether one more member may be lost.
    fn bears_more(&self) -> bool {
        let book = &self.disks.book;
        let lost = book.out.borrow().len() + usize::from(book.filling.borrow().is_some());
        lost < usize::from(self.disks.shape.level().bears())
    }

    fn is_lost(&self, member: u16) -> bool {
        let book = &self.disks.book;
        let filling = book.filling.borrow().as_ref().map(|(member, _)| *member);
        filling == Some(member) || book.out.borrow().contains(&member)
    }

    /// Somebody may replace a disk that is out, by an empty one or by itself with what it had.
    fn replace(&mut self) {
        let book = Rc::clone(&self.disks.book);
        if book.filling.borrow().is_some() || book.out.borrow().is_empty() || self.rng.one_in(2) {
            return;
        }
        let member = book.out.borrow_mut().swap_remove(0);
        if self.rng.one_in(2) {
            let fresh = Rc::new(Mem::new(self.disks.options));
            self.disks.mems.borrow_mut()[usize::from(member)] = fresh;
        }
        book.filling.replace(Some((member, BTreeSet::new())));
    }

    /// Fills what is new, while others write.
    fn rebuild(&self, raid: &Rc<Raid>) -> tokio::task::JoinHandle<()> {
        let (raid, book) = (Rc::clone(raid), Rc::clone(&self.disks.book));
        let extents = *self.disks.extents.borrow();
        tokio::task::spawn_local(async move {
            let note = |extent| {
                let mut filling = book.filling.borrow_mut();
                let all = filling.as_mut().map(|(_, filled)| {
                    filled.insert(extent);
                    filled.len() as u64 == extents
                });
                if all == Some(true) {
                    book.filled.set(book.filled.get() + 1);
                    filling.take();
                }
            };
            let _ = raid.rebuild(Pace { rest: 0.5 }, note).await;
        })
    }

    fn some_member(&mut self) -> u16 {
        self.rng.below(self.disks.count() as u64) as u16
    }

    /// What happens to members during the next round.
    fn rules(&mut self) -> Vec<(u16, Rule)> {
        let slow = Effect::Delay(Duration::ZERO, Duration::from_micros(self.rng.within(1, 900)));
        let mut all = Vec::new();
        if self.bears_more() && self.rng.one_in(2) {
            let victim = self.some_member();
            let rule = match self.rng.below(3) {
                0 => Rule::new(Effect::Fail(Error::Gone)).after(self.rng.below(200)),
                1 => Rule::new(Effect::FailHalfway(Error::Unwritable { at: Lba(0) }))
                    .on(&[Kind::Write])
                    .after(self.rng.below(60))
                    .times(1),
                _ => Rule::new(Effect::Fail(Error::Unreadable { at: Lba(0) }))
                    .on(&[Kind::Read])
                    .with_probability(0.3),
            };
            if !self.is_lost(victim) {
                all.push((victim, rule));
            }
        }
        all.extend((0..self.disks.count() as u16).map(|n| (n, Rule::new(slow))));
        all
    }

    async fn round(&mut self, n: u32) -> Result<(), String> {
        self.replace();
        let rules = self.rules();
        let seed = self.rng.u64();
        let wrap = |n: u16, dev: Dev| {
            let (dev, faults) = Faulty::wrap(dev, seed ^ u64::from(n));
            rules.iter().filter(|(m, _)| *m == n).for_each(|(_, rule)| faults.add(rule.clone()));
            dev
        };
        let mended = self.disks.mend().await;
        if mended.lost > 0 {
            return Err(format!("round {n}: {mended:?}"));
        }
        let raid = self.disks.serve(wrap, self.mistake).await;
        let rebuild = self.rebuild(&raid);
        let dev = Dev::shared(raid);
        let span = Blocks::new(Lba(self.rng.below(9)), 96);
        let depth = self.rng.within(1, 12) as usize;
        let client = Client::new(&dev, &self.pool);
        let workload = Workload::new(client, span, depth, self.rng.u64());
        let ops = self.rng.within(1, 80) as usize;
        let is_to_end = self.rng.one_in(2);
        let checked = async {
            workload.audit(&self.checker).await?;
            while is_to_end && !rebuild.is_finished() {
                workload.run(&self.checker, 10).await?;
            }
            workload.run_until_crash(&self.checker, ops).await
        };
        checked.await.map_err(|v| format!("round {n}: {v}"))?;
        let errors = workload.take_errors();
        if !errors.is_empty() {
            return Err(format!("round {n}: {errors:?}"));
        }
        rebuild.abort();
        let _ = rebuild.await;
        drop((workload, dev));
        self.disks.cut_power(&mut self.rng);
        if self.bears_more() && self.rng.one_in(4) {
            let victim = self.some_member();
            if !self.is_lost(victim) {
                self.disks.book.out.borrow_mut().push(victim);
            }
        }
        self.checker.borrow_mut().crash(Loss::Unflushed);
        Ok(())
    }
}

fn ordeal(make: fn(bool) -> Disks, seed: u64, mistake: Mistake) -> Result<u64, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let all = async {
        let mut ordeal = Ordeal::new(make, seed, mistake);
        for n in 0..8 {
            ordeal.round(n).await.map_err(|what| format!("seed {seed}, {what}"))?;
        }
        Ok(ordeal.disks.book.filled.get())
    };
    let permit = block::crash::permit();
    let outcome = tokio::task::LocalSet::new().block_on(&runtime, all);
    drop(permit);
    outcome
}

fn small(level: Level, columns: u16, strip_rows: u32, block_size: u32) -> impl Fn(bool) -> Disks {
    move |volatile| Disks::sized(level, columns, strip_rows, block_size, volatile, 256 << 10)
}

const RAID_5: fn(bool) -> Disks = |volatile| small(Level::Parity, 4, 2, 4096)(volatile);
const RAID_5_WIDE: fn(bool) -> Disks = |volatile| small(Level::Parity, 7, 4, 512)(volatile);
const RAID_6: fn(bool) -> Disks = |volatile| small(Level::DoubleParity, 5, 2, 4096)(volatile);

const RAID_1: fn(bool) -> Disks = |volatile| small(Level::Copies(3), 3, 2, 4096)(volatile);
const RAID_10: fn(bool) -> Disks = |volatile| small(Level::Copies(2), 6, 4, 512)(volatile);

fn seeds() -> std::ops::Range<u64> {
    let count = std::env::var("RAID_SEEDS").ok().and_then(|n| n.parse().ok());
    0..count.unwrap_or(40)
}

#[test]
fn nothing_is_lost_in_crashes() {
    for make in [RAID_5, RAID_5_WIDE, RAID_6, RAID_1, RAID_10] {
        let filled: Result<u64, String> =
            seeds().map(|seed| ordeal(make, seed, Mistake::None)).sum();
        assert!(filled.clone().is_ok_and(|count| count > 0), "{filled:?}");
    }
}

#[test]
fn mistakes_are_found() {
    for (mistake, make) in [
        (Mistake::WritesBeforeLog, RAID_5),
        (Mistake::WeighsQWrongly, RAID_6),
        (Mistake::SkipsMarks, RAID_1),
        (Mistake::SkipsMarks, RAID_10),
        (Mistake::WritesUnsettled, RAID_5),
        (Mistake::AnswersBeforeMark, RAID_5),
        (Mistake::ReadsWithoutTurn, RAID_5),
        (Mistake::RecordsBeforeData, RAID_5),
        (Mistake::SkipsRecord, RAID_6),
        (Mistake::FillsWithoutTurn, RAID_5),
        (Mistake::FillsWithoutTurn, RAID_10),
    ] {
        // What overlaps on a member panics.
        let found = (0..2000).find_map(|seed| {
            let caught = std::panic::catch_unwind(|| ordeal(make, seed, mistake));
            caught.unwrap_or_else(|_| Err(format!("seed {seed}: a panic"))).err()
        });
        println!("{mistake:?}: {found:?}");
        assert!(found.is_some(), "{mistake:?}");
    }
}

/// More is written than the logs have room for: what is durable makes room, and what has moved is noted.
#[test]
fn logs_do_not_fill() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for make in [RAID_5, RAID_6, RAID_10] {
        for volatile in [false, true] {
            let disks = make(volatile);
            let pool = Pool::new(MIN_POOL).unwrap();
            tokio::task::LocalSet::new().block_on(&runtime, async {
                let raid = disks.serve(|_, dev| dev, Mistake::None).await;
                let client = Client::new(&Dev::shared(raid), &pool);
                let blocks = disks.shape.stripe_rows() * u64::from(ROW_BYTES / disks.block_size);
                let whole = vec![1; (blocks * u64::from(disks.block_size)) as usize];
                let stripes = client.dev().info().blocks / blocks;
                for n in 0..600 {
                    let at = n % stripes * blocks;
                    client.write(at, &whole, false).await.unwrap();
                    let block = vec![n as u8; disks.block_size as usize];
                    client.write((n + 7) % stripes * blocks + 1, &block, false).await.unwrap();
                }
            });
            let has_parity = disks.shape.level().parities() > 0;
            assert_eq!(!disks.book.maps.borrow().is_empty(), has_parity);
            assert!(disks.book.out.borrow().is_empty());
        }
    }
}

/// More regions of copies are written than there may be marks, by several at once: marks give way to others.
#[test]
fn marks_give_way() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    for (seed, volatile) in (0..8).flat_map(|seed| [(seed, false), (seed, true)]) {
        let disks = Disks::sized(Level::Copies(2), 4, 64, 4096, volatile, 128 << 20);
        let pool = Pool::new(MIN_POOL).unwrap();
        let all = async {
            let slow = Rule::new(Effect::Delay(Duration::ZERO, Duration::from_micros(300)));
            let wrap = |n: u16, dev: Dev| {
                let (dev, faults) = Faulty::wrap(dev, n.into());
                faults.add(slow.clone());
                dev
            };
            let raid = disks.serve(wrap, Mistake::None).await;
            let client = Client::new(&Dev::shared(raid), &pool);
            let (mut rng, step) = (Rng::new(seed), client.dev().info().blocks / 4000);
            let mut places: Vec<u64> = (0..4000).map(|n| n * step).collect();
            (1..places.len()).rev().for_each(|n| places.swap(n, rng.below(n as u64) as usize));
            let writes = futures_util::stream::iter(places).map(|at| {
                let client = client.clone();
                async move { client.write(at, &[7; 4096], false).await.unwrap() }
            });
            writes.buffer_unordered(24).collect::<Vec<()>>().await;
        };
        let limited = async { tokio::time::timeout(Duration::from_secs(60), all).await };
        let outcome = tokio::task::LocalSet::new().block_on(&runtime, limited);
        assert!(outcome.is_ok(), "seed {seed}: somebody waits for ever");
    }
}

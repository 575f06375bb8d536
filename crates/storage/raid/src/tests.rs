//! Volumes on pools in memory: the conformance suite of all layers, with member losses and power
//! cuts.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use block::testing::conformance::{self, MIN_BYTES, MIN_POOL, Subject};
use block::testing::faulty::{Effect, Faulty, OpKind, Rule};
use block::testing::register::{Checker, CrashKind, InitialContents};
use block::testing::workload::Workload;
use block::testing::{Rng, TestClient, seeds};
use block::{
    Blocks, BufMut, BufferPool, Bufs, Ctx, Dev, Error, Info, Layer, Lba, Mem, MemOptions, Op,
};
use futures_util::StreamExt;
use geometry::{
    ALL_REGIONS, Column, MAX_MEMBERS, ROW_BYTES, RaidGeometry, RowChecksums, ScrubResult,
};
use uuid::Uuid;

mod slow;
mod unmap;

use super::log_batch::{BATCH_BLOCKS, EntryKind, LogBatch, LogEntry, RingId};
use super::row_plan::StripSet;
use super::stripe::Stripe;
use super::*;
use checksum::ChecksumLayer;
use checksum::format::{ChecksumOwner, DIRTY_LIST_BLOCKS};
use checksum::layout::CHECKSUMS_PER_BLOCK;
use checksum::layout::{COPIES, ChecksumLayout};
use geometry::{Redundancy, StripRole};

/// The first row of extents on a member.
const DATA_AT: u64 = RING_BLOCKS;

/// The metadata of a pool; survives its process.
#[derive(Debug, Default)]
struct TestMetadata {
    /// The detached members.
    detached: RefCell<Vec<u16>>,
    /// The last log generation in which each member was attached.
    last_generation: RefCell<BTreeMap<u16, u64>>,
    generation: Cell<u64>,
    /// Stale regions of members that are or were detached, by extent and member.
    stale_regions: RefCell<BTreeMap<(u64, u16), u32>>,
    /// How many members may be lost, and the changes of slow members.
    fault_tolerance: Cell<u16>,
    slow_changes: RefCell<Vec<(u16, bool)>>,
    /// Number of columns rebuilt, and of members that were only partly stale.
    rebuilt: Cell<u64>,
    partially_rebuilt: Cell<u64>,
    /// Rows that a scrub found inconsistent.
    inconsistent_rows: Cell<u64>,
    /// Number of members detached because they were unresponsive.
    detached_unresponsive: Cell<u64>,
    /// Number of hedged reads.
    hedged_reads: Cell<u64>,
    /// Longest delay of a metadata change.
    max_delay: Cell<Duration>,
    rng: RefCell<Option<Rng>>,
}

impl TestMetadata {
    /// Members that are detached or have stale regions.
    fn incomplete_members(&self) -> BTreeSet<u16> {
        let stale = self.stale_regions.borrow();
        let members = stale.keys().map(|(_, member)| *member);
        members.chain(self.detached.borrow().iter().copied()).collect()
    }

    fn detach_now(&self, member: u16) {
        let mut detached = self.detached.borrow_mut();
        if !detached.contains(&member) {
            detached.push(member);
            self.last_generation.borrow_mut().insert(member, self.generation.get());
        }
    }

    async fn random_delay(&self) {
        let slow = u64::try_from(self.max_delay.get().as_micros()).unwrap();
        let some = self.rng.borrow_mut().as_mut().map_or(0, |rng| rng.below(slow + 1));
        if some > 0 {
            tokio::time::sleep(Duration::from_micros(some)).await;
        }
    }
}

impl PoolMetadata for Rc<TestMetadata> {
    fn detach_member(&self, member: u16) -> MetadataFuture<'_> {
        Box::pin(async move {
            self.random_delay().await;
            self.detach_now(member);
            Ok(())
        })
    }

    fn mark_regions_stale(&self, extent: u64, regions: u32) -> MetadataFuture<'_> {
        Box::pin(async move {
            self.random_delay().await;
            for member in &*self.detached.borrow() {
                *self.stale_regions.borrow_mut().entry((extent, *member)).or_default() |= regions;
            }
            Ok(())
        })
    }

    fn detach_unresponsive(&self, member: u16, unresponsive: u128) -> DetachFuture<'_> {
        Box::pin(async move {
            let unresponsive_members = (0..MAX_MEMBERS).filter(|n| unresponsive >> n & 1 != 0);
            let lost: BTreeSet<u16> =
                unresponsive_members.chain(self.incomplete_members()).chain([member]).collect();
            if lost.len() > usize::from(self.fault_tolerance.get()) {
                return Ok(false);
            }
            self.detached_unresponsive.set(self.detached_unresponsive.get() + 1);
            self.detach_now(member);
            self.random_delay().await;
            Ok(true)
        })
    }

    fn set_slow(&self, member: u16, is_slow: bool) {
        self.slow_changes.borrow_mut().push((member, is_slow));
    }

    fn report_damage(&self, _: Damage) {}
}

/// A pool of disks in memory.
struct TestDisks {
    geometry: RaidGeometry,
    block_size: u32,
    mems: RefCell<Vec<Rc<Mem>>>,
    options: MemOptions,
    book: Rc<TestMetadata>,
    extents: RefCell<u64>,
    scratch: BufferPool,
    /// The first number of arrays.
    first: Cell<u64>,
    /// Whether rows have checksums.
    checksums: bool,
}

/// An allocator without space: all extents exist.
#[derive(Debug)]
struct FullAllocator;

impl ExtentAllocator for FullAllocator {
    fn allocate(&self, _: u32) -> Pin<Box<dyn Future<Output = Result<Extent, Error>> + '_>> {
        Box::pin(std::future::ready(Err(Error::NoSpace)))
    }

    fn free(&self, _: u32) -> MetadataFuture<'_> {
        Box::pin(std::future::ready(Err(Error::NoSpace)))
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

impl TestDisks {
    fn new(
        level: Redundancy,
        columns: u16,
        strip_rows: u32,
        block_size: u32,
        volatile: bool,
    ) -> Self {
        Self::sized(level, columns, strip_rows, block_size, volatile, 2 << 20)
    }

    /// With extents of at least `bytes`.
    fn sized(
        level: Redundancy,
        columns: u16,
        strip_rows: u32,
        block_size: u32,
        volatile: bool,
        bytes: u64,
    ) -> Self {
        let geometry = RaidGeometry::new(level, columns, strip_rows, 1).unwrap();
        let stripes = bytes.div_ceil(geometry.stripe_rows() * u64::from(ROW_BYTES));
        let geometry = RaidGeometry::new(level, columns, strip_rows, stripes as u32).unwrap();
        let blocks = DATA_AT + UNITS * unit(&geometry) + DIRTY_LIST_BLOCKS;
        let options = MemOptions { volatile_cache: volatile, ..MemOptions::new(4096, blocks) };
        let mems = (0..columns).map(|_| Rc::new(Mem::new(options))).collect();
        let scratch = BufferPool::new(32 << 20).unwrap();
        let mems = RefCell::new(mems);
        let metadata = Rc::new(TestMetadata {
            fault_tolerance: Cell::new(level.fault_tolerance()),
            ..TestMetadata::default()
        });
        Self {
            geometry,
            block_size,
            mems,
            options,
            book: metadata,
            extents: RefCell::new(3),
            scratch,
            first: Cell::new(0),
            checksums: false,
        }
    }

    fn with_checksums(self) -> Self {
        Self { checksums: true, ..self }
    }

    /// Rows of a unit: a column and its checksums.
    fn unit(&self) -> u64 {
        unit(&self.geometry)
    }

    /// The checksum layer of a member, if its rows have checksums.
    async fn checksum_layer(
        &self,
        dev: Dev,
        ring: RingId,
    ) -> Result<Option<Rc<ChecksumLayer>>, Error> {
        if !self.checksums {
            return Ok(None);
        }
        let layout = ChecksumLayout {
            first_row: DATA_AT,
            unit_rows: self.unit() as u32,
            units: UNITS as u32,
        };
        let owner = ChecksumOwner { pool: ring.pool, member: ring.member, ring: 0 };
        let (list, account) = (DATA_AT + UNITS * self.unit(), self.scratch.account());
        let corrupt_reads = std::sync::Arc::default();
        let layer =
            ChecksumLayer::new(dev, layout, (owner, ""), list, &account, corrupt_reads).await?;
        Ok(Some(Rc::new(layer)))
    }

    fn count(&self) -> usize {
        self.mems.borrow().len()
    }

    fn extent(&self, number: u64) -> Extent {
        let rows = self.unit();
        let count = self.count() as u64;
        // Successive extents place their columns on different members.
        let column = |n: u64| Column {
            member: ((n + number) % count) as u16,
            first_row: DATA_AT + number * rows,
        };
        let extent = Extent::new(number, self.geometry, (0..count).map(column));
        let stale = self.book.stale_regions.borrow();
        let regions = |member| stale.get(&(number, member)).copied().unwrap_or(0);
        let columns = (0u16..).zip(extent.columns().to_vec());
        columns.fold(extent, |extent, (n, column)| {
            extent.with_stale_regions(n, regions(column.member))
        })
    }

    async fn extents(&self, array: &Array) -> Vec<Extent> {
        let mut all = Vec::new();
        let count = *self.extents.borrow();
        for n in 0..count {
            all.push(self.extent(n).load_stripe_map(array).await.unwrap());
        }
        all
    }

    fn ring(&self, member: u16, generation: u64) -> RingId {
        let member = Uuid::from_u128(100 + u128::from(member));
        RingId { pool: Uuid::from_u128(1), member, generation, number: 0 }
    }

    async fn array(
        &self,
        generation: u64,
        wrap: impl Fn(u16, Dev) -> Dev,
        mistake: Mistake,
    ) -> Rc<Array> {
        let detached = self.book.detached.borrow().clone();
        let metadata = Rc::new(Rc::clone(&self.book));
        let array = Array::new(generation, metadata, &self.scratch).await.unwrap();
        let array = array.with_first_number(self.first.get());
        let mems = self.mems.borrow().clone();
        for (n, mem) in (0..).zip(&mems) {
            let ring = self.ring(n, generation);
            let dev = wrap(n, Dev::shared(Rc::clone(mem)));
            let (layer, is_detached) = match self.checksum_layer(dev.clone(), ring).await {
                Ok(layer) => (layer, detached.contains(&n)),
                Err(_) => {
                    self.book.detach_now(n);
                    (None, true)
                }
            };
            let dev = layer.clone().map_or(dev, Dev::shared);
            let counters = std::sync::Arc::default();
            let layer = layer.map(|one| one as Rc<dyn RowChecksums>);
            let member = ArrayMember {
                dev,
                ring,
                ring_lba: Lba(0),
                is_detached,
                counters,
                checksums: layer,
            };
            array.set_member(n, member).unwrap();
        }
        Rc::new(array.with_mistake(mistake))
    }

    /// Recovers after a crash; then a new log generation begins.
    async fn recover(&self) -> RecoveryReport {
        let old = self.book.generation.get();
        let array = self.array(old + 1, |_, dev| dev, Mistake::None).await;
        let rings: Vec<_> = (0..self.count() as u16)
            .map(|member| PreviousRing {
                member,
                ring: self.ring(member, old),
                first_block: Lba(0),
            })
            .collect();
        let entries = LogContents::read(&array, old, &rings).await.unwrap();
        assert_eq!(entries.missing_batches().next(), None, "the log rots nowhere");
        let mut extents = Vec::new();
        let numbers = 0..*self.extents.borrow();
        for number in entries.extents().into_iter().filter(|number| numbers.contains(number)) {
            let extent = self.extent(number).load_stripe_map(&array).await.unwrap();
            extents.push((self.geometry, Rc::new(extent)));
        }
        let report = entries.recover(&array, &extents).await.unwrap();
        array.release_idle_checksums().await.unwrap();
        self.book.generation.set(old + 1);
        report
    }

    /// A member that returns is stale in what was being written to it when it was detached, which
    /// only its log may know.
    async fn mark_in_flight_stale(&self, member: u16) {
        let generation = self.book.last_generation.borrow()[&member];
        let array = self.array(generation, |_, dev| dev, Mistake::None).await;
        let ring =
            PreviousRing { member, ring: self.ring(member, generation), first_block: Lba(0) };
        let entries = LogContents::read(&array, generation, &[ring]).await.unwrap();
        let mut stale = self.book.stale_regions.borrow_mut();
        for (extent, slot) in entries.slots() {
            *stale.entry((extent, member)).or_default() |= self.geometry.region_bit(slot);
        }
    }

    /// The volume, on faulty members.
    async fn serve(&self, wrap: impl Fn(u16, Dev) -> Dev, mistake: Mistake) -> Rc<RaidVolume> {
        let array = self.array(self.book.generation.get(), wrap, mistake).await;
        self.serve_by(array).await
    }

    async fn serve_by(&self, array: Rc<Array>) -> Rc<RaidVolume> {
        let extents = self.extents(&array).await;
        Rc::new(RaidVolume::new(array, self.settings(), (0..).zip(extents), Rc::new(FullAllocator)))
    }

    fn settings(&self) -> RaidSettings {
        let bytes = *self.extents.borrow() * self.geometry.total_rows() * u64::from(ROW_BYTES);
        RaidSettings { geometry: self.geometry, block_size: self.block_size, bytes, is_thick: true }
    }

    fn cut_power(&self, rng: &mut Rng) {
        for mem in &*self.mems.borrow() {
            mem.cut_power(|n| rng.below(n as u64) as usize);
        }
    }
}

/// Units of a member.
const UNITS: u64 = 8;

/// Rows of a unit: a column, and its checksums if it has them.
fn unit(geometry: &RaidGeometry) -> u64 {
    let rows = rows(geometry);
    rows + rows.div_ceil(CHECKSUMS_PER_BLOCK as u64) * u64::from(COPIES)
}

/// Rows of a column: its stripes, and the stripe maps after them.
fn rows(geometry: &RaidGeometry) -> u64 {
    let maps = 2 * u64::from(stripe_map_format::map_rows(geometry));
    u64::from(geometry.slots()) * u64::from(geometry.strip_rows()) + maps
}

struct Suite {
    make: fn() -> TestDisks,
    disks: RefCell<Rc<TestDisks>>,
    raid: RefCell<Option<Rc<RaidVolume>>>,
    pool: BufferPool,
}

impl Suite {
    async fn open(&self) -> Dev {
        let disks = Rc::clone(&self.disks.borrow());
        disks.recover().await;
        let raid = disks.serve(|_, dev| dev, Mistake::None).await;
        self.raid.replace(Some(Rc::clone(&raid)));
        Dev::shared(raid)
    }
}

impl Subject for Suite {
    fn pool(&self) -> BufferPool {
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
        let raid = self.raid.borrow().clone().unwrap();
        raid.insert_extent(u32::try_from(number).unwrap(), disks.extent(number));
        raid.grow(disks.settings().bytes);
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

    async fn fail_next(&self, _: OpKind, _: Error) -> bool {
        false
    }
}

fn conforms(make: fn() -> TestDisks) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let pool = BufferPool::new(MIN_POOL).unwrap();
    let suite =
        Suite { make, disks: RefCell::new(Rc::new(make())), raid: RefCell::default(), pool };
    assert!(suite.disks.borrow().geometry.total_rows() * 3 * 4096 >= MIN_BYTES);
    tokio::task::LocalSet::new().block_on(&runtime, conformance::check(&suite, 1));
}

#[test]
fn raid_5() {
    conforms(|| TestDisks::new(Redundancy::Parity, 5, 16, 4096, false));
}

#[test]
fn raid_5_with_volatile_caches() {
    conforms(|| TestDisks::new(Redundancy::Parity, 3, 4, 4096, true));
}

#[test]
fn raid_5_in_blocks_of_512() {
    conforms(|| TestDisks::new(Redundancy::Parity, 4, 2, 512, true));
}

#[test]
fn raid_6() {
    conforms(|| TestDisks::new(Redundancy::DoubleParity, 6, 3, 4096, true));
}

#[test]
fn raid_1() {
    conforms(|| TestDisks::new(Redundancy::Copies(2), 2, 16, 512, true));
}

#[test]
fn raid_10() {
    conforms(|| TestDisks::new(Redundancy::Copies(2), 6, 16, 4096, false));
}

#[test]
fn raid_0() {
    conforms(|| TestDisks::new(Redundancy::Copies(1), 3, 16, 4096, true));
}

/// A pool through crashes, with member losses up to its fault tolerance, and unreadable blocks.
struct CrashTest {
    disks: TestDisks,
    rng: Rng,
    mistake: Mistake,
    checker: RefCell<Checker>,
    pool: BufferPool,
}

impl CrashTest {
    fn new(make: fn(bool) -> TestDisks, seed: u64, mistake: Mistake) -> Self {
        let mut rng = Rng::new(seed);
        let disks = make(rng.one_in(2));
        let mut checker = Checker::new(1, disks.block_size, InitialContents::Zeroes);
        if !disks.mems.borrow()[0].info().volatile_cache {
            checker = checker.write_through();
        }
        let pool = BufferPool::new(MIN_POOL).unwrap();
        disks.book.max_delay.set(Duration::from_micros(rng.below(3) * 700));
        disks.book.rng.replace(Some(Rng::new(seed ^ 77)));
        Self { disks, rng, mistake, checker: RefCell::new(checker), pool }
    }

    /// Members that are detached or have stale regions.
    fn incomplete_members(&self) -> BTreeSet<u16> {
        self.disks.book.incomplete_members()
    }

    /// Whether one more member may be lost.
    fn can_lose_more(&self) -> bool {
        self.incomplete_members().len()
            < usize::from(self.disks.geometry.redundancy().fault_tolerance())
    }

    fn is_incomplete(&self, member: u16) -> bool {
        self.incomplete_members().contains(&member)
    }

    /// May replace a detached disk by an empty one, or reattach it with its old contents.
    async fn replace(&mut self) {
        let metadata = Rc::clone(&self.disks.book);
        if metadata.detached.borrow().is_empty() || self.rng.one_in(2) {
            return;
        }
        let member = metadata.detached.borrow_mut().swap_remove(0);
        if self.rng.one_in(2) {
            let fresh = Rc::new(Mem::new(self.disks.options));
            self.disks.mems.borrow_mut()[usize::from(member)] = fresh;
            let extents = 0..*self.disks.extents.borrow();
            metadata.stale_regions.borrow_mut().extend(extents.map(|n| ((n, member), ALL_REGIONS)));
        } else {
            self.disks.mark_in_flight_stale(member).await;
            let stale = metadata.stale_regions.borrow();
            let is_partial = stale.iter().any(|((_, m), r)| *m == member && *r != ALL_REGIONS);
            metadata
                .partially_rebuilt
                .set(metadata.partially_rebuilt.get() + u64::from(is_partial));
        }
    }

    /// Rebuilds stale columns while clients write; then scrubs, if `scrubs`.
    fn rebuild(&self, raid: &Rc<RaidVolume>, scrubs: bool) -> tokio::task::JoinHandle<()> {
        let (raid, metadata) = (Rc::clone(raid), Rc::clone(&self.disks.book));
        tokio::task::spawn_local(async move {
            for index in raid.extent_indices() {
                let Some(extent) = raid.extent(index) else { continue };
                let Ok(report) = raid.rebuild(index, MaintenancePace { rest_factor: 0.5 }).await
                else {
                    return;
                };
                let mut stale = metadata.stale_regions.borrow_mut();
                let count = stale.len();
                for column in report.complete_columns {
                    let member = extent.columns()[usize::from(column)].member;
                    stale.remove(&(extent.number(), member));
                }
                let rebuilt_count = (count - stale.len()) as u64;
                metadata.rebuilt.set(metadata.rebuilt.get() + rebuilt_count);
            }
            for index in raid.extent_indices().into_iter().filter(|_| scrubs) {
                let Ok(found) = raid.scrub(index, MaintenancePace { rest_factor: 0.5 }).await
                else {
                    return;
                };
                metadata
                    .inconsistent_rows
                    .set(metadata.inconsistent_rows.get() + found.unrecoverable);
            }
        })
    }

    /// Corrupts some rows of a disk. With checksums, clients do not notice, and all rows are
    /// repaired.
    async fn corrupt_rows(&mut self) -> Result<(), String> {
        let victim = self.random_member();
        let is_tolerated = self.can_lose_more() && !self.is_incomplete(victim);
        if !self.disks.checksums || !is_tolerated || self.rng.one_in(2) {
            return Ok(());
        }
        let mem = Rc::clone(&self.disks.mems.borrow()[usize::from(victim)]);
        let (unit, rows) = (self.disks.unit(), rows(&self.disks.geometry));
        for _ in 0..self.rng.within(1, 40) {
            let at = DATA_AT + self.rng.below(3) * unit + self.rng.below(rows);
            mem.corrupt(at, self.rng.below(4096) as usize);
        }
        let raid = self.disks.serve(|_, dev| dev, Mistake::None).await;
        if self.rng.one_in(2) {
            let dev = Dev::shared(Rc::clone(&raid));
            let all = Blocks::new(Lba(0), dev.info().blocks);
            let workload = Workload::new(TestClient::new(&dev, &self.pool), all, 4, 0);
            workload.audit(&self.checker).await.map_err(|v| v.to_string())?;
            let errors = workload.take_errors();
            if !errors.is_empty() {
                return Err(format!("{errors:?}"));
            }
        }
        for index in raid.extent_indices() {
            let found = raid
                .scrub(index, MaintenancePace { rest_factor: 0.0 })
                .await
                .map_err(|e| e.to_string())?;
            if found.unrecoverable > 0 {
                return Err(format!("{found:?} of extent {index}"));
            }
        }
        raid.array.close().await.map_err(|e| e.to_string())?;
        self.disks.first.set(self.disks.first.get() + (1 << 32));
        Ok(())
    }

    fn random_member(&mut self) -> u16 {
        self.rng.below(self.disks.count() as u64) as u16
    }

    /// The faults of members during the next round.
    fn fault_rules(&mut self) -> Vec<(u16, Rule)> {
        let slow = Effect::Delay(Duration::ZERO, Duration::from_micros(self.rng.within(1, 900)));
        let mut all = Vec::new();
        if self.can_lose_more() && self.rng.one_in(2) {
            let victim = self.random_member();
            let unreadable = || Rule::new(Effect::Fail(Error::Unreadable { at: Lba(0) }));
            let unwritable = Error::Unwritable { at: Lba(0) };
            let rules = match self.rng.below(4) {
                0 => vec![Rule::new(Effect::Fail(Error::Gone)).after(self.rng.below(200))],
                1 => {
                    let torn = Rule::new(Effect::FailHalfway(unwritable)).on(&[OpKind::Write]);
                    vec![torn.after(self.rng.below(60)).times(1)]
                }
                2 => vec![unreadable().on(&[OpKind::Read]).with_probability(0.3)],
                // Reads fail, and later writes fail too: a truncated file.
                _ => {
                    let full = Rule::new(Effect::Fail(Error::NoSpace)).on(&[OpKind::Write]);
                    let reads = unreadable().on(&[OpKind::Read]).after(self.rng.below(100));
                    vec![reads, full.after(self.rng.below(100))]
                }
            };
            if !self.is_incomplete(victim) {
                all.extend(rules.into_iter().map(|rule| (victim, rule)));
            }
        }
        if all.is_empty() && self.rng.one_in(3) {
            // It is detached if that takes long and the redundancy tolerates it.
            let longest = Duration::from_millis(self.rng.within(1, 30_000));
            let stall = Rule::new(Effect::Delay(Duration::ZERO, longest)).with_probability(0.5);
            let stall = stall.after(self.rng.below(150)).times(self.rng.within(1, 20));
            all.push((self.random_member(), stall));
        }
        all.extend((0..self.disks.count() as u16).map(|n| (n, Rule::new(slow))));
        all
    }

    async fn run_round(&mut self, n: u32) -> Result<(), String> {
        self.replace().await;
        let rules = self.fault_rules();
        let seed = self.rng.u64();
        let wrap = |n: u16, dev: Dev| {
            let (dev, faults) = Faulty::wrap(dev, seed ^ u64::from(n));
            rules.iter().filter(|(m, _)| *m == n).for_each(|(_, rule)| faults.add(rule.clone()));
            dev
        };
        let report = self.disks.recover().await;
        if report.unrecoverable > 0 {
            return Err(format!("round {n}: {report:?}"));
        }
        self.corrupt_rows().await.map_err(|what| format!("round {n}: {what}"))?;
        let array = self.disks.array(self.disks.book.generation.get(), wrap, self.mistake).await;
        let raid = self.disks.serve_by(Rc::clone(&array)).await;
        // Inconsistent rows are an error if no member is missing.
        let scrubs = n % 3 == 2 && self.mistake == Mistake::None;
        let is_sound = self.incomplete_members().is_empty() && rules.len() == self.disks.count();
        let rebuild = self.rebuild(&raid, scrubs);
        let dev = Dev::shared(raid);
        let span = Blocks::new(Lba(self.rng.below(9)), 96);
        let depth = self.rng.within(1, 12) as usize;
        let client = TestClient::new(&dev, &self.pool);
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
        let inconsistent = self.disks.book.inconsistent_rows.take();
        if is_sound && inconsistent > 0 {
            return Err(format!("round {n}: {inconsistent} rows do not fit"));
        }
        let hedged: u64 =
            array.members.counters().map(|errors| errors.hedged_reads.load(Relaxed)).sum();
        self.disks.book.hedged_reads.set(self.disks.book.hedged_reads.get() + hedged);
        drop((workload, dev, array));
        self.disks.cut_power(&mut self.rng);
        if self.can_lose_more() && self.rng.one_in(4) {
            let victim = self.random_member();
            if !self.is_incomplete(victim) {
                self.disks.book.detach_now(victim);
            }
        }
        self.checker.borrow_mut().crash(CrashKind::PowerLoss);
        Ok(())
    }
}

/// Virtual time in which a round must end, and the message if it does not.
const TEST_TIMEOUT: Duration = Duration::from_secs(100_000);
const TIMED_OUT: &str = "it does not end";

fn run_crash_test(
    make: fn(bool) -> TestDisks,
    seed: u64,
    mistake: Mistake,
) -> Result<[u64; 4], String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let all = async {
        let mut test = CrashTest::new(make, seed, mistake);
        for n in 0..8 {
            // Orphaned operations end with the power too.
            let round = tokio::task::LocalSet::new();
            let checked =
                round.run_until(tokio::time::timeout(TEST_TIMEOUT, test.run_round(n))).await;
            drop(round);
            let checked = checked.unwrap_or_else(|_| Err(format!("round {n}: {TIMED_OUT}")));
            checked.map_err(|what| format!("seed {seed}, {what}"))?;
        }
        let metadata = &test.disks.book;
        Ok([
            metadata.rebuilt.get(),
            metadata.partially_rebuilt.get(),
            metadata.detached_unresponsive.get(),
            metadata.hedged_reads.get(),
        ])
    };
    let permit = block::drop_permit::permit_drops();
    let outcome = tokio::task::LocalSet::new().block_on(&runtime, all);
    drop(permit);
    outcome
}

fn small(
    level: Redundancy,
    columns: u16,
    strip_rows: u32,
    block_size: u32,
) -> impl Fn(bool) -> TestDisks {
    move |volatile| TestDisks::sized(level, columns, strip_rows, block_size, volatile, 256 << 10)
}

const RAID_5: fn(bool) -> TestDisks = |volatile| small(Redundancy::Parity, 4, 2, 4096)(volatile);
const RAID_5_WIDE: fn(bool) -> TestDisks =
    |volatile| small(Redundancy::Parity, 7, 4, 512)(volatile);
const RAID_6: fn(bool) -> TestDisks =
    |volatile| small(Redundancy::DoubleParity, 5, 2, 4096)(volatile);

const RAID_1: fn(bool) -> TestDisks = |volatile| small(Redundancy::Copies(3), 3, 2, 4096)(volatile);
const RAID_10: fn(bool) -> TestDisks = |volatile| small(Redundancy::Copies(2), 6, 4, 512)(volatile);

#[test]
fn crashes_lose_no_acknowledged_write() {
    for make in [RAID_5, RAID_5_WIDE, RAID_6, RAID_1, RAID_10] {
        let mut all = [0; 4];
        for seed in seeds("RAID_SEEDS", 40) {
            let some = run_crash_test(make, seed, Mistake::None).unwrap_or_else(|e| panic!("{e}"));
            all.iter_mut().zip(some).for_each(|(all, some)| *all += some);
        }
        let is_much = seeds("RAID_SEEDS", 40).count() >= 40;
        assert!(!is_much || all.iter().all(|count| *count > 0), "{all:?}");
    }
}

/// With corrupted rows as well.
#[test]
fn with_checksums_crashes_and_bit_rot_lose_nothing() {
    let checked: [fn(bool) -> TestDisks; 5] = [
        |volatile| RAID_5(volatile).with_checksums(),
        |volatile| RAID_5_WIDE(volatile).with_checksums(),
        |volatile| RAID_6(volatile).with_checksums(),
        |volatile| RAID_1(volatile).with_checksums(),
        |volatile| RAID_10(volatile).with_checksums(),
    ];
    for make in checked {
        for seed in seeds("RAID_SEEDS", 20) {
            run_crash_test(make, seed, Mistake::None).unwrap_or_else(|e| panic!("{e}"));
        }
    }
}

/// Each from a seed on, so that rare failures are found soon.
#[test]
fn mistakes_are_found() {
    for (mistake, make, from) in [
        (Mistake::WritesBeforeLog, RAID_5, 0),
        (Mistake::WrongQCoefficient, RAID_6, 0),
        (Mistake::SkipsWriteIntents, RAID_1, 0),
        (Mistake::SkipsWriteIntents, RAID_10, 0),
        (Mistake::SkipsIntentOfLaterCopies, RAID_1, 470),
        (Mistake::RewritesBeforeFlush, RAID_5, 0),
        (Mistake::AcksBeforeDetachRecorded, RAID_5, 0),
        (Mistake::ReconstructsWithoutStripeLock, RAID_5, 0),
        (Mistake::HedgesWithoutStripeLock, RAID_5, 0),
        (Mistake::RecordsMoveBeforeData, RAID_5, 0),
        (Mistake::SkipsMoveRecord, RAID_6, 0),
        (Mistake::RebuildsWithoutStripeLock, RAID_5, 0),
        (Mistake::RebuildsWithoutStripeLock, RAID_10, 220),
        (Mistake::SkipsStaleRegions, RAID_5, 0),
        (Mistake::SkipsStaleRegions, RAID_1, 68),
        (Mistake::SkipsUnflushedRegions, RAID_5, 900),
    ] {
        // Overlapping operations on a member panic.
        let found = (from..from + 2000).find_map(|seed| {
            let caught = std::panic::catch_unwind(|| run_crash_test(make, seed, mistake));
            let found = caught.unwrap_or_else(|_| Err(format!("seed {seed}: a panic"))).err();
            // A mistake may leave free slots reserved for ever; a round that hangs for that reason
            // is not a find.
            found.filter(|what| !what.ends_with(TIMED_OUT))
        });
        println!("{mistake:?}: {found:?}");
        assert!(found.is_some(), "{mistake:?}");
    }
}

/// If a flush ended before a detach is recorded, lost writes of the detached member could be
/// trusted after the next crash.
#[test]
fn a_flush_waits_until_detached_members_are_recorded() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    let flushes = |mistake| {
        let disks = small(Redundancy::Copies(2), 4, 2, 4096)(true);
        let pool = BufferPool::new(MIN_POOL).unwrap();
        disks.book.max_delay.set(Duration::from_secs(1 << 20));
        disks.book.rng.replace(Some(Rng::new(1)));
        let all = async {
            let wrap = |n: u16, dev: Dev| {
                let (dev, faults) = Faulty::wrap(dev, n.into());
                if n == 1 {
                    let fails = Effect::Fail(Error::Unwritable { at: Lba(0) });
                    faults.add(Rule::new(fails).on(&[OpKind::Write]).after(2));
                }
                dev
            };
            let raid = disks.serve(wrap, mistake).await;
            let client = TestClient::new(&Dev::shared(raid), &pool);
            client.write(0, &[1; 4096], false).await.unwrap();
            let other = client.clone();
            let failing = tokio::task::spawn_local(async move {
                let _ = other.write(0, &[2; 4096], false).await;
                let _ = other.write(0, &[3; 4096], false).await;
            });
            tokio::time::sleep(Duration::from_secs(1)).await;
            let _permit = block::drop_permit::permit_drops();
            let flushed = tokio::time::timeout(Duration::from_secs(5), client.flush()).await;
            failing.abort();
            let _ = failing.await;
            flushed.is_ok()
        };
        tokio::task::LocalSet::new().block_on(&runtime, all)
    };
    assert!(!flushes(Mistake::None));
    assert!(flushes(Mistake::FlushesBeforeDetachRecorded));
}

/// The member with the parity is detached while a write reads, after it recorded stale regions.
/// Nothing may be written before the parity is recorded as stale: its log will not have the entry
/// (seed 2399 of the crash test at RAID 6).
#[test]
fn a_write_marks_regions_stale_for_a_member_that_fails_meanwhile() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    let writes = |mistake| {
        let disks = small(Redundancy::DoubleParity, 5, 2, 4096)(true);
        let pool = BufferPool::new(MIN_POOL).unwrap();
        let all = async {
            let slow = Duration::from_millis(50);
            let wrap = |n: u16, dev: Dev| {
                let (dev, faults) = Faulty::wrap(dev, n.into());
                faults.add(Rule::new(Effect::Delay(slow, slow)).on(&[OpKind::Read]));
                dev
            };
            let raid = disks.serve(wrap, mistake).await;
            let (detached, at, member) = {
                let stripe = raid.stripe((0, 0)).unwrap();
                let data = stripe.column_of(StripRole::Data(0)).unwrap();
                (
                    stripe.column_of(StripRole::Q).unwrap().member,
                    stripe.member_row(data, 0),
                    data.member,
                )
            };
            let client = TestClient::new(&Dev::shared(Rc::clone(&raid)), &pool);
            let writing = tokio::task::spawn_local(async move {
                let _ = client.write(0, &[1; 4096], false).await;
            });
            tokio::time::sleep(slow / 2).await;
            raid.array.on_member_detached(detached).await.unwrap();
            // From now on no metadata change completes.
            disks.book.max_delay.set(Duration::from_secs(1 << 20));
            disks.book.rng.replace(Some(Rng::new(1)));
            let _permit = block::drop_permit::permit_drops();
            tokio::time::sleep(Duration::from_secs(5)).await;
            writing.abort();
            let _ = writing.await;
            let mem = Dev::shared(Rc::clone(&disks.mems.borrow()[usize::from(member)]));
            let data = TestClient::new(&mem, &pool).read(at, 1).await.unwrap().to_vec();
            data == [1; 4096]
        };
        tokio::task::LocalSet::new().block_on(&runtime, all)
    };
    assert!(!writes(Mistake::None));
    assert!(writes(Mistake::MarksStaleOnce));
}

/// Runs in simulated time.
fn run_simulated<F: Future<Output = ()>>(work: impl FnOnce(BufferPool) -> F) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    let work = work(BufferPool::new(MIN_POOL).unwrap());
    let permit = block::drop_permit::permit_drops();
    tokio::task::LocalSet::new().block_on(&runtime, work);
    drop(permit);
}

/// A member is reattached during a full-stripe write, of which it gets nothing: it must be stale
/// there (seeds 2675 and 2993 of the simulator's pools).
#[test]
fn a_member_returning_during_a_full_stripe_write_is_stale_there() {
    run_simulated(async |pool| {
        let disks = RAID_5(false);
        let slow = Duration::from_millis(50);
        let wrap = |n: u16, dev: Dev| {
            let (dev, faults) = Faulty::wrap(dev, n.into());
            faults.add(Rule::new(Effect::Delay(slow, slow)).on(&[OpKind::Write]));
            dev
        };
        disks.book.detach_now(1);
        let raid = disks.serve(wrap, Mistake::None).await;
        let client = Rc::new(TestClient::new(&Dev::shared(Rc::clone(&raid)), &pool));
        let stripe = (disks.geometry.stripe_rows() * u64::from(ROW_BYTES)) as usize;
        // Two stripes: at least one has data on the member.
        let data = vec![7; 2 * stripe];
        let writing = {
            let (client, data) = (Rc::clone(&client), data.clone());
            tokio::task::spawn_local(async move { client.write(0, &data, false).await })
        };
        tokio::time::sleep(slow / 2).await;
        let dev = Dev::shared(Rc::clone(&disks.mems.borrow()[1]));
        let (ring, counters) =
            (disks.ring(1, disks.book.generation.get()), std::sync::Arc::default());
        raid.extent(0).unwrap().add_stale_regions(1, ALL_REGIONS);
        let member = ArrayMember {
            dev,
            ring,
            ring_lba: Lba(0),
            is_detached: false,
            counters,
            checksums: None,
        };
        raid.array.set_member(1, member).unwrap();
        writing.await.unwrap().unwrap();
        let blocks = data.len() as u32 / disks.block_size;
        assert!(client.read(0, blocks).await.unwrap().to_vec() == data);
    });
}

/// Writes more than the logs have space for: durable entries are retired, and stripe maps are
/// saved.
#[test]
fn logs_do_not_fill() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for make in [RAID_5, RAID_6, RAID_10] {
        for volatile in [false, true] {
            let disks = make(volatile);
            let pool = BufferPool::new(MIN_POOL).unwrap();
            tokio::task::LocalSet::new().block_on(&runtime, async {
                let raid = disks.serve(|_, dev| dev, Mistake::None).await;
                let client = TestClient::new(&Dev::shared(raid), &pool);
                let blocks = disks.geometry.stripe_rows() * u64::from(ROW_BYTES / disks.block_size);
                let whole = vec![1; (blocks * u64::from(disks.block_size)) as usize];
                let stripes = client.dev().info().blocks / blocks;
                for n in 0..600 {
                    let at = n % stripes * blocks;
                    client.write(at, &whole, false).await.unwrap();
                    let block = vec![n as u8; disks.block_size as usize];
                    client.write((n + 7) % stripes * blocks + 1, &block, false).await.unwrap();
                }
            });
            assert!(disks.book.detached.borrow().is_empty());
        }
    }
}

/// Concurrent writes to more regions than the limit of write intents: idle intents are cleared.
#[test]
fn retired_write_intents_free_log_space() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    for (seed, volatile) in (0..8).flat_map(|seed| [(seed, false), (seed, true)]) {
        let disks = TestDisks::sized(Redundancy::Copies(2), 4, 64, 4096, volatile, 128 << 20);
        let pool = BufferPool::new(MIN_POOL).unwrap();
        let all = async {
            let slow = Rule::new(Effect::Delay(Duration::ZERO, Duration::from_micros(300)));
            let wrap = |n: u16, dev: Dev| {
                let (dev, faults) = Faulty::wrap(dev, n.into());
                faults.add(slow.clone());
                dev
            };
            let raid = disks.serve(wrap, Mistake::None).await;
            let client = TestClient::new(&Dev::shared(raid), &pool);
            let (mut rng, step) = (Rng::new(seed), client.dev().info().blocks / 4000);
            let mut addresses: Vec<u64> = (0..4000).map(|n| n * step).collect();
            (1..addresses.len())
                .rev()
                .for_each(|n| addresses.swap(n, rng.below(n as u64) as usize));
            let writes = futures_util::stream::iter(addresses).map(|at| {
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

/// A volume is closed and reopened by another array in the same rings and log generation: what the
/// first one left is neither trusted nor in the way.
#[test]
fn successive_arrays_share_one_log_generation() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for make in [RAID_5, RAID_6, RAID_10] {
        for volatile in [false, true] {
            let disks = make(volatile);
            let pool = BufferPool::new(MIN_POOL).unwrap();
            tokio::task::LocalSet::new().block_on(&runtime, async {
                let blocks = disks.geometry.stripe_rows() * u64::from(ROW_BYTES / disks.block_size);
                let len = (blocks * u64::from(disks.block_size)) as usize;
                for (n, value) in (0u64..).zip([1u8, 2, 3]) {
                    disks.first.set(n << 32);
                    let array = disks.array(0, |_, dev| dev, Mistake::None).await;
                    let raid = disks.serve_by(Rc::clone(&array)).await;
                    let client = TestClient::new(&Dev::shared(raid), &pool);
                    // More writes the first time, so that the rings have higher numbers.
                    for _ in 0..if n == 0 { 9 } else { 1 } {
                        client.write(0, &vec![value; len], false).await.unwrap();
                        let partial = vec![value; len / 2];
                        client.write(2 * blocks, &partial, true).await.unwrap();
                    }
                    assert_eq!(
                        client.read(0, blocks as u32).await.unwrap().to_vec(),
                        vec![value; len]
                    );
                    drop(client);
                    if n < 2 {
                        array.close().await.unwrap();
                    }
                }
                // Power fails.
                disks.recover().await;
                let raid = disks.serve(|_, dev| dev, Mistake::None).await;
                let client = TestClient::new(&Dev::shared(raid), &pool);
                assert_eq!(client.read(0, blocks as u32).await.unwrap().to_vec(), vec![3; len]);
                let partial = client.read(2 * blocks, (blocks / 2) as u32).await.unwrap();
                assert_eq!(partial.to_vec(), vec![3; len / 2]);
            });
        }
    }
}

/// The result of scrubbing all extents.
async fn scrub(raid: &RaidVolume) -> ScrubResult {
    let mut all = ScrubResult::default();
    for index in raid.extent_indices() {
        let found = raid.scrub(index, MaintenancePace { rest_factor: 0.0 }).await.unwrap();
        all.repaired += found.repaired;
        all.unrecoverable += found.unrecoverable;
    }
    all
}

/// A volume whose blocks contain their own address, and the disks below it.
struct RotTest {
    disks: TestDisks,
    pool: BufferPool,
}

impl RotTest {
    fn new(make: fn(bool) -> TestDisks) -> Self {
        Self { disks: make(false), pool: BufferPool::new(MIN_POOL).unwrap() }
    }

    fn client(&self, raid: &Rc<RaidVolume>) -> TestClient {
        TestClient::new(&Dev::shared(Rc::clone(raid)), &self.pool)
    }

    fn block(&self, at: u64) -> Vec<u8> {
        let size = self.disks.block_size as usize;
        at.wrapping_add(1).to_le_bytes().repeat(size / 8)
    }

    /// Writes the whole volume, stripe by stripe.
    async fn fill(&self, client: &TestClient) {
        let stripe =
            self.disks.geometry.stripe_rows() * u64::from(ROW_BYTES / self.disks.block_size);
        for at in (0..client.dev().info().blocks).step_by(stripe as usize) {
            let data: Vec<u8> = (at..at + stripe).flat_map(|at| self.block(at)).collect();
            client.write(at, &data, false).await.unwrap();
        }
    }

    async fn check_contents(&self, client: &TestClient) {
        for at in 0..client.dev().info().blocks {
            assert!(client.read(at, 1).await.unwrap().to_vec() == self.block(at), "block {at}");
        }
    }

    /// Rows of a member that are used by stripes.
    fn rows_in_use(&self, raid: &RaidVolume, member: u16) -> Vec<u64> {
        let mut all = Vec::new();
        for index in raid.extent_indices() {
            let extent = raid.extent(index).unwrap();
            let column = extent.columns().iter().find(|c| c.member == member).unwrap().first_row;
            let rows = u64::from(self.disks.geometry.strip_rows());
            let slots = (0..self.disks.geometry.stripes()).map(|n| extent.stripe_map.slot_of(n));
            for slot in slots.map(|slot| u64::from(slot.unwrap())) {
                all.extend((0..rows).map(|row| column + slot * rows + row));
            }
        }
        all
    }

    /// Corrupts rows of a member.
    async fn corrupt_rows(&self, member: u16, rows: &[u64]) {
        let mem = Dev::shared(Rc::clone(&self.disks.mems.borrow()[usize::from(member)]));
        let disk = TestClient::new(&mem, &self.pool);
        for row in rows {
            let mut data = disk.read(*row, 1).await.unwrap().to_vec();
            data[7] ^= 0x40;
            disk.write(*row, &data, false).await.unwrap();
        }
    }
}

/// A missing batch with later batches after it must have been durable.
#[test]
fn an_unreadable_log_is_reported() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let test = RotTest::new(|_| RAID_5(true));
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let raid = test.disks.serve(|_, dev| dev, Mistake::None).await;
        let client = test.client(&raid);
        test.fill(&client).await;
        client.flush().await.unwrap();
        let stripe =
            test.disks.geometry.stripe_rows() * u64::from(ROW_BYTES / test.disks.block_size);
        for at in (0..client.dev().info().blocks).step_by(stripe as usize).take(12) {
            client.write(at, &test.block(at), false).await.unwrap();
        }
        let (disks, generation) = (&test.disks, test.disks.book.generation.get());
        let ring = PreviousRing { member: 1, ring: disks.ring(1, generation), first_block: Lba(0) };
        let array = disks.array(generation + 1, |_, dev| dev, Mistake::None).await;
        let read = async || LogContents::read(&array, generation, &[ring]).await.unwrap();
        assert_eq!(read().await.missing_batches().next(), None);
        assert!(read().await.slots().count() > 2, "some of them are in the log of this member");
        test.corrupt_rows(1, &[BATCH_BLOCKS as u64]).await;
        assert_eq!(read().await.missing_batches().collect::<Vec<_>>(), [(1, 1)]);
    });
}

/// An older entry of a row must not be replayed if the latest one may be missing: it would bring
/// old data back.
#[test]
fn a_gap_in_a_log_does_not_revive_older_entries() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let test = RotTest::new(RAID_5);
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let raid = test.disks.serve(|_, dev| dev, Mistake::None).await;
        test.fill(&test.client(&raid)).await;
        drop(raid);
        test.disks.recover().await;
        let (disks, old) = (&test.disks, test.disks.book.generation.get());
        let array = disks.array(old + 1, |_, dev| dev, Mistake::None).await;
        let extent = Rc::new(disks.extent(0).load_stripe_map(&array).await.unwrap());
        let slot = extent.stripe_map.slot_of(0).unwrap();
        let (geometry, extent_of_stripe) = (disks.geometry, Rc::clone(&extent));
        let stripe =
            Stripe { array: &array, geometry, extent: extent_of_stripe, slot, read_locks: None };
        let member = stripe.column_of(StripRole::P).unwrap().member;
        let page = |fill| {
            let mut page = BufMut::heap_page();
            page.fill(fill);
            page.freeze()
        };
        let changed: StripSet = [0, 1].into_iter().collect();
        let older = EntryKind::RowsWritten { row: 0, rows: 1, changed };
        let others = EntryKind::WriteIntent { stripes: 1, changed };
        let ring = disks.ring(member, old);
        let mem = Dev::shared(Rc::clone(&disks.mems.borrow()[usize::from(member)]));
        let disk = TestClient::new(&mem, &test.pool);
        for (sequence, extent, kind, blocks) in
            [(0, 0, older, vec![page(1), page(2), page(3)]), (2, u64::MAX, others, Vec::new())]
        {
            let entries = vec![LogEntry { number: sequence + 1, extent, slot, kind }];
            let batch = LogBatch { sequence, tail: 0, entries, blocks };
            let bytes = batch.into_bufs(&ring, BufMut::heap_page()).to_vec();
            disk.write(sequence * BATCH_BLOCKS as u64, &bytes, true).await.unwrap();
        }
        let entries =
            LogContents::read(&array, old, &[PreviousRing { member, ring, first_block: Lba(0) }])
                .await;
        let entries = entries.unwrap();
        assert_eq!(entries.missing_batches().collect::<Vec<_>>(), [(member, 1)]);
        let report = entries.recover(&array, &[(disks.geometry, extent)]).await.unwrap();
        assert_eq!(report, RecoveryReport { recovered: 1, unrecoverable: 0 });
        disks.book.generation.set(old + 1);
        let raid = disks.serve(|_, dev| dev, Mistake::None).await;
        test.check_contents(&test.client(&raid)).await;
        assert_eq!(scrub(&raid).await, ScrubResult::default());
    });
}

/// Whether a single wrong strip can be identified.
fn can_locate_corruption(level: Redundancy) -> bool {
    matches!(level, Redundancy::DoubleParity) || matches!(level, Redundancy::Copies(n) if n > 2)
}

#[test]
fn a_scrub_finds_bit_rot() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for make in [RAID_5, RAID_6, RAID_1, RAID_10] {
        let test = RotTest::new(make);
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let raid = test.disks.serve(|_, dev| dev, Mistake::None).await;
            let client = test.client(&raid);
            test.fill(&client).await;
            assert_eq!(scrub(&raid).await, ScrubResult::default());
            let rows = test.rows_in_use(&raid, 1);
            let corrupted: Vec<u64> = rows.iter().copied().step_by(3).collect();
            test.corrupt_rows(1, &corrupted).await;
            let (found, count) = (scrub(&raid).await, corrupted.len() as u64);
            if can_locate_corruption(test.disks.geometry.redundancy()) {
                assert_eq!(found, ScrubResult { repaired: count, unrecoverable: 0 });
                test.check_contents(&client).await;
                assert_eq!(scrub(&raid).await, ScrubResult::default());
            } else {
                assert_eq!(found, ScrubResult { repaired: 0, unrecoverable: count });
            }
        });
    }
}

/// Unreadable rows are known to be wrong at every redundant level.
#[test]
fn a_scrub_rewrites_unreadable_rows() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for make in [RAID_5, RAID_6, RAID_1, RAID_10] {
        let test = RotTest::new(make);
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let handle: RefCell<Option<block::testing::faulty::Faults>> = RefCell::default();
            let wrap = |n: u16, dev: Dev| {
                let (dev, faults) = Faulty::wrap(dev, n.into());
                if n == 1 {
                    handle.replace(Some(faults));
                }
                dev
            };
            let raid = test.disks.serve(wrap, Mistake::None).await;
            let client = test.client(&raid);
            test.fill(&client).await;
            let faults = handle.take().unwrap();
            for row in test.rows_in_use(&raid, 1).into_iter().step_by(4) {
                let bad = Rule::new(Effect::Fail(Error::Unreadable { at: Lba(0) }));
                // Once with the neighbouring rows, and once alone.
                let bad = bad.on(&[OpKind::Read]).within(Blocks::new(Lba(row), 1)).times(2);
                faults.add(bad);
            }
            let found = scrub(&raid).await;
            assert!(found.repaired > 0 && found.unrecoverable == 0, "{found:?}");
            faults.clear();
            test.check_contents(&client).await;
            assert_eq!(scrub(&raid).await, ScrubResult::default());
        });
    }
}

/// A disk misdirects writes and reports success: then two rows are wrong.
#[test]
fn a_scrub_finds_misdirected_writes() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for make in [RAID_6, RAID_1] {
        let test = RotTest::new(make);
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let probe = test.disks.serve(|_, dev| dev, Mistake::None).await;
            // Within the extents, after the log and before the stripe maps.
            let rows = test.rows_in_use(&probe, 1);
            let (first, last) = (rows[0], rows[rows.len() / 4]);
            drop(probe);
            let handle: RefCell<Option<block::testing::faulty::Faults>> = RefCell::default();
            let wrap = |n: u16, dev: Dev| {
                let (dev, faults) = Faulty::wrap(dev, n.into());
                if n == 1 {
                    let further = Effect::Misdirect(test.disks.geometry.strip_rows().into());
                    let misdirect = Rule::new(further).on(&[OpKind::Write]).with_probability(0.6);
                    faults.add(misdirect.within(Blocks::new(Lba(first), last - first)));
                    handle.replace(Some(faults));
                }
                dev
            };
            let raid = test.disks.serve(wrap, Mistake::None).await;
            let client = test.client(&raid);
            test.fill(&client).await;
            handle.take().unwrap().clear();
            let found = scrub(&raid).await;
            assert!(found.repaired > 0 && found.unrecoverable == 0, "{found:?}");
            test.check_contents(&client).await;
        });
    }
}

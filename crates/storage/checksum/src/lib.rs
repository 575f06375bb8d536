//! Checksums of the rows in the allocation units of a disk: silent corruption becomes a read error,
//! which the array above repairs from other disks.
//!
//! The last rows of each unit hold the checksums of the others. Before a row is written, its
//! [`ChecksumArea`] is put on a dirty list on the disk, of areas whose checksums may not match;
//! after a crash these are recomputed. Hot areas stay on the list at no cost ([RFD
//! 0031](../../../../docs/rfd/0031-checksums-of-pools.md)).

pub mod format;
pub mod layout;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use block::{
    Account, BufMut, Bufs, Ctx, Dev, Epoch, Error, FlushCoalescer, Info, Layer, Lba, Op,
    reserve_memory,
};
use futures_util::future::{LocalBoxFuture, join, join_all};
use geometry::RowChecksums;
use rustc_hash::FxHashMap;
use slab::Slab;
use smallvec::SmallVec;
use tokio::sync::{Mutex, Notify, OnceCell, Semaphore, SemaphorePermit};

use format::{ChecksumOwner, Checksums, MAX_DIRTY_AREAS};
use layout::{COPIES, ChecksumLayout, ROW, RowRun};

pub use layout::ChecksumArea;

/// Most areas whose checksums are cached, dirty ones included.
const MAX_CACHED_AREAS: usize = 256;

/// Areas that are evicted at a time.
const EVICT_BATCH: usize = 32;

/// Areas that are written back at a time.
const WRITE_BACK_BATCH: usize = 16;

/// How often a write tries to read unreadable checksums, and the interval between attempts.
const MAX_READ_ATTEMPTS: u32 = 5;
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Rows that are read at a time to recompute checksums.
const RECOMPUTE_ROWS: u32 = 16;

/// Memory for I/O of checksums and dirty lists, in rows.
const IO_PAGES: u32 = 48;

/// A disk whose rows are checked. See the [module](self).
pub struct ChecksumLayer {
    below: Dev,
    layout: ChecksumLayout,
    owner: ChecksumOwner,
    /// The disk's name in log lines.
    path: String,
    /// Where the blocks of the dirty list lie.
    dirty_list_at: u64,
    /// Its own memory; `pages` counts the part that is not for cached checksums.
    memory: Ctx,
    pages: Semaphore,
    areas: RefCell<FxHashMap<ChecksumArea, Rc<AreaState>>>,
    /// Counts uses, to find the least recently used area.
    use_clock: Cell<u64>,
    /// Number of areas on the dirty list.
    dirty_count: Cell<usize>,
    /// How often areas were removed from the list, and how often when the list on disk was written.
    removals: Cell<u64>,
    removals_on_disk: Cell<u64>,
    /// Why checksums or the list could not be written; all writes fail from then on.
    failed: Cell<Option<Error>>,
    /// The sequence number of the last list.
    list_sequence: Cell<u64>,
    list_writes: FlushCoalescer,
    /// Held while checksums are written back.
    write_back_lock: Mutex<()>,
    /// An area has left the list, or may leave it.
    list_changed: Notify,
    /// Counts reads that returned data other than what was written.
    corrupt_reads: Arc<AtomicU64>,
    /// Most areas on the dirty list.
    max_dirty: usize,
    /// Planted by tests.
    #[cfg(test)]
    mistake: Mistake,
}

/// Mistakes that tests plant, to show that they are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mistake {
    /// None.
    #[default]
    None,
    /// Data is written before its area is on the list.
    SkipsDirtyList,
    /// An area leaves the list before its data and checksums are durable.
    CleansBeforeFlush,
    /// An area leaves the list although it was written during its write-back.
    CleansDuringWrite,
}

/// The state of an area.
#[derive(Debug, Default)]
struct AreaState {
    checksums: OnceCell<RefCell<Checksums>>,
    dirty: Cell<DirtyState>,
    writers: Cell<u32>,
    /// Number of writes begun, and that number at the last scan.
    writes_begun: Cell<u64>,
    writes_at_last_scan: Cell<u64>,
    last_used: Cell<u64>,
    active: RefCell<ActiveRows>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DirtyState {
    #[default]
    Clean,
    /// It is on the next list to be written.
    Pending,
    Durable,
}

/// Rows with reads or writes in progress. A read carries whether it was overwritten.
#[derive(Debug, Default)]
struct ActiveRows {
    reads: Slab<(Range<u32>, bool)>,
    writes: Slab<Range<u32>>,
}

/// A read of rows of an area.
struct ActiveRead<'a>(&'a AreaState, usize);

/// A write of rows of an area.
struct ActiveWrite<'a>(&'a AreaState, usize);

type AreaParts = SmallVec<[(Rc<AreaState>, ChecksumArea, Range<u32>); 2]>;

impl ChecksumLayer {
    /// Memory that a layer takes, in bytes.
    pub const MEMORY_BYTES: usize = (MAX_CACHED_AREAS + IO_PAGES as usize) * ROW;

    /// Checks the rows of `below` that are in `layout`; `below` has blocks of 4 KiB, and unmapped
    /// ones read as zeroes. The layer owns [`DIRTY_LIST_BLOCKS`](format::DIRTY_LIST_BLOCKS) from
    /// `list_at` on. It first recomputes what a crash has left on the dirty list. Waits for memory.
    ///
    /// # Errors
    /// If the list cannot be read or has an unknown format version; [`Error::NoSpace`] if the core
    /// has too little memory altogether.
    pub async fn new(
        below: Dev,
        layout: ChecksumLayout,
        (owner, path): (ChecksumOwner, &str),
        list_at: u64,
        account: &Account,
        corrupt_reads: Arc<AtomicU64>,
    ) -> Result<Self, Error> {
        debug_assert!(below.info().unmap_zeroes, "unmapped rows have the checksum of zeroes");
        let credit = reserve_memory(account, Self::MEMORY_BYTES).await?;
        let this = Self {
            below,
            layout,
            owner,
            path: path.to_owned(),
            dirty_list_at: list_at,
            memory: Ctx::new(credit, Epoch::default()),
            pages: Semaphore::new(IO_PAGES as usize),
            areas: RefCell::default(),
            use_clock: Cell::new(0),
            dirty_count: Cell::new(0),
            removals: Cell::new(0),
            removals_on_disk: Cell::new(0),
            failed: Cell::new(None),
            list_sequence: Cell::new(0),
            list_writes: FlushCoalescer::default(),
            write_back_lock: Mutex::default(),
            list_changed: Notify::new(),
            corrupt_reads,
            max_dirty: MAX_DIRTY_AREAS,
            #[cfg(test)]
            mistake: Mistake::None,
        };
        this.recover().await?;
        Ok(this)
    }

    /// The same, with at most `most` areas on the dirty list.
    #[cfg(test)]
    fn with_max_dirty(self, most: usize) -> Self {
        Self { max_dirty: most, ..self }
    }

    /// The same, with a mistake planted.
    #[cfg(test)]
    fn with_mistake(self, mistake: Mistake) -> Self {
        Self { mistake, ..self }
    }

    #[cfg(test)]
    fn makes_mistake(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "the same as in tests")]
    fn makes_mistake(&self, _: Mistake) -> bool {
        false
    }

    /// Recomputes the checksums of the areas on the latest list.
    async fn recover(&self) -> Result<(), Error> {
        let mut newest: Option<(u64, Vec<ChecksumArea>)> = None;
        let mut blocks = Vec::new();
        for slot in 0..2 {
            let (copies, failure) = self.read_copies(self.dirty_list_lba(slot)).await?;
            // If neither copy can be read, the areas being written are unknown.
            failure.filter(|_| copies.is_empty()).map_or(Ok(()), Err)?;
            blocks.extend(copies);
        }
        for block in blocks.chunks_exact(ROW).filter_map(as_row) {
            let found = format::parse_dirty_list(block, &self.layout, self.owner);
            let found = found.map_err(|why| {
                tracing::error!(path = %self.path, error = %why, "the checksums of a disk cannot be trusted");
                Error::Corrupt { at: Lba(self.dirty_list_at) }
            })?;
            newest = newest.into_iter().chain(found).max_by_key(|(sequence, _)| *sequence);
        }
        let Some((sequence, areas)) = newest else { return Ok(()) };
        self.list_sequence.set(sequence);
        // The list is empty in memory.
        self.removals.set(u64::from(!areas.is_empty()));
        for area in &areas {
            let checksums = self.recompute_checksums(*area).await?;
            self.write_checksums(*area, &checksums).await?;
        }
        if !areas.is_empty() {
            tracing::info!(path = %self.path, ring = self.owner.ring, areas = areas.len(), "recomputing checksums of rows that were being written");
            self.flush().await?;
        }
        Ok(())
    }

    async fn acquire_pages(&self, pages: u32) -> Option<SemaphorePermit<'_>> {
        self.pages.acquire_many(pages.min(IO_PAGES)).await.ok()
    }

    async fn flush(&self) -> Result<(), Error> {
        self.below.submit(Op::Flush, &self.memory).await.map(drop)
    }

    /// The state of an area, from the cache or new.
    fn area_state(&self, area: ChecksumArea) -> Rc<AreaState> {
        self.use_clock.set(self.use_clock.get() + 1);
        let mut all = self.areas.borrow_mut();
        if !all.contains_key(&area) && all.len() >= MAX_CACHED_AREAS {
            let idle = |known: &Rc<AreaState>| {
                known.dirty.get() == DirtyState::Clean && Rc::strong_count(known) == 1
            };
            let idle = all.iter().filter(|(_, known)| idle(known));
            let mut idle: Vec<(u64, ChecksumArea)> =
                idle.map(|(area, known)| (known.last_used.get(), *area)).collect();
            idle.sort_unstable();
            idle.iter().take(EVICT_BATCH).for_each(|(_, area)| drop(all.remove(area)));
        }
        let known = all.entry(area).or_default();
        known.last_used.set(self.use_clock.get());
        Rc::clone(known)
    }

    /// Splits rows by checksum area.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where checksums lie.
    fn area_parts(&self, at: Lba, rows: u32) -> Result<AreaParts, Error> {
        let mut parts = AreaParts::new();
        for run in self.layout.runs(at.0, rows) {
            match run {
                RowRun::Checked(area, rows) => parts.push((self.area_state(area), area, rows)),
                RowRun::Unchecked(_) => {}
                RowRun::ChecksumBlocks(_) => return Err(Error::OutOfRange),
            }
        }
        Ok(parts)
    }

    /// The checksums of an area. With `gives_up`, for writes, checksums that stay unreadable for a
    /// while are given up.
    async fn checksums_of<'a>(
        &self,
        known: &'a AreaState,
        area: ChecksumArea,
        gives_up: bool,
    ) -> Result<&'a RefCell<Checksums>, Error> {
        known.checksums.get_or_try_init(|| self.load_checksums(area, gives_up)).await
    }

    async fn load_checksums(
        &self,
        area: ChecksumArea,
        gives_up: bool,
    ) -> Result<RefCell<Checksums>, Error> {
        let mut attempts = 0;
        loop {
            let found = self.read_checksums(area).await;
            attempts += 1;
            // A misdirected read returns something else, often zeroes.
            let is_sure = attempts > 1;
            match found {
                Ok(Some(checksums)) if is_sure || *checksums != *format::zero_checksums() => {
                    return Ok(RefCell::new(checksums));
                }
                Ok(None) if is_sure => break,
                Ok(_) => {}
                Err(Error::Gone) => return Err(Error::Gone),
                Err(why) if is_sure && !gives_up => return Err(why),
                Err(_) if attempts >= MAX_READ_ATTEMPTS => break,
                Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
            }
        }
        tracing::error!(path = %self.path, unit = area.unit, area = area.index, "checksums lost; these rows are unreadable until rewritten");
        Ok(RefCell::new(format::unknown_checksums()))
    }

    /// The checksums of an area; none if the disk returns something else.
    async fn read_checksums(&self, area: ChecksumArea) -> Result<Option<Checksums>, Error> {
        let (found, failure) = self.read_copies(self.layout.checksum_block(area)).await?;
        match (format::parse_copies(&found, area, self.owner.member), failure) {
            (None, Some(why)) => Err(why),
            (checksums, _) => Ok(checksums),
        }
    }

    /// The readable copies of a block, and the error of the others.
    async fn read_copies(&self, first: u64) -> Result<(Vec<u8>, Option<Error>), Error> {
        let _pages = self.acquire_pages(COPIES).await;
        // A detached read of them may overlap a later write.
        let read = async |at: u64, blocks: u32| {
            let op = Op::Read { at: Lba(at), blocks };
            self.below.start_detached(op, &self.memory)?.await.map(|data| data.to_vec())
        };
        match read(first, COPIES).await {
            Ok(both) => return Ok((both, None)),
            Err(Error::Gone) => return Err(Error::Gone),
            Err(_) => {}
        }
        let (mut found, mut failure) = (Vec::new(), None);
        for at in first..first + u64::from(COPIES) {
            match read(at, 1).await {
                Ok(block) => found.extend(block),
                Err(Error::Gone) => return Err(Error::Gone),
                Err(why) => failure = Some(why),
            }
        }
        Ok((found, failure))
    }

    /// Computes the checksums of whatever an area holds.
    async fn recompute_checksums(&self, area: ChecksumArea) -> Result<Checksums, Error> {
        let mut checksums = format::zero_checksums();
        let rows = self.layout.area_rows(area);
        let _pages = self.acquire_pages(RECOMPUTE_ROWS).await;
        let mut at = rows.start;
        while at < rows.end {
            let count = u32::try_from(rows.end - at).unwrap_or(RECOMPUTE_ROWS).min(RECOMPUTE_ROWS);
            let first = usize::try_from(at - rows.start).unwrap_or(0);
            match self.below.submit(Op::Read { at: Lba(at), blocks: count }, &self.memory).await {
                Ok(data) => set_checksums(&mut checksums, first, checksums_of_rows(&data)),
                Err(Error::Gone) => return Err(Error::Gone),
                Err(_) => {
                    for n in 0..count {
                        let op = Op::Read { at: Lba(at + u64::from(n)), blocks: 1 };
                        let first = first + n as usize;
                        match self.below.submit(op, &self.memory).await {
                            Ok(data) => {
                                set_checksums(&mut checksums, first, checksums_of_rows(&data));
                            }
                            Err(Error::Gone) => return Err(Error::Gone),
                            // If it becomes readable one day, nothing can verify it.
                            Err(_) => set_checksums(
                                &mut checksums,
                                first,
                                [format::UNKNOWN_CHECKSUM].into_iter(),
                            ),
                        }
                    }
                }
            }
            at += u64::from(count);
        }
        Ok(checksums)
    }

    async fn write_checksums(
        &self,
        area: ChecksumArea,
        checksums: &[u32; layout::CHECKSUMS_PER_BLOCK],
    ) -> Result<(), Error> {
        let bytes = format::checksums_to_bytes(checksums, area, self.owner.member);
        self.write_copies(self.layout.checksum_block(area), &bytes, COPIES, false).await
    }

    /// Writes a block `times` times in a row.
    async fn write_copies(
        &self,
        at: u64,
        bytes: &[u8; ROW],
        times: u32,
        fua: bool,
    ) -> Result<(), Error> {
        let _pages = self.acquire_pages(times).await;
        let page = || {
            let mut page: BufMut = self.memory.credit().alloc_page(ROW);
            page.copy_from_slice(bytes);
            page.freeze()
        };
        let data = (0..times).map(|_| page()).collect();
        self.below.submit(Op::Write { at: Lba(at), data, fua }, &self.memory).await.map(drop)
    }

    /// Makes the dirty list durable.
    async fn write_dirty_list(&self) -> Result<(), Error> {
        self.list_writes.flush(|| self.write_dirty_list_now()).await
    }

    async fn write_dirty_list_now(&self) -> Result<(), Error> {
        let all: Vec<(ChecksumArea, Rc<AreaState>)> = {
            let known = self.areas.borrow();
            let listed = known.iter().filter(|(_, known)| known.dirty.get() != DirtyState::Clean);
            listed.map(|(area, known)| (*area, Rc::clone(known))).collect()
        };
        let areas: Vec<ChecksumArea> = all.iter().map(|(area, _)| *area).collect();
        let (sequence, removals) = (self.list_sequence.get() + 1, self.removals.get());
        self.list_sequence.set(sequence);
        let bytes = format::dirty_list_to_bytes(&areas, sequence, self.owner);
        let written = self.write_copies(self.dirty_list_lba(sequence), &bytes, COPIES, true).await;
        written.inspect_err(|why| self.stop_writes(*why))?;
        self.removals_on_disk.set(removals);
        for (_, known) in all {
            if known.dirty.get() == DirtyState::Pending {
                known.dirty.set(DirtyState::Durable);
            }
        }
        Ok(())
    }

    /// Where the list of this sequence number lies.
    fn dirty_list_lba(&self, sequence: u64) -> u64 {
        self.dirty_list_at + sequence % 2 * u64::from(COPIES)
    }

    /// Fails all writes, and wakes those that wait for the list: they would wait for ever.
    fn stop_writes(&self, why: Error) {
        self.failed.set(Some(why));
        self.list_changed.notify_waiters();
    }

    fn check_writable(&self) -> Result<(), Error> {
        self.failed.get().map_or(Ok(()), Err)
    }

    fn has_dirty_room(&self, parts: &AreaParts) -> bool {
        self.dirty_count.get() + self.newly_dirty(parts) <= self.max_dirty
    }

    /// How many of these areas are not on the list.
    fn newly_dirty(&self, parts: &AreaParts) -> usize {
        parts.iter().filter(|(known, ..)| known.dirty.get() == DirtyState::Clean).count()
    }

    /// Waits until all these areas are on the durable list and may be written. Pairs with
    /// [`Self::end_write`].
    async fn begin_write(&self, parts: &AreaParts) -> Result<(), Error> {
        loop {
            // Created before the check, so that no notification is missed.
            let changed = self.list_changed.notified();
            self.check_writable()?;
            if self.has_dirty_room(parts) {
                self.dirty_count.set(self.dirty_count.get() + self.newly_dirty(parts));
                break;
            }
            let lock = self.write_back_lock.lock().await;
            // Another writer may have made space.
            let made_room = self.has_dirty_room(parts)
                || self.write_back(WRITE_BACK_BATCH, |_, _| true).await?;
            drop(lock);
            if !made_room {
                changed.await;
            }
        }
        for (known, ..) in parts {
            if known.dirty.get() == DirtyState::Clean {
                known.dirty.set(DirtyState::Pending);
            }
            known.writers.set(known.writers.get() + 1);
        }
        let is_durable =
            |(known, ..): &(Rc<AreaState>, _, _)| known.dirty.get() == DirtyState::Durable;
        if self.makes_mistake(Mistake::SkipsDirtyList) {
            parts.iter().for_each(|(known, ..)| known.dirty.set(DirtyState::Durable));
        }
        if parts.iter().all(is_durable) {
            return Ok(());
        }
        self.write_dirty_list().await.inspect_err(|_| self.end_write(parts))
    }

    fn end_write(&self, parts: &AreaParts) {
        parts.iter().for_each(|(known, ..)| known.writers.set(known.writers.get() - 1));
        self.list_changed.notify_waiters();
    }

    /// Writes back the checksums of at most `most` idle areas for which `filter` holds, least
    /// recently used first, and removes them from the list. `filter` is called once for each idle
    /// area. Whether there were any. The caller holds `write_back_lock`.
    async fn write_back(
        &self,
        most: usize,
        filter: impl Fn(&ChecksumArea, &AreaState) -> bool,
    ) -> Result<bool, Error> {
        self.check_writable()?;
        let mut idle: Vec<(u64, ChecksumArea, Rc<AreaState>, u64)> = {
            let known = self.areas.borrow();
            let is_idle = |known: &AreaState| {
                known.dirty.get() == DirtyState::Durable && known.writers.get() == 0
            };
            let idle = known.iter().filter(|(area, known)| is_idle(known) && filter(area, known));
            idle.map(|(area, known)| {
                (known.last_used.get(), *area, Rc::clone(known), known.writes_begun.get())
            })
            .collect()
        };
        idle.sort_unstable_by_key(|(used, area, ..)| (*used, *area));
        idle.truncate(most);
        if idle.is_empty() {
            return Ok(false);
        }
        let each = idle.iter().filter_map(|(_, area, known, _)| {
            let checksums = known.checksums.get()?.borrow().clone();
            Some(async move { self.write_checksums(*area, &checksums).await })
        });
        let mut outcome: Result<(), Error> = join_all(each).await.into_iter().collect();
        // Data and checksums must be durable before the area leaves the list.
        let is_volatile =
            self.below.info().volatile_cache && !self.makes_mistake(Mistake::CleansBeforeFlush);
        if is_volatile && outcome.is_ok() {
            outcome = self.flush().await;
        }
        outcome.inspect_err(|why| self.stop_writes(*why))?;
        for (_, _, known, writes_begun) in idle {
            let is_same = known.writers.get() == 0 && known.writes_begun.get() == writes_begun;
            if is_same || self.makes_mistake(Mistake::CleansDuringWrite) {
                known.dirty.set(DirtyState::Clean);
                self.dirty_count.set(self.dirty_count.get() - 1);
                self.removals.set(self.removals.get() + 1);
            }
        }
        self.list_changed.notify_waiters();
        Ok(true)
    }

    /// As [`Self::write_back`], for all such areas.
    async fn write_back_all(
        &self,
        filter: impl Fn(&ChecksumArea, &AreaState) -> bool,
    ) -> Result<bool, Error> {
        let _lock = self.write_back_lock.lock().await;
        self.write_back(self.max_dirty, filter).await
    }

    /// Rewrites the list if areas have left it: these must not be recomputed after a crash, since
    /// another owner may have written there by then.
    async fn write_list_if_shrunk(&self) -> Result<(), Error> {
        if self.removals_on_disk.get() != self.removals.get() {
            self.write_dirty_list().await
        } else {
            Ok(())
        }
    }

    async fn read(&self, at: Lba, rows: u32, ctx: &Ctx) -> Result<Bufs, Error> {
        let parts = self.area_parts(at, rows)?;
        let reading: SmallVec<[ActiveRead<'_>; 2]> =
            parts.iter().map(|(known, _, rows)| known.begin_read(rows)).collect();
        // The checksums are updated when a write begins, so they may be newer than this read.
        let read = self.below.start_detached(Op::Read { at, blocks: rows }, ctx)?;
        let data = match parts.iter().all(|(known, ..)| known.checksums.initialized()) {
            true => read.await?,
            false => {
                let checksums =
                    parts.iter().map(|(known, area, _)| self.checksums_of(known, *area, false));
                let (data, checksums) = join(read, join_all(checksums)).await;
                // Without checksums, the rows count as unreadable.
                let unreadable =
                    |why| if why == Error::Gone { why } else { Error::Unreadable { at } };
                checksums
                    .into_iter()
                    .try_for_each(|checksums| checksums.map(drop).map_err(unreadable))?;
                data?
            }
        };
        let Some((at_row, checksum)) = self.first_mismatch(at, rows, &data, &parts) else {
            return Ok(data);
        };
        if checksum == format::UNKNOWN_CHECKSUM {
            return Err(Error::Unreadable { at: at_row });
        }
        // A caller that lets others overwrite what it reads ignores the result.
        if !reading.iter().any(ActiveRead::was_overwritten) {
            self.corrupt_reads.fetch_add(1, Ordering::Relaxed);
            // The caller reports it, with the volume concerned.
            tracing::debug!(path = %self.path, row = at_row.0, "checksum mismatch: a row is not as it was written");
        }
        Err(Error::Corrupt { at: at_row })
    }

    /// The first row that does not match, and its expected checksum.
    fn first_mismatch(
        &self,
        at: Lba,
        rows: u32,
        data: &Bufs,
        parts: &AreaParts,
    ) -> Option<(Lba, u32)> {
        if parts.is_empty() {
            return None;
        }
        let mut checksums = checksums_of_rows(data);
        let mut row = at.0;
        for part in self.layout.runs(at.0, rows) {
            let count = part.rows();
            let of = checksums.by_ref().take(count as usize);
            if let RowRun::Checked(area, rows) = part {
                let (known, ..) = parts.iter().find(|(_, known, _)| *known == area)?;
                let all = known.checksums.get()?.borrow();
                let expected = &all[rows.start as usize..rows.end as usize];
                let mut wrong = (0u64..)
                    .zip(of.zip(expected))
                    .filter(|(_, (actual, checksum))| actual != *checksum);
                if let Some((n, (_, checksum))) = wrong.next() {
                    return Some((Lba(row + n), *checksum));
                }
            } else {
                of.for_each(drop);
            }
            row += u64::from(count);
        }
        None
    }

    /// Runs `op`, which changes these rows; `new` yields their new checksums.
    async fn write_checked(
        &self,
        op: Op,
        (at, rows): (Lba, u32),
        mut new: impl Iterator<Item = u32>,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let parts = self.area_parts(at, rows)?;
        if parts.is_empty() {
            return self.below.submit(op, ctx).await;
        }
        let checksums = parts.iter().map(|(known, area, _)| self.checksums_of(known, *area, true));
        let (entered, checksums) = join(self.begin_write(&parts), join_all(checksums)).await;
        entered?;
        let checksums: Result<SmallVec<[_; 2]>, Error> = checksums.into_iter().collect();
        let changed = match checksums {
            Ok(checksums) => {
                let mut writing = SmallVec::<[ActiveWrite<'_>; 2]>::new();
                for part in self.layout.runs(at.0, rows) {
                    let of = new.by_ref().take(part.rows() as usize);
                    let RowRun::Checked(area, rows) = part else {
                        of.for_each(drop);
                        continue;
                    };
                    let found =
                        parts.iter().zip(&checksums).find(|((_, known, _), _)| *known == area);
                    let Some(((known, ..), checksums)) = found else { continue };
                    set_checksums(&mut checksums.borrow_mut(), rows.start as usize, of);
                    writing.push(known.begin_write(rows));
                }
                self.below.submit(op, ctx).await
            }
            Err(why) => Err(why),
        };
        self.end_write(&parts);
        changed
    }

    /// Zeroes rows, area by area since there may be many.
    async fn zero_checked(
        &self,
        (at, rows): (Lba, u32),
        op: impl Fn(Lba, u32) -> Op,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let mut next = at.0;
        for part in self.layout.runs(at.0, rows) {
            let (at, count) = (Lba(next), part.rows());
            self.write_checked(op(at, count), (at, count), std::iter::repeat(0), ctx).await?;
            next += u64::from(count);
        }
        Ok(Bufs::new())
    }
}

/// Sets checksums from index `first` on.
fn set_checksums(checksums: &mut Checksums, first: usize, new: impl Iterator<Item = u32>) {
    checksums.iter_mut().skip(first).zip(new).for_each(|(slot, checksum)| *slot = checksum);
}

/// The checksum of each row.
fn checksums_of_rows(data: &Bufs) -> impl Iterator<Item = u32> + '_ {
    let mut whole = data.iter();
    let mut rest: &[u8] = &[];
    std::iter::from_fn(move || {
        let mut crc = SmallVec::<[&[u8]; 4]>::new();
        let mut missing = ROW;
        while missing > 0 {
            if rest.is_empty() {
                rest = whole.next()?;
            }
            let (part, remaining) = rest.split_at(rest.len().min(missing));
            crc.push(part);
            (missing, rest) = (missing - part.len(), remaining);
        }
        Some(format::row_checksum(crc))
    })
}

fn as_row(bytes: &[u8]) -> Option<&[u8; ROW]> {
    bytes.try_into().ok()
}

impl AreaState {
    fn begin_read(&self, rows: &Range<u32>) -> ActiveRead<'_> {
        let mut all = self.active.borrow_mut();
        let is_written = all.writes.iter().any(|(_, written)| overlap(written, rows));
        ActiveRead(self, all.reads.insert((rows.clone(), is_written)))
    }

    fn begin_write(&self, rows: Range<u32>) -> ActiveWrite<'_> {
        self.writes_begun.set(self.writes_begun.get() + 1);
        let mut all = self.active.borrow_mut();
        for (_, (read, is_written)) in &mut all.reads {
            *is_written |= overlap(read, &rows);
        }
        ActiveWrite(self, all.writes.insert(rows))
    }
}

fn overlap(a: &Range<u32>, b: &Range<u32>) -> bool {
    a.start < b.end && b.start < a.end
}

impl ActiveRead<'_> {
    /// Whether the rows were written since the read began.
    fn was_overwritten(&self) -> bool {
        self.0.active.borrow().reads[self.1].1
    }
}

impl Drop for ActiveRead<'_> {
    fn drop(&mut self) {
        self.0.active.borrow_mut().reads.remove(self.1);
    }
}

impl Drop for ActiveWrite<'_> {
    fn drop(&mut self) {
        self.0.active.borrow_mut().writes.remove(self.1);
    }
}

impl RowChecksums for ChecksumLayer {
    fn release_unit(&self, row: u64) -> LocalBoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            let Some(unit) = self.layout.unit_of(row) else { return Ok(()) };
            let is_listed = || {
                let known = self.areas.borrow();
                let of_it = known.iter().filter(|(area, _)| area.unit == unit);
                of_it.into_iter().any(|(_, known)| known.dirty.get() != DirtyState::Clean)
            };
            loop {
                let changed = self.list_changed.notified();
                self.check_writable()?;
                if !is_listed() {
                    break;
                }
                if !self.write_back_all(|area, _| area.unit == unit).await? {
                    changed.await;
                }
            }
            self.areas.borrow_mut().retain(|area, _| area.unit != unit);
            self.write_list_if_shrunk().await
        })
    }

    fn release_idle(&self) -> LocalBoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            self.write_back_all(|_, _| true).await?;
            let is_used = |known: &Rc<AreaState>| Rc::strong_count(known) > 1;
            {
                let mut known = self.areas.borrow_mut();
                known.retain(|_, known| known.dirty.get() != DirtyState::Clean || is_used(known));
            }
            self.write_list_if_shrunk().await
        })
    }

    fn write_back_cold(&self) -> LocalBoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            let is_quiet = |_: &ChecksumArea, known: &AreaState| {
                let written = known.writes_begun.get();
                known.writes_at_last_scan.replace(written) == written
            };
            self.write_back_all(is_quiet).await?;
            self.write_list_if_shrunk().await
        })
    }

    fn forget_unit(&self, row: u64) {
        let unit = self.layout.unit_of(row);
        let mut known = self.areas.borrow_mut();
        known.retain(|area, known| {
            Some(area.unit) != unit || known.dirty.get() != DirtyState::Clean
        });
    }
}

impl Layer for ChecksumLayer {
    fn name(&self) -> &'static str {
        "checksum"
    }

    fn info(&self) -> Info {
        self.below.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match op {
            Op::Read { at, blocks } => self.read(at, blocks, &ctx).await,
            Op::Write { at, ref data, .. } => {
                let rows = u32::try_from(data.len() / ROW).unwrap_or(u32::MAX);
                let checksums: SmallVec<[u32; 16]> = checksums_of_rows(data).collect();
                self.write_checked(op, (at, rows), checksums.into_iter(), &ctx).await
            }
            // Rare operations are boxed, to keep the future of a read small.
            Op::Zero { at, blocks, unmap, fua } => {
                let op = |at, blocks| Op::Zero { at, blocks, unmap, fua };
                Box::pin(self.zero_checked((at, blocks), op, &ctx)).await
            }
            Op::Unmap { at, blocks } => {
                let op = |at, blocks| Op::Unmap { at, blocks };
                Box::pin(self.zero_checked((at, blocks), op, &ctx)).await
            }
            Op::BlockStatus { .. } | Op::Flush => self.below.submit(op, &ctx).await,
        }
    }
}

impl fmt::Debug for ChecksumLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { below, layout, owner, .. } = self;
        let fields = (below, layout, owner);
        f.debug_tuple("ChecksumLayer").field(&fields).finish()
    }
}

#[cfg(test)]
mod tests;

//! Checksums of what lies in the units of a disk: wrong data is a read error, which whoever reads makes good from other disks.
//!
//! The last rows of each unit hold the sums of the others. Before a row is written its [`Area`] is on a list on the disk of those whose
//! sums may not fit; after a crash these are made anew. What is hot stays on the list and costs nothing
//! ([RFD 0031](../../../../docs/rfd/0031-checksums-of-pools.md)).

pub mod place;
pub mod stored;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use block::{
    Account, BufMut, Bufs, Ctx, Dev, Epoch, Error, FlushGate, Info, Layer, Lba, Op, fixed_credit,
};
use futures_util::future::{join, join_all};
use geometry::{Done, RowChecksums};
use rustc_hash::FxHashMap;
use slab::Slab;
use smallvec::SmallVec;
use tokio::sync::{Mutex, Notify, OnceCell, Semaphore, SemaphorePermit};

use place::{COPIES, Part, Place};
use stored::{MAX_LISTED, ROW, Sums, Whose};

pub use place::Area;

/// Most areas whose sums are in memory, those on the list counted.
const MOST_KNOWN: usize = 256;

/// How many of them are let go of at once.
const LET_GO: usize = 32;

/// Areas that leave the list at once.
const SETTLED_AT_ONCE: usize = 16;

/// How often sums that cannot be read are asked for by whoever has to write there, and how long after each other.
const TRIES: u32 = 5;
const BETWEEN_TRIES: Duration = Duration::from_millis(200);

/// Rows that are read at once to make sums anew.
const ANEW_ROWS: u32 = 16;

/// Memory for what is read and written of sums and lists, in rows.
const PAGES: u32 = 48;

/// A disk of which rows are checked. See the [module](self).
pub struct Integrity {
    below: Dev,
    place: Place,
    whose: Whose,
    /// What the disk is called in the log.
    path: String,
    /// Where the blocks of the list lie.
    list_at: u64,
    /// Memory of its own; `pages` counts what of it is not for sums.
    memory: Ctx,
    pages: Semaphore,
    known: RefCell<FxHashMap<Area, Rc<Known>>>,
    /// Counts uses, so that the one that was used least recently is told.
    uses: Cell<u64>,
    /// How many are on the list.
    listed: Cell<usize>,
    /// How often areas have left the list, and how often they had when that on the disk was made.
    left: Cell<u64>,
    left_on_disk: Cell<u64>,
    /// Why sums or the list could not be written: nothing can be any more.
    failed: Cell<Option<Error>>,
    /// That of the last list.
    sequence: Cell<u64>,
    lists: FlushGate,
    /// Whoever writes sums.
    settling: Mutex<()>,
    /// An area may leave the list, or has.
    changed: Notify,
    /// Where reads are counted that gave what was not written.
    wrong: Arc<AtomicU64>,
    /// Most areas on the list.
    most: usize,
    /// Made on purpose; none but in tests.
    mistake: Mistake,
}

/// Mistakes that tests make, to see that they would be found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mistake {
    /// None.
    #[default]
    None,
    /// Data is written before its area is on the list.
    SkipsList,
    /// An area leaves the list before its data and its sums are durable.
    Unflushed,
    /// An area leaves the list though it was written while its sums were.
    LeavesBusy,
}

/// What is known of an area.
#[derive(Debug, Default)]
struct Known {
    sums: OnceCell<RefCell<Sums>>,
    listed: Cell<Listed>,
    writers: Cell<u32>,
    /// Writes that have begun, and how many had at the last look.
    written: Cell<u64>,
    seen: Cell<u64>,
    used: Cell<u64>,
    rows: RefCell<Rows>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Listed {
    #[default]
    No,
    /// It will be with the next list.
    Wanted,
    Durable,
}

/// Rows that are being read and written.
#[derive(Debug, Default)]
struct Rows {
    reads: Slab<(Range<u32>, bool)>,
    writes: Slab<Range<u32>>,
}

/// A read of rows of an area.
struct Reading<'a>(&'a Known, usize);

/// A write of rows of an area.
struct Writing<'a>(&'a Known, usize);

type Parts = SmallVec<[(Rc<Known>, Area, Range<u32>); 2]>;

impl Integrity {
    /// Memory that it takes, in bytes.
    pub const MEMORY: usize = (MOST_KNOWN + PAGES as usize) * ROW;

    /// The rows of `below`, in blocks of 4 KiB and zero where they were unmapped, of which those at `place` are checked. The
    /// [`LIST_BLOCKS`](stored::LIST_BLOCKS) from `list_at` on are its own. What a crash has left there is made anew first. Waits while others have the memory.
    ///
    /// # Errors
    /// That the list cannot be read, or is of a release that is not known; [`Error::NoSpace`] if the core could never give so much
    /// memory.
    pub async fn new(
        below: Dev,
        place: Place,
        (whose, path): (Whose, &str),
        list_at: u64,
        account: &Account,
        wrong: Arc<AtomicU64>,
    ) -> Result<Self, Error> {
        debug_assert!(below.info().unmap_zeroes, "what was unmapped has the sum of zeroes");
        let credit = fixed_credit(account, Self::MEMORY).await?;
        let this = Self {
            below,
            place,
            whose,
            path: path.to_owned(),
            list_at,
            memory: Ctx::new(credit, Epoch::default()),
            pages: Semaphore::new(PAGES as usize),
            known: RefCell::default(),
            uses: Cell::new(0),
            listed: Cell::new(0),
            left: Cell::new(0),
            left_on_disk: Cell::new(0),
            failed: Cell::new(None),
            sequence: Cell::new(0),
            lists: FlushGate::default(),
            settling: Mutex::default(),
            changed: Notify::new(),
            wrong,
            most: MAX_LISTED,
            mistake: Mistake::None,
        };
        this.recover().await?;
        Ok(this)
    }

    /// The same with a list of at most so many areas.
    #[cfg(test)]
    fn holding(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// The same with a mistake.
    #[cfg(test)]
    fn mistaken(self, mistake: Mistake) -> Self {
        Self { mistake, ..self }
    }

    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    /// Makes the sums anew of what is on the list that was written last.
    async fn recover(&self) -> Result<(), Error> {
        let mut newest: Option<(u64, Vec<Area>)> = None;
        let mut blocks = Vec::new();
        for slot in 0..2 {
            let (copies, failure) = self.read_copies(self.list_slot(slot)).await?;
            // Where neither can be read nobody knows what was being written.
            failure.filter(|_| copies.is_empty()).map_or(Ok(()), Err)?;
            blocks.extend(copies);
        }
        for block in blocks.chunks_exact(ROW).filter_map(row) {
            let found = stored::parse_list(block, &self.place, self.whose);
            let found = found.map_err(|why| {
                tracing::error!(path = %self.path, error = %why, "the checksums of a disk cannot be trusted");
                Error::Corrupt { at: Lba(self.list_at) }
            })?;
            newest = newest.into_iter().chain(found).max_by_key(|(sequence, _)| *sequence);
        }
        let Some((sequence, areas)) = newest else { return Ok(()) };
        self.sequence.set(sequence);
        // None of them is on the list here.
        self.left.set(u64::from(!areas.is_empty()));
        for area in &areas {
            let sums = self.made_anew(*area).await?;
            self.write_sums(*area, &sums).await?;
        }
        if !areas.is_empty() {
            tracing::info!(path = %self.path, ring = self.whose.ring, areas = areas.len(), "checksums of what was being written are made anew");
            self.flush().await?;
        }
        Ok(())
    }

    async fn take(&self, pages: u32) -> Option<SemaphorePermit<'_>> {
        self.pages.acquire_many(pages.min(PAGES)).await.ok()
    }

    async fn flush(&self) -> Result<(), Error> {
        self.below.submit(Op::Flush, &self.memory).await.map(drop)
    }

    /// What is known of an area, from now on.
    fn known(&self, area: Area) -> Rc<Known> {
        self.uses.set(self.uses.get() + 1);
        let mut all = self.known.borrow_mut();
        if !all.contains_key(&area) && all.len() >= MOST_KNOWN {
            let idle = |known: &Rc<Known>| {
                known.listed.get() == Listed::No && Rc::strong_count(known) == 1
            };
            let idle = all.iter().filter(|(_, known)| idle(known));
            let mut idle: Vec<(u64, Area)> =
                idle.map(|(area, known)| (known.used.get(), *area)).collect();
            idle.sort_unstable();
            idle.iter().take(LET_GO).for_each(|(_, area)| drop(all.remove(area)));
        }
        let known = all.entry(area).or_default();
        known.used.set(self.uses.get());
        Rc::clone(known)
    }

    /// What of these rows is of which area.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where sums lie.
    fn parts(&self, at: Lba, rows: u32) -> Result<Parts, Error> {
        let mut parts = Parts::new();
        for part in self.place.parts(at.0, rows) {
            match part {
                Part::Of(area, rows) => parts.push((self.known(area), area, rows)),
                Part::Bare(_) => {}
                Part::Sums(_) => return Err(Error::OutOfRange),
            }
        }
        Ok(parts)
    }

    /// The sums of an area. Whoever has to write there gives up sums that the disk does not give back after a while.
    async fn sums<'a>(
        &self,
        known: &'a Known,
        area: Area,
        gives_up: bool,
    ) -> Result<&'a RefCell<Sums>, Error> {
        known.sums.get_or_try_init(|| self.load(area, gives_up)).await
    }

    async fn load(&self, area: Area, gives_up: bool) -> Result<RefCell<Sums>, Error> {
        let mut tries = 0;
        loop {
            let found = self.read_sums(area).await;
            tries += 1;
            // A read that went elsewhere has found something else, and often enough zeroes.
            let is_sure = tries > 1;
            match found {
                Ok(Some(sums)) if is_sure || *sums != *stored::no_sums() => {
                    return Ok(RefCell::new(sums));
                }
                Ok(None) if is_sure => break,
                Ok(_) => {}
                Err(Error::Gone) => return Err(Error::Gone),
                Err(why) if is_sure && !gives_up => return Err(why),
                Err(_) if tries >= TRIES => break,
                Err(_) => tokio::time::sleep(BETWEEN_TRIES).await,
            }
        }
        tracing::error!(path = %self.path, unit = area.unit, area = area.number, "a disk of the pool has lost checksums: what they were of is not believed");
        Ok(RefCell::new(stored::unknown_sums()))
    }

    /// The sums of an area; none if what the disk gives back is something else.
    async fn read_sums(&self, area: Area) -> Result<Option<Sums>, Error> {
        let (found, failure) = self.read_copies(self.place.sums_at(area)).await?;
        match (stored::parse_copies(&found, area, self.whose.member), failure) {
            (None, Some(why)) => Err(why),
            (sums, _) => Ok(sums),
        }
    }

    /// What can be read of the copies of a block, and why others cannot.
    async fn read_copies(&self, first: u64) -> Result<(Vec<u8>, Option<Error>), Error> {
        let _pages = self.take(COPIES).await;
        // A read that nobody waits for any more may meet a write of them.
        let read = async |at: u64, blocks: u32| {
            let op = Op::Read { at: Lba(at), blocks };
            self.below.start_forsaken(op, &self.memory)?.await.map(|data| data.to_vec())
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

    /// Sums of what an area holds, whatever that is.
    async fn made_anew(&self, area: Area) -> Result<Sums, Error> {
        let mut sums = stored::no_sums();
        let rows = self.place.rows_of(area);
        let _pages = self.take(ANEW_ROWS).await;
        let mut at = rows.start;
        while at < rows.end {
            let count = u32::try_from(rows.end - at).unwrap_or(ANEW_ROWS).min(ANEW_ROWS);
            let first = usize::try_from(at - rows.start).unwrap_or(0);
            match self.below.submit(Op::Read { at: Lba(at), blocks: count }, &self.memory).await {
                Ok(data) => set(&mut sums, first, sums_of(&data)),
                Err(Error::Gone) => return Err(Error::Gone),
                Err(_) => {
                    for n in 0..count {
                        let op = Op::Read { at: Lba(at + u64::from(n)), blocks: 1 };
                        let first = first + n as usize;
                        match self.below.submit(op, &self.memory).await {
                            Ok(data) => set(&mut sums, first, sums_of(&data)),
                            Err(Error::Gone) => return Err(Error::Gone),
                            // Whatever it gives back one day, nobody knows whether that is right.
                            Err(_) => set(&mut sums, first, [stored::UNREADABLE].into_iter()),
                        }
                    }
                }
            }
            at += u64::from(count);
        }
        Ok(sums)
    }

    async fn write_sums(&self, area: Area, sums: &[u32; stored::SUMS]) -> Result<(), Error> {
        let bytes = stored::sums_to_bytes(sums, area, self.whose.member);
        self.put(self.place.sums_at(area), &bytes, COPIES, false).await
    }

    /// Writes a block, so many times one behind the other.
    async fn put(&self, at: u64, bytes: &[u8; ROW], times: u32, fua: bool) -> Result<(), Error> {
        let _pages = self.take(times).await;
        let page = || {
            let mut page: BufMut = self.memory.credit().alloc_page(ROW);
            page.copy_from_slice(bytes);
            page.freeze()
        };
        let data = (0..times).map(|_| page()).collect();
        self.below.submit(Op::Write { at: Lba(at), data, fua }, &self.memory).await.map(drop)
    }

    /// Makes durable what is on the list.
    async fn write_list(&self) -> Result<(), Error> {
        self.lists.flush(|| self.put_list()).await
    }

    async fn put_list(&self) -> Result<(), Error> {
        let all: Vec<(Area, Rc<Known>)> = {
            let known = self.known.borrow();
            let listed = known.iter().filter(|(_, known)| known.listed.get() != Listed::No);
            listed.map(|(area, known)| (*area, Rc::clone(known))).collect()
        };
        let areas: Vec<Area> = all.iter().map(|(area, _)| *area).collect();
        let (sequence, left) = (self.sequence.get() + 1, self.left.get());
        self.sequence.set(sequence);
        let bytes = stored::list_to_bytes(&areas, sequence, self.whose);
        let put = self.put(self.list_slot(sequence), &bytes, COPIES, true).await;
        put.inspect_err(|why| self.fail(*why))?;
        self.left_on_disk.set(left);
        for (_, known) in all {
            if known.listed.get() == Listed::Wanted {
                known.listed.set(Listed::Durable);
            }
        }
        Ok(())
    }

    /// Where the list of this sequence lies.
    fn list_slot(&self, sequence: u64) -> u64 {
        self.list_at + sequence % 2 * u64::from(COPIES)
    }

    /// Whoever waits for room on the list, or for areas to leave it, would do so for ever.
    fn fail(&self, why: Error) {
        self.failed.set(Some(why));
        self.changed.notify_waiters();
    }

    fn check(&self) -> Result<(), Error> {
        self.failed.get().map_or(Ok(()), Err)
    }

    fn has_room(&self, parts: &Parts) -> bool {
        self.listed.get() + self.new_of(parts) <= self.most
    }

    /// How many of these are not on the list.
    fn new_of(&self, parts: &Parts) -> usize {
        parts.iter().filter(|(known, ..)| known.listed.get() == Listed::No).count()
    }

    /// Waits until all these areas may be written: they are on the list. Ends with [`Self::leave`].
    async fn enter(&self, parts: &Parts) -> Result<(), Error> {
        loop {
            // Made before looking: what changes in between is not missed.
            let changed = self.changed.notified();
            self.check()?;
            if self.has_room(parts) {
                self.listed.set(self.listed.get() + self.new_of(parts));
                break;
            }
            let alone = self.settling.lock().await;
            // Others may have made room.
            let settled = self.has_room(parts) || self.settle(SETTLED_AT_ONCE, |_, _| true).await?;
            drop(alone);
            if !settled {
                changed.await;
            }
        }
        for (known, ..) in parts {
            if known.listed.get() == Listed::No {
                known.listed.set(Listed::Wanted);
            }
            known.writers.set(known.writers.get() + 1);
        }
        let is_durable = |(known, ..): &(Rc<Known>, _, _)| known.listed.get() == Listed::Durable;
        if self.makes(Mistake::SkipsList) {
            parts.iter().for_each(|(known, ..)| known.listed.set(Listed::Durable));
        }
        if parts.iter().all(is_durable) {
            return Ok(());
        }
        self.write_list().await.inspect_err(|_| self.leave(parts))
    }

    fn leave(&self, parts: &Parts) {
        parts.iter().for_each(|(known, ..)| known.writers.set(known.writers.get() - 1));
        self.changed.notify_waiters();
    }

    /// Writes the sums of areas for which `of` holds, which is asked once of each where nobody writes: at most so many, of those first
    /// that were used least recently. Takes them off the list. Whether there were any. Whoever asks holds `settling`.
    async fn settle(&self, most: usize, of: impl Fn(&Area, &Known) -> bool) -> Result<bool, Error> {
        self.check()?;
        let mut idle: Vec<(u64, Area, Rc<Known>, u64)> = {
            let known = self.known.borrow();
            let is_idle =
                |known: &Known| known.listed.get() == Listed::Durable && known.writers.get() == 0;
            let idle = known.iter().filter(|(area, known)| is_idle(known) && of(area, known));
            idle.map(|(area, known)| {
                (known.used.get(), *area, Rc::clone(known), known.written.get())
            })
            .collect()
        };
        idle.sort_unstable_by_key(|(used, area, ..)| (*used, *area));
        idle.truncate(most);
        if idle.is_empty() {
            return Ok(false);
        }
        let each = idle.iter().filter_map(|(_, area, known, _)| {
            let sums = known.sums.get()?.borrow().clone();
            Some(async move { self.write_sums(*area, &sums).await })
        });
        let mut written: Result<(), Error> = join_all(each).await.into_iter().collect();
        // Both, what they are of and they themselves, before it may be forgotten that they may not fit.
        let is_volatile = self.below.info().volatile_cache && !self.makes(Mistake::Unflushed);
        if is_volatile && written.is_ok() {
            written = self.flush().await;
        }
        written.inspect_err(|why| self.fail(*why))?;
        for (_, _, known, written) in idle {
            let is_same = known.writers.get() == 0 && known.written.get() == written;
            if is_same || self.makes(Mistake::LeavesBusy) {
                known.listed.set(Listed::No);
                self.listed.set(self.listed.get() - 1);
                self.left.set(self.left.get() + 1);
            }
        }
        self.changed.notify_waiters();
        Ok(true)
    }

    /// The same of as many as there are.
    async fn settle_all(&self, of: impl Fn(&Area, &Known) -> bool) -> Result<bool, Error> {
        let _alone = self.settling.lock().await;
        self.settle(self.most, of).await
    }

    /// What has left the list is not to be made anew after a crash: others may have written there by then.
    async fn shorten_list(&self) -> Result<(), Error> {
        if self.left_on_disk.get() != self.left.get() { self.write_list().await } else { Ok(()) }
    }

    async fn read(&self, at: Lba, rows: u32, ctx: &Ctx) -> Result<Bufs, Error> {
        let parts = self.parts(at, rows)?;
        let reading: SmallVec<[Reading<'_>; 2]> =
            parts.iter().map(|(known, _, rows)| known.read(rows)).collect();
        // What is written of it meanwhile is known here.
        let read = self.below.start_forsaken(Op::Read { at, blocks: rows }, ctx)?;
        let data = match parts.iter().all(|(known, ..)| known.sums.initialized()) {
            true => read.await?,
            false => {
                let sums = parts.iter().map(|(known, area, _)| self.sums(known, *area, false));
                let (data, sums) = join(read, join_all(sums)).await;
                // Without its sums it is as good as not read.
                let unread = |why| if why == Error::Gone { why } else { Error::Unreadable { at } };
                sums.into_iter().try_for_each(|sums| sums.map(drop).map_err(unread))?;
                data?
            }
        };
        let Some((wrong, sum)) = self.first_wrong(at, rows, &data, &parts) else {
            return Ok(data);
        };
        if sum == stored::UNREADABLE {
            return Err(Error::Unreadable { at: wrong });
        }
        // Whoever lets others write what he reads does not look at it.
        if !reading.iter().any(Reading::is_written) {
            self.wrong.fetch_add(1, Ordering::Relaxed);
            // Whoever asked tells of it, and of which volume it is.
            tracing::debug!(path = %self.path, row = wrong.0, "a row is not what was written");
        }
        Err(Error::Corrupt { at: wrong })
    }

    /// The first row that is not what was written, and the sum that it should have.
    fn first_wrong(&self, at: Lba, rows: u32, data: &Bufs, parts: &Parts) -> Option<(Lba, u32)> {
        if parts.is_empty() {
            return None;
        }
        let mut sums = sums_of(data);
        let mut row = at.0;
        for part in self.place.parts(at.0, rows) {
            let count = part.rows();
            let of = sums.by_ref().take(count as usize);
            if let Part::Of(area, rows) = part {
                let (known, ..) = parts.iter().find(|(_, known, _)| *known == area)?;
                let all = known.sums.get()?.borrow();
                let expected = &all[rows.start as usize..rows.end as usize];
                let mut wrong = (0u64..).zip(of.zip(expected)).filter(|(_, (is, sum))| is != *sum);
                if let Some((n, (_, sum))) = wrong.next() {
                    return Some((Lba(row + n), *sum));
                }
            } else {
                of.for_each(drop);
            }
            row += u64::from(count);
        }
        None
    }

    /// Does what changes these rows, of which `new` has the sums then.
    async fn change(
        &self,
        op: Op,
        (at, rows): (Lba, u32),
        mut new: impl Iterator<Item = u32>,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let parts = self.parts(at, rows)?;
        if parts.is_empty() {
            return self.below.submit(op, ctx).await;
        }
        let sums = parts.iter().map(|(known, area, _)| self.sums(known, *area, true));
        let (entered, sums) = join(self.enter(&parts), join_all(sums)).await;
        entered?;
        let sums: Result<SmallVec<[_; 2]>, Error> = sums.into_iter().collect();
        let changed = match sums {
            Ok(sums) => {
                let mut writing = SmallVec::<[Writing<'_>; 2]>::new();
                for part in self.place.parts(at.0, rows) {
                    let of = new.by_ref().take(part.rows() as usize);
                    let Part::Of(area, rows) = part else {
                        of.for_each(drop);
                        continue;
                    };
                    let found = parts.iter().zip(&sums).find(|((_, known, _), _)| *known == area);
                    let Some(((known, ..), sums)) = found else { continue };
                    set(&mut sums.borrow_mut(), rows.start as usize, of);
                    writing.push(known.write(rows));
                }
                self.below.submit(op, ctx).await
            }
            Err(why) => Err(why),
        };
        self.leave(&parts);
        changed
    }

    /// The same of zeroes, of so many rows that there may be many areas: one after the other.
    async fn zero(
        &self,
        (at, rows): (Lba, u32),
        op: impl Fn(Lba, u32) -> Op,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let mut next = at.0;
        for part in self.place.parts(at.0, rows) {
            let (at, count) = (Lba(next), part.rows());
            self.change(op(at, count), (at, count), std::iter::repeat(0), ctx).await?;
            next += u64::from(count);
        }
        Ok(Bufs::new())
    }
}

/// Sets sums from place `first` on.
fn set(sums: &mut Sums, first: usize, new: impl Iterator<Item = u32>) {
    sums.iter_mut().skip(first).zip(new).for_each(|(place, sum)| *place = sum);
}

/// The sum of each row.
fn sums_of(data: &Bufs) -> impl Iterator<Item = u32> + '_ {
    let mut whole = data.iter();
    let mut rest: &[u8] = &[];
    std::iter::from_fn(move || {
        let mut crc = SmallVec::<[&[u8]; 4]>::new();
        let mut missing = ROW;
        while missing > 0 {
            if rest.is_empty() {
                rest = whole.next()?;
            }
            let (piece, behind) = rest.split_at(rest.len().min(missing));
            crc.push(piece);
            (missing, rest) = (missing - piece.len(), behind);
        }
        Some(stored::sum(crc))
    })
}

fn row(bytes: &[u8]) -> Option<&[u8; ROW]> {
    bytes.try_into().ok()
}

impl Known {
    fn read(&self, rows: &Range<u32>) -> Reading<'_> {
        let mut all = self.rows.borrow_mut();
        let is_written = all.writes.iter().any(|(_, written)| overlap(written, rows));
        Reading(self, all.reads.insert((rows.clone(), is_written)))
    }

    fn write(&self, rows: Range<u32>) -> Writing<'_> {
        self.written.set(self.written.get() + 1);
        let mut all = self.rows.borrow_mut();
        for (_, (read, is_written)) in &mut all.reads {
            *is_written |= overlap(read, &rows);
        }
        Writing(self, all.writes.insert(rows))
    }
}

fn overlap(a: &Range<u32>, b: &Range<u32>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Reading<'_> {
    /// Whether somebody has written there meanwhile.
    fn is_written(&self) -> bool {
        self.0.rows.borrow().reads[self.1].1
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.rows.borrow_mut().reads.remove(self.1);
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.rows.borrow_mut().writes.remove(self.1);
    }
}

impl RowChecksums for Integrity {
    fn release(&self, row: u64) -> Done<'_> {
        Box::pin(async move {
            let Some(unit) = self.place.unit_of(row) else { return Ok(()) };
            let is_listed = || {
                let known = self.known.borrow();
                let of_it = known.iter().filter(|(area, _)| area.unit == unit);
                of_it.into_iter().any(|(_, known)| known.listed.get() != Listed::No)
            };
            loop {
                let changed = self.changed.notified();
                self.check()?;
                if !is_listed() {
                    break;
                }
                if !self.settle_all(|area, _| area.unit == unit).await? {
                    changed.await;
                }
            }
            self.known.borrow_mut().retain(|area, _| area.unit != unit);
            self.shorten_list().await
        })
    }

    fn release_idle(&self) -> Done<'_> {
        Box::pin(async move {
            self.settle_all(|_, _| true).await?;
            let is_used = |known: &Rc<Known>| Rc::strong_count(known) > 1;
            {
                let mut known = self.known.borrow_mut();
                known.retain(|_, known| known.listed.get() != Listed::No || is_used(known));
            }
            self.shorten_list().await
        })
    }

    fn settle_quiet(&self) -> Done<'_> {
        Box::pin(async move {
            let is_quiet = |_: &Area, known: &Known| {
                let written = known.written.get();
                known.seen.replace(written) == written
            };
            self.settle_all(is_quiet).await?;
            self.shorten_list().await
        })
    }

    fn forget(&self, row: u64) {
        let unit = self.place.unit_of(row);
        let mut known = self.known.borrow_mut();
        known.retain(|area, known| Some(area.unit) != unit || known.listed.get() != Listed::No);
    }
}

impl Layer for Integrity {
    fn name(&self) -> &'static str {
        "integrity"
    }

    fn info(&self) -> Info {
        self.below.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match op {
            Op::Read { at, blocks } => self.read(at, blocks, &ctx).await,
            Op::Write { at, ref data, .. } => {
                let rows = u32::try_from(data.len() / ROW).unwrap_or(u32::MAX);
                let sums: SmallVec<[u32; 16]> = sums_of(data).collect();
                self.change(op, (at, rows), sums.into_iter(), &ctx).await
            }
            // What is rare is in a box, so that the future of a read stays small.
            Op::Zero { at, blocks, unmap, fua } => {
                let op = |at, blocks| Op::Zero { at, blocks, unmap, fua };
                Box::pin(self.zero((at, blocks), op, &ctx)).await
            }
            Op::Unmap { at, blocks } => {
                let op = |at, blocks| Op::Unmap { at, blocks };
                Box::pin(self.zero((at, blocks), op, &ctx)).await
            }
            Op::Map { .. } | Op::Flush => self.below.submit(op, &ctx).await,
        }
    }
}

impl fmt::Debug for Integrity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { below, place, whose, .. } = self;
        let fields = (below, place, whose);
        f.debug_tuple("Integrity").field(&fields).finish()
    }
}

#[cfg(test)]
mod tests;

//! The members of a pool as one core uses them: who is still there, their logs, and what is not durable yet.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::{
    Account, Buf, Bufs, Class, Ctx, Dev, Epoch, Error, FlushGate, Lba, Op, Pool, fixed_credit,
};
use futures_util::future::join_all;
use geometry::{Column, DamageKind, MAX_MEMBERS, RowChecksums};
use parity::Parity;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use tokio::sync::futures::Notified;
use tokio::sync::{Mutex, Notify, OnceCell, Semaphore, SemaphorePermit};
use uuid::Uuid;

use super::Extent;
use super::at_once::all_of;
use super::batch::{BLOCK_BYTES, Entry, Ring, What};
use super::log::Log;
use super::marks::{self, Bits, Marks, Region};
use super::mistake::Mistake;
use super::row::Strips;
use super::watch::{Errors, Flying, Watch, Watched};

/// How often a member is asked for something while its checksums are written.
const ASK: Duration = Duration::from_secs(1);

/// Memory for what is read and reckoned of stripes that are being written, in pages of 4 KiB.
const SCRATCH_PAGES: u32 = 1024;

/// Memory for rows that are written in part, in pages, beside that.
const PARTIAL_PAGES: u32 = 64;

/// Extents whose maps are saved at once.
const MAPS_AT_ONCE: usize = 16;

/// An extent that there is not.
const NO_EXTENT: u64 = u64::MAX;

/// Memory that a member takes at most for an operation, in bytes.
const MEMBER_OVERHEAD: usize = 4096;

/// Whoever keeps what is known of a pool.
pub trait Keeper: fmt::Debug {
    /// Makes durable, on all members that are in, that `member` is out: it lacks what is written from now on. What fails ends
    /// the array's writes.
    fn out(&self, member: u16) -> Kept<'_>;

    /// Makes durable that columns of an extent whose members are out now lack these [regions](super::Regions).
    fn changed(&self, extent: u64, regions: u32) -> Kept<'_>;

    /// A member has not answered for so long that it should be out; `silent` are those, it among them, that do not answer now.
    /// Makes durable that it is out, as [`Self::out`] does, unless without all of them something would be lost. Whether it is.
    fn gives_up(&self, member: u16, silent: u128) -> Answered<'_>;

    /// A member lags far behind the others, or does not any more. Told once each time.
    fn slow(&self, member: u16, is_slow: bool);

    /// Something is damaged. Told of each block: it is for the keeper to make few words of many.
    fn damaged(&self, damage: Damage);
}

/// Blocks that are damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// What is wrong with them.
    pub kind: DamageKind,
    /// The member that it is about, if it is known.
    pub member: Option<u16>,
    /// Number of the extent.
    pub extent: u64,
    /// Rows of its data between which they are, or of which they are the parity.
    pub rows: std::ops::Range<u32>,
}

/// What comes of asking a [`Keeper`].
pub type Kept<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// Whether a [`Keeper`] has done what was asked.
pub type Answered<'a> = Pin<Box<dyn Future<Output = Result<bool, Error>> + 'a>>;

/// Operations are under way to the disk that a member was before: what they write may come at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it has not answered yet what it was asked before it went out")]
pub struct StillBusy;

/// A disk of the pool.
#[derive(Debug)]
pub struct Member {
    /// The disk, in blocks of 4 KiB.
    pub dev: Dev,
    /// Its ring of this core, which nothing has been written in since its era began.
    pub ring: Ring,
    /// Where that begins.
    pub ring_at: Lba,
    /// Whether it is out already.
    pub is_out: bool,
    /// Where its errors are counted.
    pub errors: Arc<Errors>,
    /// What checks the rows of `dev`, if they have checksums.
    pub integrity: Option<Rc<dyn RowChecksums>>,
}

/// A member in use.
#[derive(Debug)]
struct Used {
    disk: Rc<Watched>,
    log: Log,
    integrity: Option<Rc<dyn RowChecksums>>,
    /// What came of the mark that it is out.
    marked: OnceCell<Result<(), Error>>,
}

/// An extent of which stripes have moved, and the entries that say so.
type Moved = (Rc<Extent>, Vec<Receipt>);

/// Where a stripe lies: number of the extent, and place in it.
pub(super) type Spot = (u64, u32);

/// An entry in the logs of these members, by the numbers of its batches.
pub(super) type Receipt = SmallVec<[(u16, u64); 2]>;

/// The members of a pool, on one core.
#[derive(Debug)]
pub struct Array {
    /// By number; there may be numbers that no member has.
    members: RefCell<Vec<Option<Rc<Used>>>>,
    /// Those that are not out, a bit for each: asked several times for every operation.
    there: Cell<u128>,
    /// How often somebody has gone out or come in.
    changes: Cell<u64>,
    keeper: Rc<dyn Keeper>,
    pub(super) parity: Parity,
    /// Memory of stripes that are being written; `room` counts its pages.
    pub(super) scratch: Ctx,
    room: Arc<Semaphore>,
    /// Who gives memory for what goes around a member that lags.
    account: Account,
    watch: Rc<Watch>,
    /// Pages for rows that are written in part: whoever waits for them holds none of the others.
    partial: Semaphore,
    /// Whether what a member has completed may be lost until it is flushed.
    is_volatile: Cell<bool>,
    /// Why nothing more is written: what a write left behind that failed is in the logs until the pool is opened again.
    broken: Cell<Option<Error>>,
    /// Made on purpose; none but in tests.
    mistake: Mistake,
    numbers: Cell<u64>,
    /// Somebody who waits for room in a log may find some.
    log_room: Notify,
    flushes: FlushGate,
    /// Flushes of all members that have begun.
    flushes_begun: Cell<u64>,
    /// What was completed and is not known to be durable, with the number of flushes that had begun then.
    unflushed: RefCell<VecDeque<(u64, Receipt)>>,
    /// Stripes with such an entry, likewise, and the region that each is in.
    unsettled: RefCell<FxHashMap<Spot, (u64, u32)>>,
    /// Copies that are being written.
    marks: Marks,
    /// Extents of which stripes have moved, by number, with the entries that say so.
    moved: RefCell<FxHashMap<u64, Moved>>,
    /// Held while maps of such extents are saved.
    saving: Mutex<()>,
    /// The era of the logs.
    era: u64,
    /// What batches and entries are numbered from: beyond all that others have had in this era.
    first: u64,
}

impl Array {
    /// Bytes of its core's memory that an array takes: for stripes, rows that are written in part, and
    /// of each member the head of a batch, what the disk takes, and a block that shows whether it answers.
    pub const MEMORY: usize = (SCRATCH_PAGES + PARTIAL_PAGES) as usize * BLOCK_BYTES
        + MAX_MEMBERS as usize * (2 * BLOCK_BYTES + MEMBER_OVERHEAD);

    /// An array that has no members yet, of a pool whose log is of this era. It takes memory of `pool` once and for all, which
    /// is free again when it is gone.
    ///
    /// # Errors
    /// [`block::Error::NoSpace`] if the pool is too small.
    pub async fn new(era: u64, keeper: Rc<dyn Keeper>, pool: &Pool) -> Result<Self, Error> {
        let credit = fixed_credit(&pool.account(), Self::MEMORY).await?;
        let scratch = Ctx::new(credit, Epoch::default());
        let room = Arc::new(Semaphore::new(SCRATCH_PAGES as usize));
        let watch = Watch::new(Rc::clone(&keeper), Arc::clone(&room), scratch.clone());
        Ok(Self {
            members: RefCell::default(),
            there: Cell::new(0),
            changes: Cell::new(0),
            keeper,
            parity: Parity::best(),
            scratch,
            room,
            account: pool.account(),
            watch,
            partial: Semaphore::new(PARTIAL_PAGES as usize),
            is_volatile: Cell::new(false),
            broken: Cell::new(None),
            mistake: Mistake::None,
            numbers: Cell::new(0),
            log_room: Notify::new(),
            flushes: FlushGate::default(),
            flushes_begun: Cell::new(0),
            unflushed: RefCell::default(),
            unsettled: RefCell::default(),
            marks: Marks::default(),
            moved: RefCell::default(),
            saving: Mutex::new(()),
            era,
            first: 0,
        })
    }

    /// The same with batches and entries that are numbered from `first` on: the rings may hold lower numbers of this era, of
    /// somebody who has [closed](Self::close) his array.
    #[must_use]
    pub fn numbered_from(mut self, first: u64) -> Self {
        self.first = first;
        self.begin_at(first);
        self
    }

    /// From now on entries are numbered from `first` on: extents that come have maps with lower numbers.
    pub fn begin_at(&self, first: u64) {
        self.numbers.set(self.numbers.get().max(first));
    }

    /// From now on `member` is the one of this number, below [`MAX_MEMBERS`]; one that had it before has to be out.
    ///
    /// # Errors
    /// [`StillBusy`], if it is the one that had it before.
    pub fn put(&self, number: u16, member: Member) -> Result<(), StillBusy> {
        let is_it = |before: &Rc<Used>| before.log.member() == member.ring.member;
        if self.slot(number).filter(is_it).is_some_and(|before| before.disk.is_busy()) {
            return Err(StillBusy);
        }
        if member.dev.info().volatile_cache {
            self.is_volatile.set(true);
        }
        let mut all = self.members.borrow_mut();
        let count = all.len().max(usize::from(number) + 1);
        all.resize_with(count, || None);
        let place = &mut all[usize::from(number)];
        // What is said of batches of the one before is about none of this.
        let first = place.as_ref().map_or(0, |before| before.log.next()).max(self.first);
        let is_out = member.is_out;
        *place = Some(Rc::new(Used::new(&self.watch, number, member, first)));
        self.marks.forget(bit(number));
        drop(all);
        self.set_there(number, !is_out);
        Ok(())
    }

    fn set_there(&self, member: u16, is_there: bool) {
        let (bit, there) = (bit(member), self.there.get());
        self.there.set(if is_there { there | bit } else { there & !bit });
        self.changes.set(self.changes.get() + 1);
        self.slot(member).into_iter().for_each(|used| used.disk.set_out(!is_there));
    }

    /// The same with a mistake.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn mistaken(self, mistake: Mistake) -> Self {
        Self { mistake, ..self }
    }

    /// Whether this mistake is to be made.
    pub(super) fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    /// Whether `member` is out, or there is none of that number.
    #[must_use]
    pub fn is_out(&self, member: u16) -> bool {
        self.there.get().checked_shr(member.into()).unwrap_or(0) & 1 == 0
    }

    /// The pool.
    pub(super) fn pool(&self) -> Uuid {
        let all = self.members.borrow();
        all.iter().flatten().next().map_or(Uuid::nil(), |used| used.log.pool())
    }

    /// Operations under way on `member`.
    pub(super) fn in_flight(&self, member: u16) -> u64 {
        self.member(member).map_or(0, |used| used.disk.dev().stats().in_flight)
    }

    /// Members that lag far behind the others: nobody reads from them who need not.
    pub(super) fn slow(&self) -> Bits {
        self.watch.slow()
    }

    /// Whether one that is slow is to be read from all the same, to see whether it still is. Says so once.
    pub(super) fn is_to_be_asked(&self, member: u16) -> bool {
        self.member(member).is_some_and(|used| used.disk.is_to_be_asked())
    }

    /// What is counted of its members.
    #[cfg(test)]
    pub(super) fn errors(&self) -> impl Iterator<Item = Arc<Errors>> {
        self.all().into_iter().map(|(_, used)| Arc::clone(&used.disk.errors))
    }

    /// Others answer what `member` was asked.
    pub(super) fn went_around(&self, member: u16) {
        let used = self.slot(member);
        used.into_iter().for_each(|used| {
            used.disk.errors.slow_reads.fetch_add(1, Ordering::Relaxed);
        });
    }

    /// Memory for what goes around a member that lags, if there is some: nobody waits for it who has other memory.
    pub(super) fn apart(&self, bytes: usize) -> Option<Ctx> {
        let credit = self.account.try_credit(bytes, Class::Immediate)?;
        Some(Ctx::new(credit, Epoch::default()))
    }

    /// Whether what has been completed may be lost until it is flushed.
    pub(super) fn is_volatile(&self) -> bool {
        self.is_volatile.get()
    }

    /// A member, if it is not out.
    fn member(&self, member: u16) -> Option<Rc<Used>> {
        if self.is_out(member) { None } else { self.slot(member) }
    }

    fn slot(&self, member: u16) -> Option<Rc<Used>> {
        self.members.borrow().get(usize::from(member)).cloned().flatten()
    }

    /// All members, with their numbers.
    fn all(&self) -> Vec<(u16, Rc<Used>)> {
        let all = self.members.borrow();
        (0..).zip(&*all).filter_map(|(n, used)| Some((n, used.clone()?))).collect()
    }

    /// How often somebody has gone out or come in: while that stays the same, so does who is there.
    pub(super) fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// Waits for so many pages of scratch memory. Whoever holds some waits for no more.
    pub(super) async fn room(&self, pages: u32) -> SemaphorePermit<'_> {
        self.room.acquire_many(pages.min(SCRATCH_PAGES)).await.expect("it is never closed")
    }

    /// As [`Self::room`], for rows that are written in part. Whoever waits for these holds none of the others.
    pub(super) async fn partial(&self, pages: u32) -> SemaphorePermit<'_> {
        self.partial.acquire_many(pages.min(PARTIAL_PAGES)).await.expect("it is never closed")
    }

    /// Most pages that [`Self::room`] gives.
    pub(super) const MOST_PAGES: u32 = SCRATCH_PAGES;

    /// Reads `rows` from row `at` of a member.
    pub(super) async fn read(
        &self,
        member: u16,
        at: u64,
        rows: u32,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let read = self.begin_read(member, at, rows, ctx)?.await;
        if read.is_err() {
            self.count_unread(member);
        }
        read
    }

    /// Begins to read.
    pub(super) fn begin_read(
        &self,
        member: u16,
        at: u64,
        rows: u32,
        ctx: &Ctx,
    ) -> Result<Flying, Error> {
        let used = self.member(member).ok_or(Error::Gone)?;
        let pages = if ctx.shares(&self.scratch) { rows } else { 0 };
        let begun = used.disk.begin(Op::Read { at: Lba(at), blocks: rows }, ctx, pages);
        begun.inspect_err(|_| self.count_unread(member))
    }

    /// Something is damaged: whoever keeps what is known of the pool tells of it.
    pub(super) fn tell_damaged(&self, damage: Damage) {
        self.keeper.damaged(damage);
    }

    /// A read has failed.
    pub(super) fn count_unread(&self, member: u16) {
        let used = self.slot(member);
        used.into_iter().for_each(|used| {
            used.disk.errors.reads.fetch_add(1, Ordering::Relaxed);
        });
    }

    /// Rows of a member were wrong or could not be read, and have been written again.
    pub(super) fn count_repaired(&self, member: u16, rows: u32) {
        if let Some(used) = self.slot(member) {
            used.disk.errors.repaired.fetch_add(rows.into(), Ordering::Relaxed);
        }
    }

    /// A row of a member could not be read, and has been given up.
    pub(super) fn count_unrepairable(&self, member: u16) {
        if let Some(used) = self.slot(member) {
            used.disk.errors.unrepairable.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes rows from row `at` of a member. If that fails, the member is out when this returns. The error is that nobody could
    /// be told so.
    pub(super) async fn write(
        &self,
        member: u16,
        at: u64,
        data: Bufs,
        fua: bool,
    ) -> Result<(), Error> {
        let Some(used) = self.member(member) else {
            return self.out(member, Error::Gone).await;
        };
        let op = Op::Write { at: Lba(at), data, fua };
        match used.disk.submit(op, &self.scratch).await {
            Ok(_) => Ok(()),
            Err(why) => {
                used.disk.errors.writes.fetch_add(1, Ordering::Relaxed);
                self.out(member, why).await
            }
        }
    }

    /// A member is out. Ends when all others know.
    pub(super) async fn out(&self, member: u16, why: Error) -> Result<(), Error> {
        let Some(used) = self.slot(member) else { return Ok(()) };
        if !self.is_out(member) {
            self.set_there(member, false);
        }
        let mark = async || {
            tracing::warn!(member, error = %why, "a disk of the pool is out");
            if self.makes(Mistake::AnswersBeforeMark) {
                return Ok(());
            }
            self.keeper.out(member).await?;
            self.tell_unflushed().await
        };
        let marked = *used.marked.get_or_init(mark).await;
        marked.inspect_err(|why| self.give_up(*why))
    }

    /// What has been completed and is not known to be durable, somebody who is out may have lost.
    async fn tell_unflushed(&self) -> Result<(), Error> {
        if self.makes(Mistake::ForgetsUnflushed) {
            return Ok(());
        }
        for (extent, regions) in self.uncertain() {
            self.keeper.changed(extent, regions).await?;
        }
        Ok(())
    }

    /// Regions of which something is not known to be durable, by extent.
    fn uncertain(&self) -> FxHashMap<u64, u32> {
        let mut all: FxHashMap<u64, u32> = FxHashMap::default();
        let unsettled = self.unsettled.borrow();
        let rows = unsettled.iter().map(|((extent, _), (_, region))| (*extent, *region));
        for (extent, regions) in rows.chain(self.marks.unflushed()) {
            *all.entry(extent).or_default() |= regions;
        }
        all
    }

    /// `member` is out, as others have found.
    /// Ends when what has been written here and may be lost on it is told as well.
    ///
    /// # Errors
    /// That nobody could be told so.
    pub async fn is_told_out(&self, member: u16) -> Result<(), Error> {
        self.out(member, Error::Gone).await
    }

    /// A write has failed whose entry must stay in the logs. There is room for so many of those, so no other comes.
    pub(super) fn give_up(&self, why: Error) {
        self.broken.set(self.broken.get().or(Some(why)));
        self.log_room.notify_waiters();
    }

    fn check(&self) -> Result<(), Error> {
        self.broken.get().map_or(Ok(()), Err)
    }

    /// Puts an entry into the logs of these members, each with blocks of its own, and ends when it is durable in all of them
    /// that are not out then; tells its number as well.
    ///
    /// # Errors
    /// That nobody could be told that a member is out, or that nothing more is written.
    pub(super) async fn log(
        &self,
        spot: Spot,
        what: What,
        to: SmallVec<[(u16, Vec<Buf>); 2]>,
    ) -> Result<(u64, Receipt), Error> {
        self.promise(&to).await?;
        let number = self.numbers.get() + 1;
        self.numbers.set(number);
        let entry = Entry { number, extent: spot.0, place: spot.1, what };
        let each = to.into_iter().map(|(member, blocks)| async move {
            let Some(used) = self.slot(member) else { return (member, Err(Error::Gone)) };
            (member, used.log.append(entry, blocks, &self.scratch).await)
        });
        let mut receipt = Receipt::new();
        for (member, outcome) in join_all(each).await {
            match outcome {
                Ok(batch) => receipt.push((member, batch)),
                Err(why) => self.out(member, why).await?,
            }
        }
        Ok((number, receipt))
    }

    /// The era of the logs.
    pub(super) fn era(&self) -> u64 {
        self.era
    }

    /// It is in the logs that a stripe of this extent has moved.
    pub(super) fn recorded(&self, extent: &Rc<Extent>, receipt: Receipt) {
        let mut moved = self.moved.borrow_mut();
        let known = moved.entry(extent.number()).or_insert_with(|| (Rc::clone(extent), Vec::new()));
        // Its columns may be elsewhere since.
        known.0 = Rc::clone(extent);
        known.1.push(receipt);
        drop(moved);
        self.log_room.notify_waiters();
    }

    /// An extent has other columns than before: where its stripes lie is saved on those.
    pub(super) fn has_moved(&self, extent: &Rc<Extent>) {
        let mut moved = self.moved.borrow_mut();
        moved.get_mut(&extent.number()).into_iter().for_each(|known| known.0 = Rc::clone(extent));
    }

    /// Makes durable where stripes lie that have moved; the entries that say so count no more. Whether there were any.
    async fn save_maps(&self) -> Result<bool, Error> {
        // Whoever waits for it may count on all that was moved before: others may have taken that.
        let _alone = self.saving.lock().await;
        let moved = self.moved.take();
        self.save_moved(moved).await
    }

    /// The same of the extents of these numbers: they may be read from the disks then.
    ///
    /// # Errors
    /// That nobody could be told of a member that failed it.
    pub async fn save_maps_of(&self, extents: &FxHashSet<u64>) -> Result<(), Error> {
        let _alone = self.saving.lock().await;
        let moved =
            self.moved.borrow_mut().extract_if(|number, _| extents.contains(number)).collect();
        self.save_moved(moved).await.map(drop)
    }

    async fn save_moved(&self, moved: FxHashMap<u64, Moved>) -> Result<bool, Error> {
        let there_are = !moved.is_empty();
        let each = moved.into_values().map(|(extent, receipts)| async move {
            let saved = self.save_map(&extent).await;
            saved.inspect_err(|why| self.give_up(*why))?;
            receipts.iter().for_each(|receipt| self.retire(receipt));
            self.log_room.notify_waiters();
            Ok(())
        });
        all_of(each, MAPS_AT_ONCE).await?;
        Ok(there_are)
    }

    /// Makes durable that columns of an extent that are out lack these regions.
    pub(super) async fn tell_changed(&self, extent: u64, regions: u32) -> Result<(), Error> {
        let told = self.keeper.changed(extent, regions).await;
        told.inspect_err(|why| self.give_up(*why))
    }

    /// Nothing of an extent that nobody uses any more is written from now on.
    pub(super) async fn let_go(&self, extent: &Extent) -> Result<(), Error> {
        self.flush().await?;
        self.save_maps().await?;
        // Somebody else may have begun to save its map.
        drop(extent.placement.saved.lock().await);
        let each = extent.columns.iter().map(|column| self.vacate(*column));
        join_all(each).await.into_iter().collect()
    }

    /// Nothing more is written where a column is, or was to be: its checksums are, and are forgotten.
    ///
    /// # Errors
    /// That nobody could be told of a member that failed it.
    pub async fn vacate(&self, column: Column) -> Result<(), Error> {
        let release =
            async move |integrity: Rc<dyn RowChecksums>| integrity.release(column.at).await;
        self.on_checksums(column.member, release).await
    }

    /// A column comes from somebody else: nothing is known of its checksums.
    pub(super) fn takes(&self, column: &Column) {
        let used = self.slot(column.member);
        let integrity = used.and_then(|used| used.integrity.clone());
        integrity.into_iter().for_each(|integrity| integrity.forget(column.at));
    }

    /// Does something with the checksums of a member that is in. If that fails it is out; if it does not answer, it is waited for until
    /// it is out.
    async fn on_checksums(
        &self,
        member: u16,
        what: impl AsyncFnOnce(Rc<dyn RowChecksums>) -> Result<(), Error> + 'static,
    ) -> Result<(), Error> {
        let Some(used) = self.slot(member).filter(|_| !self.is_out(member)) else { return Ok(()) };
        let Some(integrity) = used.integrity.clone() else { return Ok(()) };
        // Nobody may give up an operation of a disk: it goes on by itself.
        let releasing = tokio::task::spawn_local(async move { what(integrity).await });
        let is_out = async {
            while !self.is_out(member) {
                tokio::time::sleep(ASK).await;
                // By this whoever watches members sees whether it answers.
                if let Ok(asked) = used.disk.begin(Op::Flush, &self.scratch, 0) {
                    let _ = asked.apart().await;
                }
            }
        };
        tokio::select! {
            biased;
            released = releasing => match released.unwrap_or(Err(Error::Gone)) {
                Ok(()) => Ok(()),
                Err(why) => self.out(member, why).await,
            },
            () = is_out => Ok(()),
        }
    }

    /// Writes the checksums of all where nobody has written since this was asked last.
    ///
    /// # Errors
    /// That nobody could be told of a member that failed it.
    pub async fn settle_quiet(&self) -> Result<(), Error> {
        for (member, _) in self.all() {
            let settle = async |integrity: Rc<dyn RowChecksums>| integrity.settle_quiet().await;
            self.on_checksums(member, settle).await?;
        }
        Ok(())
    }

    /// Writes the checksums of all where nobody writes: others may do so from now on.
    ///
    /// # Errors
    /// That nobody could be told of a member that failed it.
    pub async fn release_idle(&self) -> Result<(), Error> {
        for (member, _) in self.all() {
            let release = async |integrity: Rc<dyn RowChecksums>| integrity.release_idle().await;
            self.on_checksums(member, release).await?;
        }
        Ok(())
    }

    /// Waits until all these logs have room for an entry, and takes it in all of them at once: nobody who has room in one
    /// waits for another.
    async fn promise(&self, to: &[(u16, Vec<Buf>)]) -> Result<(), Error> {
        loop {
            // Made before looking: what is freed in between is not missed.
            let freed = self.log_room.notified();
            self.check()?;
            let used: SmallVec<[Rc<Used>; 2]> =
                to.iter().filter_map(|(member, _)| self.slot(*member)).collect();
            if used.iter().all(|used| used.log.has_room()) {
                used.iter().for_each(|used| used.log.promise());
                return Ok(());
            }
            self.make_room(freed).await?;
        }
    }

    /// Retires what can be; if there is nothing, waits until something is `freed`.
    async fn make_room(&self, freed: Notified<'_>) -> Result<(), Error> {
        if !self.unflushed.borrow().is_empty() || self.marks.want_flush() {
            self.flush().await?;
        } else if !self.clear_marks(true) && !self.save_maps().await? {
            freed.await;
        }
        Ok(())
    }

    /// Ends when nothing that the logs hold now is looked at any more after a crash: extents that were used here may be used
    /// elsewhere then. Nobody does anything with those meanwhile.
    ///
    /// # Errors
    /// That it will be looked at: it has to be mended by, which is done when the pool is opened.
    pub async fn pass(&self) -> Result<(), Error> {
        let all = self.all().into_iter().filter(|(_, used)| !used.log.is_new());
        let all: Vec<_> = all.map(|(n, used)| (n, used.log.next(), used)).collect();
        let is_passed =
            |(n, end, used): &(u16, u64, Rc<Used>)| self.is_out(*n) || used.log.tail() >= *end;
        loop {
            let freed = self.log_room.notified();
            self.check()?;
            if all.iter().all(is_passed) {
                break;
            }
            self.make_room(freed).await?;
        }
        let mut to = SmallVec::new();
        for (member, ..) in all {
            // Nobody looks at what one holds of whom all know that it is out.
            match self.is_out(member) {
                true => self.out(member, Error::Gone).await?,
                false => to.push((member, Vec::new())),
            }
        }
        if to.is_empty() {
            return Ok(());
        }
        // A batch says what is retired; its own entry is about nothing. Said twice: whoever takes this ring next may tear one of them by
        // the first that it writes, and the other one still says it.
        let what = What::Copies { stripes: 1, changed: Strips::first(1) };
        for _ in 0..2 {
            let (_, receipt) = self.log((NO_EXTENT, 0), what, to.clone()).await?;
            self.retire(&receipt);
        }
        self.log_room.notify_waiters();
        Ok(())
    }

    /// Waits until the copies of these regions may be written on these members: an entry for each, as `what` says, is in the
    /// logs of all of those that are not out. Ends with [`Self::leave`].
    ///
    /// # Errors
    /// Those of [`Self::log`].
    pub(super) async fn enter(
        &self,
        regions: &[(Region, Bits)],
        what: impl Fn(Region) -> What,
    ) -> Result<(), Error> {
        loop {
            let changed = self.log_room.notified();
            self.check()?;
            match self.marks.enter(regions) {
                marks::Entry::Entered => return Ok(()),
                marks::Entry::Wait => changed.await,
                marks::Entry::Log(region, by) => {
                    let mut logging = Logging { array: self, region, by, receipt: None };
                    let changes = self.changes();
                    let members = (0u16..).take(MAX_MEMBERS.into()).filter(|n| by >> n & 1 == 1);
                    let to = members.map(|member| (member, Vec::new())).collect();
                    let logged = self.log((region.0, region.1), what(region), to).await?;
                    // Somebody who has come meanwhile has another log.
                    logging.by = match self.changes() == changes {
                        _ if self.makes(Mistake::MarksOnce) => Bits::MAX,
                        true => by,
                        false => 0,
                    };
                    logging.receipt = Some(logged.1);
                }
            }
        }
    }

    /// The copies of these regions are written, in this part of the extent; `durable` says that it is so already.
    pub(super) async fn leave(
        &self,
        regions: &[Region],
        written: u32,
        durable: bool,
    ) -> Result<(), Error> {
        let is_unflushed = self.is_volatile() && !durable;
        self.marks.leave(regions, written, is_unflushed.then(|| self.flushes_begun.get()));
        self.clear_marks(false);
        self.log_room.notify_waiters();
        if self.marks.are_due() {
            self.flush().await?;
            self.clear_marks(false);
        }
        Ok(())
    }

    /// Takes away marks that nobody needs; whether there were any.
    fn clear_marks(&self, all: bool) -> bool {
        let gone = self.marks.clear(all);
        gone.iter().for_each(|receipt| self.retire(receipt));
        if !gone.is_empty() {
            self.log_room.notify_waiters();
        }
        !gone.is_empty()
    }

    /// What the entry was about is written in this region, on all members that are not out. `durable` says that it is so already.
    pub(super) fn completed(&self, spot: Spot, region: u32, receipt: Receipt, durable: bool) {
        if durable || !self.is_volatile() {
            self.retire(&receipt);
        } else {
            let begun = self.flushes_begun.get();
            self.unflushed.borrow_mut().push_back((begun, receipt));
            self.unsettled.borrow_mut().insert(spot, (begun, region));
        }
        self.log_room.notify_waiters();
    }

    fn retire(&self, receipt: &Receipt) {
        for (member, batch) in receipt {
            self.slot(*member).into_iter().for_each(|used| used.log.retire(*batch));
        }
    }

    /// Makes all durable before it is given up, and leaves logs that nobody has to look at.
    ///
    /// # Errors
    /// That nobody could be told of a member that failed it.
    pub async fn close(&self) -> Result<(), Error> {
        self.flush().await?;
        self.save_maps().await?;
        self.pass().await?;
        self.release_idle().await
    }

    /// Waits until no entry of the stripe counts any more.
    pub(super) async fn settle(&self, spot: Spot) -> Result<(), Error> {
        let waits = self.is_volatile() && !self.makes(Mistake::WritesUnsettled);
        let unsettled = waits && self.unsettled.borrow().contains_key(&spot);
        if unsettled { self.flush().await } else { Ok(()) }
    }

    /// Makes durable what was completed before, on all members that are in. One that cannot is out.
    ///
    /// # Errors
    /// That nobody could be told so.
    pub(super) async fn flush(&self) -> Result<(), Error> {
        if !self.is_volatile() {
            return Ok(());
        }
        self.flushes.flush(|| self.flush_all()).await
    }

    async fn flush_all(&self) -> Result<(), Error> {
        let this = self.flushes_begun.get() + 1;
        self.flushes_begun.set(this);
        let each = self.all().into_iter().map(|(n, m)| async move {
            if self.is_out(n) {
                // What it has lost is nowhere said before all know that it is out.
                return match self.makes(Mistake::FlushesBeforeMark) {
                    true => Ok(()),
                    false => self.out(n, Error::Gone).await,
                };
            }
            match m.disk.submit(Op::Flush, &self.scratch).await {
                Ok(_) => Ok(()),
                Err(why) => {
                    m.disk.errors.writes.fetch_add(1, Ordering::Relaxed);
                    self.out(n, why).await
                }
            }
        });
        join_all(each).await.into_iter().collect::<Result<(), _>>()?;
        let done = self.take_flushed(this);
        done.iter().for_each(|receipt| self.retire(receipt));
        self.unsettled.borrow_mut().retain(|_, (begun, _)| *begun >= this);
        self.marks.flushed(this);
        self.log_room.notify_waiters();
        Ok(())
    }

    /// What was completed before the flush of this number began.
    fn take_flushed(&self, flush: u64) -> Vec<Receipt> {
        let mut all = self.unflushed.borrow_mut();
        let count = all.partition_point(|(begun, _)| *begun < flush);
        all.drain(..count).map(|(_, receipt)| receipt).collect()
    }
}

/// The bit of a member among all.
pub(super) fn bit(member: u16) -> Bits {
    1u128.checked_shl(member.into()).unwrap_or(0)
}

/// An entry of a mark on its way to the logs.
struct Logging<'a> {
    array: &'a Array,
    region: Region,
    by: Bits,
    receipt: Option<Receipt>,
}

impl Drop for Logging<'_> {
    fn drop(&mut self) {
        self.array.marks.logged(self.region, self.by, self.receipt.take());
        self.array.log_room.notify_waiters();
    }
}

impl Used {
    fn new(watch: &Rc<Watch>, number: u16, member: Member, first: u64) -> Self {
        let Member { dev, ring, ring_at, is_out, errors, integrity } = member;
        let disk = watch.put(number, (dev, ring_at), errors);
        let log = Log::new(ring, Rc::clone(&disk), ring_at, first);
        let marked = if is_out { OnceCell::new_with(Some(Ok(()))) } else { OnceCell::new() };
        Self { disk, log, integrity, marked }
    }
}

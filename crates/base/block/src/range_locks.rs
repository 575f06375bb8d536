//! Range locks: first come, first served, pairwise.
//!
//! A newcomer waits for exactly those earlier commands whose range overlaps its own where one of
//! the two writes. Every command counts its blockers; a command that leaves (or gives up)
//! decrements the count of its waiters. There are no cycles, as a command waits only for earlier
//! ones, and no starvation, as later ones never overtake where they overlap.
//!
//! To find overlaps without scanning all commands in flight, ranges are hashed by the regions they
//! touch: every [`INDEX_BUCKETS`]th region shares a bucket. The few ranges that touch many regions
//! are scanned each time.
//!
//! The table is bounded, because the wait relation grows with the square of its size, and a client
//! may keep thousands of commands on one block. Beyond [`TABLE_CAPACITY`] commands wait in an
//! overflow queue, not indexed, and enter the table in order of arrival as others leave: those in
//! the table are always earlier than those in the queue and never wait for them. The table itself
//! moves them, so no wake-up can be lost. A caller must not enter while it holds another range of
//! the same volume: in the queue it would wait for itself.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use slab::Slab;
use smallvec::SmallVec;

use crate::Blocks;

/// Blocks per region: 2^10, that is 4 MiB of 4 KiB blocks.
const REGION_SHIFT: u32 = 10;

/// A range over more regions than this is indexed as wide.
const MAX_INDEXED_REGIONS: u64 = 8;

/// Buckets of the index.
const INDEX_BUCKETS: usize = 256;

/// Most commands in the table, not counting those with priority.
const TABLE_CAPACITY: usize = 1024;

/// Most commands in the table, including those with priority.
const TABLE_LIMIT: usize = 4 * TABLE_CAPACITY;

/// The locks of one volume.
#[derive(Debug, Default)]
pub struct RangeLocks(RefCell<LockTable>);

#[derive(Clone, Debug)]
struct LockTable {
    entries: Slab<LockEntry>,
    /// The keys of the entries in the table; its own keys are their slots.
    slots: Slab<usize>,
    /// The keys of the others, by number in the queue. Empty unless all slots are taken.
    overflow_queue: BTreeMap<u64, usize>,
    next_ticket: u64,
    /// Number of queued commands with priority: normally none.
    queued_priority: usize,
    /// Number of slots: [`TABLE_CAPACITY`], or fewer in tests.
    capacity: usize,
    /// Entries with a slot, by region. Here and below they are listed by slot.
    buckets: Box<[SmallVec<[usize; 4]>]>,
    wide_ranges: Vec<usize>,
    writers: usize,
}

impl Default for LockTable {
    fn default() -> Self {
        Self {
            entries: Slab::new(),
            slots: Slab::new(),
            overflow_queue: BTreeMap::new(),
            next_ticket: 0,
            queued_priority: 0,
            capacity: TABLE_CAPACITY,
            buckets: vec![SmallVec::new(); INDEX_BUCKETS].into(),
            wide_ranges: Vec::new(),
            writers: 0,
        }
    }
}

#[derive(Clone, Debug)]
struct LockEntry {
    range: Blocks,
    writes: bool,
    /// Whether it has priority. A command with priority is never overtaken itself.
    has_priority: bool,
    position: Position,
    /// Number of earlier commands this one waits for.
    blockers: usize,
    /// Later commands that wait for this one.
    waiters: Option<Box<SlotBits>>,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, Debug)]
enum Position {
    Slot(usize),
    Queued(u64),
}

/// A set of slots.
#[derive(Clone, Debug)]
struct SlotBits([u64; TABLE_LIMIT / 64]);

impl Default for SlotBits {
    fn default() -> Self {
        Self([0; TABLE_LIMIT / 64])
    }
}

impl SlotBits {
    fn insert(&mut self, slot: usize) {
        self.0[slot / 64] |= 1 << (slot % 64);
    }

    fn remove(&mut self, slot: usize) {
        self.0[slot / 64] &= !(1 << (slot % 64));
    }

    fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().flat_map(|(i, &word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
                left &= left - 1;
                Some(i * 64 + bit)
            })
        })
    }
}

/// Slots that conflict with a newcomer, each once: normally hardly any.
type ConflictingSlots = SmallVec<[usize; 4]>;

/// An entry in the queue for a range; held, or still waiting. Leaves on drop.
#[derive(Debug)]
pub struct RangeLock {
    locks: Rc<RangeLocks>,
    key: usize,
}

impl RangeLocks {
    /// Queues for `range`, for writing or only for reading. The caller waits with
    /// [`RangeLock::acquired`].
    #[must_use]
    pub fn enter(self: &Rc<Self>, range: Blocks, writes: bool) -> RangeLock {
        let key = self.0.borrow_mut().enter(range, writes);
        RangeLock { locks: Rc::clone(self), key }
    }

    /// Queues to write `range` with priority: waits only for those who hold a part of it now and
    /// for earlier commands with priority. For a write whose order was decided elsewhere and for
    /// which others wait there. Such commands must end by themselves and be few; beyond three times
    /// `TABLE_CAPACITY` they queue like all others.
    #[must_use]
    pub fn enter_with_priority(self: &Rc<Self>, range: Blocks) -> RangeLock {
        let key = self.0.borrow_mut().enter_with_priority(range);
        RangeLock { locks: Rc::clone(self), key }
    }

    /// Whether no part of `range` is held or waited for. False while commands are queued outside
    /// the table, as their ranges are not indexed.
    #[must_use]
    pub fn is_free(&self, range: Blocks) -> bool {
        let table = self.0.borrow();
        table.overflow_queue.is_empty() && table.conflicts(&range, true).is_empty()
    }

    /// Whether a command that entered now for `range` would hold it at once.
    #[must_use]
    pub fn would_hold(&self, range: Blocks, writes: bool) -> bool {
        let table = self.0.borrow();
        table.slots.len() < table.capacity && table.blockers_of(&range, writes).is_empty()
    }

    /// A copy of the table, for searches that follow several courses of events from here.
    /// [`RangeLock::in_fork`] gives the locks of the copy, one for each lock of the original.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn fork(&self) -> Rc<Self> {
        Rc::new(Self(RefCell::new(self.0.borrow().clone())))
    }

    /// Number of ranges held or waited for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.borrow().entries.len()
    }

    /// Whether no range is held or waited for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl RangeLock {
    /// This lock in a copy of its table.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn in_fork(&self, fork: &Rc<RangeLocks>) -> Self {
        Self { locks: Rc::clone(fork), key: self.key }
    }

    /// Whether the range is held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.locks.0.borrow().entries[self.key].is_held()
    }

    /// Waits until the range is held.
    pub async fn acquired(&self) {
        poll_fn(|cx| {
            let entry = &mut self.locks.0.borrow_mut().entries[self.key];
            if entry.is_held() {
                return Poll::Ready(());
            }
            entry.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for RangeLock {
    fn drop(&mut self) {
        let woken = self.locks.0.borrow_mut().leave(self.key);
        woken.into_iter().for_each(Waker::wake);
    }
}

/// The buckets of the regions that a range touches; `None` if there are too many. The few are all
/// different.
fn buckets_of(range: &Blocks) -> Option<impl Iterator<Item = usize> + use<>> {
    let last = range.at.0.saturating_add(range.count.saturating_sub(1));
    let (first, last) = (range.at.0 >> REGION_SHIFT, last >> REGION_SHIFT);
    let bucket = |region: u64| region as usize % INDEX_BUCKETS;
    (last - first < MAX_INDEXED_REGIONS).then(|| (first..=last).map(bucket))
}

impl LockEntry {
    fn is_held(&self) -> bool {
        self.blockers == 0 && matches!(self.position, Position::Slot(_))
    }
}

impl LockTable {
    /// Adds an entry without a slot.
    fn insert(&mut self, range: Blocks, writes: bool, ahead: bool) -> usize {
        let (at, followers) = (Position::Queued(self.next_ticket), None);
        let entry = LockEntry {
            range,
            writes,
            has_priority: ahead,
            position: at,
            blockers: 0,
            waiters: followers,
            waker: None,
        };
        self.entries.insert(entry)
    }

    fn enter(&mut self, range: Blocks, writes: bool) -> usize {
        let key = self.insert(range, writes, false);
        if self.slots.len() < self.capacity {
            self.admit(key);
        } else {
            self.enqueue(key);
        }
        key
    }

    fn enqueue(&mut self, key: usize) {
        self.overflow_queue.insert(self.next_ticket, key);
        self.next_ticket += 1;
        self.queued_priority += usize::from(self.entries[key].has_priority);
    }

    /// Whether a queued command has priority and wants a part of `range`.
    fn has_queued_priority(&self, range: &Blocks) -> bool {
        let wants = |entry: &LockEntry| entry.has_priority && entry.range.overlaps(range);
        self.queued_priority > 0
            && self.overflow_queue.values().any(|&key| wants(&self.entries[key]))
    }

    fn enter_with_priority(&mut self, range: Blocks) -> usize {
        let full = self.slots.len() >= TABLE_LIMIT || self.has_queued_priority(&range);
        let key = self.insert(range, true, true);
        if full {
            self.enqueue(key);
            return key;
        }
        let met = self.conflicts(&range, true);
        let slot = self.slots.insert(key);
        let mut blockers = 0;
        let mut overtaken: Option<Box<SlotBits>> = None;
        for e in met {
            let other = &mut self.entries[self.slots[e]];
            if other.is_held() || other.has_priority {
                other.waiters.get_or_insert_default().insert(slot);
                blockers += 1;
            } else {
                other.blockers += 1;
                overtaken.get_or_insert_default().insert(e);
            }
        }
        let entry = &mut self.entries[key];
        (entry.position, entry.blockers) = (Position::Slot(slot), blockers);
        entry.waiters = overtaken;
        self.writers += 1;
        self.index(slot, range);
        key
    }

    /// Moves the entry into the table, behind all that are there.
    fn admit(&mut self, key: usize) {
        let LockEntry { range, writes, .. } = self.entries[key];
        let earlier = self.blockers_of(&range, writes);
        // Below the bound: a slab hands out a new key only if it has no vacant one.
        let slot = self.slots.insert(key);
        let mut blockers = 0;
        for e in earlier {
            let earlier = &mut self.entries[self.slots[e]];
            earlier.waiters.get_or_insert_default().insert(slot);
            blockers += 1;
        }
        let entry = &mut self.entries[key];
        (entry.position, entry.blockers) = (Position::Slot(slot), blockers);
        self.writers += usize::from(writes);
        self.index(slot, range);
    }

    fn index(&mut self, slot: usize, range: Blocks) {
        match buckets_of(&range) {
            Some(buckets) => buckets.for_each(|d| self.buckets[d].push(slot)),
            None => self.wide_ranges.push(slot),
        }
    }

    /// The commands that a newcomer waits for: none, without a scan, if all only read.
    fn blockers_of(&self, range: &Blocks, writes: bool) -> ConflictingSlots {
        if writes || self.writers > 0 {
            self.conflicts(range, writes)
        } else {
            ConflictingSlots::new()
        }
    }

    fn conflicts(&self, range: &Blocks, writes: bool) -> ConflictingSlots {
        let mut out = ConflictingSlots::new();
        let mut look = |slot: usize| {
            let e = &self.entries[self.slots[slot]];
            if (writes || e.writes) && e.range.overlaps(range) {
                out.push(slot);
            }
        };
        match buckets_of(range) {
            Some(buckets) => {
                self.wide_ranges.iter().copied().for_each(&mut look);
                buckets.for_each(|d| self.buckets[d].iter().copied().for_each(&mut look));
            }
            None => self.slots.iter().for_each(|(slot, _)| look(slot)),
        }
        // A range that touches several regions is found in each of their buckets.
        out.sort_unstable();
        out.dedup();
        out
    }

    fn leave(&mut self, key: usize) -> SmallVec<[Waker; 2]> {
        let mut woken = SmallVec::new();
        let gone = self.entries.remove(key);
        let slot = match gone.position {
            Position::Slot(slot) => slot,
            Position::Queued(number) => {
                self.overflow_queue.remove(&number);
                self.queued_priority -= usize::from(gone.has_priority);
                return woken;
            }
        };
        self.slots.remove(slot);
        self.writers -= usize::from(gone.writes);
        match buckets_of(&gone.range) {
            Some(buckets) => buckets.for_each(|d| self.unindex(d, slot)),
            None => self.wide_ranges.retain(|&p| p != slot),
        }
        for follower in gone.waiters.iter().flat_map(|f| f.iter()) {
            // A follower that gave up has left; another entry may have its slot by now.
            // `remove_waiter` keeps the sets exact, so what is listed here is a waiting follower.
            let e = &mut self.entries[self.slots[follower]];
            e.blockers -= 1;
            if e.blockers == 0 {
                woken.extend(e.waker.take());
            }
        }
        if gone.blockers > 0 {
            self.remove_waiter(slot);
        }
        if self.slots.len() < self.capacity
            && let Some((_, next)) = self.overflow_queue.pop_first()
        {
            self.queued_priority -= usize::from(self.entries[next].has_priority);
            self.admit(next);
            let e = &mut self.entries[next];
            if e.is_held() {
                woken.extend(e.waker.take());
            }
        }
        woken
    }

    /// Removes a command that gave up waiting from the sets of those it waited for.
    fn remove_waiter(&mut self, slot: usize) {
        for (_, &key) in &self.slots {
            if let Some(followers) = &mut self.entries[key].waiters {
                followers.remove(slot);
            }
        }
    }

    fn unindex(&mut self, bucket: usize, slot: usize) {
        let list = &mut self.buckets[bucket];
        if let Some(i) = list.iter().position(|&p| p == slot) {
            list.swap_remove(i);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Wake};

    use super::*;
    use crate::Lba;

    fn r(at: u64, count: u64) -> Blocks {
        Blocks::new(Lba(at), count)
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let l = Rc::new(RangeLocks::default());
        let a = l.enter(r(0, 8), false);
        let b = l.enter(r(4, 8), false);
        assert!(a.is_held() && b.is_held());
        let w = l.enter(r(7, 1), true);
        let late = l.enter(r(7, 1), false);
        assert!(!w.is_held() && !late.is_held(), "a later reader does not overtake the writer");
        drop(a);
        assert!(!w.is_held());
        drop(b);
        assert!(w.is_held() && !late.is_held());
        drop(w);
        assert!(late.is_held());
    }

    #[test]
    fn a_range_is_free_without_holders_and_waiters() {
        let l = Rc::new(RangeLocks::default());
        let reads = l.enter(r(0, 4), false);
        let waits = l.enter(r(2, 4), true);
        assert!(!l.is_free(r(3, 1)) && !l.is_free(r(5, 9)) && l.is_free(r(6, 9)));
        drop((reads, waits));
        assert!(l.is_free(r(0, 9)));
        l.0.borrow_mut().capacity = 1;
        let first = l.enter(r(0, 1), true);
        let in_line = l.enter(r(5, 1), true);
        assert!(!l.is_free(r(7, 1)), "who is in the line is not looked up");
        drop((first, in_line));
    }

    #[test]
    fn a_priority_waiter_waits_for_holders_only() {
        let l = Rc::new(RangeLocks::default());
        let reads = l.enter(r(0, 4), false);
        let writes = l.enter(r(2, 4), true);
        let waits = l.enter(r(4, 8), false);
        assert!(reads.is_held() && !writes.is_held() && !waits.is_held());
        let ahead = l.enter_with_priority(r(6, 2));
        assert!(ahead.is_held(), "none of it is held");
        let behind = l.enter_with_priority(r(3, 1));
        assert!(!behind.is_held(), "it is being read");
        drop(reads);
        assert!(behind.is_held() && !writes.is_held());
        drop(behind);
        assert!(writes.is_held() && !waits.is_held());
        drop(writes);
        assert!(!waits.is_held(), "it was overtaken");
        let notified = Told::awaits(&waits);
        drop(ahead);
        assert!(notified.get() && waits.is_held());
        drop(waits);
        let t = l.0.borrow();
        assert!(
            t.entries.is_empty() && t.buckets.iter().all(SmallVec::is_empty) && t.slots.is_empty()
        );
        assert_eq!(t.writers, 0);
    }

    /// Writes whose order was decided elsewhere keep it: the last one wins.
    #[test]
    fn priority_waiters_keep_their_order() {
        let l = Rc::new(RangeLocks::default());
        let first = l.enter_with_priority(r(0, 8));
        let later: Vec<_> = [r(4, 8), r(0, 8), r(7, 1)].map(|r| l.enter_with_priority(r)).into();
        let waits = l.enter(r(0, 1), false);
        let mut before = first;
        for next in later {
            assert!(before.is_held() && !next.is_held(), "{before:?} {next:?}");
            drop(std::mem::replace(&mut before, next));
        }
        assert!(before.is_held() && waits.is_held(), "the last one wants another block");
        drop((before, waits));
        // Likewise with too many of them: one that has to queue is waited for.
        let places = 0..TABLE_LIMIT as u64;
        let mut many: Vec<_> = places.map(|n| l.enter_with_priority(r(100 + n, 1))).collect();
        let lined_up = l.enter_with_priority(r(0, 4));
        many.pop();
        let (next, another) = (l.enter_with_priority(r(3, 1)), l.enter_with_priority(r(4, 1)));
        assert!(!lined_up.is_held() && !next.is_held() && another.is_held());
        drop(many);
        assert!(lined_up.is_held() && !next.is_held());
        drop(lined_up);
        assert!(next.is_held());
    }

    #[test]
    fn priority_waiters_need_no_queue_entry() {
        let l = bounded(1);
        let a = l.enter(r(0, 8), false);
        let b = l.enter(r(100, 8), true);
        let ahead = l.enter_with_priority(r(50, 8));
        assert!(ahead.is_held() && !b.is_held());
        drop(a);
        assert!(!b.is_held(), "there is one more than there are places");
        drop(ahead);
        assert!(b.is_held());
    }

    #[test]
    fn giving_up_lets_followers_pass_and_leaves_nothing_behind() {
        let l = Rc::new(RangeLocks::default());
        let a = l.enter(r(0, 8), true);
        let b = l.enter(r(0, 8), true);
        let c = l.enter(r(0, 8), true);
        drop(b);
        assert!(!c.is_held());
        let reuses_the_key = l.enter(r(100, 1), true);
        drop(a);
        assert!(c.is_held() && reuses_the_key.is_held());
        drop((c, reuses_the_key));
        let t = l.0.borrow();
        assert!(
            t.entries.is_empty()
                && t.buckets.iter().all(SmallVec::is_empty)
                && t.wide_ranges.is_empty()
        );
        assert!(t.slots.is_empty() && t.overflow_queue.is_empty());
        assert_eq!(t.writers, 0);
    }

    #[test]
    fn wide_ranges_meet_narrow_ones() {
        let l = Rc::new(RangeLocks::default());
        let narrow = l.enter(r(1 << 30, 1), true);
        let wide = l.enter(r(0, u64::MAX), true);
        let later = l.enter(r(5, 1), false);
        assert!(!wide.is_held() && !later.is_held());
        drop(narrow);
        assert!(wide.is_held() && !later.is_held());
        drop(wide);
        assert!(later.is_held());
    }

    fn bounded(places: usize) -> Rc<RangeLocks> {
        let l = Rc::new(RangeLocks::default());
        l.0.borrow_mut().capacity = places;
        l
    }

    fn random(mut seed: u64) -> impl FnMut(u64) -> u64 {
        move |n| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            (seed >> 33) % n
        }
    }

    /// Whether a task that awaits a lock would have been woken.
    struct Told(AtomicBool);

    impl Wake for Told {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    impl Told {
        /// Waits for `lock` as a task does: woken at once if it is held.
        fn awaits(lock: &RangeLock) -> Arc<Self> {
            let notified = Arc::new(Self(AtomicBool::new(false)));
            let waker = Waker::from(Arc::clone(&notified));
            let held = pin!(lock.acquired()).poll(&mut Context::from_waker(&waker)).is_ready();
            notified.0.fetch_or(held, Ordering::Relaxed);
            notified
        }

        fn get(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn beyond_the_bound_the_order_is_kept() {
        let l = bounded(2);
        let mut queue: VecDeque<_> = (0..7).map(|_| l.enter(r(0, 8), true)).collect();
        let notified: Vec<_> = queue.iter().map(Told::awaits).collect();
        for i in 0..7 {
            assert!(notified.iter().enumerate().all(|(k, t)| t.get() == (k <= i)));
            assert!(queue.iter().enumerate().all(|(k, lock)| lock.is_held() == (k == 0)));
            queue.pop_front();
        }
        assert!(l.is_empty());
    }

    #[test]
    fn a_queued_waiter_advances_when_any_waiter_leaves() {
        let l = bounded(2);
        let a = l.enter(r(0, 8), true);
        let b = l.enter(r(0, 8), true);
        let apart = l.enter(r(100, 8), true);
        let notified = Told::awaits(&apart);
        assert!(!apart.is_held(), "beyond the bound also those wait that overlap no other");
        drop(b);
        assert!(notified.get() && apart.is_held() && a.is_held());
    }

    /// Giving up between wake-up and poll, or in the queue, loses no waiter.
    #[test]
    fn an_unused_grant_passes_on() {
        let l = bounded(1);
        let a = l.enter(r(0, 8), true);
        let b = l.enter(r(0, 8), true);
        let c = l.enter(r(0, 8), true);
        let d = l.enter(r(0, 8), true);
        let (of_b, of_d) = (Told::awaits(&b), Told::awaits(&d));
        drop(a);
        assert!(of_b.get() && !of_d.get());
        drop(c);
        drop(b);
        assert!(of_d.get() && d.is_held());
        drop(d);
        let t = l.0.borrow();
        assert!(t.entries.is_empty() && t.slots.is_empty() && t.overflow_queue.is_empty());
        assert!(t.buckets.iter().all(SmallVec::is_empty));
    }

    #[test]
    fn thousands_of_waiters_on_one_block_finish_in_little_memory() {
        let l = Rc::new(RangeLocks::default());
        let first = l.enter(r(0, 8), true);
        let mut others: Vec<_> = (1..8192).map(|_| l.enter(r(0, 8), true)).collect();
        let mut next = random(3);
        while !others.is_empty() {
            {
                let t = l.0.borrow();
                let in_table = (others.len() + 1).min(TABLE_CAPACITY);
                assert_eq!(
                    (t.slots.len(), t.overflow_queue.len()),
                    (in_table, others.len() + 1 - in_table)
                );
                assert!(t.slots.capacity() <= 2 * TABLE_CAPACITY && t.buckets[0].len() == in_table);
            }
            others.swap_remove(next(others.len() as u64) as usize);
        }
        assert!(first.is_held());
        drop(first);
        let t = l.0.borrow();
        assert!(t.entries.is_empty() && t.slots.is_empty() && t.overflow_queue.is_empty());
        assert!(t.buckets.iter().all(SmallVec::is_empty));
        assert_eq!(t.writers, 0);
    }

    /// Against the definition: a lock is held exactly when it is among the first that have a slot
    /// and no earlier one conflicts; and waiters are woken when it is.
    #[test]
    fn agrees_with_the_definition_under_random_traffic() {
        for bound in [1, 2, 7, 30, TABLE_CAPACITY] {
            let l = bounded(bound);
            let mut live: Vec<(RangeLock, Blocks, bool, Arc<Told>)> = Vec::new();
            let mut next = random(7);
            for _ in 0..20_000 {
                if live.len() < 40 && next(5) < 3 {
                    let count = if next(20) == 0 { 1 << 20 } else { 1 + next(3000) };
                    let (range, writes) = (r(next(20_000), count), next(2) == 0);
                    let lock = l.enter(range, writes);
                    let notified = Told::awaits(&lock);
                    live.push((lock, range, writes, notified));
                } else if !live.is_empty() {
                    let i = next(live.len() as u64) as usize;
                    live.remove(i);
                }
                for (i, (lock, range, writes, notified)) in live.iter().enumerate() {
                    let blocked =
                        live[..i].iter().any(|(_, r, w, _)| (*w || *writes) && r.overlaps(range));
                    assert_eq!(lock.is_held(), i < bound && !blocked);
                    assert_eq!(notified.get(), lock.is_held());
                }
            }
        }
    }
}

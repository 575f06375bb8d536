//! Range locks: first come, first served, pairwise.
//!
//! A newcomer waits for exactly those earlier commands whose range overlaps its own where one of
//! the two writes. Every command counts the ones it waits for; a command that leaves (or gives
//! up) counts down those that waited for it. There are no cycles, as one waits only for earlier
//! ones, and no starvation, as later ones never overtake where they overlap.
//!
//! To find overlaps without looking at every command in flight, ranges are filed under the
//! regions they touch, of which every [`DRAWERS`]th lies in the same drawer; the few ranges that
//! touch many regions are looked at each time.
//!
//! The table is bounded, for who waits for whom grows with the square of what is in it, and a
//! client may keep thousands of commands on one block. Beyond [`PLACES`] commands wait in one
//! line, unfiled, and move into the table in order of arrival as others leave it: those in the
//! table are always earlier than those in the line and never wait for them. The table itself
//! moves them, so there is no turn that someone could be given and lose. Nobody may enter while
//! holding another range of the same volume: in the line it would wait for itself.

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

/// A range over more regions than this is filed as wide.
const NARROW_REGIONS: u64 = 8;

/// Lists of what is filed.
const DRAWERS: usize = 256;

/// Most commands in the table that came in order.
const PLACES: usize = 1024;

/// Most commands in the table, with those that went ahead.
const ALL_PLACES: usize = 4 * PLACES;

/// The locks of one volume.
#[derive(Debug, Default)]
pub struct RangeLocks(RefCell<Table>);

#[derive(Debug)]
struct Table {
    entries: Slab<Entry>,
    /// The keys of the entries in the table proper; its own keys are their places.
    places: Slab<usize>,
    /// The keys of the others, by number in the line. Empty unless all places are taken.
    line: BTreeMap<u64, usize>,
    next_in_line: u64,
    /// How many in the line were to go ahead: none, as a rule.
    ahead_in_line: usize,
    /// How many places there are: [`PLACES`], or fewer in tests.
    bound: usize,
    /// Those with a place, by region. Here and below they are listed by place.
    drawers: Box<[SmallVec<[usize; 4]>]>,
    wide: Vec<usize>,
    writers: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            entries: Slab::new(),
            places: Slab::new(),
            line: BTreeMap::new(),
            next_in_line: 0,
            ahead_in_line: 0,
            bound: PLACES,
            drawers: vec![SmallVec::new(); DRAWERS].into(),
            wide: Vec::new(),
            writers: 0,
        }
    }
}

#[derive(Debug)]
struct Entry {
    range: Blocks,
    writes: bool,
    /// Whether it went ahead of others. It is never overtaken itself.
    ahead: bool,
    at: At,
    /// How many earlier ones this one waits for.
    blockers: usize,
    /// Later ones that wait for this one.
    followers: Option<Box<Places>>,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, Debug)]
enum At {
    Place(usize),
    Line(u64),
}

/// A set of places.
#[derive(Clone, Debug)]
struct Places([u64; ALL_PLACES / 64]);

impl Default for Places {
    fn default() -> Self {
        Self([0; ALL_PLACES / 64])
    }
}

impl Places {
    fn insert(&mut self, place: usize) {
        self.0[place / 64] |= 1 << (place % 64);
    }

    fn remove(&mut self, place: usize) {
        self.0[place / 64] &= !(1 << (place % 64));
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

/// Places that a newcomer meets, each once: next to none as a rule.
type Met = SmallVec<[usize; 4]>;

/// A place in the queue for a range; held, or still waiting. Leaves on drop.
#[derive(Debug)]
pub struct RangeLock {
    locks: Rc<RangeLocks>,
    key: usize,
}

impl RangeLocks {
    /// Queues for `range`, to write it or only to read it. The caller waits with
    /// [`RangeLock::held`].
    #[must_use]
    pub fn enter(self: &Rc<Self>, range: Blocks, writes: bool) -> RangeLock {
        let key = self.0.borrow_mut().enter(range, writes);
        RangeLock { locks: Rc::clone(self), key }
    }

    /// Goes ahead of all who wait: waits, to write `range`, only for those who hold a part of it
    /// now, and for those who went ahead before. For a write whose turn was decided elsewhere, and
    /// for which others wait there. Whoever goes ahead must come to an end by itself, and there must
    /// be few of them at once; beyond three times as many as have places otherwise they wait like
    /// everybody else.
    #[must_use]
    pub fn enter_ahead(self: &Rc<Self>, range: Blocks) -> RangeLock {
        let key = self.0.borrow_mut().enter_ahead(range);
        RangeLock { locks: Rc::clone(self), key }
    }

    /// Whether nobody holds any part of `range` or waits for it. Not told of those in the line: false while there
    /// are any.
    #[must_use]
    pub fn is_free(&self, range: Blocks) -> bool {
        let table = self.0.borrow();
        table.line.is_empty() && table.conflicts(&range, true).is_empty()
    }

    /// Whether who enters now for `range` would hold it.
    #[must_use]
    pub fn is_open(&self, range: Blocks, writes: bool) -> bool {
        let table = self.0.borrow();
        table.places.len() < table.bound && table.earlier(&range, writes).is_empty()
    }

    /// How many ranges are held or waited for.
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
    /// Whether the range is held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.locks.0.borrow().entries[self.key].is_held()
    }

    /// Waits until the range is held.
    pub async fn held(&self) {
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

/// The drawers of the regions that a range touches; `None` if there are many. No two of few are the
/// same.
fn drawers(range: &Blocks) -> Option<impl Iterator<Item = usize> + use<>> {
    let last = range.at.0.saturating_add(range.count.saturating_sub(1));
    let (first, last) = (range.at.0 >> REGION_SHIFT, last >> REGION_SHIFT);
    let drawer = |region: u64| region as usize % DRAWERS;
    (last - first < NARROW_REGIONS).then(|| (first..=last).map(drawer))
}

impl Entry {
    fn is_held(&self) -> bool {
        self.blockers == 0 && matches!(self.at, At::Place(_))
    }
}

impl Table {
    /// An entry without a place.
    fn insert(&mut self, range: Blocks, writes: bool, ahead: bool) -> usize {
        let (at, followers) = (At::Line(self.next_in_line), None);
        let entry = Entry { range, writes, ahead, at, blockers: 0, followers, waker: None };
        self.entries.insert(entry)
    }

    fn enter(&mut self, range: Blocks, writes: bool) -> usize {
        let key = self.insert(range, writes, false);
        if self.places.len() < self.bound {
            self.place(key);
        } else {
            self.line_up(key);
        }
        key
    }

    fn line_up(&mut self, key: usize) {
        self.line.insert(self.next_in_line, key);
        self.next_in_line += 1;
        self.ahead_in_line += usize::from(self.entries[key].ahead);
    }

    /// Whether one in the line was to go ahead, and wants a part of `range`.
    fn has_ahead_in_line(&self, range: &Blocks) -> bool {
        let wants = |entry: &Entry| entry.ahead && entry.range.overlaps(range);
        self.ahead_in_line > 0 && self.line.values().any(|&key| wants(&self.entries[key]))
    }

    fn enter_ahead(&mut self, range: Blocks) -> usize {
        let full = self.places.len() >= ALL_PLACES || self.has_ahead_in_line(&range);
        let key = self.insert(range, true, true);
        if full {
            self.line_up(key);
            return key;
        }
        let met = self.conflicts(&range, true);
        let place = self.places.insert(key);
        let mut blockers = 0;
        let mut overtaken: Option<Box<Places>> = None;
        for e in met {
            let other = &mut self.entries[self.places[e]];
            if other.is_held() || other.ahead {
                other.followers.get_or_insert_default().insert(place);
                blockers += 1;
            } else {
                other.blockers += 1;
                overtaken.get_or_insert_default().insert(e);
            }
        }
        let entry = &mut self.entries[key];
        (entry.at, entry.blockers) = (At::Place(place), blockers);
        entry.followers = overtaken;
        self.writers += 1;
        self.list(place, range);
        key
    }

    /// Moves the entry into the table proper, behind all that are there.
    fn place(&mut self, key: usize) {
        let Entry { range, writes, .. } = self.entries[key];
        let earlier = self.earlier(&range, writes);
        // Below the bound: a slab hands out a new key only if it has no vacant one.
        let place = self.places.insert(key);
        let mut blockers = 0;
        for e in earlier {
            let earlier = &mut self.entries[self.places[e]];
            earlier.followers.get_or_insert_default().insert(place);
            blockers += 1;
        }
        let entry = &mut self.entries[key];
        (entry.at, entry.blockers) = (At::Place(place), blockers);
        self.writers += usize::from(writes);
        self.list(place, range);
    }

    fn list(&mut self, place: usize, range: Blocks) {
        match drawers(&range) {
            Some(drawers) => drawers.for_each(|d| self.drawers[d].push(place)),
            None => self.wide.push(place),
        }
    }

    /// Whom a newcomer waits for: nobody, without a look, where all only read.
    fn earlier(&self, range: &Blocks, writes: bool) -> Met {
        if writes || self.writers > 0 { self.conflicts(range, writes) } else { Met::new() }
    }

    fn conflicts(&self, range: &Blocks, writes: bool) -> Met {
        let mut out = Met::new();
        let mut look = |place: usize| {
            let e = &self.entries[self.places[place]];
            if (writes || e.writes) && e.range.overlaps(range) {
                out.push(place);
            }
        };
        match drawers(range) {
            Some(drawers) => {
                self.wide.iter().copied().for_each(&mut look);
                drawers.for_each(|d| self.drawers[d].iter().copied().for_each(&mut look));
            }
            None => self.places.iter().for_each(|(place, _)| look(place)),
        }
        // One that touches several regions is met in each of their drawers.
        out.sort_unstable();
        out.dedup();
        out
    }

    fn leave(&mut self, key: usize) -> SmallVec<[Waker; 2]> {
        let mut woken = SmallVec::new();
        let gone = self.entries.remove(key);
        let place = match gone.at {
            At::Place(place) => place,
            At::Line(number) => {
                self.line.remove(&number);
                self.ahead_in_line -= usize::from(gone.ahead);
                return woken;
            }
        };
        self.places.remove(place);
        self.writers -= usize::from(gone.writes);
        match drawers(&gone.range) {
            Some(drawers) => drawers.for_each(|d| self.unfile(d, place)),
            None => self.wide.retain(|&p| p != place),
        }
        for follower in gone.followers.iter().flat_map(|f| f.iter()) {
            // A follower that gave up has left; its place may even belong to another by now.
            // `unfollow` keeps the sets exact, so what is listed here is a waiting follower.
            let e = &mut self.entries[self.places[follower]];
            e.blockers -= 1;
            if e.blockers == 0 {
                woken.extend(e.waker.take());
            }
        }
        if gone.blockers > 0 {
            self.unfollow(place);
        }
        if self.places.len() < self.bound
            && let Some((_, next)) = self.line.pop_first()
        {
            self.ahead_in_line -= usize::from(self.entries[next].ahead);
            self.place(next);
            let e = &mut self.entries[next];
            if e.is_held() {
                woken.extend(e.waker.take());
            }
        }
        woken
    }

    /// Takes one that gave up waiting out of the sets of those it waited for.
    fn unfollow(&mut self, place: usize) {
        for (_, &key) in &self.places {
            if let Some(followers) = &mut self.entries[key].followers {
                followers.remove(place);
            }
        }
    }

    fn unfile(&mut self, drawer: usize, place: usize) {
        let list = &mut self.drawers[drawer];
        if let Some(i) = list.iter().position(|&p| p == place) {
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
    fn a_range_is_free_when_nobody_has_or_wants_any_of_it() {
        let l = Rc::new(RangeLocks::default());
        let reads = l.enter(r(0, 4), false);
        let waits = l.enter(r(2, 4), true);
        assert!(!l.is_free(r(3, 1)) && !l.is_free(r(5, 9)) && l.is_free(r(6, 9)));
        drop((reads, waits));
        assert!(l.is_free(r(0, 9)));
        l.0.borrow_mut().bound = 1;
        let first = l.enter(r(0, 1), true);
        let in_line = l.enter(r(5, 1), true);
        assert!(!l.is_free(r(7, 1)), "who is in the line is not looked up");
        drop((first, in_line));
    }

    #[test]
    fn one_that_goes_ahead_waits_for_holders_alone() {
        let l = Rc::new(RangeLocks::default());
        let reads = l.enter(r(0, 4), false);
        let writes = l.enter(r(2, 4), true);
        let waits = l.enter(r(4, 8), false);
        assert!(reads.is_held() && !writes.is_held() && !waits.is_held());
        let ahead = l.enter_ahead(r(6, 2));
        assert!(ahead.is_held(), "nobody holds any of it");
        let behind = l.enter_ahead(r(3, 1));
        assert!(!behind.is_held(), "somebody reads it");
        drop(reads);
        assert!(behind.is_held() && !writes.is_held());
        drop(behind);
        assert!(writes.is_held() && !waits.is_held());
        drop(writes);
        assert!(!waits.is_held(), "it was overtaken");
        let told = Told::awaits(&waits);
        drop(ahead);
        assert!(told.get() && waits.is_held());
        drop(waits);
        let t = l.0.borrow();
        assert!(
            t.entries.is_empty() && t.drawers.iter().all(SmallVec::is_empty) && t.places.is_empty()
        );
        assert_eq!(t.writers, 0);
    }

    /// Writes whose turn was decided elsewhere keep it: what came last is what stays.
    #[test]
    fn those_that_go_ahead_do_not_overtake_each_other() {
        let l = Rc::new(RangeLocks::default());
        let first = l.enter_ahead(r(0, 8));
        let later: Vec<_> = [r(4, 8), r(0, 8), r(7, 1)].map(|r| l.enter_ahead(r)).into();
        let waits = l.enter(r(0, 1), false);
        let mut before = first;
        for next in later {
            assert!(before.is_held() && !next.is_held(), "{before:?} {next:?}");
            drop(std::mem::replace(&mut before, next));
        }
        assert!(before.is_held() && waits.is_held(), "the last one wants another block");
        drop((before, waits));
        // Nor where there are too many of them: one that has to line up is waited for.
        let places = 0..ALL_PLACES as u64;
        let mut many: Vec<_> = places.map(|n| l.enter_ahead(r(100 + n, 1))).collect();
        let lined_up = l.enter_ahead(r(0, 4));
        many.pop();
        let (next, another) = (l.enter_ahead(r(3, 1)), l.enter_ahead(r(4, 1)));
        assert!(!lined_up.is_held() && !next.is_held() && another.is_held());
        drop(many);
        assert!(lined_up.is_held() && !next.is_held());
        drop(lined_up);
        assert!(next.is_held());
    }

    #[test]
    fn going_ahead_needs_no_place_in_the_line() {
        let l = bounded(1);
        let a = l.enter(r(0, 8), false);
        let b = l.enter(r(100, 8), true);
        let ahead = l.enter_ahead(r(50, 8));
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
            t.entries.is_empty() && t.drawers.iter().all(SmallVec::is_empty) && t.wide.is_empty()
        );
        assert!(t.places.is_empty() && t.line.is_empty());
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
        l.0.borrow_mut().bound = places;
        l
    }

    fn random(mut seed: u64) -> impl FnMut(u64) -> u64 {
        move |n| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            (seed >> 33) % n
        }
    }

    /// Whether a task that awaits a lock would have been told.
    struct Told(AtomicBool);

    impl Wake for Told {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    impl Told {
        /// Waits for `lock` as a task does: told at once if it is held.
        fn awaits(lock: &RangeLock) -> Arc<Self> {
            let told = Arc::new(Self(AtomicBool::new(false)));
            let waker = Waker::from(Arc::clone(&told));
            let held = pin!(lock.held()).poll(&mut Context::from_waker(&waker)).is_ready();
            told.0.fetch_or(held, Ordering::Relaxed);
            told
        }

        fn get(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn beyond_the_bound_the_order_is_kept() {
        let l = bounded(2);
        let mut queue: VecDeque<_> = (0..7).map(|_| l.enter(r(0, 8), true)).collect();
        let told: Vec<_> = queue.iter().map(Told::awaits).collect();
        for i in 0..7 {
            assert!(told.iter().enumerate().all(|(k, t)| t.get() == (k <= i)));
            assert!(queue.iter().enumerate().all(|(k, lock)| lock.is_held() == (k == 0)));
            queue.pop_front();
        }
        assert!(l.is_empty());
    }

    #[test]
    fn one_in_the_line_gets_its_place_when_any_leaves() {
        let l = bounded(2);
        let a = l.enter(r(0, 8), true);
        let b = l.enter(r(0, 8), true);
        let apart = l.enter(r(100, 8), true);
        let told = Told::awaits(&apart);
        assert!(!apart.is_held(), "beyond the bound also those wait that overlap nobody");
        drop(b);
        assert!(told.get() && apart.is_held() && a.is_held());
    }

    /// Given up between the wake-up and the poll, or in the line, nobody behind is forgotten.
    #[test]
    fn a_turn_that_is_not_taken_passes_on() {
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
        assert!(t.entries.is_empty() && t.places.is_empty() && t.line.is_empty());
        assert!(t.drawers.iter().all(SmallVec::is_empty));
    }

    #[test]
    fn thousands_on_one_block_end_and_take_little_room() {
        let l = Rc::new(RangeLocks::default());
        let first = l.enter(r(0, 8), true);
        let mut others: Vec<_> = (1..8192).map(|_| l.enter(r(0, 8), true)).collect();
        let mut next = random(3);
        while !others.is_empty() {
            {
                let t = l.0.borrow();
                let in_table = (others.len() + 1).min(PLACES);
                assert_eq!((t.places.len(), t.line.len()), (in_table, others.len() + 1 - in_table));
                assert!(t.places.capacity() <= 2 * PLACES && t.drawers[0].len() == in_table);
            }
            others.swap_remove(next(others.len() as u64) as usize);
        }
        assert!(first.is_held());
        drop(first);
        let t = l.0.borrow();
        assert!(t.entries.is_empty() && t.places.is_empty() && t.line.is_empty());
        assert!(t.drawers.iter().all(SmallVec::is_empty));
        assert_eq!(t.writers, 0);
    }

    /// Against the definition: one is held exactly when it is among the first that have a place
    /// and no earlier one conflicts; and who waits is told when it is.
    #[test]
    fn agrees_with_the_definition_under_random_traffic() {
        for bound in [1, 2, 7, 30, PLACES] {
            let l = bounded(bound);
            let mut live: Vec<(RangeLock, Blocks, bool, Arc<Told>)> = Vec::new();
            let mut next = random(7);
            for _ in 0..20_000 {
                if live.len() < 40 && next(5) < 3 {
                    let count = if next(20) == 0 { 1 << 20 } else { 1 + next(3000) };
                    let (range, writes) = (r(next(20_000), count), next(2) == 0);
                    let lock = l.enter(range, writes);
                    let told = Told::awaits(&lock);
                    live.push((lock, range, writes, told));
                } else if !live.is_empty() {
                    let i = next(live.len() as u64) as usize;
                    live.remove(i);
                }
                for (i, (lock, range, writes, told)) in live.iter().enumerate() {
                    let blocked =
                        live[..i].iter().any(|(_, r, w, _)| (*w || *writes) && r.overlaps(range));
                    assert_eq!(lock.is_held(), i < bound && !blocked);
                    assert_eq!(told.get(), lock.is_held());
                }
            }
        }
    }
}

//! Range locks: first come, first served, pairwise.
//!
//! A newcomer waits for exactly those earlier commands whose range overlaps its own where one of
//! the two writes. Every command counts the ones it waits for; a command that leaves (or gives
//! up) counts down those that waited for it. There are no cycles, as one waits only for earlier
//! ones, and no starvation, as later ones never overtake where they overlap.
//!
//! To find overlaps without looking at every command in flight, ranges are filed under the
//! regions they touch; the few ranges that touch many regions are looked at each time.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use block::Blocks;
use rustc_hash::FxHashMap;
use slab::Slab;
use smallvec::SmallVec;

/// Blocks per region: 2^10, that is 4 MiB of 4 KiB blocks.
const REGION_SHIFT: u32 = 10;

/// A range over more regions than this is filed as wide.
const NARROW_REGIONS: u64 = 8;

/// The locks of one volume.
#[derive(Debug, Default)]
pub struct RangeLocks(RefCell<Table>);

#[derive(Debug, Default)]
struct Table {
    entries: Slab<Entry>,
    regions: FxHashMap<u64, SmallVec<[usize; 4]>>,
    wide: Vec<usize>,
    writers: usize,
}

#[derive(Debug)]
struct Entry {
    range: Blocks,
    writes: bool,
    /// How many earlier ones this one waits for.
    blockers: usize,
    /// Later ones that wait for this one.
    followers: SmallVec<[usize; 2]>,
    waker: Option<Waker>,
}

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
        self.locks.0.borrow().entries[self.key].blockers == 0
    }

    /// Waits until the range is held.
    pub async fn held(&self) {
        poll_fn(|cx| {
            let entry = &mut self.locks.0.borrow_mut().entries[self.key];
            if entry.blockers == 0 {
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

fn regions(range: &Blocks) -> Option<std::ops::RangeInclusive<u64>> {
    let last = range.at.0.saturating_add(range.count.saturating_sub(1));
    let (first, last) = (range.at.0 >> REGION_SHIFT, last >> REGION_SHIFT);
    (last - first < NARROW_REGIONS).then_some(first..=last)
}

impl Table {
    fn enter(&mut self, range: Blocks, writes: bool) -> usize {
        let earlier = self.conflicts(&range, writes);
        let blockers = earlier.len();
        let entry = Entry { range, writes, blockers, followers: SmallVec::new(), waker: None };
        let key = self.entries.insert(entry);
        self.writers += usize::from(writes);
        for e in earlier {
            self.entries[e].followers.push(key);
        }
        match regions(&range) {
            Some(regions) => regions.for_each(|r| self.regions.entry(r).or_default().push(key)),
            None => self.wide.push(key),
        }
        key
    }

    fn conflicts(&self, range: &Blocks, writes: bool) -> SmallVec<[usize; 4]> {
        let mut out = SmallVec::new();
        if !writes && self.writers == 0 {
            return out;
        }
        let mut look = |key: usize| {
            let e = &self.entries[key];
            if (writes || e.writes) && e.range.overlaps(range) && !out.contains(&key) {
                out.push(key);
            }
        };
        match regions(range) {
            Some(regions) => {
                self.wide.iter().copied().for_each(&mut look);
                for r in regions {
                    self.regions.get(&r).into_iter().flatten().copied().for_each(&mut look);
                }
            }
            None => self.entries.iter().for_each(|(key, _)| look(key)),
        }
        out
    }

    fn leave(&mut self, key: usize) -> SmallVec<[Waker; 2]> {
        let gone = self.entries.remove(key);
        self.writers -= usize::from(gone.writes);
        match regions(&gone.range) {
            Some(regions) => regions.for_each(|r| self.unfile(r, key)),
            None => self.wide.retain(|&k| k != key),
        }
        let mut woken = SmallVec::new();
        for follower in gone.followers {
            // A follower that gave up has left; its key may even belong to a newcomer by now.
            // `unfollow` keeps the lists exact, so what is listed here is a waiting follower.
            let e = &mut self.entries[follower];
            e.blockers -= 1;
            if e.blockers == 0 {
                woken.extend(e.waker.take());
            }
        }
        if gone.blockers > 0 {
            self.unfollow(key);
        }
        woken
    }

    /// Takes one that gave up waiting off the lists of those it waited for.
    fn unfollow(&mut self, key: usize) {
        for (_, e) in &mut self.entries {
            e.followers.retain(|k| *k != key);
        }
    }

    fn unfile(&mut self, region: u64, key: usize) {
        if let Some(list) = self.regions.get_mut(&region) {
            if let Some(i) = list.iter().position(|&k| k == key) {
                list.swap_remove(i);
            }
            if list.is_empty() {
                self.regions.remove(&region);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Lba;

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
        assert!(t.entries.is_empty() && t.regions.is_empty() && t.wide.is_empty());
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

    /// Against the definition: one is held exactly when no earlier one in the table conflicts.
    #[test]
    fn agrees_with_the_definition_under_random_traffic() {
        let l = Rc::new(RangeLocks::default());
        let mut live: Vec<(RangeLock, Blocks, bool)> = Vec::new();
        let mut seed = 7u64;
        let mut next = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            (seed >> 33) % n
        };
        for _ in 0..20_000 {
            if live.len() < 40 && next(5) < 3 {
                let count = if next(20) == 0 { 1 << 20 } else { 1 + next(3000) };
                let (range, writes) = (r(next(20_000), count), next(2) == 0);
                live.push((l.enter(range, writes), range, writes));
            } else if !live.is_empty() {
                let i = next(live.len() as u64) as usize;
                live.remove(i);
            }
            for (i, (lock, range, writes)) in live.iter().enumerate() {
                let blocked =
                    live[..i].iter().any(|(_, r, w)| (*w || *writes) && r.overlaps(range));
                assert_eq!(lock.is_held(), !blocked);
            }
        }
    }
}

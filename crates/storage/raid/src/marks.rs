//! Regions of copies that are being written: after a crash their copies are made alike again.
//!
//! An entry names a region of one strip, some stripes long, and counts until nobody has written there for a while: what is hot
//! costs nothing. Whoever writes has [entered](Marks::enter) all his regions at once, so nobody who is in one waits for room in
//! a log. The logs of all members that are written to have it: any of them may be the one that is left. A copy that has been
//! filled since, or lies elsewhere, is on a member whose log does not have it yet.

use std::cell::RefCell;

use rustc_hash::FxHashMap;

use super::array::Receipt;

/// Most regions that are marked at once: what is gone through after a crash.
const MOST: usize = 128;

/// A region: extent, its first place, and the strip.
pub(super) type Region = (u64, u32, u16);

/// Members, a bit for each.
pub(super) type Bits = u128;

/// The marks of an array.
#[derive(Debug, Default)]
pub(super) struct Marks(RefCell<State>);

#[derive(Debug, Default)]
struct State {
    all: FxHashMap<Region, Mark>,
    /// Counts uses, so that the one that was used least recently is told.
    uses: u64,
}

#[derive(Debug, Default)]
struct Mark {
    /// The entry, or several; none while the first is on its way to the logs.
    receipt: Option<Receipt>,
    /// Members whose logs have it.
    by: Bits,
    /// An entry is on its way to the logs of others.
    is_logging: bool,
    writers: u32,
    /// Flushes that had begun when it was last written, if that is not known to be durable.
    unflushed: Option<u64>,
    /// What was written since, as [`Shape::region`](geometry::Shape::region) counts.
    written: u32,
    /// Nobody enters any more.
    is_closed: bool,
    used: u64,
}

/// What whoever wants to write has to do first.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Nothing: he has entered all.
    Entered,
    /// To put an entry for this region into the logs of these members.
    Log(Region, Bits),
    /// To wait until a region changes.
    Wait,
}

impl Marks {
    /// Enters all these regions, to write there to these members, or says what is to be done before that is tried again.
    pub(super) fn enter(&self, regions: &[(Region, Bits)]) -> Entry {
        let mut s = self.0.borrow_mut();
        for (region, to) in regions {
            let mark = s.all.entry(*region).or_default();
            let missing = to & !mark.by;
            let is_new = mark.receipt.is_none();
            if !mark.is_logging && !mark.is_closed && (is_new || missing != 0) {
                mark.is_logging = true;
                return Entry::Log(*region, missing);
            }
        }
        let is_open = |(region, to): &(Region, Bits)| {
            let is_open =
                |mark: &Mark| mark.receipt.is_some() && !mark.is_closed && to & !mark.by == 0;
            s.all.get(region).is_some_and(is_open)
        };
        if !regions.iter().all(is_open) {
            return Entry::Wait;
        }
        s.uses += 1;
        let used = s.uses;
        for (region, _) in regions {
            let mark = s.all.entry(*region).or_default();
            mark.writers += 1;
            mark.used = used;
        }
        Entry::Entered
    }

    /// An entry of a region is in the logs of these members, or is not to come.
    pub(super) fn logged(&self, region: Region, by: Bits, receipt: Option<Receipt>) {
        let mut s = self.0.borrow_mut();
        let Some(mark) = s.all.get_mut(&region) else { return };
        mark.is_logging = false;
        if let Some(receipt) = receipt {
            mark.by |= by;
            mark.receipt.get_or_insert_default().extend(receipt);
        } else if mark.receipt.is_none() {
            s.all.remove(&region);
        }
    }

    /// A member has a log in which nothing is.
    pub(super) fn forget(&self, member: Bits) {
        self.0.borrow_mut().all.values_mut().for_each(|mark| mark.by &= !member);
    }

    /// Whoever has entered has written in these parts of the extent; `unflushed` as many flushes had begun, if it is not durable.
    pub(super) fn leave(&self, regions: &[Region], written: u32, unflushed: Option<u64>) {
        let mut s = self.0.borrow_mut();
        for region in regions {
            let Some(mark) = s.all.get_mut(region) else { continue };
            mark.writers -= 1;
            mark.unflushed = unflushed.or(mark.unflushed);
            mark.written |= if unflushed.is_some() { written } else { 0 };
        }
    }

    /// What was written before a flush of this number began is durable.
    pub(super) fn flushed(&self, flush: u64) {
        let mut s = self.0.borrow_mut();
        for mark in s.all.values_mut() {
            mark.unflushed = mark.unflushed.filter(|begun| *begun >= flush);
            mark.written = if mark.unflushed.is_some() { mark.written } else { 0 };
        }
    }

    /// What is not known to be durable, by extent.
    pub(super) fn unflushed(&self) -> Vec<(u64, u32)> {
        let s = self.0.borrow();
        let unflushed = s.all.iter().filter(|(_, mark)| mark.unflushed.is_some());
        unflushed.map(|((extent, ..), mark)| (*extent, mark.written)).collect()
    }

    /// Whether a flush would make marks superfluous.
    pub(super) fn want_flush(&self) -> bool {
        self.0.borrow().all.values().any(Mark::wants_flush)
    }

    /// Whether a flush is due: closed marks wait for it, or there are too many.
    pub(super) fn are_due(&self) -> bool {
        let s = self.0.borrow();
        let too_many = s.all.len() > MOST;
        s.all.values().any(|mark| (too_many || mark.is_closed) && mark.wants_flush())
    }

    /// Takes away marks where nobody writes and all is durable: those that are closed, and of the others all, or as many as there
    /// are too many. What is left is closed if all are wanted: nobody enters any more, and the last who leaves clears it.
    pub(super) fn clear(&self, all: bool) -> Vec<Receipt> {
        let mut s = self.0.borrow_mut();
        let mut idle: Vec<(bool, u64, Region)> = (s.all.iter())
            .filter(|(_, mark)| mark.is_idle())
            .map(|(region, mark)| (!mark.is_closed, mark.used, *region))
            .collect();
        idle.sort_unstable();
        let closed = idle.iter().take_while(|(is_open, ..)| !is_open).count();
        let too_many = if all { s.all.len() } else { s.all.len().saturating_sub(MOST) };
        let gone = idle.into_iter().take(closed.max(too_many));
        let receipts = gone.filter_map(|(.., region)| s.all.remove(&region)?.receipt).collect();
        if all {
            // One that is on its way has to let in who brings it: nobody else would ever clear it.
            let there = s.all.values_mut().filter(|mark| mark.is_there());
            there.for_each(|mark| mark.is_closed = true);
        }
        receipts
    }
}

impl Mark {
    /// Whether no entry of it is on its way.
    fn is_there(&self) -> bool {
        self.receipt.is_some() && !self.is_logging
    }

    fn is_idle(&self) -> bool {
        self.is_there() && self.writers == 0 && self.unflushed.is_none()
    }

    fn wants_flush(&self) -> bool {
        self.is_there() && self.writers == 0 && self.unflushed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: (Region, Bits) = ((1, 0, 0), 0b11);
    const B: (Region, Bits) = ((1, 16, 0), 0b11);

    fn receipt(batch: u64) -> Receipt {
        Receipt::from_iter([(0, batch)])
    }

    #[test]
    fn who_writes_enters_all_his_regions_at_once() {
        let marks = Marks::default();
        assert_eq!(marks.enter(&[A, B]), Entry::Log(A.0, A.1));
        assert_eq!(marks.enter(&[A]), Entry::Wait, "on its way");
        assert_eq!(marks.enter(&[A, B]), Entry::Log(B.0, B.1));
        marks.logged(A.0, A.1, Some(receipt(1)));
        assert_eq!(marks.enter(&[A, B]), Entry::Wait);
        marks.logged(B.0, B.1, Some(receipt(2)));
        assert_eq!(marks.enter(&[A, B]), Entry::Entered);
        marks.leave(&[A.0, B.0], 1, None);
        assert_eq!(marks.clear(true), [receipt(1), receipt(2)]);
        assert_eq!(marks.enter(&[A]), Entry::Log(A.0, A.1));
        marks.logged(A.0, A.1, None);
        assert_eq!(marks.enter(&[A]), Entry::Log(A.0, A.1), "it failed, and is tried again");
    }

    #[test]
    fn a_mark_stays_until_all_is_durable() {
        let marks = Marks::default();
        marks.enter(&[A]);
        marks.logged(A.0, A.1, Some(receipt(1)));
        assert_eq!(marks.enter(&[A]), Entry::Entered);
        assert!(marks.clear(true).is_empty(), "somebody writes");
        assert_eq!(marks.enter(&[A]), Entry::Wait, "it is closed");
        assert!(!marks.are_due());
        marks.leave(&[A.0], 2, Some(3));
        assert_eq!(marks.unflushed(), [(1, 2)]);
        assert!(marks.are_due() && marks.want_flush() && marks.clear(true).is_empty());
        marks.flushed(3);
        assert!(marks.clear(true).is_empty(), "that flush had begun before");
        marks.flushed(4);
        assert!(marks.unflushed().is_empty());
        assert_eq!(marks.clear(false), [receipt(1)], "as it is closed");
        assert_eq!(marks.enter(&[A]), Entry::Log(A.0, A.1));
    }

    #[test]
    fn a_mark_on_its_way_is_not_closed() {
        let marks = Marks::default();
        assert_eq!(marks.enter(&[A]), Entry::Log(A.0, A.1));
        assert!(marks.clear(true).is_empty());
        marks.logged(A.0, A.1, Some(receipt(1)));
        assert_eq!(marks.enter(&[A]), Entry::Entered);
        assert!(marks.clear(true).is_empty());
        assert_eq!(marks.enter(&[A]), Entry::Wait, "now it is closed");
        marks.leave(&[A.0], 1, None);
        assert_eq!(marks.clear(false), [receipt(1)]);
    }

    /// Somebody has been filled since, or has come in the place of another.
    #[test]
    fn whoever_is_written_to_has_it_in_his_log() {
        let (marks, third) = (Marks::default(), (A.0, 0b111));
        marks.enter(&[A]);
        marks.logged(A.0, A.1, Some(receipt(1)));
        assert_eq!(marks.enter(&[third]), Entry::Log(A.0, 0b100));
        assert_eq!(marks.enter(&[third]), Entry::Wait, "on its way");
        assert_eq!(marks.enter(&[A]), Entry::Entered, "others need not wait");
        marks.leave(&[A.0], 1, None);
        assert!(marks.clear(true).is_empty(), "on its way");
        marks.logged(A.0, 0b100, None);
        assert_eq!(marks.enter(&[third]), Entry::Log(A.0, 0b100), "it failed, and is tried again");
        marks.logged(A.0, 0b100, Some(receipt(2)));
        assert_eq!(marks.enter(&[third]), Entry::Entered);
        marks.leave(&[A.0], 1, None);
        marks.forget(0b10);
        assert_eq!(marks.enter(&[third]), Entry::Log(A.0, 0b10));
        marks.logged(A.0, 0b10, Some(receipt(3)));
        let all = [receipt(1), receipt(2), receipt(3)].concat();
        assert_eq!(marks.clear(true), [Receipt::from_vec(all)]);
    }

    #[test]
    fn the_one_that_was_used_least_recently_goes_first() {
        let marks = Marks::default();
        let region = |n: u32| ((1, n, 0), 1);
        for n in 0..=MOST as u32 {
            marks.enter(&[region(n)]);
            marks.logged(region(n).0, 1, Some(receipt(n.into())));
            marks.enter(&[region(n)]);
            marks.leave(&[region(n).0], 1, None);
        }
        marks.enter(&[region(0)]);
        marks.leave(&[region(0).0], 1, None);
        assert_eq!(marks.clear(false), [receipt(1)]);
        assert!(marks.clear(false).is_empty());
    }
}

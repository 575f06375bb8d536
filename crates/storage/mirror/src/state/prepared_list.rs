//! The prepared list: writes of the leg that are ordered and not known to be committed.
//!
//! An entry keeps its range locked, so that readers wait for it (RFD 0010, 4.1). A member reports
//! its entries when a view begins (5.7).

use std::collections::hash_map;
#[cfg(test)]
use std::rc::Rc;

#[cfg(test)]
use block::RangeLocks;
use block::{Blocks, Error, Lba, RangeLock};
use intent_log::RegionGuard;
use peer::{PreparedEntry, Seq, View, WriteId};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// The position of a write over all views.
pub(in super::super) type OpNumber = (View, Seq);

/// The prepared entries of one leg.
#[derive(Default)]
pub(in super::super) struct PreparedList {
    /// Unordered: entries are looked up several times each, and listed only when a view begins.
    table: FxHashMap<OpNumber, PreparedWrite>,
    /// Number of writes to the disk in flight.
    applying: usize,
    /// Whether there may be entries whose range a copy has taken over.
    copies_took_ranges: bool,
}

struct PreparedWrite {
    entry: PreparedEntry,
    /// The lock that readers wait for. `None` while the writer itself waits for it, and once a copy
    /// has taken over the range.
    lock: Option<RangeLock>,
    state: ApplyState,
    /// Whether a leg has no space for it. Then its range holds other contents, at least here, and
    /// must not be read before all members have the same there (RFD 0040). It stays so to the end:
    /// whatever becomes of the leg, a commit of the entry tells that the write was rejected.
    no_space: bool,
    /// Whether it is a copy of what some members have.
    is_copy: bool,
    /// Its regions stay in use until it is committed: other members may have yet to apply it.
    _region_guard: Option<RegionGuard>,
    /// Whether it is removed once the leg has applied it, as no task waits for it: copies for a
    /// joiner.
    remove_when_applied: bool,
}

/// A write that all members have applied, or all have rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct EntryStatus {
    pub(in super::super) entry: PreparedEntry,
    /// Whether they have rejected it, and hold the same contents in its range.
    pub(in super::super) no_space: bool,
}

/// The source of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum EntrySource {
    /// A client's write.
    Client,
    /// Reconciliation in a view change.
    Reconciliation,
    /// A joiner's resync.
    Resync,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ApplyState {
    Applying,
    Applied,
    Failed(Error),
}

impl PreparedList {
    /// Adds an ordered write that is on its way to the disk.
    pub(in super::super) fn insert(
        &mut self,
        entry: PreparedEntry,
        lock: Option<RangeLock>,
        region_guard: Option<RegionGuard>,
        source: EntrySource,
    ) {
        self.copies_took_ranges &= !self.table.is_empty();
        let (is_copy, remove_when_applied) =
            (source != EntrySource::Client, source == EntrySource::Resync);
        let state = ApplyState::Applying;
        let write = PreparedWrite {
            entry,
            lock,
            state,
            no_space: false,
            _region_guard: region_guard,
            is_copy,
            remove_when_applied,
        };
        self.applying += 1;
        let existing = self.table.insert((entry.view, entry.seq), write);
        assert!(existing.is_none(), "{entry:?} has the op number of another entry");
    }

    /// Sets the lock of a write that had to wait for it.
    pub(in super::super) fn set_lock(&mut self, op_number: OpNumber, lock: RangeLock) {
        if let Some(write) = self.table.get_mut(&op_number) {
            write.lock = Some(lock);
        }
    }

    /// The leg has applied it.
    pub(in super::super) fn mark_applied(&mut self, op_number: OpNumber) {
        self.set_state(op_number, ApplyState::Applied);
    }

    /// The leg failed it: its range holds old and new contents.
    pub(in super::super) fn mark_failed(&mut self, op_number: OpNumber, e: Error) {
        self.set_state(op_number, ApplyState::Failed(e));
    }

    /// An entry to be removed when applied is removed in any case, or writes that wait for its lock
    /// would wait for ever.
    fn set_state(&mut self, op_number: OpNumber, state: ApplyState) {
        let hash_map::Entry::Occupied(mut occupied) = self.table.entry(op_number) else { return };
        let write = occupied.get_mut();
        debug_assert_eq!(write.state, ApplyState::Applying, "{:?} ends twice", write.entry);
        write.state = state;
        self.applying -= 1;
        if write.remove_when_applied {
            occupied.remove();
        }
    }

    /// The leg has no space for it: its range holds old and new contents. Returns whether it stays
    /// to wait for a replacement; otherwise it was removed.
    pub(in super::super) fn mark_no_space(&mut self, op_number: OpNumber) -> bool {
        self.set_state(op_number, ApplyState::Applied);
        let write = self.table.get_mut(&op_number);
        write.is_some_and(|write| {
            write.no_space = true;
            true
        })
    }

    /// Begins to write the replacement of an entry that waits for one; returns whether it does.
    pub(in super::super) fn begin_replacement(&mut self, entry: &PreparedEntry) -> bool {
        let Some(write) = self.table.get_mut(&(entry.view, entry.seq)) else { return false };
        let is_waiting = write.state == ApplyState::Applied && !write.is_copy;
        if !is_waiting || (write.entry.write_id, write.entry.range) != (entry.write_id, entry.range)
        {
            return false;
        }
        write.state = ApplyState::Applying;
        write.no_space = true;
        self.applying += 1;
        true
    }

    /// The write `op_number`, and whether a leg has no space for it.
    pub(in super::super) fn status(&self, op_number: OpNumber) -> Option<EntryStatus> {
        let write = self.table.get(&op_number)?;
        Some(EntryStatus { entry: write.entry, no_space: write.no_space })
    }

    /// Fails the entries without space: nothing shows that all members hold the same in their
    /// ranges. Returns whether any had not failed yet.
    pub(in super::super) fn fail_no_space(&mut self) -> bool {
        let mut any = false;
        for write in self.table.values_mut().filter(|write| write.no_space) {
            any |= !matches!(write.state, ApplyState::Failed(_));
            // One whose replacement is in flight reports its own result.
            if write.state == ApplyState::Applied {
                write.state = ApplyState::Failed(Error::NoSpace);
            }
        }
        any
    }

    /// All members have applied it: readers may see it, once this leg has applied it too. (A joiner
    /// may be sent commits of an earlier join attempt, which no task waits for.)
    pub(in super::super) fn commit(&mut self, op_number: OpNumber) -> Option<EntryStatus> {
        let hash_map::Entry::Occupied(mut occupied) = self.table.entry(op_number) else {
            return None;
        };
        let write = occupied.get_mut();
        let status = EntryStatus { entry: write.entry, no_space: write.no_space };
        if write.state == ApplyState::Applying {
            write.remove_when_applied = true;
        } else {
            occupied.remove();
        }
        Some(status)
    }

    /// The id of the write `op_number`.
    pub(in super::super) fn write_id(&self, op_number: OpNumber) -> Option<WriteId> {
        self.table.get(&op_number).map(|write| write.entry.write_id)
    }

    /// Whether only copies, and no other writes of `view`, overlap `range`.
    pub(in super::super) fn has_only_copies(&self, view: View, range: Blocks) -> bool {
        let of_view = |write: &&PreparedWrite| write.entry.view == view && !write.is_copy;
        !self.table.values().filter(of_view).any(|write| write.entry.range.overlaps(&range))
    }

    /// Whether there is an entry `op_number`.
    pub(in super::super) fn contains(&self, op_number: OpNumber) -> bool {
        self.table.contains_key(&op_number)
    }

    /// Whether an unlocked range may still have entries.
    pub(in super::super) fn may_have_unlocked(&self) -> bool {
        self.copies_took_ranges
    }

    /// The entries that overlap `range`, in order.
    pub(in super::super) fn overlapping(&self, range: Blocks) -> SmallVec<[OpNumber; 2]> {
        let overlapping = self.table.iter().filter(|(_, write)| write.entry.range.overlaps(&range));
        let mut op_numbers: SmallVec<_> = overlapping.map(|(op_number, _)| *op_number).collect();
        op_numbers.sort_unstable();
        op_numbers
    }

    /// The first range at or after `at` that an entry changes.
    pub(in super::super) fn next_range(&self, at: Lba) -> Option<Blocks> {
        let ranges = self.table.values().map(|write| write.entry.range);
        ranges.filter(|r| r.end().is_none_or(|end| end > at.0)).min_by_key(|r| r.at)
    }

    /// A copy takes over `range`: overlapping entries give up their locks, and stay in the list. No
    /// other task can enter before the view is active.
    pub(in super::super) fn release_locks(&mut self, range: Blocks) {
        self.copies_took_ranges = !self.table.is_empty();
        for write in self.table.values_mut().filter(|h| h.entry.range.overlaps(&range)) {
            write.lock = None;
        }
    }

    /// Removes all entries up to `last`: they are committed, or no member has them.
    pub(in super::super) fn remove_through(&mut self, last: OpNumber) {
        self.table.retain(|op_number, _| *op_number > last);
        // The rest are writes of the active view, which come after all copies.
        self.copies_took_ranges = false;
        self.applying = self.table.values().filter(|h| h.state == ApplyState::Applying).count();
    }

    /// Removes the entries that failed, and returns them in order with the errors; the contents of
    /// their ranges are undefined.
    pub(in super::super) fn take_failed(&mut self) -> Vec<(WriteId, Error)> {
        let mut failed = Vec::new();
        self.table.retain(|op_number, write| {
            if let ApplyState::Failed(e) = write.state {
                failed.push((*op_number, write.entry.write_id, e));
            }
            !matches!(write.state, ApplyState::Failed(_))
        });
        failed.sort_unstable_by_key(|(op_number, ..)| *op_number);
        failed.into_iter().map(|(_, write_id, e)| (write_id, e)).collect()
    }

    /// Removes all entries except those in flight to the disk.
    pub(in super::super) fn remove_applied(&mut self) {
        self.table.retain(|_, write| write.state == ApplyState::Applying);
    }

    /// Removes all entries.
    pub(in super::super) fn clear(&mut self) {
        self.table.clear();
        self.applying = 0;
    }

    /// The entries to report in a view change, in order.
    pub(in super::super) fn sorted_entries(&self) -> Vec<PreparedEntry> {
        let reported = self.table.values().filter(|h| !h.remove_when_applied);
        let mut entries: Vec<_> = reported.map(|h| h.entry).collect();
        entries.sort_unstable_by_key(|entry| (entry.view, entry.seq));
        entries
    }

    /// Whether no write to the disk is in flight.
    pub(in super::super) fn is_drained(&self) -> bool {
        self.applying == 0
    }

    /// Total blocks of the writes in flight to the disk.
    pub(in super::super) fn applying_blocks(&self) -> u64 {
        let applying = self.table.values().filter(|write| write.state == ApplyState::Applying);
        applying.map(|write| write.entry.range.count).fold(0, u64::saturating_add)
    }

    /// A copy, with the locks of `range_locks`, which is a copy as well; without guards.
    #[cfg(test)]
    pub(in super::super) fn fork(&self, range_locks: &Rc<RangeLocks>) -> Self {
        let fork = |write: &PreparedWrite| PreparedWrite {
            lock: write.lock.as_ref().map(|lock| lock.in_fork(range_locks)),
            _region_guard: None,
            ..*write
        };
        let table = self.table.iter().map(|(number, write)| (*number, fork(write))).collect();
        Self { table, ..*self }
    }

    /// What distinguishes this list from others.
    #[cfg(test)]
    pub(in super::super) fn describe(&self) -> String {
        let mut all: Vec<_> = self.table.values().collect();
        all.sort_unstable_by_key(|write| (write.entry.view, write.entry.seq));
        let one = |w: &&PreparedWrite| {
            (w.entry, w.lock.is_some(), w.state, w.no_space, w.is_copy, w.remove_when_applied)
        };
        format!("{:?} {}", all.iter().map(one).collect::<Vec<_>>(), self.copies_took_ranges)
    }

    /// How many entries there are.
    pub(in super::super) fn len(&self) -> usize {
        self.table.len()
    }
}

#[cfg(test)]
mod tests {
    use block::Epoch;
    use peer::{NodeId, WriteKind};

    use super::*;

    fn entry() -> PreparedEntry {
        PreparedEntry {
            view: View::first(Epoch(2)),
            seq: Seq(1),
            write_id: WriteId { origin: NodeId(1), number: 7 },
            range: Blocks { at: Lba(8), count: 4 },
            kind: WriteKind::Data,
            fua: false,
        }
    }

    #[test]
    fn a_write_without_space_stays_rejected_when_the_leg_fails() {
        let (mut list, entry) = (PreparedList::default(), entry());
        let op_number = (entry.view, entry.seq);
        list.insert(entry, None, None, EntrySource::Client);
        assert!(list.mark_no_space(op_number));
        assert!(list.begin_replacement(&entry));
        list.mark_applied(op_number);
        assert!(list.fail_no_space(), "another write makes the leg fail");
        assert!(!list.fail_no_space(), "it has failed already");
        assert!(list.commit(op_number).unwrap().no_space, "the commit was on its way");
    }
}

//! Intent locks: regions of mirrored strips that are being written, each named by a write intent in
//! the logs. After a crash their copies are resynchronised.
//!
//! *What a lock protects*: the log entry of its region. All writers of the region share the lock,
//! and the entry stays while it is held, and until what they wrote is durable. It does not keep
//! writers apart: that is what the stripe lock is for.
//!
//! *Order*: below the stripe lock and scratch memory. A writer locks all its regions at once, so it
//! never waits for log space while it holds one.
//!
//! *Who waits*: a writer, until the intent is in the logs of all members that it writes, since any
//! of them may be the only one left; and while the region is closing, because the logs need space.
//! A copy that was rebuilt or moved since lies on a member whose log lacks the entry.
//!
//! An entry names a region of one strip, some stripes long. It stays until the region has not been
//! written for a while, so hot regions cost nothing.

use std::cell::RefCell;

use rustc_hash::FxHashMap;

use super::member_bits::MemberBits;
use super::parity_log::LogPositions;

/// Most intents at a time; bounds the resynchronisation after a crash.
const MAX_INTENTS: usize = 128;

/// A region: extent, first slot, strip.
pub(super) type IntentRegion = (u64, u32, u16);

/// The intent locks of an array.
#[derive(Debug, Default)]
pub(super) struct IntentLocks(RefCell<IntentTable>);

#[derive(Debug, Default)]
struct IntentTable {
    intents: FxHashMap<IntentRegion, WriteIntent>,
    /// Counts uses, to find the least recently used intent.
    use_clock: u64,
}

#[derive(Debug, Default)]
struct WriteIntent {
    /// The log entry, or several; none while the first is being logged.
    positions: Option<LogPositions>,
    /// Members whose logs have it.
    logged_members: MemberBits,
    /// Whether an entry is being logged on further members.
    is_logging: bool,
    /// Writers that hold the lock.
    writers: u32,
    /// Number of flushes that had begun at the last write, if that may not be durable.
    unflushed_since: Option<u64>,
    /// The regions written since, as of
    /// [`RaidGeometry::region_bit`](geometry::RaidGeometry::region_bit).
    unflushed_regions: u32,
    /// Admits no more writers.
    is_closing: bool,
    last_used: u64,
}

/// What a writer has to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LockAttempt {
    /// Write: all its regions are locked.
    Locked,
    /// Log an intent for this region on these members.
    LogIntent(IntentRegion, MemberBits),
    /// Wait until an intent changes.
    Wait,
}

impl IntentLocks {
    /// Locks all these regions for a write on these members, or tells what to do before trying
    /// again.
    pub(super) fn try_lock(&self, regions: &[(IntentRegion, MemberBits)]) -> LockAttempt {
        let mut table = self.0.borrow_mut();
        for (region, to) in regions {
            let intent = table.intents.entry(*region).or_default();
            let missing = to & !intent.logged_members;
            let is_new = intent.positions.is_none();
            if !intent.is_logging && !intent.is_closing && (is_new || missing != 0) {
                intent.is_logging = true;
                return LockAttempt::LogIntent(*region, missing);
            }
        }
        let is_open = |(region, to): &(IntentRegion, MemberBits)| {
            let is_open = |intent: &WriteIntent| {
                intent.positions.is_some() && !intent.is_closing && to & !intent.logged_members == 0
            };
            table.intents.get(region).is_some_and(is_open)
        };
        if !regions.iter().all(is_open) {
            return LockAttempt::Wait;
        }
        table.use_clock += 1;
        let now = table.use_clock;
        for (region, _) in regions {
            let intent = table.intents.entry(*region).or_default();
            intent.writers += 1;
            intent.last_used = now;
        }
        LockAttempt::Locked
    }

    /// Notes that an entry for a region is in the logs of these members, or, without positions,
    /// that logging failed.
    pub(super) fn record_logged(
        &self,
        region: IntentRegion,
        members: MemberBits,
        positions: Option<LogPositions>,
    ) {
        let mut table = self.0.borrow_mut();
        let Some(intent) = table.intents.get_mut(&region) else { return };
        intent.is_logging = false;
        if let Some(positions) = positions {
            intent.logged_members |= members;
            intent.positions.get_or_insert_default().extend(positions);
        } else if intent.positions.is_none() {
            table.intents.remove(&region);
        }
    }

    /// Notes that a member has an empty log.
    pub(super) fn forget_member(&self, member: MemberBits) {
        self.0
            .borrow_mut()
            .intents
            .values_mut()
            .for_each(|intent| intent.logged_members &= !member);
    }

    /// Unlocks these regions after a write to parts `written` of the extent. `unflushed` is the
    /// number of flushes begun, unless the write is durable.
    pub(super) fn unlock(&self, regions: &[IntentRegion], written: u32, unflushed: Option<u64>) {
        let mut table = self.0.borrow_mut();
        for region in regions {
            let Some(intent) = table.intents.get_mut(region) else { continue };
            intent.writers -= 1;
            intent.unflushed_since = unflushed.or(intent.unflushed_since);
            intent.unflushed_regions |= if unflushed.is_some() { written } else { 0 };
        }
    }

    /// Notes that writes before the flush of this number are durable.
    pub(super) fn on_flushed(&self, flush: u64) {
        let mut table = self.0.borrow_mut();
        for intent in table.intents.values_mut() {
            intent.unflushed_since = intent.unflushed_since.filter(|begun| *begun >= flush);
            intent.unflushed_regions =
                if intent.unflushed_since.is_some() { intent.unflushed_regions } else { 0 };
        }
    }

    /// Regions with writes that may not be durable, by extent.
    pub(super) fn unflushed_regions(&self) -> Vec<(u64, u32)> {
        let table = self.0.borrow();
        let unflushed = table.intents.iter().filter(|(_, intent)| intent.unflushed_since.is_some());
        unflushed.map(|((extent, ..), intent)| (*extent, intent.unflushed_regions)).collect()
    }

    /// Whether a flush would make intents clearable.
    pub(super) fn has_intents_awaiting_flush(&self) -> bool {
        self.0.borrow().intents.values().any(WriteIntent::needs_flush)
    }

    /// Whether a flush is due: closing intents wait for it, or there are too many.
    pub(super) fn is_flush_due(&self) -> bool {
        let table = self.0.borrow();
        let too_many = table.intents.len() > MAX_INTENTS;
        table.intents.values().any(|intent| (too_many || intent.is_closing) && intent.needs_flush())
    }

    /// Removes idle, durable intents: those that are closing, and of the others all, or as many as
    /// are above the limit. With `all`, the rest is closed: no new writer begins, and the last one
    /// to end clears it.
    pub(super) fn take_clearable(&self, all: bool) -> Vec<LogPositions> {
        let mut table = self.0.borrow_mut();
        let mut idle: Vec<(bool, u64, IntentRegion)> = (table.intents.iter())
            .filter(|(_, intent)| intent.is_idle())
            .map(|(region, intent)| (!intent.is_closing, intent.last_used, *region))
            .collect();
        idle.sort_unstable();
        let closed = idle.iter().take_while(|(is_open, ..)| !is_open).count();
        let too_many =
            if all { table.intents.len() } else { table.intents.len().saturating_sub(MAX_INTENTS) };
        let cleared = idle.into_iter().take(closed.max(too_many));
        let positions =
            cleared.filter_map(|(.., region)| table.intents.remove(&region)?.positions).collect();
        if all {
            // One that is still being logged must admit its writer: otherwise it would never be
            // cleared.
            let logged = table.intents.values_mut().filter(|intent| intent.is_logged());
            logged.for_each(|intent| intent.is_closing = true);
        }
        positions
    }
}

impl WriteIntent {
    /// Whether it is logged, and no further entry is on its way.
    fn is_logged(&self) -> bool {
        self.positions.is_some() && !self.is_logging
    }

    fn is_idle(&self) -> bool {
        self.is_logged() && self.writers == 0 && self.unflushed_since.is_none()
    }

    fn needs_flush(&self) -> bool {
        self.is_logged() && self.writers == 0 && self.unflushed_since.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: (IntentRegion, MemberBits) = ((1, 0, 0), 0b11);
    const B: (IntentRegion, MemberBits) = ((1, 16, 0), 0b11);

    fn receipt(batch: u64) -> LogPositions {
        LogPositions::from_iter([(0, batch)])
    }

    #[test]
    fn a_write_locks_all_its_regions_at_once() {
        let intents = IntentLocks::default();
        assert_eq!(intents.try_lock(&[A, B]), LockAttempt::LogIntent(A.0, A.1));
        assert_eq!(intents.try_lock(&[A]), LockAttempt::Wait, "on its way");
        assert_eq!(intents.try_lock(&[A, B]), LockAttempt::LogIntent(B.0, B.1));
        intents.record_logged(A.0, A.1, Some(receipt(1)));
        assert_eq!(intents.try_lock(&[A, B]), LockAttempt::Wait);
        intents.record_logged(B.0, B.1, Some(receipt(2)));
        assert_eq!(intents.try_lock(&[A, B]), LockAttempt::Locked);
        intents.unlock(&[A.0, B.0], 1, None);
        assert_eq!(intents.take_clearable(true), [receipt(1), receipt(2)]);
        assert_eq!(intents.try_lock(&[A]), LockAttempt::LogIntent(A.0, A.1));
        intents.record_logged(A.0, A.1, None);
        assert_eq!(
            intents.try_lock(&[A]),
            LockAttempt::LogIntent(A.0, A.1),
            "it failed, and is tried again"
        );
    }

    #[test]
    fn an_intent_stays_until_its_writes_are_durable() {
        let intents = IntentLocks::default();
        intents.try_lock(&[A]);
        intents.record_logged(A.0, A.1, Some(receipt(1)));
        assert_eq!(intents.try_lock(&[A]), LockAttempt::Locked);
        assert!(intents.take_clearable(true).is_empty(), "it is locked");
        assert_eq!(intents.try_lock(&[A]), LockAttempt::Wait, "it is closed");
        assert!(!intents.is_flush_due());
        intents.unlock(&[A.0], 2, Some(3));
        assert_eq!(intents.unflushed_regions(), [(1, 2)]);
        assert!(
            intents.is_flush_due()
                && intents.has_intents_awaiting_flush()
                && intents.take_clearable(true).is_empty()
        );
        intents.on_flushed(3);
        assert!(intents.take_clearable(true).is_empty(), "that flush had begun before");
        intents.on_flushed(4);
        assert!(intents.unflushed_regions().is_empty());
        assert_eq!(intents.take_clearable(false), [receipt(1)], "as it is closed");
        assert_eq!(intents.try_lock(&[A]), LockAttempt::LogIntent(A.0, A.1));
    }

    #[test]
    fn an_intent_being_logged_is_not_closed() {
        let intents = IntentLocks::default();
        assert_eq!(intents.try_lock(&[A]), LockAttempt::LogIntent(A.0, A.1));
        assert!(intents.take_clearable(true).is_empty());
        intents.record_logged(A.0, A.1, Some(receipt(1)));
        assert_eq!(intents.try_lock(&[A]), LockAttempt::Locked);
        assert!(intents.take_clearable(true).is_empty());
        assert_eq!(intents.try_lock(&[A]), LockAttempt::Wait, "now it is closed");
        intents.unlock(&[A.0], 1, None);
        assert_eq!(intents.take_clearable(false), [receipt(1)]);
    }

    /// A member was rebuilt, or replaced.
    #[test]
    fn every_written_member_has_the_intent_in_its_log() {
        let (intents, third) = (IntentLocks::default(), (A.0, 0b111));
        intents.try_lock(&[A]);
        intents.record_logged(A.0, A.1, Some(receipt(1)));
        assert_eq!(intents.try_lock(&[third]), LockAttempt::LogIntent(A.0, 0b100));
        assert_eq!(intents.try_lock(&[third]), LockAttempt::Wait, "on its way");
        assert_eq!(intents.try_lock(&[A]), LockAttempt::Locked, "others need not wait");
        intents.unlock(&[A.0], 1, None);
        assert!(intents.take_clearable(true).is_empty(), "on its way");
        intents.record_logged(A.0, 0b100, None);
        assert_eq!(
            intents.try_lock(&[third]),
            LockAttempt::LogIntent(A.0, 0b100),
            "it failed, and is tried again"
        );
        intents.record_logged(A.0, 0b100, Some(receipt(2)));
        assert_eq!(intents.try_lock(&[third]), LockAttempt::Locked);
        intents.unlock(&[A.0], 1, None);
        intents.forget_member(0b10);
        assert_eq!(intents.try_lock(&[third]), LockAttempt::LogIntent(A.0, 0b10));
        intents.record_logged(A.0, 0b10, Some(receipt(3)));
        let all = [receipt(1), receipt(2), receipt(3)].concat();
        assert_eq!(intents.take_clearable(true), [LogPositions::from_vec(all)]);
    }

    #[test]
    fn the_least_recently_used_intent_is_closed_first() {
        let intents = IntentLocks::default();
        let region = |n: u32| ((1, n, 0), 1);
        for n in 0..=MAX_INTENTS as u32 {
            intents.try_lock(&[region(n)]);
            intents.record_logged(region(n).0, 1, Some(receipt(n.into())));
            intents.try_lock(&[region(n)]);
            intents.unlock(&[region(n).0], 1, None);
        }
        intents.try_lock(&[region(0)]);
        intents.unlock(&[region(0).0], 1, None);
        assert_eq!(intents.take_clearable(false), [receipt(1)]);
        assert!(intents.take_clearable(false).is_empty());
    }
}

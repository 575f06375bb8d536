//! The members of an array: the disks that are attached, each with its parity log, and which of
//! them are available.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Dev, Error, Lba};
use geometry::RowChecksums;
use tokio::sync::OnceCell;
use uuid::Uuid;

use super::health::{DiskCounters, HealthMonitor, MonitoredDisk};
use super::log_batch::RingId;
use super::member_bits::{MemberBits, member_bit};
use super::parity_log::{LogPositions, ParityLog};

/// Operations on the member's earlier disk are in flight; their writes may land at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("operations from before it was detached are still in flight")]
pub struct MemberBusy;

/// A disk of the pool, to be attached.
#[derive(Debug)]
pub struct ArrayMember {
    /// The disk, in blocks of 4 KiB.
    pub dev: Dev,
    /// This core's ring on it, unwritten in this log generation.
    pub ring: RingId,
    /// Where the ring begins.
    pub ring_lba: Lba,
    /// Whether it is detached already.
    pub is_detached: bool,
    /// Where its errors are counted.
    pub counters: Arc<DiskCounters>,
    /// The checksum layer of `dev`, if any.
    pub checksums: Option<Rc<dyn RowChecksums>>,
}

/// An attached member.
#[derive(Debug)]
pub(super) struct AttachedMember {
    pub(super) disk: Rc<MonitoredDisk>,
    pub(super) log: ParityLog,
    pub(super) checksums: Option<Rc<dyn RowChecksums>>,
    /// The result of recording that it is detached.
    pub(super) detach_recorded: OnceCell<Result<(), Error>>,
}

/// The members of an array.
#[derive(Debug)]
pub(super) struct Members {
    /// By number, with gaps.
    attached: RefCell<Vec<Option<Rc<AttachedMember>>>>,
    availability: Cell<Availability>,
    health: Rc<HealthMonitor>,
}

/// Which members are available: read several times for every operation.
#[derive(Clone, Copy, Debug, Default)]
struct Availability {
    /// The members that are not detached.
    available: MemberBits,
    /// How often a member was attached or detached.
    changes: u64,
    /// Whether a completed write may be lost until it is flushed.
    is_volatile: bool,
}

impl Members {
    pub(super) fn new(health: Rc<HealthMonitor>) -> Self {
        Self { attached: RefCell::default(), availability: Cell::default(), health }
    }

    /// Attaches `member` under this number. Its batches are numbered from `first` on.
    pub(super) fn attach(
        &self,
        number: u16,
        member: ArrayMember,
        first: u64,
    ) -> Result<(), MemberBusy> {
        let is_same =
            |previous: &Rc<AttachedMember>| previous.log.member_id() == member.ring.member;
        let previous = self.attached(number);
        if previous.as_ref().filter(|one| is_same(one)).is_some_and(|one| one.disk.is_busy()) {
            return Err(MemberBusy);
        }
        if member.dev.info().volatile_cache {
            self.update(|now| now.is_volatile = true);
        }
        // Numbers of the earlier member's batches must not apply to this one.
        let first = previous.map_or(0, |previous| previous.log.next_sequence()).max(first);
        let is_detached = member.is_detached;
        let mut all = self.attached.borrow_mut();
        let count = all.len().max(usize::from(number) + 1);
        all.resize_with(count, || None);
        all[usize::from(number)] =
            Some(Rc::new(AttachedMember::new(&self.health, number, member, first)));
        drop(all);
        self.set_available(number, !is_detached);
        Ok(())
    }

    fn update(&self, update: impl FnOnce(&mut Availability)) {
        let mut now = self.availability.get();
        update(&mut now);
        self.availability.set(now);
    }

    pub(super) fn set_available(&self, member: u16, is_available: bool) {
        let bit = member_bit(member);
        self.update(|now| {
            now.available = if is_available { now.available | bit } else { now.available & !bit };
            now.changes += 1;
        });
        self.attached(member)
            .into_iter()
            .for_each(|attached| attached.disk.set_detached(!is_available));
    }

    /// Whether `member` is detached or does not exist.
    pub(super) fn is_detached(&self, member: u16) -> bool {
        self.availability.get().available & member_bit(member) == 0
    }

    /// How often a member was attached or detached: while this is unchanged, so are the available
    /// members.
    pub(super) fn changes(&self) -> u64 {
        self.availability.get().changes
    }

    /// Whether completed writes may be lost until they are flushed.
    pub(super) fn is_volatile(&self) -> bool {
        self.availability.get().is_volatile
    }

    /// A member, if it is not detached.
    pub(super) fn available(&self, member: u16) -> Option<Rc<AttachedMember>> {
        if self.is_detached(member) { None } else { self.attached(member) }
    }

    pub(super) fn attached(&self, member: u16) -> Option<Rc<AttachedMember>> {
        self.attached.borrow().get(usize::from(member)).cloned().flatten()
    }

    /// All attached members, with their numbers.
    pub(super) fn all_attached(&self) -> Vec<(u16, Rc<AttachedMember>)> {
        let members = self.attached.borrow();
        (0..).zip(&*members).filter_map(|(n, member)| Some((n, member.clone()?))).collect()
    }

    /// The pool's id.
    pub(super) fn pool_id(&self) -> Uuid {
        let members = self.attached.borrow();
        members.iter().flatten().next().map_or(Uuid::nil(), |member| member.log.pool_id())
    }

    /// Number of operations in flight on `member`.
    pub(super) fn in_flight(&self, member: u16) -> u64 {
        self.available(member).map_or(0, |used| used.disk.dev().stats().in_flight)
    }

    /// The slow members: reads avoid them if they can.
    pub(super) fn slow(&self) -> MemberBits {
        self.health.slow_members()
    }

    /// Whether to read from a slow member, to see whether it still is slow. True once per interval.
    pub(super) fn is_probe_due(&self, member: u16) -> bool {
        self.available(member).is_some_and(|used| used.disk.is_probe_due())
    }

    /// Retires an entry in the logs that have it.
    pub(super) fn retire_entry(&self, positions: &LogPositions) {
        for (member, batch) in positions {
            self.attached(*member)
                .into_iter()
                .for_each(|attached| attached.log.retire_entry(*batch));
        }
    }

    /// The counters of the members.
    #[cfg(test)]
    pub(super) fn counters(&self) -> impl Iterator<Item = Arc<DiskCounters>> {
        self.all_attached().into_iter().map(|(_, member)| Arc::clone(&member.disk.counters))
    }

    fn count(&self, member: u16, counter: fn(&DiskCounters) -> &AtomicU64, more: u64) {
        if let Some(attached) = self.attached(member) {
            counter(&attached.disk.counters).fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Counts a read of `member` that was served from others.
    pub(super) fn count_hedged_read(&self, member: u16) {
        self.count(member, |counters| &counters.hedged_reads, 1);
    }

    /// Counts a failed read.
    pub(super) fn count_read_error(&self, member: u16) {
        self.count(member, |counters| &counters.read_errors, 1);
    }

    /// Counts rows of a member that were wrong or unreadable and have been rewritten.
    pub(super) fn count_repaired(&self, member: u16, rows: u32) {
        self.count(member, |counters| &counters.repaired_rows, rows.into());
    }

    /// Counts a row of a member that could not be read and is recorded as lost.
    pub(super) fn count_unrecoverable(&self, member: u16) {
        self.count(member, |counters| &counters.unrecoverable_rows, 1);
    }
}

impl AttachedMember {
    fn new(health: &Rc<HealthMonitor>, number: u16, member: ArrayMember, first: u64) -> Self {
        let ArrayMember { dev, ring, ring_lba, is_detached, counters, checksums } = member;
        let disk = health.set_member(number, (dev, ring_lba), counters);
        let log = ParityLog::new(ring, Rc::clone(&disk), ring_lba, first);
        let detach_recorded =
            if is_detached { OnceCell::new_with(Some(Ok(()))) } else { OnceCell::new() };
        Self { disk, log, checksums, detach_recorded }
    }
}

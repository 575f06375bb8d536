//! Health of members: detects those that respond much later than the others, so that reads avoid
//! them, and unresponsive ones, which are detached.
//!
//! A member is compared with the others. Time is counted in ticks that a task here has seen, and a
//! tick counts against a member only while half of the others respond: when the whole machine or
//! its controller stalls, no member is late.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use block::{Bufs, Ctx, Dev, Error, Lba, Op, Submission};
use futures_util::FutureExt;
use slab::Slab;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::member_bits::{MemberBits, member_bit};
use super::pool_metadata::PoolMetadata;

/// The unit of time. Healthy disks take less than a tick, so their latency is not measured exactly:
/// of operations that take a tenth of a tick, one in ten ends in the next tick, and the mean is
/// right.
const TICK: Duration = Duration::from_millis(10);

/// A member is late when a reply takes this many times the mean latency of the others,
const LATE_FACTOR: u64 = 8;

/// but not before this many ticks (50 ms),
const MIN_DEADLINE_TICKS: u64 = 5;

/// and always after this many (1 s).
const MAX_DEADLINE_TICKS: u64 = 100;

/// This many late reads make a member slow, if each is within [`LATE_READ_WINDOW_TICKS`] of the one
/// before.
const SLOW_AFTER_LATE_READS: u32 = 3;
const LATE_READ_WINDOW_TICKS: u64 = 1000;

/// How long a slow member must reply in time before clients read from it again, in ticks: 5 s,
/// doubled each time that it soon becomes slow again, up to 160 s; and how many timely replies it
/// needs.
const RECOVERY_TICKS: u64 = 500;
const MAX_RECOVERY_DOUBLINGS: u32 = 5;
const RECOVERY_REPLIES: u32 = 4;

/// How often a slow member is probed, in ticks: each second.
const PROBE_INTERVAL_TICKS: u64 = 100;

/// A member is detached if it leaves an operation unanswered for this many ticks while the others
/// respond: 10 s.
pub(super) const DETACH_AFTER_TICKS: u64 = 1000;

/// How long to wait before asking again whether the pool can do without a member: 5 s.
const DETACH_RETRY_TICKS: u64 = 500;

/// A disk is responsive if it replied within this many ticks plus twice its mean latency. This is
/// less than the deadline, so that no member is late when all have stalled. While one member is
/// late, idle ones are probed.
const RESPONSIVE_TICKS: u64 = 2;

/// The ticks stop this many ticks after the last operation.
const IDLE_TICKS_BEFORE_STOP: u32 = 100;

/// Errors and response behaviour of a disk, counted by all cores together.
#[derive(Debug, Default)]
pub struct DiskCounters {
    /// Reads that failed.
    pub read_errors: AtomicU64,
    /// Writes and flushes that failed.
    pub write_errors: AtomicU64,
    /// Rows that were wrong or unreadable and have been rewritten.
    pub repaired_rows: AtomicU64,
    /// Rows that could not be read and were recorded as lost.
    pub unrecoverable_rows: AtomicU64,
    /// Reads that were served from other members because this one was late.
    pub hedged_reads: AtomicU64,
    /// How often it became slow.
    pub slow_episodes: AtomicU64,
    /// Number of cores for which it is slow now.
    pub slow_on_cores: AtomicU64,
    /// Operations in flight whose caller has stopped waiting.
    pub orphaned_io: AtomicU64,
    /// Whether it has been written to since the last check.
    pub written_since_check: AtomicBool,
    /// Reads that returned data other than what was written, where there are checksums, and
    /// unreadable batches of the parity log.
    pub corrupt_reads: Arc<AtomicU64>,
}

/// The tick count, shared by all members of an array.
#[derive(Debug, Default)]
struct TickClock {
    /// The tick, and whether a task advances it.
    now: Cell<(u64, bool)>,
}

impl TickClock {
    fn now_ticks(&self) -> u64 {
        self.now.get().0
    }

    fn is_running(&self) -> bool {
        self.now.get().1
    }

    fn set_running(&self, is_running: bool) {
        self.now.set((self.now_ticks(), is_running));
    }

    /// Advances it by so many ticks; returns the tick.
    fn advance(&self, ticks: u64) -> u64 {
        let now = self.now_ticks() + ticks;
        self.now.set((now, self.is_running()));
        now
    }
}

/// Monitors all members of an array.
#[derive(Debug)]
pub(super) struct HealthMonitor {
    clock: Rc<TickClock>,
    members: RefCell<Vec<Option<Rc<MonitoredDisk>>>>,
    metadata: Rc<dyn PoolMetadata>,
    /// The slow members, one bit each.
    slow_members: Rc<Cell<MemberBits>>,
    /// Counts the scratch memory of the array.
    scratch_pages: Arc<Semaphore>,
    scratch: Ctx,
}

/// The disk of a member.
pub(super) struct MonitoredDisk {
    member: u16,
    dev: Dev,
    /// A block that exists, for probes.
    probe_lba: Lba,
    pub(super) counters: Arc<DiskCounters>,
    monitor: Weak<HealthMonitor>,
    clock: Rc<TickClock>,
    scratch_pages: Arc<Semaphore>,
    slow_members: Rc<Cell<MemberBits>>,
    in_flight: RefCell<Slab<InFlightIo>>,
    health: Cell<DiskHealth>,
}

/// How a disk has responded so far.
#[derive(Clone, Copy, Debug, Default)]
struct DiskHealth {
    /// Ticks in which the others were responsive.
    comparable_ticks: u64,
    /// Tick of the last reply.
    last_reply: u64,
    /// Mean latency of an operation, in ticks times 256.
    mean_latency: u64,
    slow_state: SlowState,
    is_detached: bool,
    /// Whether its operations fail instead of being waited for.
    is_abandoned: bool,
    /// When the pool may be asked again to detach it.
    next_detach_attempt: u64,
    /// When it may be probed next.
    next_probe: u64,
}

/// How slow a member is.
#[derive(Clone, Copy, Debug, Default)]
struct SlowState {
    is_slow: bool,
    /// Late reads, and when the last one was late.
    late_reads: u32,
    last_late: u64,
    /// Timely replies since.
    timely_replies: u32,
    /// How often it became slow, each time soon after the last.
    slow_episodes: u32,
}

/// An operation in flight.
#[derive(Debug)]
struct InFlightIo {
    kind: IoKind,
    begun_tick: u64,
    /// The value of [`DiskHealth::comparable_ticks`] at the start.
    begun_comparable: u64,
    is_late: bool,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IoKind {
    Read,
    Write,
    /// May take long, up to [`DETACH_AFTER_TICKS`].
    Flush,
}

/// An operation on a member's disk, to be polled to completion or [orphaned](Self::orphan). It
/// fails when the member is abandoned.
pub(super) struct MemberIo {
    member: Rc<MonitoredDisk>,
    /// None when it has completed or is orphaned.
    submission: Option<Submission>,
    kind: IoKind,
    slab_key: Option<usize>,
    /// Pages of the array's scratch memory that it uses.
    scratch_pages: u32,
    is_orphaned: bool,
}

/// A reply is late.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeadlineExceeded;

impl HealthMonitor {
    pub(super) fn new(
        metadata: Rc<dyn PoolMetadata>,
        scratch_pages: Arc<Semaphore>,
        scratch: Ctx,
    ) -> Rc<Self> {
        Rc::new(Self {
            clock: Rc::default(),
            members: RefCell::default(),
            metadata,
            slow_members: Rc::default(),
            scratch_pages,
            scratch,
        })
    }

    /// The slow members, one bit each.
    pub(super) fn slow_members(&self) -> MemberBits {
        self.slow_members.get()
    }

    /// Installs the member of this number; replaces any earlier one.
    pub(super) fn set_member(
        self: &Rc<Self>,
        member: u16,
        (dev, probe_lba): (Dev, Lba),
        counters: Arc<DiskCounters>,
    ) -> Rc<MonitoredDisk> {
        let disk = Rc::new(MonitoredDisk {
            member,
            dev,
            probe_lba,
            counters,
            monitor: Rc::downgrade(self),
            clock: Rc::clone(&self.clock),
            scratch_pages: Arc::clone(&self.scratch_pages),
            slow_members: Rc::clone(&self.slow_members),
            in_flight: RefCell::default(),
            health: Cell::new(DiskHealth {
                last_reply: self.clock.now_ticks(),
                ..DiskHealth::default()
            }),
        });
        let mut members = self.members.borrow_mut();
        let count = members.len().max(usize::from(member) + 1);
        members.resize_with(count, || None);
        if let Some(replaced) = members[usize::from(member)].replace(Rc::clone(&disk)) {
            replaced.clear_slow();
        }
        disk
    }

    fn start_ticking(self: &Rc<Self>) {
        if self.clock.is_running() {
            return;
        }
        self.clock.set_running(true);
        // A member that replied before the ticks ran may have stopped long ago.
        self.clock.advance(MAX_DEADLINE_TICKS);
        let weak = Rc::downgrade(self);
        tokio::task::spawn_local(async move {
            let mut idle = 0;
            while idle < IDLE_TICKS_BEFORE_STOP {
                // Counts as one tick however long it was: the whole process may have been stopped.
                tokio::time::sleep(TICK).await;
                let Some(monitor) = weak.upgrade() else { return };
                idle = if monitor.tick() { 0 } else { idle + 1 };
                if idle == IDLE_TICKS_BEFORE_STOP {
                    monitor.clock.set_running(false);
                }
            }
        });
    }

    /// Advances the clock by one tick. Whether there is anything to watch.
    fn tick(self: &Rc<Self>) -> bool {
        let now = self.clock.advance(1);
        let all: Vec<Rc<MonitoredDisk>> = self.members.borrow().iter().flatten().cloned().collect();
        let attached = || all.iter().filter(|member| !member.health.get().is_detached);
        let (count, responsive) =
            (attached().count(), attached().filter(|m| m.is_responsive(now)).count());
        let latency = LatencyStats::of_members(attached());
        let (mut is_busy, mut late) = (false, 0);
        for member in all.iter().filter(|member| !member.health.get().is_abandoned) {
            let (is_attached, is_responsive) =
                (!member.health.get().is_detached, member.is_responsive(now));
            let others = count - usize::from(is_attached);
            let others_responsive = responsive - usize::from(is_attached && is_responsive);
            // If half of the others respond, this member is late; else something that they share.
            if others > 0 && others_responsive * 2 >= others {
                member.update(|health| health.comparable_ticks += 1);
            }
            let found = member.scan_in_flight(now, latency.deadline_for(member));
            is_busy |= found.has_in_flight;
            late |= if is_attached && found.nears_deadline { member_bit(member.member) } else { 0 };
            member.update_slow_state(now, &found, &*self.metadata);
        }
        if late != 0 {
            let others = attached().filter(|member| late & !member_bit(member.member) != 0);
            others.for_each(|member| member.probe_if_idle(now, &self.scratch));
        }
        self.detach_unresponsive(now, &all);
        // Slow members are probed now and then, so that they can recover.
        is_busy || self.slow_members.get() != 0
    }

    /// Detaches members that have been unresponsive for too long, as far as the pool permits.
    fn detach_unresponsive(self: &Rc<Self>, now: u64, all: &[Rc<MonitoredDisk>]) {
        let is_unresponsive = |member: &&Rc<MonitoredDisk>| {
            !member.health.get().is_detached && member.unresponsive_ticks() >= MAX_DEADLINE_TICKS
        };
        let unresponsive =
            all.iter().filter(is_unresponsive).fold(0, |bits, m| bits | member_bit(m.member));
        for member in all.iter().filter(|member| !member.health.get().is_abandoned) {
            if member.health.get().is_detached {
                // Already known to be detached.
                if member.oldest_ticks(now) >= DETACH_AFTER_TICKS {
                    member.abandon();
                }
            } else if member.unresponsive_ticks() >= DETACH_AFTER_TICKS
                && now >= member.health.get().next_detach_attempt
            {
                member.update(|health| health.next_detach_attempt = u64::MAX);
                let (monitor, member) = (Rc::clone(self), Rc::clone(member));
                tokio::task::spawn_local(async move {
                    monitor.request_detach(&member, unresponsive).await;
                });
            }
        }
    }

    async fn request_detach(&self, member: &MonitoredDisk, unresponsive: MemberBits) {
        let number = member.member;
        let replied = async {
            while member.unresponsive_ticks() >= MAX_DEADLINE_TICKS {
                tokio::time::sleep(TICK).await;
            }
            Ok(false)
        };
        // A member that replies first is not detached.
        let detached = tokio::select! {
            biased;
            detached = self.metadata.detach_unresponsive(number, unresponsive) => detached,
            detached = replied => detached,
        };
        match detached {
            Ok(true) => member.abandon(),
            Ok(false) => {
                member.postpone_detach(self.clock.now_ticks());
            }
            Err(error) => {
                tracing::warn!(member = number, %error, "a disk does not respond but cannot be detached");
                member.postpone_detach(self.clock.now_ticks());
            }
        }
    }
}

/// Mean latency of all members that are not slow, in ticks times 256.
struct LatencyStats {
    sum: u64,
    count: u64,
}

impl LatencyStats {
    fn of_members<'a>(members: impl Iterator<Item = &'a Rc<MonitoredDisk>>) -> Self {
        let healthy = members.filter(|member| !member.health.get().slow_state.is_slow);
        let (sum, count) = healthy
            .fold((0, 0), |(sum, n), member| (sum + member.health.get().mean_latency, n + 1));
        Self { sum, count }
    }

    /// The deadline of `member`, from the latency of the others, in ticks.
    fn deadline_for(&self, member: &MonitoredDisk) -> u64 {
        let counts = !member.health.get().is_detached && !member.health.get().slow_state.is_slow;
        let count = self.count - u64::from(counts);
        let sum = if counts { self.sum - member.health.get().mean_latency } else { self.sum };
        (sum * LATE_FACTOR / count.max(1) / 256).clamp(MIN_DEADLINE_TICKS, MAX_DEADLINE_TICKS)
    }
}

/// The operations of a member in flight.
#[derive(Clone, Copy, Debug, Default)]
struct InFlightSummary {
    has_in_flight: bool,
    /// Some operation may be late soon.
    nears_deadline: bool,
    /// Reads that became late in this tick, and whether any read is late.
    newly_late_reads: u32,
    has_late_read: bool,
    /// Some operation has been unanswered for a second.
    is_unresponsive: bool,
}

impl MonitoredDisk {
    fn update(&self, update: impl FnOnce(&mut DiskHealth)) {
        let mut health = self.health.get();
        update(&mut health);
        self.health.set(health);
    }

    /// The pool is not asked again to detach it for a while.
    fn postpone_detach(&self, now: u64) {
        self.update(|health| health.next_detach_attempt = now + DETACH_RETRY_TICKS);
    }

    /// The disk.
    pub(super) fn dev(&self) -> &Dev {
        &self.dev
    }

    /// Whether it has operations in flight, of any caller.
    pub(super) fn is_busy(&self) -> bool {
        self.dev.stats().in_flight > 0
    }

    /// Records that it is detached, or attached again.
    pub(super) fn set_detached(&self, is_detached: bool) {
        self.update(|health| health.is_detached = is_detached);
        if is_detached {
            self.clear_slow();
        }
    }

    /// Stops tracking whether it is slow.
    fn clear_slow(&self) {
        let mut was_slow = false;
        self.update(|health| was_slow = std::mem::take(&mut health.slow_state).is_slow);
        if was_slow {
            self.counters.slow_on_cores.fetch_sub(1, Ordering::Relaxed);
            self.slow_members.set(self.slow_members.get() & !member_bit(self.member));
        }
    }

    fn is_responsive(&self, now: u64) -> bool {
        now - self.health.get().last_reply
            <= RESPONSIVE_TICKS + 2 * self.health.get().mean_latency / 256
    }

    /// Inspects the operations in flight, and wakes reads that became late.
    fn scan_in_flight(&self, now: u64, deadline: u64) -> InFlightSummary {
        let (mut found, compared) =
            (InFlightSummary::default(), self.health.get().comparable_ticks);
        for (_, flight) in &mut *self.in_flight.borrow_mut() {
            let age = compared - flight.begun_comparable;
            found.has_in_flight = true;
            found.nears_deadline |= now - flight.begun_tick > MIN_DEADLINE_TICKS / 2;
            found.is_unresponsive |= flight.kind != IoKind::Flush && age >= MAX_DEADLINE_TICKS;
            if flight.kind == IoKind::Read && age >= deadline {
                found.has_late_read = true;
                if !flight.is_late {
                    flight.is_late = true;
                    found.newly_late_reads += 1;
                    flight.waker.take().into_iter().for_each(Waker::wake);
                }
            }
        }
        found
    }

    /// Updates whether it is slow.
    fn update_slow_state(&self, now: u64, found: &InFlightSummary, metadata: &dyn PoolMetadata) {
        let mut state = self.health.get().slow_state;
        if self.health.get().is_detached {
            return;
        }
        if found.newly_late_reads > 0 {
            let is_recent = now - state.last_late <= LATE_READ_WINDOW_TICKS;
            state.late_reads =
                if is_recent { state.late_reads } else { 0 } + found.newly_late_reads;
        }
        if found.has_late_read || found.is_unresponsive {
            (state.last_late, state.timely_replies) = (now, 0);
        }
        let recovery =
            RECOVERY_TICKS << (state.slow_episodes.clamp(1, MAX_RECOVERY_DOUBLINGS + 1) - 1);
        if !state.is_slow && (state.late_reads >= SLOW_AFTER_LATE_READS || found.is_unresponsive) {
            (state.is_slow, state.slow_episodes) = (true, state.slow_episodes.saturating_add(1));
            self.set_slow(true, metadata);
        } else if state.is_slow
            && now - state.last_late >= recovery
            && state.timely_replies >= RECOVERY_REPLIES
        {
            (state.is_slow, state.late_reads) = (false, 0);
            self.set_slow(false, metadata);
        } else if !state.is_slow && state.slow_episodes > 0 && now - state.last_late > recovery * 4
        {
            state.slow_episodes = 0;
        }
        self.update(|health| health.slow_state = state);
    }

    fn set_slow(&self, is_slow: bool, metadata: &dyn PoolMetadata) {
        let bits = self.slow_members.get();
        if is_slow {
            self.slow_members.set(bits | member_bit(self.member));
            self.counters.slow_episodes.fetch_add(1, Ordering::Relaxed);
            self.counters.slow_on_cores.fetch_add(1, Ordering::Relaxed);
        } else {
            self.slow_members.set(bits & !member_bit(self.member));
            self.counters.slow_on_cores.fetch_sub(1, Ordering::Relaxed);
        }
        metadata.set_slow(self.member, is_slow);
    }

    /// Whether to read from it although it is slow, to see whether it still is. True once per
    /// interval.
    pub(super) fn is_probe_due(&self) -> bool {
        let now = self.clock.now_ticks();
        let is_time = now >= self.health.get().next_probe && self.in_flight.borrow().is_empty();
        if is_time {
            self.update(|health| health.next_probe = now + PROBE_INTERVAL_TICKS);
        }
        is_time
    }

    /// How long its oldest operation has been unanswered while the others responded, in ticks.
    fn unresponsive_ticks(&self) -> u64 {
        let oldest =
            self.in_flight.borrow().iter().map(|(_, flight)| flight.begun_comparable).min();
        oldest.map_or(0, |oldest| self.health.get().comparable_ticks - oldest)
    }

    fn oldest_ticks(&self, now: u64) -> u64 {
        self.in_flight.borrow().iter().map(|(_, flight)| now - flight.begun_tick).max().unwrap_or(0)
    }

    /// Sends a read to an idle member, so that it can show that it responds.
    fn probe_if_idle(self: &Rc<Self>, now: u64, ctx: &Ctx) {
        if now - self.health.get().last_reply < RESPONSIVE_TICKS || self.is_busy() {
            return;
        }
        // The result is ignored: the block may be written meanwhile.
        if let Ok(flying) = self.begin(Op::Read { at: self.probe_lba, blocks: 1 }, ctx, 0) {
            flying.spawn_orphaned();
        }
    }

    /// Fails all its operations instead of waiting for them.
    fn abandon(&self) {
        self.update(|health| health.is_abandoned = true);
        let mut flights = self.in_flight.borrow_mut();
        flights.iter_mut().filter_map(|(_, flight)| flight.waker.take()).for_each(Waker::wake);
    }

    /// Starts an operation, which uses this many pages of the array's scratch memory.
    pub(super) fn begin(self: &Rc<Self>, op: Op, ctx: &Ctx, pages: u32) -> Result<MemberIo, Error> {
        if self.health.get().is_abandoned {
            return Err(Error::Gone);
        }
        let kind = match op {
            Op::Read { .. } => IoKind::Read,
            Op::Flush => IoKind::Flush,
            _ => IoKind::Write,
        };
        let submission = Some(self.dev.start(op, ctx)?);
        Ok(MemberIo {
            member: Rc::clone(self),
            submission,
            kind,
            slab_key: None,
            scratch_pages: pages,
            is_orphaned: false,
        })
    }

    /// Runs an operation; it fails if the member is abandoned.
    pub(super) async fn submit(self: &Rc<Self>, op: Op, ctx: &Ctx) -> Result<Bufs, Error> {
        self.begin(op, ctx, 0)?.await
    }

    /// Notes that an operation was still in flight when polled.
    fn register_in_flight(&self, kind: IoKind, key: Option<usize>, cx: &Context<'_>) -> usize {
        let mut flights = self.in_flight.borrow_mut();
        if let Some(key) = key {
            let waker = &mut flights[key].waker;
            if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
            return key;
        }
        if !self.clock.is_running() {
            self.monitor.upgrade().into_iter().for_each(|monitor| monitor.start_ticking());
        }
        let (begun, comparable) = (self.clock.now_ticks(), self.health.get().comparable_ticks);
        let waker = Some(cx.waker().clone());
        flights.insert(InFlightIo {
            kind,
            begun_tick: begun,
            begun_comparable: comparable,
            is_late: false,
            waker,
        })
    }

    /// Notes that an operation has completed; `flight` is set if a poll found it in flight.
    fn record_completion(&self, kind: IoKind, flight: Option<InFlightIo>, is_answer: bool) {
        let now = self.clock.now_ticks();
        if is_answer {
            self.update(|health| health.last_reply = now);
        }
        // Only the checker resets it, so mostly this is just a load.
        if kind == IoKind::Write && !self.counters.written_since_check.load(Ordering::Relaxed) {
            self.counters.written_since_check.store(true, Ordering::Relaxed);
        }
        if kind != IoKind::Flush && is_answer {
            let latency =
                flight.as_ref().map_or(0, |flight| now - flight.begun_tick).min(MAX_DEADLINE_TICKS)
                    * 256;
            self.update(|health| {
                health.mean_latency = (health.mean_latency * 15 + latency) / 16;
            });
            let mut state = self.health.get().slow_state;
            if state.is_slow {
                let is_late = flight.is_some_and(|flight| flight.is_late);
                state.timely_replies = if is_late { 0 } else { state.timely_replies + 1 };
                self.update(|health| health.slow_state = state);
            }
        }
    }
}

impl Drop for MonitoredDisk {
    fn drop(&mut self) {
        self.clear_slow();
    }
}

impl fmt::Debug for MonitoredDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MonitoredDisk")
            .field("member", &self.member)
            .field("dev", &self.dev)
            .finish()
    }
}

impl MemberIo {
    fn poll_reply(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bufs, Error>> {
        let Some(submission) = &mut self.submission else { return Poll::Ready(Err(Error::Gone)) };
        if let Poll::Ready(answer) = Pin::new(submission).poll(cx) {
            self.submission = None;
            let flight = self.unregister();
            self.member.record_completion(self.kind, flight, answer.is_ok());
            return Poll::Ready(answer);
        }
        if self.member.health.get().is_abandoned && !self.is_orphaned {
            self.take_orphaned().spawn_orphaned();
            return Poll::Ready(Err(Error::Gone));
        }
        self.slab_key = Some(self.member.register_in_flight(self.kind, self.slab_key, cx));
        Poll::Pending
    }

    fn unregister(&mut self) -> Option<InFlightIo> {
        self.slab_key.take().map(|key| self.member.in_flight.borrow_mut().remove(key))
    }

    /// The reply, or [`DeadlineExceeded`] when it is late; the operation must then still be polled.
    pub(super) async fn reply_before_deadline(
        &mut self,
    ) -> Result<Result<Bufs, Error>, DeadlineExceeded> {
        poll_fn(|cx| {
            if let Poll::Ready(answer) = self.poll_reply(cx) {
                return Poll::Ready(Ok(answer));
            }
            match self.slab_key.is_some_and(|key| self.member.in_flight.borrow()[key].is_late) {
                true => Poll::Ready(Err(DeadlineExceeded)),
                false => Poll::Pending,
            }
        })
        .await
    }

    /// Stops waiting for it. It runs on, with the memory that it has.
    pub(super) fn orphan(&mut self) {
        self.take_orphaned().spawn_orphaned();
    }

    fn take_orphaned(&mut self) -> Self {
        let (submission, key) = (self.submission.take(), self.slab_key.take());
        Self {
            member: Rc::clone(&self.member),
            submission,
            slab_key: key,
            is_orphaned: true,
            ..*self
        }
    }

    /// Runs on as a task. The caller may ignore the result; its range may then be written
    /// meanwhile.
    pub(super) fn spawn_orphaned(mut self) -> tokio::task::JoinHandle<Result<Bufs, Error>> {
        self.submission.iter_mut().for_each(Submission::detach);
        let orphaned = OrphanedIo::new(&self);
        tokio::task::spawn_local(async move {
            let _orphaned = orphaned;
            self.await
        })
    }
}

impl Future for MemberIo {
    type Output = Result<Bufs, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_reply(cx)
    }
}

impl Drop for MemberIo {
    fn drop(&mut self) {
        self.unregister();
    }
}

impl fmt::Debug for MemberIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemberIo").field("member", &self.member).finish_non_exhaustive()
    }
}

/// What an orphaned operation holds.
struct OrphanedIo {
    counters: Arc<DiskCounters>,
    /// Its share of the array's scratch memory, or its place in the queue for it: the caller
    /// releases its own.
    _scratch_pages: Option<Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>>>>>,
}

impl OrphanedIo {
    fn new(io: &MemberIo) -> Self {
        let counters = Arc::clone(&io.member.counters);
        counters.orphaned_io.fetch_add(1, Ordering::Relaxed);
        let (waiting, pages) = (Arc::clone(&io.member.scratch_pages), io.scratch_pages);
        let mut waiting: Option<Pin<Box<dyn Future<Output = _>>>> = (pages > 0).then(|| {
            let permits = waiting.acquire_many_owned(pages).map(Result::ok);
            Box::pin(permits) as Pin<Box<dyn Future<Output = _>>>
        });
        if let Some(permits) = &mut waiting {
            // Enqueues it at the head.
            let _ = permits.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
        Self { counters, _scratch_pages: waiting }
    }
}

impl Drop for OrphanedIo {
    fn drop(&mut self) {
        self.counters.orphaned_io.fetch_sub(1, Ordering::Relaxed);
    }
}

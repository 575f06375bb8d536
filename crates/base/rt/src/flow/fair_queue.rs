//! Start-time fair queueing of a core's flows (RFD 0043). Plain data.
//!
//! Each flow has a *finish tag*: the virtual time at which what it has used so far is paid for. A
//! flow whose tag lies ahead of virtual time has had more than its share, and its tasks wait. The
//! waiting flow with the lowest tag runs next, and virtual time advances to its tag. A flow that
//! was idle continues at virtual time: it saves nothing up.
//!
//! Costs are known afterwards, because a transfer is not cut: a large one advances the tag further.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use slab::Slab;
use tokio::time::Instant;

/// What flows may use between two looks for events, in bytes: what all wait for who come meanwhile.
const PASS_BYTES: u64 = 128 << 10;

/// The same if only one group is active: nobody waits.
const LONE_PASS_BYTES: u64 = 1 << 20;

/// How long no other group has run if a group is alone.
const ALONE_AFTER: Duration = Duration::from_millis(10);

/// How far ahead of virtual time a flow may be and still run at once: some small commands.
const SPARSE_BYTES: u64 = 32 << 10;

/// The weight of a group that has its full share.
pub const FULL_WEIGHT: u64 = 64;

/// The number of a group of flows, of a flow, of a task that waits.
pub(super) type GroupId = usize;
pub(super) type FlowId = usize;
pub(super) type WaiterId = usize;

/// All flows of a core.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    groups: Slab<Group>,
    flows: Slab<FlowState>,
    waiters: Slab<Waiter>,
    /// Flows with tasks that wait, by finish tag; without the one whose task was woken.
    backlog: BTreeSet<(u64, FlowId)>,
    virtual_time: u64,
    /// The task that was woken last, until the end of its poll.
    woken: Option<WaiterId>,
    /// How many tasks wait and were not woken.
    queued: usize,
    /// What may still be used before the next look for events.
    pass_left: i64,
    /// The group that ran last, and since when no other has.
    last_group: Option<(GroupId, Instant)>,
    is_alone: bool,
    /// What the poll in progress has used.
    poll_bytes: u64,
}

/// Flows that share one share.
#[derive(Clone, Copy, Debug)]
struct Group {
    weight: u64,
    /// Its flows with tasks that wait.
    backlogged: u64,
}

#[derive(Debug)]
struct FlowState {
    group: GroupId,
    finish_tag: u64,
    waiting: VecDeque<WaiterId>,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    flow: FlowId,
    is_woken: bool,
}

impl FairQueue {
    /// Adds a group whose share is `weight` of [`FULL_WEIGHT`].
    pub(super) fn add_group(&mut self, weight: u64) -> GroupId {
        self.groups.insert(Group { weight: weight.max(1), backlogged: 0 })
    }

    /// Removes a group that has no flows any more.
    pub(super) fn remove_group(&mut self, group: GroupId) {
        self.groups.remove(group);
        self.last_group = self.last_group.filter(|(last, _)| *last != group);
    }

    pub(super) fn add_flow(&mut self, group: GroupId) -> FlowId {
        self.flows.insert(FlowState {
            group,
            finish_tag: self.virtual_time,
            waiting: VecDeque::new(),
        })
    }

    /// Moves a flow to another group.
    pub(super) fn set_group(&mut self, flow: FlowId, group: GroupId) {
        let state = &mut self.flows[flow];
        let backlogged = u64::from(!state.waiting.is_empty());
        self.groups[state.group].backlogged -= backlogged;
        self.groups[group].backlogged += backlogged;
        state.group = group;
    }

    /// Removes a flow that has no tasks any more.
    pub(super) fn remove_flow(&mut self, flow: FlowId) {
        self.flows.remove(flow);
    }

    /// Whether a task of `flow` that has not waited may run now; it begins to if so.
    pub(super) fn try_begin(&mut self, flow: FlowId, now: impl FnOnce() -> Instant) -> bool {
        let FlowState { finish_tag, waiting, .. } = &self.flows[flow];
        let is_next = waiting.is_empty() && !self.is_woken(flow);
        let lead = finish_tag.saturating_sub(self.virtual_time);
        let fits = self.pass_left > 0 && self.backlog.is_empty();
        if !is_next || !(lead <= SPARSE_BYTES || fits) {
            return false;
        }
        if fits {
            self.virtual_time = self.virtual_time.max(*finish_tag);
        }
        self.begin(flow, now);
        true
    }

    /// A task of `flow` waits, behind those that wait already.
    pub(super) fn wait(&mut self, flow: FlowId) -> WaiterId {
        let waiter = self.waiters.insert(Waiter { flow, is_woken: false });
        self.queued += 1;
        let state = &mut self.flows[flow];
        state.waiting.push_back(waiter);
        if state.waiting.len() == 1 {
            self.groups[state.group].backlogged += 1;
            if !self.is_woken(flow) {
                let tag = self.flows[flow].finish_tag;
                self.backlog.insert((tag, flow));
            }
        }
        waiter
    }

    /// Whether a waiting task was woken, and may run now; it begins to if so.
    pub(super) fn try_resume(&mut self, waiter: WaiterId, now: impl FnOnce() -> Instant) -> bool {
        let Waiter { flow, is_woken } = self.waiters[waiter];
        if is_woken {
            self.begin(flow, now);
        }
        is_woken
    }

    /// A waiting task has been polled, or is gone.
    pub(super) fn end_wait(&mut self, waiter: WaiterId) {
        let Waiter { flow, is_woken } = self.waiters.remove(waiter);
        if self.woken == Some(waiter) {
            self.woken = None;
            self.queue(flow);
        }
        if is_woken {
            return;
        }
        self.queued -= 1;
        let state = &mut self.flows[flow];
        state.waiting.retain(|other| *other != waiter);
        if state.waiting.is_empty() {
            self.groups[state.group].backlogged -= 1;
            self.backlog.remove(&(state.finish_tag, flow));
        }
    }

    /// The core has looked for events.
    pub(super) fn begin_pass(&mut self, now: Instant) {
        let is_alone = |(_, since): (GroupId, Instant)| now >= since + ALONE_AFTER;
        self.is_alone = self.last_group.is_some_and(is_alone);
        self.pass_left = self.pass_bytes().cast_signed();
        // A task that was woken before the look and has not run is held up by its owner, not by the
        // core: the others do not wait for it.
        if let Some(late) = self.woken.take() {
            self.queue(self.waiters[late].flow);
        }
    }

    /// Whether no more tasks are woken before the next look for events.
    pub(super) fn is_pass_over(&self) -> bool {
        self.pass_left <= 0
    }

    /// Whether the task that was woken last has not run yet.
    pub(super) fn has_woken(&self) -> bool {
        self.woken.is_some()
    }

    /// Chooses the task to wake next: the first of the flow with the lowest tag.
    ///
    /// To be called when all tasks that are ready have run: one that has just had a turn, and goes
    /// on at once, waits again by then.
    pub(super) fn wake_next(&mut self) -> Option<WaiterId> {
        if self.woken.is_some() || self.pass_left <= 0 {
            return None;
        }
        let (tag, flow) = self.backlog.pop_first()?;
        self.virtual_time = self.virtual_time.max(tag);
        let state = &mut self.flows[flow];
        let waiter = state.waiting.pop_front()?;
        if state.waiting.is_empty() {
            self.groups[state.group].backlogged -= 1;
        }
        self.waiters[waiter].is_woken = true;
        self.queued -= 1;
        self.woken = Some(waiter);
        self.woken
    }

    /// Whether tasks wait that were not woken.
    pub(super) fn has_queued(&self) -> bool {
        self.queued > 0
    }

    /// The poll in progress has used `bytes` for `flow`.
    pub(super) fn charge(&mut self, flow: FlowId, bytes: u64) {
        let state = &mut self.flows[flow];
        let Group { weight, backlogged } = self.groups[state.group];
        let cost = bytes.saturating_mul(FULL_WEIGHT).saturating_mul(backlogged.max(1)) / weight;
        let is_queued = self.backlog.remove(&(state.finish_tag, flow));
        state.finish_tag = state.finish_tag.max(self.virtual_time).saturating_add(cost);
        if is_queued {
            self.backlog.insert((state.finish_tag, flow));
        }
        self.pass_left = self.pass_left.saturating_sub_unsigned(bytes);
        self.poll_bytes = self.poll_bytes.saturating_add(bytes);
    }

    /// What the poll in progress may still use.
    pub(super) fn poll_bytes_left(&self) -> u64 {
        self.pass_bytes().saturating_sub(self.poll_bytes)
    }

    fn pass_bytes(&self) -> u64 {
        if self.is_alone { LONE_PASS_BYTES } else { PASS_BYTES }
    }

    fn is_woken(&self, flow: FlowId) -> bool {
        self.woken.is_some_and(|waiter| self.waiters[waiter].flow == flow)
    }

    fn begin(&mut self, flow: FlowId, now: impl FnOnce() -> Instant) {
        self.poll_bytes = 0;
        let group = self.flows[flow].group;
        if self.last_group.is_none_or(|(last, _)| last != group) {
            self.last_group = Some((group, now()));
            self.is_alone = false;
            self.pass_left = self.pass_left.min(PASS_BYTES.cast_signed());
        }
    }

    /// Adds a flow to the backlog if tasks of it wait.
    fn queue(&mut self, flow: FlowId) {
        let Some(FlowState { finish_tag, waiting, .. }) = self.flows.get(flow) else { return };
        if !waiting.is_empty() {
            self.backlog.insert((*finish_tag, flow));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    /// Tasks that are always ready: each moves `unit` bytes in a poll, again and again.
    struct World {
        queue: FairQueue,
        now: Instant,
        tasks: Vec<Task>,
    }

    struct Task {
        flow: FlowId,
        unit: u64,
        waiter: Option<WaiterId>,
        moved: u64,
    }

    impl World {
        fn new() -> Self {
            Self { queue: FairQueue::default(), now: Instant::now(), tasks: Vec::new() }
        }

        fn flow(&mut self, group: GroupId) -> FlowId {
            self.queue.add_flow(group)
        }

        fn task(&mut self, flow: FlowId, unit: u64) {
            self.tasks.push(Task { flow, unit, waiter: None, moved: 0 });
        }

        /// Polls a task, if it may run; returns whether it may.
        fn poll(&mut self, n: usize) -> bool {
            let (task, now) = (&mut self.tasks[n], self.now);
            let may_run = match task.waiter {
                Some(waiter) => self.queue.try_resume(waiter, || now),
                None => self.queue.try_begin(task.flow, || now),
            };
            if may_run {
                self.queue.charge(task.flow, task.unit);
                task.moved += task.unit;
                task.waiter.take().into_iter().for_each(|waiter| self.queue.end_wait(waiter));
            } else {
                task.waiter.get_or_insert_with(|| self.queue.wait(task.flow));
            }
            may_run
        }

        /// Polls all tasks that are ready, until all wait.
        fn run_ready(&mut self) {
            for n in 0..self.tasks.len() {
                while self.tasks[n].waiter.is_none() && self.poll(n) {}
            }
        }

        /// A pass; returns the bytes moved by tasks that had waited.
        fn pass(&mut self) -> u64 {
            self.run_ready();
            self.now += Duration::from_micros(30);
            self.queue.begin_pass(self.now);
            let mut bytes = 0;
            while let Some(waiter) = self.queue.wake_next() {
                let n = self.tasks.iter().position(|task| task.waiter == Some(waiter)).unwrap();
                bytes += self.tasks[n].unit;
                assert!(self.poll(n));
                self.run_ready();
            }
            bytes
        }

        fn run_passes(&mut self, count: usize) {
            for _ in 0..count {
                self.pass();
            }
        }

        fn moved(&self, flow: FlowId) -> u64 {
            self.tasks.iter().filter(|task| task.flow == flow).map(|task| task.moved).sum()
        }
    }

    #[test]
    fn groups_share_equally_whatever_flows_tasks_and_units_they_have() {
        let mut world = World::new();
        let [few, many] = [0; 2].map(|_| world.queue.add_group(FULL_WEIGHT));
        let single = world.flow(few);
        world.task(single, 4 * KIB);
        let flows: Vec<_> = (0..8).map(|_| world.flow(many)).collect();
        for &flow in &flows {
            (0..4).for_each(|_| world.task(flow, 128 * KIB));
        }
        world.run_passes(4000);
        let all: u64 = flows.iter().map(|flow| world.moved(*flow)).sum();
        let share = world.moved(single) * 100 / (world.moved(single) + all);
        assert!((45..=55).contains(&share), "{share} %");
        let of_each: Vec<_> = flows.iter().map(|flow| world.moved(*flow)).collect();
        let (least, most) = (of_each.iter().min().unwrap(), of_each.iter().max().unwrap());
        assert!(most - least <= 512 * KIB, "{of_each:?}");
    }

    #[test]
    fn a_weight_is_a_share() {
        let mut world = World::new();
        let (full, quarter) =
            (world.queue.add_group(FULL_WEIGHT), world.queue.add_group(FULL_WEIGHT / 4));
        let flows = [world.flow(full), world.flow(quarter)];
        flows.iter().for_each(|flow| world.task(*flow, 64 * KIB));
        world.run_passes(1000);
        let share = world.moved(flows[1]) * 100 / world.moved(flows[0]);
        assert!((23..=27).contains(&share), "{share} %");
    }

    #[test]
    fn a_flow_with_little_work_never_waits_behind_large_ones() {
        let mut world = World::new();
        let [small, large] = [0; 2].map(|_| world.queue.add_group(FULL_WEIGHT));
        let reader = world.flow(small);
        for _ in 0..8 {
            let flow = world.flow(large);
            (0..8).for_each(|_| world.task(flow, 132 * KIB));
        }
        world.run_passes(10);
        for _ in 0..1000 {
            let now = world.now;
            assert!(world.queue.try_begin(reader, || now));
            world.queue.charge(reader, 14 * KIB);
            let moved = world.pass();
            assert!(moved <= PASS_BYTES + 132 * KIB, "{moved} bytes between two looks");
        }
    }

    #[test]
    fn a_lone_group_has_long_passes_until_another_one_comes() {
        let mut world = World::new();
        let [lone, other] = [0; 2].map(|_| world.queue.add_group(FULL_WEIGHT));
        let (busy, rare) = (world.flow(lone), world.flow(other));
        (0..32).for_each(|_| world.task(busy, 128 * KIB));
        world.run_passes(1000);
        assert!(world.pass() >= LONE_PASS_BYTES);
        let now = world.now;
        assert!(world.queue.try_begin(rare, || now));
        world.pass();
        assert!(world.pass() < 2 * PASS_BYTES);
    }

    #[test]
    fn an_idle_flow_saves_nothing_up() {
        let mut world = World::new();
        let [a, b] = [0; 2].map(|_| world.queue.add_group(FULL_WEIGHT));
        let (first, late) = (world.flow(a), world.flow(b));
        world.task(first, 64 * KIB);
        world.run_passes(1000);
        let before = world.moved(first);
        world.task(late, 64 * KIB);
        world.run_passes(100);
        assert!(world.moved(late) <= world.moved(first) - before + 512 * KIB);
    }

    #[test]
    fn a_turn_passes_on_if_its_task_is_gone_or_held_up() {
        let mut world = World::new();
        let group = world.queue.add_group(FULL_WEIGHT);
        let flows: Vec<_> = (0..3).map(|_| world.flow(group)).collect();
        flows.iter().for_each(|flow| world.task(*flow, 256 * KIB));
        world.run_ready();
        world.queue.begin_pass(world.now);
        let first = world.queue.wake_next().expect("they wait");
        assert_eq!(world.queue.wake_next(), None, "one at a time");
        world.queue.end_wait(first);
        let second = world.queue.wake_next().expect("the first is gone");
        world.queue.begin_pass(world.now);
        let third = world.queue.wake_next().expect("the second does not run");
        assert!(third != second && !world.queue.has_queued());
        let now = world.now;
        assert!(world.queue.try_resume(third, || now) && world.queue.try_resume(second, || now));
        [second, third].into_iter().for_each(|waiter| world.queue.end_wait(waiter));
        flows.into_iter().for_each(|flow| world.queue.remove_flow(flow));
        world.queue.remove_group(group);
    }
}

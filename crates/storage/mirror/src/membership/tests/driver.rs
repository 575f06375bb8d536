//! The driver of the search: it carries out the effects of the real [`ReplicaState`] in the world,
//! as [`Replica`](super::super::super::replica::Replica) does with tasks, disks and sessions.
//!
//! There is one block, so every two writes overlap. The number of bytes of a write is its value.

use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block::{Blocks, Bufs, Ctx, Epoch, Error, Info, Lba, MemoryClass, RangeLock};
use intent_log::RegionGuard;
use peer::{
    DataGeneration, Incarnation, Message, NodeId, PreparedEntry, Seq, View, WriteId, WriteKind,
    WriteOp,
};
use rt::buf::BufferPool;
use uuid::Uuid;

use super::super::super::config::{InSyncMember as Listed, MirrorConfig};
use super::super::super::receive::{payload_view, view_of};
use super::super::super::state::effects::{Effect, Effects, PreparedApply};
use super::super::super::state::join::JoinAttempt;
use super::super::super::state::local_writes::LocalWriteOutcome;
use super::super::super::state::sequencer::ReplicationOutcome;
use super::super::super::state::write::{PayloadSource, WriteOutcome};
use super::super::super::state::{ReplicaImage, ReplicaState};
use super::super::{Event, JoinerComparison, LegState, MirrorMembership, RecordedGenerations};
use super::world::{Mistake, NOW, PutInFlight, Value, World, WriteProgress, at, id};

/// The block.
pub(super) const BLOCK: Blocks = Blocks { at: Lba(0), count: 1 };

/// What a node loses when its process ends.
pub(super) struct Process {
    pub(super) state: ReplicaState,
    /// A configuration is being read.
    pub(super) reading: bool,
    /// A view whose leg is to be drained, and the configuration to adopt.
    pub(super) begin: Option<(View, Option<MirrorConfig>)>,
    pub(super) reconciliation: Option<Reconciling>,
    /// The writes that this node executes, in the order in which they came.
    pub(super) commands: Vec<Command>,
    /// What the leg is to apply, in the order in which it was asked to.
    pub(super) applies: Vec<Apply>,
}

/// A reconciliation under way at the primary.
#[derive(Clone, Debug)]
pub(super) struct Reconciling {
    view: View,
    committed: BTreeSet<WriteId>,
    /// The copy of an entry, if one is needed, and whether the own leg has it.
    copy: Option<(Seq, bool)>,
}

/// A write that this node executes, for a client of its own or for another node.
#[derive(Debug)]
pub(super) struct Command {
    write_id: WriteId,
    value: Value,
    view: View,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Until this node serves.
    Waiting,
    /// For the lock of the block.
    Locking(RangeLock),
    /// For the leg.
    Applying(PreparedEntry),
    /// For the other members.
    Ordered(PreparedEntry),
    /// For its outcome as a local write.
    Asked,
}

/// Something for the leg.
#[derive(Debug)]
pub(super) enum Apply {
    /// An entry that the primary has sent.
    Prepared(PreparedApply),
    /// A write that this primary has ordered.
    Own(PreparedEntry, Value),
    /// A copy that this primary lacks, and the lock for which it waits.
    Copy(PreparedEntry, Value, RangeLock),
}

/// The image of a node, as its state sees it.
#[derive(Debug)]
struct Image(RecordedGenerations);

impl ReplicaImage for Image {
    fn info(&self) -> Info {
        Info {
            block_size: 512,
            blocks: 1,
            metadata_blocks: 0,
            physical_block_size: 512,
            max_transfer_blocks: 1,
            unmap_granularity_blocks: 0,
            unmap_zeroes: true,
            volatile_cache: true,
            native_fua: true,
            read_only: false,
            overhead_bytes: 0,
        }
    }

    fn recorded_generations(&self) -> RecordedGenerations {
        self.0.clone()
    }

    fn guard_regions(&self, _: std::ops::Range<u64>) -> Option<RegionGuard> {
        None
    }

    fn forget_flushes(&self) {}
}

pub(super) fn image(generations: &RecordedGenerations) -> Rc<dyn ReplicaImage> {
    Rc::new(Image(generations.clone()))
}

impl Clone for Process {
    fn clone(&self) -> Self {
        let state = self.state.fork(image(&self.state.image().recorded_generations()));
        let lock = |lock: &RangeLock| lock.in_fork(&state.range_locks);
        let stage = |stage: &Stage| match stage {
            Stage::Waiting => Stage::Waiting,
            Stage::Locking(l) => Stage::Locking(lock(l)),
            Stage::Applying(entry) => Stage::Applying(*entry),
            Stage::Ordered(entry) => Stage::Ordered(*entry),
            Stage::Asked => Stage::Asked,
        };
        let command = |c: &Command| Command { stage: stage(&c.stage), ..*c };
        let apply = |apply: &Apply| match apply {
            Apply::Prepared(p) => Apply::Prepared(PreparedApply {
                op: p.op.clone(),
                ctx: p.ctx.clone(),
                awaited_lock: p.awaited_lock.as_ref().map(lock),
                ..*p
            }),
            Apply::Own(entry, value) => Apply::Own(*entry, *value),
            Apply::Copy(entry, value, l) => Apply::Copy(*entry, *value, lock(l)),
        };
        let commands = self.commands.iter().map(command).collect();
        let applies = self.applies.iter().map(apply).collect();
        Self {
            commands,
            applies,
            reading: self.reading,
            begin: self.begin.clone(),
            reconciliation: self.reconciliation.clone(),
            state,
        }
    }
}

impl Hash for Process {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.state.membership.hash(hasher);
        self.state.describe().hash(hasher);
        (self.reading, &self.begin).hash(hasher);
        format!("{:?}", self.reconciliation).hash(hasher);
        for command in &self.commands {
            let held = matches!(&command.stage, Stage::Locking(lock) if lock.is_held());
            let stage = std::mem::discriminant(&command.stage);
            (command.write_id, command.view, stage, held).hash(hasher);
        }
        for apply in &self.applies {
            (std::mem::discriminant(apply), apply.is_ready()).hash(hasher);
            let entry = apply.entry();
            (entry.view, entry.seq, apply.value()).hash(hasher);
        }
    }
}

impl Process {
    pub(super) fn new(state: ReplicaState) -> Self {
        Self {
            state,
            reading: false,
            begin: None,
            reconciliation: None,
            commands: Vec::new(),
            applies: Vec::new(),
        }
    }

    /// Whether a read would be answered at once, if it serves.
    pub(super) fn is_block_free(&self) -> bool {
        self.state.range_locks.is_free(BLOCK)
    }

    /// The first write that the leg may apply.
    pub(super) fn next_apply(&self) -> Option<usize> {
        self.applies.iter().position(Apply::is_ready)
    }
}

impl Apply {
    fn is_ready(&self) -> bool {
        match self {
            Self::Prepared(p) => p.awaited_lock.as_ref().is_none_or(RangeLock::is_held),
            Self::Own(..) => true,
            Self::Copy(.., lock) => lock.is_held(),
        }
    }

    fn entry(&self) -> PreparedEntry {
        match self {
            Self::Prepared(p) => p.entry,
            Self::Own(entry, _) | Self::Copy(entry, ..) => *entry,
        }
    }

    fn value(&self) -> Value {
        match self {
            Self::Prepared(p) => value_of(&p.op),
            Self::Own(_, value) | Self::Copy(_, value, _) => *value,
        }
    }
}

/// A write of `value` to the block.
fn write_op(value: Value) -> WriteOp {
    let data = Bufs::zeroes(usize::from(value));
    WriteOp { range: BLOCK, kind: WriteKind::Data, fua: false, data }
}

fn value_of(op: &WriteOp) -> Value {
    Value::try_from(op.data.len()).expect("few writes")
}

/// A context; nothing here takes memory from it.
fn ctx() -> Ctx {
    thread_local! {
        static CTX: Ctx = {
            let pool = BufferPool::new(1 << 20).expect("memory");
            let credit = pool.account().try_credit(4096, MemoryClass::Read).expect("memory");
            Ctx::new(credit, Epoch(0))
        };
    }
    CTX.with(Ctx::clone)
}

/// Polls without waiting.
fn now<T>(poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Option<T> {
    match poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

impl World {
    /// Makes a step of the state of node `n`, and carries out its effects.
    pub(super) fn step<T>(
        &mut self,
        n: usize,
        change: impl FnOnce(&mut ReplicaState, &mut Effects) -> T,
    ) -> Option<T> {
        if self.mistake == Mistake::LeavesToLinkedPeers {
            self.take_sessions_for_life(n);
        }
        let generations = self.generations(n);
        let process = self.node(n).process.as_mut()?;
        let state = &mut process.state;
        state.set_image(image(&generations));
        let before = (state.active_view, state.prepared.sorted_entries());
        let mut effects = Effects::default();
        state.now = NOW;
        let result = change(state, &mut effects);
        state.membership.normalise();
        while let Some(effect) = effects.next() {
            self.effects.borrow_mut().push_back((n, effect));
        }
        self.note_commits(n, before);
        self.carry_out();
        self.advance(n);
        Some(result)
    }

    pub(super) fn handle_event(&mut self, n: usize, event: Event) {
        self.step(n, |s, fx| s.handle_event(event, fx));
    }

    /// Carries out all effects, each node's in their order.
    fn carry_out(&mut self) {
        if std::mem::replace(&mut self.is_carrying_out, true) {
            return;
        }
        loop {
            let next = self.effects.borrow_mut().pop_front();
            let Some((n, effect)) = next else { break };
            if self.up(n) {
                self.perform(n, effect);
            }
        }
        self.is_carrying_out = false;
    }

    fn perform(&mut self, n: usize, effect: Effect) {
        match effect {
            Effect::Send(to, message) | Effect::SendLease(to, message) => {
                self.transmit(n, at(to), message);
            }
            Effect::Apply(apply) => self.process(n).applies.push(Apply::Prepared(apply)),
            Effect::ReadConfig => self.process(n).reading = true,
            Effect::PutConfig(put) => {
                let (epoch, config_id, next) = (put.epoch, put.config_id, put.next);
                self.handed_over(n, &next);
                if matches!(next.in_sync[..], [only] if only.node == id(n)) {
                    self.check_takeover(n);
                    self.record(n, next.history.generation, &[], false);
                }
                self.puts.push(PutInFlight { asker: Some(n), epoch, config_id, next });
                self.tidy_puts();
            }
            Effect::PrepareView(view, config) => {
                let process = self.process(n);
                process.begin = Some((view, config));
                process.reconciliation = None;
                if self.mistake == Mistake::BeginsViewWithoutDrain {
                    self.finish_begin(n);
                }
            }
            Effect::Reconcile(view) => self.reconcile(n, view),
            // The lanes delay them enough.
            Effect::SendCommitsLater(view) => {
                self.step(n, |s, fx| s.send_pending_commits(view, fx));
            }
            Effect::Reach(_) | Effect::ReachWhenSent(_) => {}
            Effect::Replace(_) | Effect::CloseSessions => {
                self.errors.push("there is no lack of space, and clients wait".into());
            }
        }
    }

    /// Messages of the membership arrive at once or never, or in steps of their own; all others
    /// take the lanes.
    fn transmit(&mut self, from: usize, to: usize, message: Message) {
        if !self.linked(from, to) || !self.up(to) {
            return;
        }
        match message {
            Message::LeaseRequest { .. } | Message::RevokeLease { .. } => {}
            Message::LeaseRevoked { .. } if !self.delivers_revocations => {}
            Message::ReplicaReport(_) if self.loses_reports => {}
            Message::LeaseGrant { .. }
            | Message::LeaseRevoked { .. }
            | Message::NewerEpoch { .. }
            | Message::ReplicaReport(_) => {
                self.step(to, |s, fx| {
                    s.lease_dedup = Default::default();
                    s.on_membership_message(id(from), message, fx);
                });
            }
            // An out-of-sync node joins in a step of its own.
            Message::Rejoin { .. } | Message::JoinAborted { .. } => {}
            message => {
                let lane = usize::from(payload_view(&message).is_some());
                self.lanes[from][to][lane].push_back(super::world::Queued(message));
            }
        }
    }

    fn take_sessions_for_life(&mut self, n: usize) {
        let linked: Vec<_> = (0..self.nodes.len()).filter(|&o| self.linked(n, o)).collect();
        let Some(process) = &mut self.node(n).process else { return };
        let member = &mut process.state.membership;
        let Some(state) = member.member_state.as_mut().filter(|s| s.stopped_serving_at.is_some())
        else {
            return;
        };
        for other in linked {
            if let Some(peer) = state.peer_lease_mut(id(other)) {
                peer.proof_of_life = Some(NOW);
            }
        }
    }

    /// A planted mistake: a leg that has failed counts as healthy again.
    pub(super) fn forget_leg_failure(&mut self, n: usize) {
        if self.mistake == Mistake::ForgetsLegFailure
            && let Some(process) = &mut self.node(n).process
        {
            process.state.membership.leg_state = LegState::Healthy;
        }
    }

    /// Tells the checks what a step of a primary has committed: entries that have left its list in
    /// an active view, and those of a view that has become active.
    fn note_commits(&mut self, n: usize, before: (Option<View>, Vec<PreparedEntry>)) {
        let process = self.nodes[n].process.as_ref().expect("it has made a step");
        let state = &process.state;
        let Some(view) = state.active_view.filter(|v| *v == state.view && state.is_primary())
        else {
            return;
        };
        if before.0 != Some(view) {
            let committed = process.reconciliation.as_ref().map(|r| r.committed.clone());
            self.equal_at_open(n);
            let newest = self.nodes[n].leg.volatile;
            let committed: Vec<_> =
                committed.into_iter().flatten().filter_map(|id| self.value_of(id)).collect();
            for &value in committed.iter().filter(|w| **w == newest).chain(&committed) {
                self.applied_by_all(n, value);
            }
            return;
        }
        let after = state.prepared.sorted_entries();
        let gone = before.1.into_iter().filter(|e| e.view == view && !after.contains(e));
        let gone: Vec<_> = gone.filter_map(|e| self.value_of(e.write_id)).collect();
        gone.into_iter().for_each(|value| self.applied_by_all(n, value));
    }

    /// The value of a write.
    fn value_of(&self, write_id: WriteId) -> Option<Value> {
        self.write_ids.iter().find(|(id, _)| *id == write_id).map(|(_, value)| *value)
    }

    /// Drains the leg for a view, and begins it.
    pub(super) fn drain(&mut self, n: usize) {
        while let Some(k) = self.nodes[n].process.as_ref().and_then(Process::next_apply) {
            self.apply(n, k, Ok(()));
        }
        let process = self.nodes[n].process.as_ref().expect("it is up");
        let Some((view, _)) = process.begin else { return };
        match process.state.is_drained_for(view) {
            None => {}
            Some(false) => self.process(n).begin = None,
            Some(true) => {
                if self.step(n, ReplicaState::on_drained) == Some(true) {
                    self.finish_begin(n);
                } else {
                    self.process(n).begin = None;
                }
            }
        }
    }

    fn finish_begin(&mut self, n: usize) {
        let Some((view, config)) = self.process(n).begin.take() else { return };
        if let Some(config) = config {
            self.node(n).image = (config.epoch, config.config_id);
            let members: Vec<_> = config.in_sync.iter().map(|m| m.node).collect();
            self.inherit(n, &config);
            self.record(n, DataGeneration::first(config.epoch), &members, false);
        }
        self.handle_event(n, Event::ViewBegun(view));
    }

    /// The leg applies a write, or fails it; in both cases its contents are written.
    pub(super) fn apply(&mut self, n: usize, k: usize, result: Result<(), Error>) {
        let apply = self.process(n).applies.remove(k);
        let leg = &mut self.node(n).leg;
        (leg.volatile, leg.marked) = (apply.value(), true);
        match apply {
            Apply::Prepared(PreparedApply { from, entry, source, awaited_lock, .. }) => {
                self.step(n, |s, fx| {
                    if let Some(lock) = awaited_lock {
                        s.prepared.set_lock((entry.view, entry.seq), lock);
                    }
                    s.on_prepared_applied(from, (entry, source), result, fx);
                });
            }
            Apply::Own(entry, _) => {
                let outcome = self.step(n, |s, fx| s.on_own_applied(entry, result, fx)).flatten();
                let commands = &mut self.process(n).commands;
                let found = commands.iter().position(
                    |c| matches!(c.stage, Stage::Applying(e) if e.seq == entry.seq && e.view == entry.view),
                );
                let Some(k) = found else { return };
                commands[k].stage = Stage::Ordered(entry);
                if let Some(outcome) = outcome {
                    self.end_ordered(n, k, outcome);
                }
                self.advance(n);
            }
            Apply::Copy(entry, _, lock) => {
                let done = self.step(n, |s, fx| {
                    s.prepared.set_lock((entry.view, entry.seq), lock);
                    s.on_own_copy_applied((entry.view, entry.seq), result, fx)
                });
                let reconciliation = &mut self.process(n).reconciliation;
                match done.flatten() {
                    Some(()) => {
                        if let Some(Reconciling { copy: Some((seq, is_applied)), .. }) =
                            reconciliation
                            && *seq == entry.seq
                        {
                            *is_applied = true;
                        }
                    }
                    None => *reconciliation = None,
                }
                self.advance(n);
            }
        }
    }

    /// The leg applies its next write, or a part of it, and reports failure.
    pub(super) fn reject_write(&mut self, n: usize) {
        self.budget.rejected_writes -= 1;
        let Some(k) = self.nodes[n].process.as_ref().and_then(Process::next_apply) else { return };
        if self.mistake != Mistake::TreatsLegFailureAsLeave {
            return self.apply(n, k, Err(Error::ReadOnly));
        }
        let apply = self.process(n).applies.remove(k);
        self.node(n).leg.volatile = apply.value();
        let entry = apply.entry();
        self.step(n, |s, fx| {
            s.prepared.mark_failed((entry.view, entry.seq), Error::ReadOnly);
            s.handle_event(Event::Leave, fx);
        });
    }

    /// A client's write is accepted.
    pub(super) fn accept(&mut self, w: usize) {
        self.writes[w].1 = WriteProgress::Accepted;
        let n = self.writes[w].0;
        let value = Value::try_from(w + 1).expect("few writes");
        let Some(write_id) = self.step(n, |s, _| s.local_writes.begin()) else { return };
        self.write_ids.push((write_id, value));
        let command = Command { write_id, value, view: View::default(), stage: Stage::Waiting };
        self.process(n).commands.push(command);
        self.advance(n);
    }

    /// Lets commands and the reconciliation of node `n` go on as far as they can.
    pub(super) fn advance(&mut self, n: usize) {
        while self.nodes[n].process.is_some()
            && (self.advance_reconciliation(n)
                || (0..self.process(n).commands.len()).any(|k| self.advance_command(n, k)))
        {
        }
    }

    /// Lets a command go on; returns whether anything has changed.
    fn advance_command(&mut self, n: usize, k: usize) -> bool {
        let process = self.process(n);
        let Command { write_id, view, .. } = process.commands[k];
        let state = &mut process.state;
        state.now = NOW;
        match &process.commands[k].stage {
            Stage::Waiting => self.begin_command(n, k),
            Stage::Locking(lock) => {
                if state.view != view {
                    self.not_ordered(n, k);
                } else if lock.is_held() {
                    self.order(n, k);
                } else {
                    return false;
                }
                true
            }
            Stage::Applying(_) => false,
            Stage::Ordered(entry) => {
                let (entry, poll) = (*entry, now(|cx| state.sequencer.poll_outcome(entry.seq, cx)));
                // The next view counts from one again.
                let outcome = match poll {
                    _ if state.view != entry.view => WriteOutcome::ViewEnded,
                    None => return false,
                    Some(ReplicationOutcome::Committed) => WriteOutcome::Committed,
                    Some(_) => WriteOutcome::ViewEnded,
                };
                self.end_ordered(n, k, outcome);
                true
            }
            Stage::Asked => {
                let number = write_id.number;
                let Some(outcome) = now(|cx| state.local_writes.poll_outcome(number, cx)) else {
                    return false;
                };
                match outcome {
                    LocalWriteOutcome::Committed | LocalWriteOutcome::CompareAndWrite(_) => {
                        self.end_command(n, k, true);
                    }
                    LocalWriteOutcome::Retry | LocalWriteOutcome::RetryWithNewStamp => {
                        process.commands[k].stage = Stage::Waiting;
                        state.local_writes.reset(number);
                    }
                    LocalWriteOutcome::Fenced | LocalWriteOutcome::Failed(_) => {
                        self.end_command(n, k, false);
                    }
                }
                true
            }
        }
    }

    fn begin_command(&mut self, n: usize, k: usize) -> bool {
        if !self.serves(n) {
            return false;
        }
        let process = self.process(n);
        let Some(view) = process.state.active_view else { return false };
        let Command { write_id, value, .. } = process.commands[k];
        process.commands[k].view = view;
        process.state.local_writes.reset(write_id.number);
        if process.state.is_primary() {
            let lock = process.state.range_locks.enter(BLOCK, true);
            process.commands[k].stage = Stage::Locking(lock);
        } else {
            process.commands[k].stage = Stage::Asked;
            let op = write_op(value);
            self.step(n, |s, fx| s.request_order(view, write_id.number, &op, &ctx(), fx));
        }
        true
    }

    /// The lock of the block is held: orders the write.
    fn order(&mut self, n: usize, k: usize) {
        let command = &mut self.process(n).commands[k];
        let Command { write_id, value, view, .. } = *command;
        let Stage::Locking(lock) = std::mem::replace(&mut command.stage, Stage::Waiting) else {
            return;
        };
        // Before its effects, which may let commands go on.
        let placeholder = PreparedEntry {
            view,
            seq: Seq(0),
            write_id,
            range: BLOCK,
            kind: WriteKind::Data,
            fua: false,
        };
        command.stage = Stage::Applying(placeholder);
        let op = write_op(value);
        let ordered =
            self.step(n, |s, fx| s.order(view, write_id, PayloadSource::Origin, &op, lock, fx));
        let Some(ordered) = ordered else { return };
        let process = self.process(n);
        if let Some(command) = process.commands.iter_mut().find(|c| c.write_id == write_id) {
            command.stage = Stage::Applying(ordered.entry);
        }
        process.applies.push(Apply::Own(ordered.entry, value));
    }

    /// The view ended before the command had an op number.
    fn not_ordered(&mut self, n: usize, k: usize) {
        let Command { write_id, view, .. } = self.process(n).commands[k];
        if write_id.origin == id(n) {
            self.process(n).commands[k].stage = Stage::Waiting;
            return;
        }
        self.process(n).commands.remove(k);
        let retry = Message::RetryRequest { view, number: write_id.number };
        self.transmit(n, at(write_id.origin), retry);
    }

    /// The primary knows the outcome of a command that it has ordered.
    fn end_ordered(&mut self, n: usize, k: usize, outcome: WriteOutcome) {
        if self.process(n).commands[k].write_id.origin != id(n) {
            self.process(n).commands.remove(k);
            return;
        }
        match outcome {
            WriteOutcome::Committed => self.end_command(n, k, true),
            WriteOutcome::Failed(_) => self.end_command(n, k, false),
            WriteOutcome::NotOrdered | WriteOutcome::ViewEnded => {
                self.process(n).commands[k].stage = Stage::Asked;
            }
        }
    }

    /// Answers the client of a command.
    fn end_command(&mut self, n: usize, k: usize, is_done: bool) {
        let process = self.process(n);
        let command = process.commands.remove(k);
        process.state.local_writes.end(command.write_id.number);
        if is_done {
            self.origin_knows(n, command.value);
            self.answer(command.value);
        } else {
            self.writes[usize::from(command.value) - 1].1 = WriteProgress::Failed;
        }
    }

    fn reconcile(&mut self, n: usize, view: View) {
        let plan = match self.step(n, |s, _| s.plan_reconciliation(view)) {
            Some(Ok(plan)) => plan,
            Some(Err(conflict)) => return self.errors.push(conflict.to_string()),
            None => return,
        };
        let committed: BTreeSet<_> = plan.committed.iter().copied().collect();
        let others = self.process(n).state.others();
        let skips = self.mistake == Mistake::SkipsReconciliation || others.is_empty();
        let copy = plan.copies.first().filter(|_| !skips);
        let Some(copy) = copy else {
            self.process(n).reconciliation = Some(Reconciling { view, committed, copy: None });
            return self.advance(n);
        };
        let source = if copy.holders.contains(&id(n)) { id(n) } else { copy.holders[0] };
        // The contents of the source's disk, whatever the entry says.
        let value = self.nodes[at(source)].leg.volatile;
        let is_there =
            self.nodes[at(source)].process.as_ref().is_some_and(|p| p.state.view == view);
        if !is_there {
            return;
        }
        let expected = self.value_of(copy.entry.write_id);
        if expected != Some(value) && self.mistake == Mistake::None {
            self.errors.push(format!("the copy of {expected:?} from {source} brings {value}"));
        }
        let op = write_op(value);
        let PreparedEntry { range, kind, fua, write_id, .. } = copy.entry;
        let Some(seq) = self.step(n, |s, _| s.order_copy(others.iter().copied())) else { return };
        for to in others {
            let op = op.clone();
            let message = Message::Write { view, seq, write_id, is_copy: true, op };
            self.transmit(n, at(to), message);
        }
        let holds_it = copy.holders.contains(&id(n));
        let copy = Some((seq, holds_it));
        self.process(n).reconciliation = Some(Reconciling { view, committed, copy });
        if !holds_it {
            let entry = PreparedEntry { view, seq, write_id, range, kind, fua };
            if let Some(lock) = self.step(n, |s, _| s.prepare_own_copy(entry)) {
                self.process(n).applies.push(Apply::Copy(entry, value, lock));
            }
        }
        self.advance(n);
    }

    /// Ends a reconciliation when all members have the copy.
    fn advance_reconciliation(&mut self, n: usize) -> bool {
        let process = self.process(n);
        let Some(reconciliation) = &process.reconciliation else { return false };
        let view = reconciliation.view;
        if process.state.view != view {
            process.reconciliation = None;
            return false;
        }
        if process.state.active_view == Some(view) || process.state.start_view.is_some() {
            return false;
        }
        match reconciliation.copy {
            Some((_, false)) => return false,
            Some((seq, true)) => {
                match now(|cx| process.state.sequencer.poll_outcome(seq, cx)) {
                    None => return false,
                    Some(ReplicationOutcome::Committed) => {}
                    Some(_) => {
                        process.reconciliation = None;
                        return false;
                    }
                }
                process.reconciliation.as_mut().expect("just seen").copy = None;
            }
            None => {}
        }
        let committed = process.reconciliation.as_ref().expect("just seen").committed.clone();
        self.step(n, |s, fx| s.on_reconciled(view, committed, fx));
        true
    }

    pub(super) fn can_deliver(&self, a: usize, b: usize, lane: usize) -> bool {
        let Some(message) = self.lanes[a][b][lane].front() else { return false };
        let Some(process) = &self.nodes[b].process else { return false };
        payload_view(&message.0).is_none_or(|view| view <= process.state.view)
    }

    /// Delivers a message as `Replica::dispatch` does.
    pub(super) fn deliver(&mut self, a: usize, b: usize, lane: usize) {
        let message = self.lanes[a][b][lane].pop_front().expect("checked").0;
        let (from, present) = (id(a), self.process(b).state.view);
        match message {
            Message::StartViewChange { .. } => {
                self.forget_leg_failure(b);
                self.step(b, |s, fx| s.on_membership_message(from, message, fx));
            }
            Message::DoViewChange { view, entries } => {
                self.step(b, |s, fx| s.on_do_view_change(from, view, entries, fx));
            }
            Message::StartView { view, last_seq, committed } => {
                self.step(b, |s, fx| s.on_start_view(from, view, last_seq, committed, fx));
            }
            message if view_of(&message) == Some(present) => self.deliver_in_view(from, b, message),
            _ => {}
        }
    }

    fn deliver_in_view(&mut self, from: NodeId, n: usize, message: Message) {
        match message {
            Message::WriteRequest { view, number, op, .. } => {
                let state = &self.process(n).state;
                let is_active = state.is_primary() && state.active_view == Some(view);
                if is_active && state.others().contains(&from) {
                    let lock = state.range_locks.enter(BLOCK, true);
                    let (write_id, value) = (WriteId { origin: from, number }, value_of(&op));
                    let command = Command { write_id, value, view, stage: Stage::Locking(lock) };
                    self.process(n).commands.push(command);
                    self.advance(n);
                }
            }
            Message::Write { view, seq, write_id, is_copy, op } => {
                let (range, kind, fua) = (op.range, op.kind, op.fua);
                let entry = PreparedEntry { view, seq, write_id, range, kind, fua };
                self.step(n, |s, fx| s.on_write(from, entry, is_copy, (op, ctx()), fx));
            }
            Message::OpAssigned { view, number, seq } => {
                self.step(n, |s, fx| s.on_op_assigned(from, view, number, seq, fx));
            }
            Message::PeersApplied { number, .. } => {
                self.step(n, |s, fx| s.on_peers_applied(number, fx));
            }
            Message::RetryRequest { number, .. } => {
                self.step(n, |s, _| s.answer(number, LocalWriteOutcome::RetryWithNewStamp));
            }
            Message::Applied { view, seq } => {
                self.step(n, |s, fx| s.on_applied(view, seq, from, fx));
            }
            Message::Commit { view, seqs } => {
                self.step(n, |s, _| seqs.into_iter().for_each(|seq| s.commit_entry(view, seq)));
            }
            message => self.errors.push(format!("nothing sends {message:?} here")),
        }
    }

    pub(super) fn can_join(&self, t: usize, p: usize) -> bool {
        let (Some(joiner), Some(primary)) = (self.member(t), self.member(p)) else { return false };
        let state = &self.nodes[p].process.as_ref().expect("it is up").state;
        joiner.role() == peer::Role::OutOfSync
            && joiner.config() == primary.config()
            && primary.is_primary()
            && self.serves(p)
            && primary.pending_put.is_none()
            && state.joiners.attached().next().is_none()
            && state.prepared.len() == 0
            && joiner.config().is_some_and(|r| r.image(id(t)).is_some())
    }

    /// The join, the copy and the flush barrier in one step; from here on writes go to the joiner
    /// too. Nothing is copied if nothing is dirty, unless the recorded generations show that dirty
    /// bits are missing.
    pub(super) fn join(&mut self, t: usize, p: usize) {
        self.budget.joins -= 1;
        let generations = |n: usize, other: usize| {
            let image = Uuid::from_u128(u128::from(id(other).0));
            let all = &self.nodes[n].generations.by_image;
            all.iter().find(|(i, _)| *i == image).map(|(_, s)| *s).unwrap_or_default()
        };
        let primary = self.member(p).expect("checked");
        let comparison = match self.mistake {
            Mistake::SkipsGenerationCheck => JoinerComparison::DirtyRegionsSuffice,
            _ => primary.compare_joiner(&generations(p, t), &generations(t, p), false),
        };
        let epoch = primary.config().expect("checked").epoch;
        let is_dirty = self.nodes[p].leg.marked || self.nodes[t].leg.marked;
        let source = match comparison {
            JoinerComparison::JoinerNewer => return,
            JoinerComparison::DirtyRegionsSuffice if !is_dirty => t,
            _ => p,
        };
        let value = self.nodes[source].leg.volatile;
        let recorded = self.nodes[p].generations.by_image.iter();
        let inherited = recorded.map(|(image, shared)| (*image, shared.common)).collect();
        let joiner = self.node(t);
        joiner.is_rolled_back &= source == t;
        joiner.incarnations += 1;
        let incarnation = Incarnation(u64::from(id(t).0) * 100 + joiner.incarnations);
        let attempt = JoinAttempt {
            incarnation,
            primary: id(p),
            session: 0,
            started_at: NOW,
            accepted_view: None,
        };
        let config = self.member(t).and_then(MirrorMembership::config).expect("checked");
        let adopted = (config.epoch, config.config_id);
        let joiner = self.node(t);
        joiner.image = adopted;
        (joiner.leg.volatile, joiner.leg.durable, joiner.leg.marked) = (value, value, true);
        self.step(t, |s, fx| {
            s.stop_accepting(fx);
            s.prepared.clear();
            s.handle_event(Event::JoinStarted(incarnation), fx);
            s.join_attempt = Some(attempt);
        });
        let view = self.step(p, |s, fx| s.on_join(id(t), incarnation, epoch, fx)).flatten();
        let Some(view) = view else { return };
        self.step(t, |s, fx| s.on_join_accepted(id(p), view, incarnation, inherited, fx));
        self.step(p, |s, _| s.joiners.attach(id(t), incarnation, 0));
        let leg = &mut self.node(p).leg;
        leg.durable = leg.volatile;
        self.step(p, |s, fx| {
            if let Some(joiner) = s.joiners.get(id(t), incarnation) {
                (joiner.in_flushes, joiner.admission_proposed) = (true, true);
            }
            s.handle_event(Event::Admit(Listed { node: id(t), incarnation }), fx);
        });
    }
}

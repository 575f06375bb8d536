//! A small world around real replicas' states: sessions, a store, legs of one block, and possible
//! steps.
//!
//! Time advances in ticks that all clocks share, with a lease of two ticks and a grace of three:
//! the code has no event "the lease is over", only arithmetic over times, and ticks exercise it.
//! Nothing depends on when a tick comes: a world without ticks for a while is one with long ticks.
//! Times of a member are kept relative to now and clamped where they stop to matter, so that the
//! same situation later is the same state.
//!
//! A lease request and its grant are exchanged in one step: longer transit only shortens what the
//! holder may do. So are a lease revocation and its confirmation, unless that is lost. Replica
//! reports and NEWER EPOCH arrive at once or never.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::time::Duration;

use block::{Epoch, Error};
use peer::{DataGeneration, Incarnation, Message, NodeId, PeerGenerations, Role, WriteId};
use uuid::Uuid;

use super::super::super::MirrorSettings;
use super::super::super::config::{
    ConfigReplica, CopyHistory, InSyncMember as Listed, MirrorConfig, PutOutcome,
};
use super::super::super::state::ReplicaState;
use super::super::super::state::effects::Effect;
use super::super::super::state::local_writes::LocalWrites;
use super::super::{
    Event, ImageSummary, LeaseSettings, LegState as State, MembershipMessage, MirrorMembership,
    RecordedGenerations, to_clock_stamp,
};
use super::driver::Process;

/// The constant time of the world's clock; past times are below it.
pub(super) const NOW: Duration = Duration::from_secs(100);
pub(super) const TICK: Duration = Duration::from_secs(1);
/// Ages from here on are equivalent: the grace is three, a silent member is suspected after two and
/// a half.
const OLD: u32 = 3;

/// A planted mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mistake {
    None,
    IgnoresLeases,
    GrantsAfterPut,
    RestartedServes,
    SkipsReconciliation,
    BeginsViewWithoutDrain,
    NoGrace,
    RestartedTakesOver,
    BeginsRoundAfterAdmission,
    LeavesToLinkedPeers,
    TreatsLegFailureAsLeave,
    ForgetsLegFailure,
    SkipsGenerationCheck,
    TakesOverWhenRolledBack,
    ServesAfterRevocation,
}

/// How often each event may still happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Budget {
    pub(super) kills: u8,
    pub(super) power_cuts: u8,
    pub(super) breaks: u8,
    pub(super) lost_puts: u8,
    pub(super) failed_reads: u8,
    pub(super) joins: u8,
    pub(super) flushes: u8,
    pub(super) switches: u8,
    pub(super) leaves: u8,
    pub(super) stuck: u8,
    /// Lease revocations.
    pub(super) revocations: u8,
    /// Writes that a leg fails after it has applied some or all of them.
    pub(super) rejected_writes: u8,
    /// Legs that are lost until their process restarts.
    pub(super) lost_legs: u8,
    /// Copies taken of an image, running or not.
    pub(super) copies: u8,
    /// Images rolled back to their copy while their node is down.
    pub(super) rollbacks: u8,
    /// Whether sessions outlive a power cut until it is noticed.
    pub(super) sessions_outlive_power_cuts: bool,
    /// Whether time passes.
    pub(super) ticks: bool,
}

/// The number of a write is its value, from 1; 0 is the initial value.
pub(super) type Value = u8;

/// A message under way.
#[derive(Clone, Debug)]
pub(super) struct Queued(pub(super) Message);

impl Hash for Queued {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        format!("{:?}", self.0).hash(hasher);
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Leg {
    pub(super) volatile: Value,
    pub(super) durable: Value,
    pub(super) marked: bool,
}

/// The contents of a copy of an image.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ImageCopy {
    image: (Epoch, u128),
    lineages: RecordedGenerations,
    leg: Leg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum WriteProgress {
    /// The client has not sent it yet.
    Idle,
    Accepted,
    Answered,
    /// The client does not know the outcome: the node died, or answered `Fenced`.
    Failed,
}

#[derive(Clone)]
pub(super) struct Node {
    /// Its hash, once that has been asked for.
    digest: Cell<Option<u64>>,
    pub(super) process: Option<Process>,
    pub(super) same_boot: bool,
    pub(super) incarnations: u64,
    pub(super) image: (Epoch, u128),
    pub(super) generations: RecordedGenerations,
    pub(super) leg: Leg,
    /// A copy of the image: adopted configuration, generations, and durable contents.
    pub(super) copy: Option<Rc<ImageCopy>>,
    /// The image was rolled back to the copy.
    pub(super) is_rolled_back: bool,
    /// Incarnations that died while this node served.
    pub(super) died_while_serving: Vec<Incarnation>,
    /// Its leg does nothing any more.
    pub(super) is_leg_lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PutInFlight {
    pub(super) asker: Option<usize>,
    pub(super) epoch: Epoch,
    pub(super) config_id: u128,
    pub(super) next: MirrorConfig,
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) mistake: Mistake,
    pub(super) budget: Budget,
    pub(super) nodes: Vec<Rc<Node>>,
    pub(super) store: MirrorConfig,
    pub(super) puts: Vec<PutInFlight>,
    /// `[a][b]`, a < b: whether there is a session.
    pub(super) links: Vec<Vec<bool>>,
    /// `[from][to][lane]`.
    pub(super) lanes: Vec<Vec<[VecDeque<Queued>; 2]>>,
    pub(super) writes: Vec<(usize, WriteProgress)>,
    /// The ids of accepted writes, and their values.
    pub(super) write_ids: Vec<(WriteId, Value)>,
    /// Effects that are to be carried out.
    /// None between two steps.
    pub(super) effects: Rc<RefCell<VecDeque<(usize, Effect)>>>,
    pub(super) is_carrying_out: bool,
    /// Whether reports are lost, and confirmed lease revocations arrive.
    pub(super) loses_reports: bool,
    pub(super) delivers_revocations: bool,
    /// Values in the order in which they were first seen.
    pub(super) history: Vec<Value>,
    /// Index in it of the last flushed value.
    pub(super) flushed: usize,
    /// Values lost in a total outage.
    pub(super) lost_values: Vec<Value>,
    /// Errors found by a step.
    pub(super) errors: Vec<String>,
}

impl Hash for World {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (self.mistake, self.budget, &self.nodes, &self.store, &self.puts).hash(hasher);
        (&self.links, &self.lanes, &self.writes, &self.write_ids).hash(hasher);
        (&self.history, self.flushed, &self.lost_values, &self.errors).hash(hasher);
    }
}

impl Hash for Node {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let digest = self.digest.get().unwrap_or_else(|| {
            let mut own = DefaultHasher::new();
            (&self.process, self.same_boot, self.incarnations, self.image).hash(&mut own);
            (&self.generations, self.leg, &self.copy, self.is_rolled_back).hash(&mut own);
            (&self.died_while_serving, self.is_leg_lost).hash(&mut own);
            own.finish()
        });
        self.digest.set(Some(digest));
        digest.hash(hasher);
    }
}

/// A possible next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Tick,
    Lease(usize, usize),
    Break(usize, usize),
    Connect(usize, usize),
    Crash(usize, bool),
    Restart(usize),
    Read(usize),
    ReadFails(usize),
    ApplyPut(usize),
    LosePut(usize),
    Deliver(usize, usize, usize),
    Drain(usize),
    Apply(usize),
    Accept(usize),
    Join(usize, usize),
    Flush,
    Switch(usize, usize),
    Leave(usize),
    Stuck(usize, usize),
    /// The first revokes the lease of the second, and gets the answer or does not.
    RevokeLease(usize, usize, bool),
    /// A session with a node that is down ends at last.
    NoticePowerCut(usize, usize),
    RejectWrite(usize),
    LoseLeg(usize),
    Copy(usize),
    RollBack(usize),
}

pub(super) fn id(node: usize) -> NodeId {
    NodeId(u16::try_from(node + 1).expect("few nodes"))
}

pub(super) fn at(id: NodeId) -> usize {
    usize::from(id.0) - 1
}

fn incarnation(node: usize, life: u64) -> Incarnation {
    Incarnation(u64::from(id(node).0) * 100 + life)
}

impl World {
    /// `count` nodes, all in sync and running, with writes that enter at nodes `writes`.
    pub(super) fn new(count: usize, writes: &[usize], budget: Budget, mistake: Mistake) -> Self {
        let mut world = Self::started(count, writes, budget, mistake, |n| incarnation(n, 0));
        world.calm_down().expect("an undisturbed start");
        world
    }

    /// The same with a new volume whose configuration no node has read yet.
    pub(super) fn of_new_volume(count: usize, writes: &[usize], budget: Budget) -> Self {
        Self::started(count, writes, budget, Mistake::None, |_| Incarnation(0))
    }

    /// Nodes that have just started, and a configuration that lists them under these incarnations.
    fn started(
        count: usize,
        writes: &[usize],
        budget: Budget,
        mistake: Mistake,
        listed: fn(usize) -> Incarnation,
    ) -> Self {
        let replicas = (0..count)
            .map(|n| ConfigReplica {
                node: id(n),
                image: Uuid::from_u128(u128::from(id(n).0)),
                is_new: false,
            })
            .collect();
        let in_sync = (0..count).map(|n| Listed { node: id(n), incarnation: listed(n) }).collect();
        let store = MirrorConfig {
            epoch: Epoch(1),
            config_id: 1,
            replicas,
            in_sync,
            primary: NodeId(1),
            cold_start_epoch: Epoch::default(),
            history: CopyHistory::default(),
        };
        let node = Node {
            digest: Cell::default(),
            process: None,
            same_boot: true,
            incarnations: 0,
            image: (Epoch(0), 0),
            generations: RecordedGenerations::default(),
            leg: Leg::default(),
            copy: None,
            is_rolled_back: false,
            died_while_serving: Vec::new(),
            is_leg_lost: false,
        };
        let mut world = Self {
            mistake,
            budget,
            nodes: (0..count).map(|_| Rc::new(node.clone())).collect(),
            store,
            puts: Vec::new(),
            links: vec![vec![false; count]; count],
            lanes: vec![vec![Default::default(); count]; count],
            writes: writes.iter().map(|&n| (n, WriteProgress::Idle)).collect(),
            write_ids: Vec::new(),
            effects: Rc::default(),
            is_carrying_out: false,
            loses_reports: false,
            delivers_revocations: false,
            history: vec![0],
            flushed: 0,
            lost_values: Vec::new(),
            errors: Vec::new(),
        };
        (0..count).for_each(|n| world.boot(n));
        world
    }

    pub(super) fn node(&mut self, n: usize) -> &mut Node {
        let node = Rc::make_mut(&mut self.nodes[n]);
        node.digest.set(None);
        node
    }

    pub(super) fn up(&self, n: usize) -> bool {
        self.nodes[n].process.is_some()
    }

    pub(super) fn member(&self, n: usize) -> Option<&MirrorMembership> {
        self.nodes[n].process.as_ref().map(|p| &p.state.membership)
    }

    pub(super) fn process(&mut self, n: usize) -> &mut Process {
        self.node(n).process.as_mut().expect("it is up")
    }

    pub(super) fn linked(&self, a: usize, b: usize) -> bool {
        a != b && self.links[a.min(b)][a.max(b)]
    }

    pub(super) fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let count = self.nodes.len();
        (0..count).flat_map(move |a| (0..count).map(move |b| (a, b))).filter(|(a, b)| a != b)
    }

    /// Starts the process: its memory is lost.
    fn boot(&mut self, n: usize) {
        for other in (0..self.nodes.len()).filter(|&o| o != n) {
            if self.linked(n, other) {
                self.break_link(n, other);
            }
        }
        let settings = match self.mistake {
            Mistake::NoGrace => LeaseSettings::unchecked(TICK * 2, Duration::ZERO),
            _ => LeaseSettings::new(TICK * 2, TICK * 3).expect("safe"),
        };
        let loses_dirty_bits = self.mistake == Mistake::RestartedTakesOver;
        let life =
            if self.mistake == Mistake::RestartedServes { 0 } else { self.nodes[n].incarnations };
        let node = self.node(n);
        let (epoch, config_id) = node.image;
        let is_clean = loses_dirty_bits || !node.leg.marked;
        let (same_boot, generation, is_log_lost) =
            (node.same_boot, node.generations.generation, false);
        let image = ImageSummary { epoch, config_id, is_clean, same_boot, generation, is_log_lost };
        let membership = MirrorMembership::new(id(n), incarnation(n, life), settings, NOW, image);
        let settings = MirrorSettings { leases: settings, ..MirrorSettings::default() };
        // No two lives use the same numbers.
        let local_writes = LocalWrites::new(id(n), node.incarnations * 1000);
        let image = super::driver::image(&node.generations);
        let state = ReplicaState::new(id(n), settings, image, membership, local_writes);
        node.process = Some(Process::new(state));
        self.handle_event(n, Event::Tick);
    }

    /// Whether the driver lets node `n` serve.
    pub(super) fn serves(&self, n: usize) -> bool {
        self.member(n).is_some_and(|m| match self.mistake {
            Mistake::IgnoresLeases => m.is_view_active(),
            Mistake::ServesAfterRevocation => {
                let mut unrevoked = m.clone();
                unrevoked.member_state.iter_mut().for_each(|s| s.revoked_view = None);
                unrevoked.may_serve(NOW)
            }
            _ => m.may_serve(NOW),
        }) && self.nodes[n].process.as_ref().is_some_and(|p| {
            p.state.active_view == p.state.membership.view() && p.state.active_view.is_some()
        })
    }

    /// All possible next steps.
    pub(super) fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.budget.ticks {
            steps.push(Step::Tick);
        }
        for (a, b) in self.pairs() {
            self.steps_between(a, b, &mut steps);
        }
        for n in 0..self.nodes.len() {
            self.steps_at(n, &mut steps);
        }
        for (k, put) in self.puts.iter().enumerate() {
            steps.push(Step::ApplyPut(k));
            if put.asker.is_some() && self.budget.lost_puts > 0 {
                steps.push(Step::LosePut(k));
            }
        }
        if self.budget.flushes > 0 && self.can_flush() {
            steps.push(Step::Flush);
        }
        steps
    }

    fn steps_between(&self, a: usize, b: usize, steps: &mut Vec<Step>) {
        let linked = self.linked(a, b);
        if self.can_lease(a, b) {
            steps.push(Step::Lease(a, b));
        }
        for lane in 0..2 {
            if self.can_deliver(a, b, lane) {
                steps.push(Step::Deliver(a, b, lane));
            }
        }
        if linked && self.budget.joins > 0 && self.can_join(a, b) {
            steps.push(Step::Join(a, b));
        }
        let is_primary = self.member(a).is_some_and(MirrorMembership::is_primary);
        if is_primary
            && self.budget.switches > 0
            && self.member(a).is_some_and(MirrorMembership::is_view_active)
        {
            steps.push(Step::Switch(a, b));
        }
        if is_primary && self.budget.stuck > 0 && self.serves(a) {
            steps.push(Step::Stuck(a, b));
        }
        if self.budget.revocations > 0 && self.can_revoke(a, b) {
            steps.extend([Step::RevokeLease(a, b, true), Step::RevokeLease(a, b, false)]);
        }
        if a > b {
            return;
        }
        if linked && self.budget.breaks > 0 {
            steps.push(Step::Break(a, b));
        }
        if linked && self.up(a) != self.up(b) {
            steps.push(Step::NoticePowerCut(a, b));
        }
        if !linked && self.up(a) && self.up(b) {
            steps.push(Step::Connect(a, b));
        }
    }

    fn steps_at(&self, n: usize, steps: &mut Vec<Step>) {
        let node = &self.nodes[n];
        if self.budget.copies > 0 {
            steps.push(Step::Copy(n));
        }
        let Some(process) = &node.process else {
            steps.push(Step::Restart(n));
            if self.budget.rollbacks > 0 && node.copy.is_some() {
                steps.push(Step::RollBack(n));
            }
            return;
        };
        if self.budget.kills > 0 {
            steps.push(Step::Crash(n, false));
        }
        if self.budget.power_cuts > 0 {
            steps.push(Step::Crash(n, true));
        }
        let member = &process.state.membership;
        if process.reading {
            steps.push(Step::Read(n));
            if self.budget.failed_reads > 0 {
                steps.push(Step::ReadFails(n));
            }
        }
        if self.budget.lost_legs > 0 && !node.is_leg_lost {
            steps.push(Step::LoseLeg(n));
        }
        if node.is_leg_lost {
            // A lost leg does nothing.
        } else if process.begin.is_some() {
            steps.push(Step::Drain(n));
        } else if process.next_apply().is_some() {
            steps.push(Step::Apply(n));
        }
        // A sole member writes nothing in reconciliation: its leg has everything.
        let is_sole_member = member.config().is_some_and(|r| r.in_sync.len() == 1);
        let can_fail =
            member.role() == Role::Member && !(is_sole_member && process.reconciliation.is_some());
        if self.budget.rejected_writes > 0
            && can_fail
            && !node.is_leg_lost
            && process.next_apply().is_some()
        {
            steps.push(Step::RejectWrite(n));
        }
        if self.budget.leaves > 0 && member.is_view_active() {
            steps.push(Step::Leave(n));
        }
        for (w, &(_, written)) in self.writes.iter().enumerate().filter(|(_, (at, _))| *at == n) {
            if written == WriteProgress::Idle && member.is_view_active() {
                steps.push(Step::Accept(w));
            }
        }
    }

    /// Whether a lease request from a to b changes anything: it is granted, and the grant is newer.
    fn can_lease(&self, a: usize, b: usize) -> bool {
        let (Some(x), Some(y)) = (self.member(a), self.member(b)) else { return false };
        if !self.linked(a, b) || x.role() != Role::Member {
            return false;
        }
        let peer = |m: &MirrorMembership, other| {
            m.member_state
                .as_ref()
                .and_then(|s| s.peer_leases().iter().find(|p| p.node() == id(other)).cloned())
        };
        let Some(lease) = peer(x, b) else { return false };
        let epoch = |m: &MirrorMembership| m.config().map_or(Epoch(0), |r| r.epoch);
        if epoch(x) != epoch(y) {
            // The one that is behind learns that it should read.
            let behind = if epoch(x) < epoch(y) { x } else { y };
            let will_read = behind.config().is_none() || behind.config_reads.change_hinted;
            let is_reading = |n: usize| self.nodes[n].process.as_ref().is_some_and(|p| p.reading);
            return !will_read && !is_reading(a) && !is_reading(b);
        }
        let is_granted = peer(y, a).is_some_and(|p| {
            let can_grant = y.pending_put.is_none() && y.leg_state == State::Healthy;
            p.member.incarnation == x.incarnation() && !p.is_excluded && can_grant
        });
        let granted_by_mistake = self.mistake == Mistake::GrantsAfterPut && y.pending_put.is_some();
        let is_leaving = x.member_state.as_ref().is_some_and(|s| s.stopped_serving_at.is_some());
        let is_newer = lease.clock_stamp() != Some(to_clock_stamp(NOW))
            || is_leaving && lease.proof_of_life.is_none();
        is_newer && (is_granted || granted_by_mistake)
    }

    /// Whether a waits for b to confirm a lease revocation.
    fn can_revoke(&self, a: usize, b: usize) -> bool {
        let Some(state) =
            self.member(a).filter(|m| m.is_primary()).and_then(|m| m.member_state.as_ref())
        else {
            return false;
        };
        state.is_announced()
            && self.up(b)
            && state
                .peer_leases()
                .iter()
                .any(|p| p.node() == id(b) && p.is_excluded && !p.is_revoked)
    }

    fn revoke(&mut self, a: usize, b: usize, delivered: bool) {
        self.budget.revocations -= 1;
        let view = self.member(a).and_then(MirrorMembership::view).expect("checked");
        let state = self.member(a).and_then(|m| m.member_state.as_ref()).expect("checked");
        let listed =
            state.peer_leases().iter().find(|p| p.node() == id(b)).expect("checked").member;
        let incarnation = listed.incarnation;
        self.delivers_revocations = delivered;
        let event = Event::Received(id(a), MembershipMessage::RevokeLease { view, incarnation });
        self.handle_event(b, event);
        self.delivers_revocations = false;
    }

    pub(super) fn do_step(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Tick => self.tick(),
            Step::Lease(a, b) => self.lease(a, b),
            Step::Break(a, b) => {
                self.budget.breaks -= 1;
                self.break_link(a, b);
            }
            Step::Connect(a, b) => self.connect(a, b),
            Step::Crash(n, power) => self.crash(n, power),
            Step::Restart(n) => self.boot(n),
            Step::Read(n) => {
                self.process(n).reading = false;
                let config = self.store.clone();
                let (epoch, lives) = (config.epoch.0, self.nodes[n].incarnations);
                let next_config_id = u128::from(incarnation(n, lives).0) << 64 | u128::from(epoch);
                self.handle_event(n, Event::ConfigRead { config, next_config_id });
            }
            Step::ReadFails(n) => {
                self.budget.failed_reads -= 1;
                self.process(n).reading = false;
                self.handle_event(n, Event::ConfigReadFailed);
            }
            Step::ApplyPut(k) => self.apply_put(k)?,
            Step::LosePut(k) => {
                self.budget.lost_puts -= 1;
                let asker = self.puts[k].asker.take().expect("checked");
                self.tidy_puts();
                self.handle_event(asker, Event::PutCompleted(PutOutcome::Unknown));
            }
            Step::Deliver(a, b, lane) => self.deliver(a, b, lane),
            Step::Drain(n) => self.drain(n),
            Step::Apply(n) => {
                let next = self.process(n).next_apply().expect("checked");
                self.apply(n, next, Ok(()));
            }
            Step::Accept(w) => self.accept(w),
            Step::Join(t, p) => self.join(t, p),
            Step::Flush => self.flush(),
            Step::Switch(a, b) => {
                self.budget.switches -= 1;
                self.handle_event(a, Event::SwitchPrimary(id(b)));
            }
            Step::Leave(n) => {
                self.budget.leaves -= 1;
                self.handle_event(n, Event::Leave);
            }
            Step::RevokeLease(a, b, delivered) => self.revoke(a, b, delivered),
            Step::NoticePowerCut(a, b) => self.break_link(a, b),
            Step::RejectWrite(n) => self.reject_write(n),
            Step::LoseLeg(n) => {
                self.budget.lost_legs -= 1;
                self.node(n).is_leg_lost = true;
                self.step(n, |s, fx| s.on_leg_error(Error::Gone, fx));
            }
            Step::Copy(n) => self.copy(n),
            Step::RollBack(n) => self.roll_back(n),
            Step::Stuck(a, b) => {
                self.budget.stuck -= 1;
                self.handle_event(a, Event::PeerStuck(id(b)));
            }
        }
        self.take_errors()?;
        self.check()
    }

    /// Copies the durable contents of the image.
    fn copy(&mut self, n: usize) {
        self.budget.copies -= 1;
        let node = self.node(n);
        let leg = Leg { volatile: node.leg.durable, ..node.leg };
        let (image, lineages) = (node.image, node.generations.clone());
        node.copy = Some(Rc::new(ImageCopy { image, lineages, leg }));
    }

    /// Replaces the image by the copy.
    fn roll_back(&mut self, n: usize) {
        self.budget.rollbacks -= 1;
        let node = self.node(n);
        let Some(copy) = node.copy.take() else { return };
        let ImageCopy { image, lineages, leg } = (*copy).clone();
        (node.image, node.generations, node.leg) = (image, lineages, leg);
        // Within the same boot, as when a file is restored: the reports of a copy count.
        node.is_rolled_back = true;
    }

    /// The generations of node `n`, as reported to its state machine.
    pub(super) fn generations(&self, n: usize) -> RecordedGenerations {
        let mut generations = self.nodes[n].generations.clone();
        if self.mistake == Mistake::TakesOverWhenRolledBack {
            let latest = DataGeneration::first(Epoch(u64::MAX));
            generations.generation = latest;
            generations.by_image.iter_mut().for_each(|(_, peer)| peer.common = latest);
        }
        generations
    }

    /// Node `n` records `generation` with these nodes; if `cleared`, it has also cleared dirty bits
    /// for them under it.
    pub(super) fn record(
        &mut self,
        n: usize,
        generation: DataGeneration,
        with: &[NodeId],
        cleared: bool,
    ) {
        let generations = &mut self.node(n).generations;
        generations.generation = generations.generation.max(generation);
        for other in with.iter().filter(|other| at(**other) != n) {
            let image = Uuid::from_u128(u128::from(other.0));
            let peer = generations.by_image.iter_mut().find(|(other, _)| *other == image);
            let peer = match peer {
                Some((_, peer)) => peer,
                None => {
                    generations.by_image.push((image, PeerGenerations::default()));
                    &mut generations.by_image.last_mut().expect("pushed").1
                }
            };
            peer.common = peer.common.max(generation);
            if cleared {
                peer.last_cleared = peer.last_cleared.max(generation);
            }
        }
        generations.by_image.sort_unstable_by_key(|(image, _)| *image);
    }

    /// If `config` admitted the last attempt of node `n`, it takes over the generations that the
    /// primary of the attempt had recorded.
    pub(super) fn inherit(&mut self, n: usize, config: &MirrorConfig) {
        let inherited = self.process(n).state.generations_inherited_for(config);
        if inherited.is_empty() {
            return;
        }
        for (image, peer) in &mut self.node(n).generations.by_image {
            let of_image = inherited.iter().find(|(other, _)| other == image);
            let generation = of_image.map(|(_, generation)| *generation).unwrap_or_default();
            peer.common = peer.common.max(generation);
        }
    }

    /// A put takes effect or fails; the asker learns which, unless it was cut off.
    fn apply_put(&mut self, k: usize) -> Result<(), String> {
        let PutInFlight { asker, epoch, config_id, next } = self.puts.remove(k);
        let is_expected = self.store.epoch == epoch && self.store.config_id == config_id;
        if is_expected {
            self.blackout(&next)?;
            self.store = next;
        }
        if let Some(asker) = asker {
            self.forget_leg_failure(asker);
            self.handle_event(
                asker,
                Event::PutCompleted(if is_expected {
                    PutOutcome::Committed
                } else {
                    PutOutcome::Conflict
                }),
            );
        }
        Ok(())
    }

    /// Merges equal puts that nothing waits for, and drops those that can never succeed.
    pub(super) fn tidy_puts(&mut self) {
        let epoch = self.store.epoch;
        self.puts.retain(|p| p.asker.is_some() || p.epoch == epoch);
        self.puts.sort_by_key(|p| (p.asker, p.config_id, p.next.config_id));
        self.puts.dedup();
    }

    fn lease(&mut self, a: usize, b: usize) {
        let x = self.member(a).expect("checked");
        let (epoch, incarnation) = (x.config().expect("checked").epoch, x.incarnation());
        let request =
            MembershipMessage::LeaseRequest { epoch, incarnation, stamp: to_clock_stamp(NOW) };
        self.handle_event(b, Event::Received(id(a), request));
        let has_pending_put = self.member(b).is_some_and(|m| m.pending_put.is_some());
        if self.mistake == Mistake::GrantsAfterPut && has_pending_put {
            let grant =
                MembershipMessage::LeaseGrant { epoch, incarnation, stamp: to_clock_stamp(NOW) };
            self.handle_event(a, Event::Received(id(b), grant));
        }
    }

    fn tick(&mut self) {
        for n in 0..self.nodes.len() {
            if let Some(process) = &mut self.node(n).process {
                process.state.membership.age();
                self.handle_event(n, Event::Tick);
            }
        }
    }

    pub(super) fn break_link(&mut self, a: usize, b: usize) {
        self.links[a.min(b)][a.max(b)] = false;
        for (x, y) in [(a, b), (b, a)] {
            self.lanes[x][y] = Default::default();
            self.step(x, |s, fx| s.on_session_down(id(y), 0, fx));
        }
    }

    fn connect(&mut self, a: usize, b: usize) {
        self.links[a.min(b)][a.max(b)] = true;
        // Both ends know of the session before any message arrives over it.
        for (x, y) in [(a, b), (b, a)] {
            let hidden = (self.mistake == Mistake::BeginsRoundAfterAdmission)
                .then(|| self.process(x).state.membership.pending_put.take());
            self.loses_reports = true;
            self.step(x, |s, fx| s.on_session_up(id(y), fx));
            self.loses_reports = false;
            if let Some(hidden) = hidden {
                self.process(x).state.membership.pending_put = hidden;
            }
        }
        for (x, y) in [(a, b), (b, a)] {
            let report = self.member(x).expect("checked").report_for(id(y));
            self.handle_event(y, Event::Received(id(x), MembershipMessage::ReplicaReport(report)));
        }
    }

    fn crash(&mut self, n: usize, power: bool) {
        if power {
            self.budget.power_cuts -= 1;
        } else {
            self.budget.kills -= 1;
        }
        if let Some(incarnation) = self.member(n).map(MirrorMembership::incarnation) {
            for other in 0..self.nodes.len() {
                if other != n && self.serves(other) {
                    self.node(other).died_while_serving.push(incarnation);
                }
            }
        }
        let node = self.node(n);
        node.process = None;
        node.incarnations += 1;
        node.same_boot = !power && node.same_boot;
        node.died_while_serving.clear();
        node.is_leg_lost = false;
        if power {
            node.leg.volatile = node.leg.durable;
        }
        self.puts.iter_mut().filter(|p| p.asker == Some(n)).for_each(|p| p.asker = None);
        self.tidy_puts();
        self.fail_writes(n);
        for other in (0..self.nodes.len()).filter(|&o| o != n) {
            if power && self.budget.sessions_outlive_power_cuts {
                self.lanes[n][other] = Default::default();
                self.lanes[other][n] = Default::default();
            } else if self.linked(n, other) {
                self.break_link(n, other);
            }
        }
    }

    pub(super) fn fail_writes(&mut self, n: usize) {
        for (at, written) in &mut self.writes {
            if *at == n && *written == WriteProgress::Accepted {
                *written = WriteProgress::Failed;
            }
        }
    }
}

impl MirrorMembership {
    /// A tick passes: all times are further back.
    fn age(&mut self) {
        // A member whose leg has failed waits longer.
        let oldest = NOW - TICK * if self.leg_state == State::Healthy { OLD } else { 2 * OLD };
        let back = |time: &mut Duration| *time = (*time).saturating_sub(TICK).max(oldest);
        back(&mut self.started_at);
        self.config_reads.not_before =
            Duration::ZERO.max(self.config_reads.not_before.saturating_sub(TICK));
        if self.config_reads.not_before <= NOW {
            self.config_reads.not_before = Duration::ZERO;
        }
        if let Some(put) = &mut self.pending_put {
            back(&mut put.sent_at);
        }
        for peer in self.member_state.iter_mut().filter_map(|s| s.peer_leases.as_mut()).flatten() {
            peer.times().into_iter().flatten().for_each(back);
            // A proof of life is valid for half a lease: this tick.
            peer.proof_of_life = None;
        }
    }

    /// Removes what does not affect the future from the state.
    pub(super) fn normalise(&mut self) {
        if let Some(state) = &mut self.member_state {
            state.renew_at = Duration::ZERO;
            // Request and answer are one step: a later grant was requested since.
            state.stopped_serving_at = state.stopped_serving_at.and(Some(Duration::ZERO));
        }
    }
}

//! A small world around real members: sessions, a store, legs of one block, and what may happen.
//!
//! Time goes in ticks that all clocks share, with a lease of two and a grace of three: the code has
//! no event "the lease is over", only its own arithmetic over times, and this reaches it. Nothing
//! depends on when a tick comes: a world in which none comes for a while is one with long ticks.
//! Times of a member are kept relative to now and cut off where they stop to matter, so the same
//! situation later is the same state.
//!
//! RENEW and PROMISE are exchanged in one step: one that is under way for longer only shortens what
//! its holder may do. So are YIELD and YIELDED, by a way of their own, if the answer is not lost. STANDING
//! and NEWER arrive at once or never.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use block::Epoch;
use peer::{Incarnation, Lineage, NodeId, Role, SharedLineage, View};
use uuid::Uuid;

use super::super::super::record::{History, Member as Listed, Put, Record, Replica};
use super::super::{Action, Event, Image, Leg as State, Lineages, Member, Say, Settings, to_stamp};

/// What the world's clock says, always: what is past lies below.
pub(super) const NOW: Duration = Duration::from_secs(100);
pub(super) const TICK: Duration = Duration::from_secs(1);
/// Ages from here on are all alike: the grace is three, a silent one is doubted after two and a half.
const OLD: u32 = 3;

/// What is done wrongly on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mistake {
    None,
    IgnoresLease,
    PromisesAfterPut,
    ReturnedServes,
    OpensWithoutSettling,
    AdoptsWithoutDrain,
    NoGrace,
    LossyGoesAlone,
    RoundAfterAdmission,
    LeavesToTheLinked,
    FailureIsAWish,
    ForgetsTheFailure,
    TrustsJoiners,
    LeadsWhenOlder,
    ServesWhenItHasYielded,
}

/// How often what may happen.
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
    /// Times that a member may be told to yield.
    pub(super) yields: u8,
    /// Writes that a leg refuses, after it has done some or all of them.
    pub(super) refusals: u8,
    /// Legs that are lost until their process begins again.
    pub(super) deaths: u8,
    /// Copies that are taken of an image, running or not.
    pub(super) copies: u8,
    /// Images that are set back to the copy that was taken of them, while their node is down.
    pub(super) set_backs: u8,
    /// Whether sessions outlive a power cut until it is noticed.
    pub(super) lingers: bool,
    /// Whether time passes at all.
    pub(super) ticks: bool,
}

/// A write's number is its value, from 1; 0 is what was there before.
pub(super) type Value = u8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Held {
    pub(super) view: View,
    pub(super) seq: u8,
    pub(super) write: Value,
    pub(super) applied: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Msg {
    Start { view: View, record: Record },
    Started { view: View, entries: Vec<Held> },
    Open { view: View, through: u8, settled: Vec<Value> },
    Order { view: View, write: Value },
    Write { view: View, seq: u8, write: Value },
    Applied { view: View, seq: u8 },
    Commit { view: View, seq: u8 },
}

impl Msg {
    /// Lanes keep their order, and know nothing of each other.
    fn lane(&self) -> usize {
        usize::from(matches!(self, Self::Order { .. } | Self::Write { .. }))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Leg {
    pub(super) volatile: Value,
    pub(super) durable: Value,
    pub(super) marked: bool,
}

/// What a copy of an image holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Copied {
    image: (Epoch, u128),
    lineages: Lineages,
    leg: Leg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Written {
    /// Not sent by its client yet.
    Idle,
    /// Taken in; `asked` in the present view.
    Taken {
        asked: bool,
    },
    Answered,
    /// Its client knows nothing: the node died, or said `Fenced`.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Node {
    pub(super) member: Option<Member>,
    pub(super) same_boot: bool,
    pub(super) lives: u64,
    pub(super) image: (Epoch, u128),
    pub(super) lineages: Lineages,
    pub(super) leg: Leg,
    /// Its last attempt to join, and what the primary had reached then with other images.
    pub(super) inheritance: Option<(Incarnation, Vec<(Uuid, Lineage)>)>,
    /// A copy of the image: what it has adopted and recorded, and what it holds durably.
    pub(super) copy: Option<Rc<Copied>>,
    /// The image was set back to the copy.
    pub(super) set_back: bool,
    pub(super) entries: Vec<Held>,
    /// BEGIN that waits for the drain.
    pub(super) begin: Option<(View, Option<Record>)>,
    pub(super) reading: bool,
    /// At the primary: what STARTED brought, and who has applied the write that holds the lock.
    pub(super) told: Vec<(NodeId, Held)>,
    pub(super) acks: Vec<NodeId>,
    pub(super) seq: u8,
    /// Copies end here.
    pub(super) through: u8,
    pub(super) settled: Vec<Value>,
    pub(super) settling: bool,
    /// The joiner that every write goes to as well.
    pub(super) joiner: Option<Listed>,
    /// At the joiner: the view in which it takes writes.
    pub(super) joined: Option<View>,
    /// Who died while this one served.
    pub(super) outlived: Vec<Incarnation>,
    /// Its leg does nothing any more.
    pub(super) dead: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Request {
    pub(super) asker: Option<usize>,
    pub(super) epoch: Epoch,
    pub(super) config: u128,
    pub(super) record: Record,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) mistake: Mistake,
    pub(super) left: Budget,
    pub(super) nodes: Vec<Rc<Node>>,
    pub(super) store: Record,
    pub(super) puts: Vec<Request>,
    /// `[a][b]`, a < b: whether there is a session.
    pub(super) links: Vec<Vec<bool>>,
    /// `[from][to][lane]`.
    pub(super) lanes: Vec<Vec<[VecDeque<Msg>; 2]>>,
    pub(super) writes: Vec<(usize, Written)>,
    /// Values in the order in which somebody has seen them.
    pub(super) history: Vec<Value>,
    /// Where in it the last flush ended.
    pub(super) flushed: usize,
    /// Values that a blackout took away.
    pub(super) gone: Vec<Value>,
    /// What a step has found wrong.
    pub(super) errors: Vec<String>,
}

/// What may happen next.
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
    Land(usize),
    LosePut(usize),
    Deliver(usize, usize, usize),
    Drain(usize),
    Apply(usize),
    Take(usize),
    Ask(usize),
    Join(usize, usize),
    Flush,
    Switch(usize, usize),
    Leave(usize),
    Stuck(usize, usize),
    /// The first tells the second to yield, and hears the answer or does not.
    Yield(usize, usize, bool),
    /// A session with a node that is down ends at last.
    Notice(usize, usize),
    Refuse(usize),
    Die(usize),
    Copy(usize),
    SetBack(usize),
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
    /// `count` nodes, all in sync and running, with writes that enter at these nodes.
    pub(super) fn new(count: usize, writes: &[usize], left: Budget, mistake: Mistake) -> Self {
        let mut world = Self::started(count, writes, left, mistake, |n| incarnation(n, 0));
        world.calm_down().expect("an undisturbed start");
        world
    }

    /// The same with a new volume, which no node has read the record of yet.
    pub(super) fn of_new_volume(count: usize, writes: &[usize], left: Budget) -> Self {
        Self::started(count, writes, left, Mistake::None, |_| Incarnation(0))
    }

    /// Nodes that have just started, and a record that lists them under these incarnations.
    fn started(
        count: usize,
        writes: &[usize],
        left: Budget,
        mistake: Mistake,
        listed: fn(usize) -> Incarnation,
    ) -> Self {
        let replicas = (0..count)
            .map(|n| Replica {
                node: id(n),
                image: Uuid::from_u128(u128::from(id(n).0)),
                new: false,
            })
            .collect();
        let in_sync = (0..count).map(|n| Listed { node: id(n), incarnation: listed(n) }).collect();
        let store = Record {
            epoch: Epoch(1),
            config: 1,
            replicas,
            in_sync,
            primary: NodeId(1),
            born: Epoch::default(),
            history: History::default(),
        };
        let node = Node {
            member: None,
            same_boot: true,
            lives: 0,
            image: (Epoch(0), 0),
            lineages: Lineages::default(),
            leg: Leg::default(),
            copy: None,
            inheritance: None,
            set_back: false,
            entries: Vec::new(),
            begin: None,
            reading: false,
            told: Vec::new(),
            acks: Vec::new(),
            seq: 0,
            through: 0,
            settled: Vec::new(),
            settling: false,
            joiner: None,
            joined: None,
            outlived: Vec::new(),
            dead: false,
        };
        let mut world = Self {
            mistake,
            left,
            nodes: (0..count).map(|_| Rc::new(node.clone())).collect(),
            store,
            puts: Vec::new(),
            links: vec![vec![false; count]; count],
            lanes: vec![vec![Default::default(); count]; count],
            writes: writes.iter().map(|&n| (n, Written::Idle)).collect(),
            history: vec![0],
            flushed: 0,
            gone: Vec::new(),
            errors: Vec::new(),
        };
        (0..count).for_each(|n| world.boot(n));
        world
    }

    pub(super) fn node(&mut self, n: usize) -> &mut Node {
        Rc::make_mut(&mut self.nodes[n])
    }

    pub(super) fn up(&self, n: usize) -> bool {
        self.nodes[n].member.is_some()
    }

    pub(super) fn member(&self, n: usize) -> Option<&Member> {
        self.nodes[n].member.as_ref()
    }

    pub(super) fn linked(&self, a: usize, b: usize) -> bool {
        a != b && self.links[a.min(b)][a.max(b)]
    }

    pub(super) fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let count = self.nodes.len();
        (0..count).flat_map(move |a| (0..count).map(move |b| (a, b))).filter(|(a, b)| a != b)
    }

    /// The process begins: whatever it held in memory is gone.
    fn boot(&mut self, n: usize) {
        for other in (0..self.nodes.len()).filter(|&o| o != n) {
            if self.linked(n, other) {
                self.break_link(n, other);
            }
        }
        let settings = match self.mistake {
            Mistake::NoGrace => Settings::unchecked(TICK * 2, Duration::ZERO),
            _ => Settings::new(TICK * 2, TICK * 3).expect("safe"),
        };
        let lossy = self.mistake == Mistake::LossyGoesAlone;
        let life = if self.mistake == Mistake::ReturnedServes { 0 } else { self.nodes[n].lives };
        let node = self.node(n);
        let (epoch, config) = node.image;
        let clean = lossy || !node.leg.marked;
        let (same_boot, lineage, lost) = (node.same_boot, node.lineages.lineage, false);
        let image = Image { epoch, config, clean, same_boot, lineage, lost };
        node.member = Some(Member::new(id(n), incarnation(n, life), settings, NOW, image));
        self.tell(n, Event::Tick);
    }

    pub(super) fn send(&mut self, from: usize, to: usize, msg: Msg) {
        if self.linked(from, to) && self.up(to) {
            let lane = msg.lane();
            self.lanes[from][to][lane].push_back(msg);
        }
    }

    /// Whether the driver lets node `n` answer.
    pub(super) fn serves(&self, n: usize) -> bool {
        self.member(n).is_some_and(|m| match self.mistake {
            Mistake::IgnoresLease => m.is_open(),
            Mistake::ServesWhenItHasYielded => {
                let mut deaf = m.clone();
                deaf.seat.iter_mut().for_each(|s| s.yielded = None);
                deaf.serves(NOW)
            }
            _ => m.serves(NOW),
        })
    }

    /// All that may happen next.
    pub(super) fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.left.ticks {
            steps.push(Step::Tick);
        }
        for (a, b) in self.pairs() {
            self.steps_between(a, b, &mut steps);
        }
        for n in 0..self.nodes.len() {
            self.steps_at(n, &mut steps);
        }
        for (k, put) in self.puts.iter().enumerate() {
            steps.push(Step::Land(k));
            if put.asker.is_some() && self.left.lost_puts > 0 {
                steps.push(Step::LosePut(k));
            }
        }
        if self.left.flushes > 0 && self.can_flush() {
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
        if linked && self.left.joins > 0 && self.can_join(a, b) {
            steps.push(Step::Join(a, b));
        }
        let primary = self.member(a).is_some_and(Member::is_primary);
        if primary && self.left.switches > 0 && self.member(a).is_some_and(Member::is_open) {
            steps.push(Step::Switch(a, b));
        }
        if primary && self.left.stuck > 0 && self.serves(a) {
            steps.push(Step::Stuck(a, b));
        }
        if self.left.yields > 0 && self.can_yield(a, b) {
            steps.extend([Step::Yield(a, b, true), Step::Yield(a, b, false)]);
        }
        if a > b {
            return;
        }
        if linked && self.left.breaks > 0 {
            steps.push(Step::Break(a, b));
        }
        if linked && self.up(a) != self.up(b) {
            steps.push(Step::Notice(a, b));
        }
        if !linked && self.up(a) && self.up(b) {
            steps.push(Step::Connect(a, b));
        }
    }

    fn steps_at(&self, n: usize, steps: &mut Vec<Step>) {
        let node = &self.nodes[n];
        if self.left.copies > 0 {
            steps.push(Step::Copy(n));
        }
        let Some(member) = &node.member else {
            steps.push(Step::Restart(n));
            if self.left.set_backs > 0 && node.copy.is_some() {
                steps.push(Step::SetBack(n));
            }
            return;
        };
        if self.left.kills > 0 {
            steps.push(Step::Crash(n, false));
        }
        if self.left.power_cuts > 0 {
            steps.push(Step::Crash(n, true));
        }
        if node.reading {
            steps.push(Step::Read(n));
            if self.left.failed_reads > 0 {
                steps.push(Step::ReadFails(n));
            }
        }
        if self.left.deaths > 0 && !node.dead {
            steps.push(Step::Die(n));
        }
        if node.dead {
            // It does nothing, and nothing is begun.
        } else if node.begin.is_some() {
            steps.push(Step::Drain(n));
        } else if node.entries.iter().any(|e| !e.applied) {
            steps.push(Step::Apply(n));
        }
        // Who settles alone writes nothing: its leg has all there is.
        let alone = member.record().is_some_and(|r| r.in_sync.len() == 1);
        let refusable = member.role() == Role::Member && !(alone && node.settling);
        if self.left.refusals > 0
            && refusable
            && !node.dead
            && node.entries.iter().any(|e| !e.applied)
        {
            steps.push(Step::Refuse(n));
        }
        if self.left.leaves > 0 && member.is_open() {
            steps.push(Step::Leave(n));
        }
        for (w, &(_, written)) in self.writes.iter().enumerate().filter(|(_, (at, _))| *at == n) {
            match written {
                Written::Idle if member.is_open() => steps.push(Step::Take(w)),
                Written::Taken { asked: false } if self.can_ask(n) => steps.push(Step::Ask(w)),
                _ => {}
            }
        }
    }

    /// Whether a asking b for a promise changes anything: an answer at all, and a newer one.
    fn can_lease(&self, a: usize, b: usize) -> bool {
        let (Some(x), Some(y)) = (self.member(a), self.member(b)) else { return false };
        if !self.linked(a, b) || x.role() != Role::Member {
            return false;
        }
        let peer = |m: &Member, of| {
            m.seat.as_ref().and_then(|s| s.peers().iter().find(|p| p.node() == id(of)).cloned())
        };
        let Some(asked) = peer(x, b) else { return false };
        let epoch = |m: &Member| m.record().map_or(Epoch(0), |r| r.epoch);
        if epoch(x) != epoch(y) {
            // Who is behind learns that it should read.
            let behind = if epoch(x) < epoch(y) { x } else { y };
            let deaf = behind.record().is_none() || behind.reads.urgent;
            return !deaf && !self.nodes[a].reading && !self.nodes[b].reading;
        }
        let answers = peer(y, a).is_some_and(|p| {
            let able = y.put.is_none() && y.leg == State::Sound;
            p.listed.incarnation == x.incarnation() && !p.excluded && able
        });
        let wrongly = self.mistake == Mistake::PromisesAfterPut && y.put.is_some();
        let goes = x.seat.as_ref().is_some_and(|s| s.stopped.is_some());
        let news = asked.stamp() != Some(to_stamp(NOW)) || goes && asked.attested.is_none();
        news && (answers || wrongly)
    }

    /// Whether a waits for b to yield.
    fn can_yield(&self, a: usize, b: usize) -> bool {
        let Some(seat) = self.member(a).filter(|m| m.is_primary()).and_then(|m| m.seat.as_ref())
        else {
            return false;
        };
        seat.is_announced()
            && self.up(b)
            && seat.peers().iter().any(|p| p.node() == id(b) && p.excluded && !p.yielded)
    }

    fn yields(&mut self, a: usize, b: usize, heard: bool) {
        self.left.yields -= 1;
        let view = self.member(a).and_then(Member::view).expect("checked");
        let seat = self.member(a).and_then(|m| m.seat.as_ref()).expect("checked");
        let listed = seat.peers().iter().find(|p| p.node() == id(b)).expect("checked").listed;
        let incarnation = listed.incarnation;
        let lineages = self.lineages(b);
        let Some(member) = &mut self.node(b).member else { return };
        member.remember(lineages);
        let asked = Event::Heard(id(a), Say::Yield { view, incarnation });
        let actions = member.apply(NOW, asked);
        member.normalise();
        let (answers, rest): (Vec<_>, Vec<_>) = actions
            .into_iter()
            .partition(|action| matches!(action, Action::Send(_, Say::Yielded { .. })));
        rest.into_iter().for_each(|action| self.perform(b, action));
        for answer in answers {
            if let Action::Send(_, say) = answer
                && heard
            {
                self.tell(a, Event::Heard(id(b), say));
            }
        }
    }

    pub(super) fn do_step(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Tick => self.tick(),
            Step::Lease(a, b) => self.lease(a, b),
            Step::Break(a, b) => {
                self.left.breaks -= 1;
                self.break_link(a, b);
            }
            Step::Connect(a, b) => self.connect(a, b),
            Step::Crash(n, power) => self.crash(n, power),
            Step::Restart(n) => self.boot(n),
            Step::Read(n) => {
                self.node(n).reading = false;
                let record = self.store.clone();
                let (epoch, lives) = (record.epoch.0, self.nodes[n].lives);
                let fresh = u128::from(incarnation(n, lives).0) << 64 | u128::from(epoch);
                self.tell(n, Event::Read { record, fresh });
            }
            Step::ReadFails(n) => {
                self.left.failed_reads -= 1;
                self.node(n).reading = false;
                self.tell(n, Event::ReadFailed);
            }
            Step::Land(k) => self.land(k)?,
            Step::LosePut(k) => {
                self.left.lost_puts -= 1;
                let asker = self.puts[k].asker.take().expect("checked");
                self.tidy_puts();
                self.tell(asker, Event::Put(Put::Unknown));
            }
            Step::Deliver(a, b, lane) => self.deliver(a, b, lane)?,
            Step::Drain(n) => self.drain(n),
            Step::Apply(n) => self.apply(n),
            Step::Take(w) => self.writes[w].1 = Written::Taken { asked: false },
            Step::Ask(w) => self.ask(w),
            Step::Join(t, p) => self.join(t, p),
            Step::Flush => self.flush(),
            Step::Switch(a, b) => {
                self.left.switches -= 1;
                self.tell(a, Event::Switch(id(b)));
            }
            Step::Leave(n) => {
                self.left.leaves -= 1;
                self.tell(n, Event::Leave);
            }
            Step::Yield(a, b, heard) => self.yields(a, b, heard),
            Step::Notice(a, b) => self.break_link(a, b),
            Step::Refuse(n) => self.refuse(n),
            Step::Die(n) => {
                self.left.deaths -= 1;
                self.node(n).dead = true;
                self.tell(n, Event::LegDead);
            }
            Step::Copy(n) => self.copy(n),
            Step::SetBack(n) => self.set_back(n),
            Step::Stuck(a, b) => {
                self.left.stuck -= 1;
                self.tell(a, Event::Stuck(id(b)));
            }
        }
        self.take_errors()?;
        self.check()
    }

    /// A copy is taken of what the image holds durably.
    fn copy(&mut self, n: usize) {
        self.left.copies -= 1;
        let node = self.node(n);
        let leg = Leg { volatile: node.leg.durable, ..node.leg };
        let (image, lineages) = (node.image, node.lineages.clone());
        node.copy = Some(Rc::new(Copied { image, lineages, leg }));
    }

    /// The copy takes the image's place.
    fn set_back(&mut self, n: usize) {
        self.left.set_backs -= 1;
        let node = self.node(n);
        let Some(copy) = node.copy.take() else { return };
        let Copied { image, lineages, leg } = (*copy).clone();
        (node.image, node.lineages, node.leg) = (image, lineages, leg);
        // Of the same boot, as where a file is put back: what a copy says of that counts.
        node.set_back = true;
    }

    /// What node `n` has recorded, as its machine is told.
    pub(super) fn lineages(&self, n: usize) -> Lineages {
        let mut lineages = self.nodes[n].lineages.clone();
        if self.mistake == Mistake::LeadsWhenOlder {
            let late = Lineage::first(Epoch(u64::MAX));
            lineages.lineage = late;
            lineages.shared.iter_mut().for_each(|(_, shared)| shared.reached = late);
        }
        lineages
    }

    /// Node `n` records that it has reached `lineage` together with these, and has cleared marks for
    /// them under it, or has not.
    pub(super) fn record(&mut self, n: usize, lineage: Lineage, with: &[NodeId], cleared: bool) {
        let lineages = &mut self.node(n).lineages;
        lineages.lineage = lineages.lineage.max(lineage);
        for other in with.iter().filter(|other| at(**other) != n) {
            let image = Uuid::from_u128(u128::from(other.0));
            let shared = lineages.shared.iter_mut().find(|(of, _)| *of == image);
            let shared = match shared {
                Some((_, shared)) => shared,
                None => {
                    lineages.shared.push((image, SharedLineage::default()));
                    &mut lineages.shared.last_mut().expect("pushed").1
                }
            };
            shared.reached = shared.reached.max(lineage);
            if cleared {
                shared.cleared = shared.cleared.max(lineage);
            }
        }
        lineages.shared.sort_unstable_by_key(|(image, _)| *image);
    }

    /// Node `n`, which is a member by `record` as its last attempt ended, holds what the primary of
    /// that held.
    pub(super) fn inherit(&mut self, n: usize, record: &Record) {
        let Some((attempt, reached)) = self.nodes[n].inheritance.clone() else { return };
        if !record.has(id(n), attempt) {
            return;
        }
        for (image, shared) in &mut self.node(n).lineages.shared {
            let of_image = reached.iter().find(|(of, _)| of == image);
            let lineage = of_image.map(|(_, lineage)| *lineage).unwrap_or_default();
            shared.reached = shared.reached.max(lineage);
        }
    }

    /// A put takes effect, or does not, and who asked for it learns which, unless it was cut off.
    fn land(&mut self, k: usize) -> Result<(), String> {
        let Request { asker, epoch, config, record } = self.puts.remove(k);
        let fits = self.store.epoch == epoch && self.store.config == config;
        if fits {
            self.blackout(&record)?;
            self.store = record;
        }
        if let Some(asker) = asker {
            self.tell(asker, Event::Put(if fits { Put::Done } else { Put::Refused }));
        }
        Ok(())
    }

    /// Two requests alike are one, if nobody waits for either; those that can never fit are none.
    pub(super) fn tidy_puts(&mut self) {
        let epoch = self.store.epoch;
        self.puts.retain(|p| p.asker.is_some() || p.epoch == epoch);
        self.puts.sort_by_key(|p| (p.asker, p.config, p.record.config));
        self.puts.dedup();
    }

    fn lease(&mut self, a: usize, b: usize) {
        let x = self.member(a).expect("checked");
        let (epoch, incarnation) = (x.record().expect("checked").epoch, x.incarnation());
        let renew = Say::Renew { epoch, incarnation, stamp: to_stamp(NOW) };
        self.tell(b, Event::Heard(id(a), renew));
        let burnt = self.member(b).is_some_and(|m| m.put.is_some());
        if self.mistake == Mistake::PromisesAfterPut && burnt {
            let promise = Say::Promise { epoch, incarnation, stamp: to_stamp(NOW) };
            self.tell(a, Event::Heard(id(b), promise));
        }
    }

    fn tick(&mut self) {
        for n in 0..self.nodes.len() {
            if let Some(member) = &mut self.node(n).member {
                member.age();
                self.tell(n, Event::Tick);
            }
        }
    }

    pub(super) fn break_link(&mut self, a: usize, b: usize) {
        self.links[a.min(b)][a.max(b)] = false;
        for (x, y) in [(a, b), (b, a)] {
            self.lanes[x][y] = Default::default();
            if self.nodes[x].joined.is_some() || self.nodes[x].joiner.is_some() {
                self.lose_joiner(x, id(y));
            }
            if self.up(x) {
                self.tell(x, Event::LinkDown(id(y)));
            }
        }
    }

    fn connect(&mut self, a: usize, b: usize) {
        self.links[a.min(b)][a.max(b)] = true;
        // Both ends know of the session before anything comes through it.
        for (x, y) in [(a, b), (b, a)] {
            let hidden = (self.mistake == Mistake::RoundAfterAdmission)
                .then(|| self.node(x).member.as_mut().and_then(|m| m.put.take()));
            self.tell_quietly(x, Event::LinkUp(id(y)));
            if let Some(hidden) = hidden {
                self.node(x).member.as_mut().expect("checked").put = hidden;
            }
        }
        for (x, y) in [(a, b), (b, a)] {
            let standing = self.member(x).expect("checked").standing_for(id(y));
            self.tell(y, Event::Heard(id(x), Say::Standing(standing)));
        }
    }

    fn crash(&mut self, n: usize, power: bool) {
        if power {
            self.left.power_cuts -= 1;
        } else {
            self.left.kills -= 1;
        }
        if let Some(incarnation) = self.member(n).map(Member::incarnation) {
            for other in 0..self.nodes.len() {
                if other != n && self.serves(other) {
                    self.node(other).outlived.push(incarnation);
                }
            }
        }
        let node = self.node(n);
        node.member = None;
        node.lives += 1;
        node.same_boot = !power && node.same_boot;
        node.forget();
        node.entries.clear();
        node.reading = false;
        node.begin = None;
        node.outlived.clear();
        node.dead = false;
        if power {
            node.leg.volatile = node.leg.durable;
        }
        self.puts.iter_mut().filter(|p| p.asker == Some(n)).for_each(|p| p.asker = None);
        self.tidy_puts();
        self.fail_writes(n);
        for other in (0..self.nodes.len()).filter(|&o| o != n) {
            if power && self.left.lingers {
                self.lanes[n][other] = Default::default();
                self.lanes[other][n] = Default::default();
            } else if self.linked(n, other) {
                self.break_link(n, other);
            }
        }
    }

    pub(super) fn fail_writes(&mut self, n: usize) {
        for (at, written) in &mut self.writes {
            if *at == n && matches!(written, Written::Taken { .. }) {
                *written = Written::Failed;
            }
        }
    }
}

impl Node {
    /// What belongs to a view ends with it.
    pub(super) fn forget(&mut self) {
        self.told.clear();
        self.acks.clear();
        self.settled.clear();
        self.settling = false;
        (self.seq, self.through) = (0, 0);
        (self.joiner, self.joined) = (None, None);
    }
}

impl Member {
    /// A tick goes by: all times lie further back.
    fn age(&mut self) {
        // A member whose leg has failed is patient.
        let oldest = NOW - TICK * if self.leg == State::Sound { OLD } else { 2 * OLD };
        let back = |time: &mut Duration| *time = (*time).saturating_sub(TICK).max(oldest);
        back(&mut self.born);
        self.reads.after = Duration::ZERO.max(self.reads.after.saturating_sub(TICK));
        if self.reads.after <= NOW {
            self.reads.after = Duration::ZERO;
        }
        if let Some(put) = &mut self.put {
            back(&mut put.sent);
        }
        for peer in self.seat.iter_mut().filter_map(|s| s.peers.as_mut()).flatten() {
            peer.times().into_iter().flatten().for_each(back);
            // A sign of life is good for half a lease: this tick.
            peer.attested = None;
        }
    }

    /// What says nothing about what comes is left out of the state.
    pub(super) fn normalise(&mut self) {
        if let Some(seat) = &mut self.seat {
            seat.renew_at = Duration::ZERO;
            // Asking and answering are one step: what comes was asked for since.
            seat.stopped = seat.stopped.and(Some(Duration::ZERO));
        }
    }
}

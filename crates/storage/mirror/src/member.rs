//! Membership: who serves, when, and how the record comes to change (RFD 0010, 5).
//!
//! [`Member`] is one replica's view of its volume, a pure machine: [`Member::apply`] takes what has
//! happened and returns what is to be done. It reads no clock, draws no random number and does no
//! I/O; the driver beside it does, and owns entries, legs and sessions.
//!
//! The driver's duties:
//! * All times are those of one clock that goes on while the machine sleeps.
//! * Actions are done in their order. Each [`Action::ReadRecord`] and each [`Action::Put`] is
//!   answered once, within a bounded time; [`Action::Begin`] and [`Action::Settle`] are answered
//!   unless another view takes their place.
//! * What a session brings is handed over between its [`Event::LinkUp`] and its
//!   [`Event::LinkDown`], in the order of its lane.
//! * [`Member::serves`] is asked with the data in hand, not only before (4.3).

mod change;
mod lease;
mod leave;
mod lineage;
mod view;
mod words;
mod yielding;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use block::Epoch;
use peer::{Incarnation, Lineage, NodeId, Role, SharedLineage, Stamp, Standing, View};

use self::change::{Pending, Reads, Stale, Wishes};
use self::lease::{Peer, to_stamp};
use self::view::{Seat, Stage};
use super::record::{Member as Listed, Record};

pub use lineage::{Judgement, Lineages};
pub use words::{
    Action, Change, Event, Image, Refusal, Say, SetBack, Settings, UnsafeSettings, Why,
};

/// What is known of the leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Leg {
    Sound,
    /// It has refused what others have done: it is not to be taken for holding it.
    Failed,
    /// Nothing more comes from it.
    Dead,
}

/// One replica's part in its volume.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Member {
    me: NodeId,
    incarnation: Incarnation,
    settings: Settings,
    /// When this process began.
    born: Duration,
    image: Image,
    leg: Leg,
    /// This incarnation has let go of what it held: it is no member whatever the record says.
    void: bool,
    links: BTreeSet<NodeId>,
    /// What the linked ones say they are.
    standings: BTreeMap<NodeId, Standing>,
    record: Option<Record>,
    refused: Option<Refusal>,
    /// There while the record lists this incarnation.
    seat: Option<Seat>,
    reads: Reads,
    /// Burnt boats (5.2): of the present record.
    put: Option<Pending>,
    wishes: Wishes,
    /// What the image has recorded (RFD 0032).
    lineages: Lineages,
    /// The last lineage that all members of a record have reached.
    recorded: Option<Lineage>,
    /// Nodes whose copies came back older, which no record says yet.
    set_back: Vec<NodeId>,
    announced: Standing,
    actions: Vec<Action>,
}

impl Member {
    /// A replica whose image has just been opened. `incarnation` was never used before.
    #[must_use]
    pub fn new(
        me: NodeId,
        incarnation: Incarnation,
        settings: Settings,
        now: Duration,
        image: Image,
    ) -> Self {
        let mut member = Self {
            me,
            incarnation,
            settings,
            born: now,
            image,
            leg: Leg::Sound,
            void: false,
            links: BTreeSet::new(),
            standings: BTreeMap::new(),
            record: None,
            refused: None,
            seat: None,
            reads: Reads::default(),
            put: None,
            wishes: Wishes::default(),
            lineages: Lineages { lineage: image.lineage, lost: image.lost, shared: Vec::new() },
            recorded: None,
            set_back: Vec::new(),
            announced: standing_of(incarnation, image, Role::Unknown),
            actions: Vec::new(),
        };
        member.announced = member.standing();
        member
    }

    /// Takes in what has happened by `now`; returns what is to be done about it. The first call
    /// should come at once, with [`Event::Tick`].
    #[must_use]
    pub fn apply(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Tick => {}
            Event::Changed => self.reads.ask(),
            Event::Read { record, fresh } => self.read(now, record, fresh),
            Event::ReadFailed => self.read_failed(now),
            Event::Put(outcome) => self.put_ended(now, outcome),
            Event::LinkUp(node) => self.link_up(node),
            Event::LinkDown(node) => {
                self.links.remove(&node);
                self.standings.remove(&node);
            }
            Event::Heard(from, say) => self.heard(now, from, say),
            Event::Began(view) => self.began(now, view),
            Event::Started(from, view) => self.started(from, view),
            Event::Settled(view) => self.settled(view),
            Event::Open(from, view) => self.opened(from, view),
            Event::Stuck(node) => self.stuck(node),
            Event::LegDead => {
                self.leg = Leg::Dead;
                if self.seat.is_none() {
                    // It was to lead. Were it sent and takes effect, it is read.
                    self.put = None;
                }
                self.step_aside(now);
            }
            Event::Joining(incarnation) => self.joining(incarnation),
            Event::Recorded(lineage) => self.recorded(lineage),
            Event::LegFailed => self.leg_failed(now),
            Event::Leave | Event::Switch(_) | Event::Admit(_) | Event::Force => self.wish(&event),
            Event::Withdraw(node) => self.withdraw(node),
        }
        self.renew(now);
        self.announce();
        if self.reads.running.is_none() && now >= self.reads.after && self.wants_read(now) {
            self.reads.running = Some(Stale(false));
            self.actions.push(Action::ReadRecord);
        }
        std::mem::take(&mut self.actions)
    }

    fn link_up(&mut self, node: NodeId) {
        self.links.insert(node);
        self.standings.remove(&node);
        let standing = Say::Standing(self.standing_for(node));
        self.actions.push(Action::Send(node, standing));
        self.next_round(node);
    }

    fn heard(&mut self, now: Duration, from: NodeId, say: Say) {
        match say {
            Say::Standing(standing) => self.stands(from, standing),
            Say::Renew { epoch, incarnation, stamp } => {
                self.asked(now, from, epoch, incarnation, stamp);
            }
            Say::Promise { epoch, incarnation, stamp } => {
                let mine = self.record.as_ref().is_some_and(|r| r.epoch == epoch);
                let seat = self.seat.as_mut().filter(|_| mine && incarnation == self.incarnation);
                let stopped = seat.as_ref().and_then(|s| s.stopped);
                if let Some(peer) = seat.and_then(|s| s.peer_mut(from)) {
                    peer.promised(stamp, now, stopped);
                }
            }
            Say::Newer(epoch) => {
                if self.record.as_ref().is_none_or(|r| r.epoch < epoch) {
                    self.reads.ask();
                }
            }
            Say::Yield { view, incarnation } => self.asked_to_yield(from, view, incarnation),
            Say::Yielded { view, incarnation } => self.has_yielded(from, view, incarnation),
            Say::Start { view, record } => self.start(now, from, view, record),
        }
    }

    fn stands(&mut self, from: NodeId, standing: Standing) {
        if !self.links.contains(&from) {
            return;
        }
        // It is said again and again where no leases keep the session alive.
        if self.standings.insert(from, standing) == Some(standing) {
            return;
        }
        self.reads.evidence();
        if let Some(record) = &self.record
            && (standing.epoch > record.epoch
                || standing.epoch == record.epoch && standing.config != record.config)
        {
            self.reads.ask();
        }
    }

    /// 5.1: a promise, if this member may give one.
    fn asked(&mut self, now: Duration, from: NodeId, epoch: Epoch, inc: Incarnation, stamp: Stamp) {
        let Some(record) = &self.record else { return };
        if epoch < record.epoch {
            self.actions.push(Action::Send(from, Say::Newer(record.epoch)));
        }
        if epoch > record.epoch {
            self.reads.ask();
        }
        if epoch != record.epoch || self.put.is_some() || self.leg != Leg::Sound {
            return;
        }
        let Some(seat) = &mut self.seat else { return };
        let Some(peer) = seat.peer_mut(from) else { return };
        if peer.listed.incarnation == inc && !peer.excluded {
            peer.promise(now);
            let say = Say::Promise { epoch, incarnation: inc, stamp };
            self.actions.push(Action::Send(from, say));
            if peer.is_asked_back() {
                let stamp = to_stamp(now);
                let say = Say::Renew { epoch, incarnation: self.incarnation, stamp };
                self.actions.push(Action::Send(from, say));
            }
        }
    }

    fn renew(&mut self, now: Duration) {
        let (Some(seat), Some(record)) = (&mut self.seat, &self.record) else { return };
        if seat.peers.is_none() || now < seat.renew_at {
            return;
        }
        seat.renew_at = now + self.settings.renewal();
        let (epoch, incarnation) = (record.epoch, self.incarnation);
        for peer in seat.peers() {
            let say = Say::Renew { epoch, incarnation, stamp: to_stamp(now) };
            self.actions.push(Action::Send(peer.node(), say));
        }
        self.ask_to_yield();
    }

    fn stuck(&mut self, node: NodeId) {
        let primary = self.is_primary();
        if let Some(peer) = self.seat.as_mut().and_then(|s| s.peer_mut(node)).filter(|_| primary)
            && !std::mem::replace(&mut peer.stuck, true)
        {
            self.reads.evidence();
        }
    }

    fn joining(&mut self, incarnation: Incarnation) {
        let Some(record) = self.record.as_ref().filter(|_| self.seat.is_none()) else { return };
        self.incarnation = incarnation;
        self.void = false;
        if self.leg == Leg::Failed {
            self.leg = Leg::Sound;
        }
        self.image.clean = false;
        (self.image.epoch, self.image.config) = (record.epoch, record.config);
    }

    /// What may have been put cannot be taken back: the record may list the joiner already.
    fn withdraw(&mut self, node: NodeId) {
        if self.admitting().is_some_and(|joiner| joiner.node == node) {
            self.actions.push(Action::Declined(Change::Withdraw(node)));
        } else {
            self.wishes.admit = self.wishes.admit.filter(|joiner| joiner.node != node);
        }
    }

    fn wish(&mut self, event: &Event) {
        match event {
            Event::Leave => self.wishes.leave = true,
            Event::Switch(to) => self.wishes.switch = Some(*to),
            Event::Admit(joiner) => self.wishes.admit = Some(*joiner),
            _ if self.seat.is_some() => self.actions.push(Action::Declined(Change::Force)),
            _ => self.wishes.force = true,
        }
        self.reads.evidence();
    }
}

/// What others ask.
impl Member {
    /// When [`Event::Tick`] is due, if nothing else happens.
    #[must_use]
    pub fn next_timer(&self, now: Duration) -> Option<Duration> {
        let grace = self.settings.grace();
        let read =
            (self.reads.running.is_none() && self.wants_read(now)).then_some(self.reads.after);
        let peers = self.seat.iter().flat_map(Seat::peers);
        let doubted = |p: &Peer| p.doubted_at(&self.settings) + self.patience();
        let peers = peers.flat_map(|p| {
            let lapses = p.lapses_at(&self.settings);
            [doubted(p), p.released_at(&self.settings)].into_iter().chain(lapses)
        });
        let renew = self.seat.iter().filter(|s| s.peers.is_some()).map(|s| s.renew_at);
        let lead = (self.role() == Role::Returned).then_some(self.born + grace);
        peers.chain(renew).chain(read).chain(lead).filter(|&at| at > now).min()
    }

    /// 5.3: whether what the leg holds now may be answered. Asked with the data in hand.
    #[must_use]
    pub fn serves(&self, now: Duration) -> bool {
        let Some(seat) = &self.seat else { return false };
        let put = self.put.as_ref();
        let burnt = put.is_some_and(|p| p.excludes || now >= p.sent + self.settings.lease());
        let promised = |p: &Peer| !p.excluded && p.held(now, &self.settings);
        let stays = seat.stage == Stage::Open && seat.stopped.is_none() && !seat.has_yielded();
        stays && !burnt && seat.peers().iter().all(promised)
    }

    /// The view whose messages are heeded: the last one that was begun.
    #[must_use]
    pub fn view(&self) -> Option<View> {
        self.seat.as_ref().map(|s| s.view)
    }

    /// Whether the view is open; whether it is served is for [`Self::serves`] to say.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.seat.as_ref().is_some_and(|s| s.stage == Stage::Open)
    }

    /// At the primary: the linked members that have not answered START.
    #[must_use]
    pub fn gathering(&self) -> Vec<NodeId> {
        let Some(seat) = &self.seat else { return Vec::new() };
        let Stage::Gathering { started } = &seat.stage else { return Vec::new() };
        let nodes = seat.peers().iter().map(Peer::node);
        nodes.filter(|n| self.links.contains(n) && !started.contains(n)).collect()
    }

    /// The joiner that a put of unknown outcome takes in. From that put to the next record no round
    /// begins, and what the joiner has not acknowledged is not answered.
    #[must_use]
    pub fn admitting(&self) -> Option<Listed> {
        let (put, record) = (self.put.as_ref()?, self.record.as_ref()?);
        put.record.in_sync.iter().copied().find(|m| record.member(m.node).is_none())
    }

    /// Whether the data path has lost patience with the member on `node` already.
    #[must_use]
    pub fn is_stuck(&self, node: NodeId) -> bool {
        let peers = self.seat.iter().flat_map(Seat::peers);
        peers.into_iter().any(|p| p.node() == node && p.stuck)
    }

    /// Whether this is a member, and the one that puts writes in order.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        self.seat.is_some() && self.primary() == Some(self.me)
    }

    /// Who puts writes in order, by the record.
    #[must_use]
    pub fn primary(&self) -> Option<NodeId> {
        self.record.as_ref().map(|r| r.primary)
    }

    /// The latest record that is known.
    #[must_use]
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// The present incarnation.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The latest stamp that the member on `node` has answered: what orders to it carry (4.6).
    #[must_use]
    pub fn answered(&self, node: NodeId) -> Option<Stamp> {
        let peers = self.seat.iter().flat_map(Seat::peers);
        peers.filter(|p| p.node() == node).find_map(Peer::stamp)
    }

    /// What this replica is, by its own account. One whose leg is lost has nothing to bring:
    /// outside, though the record may still list it. One whose leg has failed holds what may be
    /// nowhere else, and may turn out to be the last: a member as long as it is listed.
    #[must_use]
    pub fn role(&self) -> Role {
        match &self.record {
            _ if self.leg == Leg::Dead => Role::Outside,
            _ if self.refused.is_some() => Role::Unknown,
            None => Role::Unknown,
            Some(_) if self.seat.is_some() => Role::Member,
            Some(record) if record.member(self.me).is_some() => Role::Returned,
            Some(_) => Role::Outside,
        }
    }

    /// What it says of itself to all others alike.
    fn standing(&self) -> Standing {
        let older = self.is_older().is_some();
        Standing { older, ..standing_of(self.incarnation, self.image, self.role()) }
    }

    /// Why it does not serve; nothing if it does.
    #[must_use]
    pub fn waits_for(&self, now: Duration) -> Option<Why> {
        if self.serves(now) {
            return None;
        }
        if self.leg == Leg::Dead {
            return Some(Why::LegDead);
        }
        if let Some(why) = self.refused {
            return Some(Why::Refused(why));
        }
        let Some(record) = &self.record else {
            return Some(Why::Unread { away: self.reads.away });
        };
        Some(match &self.seat {
            None if self.put.is_some() => Why::Changing,
            None => self.waits_outside(record),
            Some(seat) => self.waits_as_member(seat, record, now),
        })
    }

    fn waits_outside(&self, record: &Record) -> Why {
        if record.member(self.me).is_none() {
            return Why::Outside(record.primary);
        }
        if let Some(member) = record.others(self.me).find(|m| self.says_member(m)) {
            return Why::Returned(member.node);
        }
        let silent = record.others(self.me).filter(|m| !self.says_lost(m));
        let silent: Vec<_> = silent.map(|m| m.node).collect();
        let leader = self.preferred();
        if let Some(by) = self.must_not_lead()
            && (leader.is_none() || !silent.is_empty())
        {
            return Why::SetBack { by, silent };
        }
        let mute: Vec<_> = self.mute().collect();
        match leader {
            _ if self.image.holds_all() && mute.is_empty() => Why::Leads(self.me),
            _ if self.image.holds_all() => Why::Mute(mute),
            Some(leader) if silent.is_empty() => Why::Leads(leader),
            _ => Why::Blackout(silent),
        }
    }

    fn waits_as_member(&self, seat: &Seat, record: &Record, now: Duration) -> Why {
        let excluded: Vec<_> = self.excluded().collect();
        if self.put.is_some() {
            return Why::Changing;
        }
        if !excluded.is_empty() {
            return Why::Deciding(excluded);
        }
        if seat.stage == Stage::Aside {
            return Why::LegFailed;
        }
        if seat.stopped.is_some() {
            return Why::Leaving;
        }
        if seat.has_yielded() {
            return Why::Yielded(record.primary);
        }
        match &seat.stage {
            Stage::Draining { .. } => Why::Draining,
            Stage::Waiting => Why::Open(record.primary),
            Stage::Gathering { started } => {
                let missing = record.others(self.me).map(|m| m.node);
                Why::Gathering(missing.filter(|n| !started.contains(n)).collect())
            }
            Stage::Settling => Why::Settling,
            Stage::Open | Stage::Aside => {
                let silent = seat.peers().iter().filter(|p| !p.held(now, &self.settings));
                Why::Lease(silent.map(Peer::node).collect())
            }
        }
    }
}

fn standing_of(incarnation: Incarnation, image: Image, role: Role) -> Standing {
    let Image { epoch, config, clean, same_boot, .. } = image;
    let (older, shared) = (false, SharedLineage::default());
    Standing { incarnation, epoch, config, role, clean, same_boot, older, shared }
}

//! The simplest driver that keeps the rules of RFD 0010, 4.1, 4.2 and 6.6: one block, so every two
//! writes overlap and the leg's lock is held by one at a time.

use block::{Blocks, Lba};
use peer::{Entry, Incarnation, Kind, Lineage, NodeId, Seq, Tag, View};
use uuid::Uuid;

use super::super::super::record::{Member as Listed, Record};
use super::super::super::settle::settle;
use super::super::{Action, Change, Event, Judgement, Leg, Member, Say};
use super::world::{Held, Mistake, Msg, NOW, Request, Value, World, Written, at, id};

impl World {
    pub(super) fn tell(&mut self, n: usize, event: Event) {
        if self.mistake == Mistake::LeavesToTheLinked {
            self.take_sessions_for_life(n);
        }
        let forgets = self.mistake == Mistake::ForgetsTheFailure;
        let lineages = self.lineages(n);
        let Some(member) = &mut self.node(n).member else { return };
        member.remember(lineages);
        if forgets && matches!(event, Event::Put(_) | Event::Heard(_, Say::Start { .. })) {
            member.leg = Leg::Sound;
        }
        let actions = member.apply(NOW, event);
        member.normalise();
        for action in actions {
            self.perform(n, action);
        }
    }

    fn take_sessions_for_life(&mut self, n: usize) {
        let linked: Vec<_> = (0..self.nodes.len()).filter(|&o| self.linked(n, o)).collect();
        let Some(member) = &mut self.node(n).member else { return };
        let Some(seat) = member.seat.as_mut().filter(|s| s.stopped.is_some()) else { return };
        for other in linked {
            if let Some(peer) = seat.peer_mut(id(other)) {
                peer.attested = Some(NOW);
            }
        }
    }

    /// What is sent meanwhile is lost.
    pub(super) fn tell_quietly(&mut self, n: usize, event: Event) {
        let lineages = self.lineages(n);
        let Some(member) = &mut self.node(n).member else { return };
        member.remember(lineages);
        let actions = member.apply(NOW, event);
        member.normalise();
        for action in actions {
            if !matches!(action, Action::Send(_, Say::Standing(_))) {
                self.perform(n, action);
            }
        }
    }

    pub(super) fn perform(&mut self, n: usize, action: Action) {
        match action {
            Action::ReadRecord => self.node(n).reading = true,
            Action::Put { epoch, config, record } => {
                self.handed_over(n, &record);
                if matches!(record.in_sync[..], [only] if only.node == id(n)) {
                    self.leads_older(n);
                    self.record(n, record.history.lineage, &[], false);
                }
                self.puts.push(Request { asker: Some(n), epoch, config, record });
                self.tidy_puts();
            }
            Action::Send(to, say) => self.say(n, to, say),
            Action::Begin { view, record } => self.begin(n, view, record),
            Action::SendStarted(view) => {
                let entries = self.nodes[n].entries.clone();
                if let Some(primary) = self.member(n).and_then(Member::primary) {
                    self.send(n, at(primary), Msg::Started { view, entries });
                }
            }
            Action::Settle(_) => self.settle(n),
            Action::Opened(_) => self.opened(n),
            Action::Outside | Action::Refused(_) => {
                let node = self.node(n);
                node.entries.clear();
                node.begin = None;
                node.forget();
                self.fail_writes(n);
            }
            Action::Declined(Change::Admit(_)) => self.node(n).joiner = None,
            Action::Declined(_) => {}
        }
    }

    fn say(&mut self, n: usize, to: NodeId, say: Say) {
        match say {
            // Exchanged by a step of its own.
            Say::Renew { .. } | Say::Yield { .. } | Say::Yielded { .. } => {}
            Say::Start { view, record } => self.send(n, at(to), Msg::Start { view, record }),
            say if self.linked(n, at(to)) => self.tell(at(to), Event::Heard(id(n), say)),
            _ => {}
        }
    }

    fn begin(&mut self, n: usize, view: View, record: Option<Record>) {
        let node = self.node(n);
        node.forget();
        node.begin = Some((view, record));
        for (at, written) in &mut self.writes {
            if *at == n && matches!(written, Written::Taken { .. }) {
                *written = Written::Taken { asked: false };
            }
        }
        if self.mistake == Mistake::AdoptsWithoutDrain {
            self.finish_begin(n);
        }
    }

    pub(super) fn drain(&mut self, n: usize) {
        while self.nodes[n].entries.iter().any(|e| !e.applied) {
            self.apply(n);
        }
        self.finish_begin(n);
    }

    fn finish_begin(&mut self, n: usize) {
        let (view, record) = self.node(n).begin.take().expect("there was one");
        if let Some(record) = record {
            self.node(n).image = (record.epoch, record.config);
            let members: Vec<_> = record.in_sync.iter().map(|m| m.node).collect();
            self.inherit(n, &record);
            self.record(n, Lineage::first(record.epoch), &members, false);
        }
        self.tell(n, Event::Began(view));
    }

    /// The leg has done the oldest write that it was given.
    pub(super) fn apply(&mut self, n: usize) {
        let node = self.node(n);
        let Some(entry) = node.entries.iter_mut().find(|e| !e.applied) else { return };
        entry.applied = true;
        let Held { view, seq, write, .. } = *entry;
        node.leg.volatile = write;
        node.leg.marked = true;
        let joined = node.joined == Some(view);
        if self.view(n) != Some(view) && !joined || self.nodes[n].begin.is_some() {
            return;
        }
        let Some(primary) = self.member(n).and_then(Member::primary).map(at) else { return };
        if primary == n {
            self.acknowledged(n, id(n), seq);
        } else {
            self.send(n, primary, Msg::Applied { view, seq });
        }
    }

    /// The leg has done the oldest write that it was given, or a part of it, and says that it has
    /// not.
    pub(super) fn refuse(&mut self, n: usize) {
        self.left.refusals -= 1;
        let node = self.node(n);
        let Some(k) = node.entries.iter().position(|e| !e.applied) else { return };
        let write = node.entries.remove(k).write;
        node.leg.volatile = write;
        node.leg.marked = true;
        let (at, written) = &mut self.writes[usize::from(write) - 1];
        if *at == n && matches!(written, Written::Taken { .. }) {
            *written = Written::Failed;
        }
        let wish = self.mistake == Mistake::FailureIsAWish;
        self.tell(n, if wish { Event::Leave } else { Event::LegFailed });
    }

    fn view(&self, n: usize) -> Option<View> {
        self.member(n).and_then(Member::view)
    }

    /// Whether the lock of the primary is free, or the way to it is there.
    pub(super) fn can_ask(&self, n: usize) -> bool {
        let Some(member) = self.member(n).filter(|m| m.is_open()) else { return false };
        if member.is_primary() {
            self.nodes[n].entries.is_empty()
        } else {
            member.primary().is_some_and(|p| self.linked(n, at(p)))
        }
    }

    pub(super) fn ask(&mut self, w: usize) {
        let n = self.writes[w].0;
        let view = self.view(n).expect("open");
        let write = Value::try_from(w + 1).expect("few writes");
        self.writes[w].1 = Written::Taken { asked: true };
        let member = self.member(n).expect("open");
        if member.is_primary() {
            self.order(n, write);
        } else {
            let primary = at(member.primary().expect("open"));
            self.send(n, primary, Msg::Order { view, write });
        }
    }

    /// The primary gives the write its place, and sends it to all.
    fn order(&mut self, n: usize, write: Value) {
        let view = self.view(n).expect("open");
        let node = self.node(n);
        node.seq += 1;
        node.acks.clear();
        let seq = node.seq;
        node.entries.push(Held { view, seq, write, applied: false });
        for to in self.audience(n) {
            self.send(n, at(to), Msg::Write { view, seq, write });
        }
    }

    /// All whose application the primary needs, but itself.
    fn audience(&self, n: usize) -> Vec<NodeId> {
        let record = self.member(n).and_then(|m| m.record()).expect("a member");
        let joiner = self.nodes[n].joiner.map(|j| j.node);
        record.others(id(n)).map(|m| m.node).chain(joiner).collect()
    }

    fn acknowledged(&mut self, n: usize, from: NodeId, seq: u8) {
        let node = self.node(n);
        if !node.acks.contains(&from) {
            node.acks.push(from);
            node.acks.sort_unstable();
        }
        self.commit_if_all(n, seq);
    }

    fn commit_if_all(&mut self, n: usize, seq: u8) {
        let Some(view) = self.view(n) else { return };
        let audience = self.audience(n);
        let node = self.node(n);
        let place = (view, seq);
        let Some(&entry) = node.entries.iter().find(|e| (e.view, e.seq) == place) else { return };
        if !audience.iter().chain([&id(n)]).all(|m| node.acks.contains(m)) {
            return;
        }
        if node.settling {
            node.settling = false;
            node.acks.clear();
            self.tell(n, Event::Settled(entry.view));
            return;
        }
        node.entries.retain(|e| (e.view, e.seq) != place);
        node.acks.clear();
        self.applied_by_all(n, entry.write);
        for to in audience {
            self.send(n, at(to), Msg::Commit { view: entry.view, seq });
        }
        self.committed(n, entry.write);
    }

    /// Node `n` knows that the write is committed: its client is told, if it is one of its own.
    fn committed(&mut self, n: usize, write: Value) {
        let (at, written) = self.writes[usize::from(write) - 1];
        if at == n && matches!(written, Written::Taken { .. }) {
            self.answer(write);
        }
    }

    fn settle(&mut self, n: usize) {
        let view = self.view(n).expect("a member");
        let told = self.nodes[n].told.clone();
        let own = self.nodes[n].entries.iter().map(|e| (id(n), *e));
        let all: Vec<_> = told.into_iter().chain(own).collect();
        let origins = |w: Value| id(self.writes[usize::from(w) - 1].0);
        let settlement = match settle(all.iter().map(|(m, e)| (*m, e.entry(origins(e.write))))) {
            Ok(settlement) => settlement,
            Err(conflict) => return self.errors.push(conflict.to_string()),
        };
        let settled = settlement.settled.iter().map(|t| t.number as Value).collect();
        let copy =
            settlement.copies.first().filter(|_| self.mistake != Mistake::OpensWithoutSettling);
        let node = self.node(n);
        node.settled = settled;
        let Some(copy) = copy else {
            self.tell(n, Event::Settled(view));
            return;
        };
        let source = if copy.holders.contains(&id(n)) { id(n) } else { copy.holders[0] };
        // What the source has on its disk, whatever the entry says.
        let write = self.nodes[at(source)].leg.volatile;
        if self.view(at(source)) != Some(view) {
            return;
        }
        let tagged = copy.entry.tag.number as Value;
        if write != tagged && self.mistake == Mistake::None {
            self.errors.push(format!("the copy of {tagged} from {source} brings {write}"));
        }
        let holders = copy.holders.clone();
        let node = self.node(n);
        (node.seq, node.through, node.settling) = (1, 1, true);
        node.acks = holders.iter().copied().filter(|h| *h != id(n)).collect();
        node.entries.push(Held { view, seq: 1, write, applied: false });
        for to in self.audience(n) {
            if !holders.contains(&to) {
                self.send(n, at(to), Msg::Write { view, seq: 1, write });
            }
        }
    }

    fn opened(&mut self, n: usize) {
        let member = self.member(n).expect("a member");
        if !member.is_primary() {
            return;
        }
        let view = member.view().expect("a member");
        self.equal_at_open(n);
        let (through, settled) = (self.nodes[n].through, self.nodes[n].settled.clone());
        let newest = self.nodes[n].leg.volatile;
        for &write in settled.iter().filter(|w| **w == newest).chain(&settled) {
            self.applied_by_all(n, write);
        }
        for to in self.audience(n) {
            let settled = settled.clone();
            self.send(n, at(to), Msg::Open { view, through, settled });
        }
        self.close_settling(n, view, through, &settled);
    }

    fn close_settling(&mut self, n: usize, view: View, through: u8, settled: &[Value]) {
        self.node(n).entries.retain(|e| (e.view, e.seq) > (view, through));
        for &write in settled {
            self.committed(n, write);
        }
    }

    pub(super) fn can_deliver(&self, a: usize, b: usize, lane: usize) -> bool {
        let Some(msg) = self.lanes[a][b][lane].front() else { return false };
        let mine = self.view(b);
        let draining = self.nodes[b].begin.is_some();
        match msg {
            // Waits for the lock, or for the view.
            Msg::Order { view, .. } if mine == Some(*view) => !draining && self.can_ask(b),
            Msg::Write { view, .. } if mine == Some(*view) => !draining,
            Msg::Write { view, .. } => mine.is_none_or(|mine| *view < mine),
            _ => true,
        }
    }

    pub(super) fn deliver(&mut self, a: usize, b: usize, lane: usize) -> Result<(), String> {
        let msg = self.lanes[a][b][lane].pop_front().expect("checked");
        let current = |w: &Self, view| w.view(b) == Some(view) && w.nodes[b].begin.is_none();
        match msg {
            Msg::Start { view, record } => {
                self.tell(b, Event::Heard(id(a), Say::Start { view, record }));
            }
            Msg::Started { view, entries } => {
                if current(self, view) {
                    let told = &mut self.node(b).told;
                    told.retain(|(from, _)| *from != id(a));
                    told.extend(entries.into_iter().map(|e| (id(a), e)));
                    told.sort_by_key(|(from, e)| (*from, e.view, e.seq));
                }
                self.tell(b, Event::Started(id(a), view));
            }
            Msg::Open { view, through, settled } => {
                let before = self.member(b).is_some_and(Member::is_open);
                self.tell(b, Event::Open(id(a), view));
                let open = self.member(b).is_some_and(Member::is_open);
                if current(self, view) && open && !before {
                    self.close_settling(b, view, through, &settled);
                }
            }
            Msg::Order { view, write } if current(self, view) => self.order(b, write),
            Msg::Write { view, seq, write }
                if current(self, view) || self.nodes[b].joined == Some(view) =>
            {
                self.received(b, Held { view, seq, write, applied: false });
            }
            Msg::Applied { view, seq } if current(self, view) => {
                self.acknowledged(b, id(a), seq);
            }
            Msg::Commit { view, seq } => {
                let known = self.nodes[b].entries.iter().find(|e| (e.view, e.seq) == (view, seq));
                if let Some(write) = known.map(|e| e.write)
                    && (current(self, view) || self.nodes[b].joined == Some(view))
                {
                    self.node(b).entries.retain(|e| (e.view, e.seq) != (view, seq));
                    self.committed(b, write);
                }
            }
            Msg::Order { .. } | Msg::Write { .. } | Msg::Applied { .. } => {}
        }
        Ok(())
    }

    /// A write overlaps the one before it in the same view: that one is committed (4.1).
    fn received(&mut self, n: usize, entry: Held) {
        let node = self.node(n);
        let earlier: Vec<_> =
            node.entries.iter().filter(|e| e.view == entry.view).copied().collect();
        node.entries.retain(|e| e.view != entry.view);
        node.entries.push(entry);
        for known in earlier {
            if !known.applied {
                self.errors
                    .push(format!("node {n} lets go of {known:?}, which it has not applied"));
            }
            self.committed(n, known.write);
        }
    }

    pub(super) fn can_join(&self, t: usize, p: usize) -> bool {
        let (Some(joiner), Some(primary)) = (self.member(t), self.member(p)) else { return false };
        joiner.role() == peer::Role::Outside
            && joiner.record() == primary.record()
            && primary.is_primary()
            && self.serves(p)
            && primary.put.is_none()
            && self.nodes[p].joiner.is_none()
            && self.nodes[p].entries.is_empty()
            && joiner.record().is_some_and(|r| r.image(id(t)).is_some())
    }

    /// JOIN, the copy and the barrier at once; from here on writes go to the joiner as well. Nothing is
    /// copied where nothing is marked, unless what both have recorded shows that marks are missing.
    pub(super) fn join(&mut self, t: usize, p: usize) {
        self.left.joins -= 1;
        let shared = |n: usize, of: usize| {
            let image = Uuid::from_u128(u128::from(id(of).0));
            let all = &self.nodes[n].lineages.shared;
            all.iter().find(|(i, _)| *i == image).map(|(_, s)| *s).unwrap_or_default()
        };
        let primary = self.member(p).expect("checked");
        let judged = match self.mistake {
            Mistake::TrustsJoiners => Judgement::Continues,
            _ => primary.judge(&shared(p, t), &shared(t, p), false),
        };
        let marked = self.nodes[p].leg.marked || self.nodes[t].leg.marked;
        let source = match judged {
            Judgement::Newer => return,
            Judgement::Continues if !marked => t,
            _ => p,
        };
        let value = self.nodes[source].leg.volatile;
        let view = self.view(p);
        let known = self.nodes[p].lineages.shared.iter();
        let reached = known.map(|(image, shared)| (*image, shared.reached)).collect();
        let joiner = self.node(t);
        joiner.set_back &= source == t;
        joiner.lives += 1;
        let incarnation = Incarnation(u64::from(id(t).0) * 100 + joiner.lives);
        joiner.inheritance = Some((incarnation, reached));
        let listed = Listed { node: id(t), incarnation };
        joiner.entries.clear();
        (joiner.leg.volatile, joiner.leg.durable, joiner.leg.marked) = (value, value, true);
        joiner.joined = view;
        let record = joiner.member.as_ref().and_then(|m| m.record()).expect("checked");
        joiner.image = (record.epoch, record.config);
        self.tell(t, Event::Joining(incarnation));
        let node = self.node(p);
        node.joiner = Some(listed);
        node.leg.durable = node.leg.volatile;
        self.tell(p, Event::Admit(listed));
    }

    /// The session that an attempt lives in has ended. What the joiner has not acknowledged stays
    /// unanswered if the store may have it admitted already.
    pub(super) fn lose_joiner(&mut self, n: usize, other: NodeId) {
        let primary = self.member(n).and_then(Member::primary);
        let burnt = self.member(n).is_some_and(|m| m.put.is_some());
        let node = self.node(n);
        if primary == Some(other) {
            node.joined = None;
        }
        if node.joiner.is_some_and(|j| j.node == other) && !burnt {
            node.joiner = None;
            let seq = node.seq;
            self.tell(n, Event::Withdraw(other));
            self.commit_if_all(n, seq);
        }
    }
}

impl Held {
    fn entry(&self, node: NodeId) -> Entry {
        Entry {
            view: self.view,
            seq: Seq(u64::from(self.seq)),
            tag: Tag { node, number: u64::from(self.write) },
            range: Blocks::new(Lba(0), 1),
            kind: Kind::Write,
            fua: false,
        }
    }
}

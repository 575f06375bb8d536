//! How a member comes to change the record (RFD 0010, 5.2 and 5.4 to 5.6).
//!
//! Every put is sent while a quorum read is handled that began after its cause: so a store that is
//! away stops nobody who had no need of it.

use std::time::Duration;

use block::Epoch;
use peer::{Incarnation, NodeId, Role, SharedLineage, Standing};

use super::super::record::{Member as Listed, Put, Record};
use super::{Action, Change, Leg, Member, Refusal, Say};

/// Reads of the record, one at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Reads {
    /// One is under way; whether it began too early to judge what has come up since.
    pub(super) running: Option<Stale>,
    /// Something says that the record has changed.
    pub(super) urgent: bool,
    /// Not before this.
    pub(super) after: Duration,
    /// Whether the last one was not answered.
    pub(super) away: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stale(pub(super) bool);

impl Reads {
    /// Something has come up that only a read that begins from now on can judge.
    pub(super) fn evidence(&mut self) {
        match &mut self.running {
            Some(stale) => *stale = Stale(true),
            None if !self.away => self.after = Duration::ZERO,
            None => {}
        }
    }

    /// Something says that the record has changed.
    pub(super) fn ask(&mut self) {
        self.urgent = true;
        self.evidence();
    }
}

/// A put whose outcome is not known.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pending {
    pub(super) record: Record,
    /// When it was first sent.
    pub(super) sent: Duration,
    /// Whether it takes somebody out.
    pub(super) excludes: bool,
    /// Whether the driver has yet to answer.
    pub(super) running: bool,
}

/// Changes that somebody asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Wishes {
    pub(super) leave: bool,
    pub(super) switch: Option<NodeId>,
    pub(super) admit: Option<Listed>,
    pub(super) force: bool,
}

impl Wishes {
    /// Whether any wants to be looked at. Leaving has a course of its own.
    fn any(&self) -> bool {
        self.switch.is_some() || self.admit.is_some() || self.force
    }

    /// These were meant for the configuration that has ended.
    pub(super) fn epoch_ends(&mut self) {
        (self.switch, self.admit) = (None, None);
    }
}

/// What a wish comes to.
enum Verdict {
    Put(Record),
    NotNow,
    Never,
}

impl Member {
    /// Whether there is a reason to read the record.
    pub(super) fn wants_read(&self, now: Duration) -> bool {
        let put = self.put.as_ref();
        let idle = put.is_none();
        self.record.is_none() && self.refused.is_none()
            || self.reads.urgent
            || put.is_some_and(|p| !p.running)
            || idle && (self.wishes.any() || self.wants_to_go() || self.may_lead(now))
            || idle && (!self.doubted(now).is_empty() || self.remaining(now).is_some())
    }

    /// The record, if it lists this replica as a member.
    pub(super) fn listed(&self) -> Option<&Record> {
        self.record.as_ref().filter(|r| r.has(self.me, self.incarnation) && !self.void)
    }

    pub(super) fn read(&mut self, now: Duration, record: Record, fresh: u128) {
        let stale = self.reads.running.take() == Some(Stale(true));
        self.reads.away = false;
        let known = self.record.as_ref();
        if known.is_some_and(|k| k.epoch > record.epoch) && !self.settings.believes_store() {
            if !stale {
                let image = known.map_or(self.image.epoch, |k| k.epoch);
                self.refuse(Refusal::ImageAhead { image, store: record.epoch });
            }
            return;
        }
        if let Some(why) = self.contradiction(&record).or_else(|| self.overtaken(&record, stale)) {
            self.reads.urgent = false;
            self.refuse(why);
            return;
        }
        let new = known.is_none_or(|k| k.epoch < record.epoch) || self.refused.is_some();
        if new {
            self.learn(now, record);
        }
        if !stale {
            self.reads.urgent = false;
            self.decide(now, fresh);
            if self.wants_read(now) {
                // What is wished for cannot be done yet.
                self.reads.after = now + self.settings.renewal();
            }
        }
    }

    pub(super) fn read_failed(&mut self, now: Duration) {
        self.reads.running = None;
        self.reads.away = true;
        self.reads.after = now + self.settings.renewal();
        if self.put.is_some() {
            return;
        }
        let Some(seat) = &mut self.seat else { return };
        // It may be this node that is cut off: the others need its promises.
        let mut back = Vec::new();
        for peer in seat.peers.iter_mut().flatten().filter(|p| p.excluded) {
            (peer.excluded, peer.yielded) = (false, false);
            back.push(peer.node());
        }
        if self.leg == Leg::Sound {
            // Leaving has to wait, serving need not.
            seat.stopped = None;
        }
        // Who was asked to yield serves again only in another view.
        if let Some(node) = back.into_iter().find(|node| self.links.contains(node)) {
            self.next_round(node);
        }
    }

    /// A replica that was linked before the read began knows of an epoch that the store does not; or
    /// one did that is away by now, which is how the record was refused before.
    fn overtaken(&self, record: &Record, stale: bool) -> Option<Refusal> {
        if self.settings.believes_store() {
            return None;
        }
        let ahead = |epoch: Epoch, config: u128| {
            epoch > record.epoch || epoch == record.epoch && config != record.config
        };
        let away = |node: NodeId| !self.standings.contains_key(&node);
        match self.refused {
            Some(why @ Refusal::PeerAhead { node, epoch, config })
                if ahead(epoch, config) && away(node) && record.image(node).is_some() =>
            {
                Some(why)
            }
            _ if stale => None,
            _ => {
                let mut heard = self.standings.iter();
                let (&node, standing) = heard.find(|(_, s)| ahead(s.epoch, s.config))?;
                let (epoch, config) = (standing.epoch, standing.config);
                Some(Refusal::PeerAhead { node, epoch, config })
            }
        }
    }

    pub(super) fn put_ended(&mut self, now: Duration, outcome: Put) {
        let Some(put) = &mut self.put else { return };
        put.running = false;
        if outcome == Put::Done {
            let record = put.record.clone();
            // Nobody has to wait until the store gets round to it.
            for replica in record.replicas.iter().filter(|r| r.node != self.me) {
                self.actions.push(Action::Send(replica.node, Say::Newer(record.epoch)));
            }
            self.learn(now, record);
        } else {
            self.reads.ask();
        }
    }

    /// The record is what this replica takes it for, by a read that knows all that has happened.
    fn decide(&mut self, now: Duration, fresh: u128) {
        let Some(record) = self.record.clone() else { return };
        if let Some(put) = &mut self.put {
            if !put.running {
                put.running = true;
                let (epoch, config) = (record.epoch, record.config);
                let record = put.record.clone();
                self.actions.push(Action::Put { epoch, config, record });
            }
            return;
        }
        let forced = self.wishes.force && self.seat.is_none();
        let next = if self.seat.is_some() {
            self.change_members(now, &record).or_else(|| self.planned(&record))
        } else {
            self.decline_to_leave();
            self.alone(now, &record, fresh)
        };
        if let Some(next) = next {
            let mut next = next.next(fresh);
            next.history = self.history(&record, &next, forced);
            let kept = |m: &Listed| next.member(m.node).is_some();
            let excludes = !record.in_sync.iter().all(kept);
            let (epoch, config) = (record.epoch, record.config);
            self.put = Some(Pending { record: next.clone(), sent: now, excludes, running: true });
            self.actions.push(Action::Put { epoch, config, record: next });
        }
    }

    /// Whether the member listed so is linked, and still what is listed.
    pub(super) fn fit(&self, listed: &Listed) -> bool {
        let is = |s: &Standing| s.role == Role::Member && s.incarnation == listed.incarnation;
        self.links.contains(&listed.node) && self.standings.get(&listed.node).is_some_and(is)
    }

    fn planned(&mut self, record: &Record) -> Option<Record> {
        if self.seat.as_ref().is_some_and(|s| s.stopped.is_some()) {
            return None;
        }
        if let Some(joiner) = self.wishes.admit {
            match self.admit(record, joiner) {
                Verdict::NotNow => {}
                Verdict::Put(next) => return Some(next),
                Verdict::Never => {
                    self.wishes.admit = None;
                    self.actions.push(Action::Declined(Change::Admit(joiner.node)));
                }
            }
        }
        let to = self.wishes.switch?;
        match self.switch(record, to) {
            Verdict::NotNow => None,
            Verdict::Put(next) => Some(next),
            Verdict::Never => {
                self.wishes.switch = None;
                self.actions.push(Action::Declined(Change::Switch(to)));
                None
            }
        }
    }

    fn admit(&self, record: &Record, joiner: Listed) -> Verdict {
        let able = record.image(joiner.node).is_some() && record.member(joiner.node).is_none();
        if record.primary != self.me || !able || !self.is_open() {
            return Verdict::Never;
        }
        if self.excluded().next().is_some() {
            return Verdict::NotNow;
        }
        let mut next = record.clone();
        next.in_sync.push(joiner);
        next.in_sync.sort_unstable_by_key(|m| m.node);
        for replica in next.replicas.iter_mut().filter(|r| r.node == joiner.node) {
            replica.new = false;
        }
        Verdict::Put(next)
    }

    fn switch(&self, record: &Record, to: NodeId) -> Verdict {
        if record.primary != self.me || to == self.me {
            return Verdict::Never;
        }
        match record.member(to) {
            Some(listed) if self.fit(&listed) => {}
            _ => return Verdict::Never,
        }
        if self.excluded().next().is_some() || !self.is_open() {
            return Verdict::NotNow;
        }
        Verdict::Put(Record { primary: to, ..record.clone() })
    }

    /// 5.6: what a replica may do that is no member.
    fn alone(&mut self, now: Duration, record: &Record, fresh: u128) -> Option<Record> {
        let force = std::mem::take(&mut self.wishes.force);
        let replica = record.replicas.iter().find(|r| r.node == self.me);
        // What was never in sync holds nothing that is worth going on with; and whom a listed one
        // tells that it is a member, there is nothing to force.
        let meant = replica.is_some_and(|r| !r.new)
            && !record.others(self.me).any(|m| self.says_member(&m));
        let able = replica.is_some() && self.leg != Leg::Dead && (meant || !force);
        if force && !able {
            self.actions.push(Action::Declined(Change::Force));
        }
        if !able || !(force || self.may_lead(now)) {
            return None;
        }
        if std::mem::take(&mut self.void) {
            // What it was before may still be listed, and is not what leads.
            let [_, _, _, _, _, _, _, _, low @ ..] = fresh.to_be_bytes();
            self.incarnation = Incarnation(u64::from_be_bytes(low));
        }
        let alone = vec![Listed { node: self.me, incarnation: self.incarnation }];
        let in_sync = self.first_members(record).filter(|_| !force).unwrap_or(alone);
        let born = record.next(fresh).epoch;
        Some(Record { in_sync, primary: self.me, born, ..record.clone() })
    }

    /// The members of a new volume: all replicas that its first record lists, if none of them was
    /// ever a member, they are all there, and this one is to lead. Nobody has promised or written
    /// anything, so there is no grace time to wait out and nothing that one could lack (5.6 e).
    fn first_members(&self, record: &Record) -> Option<Vec<Listed>> {
        let unused =
            |s: &Standing| s.role == Role::Returned && s.epoch == Epoch::default() && !s.older;
        let may = record.is_first() && unused(&self.standing()) && !self.image.lost;
        if !may || self.preferred() != Some(self.me) {
            return None;
        }
        let present = |m: &Listed| {
            let incarnation = match self.standings.get(&m.node) {
                _ if m.node == self.me => self.incarnation,
                heard => heard.filter(|s| unused(s))?.incarnation,
            };
            Some(Listed { node: m.node, incarnation })
        };
        record.in_sync.iter().map(present).collect()
    }

    /// Whether this replica has returned and may lead after a blackout.
    fn may_lead(&self, now: Duration) -> bool {
        let Some(record) = self.record.as_ref().filter(|_| self.role() == Role::Returned) else {
            return false;
        };
        if self.first_members(record).is_some() {
            return true;
        }
        let waited = now >= self.born + self.settings.grace();
        let continuous = record.others(self.me).any(|m| self.says_member(&m));
        let last = record.in_sync.len() == 1;
        let heard = || record.others(self.me).all(|m| self.says_lost(&m));
        let clean = self.image.holds_all() && self.mute().next().is_none();
        let allowed = last || clean || heard() && self.preferred() == Some(self.me);
        waited && !continuous && allowed && self.must_not_lead().is_none()
    }

    /// Replicas that have a session and have not read the record yet: they may know this image to be an
    /// older copy, and can say so only then (RFD 0032, attack 7).
    pub(super) fn mute(&self) -> impl Iterator<Item = NodeId> {
        let has_read = |node: &NodeId| {
            self.standings.get(node).is_some_and(|said| {
                said.role != Role::Unknown || said.shared != SharedLineage::default()
            })
        };
        self.links.iter().copied().filter(move |node| !has_read(node))
    }

    /// Whether the listed one says that it is a member.
    pub(super) fn says_member(&self, listed: &Listed) -> bool {
        self.standings.get(&listed.node).is_some_and(|s| s.role == Role::Member)
    }

    /// Whether the listed one says that it is not continuous any more.
    pub(super) fn says_lost(&self, listed: &Listed) -> bool {
        let standing = self.standings.get(&listed.node);
        standing.is_some_and(|s| matches!(s.role, Role::Returned | Role::Outside))
    }

    /// 5.6 c: who of the returned leads. An older copy does not.
    pub(super) fn preferred(&self) -> Option<NodeId> {
        let record = self.record.as_ref()?;
        let mine = (self.me, self.standing());
        let others = self.standings.iter().map(|(&n, &s)| (n, s));
        others
            .chain([mine])
            .filter(|(n, s)| s.role == Role::Returned && record.member(*n).is_some() && !s.older)
            .min_by_key(|(n, s)| (!s.same_boot, *n != record.primary, *n))
            .map(|(n, _)| n)
    }

    /// Says what this replica is to those who have not heard.
    pub(super) fn announce(&mut self) {
        let standing = self.standing();
        if self.announced == standing {
            return;
        }
        self.announced = standing;
        for &node in &self.links {
            let standing = self.standing_for(node);
            self.actions.push(Action::Send(node, Say::Standing(standing)));
        }
    }
}

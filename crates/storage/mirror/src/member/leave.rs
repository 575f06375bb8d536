//! Who remains: how members go, and are put out (RFD 0010, 5.4 and 5.5).
//!
//! Nobody hands the volume to the dead. A member that goes first stops serving; then it needs a
//! sign of life, asked for after that, from everybody that it leaves the volume to.

use std::time::Duration;

use peer::NodeId;

use super::super::record::{Member as Listed, Record};
use super::view::Stage;
use super::{Action, Change, Leg, Member, Peer, Seat};

impl Member {
    /// The leg has refused an operation. A replica that is alone has nobody to leave the volume to:
    /// what it holds is the volume, and no joiner may have got anything else. If it has asked for an
    /// admission it may not be alone any more.
    pub(super) fn leg_failed(&mut self, now: Duration) {
        let alone = self.listed().is_some_and(|r| r.in_sync.len() == 1);
        if alone && self.admitting().is_none() {
            if let Some(joiner) = self.wishes.admit.take() {
                self.actions.push(Action::Declined(Change::Admit(joiner.node)));
            }
        } else if self.leg == Leg::Sound {
            self.leg = Leg::Failed;
            self.step_aside(now);
        }
    }

    /// Takes no part in any view of this epoch from now on: what the leg holds is not what it
    /// should hold. It promises nothing either, so the others get on without it even if it cannot
    /// reach the store.
    pub(super) fn step_aside(&mut self, now: Duration) {
        let (me, Some(seat), Some(record)) = (self.me, &mut self.seat, &self.record) else {
            return;
        };
        seat.stage = Stage::Aside;
        if seat.stopped.is_none() {
            seat.stop(now);
        }
        if seat.peers.is_none() {
            // The epoch may never be adopted here.
            seat.peers = Some(record.others(me).map(|m| Peer::new(m, now)).collect());
        }
        self.reads.evidence();
    }

    /// What the record should say about who is in sync, if it can be put now.
    pub(super) fn change_members(&mut self, now: Duration, record: &Record) -> Option<Record> {
        self.give_up(now);
        self.go(now, record);
        let in_sync = self.remaining(now)?;
        let stays = |node| in_sync.iter().any(|m| m.node == node);
        let primary = if stays(record.primary) {
            record.primary
        } else if stays(self.me) {
            self.me
        } else {
            let linked = in_sync.iter().find(|m| self.fit(m));
            linked.or(in_sync.first())?.node
        };
        Some(Record { in_sync, primary, ..record.clone() })
    }

    /// Heeds the wish to leave: stops serving, or declines.
    fn go(&mut self, now: Duration, record: &Record) {
        if !self.wishes.leave || self.leg != Leg::Sound {
            return;
        }
        let remains = self.heirs(record);
        let Some(seat) = &mut self.seat else { return };
        if !remains {
            seat.stopped = None;
            self.decline_to_leave();
        } else if seat.peers.is_some() && seat.stopped.is_none() {
            seat.stop(now);
        }
    }

    pub(super) fn decline_to_leave(&mut self) {
        if std::mem::take(&mut self.wishes.leave) {
            self.actions.push(Action::Declined(Change::Leave));
        }
    }

    /// Whether somebody is there to leave the volume to.
    fn heirs(&self, record: &Record) -> bool {
        let excluded = |node| self.excluded().any(|n| n == node);
        record.others(self.me).any(|m| self.fit(&m) && !excluded(m.node))
    }

    /// Whether the wish to leave needs a read to get on.
    pub(super) fn wants_to_go(&self) -> bool {
        let Some(seat) = &self.seat else { return self.wishes.leave };
        let heirs = self.record.as_ref().is_some_and(|r| self.heirs(r));
        self.wishes.leave
            && self.leg == Leg::Sound
            && (!heirs || seat.peers.is_some() && seat.stopped.is_none())
    }

    /// 5.5: gives up who is silent.
    fn give_up(&mut self, now: Duration) {
        for node in self.doubted(now) {
            let Some(seat) = &mut self.seat else { return };
            // It is asked to yield at once.
            seat.renew_at = now;
            if let Some(peer) = seat.peer_mut(node) {
                peer.excluded = true;
            }
        }
    }

    /// How much longer a member whose leg has failed waits for others: they go on without it, if
    /// they can, before it goes on without them.
    pub(super) fn patience(&self) -> Duration {
        if self.leg == Leg::Sound { Duration::ZERO } else { self.settings.grace() }
    }

    /// Who is silent, and has not been given up yet. A lost leg gives up nobody unless somebody
    /// else remains.
    pub(super) fn doubted(&self, now: Duration) -> Vec<NodeId> {
        let Some(seat) = &self.seat else { return Vec::new() };
        let settings = &self.settings;
        let sound = self.leg == Leg::Sound;
        if self.leg == Leg::Dead && !seat.peers().iter().any(|p| p.attests(now, settings)) {
            return Vec::new();
        }
        let silent = |p: &Peer| now >= p.doubted_at(settings) + self.patience();
        let doubted = |p: &&Peer| !p.excluded && (sound && p.stuck || silent(p));
        seat.peers().iter().filter(doubted).map(Peer::node).collect()
    }

    /// Who is to be in sync, if there is something to change and nothing more to wait for: all that
    /// were given up have stopped by now, and all that a leaver leaves behind are alive.
    pub(super) fn remaining(&self, now: Duration) -> Option<Vec<Listed>> {
        let (seat, record) = (self.seat.as_ref()?, self.record.as_ref()?);
        let released = |p: &Peer| p.is_released(now, &self.settings);
        if !seat.peers().iter().filter(|p| p.excluded).all(released) {
            return None;
        }
        let rest: Vec<_> = seat.peers().iter().filter(|p| !p.excluded).collect();
        let goes = seat.stopped.is_some() && !rest.is_empty();
        if goes && !rest.iter().all(|p| self.lives(p, now)) {
            return None;
        }
        // Alone, only the last one's own leg can stand in the way.
        let changes = goes || rest.len() < seat.peers().len() && self.leg != Leg::Dead;
        let stays = |m: &Listed| {
            if m.node == self.me { !goes } else { rest.iter().any(|p| p.node() == m.node) }
        };
        changes.then(|| record.in_sync.iter().copied().filter(stays).collect())
    }

    /// Whether the member has given a sign of life since this one stopped serving, and has not said
    /// since then that it holds nothing any more.
    fn lives(&self, peer: &Peer, now: Duration) -> bool {
        let other = |s: &peer::Standing| s.incarnation != peer.listed.incarnation;
        let returned = self.standings.get(&peer.node()).is_some_and(other);
        peer.attests(now, &self.settings) && !returned && !self.says_lost(&peer.listed)
    }

    pub(super) fn excluded(&self) -> impl Iterator<Item = NodeId> + '_ {
        let peers = self.seat.iter().flat_map(Seat::peers);
        peers.filter(|p| p.excluded).map(Peer::node)
    }
}

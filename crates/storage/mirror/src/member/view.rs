//! How a member comes from one view to the next (RFD 0010, 5.7).

use std::time::Duration;

use peer::{Lineage, NodeId, View};

use super::super::record::Record;
use super::lease::Peer;
use super::{Action, Change, Leg, Member, Refusal, Say};

/// A member's place in a view of an epoch that lists it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Seat {
    pub(super) view: View,
    pub(super) stage: Stage,
    /// The others, once the epoch has been adopted: leases run from then on.
    pub(super) peers: Option<Vec<Peer>>,
    /// When promises are asked for next.
    pub(super) renew_at: Duration,
    /// Since when it serves no more, because it is about to go (5.4).
    pub(super) stopped: Option<Duration>,
    /// The last view in which it was told to serve no more (5.5).
    pub(super) yielded: Option<View>,
}

/// How far a member has come in its view.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    /// The driver ends the older views. `asked`: START of this view has come.
    Draining { asked: bool },
    /// Not the primary: everything has been told, or START has yet to come.
    Waiting,
    /// The primary: START is out, and these have answered.
    Gathering { started: Vec<NodeId> },
    /// The primary: the members are made equal.
    Settling,
    /// OPEN has been said.
    Open,
    /// The leg has failed: takes part in nothing, until it is out or the last.
    Aside,
}

impl Seat {
    fn new(view: View) -> Self {
        let stage = Stage::Draining { asked: false };
        Self { view, stage, peers: None, renew_at: Duration::ZERO, stopped: None, yielded: None }
    }

    /// Whether the others, as far as there are sessions, know of its view; of one that takes no part any more
    /// there is nothing to know.
    pub(super) fn is_announced(&self) -> bool {
        !matches!(self.stage, Stage::Draining { .. } | Stage::Aside)
    }

    /// Whether it has been told to serve no more in its view.
    pub(super) fn has_yielded(&self) -> bool {
        self.yielded.is_some_and(|view| view >= self.view)
    }

    pub(super) fn peers(&self) -> &[Peer] {
        self.peers.as_deref().unwrap_or_default()
    }

    pub(super) fn peer_mut(&mut self, node: NodeId) -> Option<&mut Peer> {
        self.peers.iter_mut().flatten().find(|p| p.node() == node)
    }

    /// Serves no more: what others promise from now on is a sign of life to one who goes.
    pub(super) fn stop(&mut self, now: Duration) {
        self.stopped = Some(now);
        self.renew_at = now;
        self.peers.iter_mut().flatten().for_each(|p| p.attested = None);
    }
}

impl Member {
    /// A record above all that were known: from the store, from a START, or of an own put.
    pub(super) fn learn(&mut self, now: Duration, record: Record) {
        self.put = None;
        self.refused = None;
        self.wishes.epoch_ends();
        if self.record.is_some() && std::mem::take(&mut self.wishes.force) {
            // Somebody else may have gone on: that is for the operator to see first.
            self.actions.push(Action::Declined(Change::Force));
        }
        self.reads.evidence();
        self.set_back.retain(|node| !record.history.set_back.contains(node));
        let view = View::first(record.epoch);
        let alone = record.in_sync.len() == 1;
        self.record = Some(record);
        self.seat = self.listed().map(|_| Seat::new(view));
        if self.seat.is_some() && alone && self.leg == Leg::Failed {
            // What it holds is what the volume holds.
            self.leg = Leg::Sound;
        }
        if self.seat.is_some() && self.leg == Leg::Sound {
            self.begin(view, false);
            return;
        }
        self.wishes.leave &= self.seat.is_some();
        self.step_aside(now);
        self.actions.push(Action::Outside);
    }

    /// Adopts `view`, of the epoch that is known.
    fn begin(&mut self, view: View, asked: bool) {
        let burnt = self.put.is_some();
        let record = self.record.clone().filter(|r| r.epoch > self.image.epoch);
        let Some(seat) = &mut self.seat else { return };
        seat.view = view;
        seat.stage = Stage::Draining { asked };
        if !burnt {
            seat.peers.iter_mut().flatten().for_each(Peer::take_back);
            self.wishes.admit = None;
        }
        self.actions.push(Action::Begin { view, record });
    }

    pub(super) fn began(&mut self, now: Duration, view: View) {
        let (Some(seat), Some(record)) = (&mut self.seat, &self.record) else { return };
        if seat.view != view {
            return;
        }
        if self.image.epoch < record.epoch {
            self.image.epoch = record.epoch;
            self.image.config = record.config;
        }
        // From here on its leg may be ahead of others.
        self.image.clean = false;
        let Stage::Draining { asked } = seat.stage else { return };
        if seat.peers.is_none() {
            seat.peers = Some(record.others(self.me).map(|m| Peer::new(m, now)).collect());
            seat.renew_at = now;
        }
        if record.primary == self.me {
            seat.stage = Stage::Gathering { started: Vec::new() };
            let record = record.clone();
            for node in record.others(self.me).map(|m| m.node) {
                if self.links.contains(&node) {
                    let say = Say::Start { view, record: record.clone() };
                    self.actions.push(Action::Send(node, say));
                }
            }
            self.settle_if_all();
        } else {
            seat.stage = Stage::Waiting;
            if asked {
                self.actions.push(Action::SendStarted(view));
            }
        }
    }

    /// The primary begins a round when a member's session comes up. Not after it has asked the
    /// store for a change: what it asked for may count on this very view (5.7). Nor while it drains
    /// for a view that it has told nobody of.
    pub(super) fn next_round(&mut self, node: NodeId) {
        let (Some(seat), Some(record)) = (&self.seat, &self.record) else { return };
        let concerned = record.primary == self.me && record.others(self.me).any(|m| m.node == node);
        if concerned && self.put.is_none() && seat.is_announced() {
            self.begin(seat.view.next_round(), false);
        }
    }

    pub(super) fn start(&mut self, now: Duration, from: NodeId, view: View, record: Record) {
        if record.primary != from || record.epoch != view.epoch || from == self.me {
            return;
        }
        let known = self.record.as_ref().map_or(self.image.epoch, |r| r.epoch);
        if view.epoch < known {
            self.actions.push(Action::Send(from, Say::Newer(known)));
            return;
        }
        if let Some(why) = self.contradiction(&record) {
            self.refuse(why);
            return;
        }
        if self.record.as_ref().is_none_or(|known| known.epoch < record.epoch) {
            self.learn(now, record);
        }
        let Some(seat) = self.seat.as_mut().filter(|s| s.stage != Stage::Aside) else { return };
        if view > seat.view {
            self.begin(view, true);
        } else if view == seat.view {
            match &mut seat.stage {
                Stage::Draining { asked } => *asked = true,
                _ => self.actions.push(Action::SendStarted(view)),
            }
        }
    }

    /// What speaks against `record` in what is known for certain.
    pub(super) fn contradiction(&self, record: &Record) -> Option<Refusal> {
        if self.settings.believes_store() {
            return None;
        }
        let (store, image) = (record.epoch, self.image.epoch);
        if image > store {
            return Some(Refusal::ImageAhead { image, store });
        }
        let known = self.record.as_ref().is_some_and(|r| r.epoch == store && *r != *record);
        if known || image == store && self.image.config != record.config {
            return Some(Refusal::OtherConfig { epoch: store });
        }
        None
    }

    pub(super) fn refuse(&mut self, why: Refusal) {
        if self.refused == Some(why) {
            return;
        }
        // What it held as a member is gone: it can be one again only in another incarnation.
        self.void |= self.seat.take().is_some();
        self.put = None;
        self.refused = Some(why);
        self.actions.push(Action::Refused(why));
    }

    pub(super) fn started(&mut self, from: NodeId, view: View) {
        let Some(seat) = self.seat.as_mut().filter(|s| s.view == view) else { return };
        let listed = seat.peers().iter().any(|p| p.node() == from);
        let Stage::Gathering { started } = &mut seat.stage else { return };
        if listed && !started.contains(&from) {
            started.push(from);
            started.sort_unstable();
        }
        self.settle_if_all();
    }

    fn settle_if_all(&mut self) {
        let Some(seat) = &mut self.seat else { return };
        let Stage::Gathering { started } = &seat.stage else { return };
        if started.len() == seat.peers().len() {
            seat.stage = Stage::Settling;
            self.actions.push(Action::Settle(seat.view));
        }
    }

    pub(super) fn settled(&mut self, view: View) {
        let Some(seat) = self.seat.as_mut().filter(|s| s.view == view) else { return };
        if seat.stage == Stage::Settling {
            seat.stage = Stage::Open;
            self.recorded(Lineage::first(view.epoch));
            self.actions.push(Action::Opened(view));
        }
    }

    pub(super) fn opened(&mut self, from: NodeId, view: View) {
        let primary = self.primary();
        let Some(seat) = self.seat.as_mut().filter(|s| s.view == view) else { return };
        if primary == Some(from) && seat.stage == Stage::Waiting {
            seat.stage = Stage::Open;
            // All have adopted the epoch.
            self.recorded(Lineage::first(view.epoch));
            self.actions.push(Action::Opened(view));
        }
    }
}

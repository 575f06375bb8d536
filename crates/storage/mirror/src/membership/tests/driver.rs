//! The simplest driver that keeps the rules of RFD 0010, 4.1, 4.2 and 6.6: one block, so every two
//! writes overlap and the leg's lock is held by one at a time.

use block::{Blocks, Lba};
use peer::{DataGeneration, Incarnation, NodeId, PreparedEntry, Seq, View, WriteId, WriteKind};
use uuid::Uuid;

use super::super::super::config::{InSyncMember as Listed, MirrorConfig};
use super::super::super::reconcile::plan_reconciliation;
use super::super::{
    Action, ConfigChange, Event, JoinerComparison, LegState, MembershipMessage, MirrorMembership,
};
use super::world::{
    Mistake, Msg, NOW, PreparedWrite, PutInFlight, Value, World, WriteProgress, at, id,
};

impl World {
    pub(super) fn handle_event(&mut self, n: usize, event: Event) {
        if self.mistake == Mistake::LeavesToLinkedPeers {
            self.take_sessions_for_life(n);
        }
        let forgets_failure = self.mistake == Mistake::ForgetsLegFailure;
        let generations = self.generations(n);
        let Some(member) = &mut self.node(n).member else { return };
        member.set_generations(generations);
        if forgets_failure
            && matches!(
                event,
                Event::PutCompleted(_)
                    | Event::Received(_, MembershipMessage::StartViewChange { .. })
            )
        {
            member.leg_state = LegState::Healthy;
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

    /// As `handle_event`, but reports sent meanwhile are lost.
    pub(super) fn handle_event_unchecked(&mut self, n: usize, event: Event) {
        let generations = self.generations(n);
        let Some(member) = &mut self.node(n).member else { return };
        member.set_generations(generations);
        let actions = member.apply(NOW, event);
        member.normalise();
        for action in actions {
            if !matches!(action, Action::Send(_, MembershipMessage::ReplicaReport(_))) {
                self.perform(n, action);
            }
        }
    }

    pub(super) fn perform(&mut self, n: usize, action: Action) {
        match action {
            Action::ReadConfig => self.node(n).reading = true,
            Action::PutConfig { epoch, config_id, next } => {
                self.handed_over(n, &next);
                if matches!(next.in_sync[..], [only] if only.node == id(n)) {
                    self.check_takeover(n);
                    self.record(n, next.history.generation, &[], false);
                }
                self.puts.push(PutInFlight { asker: Some(n), epoch, config_id, next });
                self.tidy_puts();
            }
            Action::Send(to, message) => self.send_membership(n, to, message),
            Action::BeginView { view, config } => self.begin_view(n, view, config),
            Action::SendDoViewChange(view) => {
                let entries = self.nodes[n].prepared.clone();
                if let Some(primary) = self.member(n).and_then(MirrorMembership::primary) {
                    self.send(n, at(primary), Msg::DoViewChange { view, entries });
                }
            }
            Action::Reconcile(_) => self.reconcile(n),
            Action::ActivateView(_) => self.activate_view(n),
            Action::BecomeOutOfSync | Action::Refuse(_) => {
                let node = self.node(n);
                node.prepared.clear();
                node.begin = None;
                node.forget();
                self.fail_writes(n);
            }
            Action::Decline(ConfigChange::Admit(_)) => self.node(n).joiner = None,
            Action::Decline(_) => {}
        }
    }

    fn send_membership(&mut self, n: usize, to: NodeId, message: MembershipMessage) {
        match message {
            // Exchanged in steps of their own.
            MembershipMessage::LeaseRequest { .. }
            | MembershipMessage::RevokeLease { .. }
            | MembershipMessage::LeaseRevoked { .. } => {}
            MembershipMessage::StartViewChange { view, config } => {
                self.send(n, at(to), Msg::StartViewChange { view, config });
            }
            message if self.linked(n, at(to)) => {
                self.handle_event(at(to), Event::Received(id(n), message));
            }
            _ => {}
        }
    }

    fn begin_view(&mut self, n: usize, view: View, config: Option<MirrorConfig>) {
        let node = self.node(n);
        node.forget();
        node.begin = Some((view, config));
        for (at, written) in &mut self.writes {
            if *at == n && matches!(written, WriteProgress::Accepted { .. }) {
                *written = WriteProgress::Accepted { is_requested: false };
            }
        }
        if self.mistake == Mistake::BeginsViewWithoutDrain {
            self.finish_begin(n);
        }
    }

    pub(super) fn drain(&mut self, n: usize) {
        while self.nodes[n].prepared.iter().any(|e| !e.applied) {
            self.apply(n);
        }
        self.finish_begin(n);
    }

    fn finish_begin(&mut self, n: usize) {
        let (view, config) = self.node(n).begin.take().expect("there was one");
        if let Some(config) = config {
            self.node(n).image = (config.epoch, config.config_id);
            let members: Vec<_> = config.in_sync.iter().map(|m| m.node).collect();
            self.inherit(n, &config);
            self.record(n, DataGeneration::first(config.epoch), &members, false);
        }
        self.handle_event(n, Event::ViewBegun(view));
    }

    /// The leg applies its oldest pending write.
    pub(super) fn apply(&mut self, n: usize) {
        let node = self.node(n);
        let Some(entry) = node.prepared.iter_mut().find(|e| !e.applied) else { return };
        entry.applied = true;
        let PreparedWrite { view, seq, write, .. } = *entry;
        node.leg.volatile = write;
        node.leg.marked = true;
        let joined = node.joined_view == Some(view);
        if self.view(n) != Some(view) && !joined || self.nodes[n].begin.is_some() {
            return;
        }
        let Some(primary) = self.member(n).and_then(MirrorMembership::primary).map(at) else {
            return;
        };
        if primary == n {
            self.acknowledged(n, id(n), seq);
        } else {
            self.send(n, primary, Msg::Applied { view, seq });
        }
    }

    /// The leg applies its oldest pending write, or a part of it, and reports failure.
    pub(super) fn reject_write(&mut self, n: usize) {
        self.budget.rejected_writes -= 1;
        let node = self.node(n);
        let Some(k) = node.prepared.iter().position(|e| !e.applied) else { return };
        let write = node.prepared.remove(k).write;
        node.leg.volatile = write;
        node.leg.marked = true;
        let (at, written) = &mut self.writes[usize::from(write) - 1];
        if *at == n && matches!(written, WriteProgress::Accepted { .. }) {
            *written = WriteProgress::Failed;
        }
        let as_leave = self.mistake == Mistake::TreatsLegFailureAsLeave;
        self.handle_event(n, if as_leave { Event::Leave } else { Event::LegFailed });
    }

    fn view(&self, n: usize) -> Option<View> {
        self.member(n).and_then(MirrorMembership::view)
    }

    /// Whether the lock of the primary is free, or a request can be sent to it.
    pub(super) fn can_request(&self, n: usize) -> bool {
        let Some(member) = self.member(n).filter(|m| m.is_view_active()) else { return false };
        if member.is_primary() {
            self.nodes[n].prepared.is_empty()
        } else {
            member.primary().is_some_and(|p| self.linked(n, at(p)))
        }
    }

    pub(super) fn request(&mut self, w: usize) {
        let n = self.writes[w].0;
        let view = self.view(n).expect("open");
        let write = Value::try_from(w + 1).expect("few writes");
        self.writes[w].1 = WriteProgress::Accepted { is_requested: true };
        let member = self.member(n).expect("open");
        if member.is_primary() {
            self.assign_op(n, write);
        } else {
            let primary = at(member.primary().expect("open"));
            self.send(n, primary, Msg::WriteRequest { view, write });
        }
    }

    /// The primary orders the write, and sends it to all.
    fn assign_op(&mut self, n: usize, write: Value) {
        let view = self.view(n).expect("open");
        let node = self.node(n);
        node.seq += 1;
        node.acks.clear();
        let seq = node.seq;
        node.prepared.push(PreparedWrite { view, seq, write, applied: false });
        for to in self.write_targets(n) {
            self.send(n, at(to), Msg::Write { view, seq, write });
        }
    }

    /// The other nodes that must apply a write.
    fn write_targets(&self, n: usize) -> Vec<NodeId> {
        let config = self.member(n).and_then(|m| m.config()).expect("a member");
        let joiner = self.nodes[n].joiner.map(|j| j.node);
        config.others(id(n)).map(|m| m.node).chain(joiner).collect()
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
        let targets = self.write_targets(n);
        let node = self.node(n);
        let op_number = (view, seq);
        let Some(&entry) = node.prepared.iter().find(|e| (e.view, e.seq) == op_number) else {
            return;
        };
        if !targets.iter().chain([&id(n)]).all(|m| node.acks.contains(m)) {
            return;
        }
        if node.is_reconciling {
            node.is_reconciling = false;
            node.acks.clear();
            self.handle_event(n, Event::Reconciled(entry.view));
            return;
        }
        node.prepared.retain(|e| (e.view, e.seq) != op_number);
        node.acks.clear();
        self.applied_by_all(n, entry.write);
        for to in targets {
            self.send(n, at(to), Msg::Commit { view: entry.view, seq });
        }
        self.committed(n, entry.write);
    }

    /// Node `n` knows that the write is committed: it answers the client, if the write is local.
    fn committed(&mut self, n: usize, write: Value) {
        let (at, written) = self.writes[usize::from(write) - 1];
        if at == n && matches!(written, WriteProgress::Accepted { .. }) {
            self.answer(write);
        }
    }

    fn reconcile(&mut self, n: usize) {
        let view = self.view(n).expect("a member");
        let collected = self.nodes[n].collected.clone();
        let own = self.nodes[n].prepared.iter().map(|e| (id(n), *e));
        let all: Vec<_> = collected.into_iter().chain(own).collect();
        let origins = |w: Value| id(self.writes[usize::from(w) - 1].0);
        let plan =
            match plan_reconciliation(all.iter().map(|(m, e)| (*m, e.entry(origins(e.write))))) {
                Ok(plan) => plan,
                Err(conflict) => return self.errors.push(conflict.to_string()),
            };
        let committed = plan.committed.iter().map(|t| t.number as Value).collect();
        let copy = plan.copies.first().filter(|_| self.mistake != Mistake::SkipsReconciliation);
        let node = self.node(n);
        node.committed = committed;
        let Some(copy) = copy else {
            self.handle_event(n, Event::Reconciled(view));
            return;
        };
        let source = if copy.holders.contains(&id(n)) { id(n) } else { copy.holders[0] };
        // The contents of the source's disk, whatever the entry says.
        let write = self.nodes[at(source)].leg.volatile;
        if self.view(at(source)) != Some(view) {
            return;
        }
        let number = copy.entry.write_id.number as Value;
        if write != number && self.mistake == Mistake::None {
            self.errors.push(format!("the copy of {number} from {source} brings {write}"));
        }
        let holders = copy.holders.clone();
        let node = self.node(n);
        (node.seq, node.last_copy_seq, node.is_reconciling) = (1, 1, true);
        node.acks = holders.iter().copied().filter(|h| *h != id(n)).collect();
        node.prepared.push(PreparedWrite { view, seq: 1, write, applied: false });
        for to in self.write_targets(n) {
            if !holders.contains(&to) {
                self.send(n, at(to), Msg::Write { view, seq: 1, write });
            }
        }
    }

    fn activate_view(&mut self, n: usize) {
        let member = self.member(n).expect("a member");
        if !member.is_primary() {
            return;
        }
        let view = member.view().expect("a member");
        self.equal_at_open(n);
        let (last_seq, committed) = (self.nodes[n].last_copy_seq, self.nodes[n].committed.clone());
        let newest = self.nodes[n].leg.volatile;
        for &write in committed.iter().filter(|w| **w == newest).chain(&committed) {
            self.applied_by_all(n, write);
        }
        for to in self.write_targets(n) {
            let committed = committed.clone();
            self.send(n, at(to), Msg::StartView { view, last_seq, committed });
        }
        self.finish_reconciliation(n, view, last_seq, &committed);
    }

    fn finish_reconciliation(&mut self, n: usize, view: View, last_seq: u8, committed: &[Value]) {
        self.node(n).prepared.retain(|e| (e.view, e.seq) > (view, last_seq));
        for &write in committed {
            self.committed(n, write);
        }
    }

    pub(super) fn can_deliver(&self, a: usize, b: usize, lane: usize) -> bool {
        let Some(msg) = self.lanes[a][b][lane].front() else { return false };
        let own_view = self.view(b);
        let draining = self.nodes[b].begin.is_some();
        match msg {
            // Waits for the lock, or for the view.
            Msg::WriteRequest { view, .. } if own_view == Some(*view) => {
                !draining && self.can_request(b)
            }
            Msg::Write { view, .. } if own_view == Some(*view) => !draining,
            Msg::Write { view, .. } => own_view.is_none_or(|own_view| *view < own_view),
            _ => true,
        }
    }

    pub(super) fn deliver(&mut self, a: usize, b: usize, lane: usize) -> Result<(), String> {
        let msg = self.lanes[a][b][lane].pop_front().expect("checked");
        let current = |w: &Self, view| w.view(b) == Some(view) && w.nodes[b].begin.is_none();
        match msg {
            Msg::StartViewChange { view, config } => {
                self.handle_event(
                    b,
                    Event::Received(id(a), MembershipMessage::StartViewChange { view, config }),
                );
            }
            Msg::DoViewChange { view, entries } => {
                if current(self, view) {
                    let collected = &mut self.node(b).collected;
                    collected.retain(|(from, _)| *from != id(a));
                    collected.extend(entries.into_iter().map(|e| (id(a), e)));
                    collected.sort_by_key(|(from, e)| (*from, e.view, e.seq));
                }
                self.handle_event(b, Event::DoViewChange(id(a), view));
            }
            Msg::StartView { view, last_seq, committed } => {
                let before = self.member(b).is_some_and(MirrorMembership::is_view_active);
                self.handle_event(b, Event::StartView(id(a), view));
                let open = self.member(b).is_some_and(MirrorMembership::is_view_active);
                if current(self, view) && open && !before {
                    self.finish_reconciliation(b, view, last_seq, &committed);
                }
            }
            Msg::WriteRequest { view, write } if current(self, view) => self.assign_op(b, write),
            Msg::Write { view, seq, write }
                if current(self, view) || self.nodes[b].joined_view == Some(view) =>
            {
                self.received(b, PreparedWrite { view, seq, write, applied: false });
            }
            Msg::Applied { view, seq } if current(self, view) => {
                self.acknowledged(b, id(a), seq);
            }
            Msg::Commit { view, seq } => {
                let entry = self.nodes[b].prepared.iter().find(|e| (e.view, e.seq) == (view, seq));
                if let Some(write) = entry.map(|e| e.write)
                    && (current(self, view) || self.nodes[b].joined_view == Some(view))
                {
                    self.node(b).prepared.retain(|e| (e.view, e.seq) != (view, seq));
                    self.committed(b, write);
                }
            }
            Msg::WriteRequest { .. } | Msg::Write { .. } | Msg::Applied { .. } => {}
        }
        Ok(())
    }

    /// A write overlaps the one before it in the same view: so that one is committed (4.1).
    fn received(&mut self, n: usize, entry: PreparedWrite) {
        let node = self.node(n);
        let earlier: Vec<_> =
            node.prepared.iter().filter(|e| e.view == entry.view).copied().collect();
        node.prepared.retain(|e| e.view != entry.view);
        node.prepared.push(entry);
        for earlier_entry in earlier {
            if !earlier_entry.applied {
                self.errors.push(format!(
                    "node {n} lets go of {earlier_entry:?}, which it has not applied"
                ));
            }
            self.committed(n, earlier_entry.write);
        }
    }

    pub(super) fn can_join(&self, t: usize, p: usize) -> bool {
        let (Some(joiner), Some(primary)) = (self.member(t), self.member(p)) else { return false };
        joiner.role() == peer::Role::OutOfSync
            && joiner.config() == primary.config()
            && primary.is_primary()
            && self.serves(p)
            && primary.pending_put.is_none()
            && self.nodes[p].joiner.is_none()
            && self.nodes[p].prepared.is_empty()
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
        let is_dirty = self.nodes[p].leg.marked || self.nodes[t].leg.marked;
        let source = match comparison {
            JoinerComparison::JoinerNewer => return,
            JoinerComparison::DirtyRegionsSuffice if !is_dirty => t,
            _ => p,
        };
        let value = self.nodes[source].leg.volatile;
        let view = self.view(p);
        let recorded = self.nodes[p].generations.by_image.iter();
        let inherited = recorded.map(|(image, shared)| (*image, shared.common)).collect();
        let joiner = self.node(t);
        joiner.is_rolled_back &= source == t;
        joiner.incarnations += 1;
        let incarnation = Incarnation(u64::from(id(t).0) * 100 + joiner.incarnations);
        joiner.inherited_generations = Some((incarnation, inherited));
        let listed = Listed { node: id(t), incarnation };
        joiner.prepared.clear();
        (joiner.leg.volatile, joiner.leg.durable, joiner.leg.marked) = (value, value, true);
        joiner.joined_view = view;
        let config = joiner.member.as_ref().and_then(|m| m.config()).expect("checked");
        joiner.image = (config.epoch, config.config_id);
        self.handle_event(t, Event::JoinStarted(incarnation));
        let node = self.node(p);
        node.joiner = Some(listed);
        node.leg.durable = node.leg.volatile;
        self.handle_event(p, Event::Admit(listed));
    }

    /// The session of an attempt has ended. Writes that the joiner has not acknowledged stay
    /// unanswered if the store may have admitted it already.
    pub(super) fn lose_joiner(&mut self, n: usize, other: NodeId) {
        let primary = self.member(n).and_then(MirrorMembership::primary);
        let has_pending_put = self.member(n).is_some_and(|m| m.pending_put.is_some());
        let node = self.node(n);
        if primary == Some(other) {
            node.joined_view = None;
        }
        if node.joiner.is_some_and(|j| j.node == other) && !has_pending_put {
            node.joiner = None;
            let seq = node.seq;
            self.handle_event(n, Event::CancelAdmission(other));
            self.commit_if_all(n, seq);
        }
    }
}

impl PreparedWrite {
    fn entry(&self, node: NodeId) -> PreparedEntry {
        PreparedEntry {
            view: self.view,
            seq: Seq(u64::from(self.seq)),
            write_id: WriteId { origin: node, number: u64::from(self.write) },
            range: Blocks::new(Lba(0), 1),
            kind: WriteKind::Data,
            fua: false,
        }
    }
}

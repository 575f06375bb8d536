//! Writes: order, acknowledgement, commit (RFD 0010, 4.2); writes without space (RFD 0040).

use std::time::Duration;

use block::{Blocks, Ctx, Error, RangeLock};
use peer::{ClockStamp, Message, NodeId, PreparedEntry, Role, Seq, View, WriteId, WriteOp};
use rt::fault_point::FaultPoint;

use super::super::Mistake;
use super::effects::{Effect, Effects, PreparedApply};
use super::local_writes::LocalWriteOutcome;
use super::prepared_list::{EntrySource, OpNumber};
use super::sequencer::AckProgress;
use super::{ReplicaState, is_metadata};

/// Most commits in one message.
const COMMIT_BATCH_MAX: usize = 1024;

/// How long after a write without space the status reports the leg as full.
const FULL_STATUS_WINDOW: Duration = Duration::from_secs(60);

/// How often free space is checked meanwhile.
const FREE_SPACE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Where the payload of a write is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum PayloadSource {
    /// At the origin, which waits for the op number.
    Origin,
    /// At the primary only.
    Primary,
}

/// The outcome of a write at the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum WriteOutcome {
    /// All members have applied it.
    Committed,
    /// The view ended before it had an op number.
    NotOrdered,
    /// The view ended; the next one decides whether the write took effect.
    ViewEnded,
    /// The leg, the only one, failed it.
    Failed(Error),
}

/// A write that the primary has ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct OrderedWrite {
    pub(in super::super) entry: PreparedEntry,
    /// Whether its payload was sent to other nodes.
    pub(in super::super) payload_sent: bool,
}

impl ReplicaState {
    /// A local write asks the primary, another node, for its op number.
    pub(in super::super) fn request_order(
        &mut self,
        view: View,
        number: u64,
        op: &WriteOp,
        ctx: &Ctx,
        effects: &mut Effects,
    ) -> Option<(WriteOp, Ctx)> {
        let primary = self.primary()?;
        let before = self.local_writes.keep_op(number, op.clone(), ctx.clone());
        let stamp = self.membership.last_granted_stamp(primary).unwrap_or_default();
        effects.send(primary, Message::WriteRequest { view, number, stamp, op: op.clone() });
        effects.reach_when_sent(FaultPoint::EntryWriteRequested);
        before
    }

    /// At the primary: whether it orders a write of another member. If the request comes too late,
    /// its origin is told to send it again.
    pub(in super::super) fn accepts_request(
        &self,
        from: NodeId,
        view: View,
        (number, stamp): (u64, ClockStamp),
        effects: &mut Effects,
    ) -> bool {
        let is_active = self.is_primary() && self.active_view == Some(view);
        if !is_active || !self.others().contains(&from) {
            return false;
        }
        let lease = self.settings.leases.lease();
        let requests = self.lease_requests.get(&from);
        let is_fresh = requests.is_some_and(|s| s.is_fresh(stamp, self.now, lease));
        if !is_fresh {
            effects.send(from, Message::RetryRequest { view, number });
        }
        is_fresh
    }

    /// At the primary: orders a write whose range is locked, and sends it to all that must apply
    /// it. Its own leg is to apply it next.
    pub(in super::super) fn order(
        &mut self,
        view: View,
        write_id: WriteId,
        payload: PayloadSource,
        op: &WriteOp,
        lock: RangeLock,
        effects: &mut Effects,
    ) -> OrderedWrite {
        let seq = self.sequencer.next_seq();
        let WriteOp { range, kind, fua, .. } = *op;
        let entry = PreparedEntry { view, seq, write_id, range, kind, fua };
        let regions = self.guard_regions(range);
        self.prepared.insert(entry, Some(lock), regions, EntrySource::Client);
        let payload_sent = self.send_to_peers(entry, payload, op, effects);
        OrderedWrite { entry, payload_sent }
    }

    /// Sends an ordered write to all that must apply it. Returns whether any of them lacked the
    /// payload.
    fn send_to_peers(
        &mut self,
        entry: PreparedEntry,
        payload: PayloadSource,
        op: &WriteOp,
        effects: &mut Effects,
    ) -> bool {
        let PreparedEntry { view, seq, write_id, .. } = entry;
        let nodes = match self.has_mistake(Mistake::SkipsNewWritesDuringResync) {
            true => self.others(),
            false => self.write_targets(),
        };
        let origin_waits = payload == PayloadSource::Origin && write_id.origin != self.me;
        let origin_has_payload = origin_waits && nodes.contains(&write_id.origin);
        let all = nodes.iter().copied().chain([self.me]);
        let origin = origin_has_payload.then_some(write_id.origin);
        self.sequencer.track_write(seq, all, origin, self.awake_clock);
        let mut sent = false;
        for node in nodes {
            let message = if Some(node) == origin {
                Message::OpAssigned { view, number: write_id.number, seq }
            } else {
                sent = true;
                Message::Write { view, seq, write_id, is_copy: false, op: op.clone() }
            };
            effects.send(node, message);
            effects.reach_when_sent(FaultPoint::PrimaryOpSent);
        }
        sent
    }

    /// At the primary: its leg has applied a write that it has ordered, or failed it. Returns the
    /// outcome if no other member matters for it.
    pub(in super::super) fn on_own_applied(
        &mut self,
        entry: PreparedEntry,
        result: Result<(), Error>,
        effects: &mut Effects,
    ) -> Option<WriteOutcome> {
        let PreparedEntry { view, seq, .. } = entry;
        let op_number = (view, seq);
        match result {
            Ok(()) => self.prepared.mark_applied(op_number),
            Err(Error::NoSpace) if self.reject_for_space(&entry, effects) => {
                self.sequencer.reject(seq, self.me);
                return None;
            }
            Err(e) => {
                self.prepared.mark_failed(op_number, e);
                if self.view == view {
                    self.sequencer.forget(seq);
                }
                let outcome = self.fail_if_sole_member(op_number, e, effects);
                effects.wake();
                // Elsewhere this leg never acknowledges the write: the next view goes on without
                // it.
                return Some(outcome);
            }
        }
        if self.view != view {
            // It was applied while the view ended: wake the tasks that wait for the drain.
            effects.wake();
            return Some(WriteOutcome::ViewEnded);
        }
        effects.reach(FaultPoint::PrimaryLegApplied);
        self.on_applied(view, seq, self.me, effects);
        self.has_mistake(Mistake::AcknowledgesBeforeReplication).then_some(WriteOutcome::Committed)
    }

    /// Gives a copy, which `nodes` must apply, its sequence number.
    pub(in super::super) fn order_copy(&mut self, nodes: impl IntoIterator<Item = NodeId>) -> Seq {
        let seq = self.sequencer.next_seq();
        self.sequencer.track_copy(seq, nodes, self.awake_clock);
        seq
    }

    /// At the primary: `node` has applied the write `seq`.
    pub(in super::super) fn on_applied(
        &mut self,
        view: View,
        seq: Seq,
        node: NodeId,
        effects: &mut Effects,
    ) {
        match self.sequencer.acknowledge(seq, node) {
            AckProgress::Pending => {}
            AckProgress::OnlyOriginLeft(origin) => self.notify_origin(view, seq, origin, effects),
            AckProgress::Committed(origin) => {
                // If the origin was not the last to apply it, it has not been told that the others
                // have.
                if let Some(first) = origin.filter(|origin| *origin != node) {
                    self.notify_origin(view, seq, first, effects);
                }
                self.on_committed(view, seq, origin, effects);
            }
        }
    }

    fn notify_origin(&self, view: View, seq: Seq, origin: NodeId, effects: &mut Effects) {
        if let Some(write_id) = self.prepared.write_id((view, seq)) {
            effects.send(origin, Message::PeersApplied { view, number: write_id.number });
        }
    }

    fn on_committed(
        &mut self,
        view: View,
        seq: Seq,
        origin: Option<NodeId>,
        effects: &mut Effects,
    ) {
        let Some(committed) = self.prepared.commit((view, seq)) else { return };
        effects.reach(FaultPoint::PrimaryCommitted);
        // At once: if the view ends before the task of the write runs, no trace of the commit is
        // left.
        self.local_writes.complete_by_id(committed.entry.write_id, LocalWriteOutcome::Committed);
        // The origin knows by itself.
        let mut nodes = self.others();
        nodes.retain(|node| Some(*node) != origin);
        nodes.extend(self.joiners.attached());
        if self.sequencer.queue_commit(seq, nodes) {
            effects.push(Effect::SendCommitsLater(view));
        }
    }

    /// Tells the members which writes are committed.
    pub(in super::super) fn send_pending_commits(&mut self, view: View, effects: &mut Effects) {
        if self.view != view {
            return;
        }
        for (node, seqs) in self.sequencer.take_pending_commits() {
            for seqs in seqs.chunks(COMMIT_BATCH_MAX) {
                effects.send(node, Message::Commit { view, seqs: seqs.to_vec() });
            }
        }
    }

    /// The primary has sent an ordered write.
    pub(in super::super) fn on_write(
        &mut self,
        from: NodeId,
        entry: PreparedEntry,
        is_copy: bool,
        (op, ctx): (WriteOp, Ctx),
        effects: &mut Effects,
    ) {
        let is_from_primary =
            self.membership.role() == Role::Member && self.primary() == Some(from);
        if !is_from_primary && !self.is_join_view(from, entry.view) {
            return;
        }
        // A joiner without this write handles the replacement like any other copy.
        if is_copy && self.prepared.contains((entry.view, entry.seq)) {
            return self.on_replacement(from, entry, (op, ctx), effects);
        }
        if is_copy && !self.is_resync_target() {
            self.prepared.release_locks(entry.range);
        } else {
            self.commit_overlapping(entry.range);
        }
        effects.reach(FaultPoint::MemberWriteReceived);
        let source = match is_copy {
            false => EntrySource::Client,
            true if self.is_resync_target() => EntrySource::Resync,
            true => EntrySource::Reconciliation,
        };
        self.prepare(from, entry, source, (op, ctx), effects);
    }

    /// A write of this node has got its op number.
    pub(in super::super) fn on_op_assigned(
        &mut self,
        from: NodeId,
        view: View,
        number: u64,
        seq: Seq,
        effects: &mut Effects,
    ) {
        let Some((op, ctx)) = self.local_writes.on_op_assigned(number, (view, seq)) else { return };
        effects.reach(FaultPoint::EntryOpAssigned);
        let write_id = WriteId { origin: self.me, number };
        let WriteOp { range, kind, fua, .. } = op;
        self.commit_overlapping(range);
        let entry = PreparedEntry { view, seq, write_id, range, kind, fua };
        self.prepare(from, entry, EntrySource::Client, (op, ctx), effects);
    }

    /// Commits what overlaps `range`: the primary releases a range only in an active view, after
    /// all have applied the write before.
    fn commit_overlapping(&mut self, range: Blocks) {
        if self.range_locks.is_free(range) && !self.prepared.may_have_unlocked() {
            debug_assert!(
                self.prepared.overlapping(range).is_empty(),
                "an entry is prepared without a range lock"
            );
            return;
        }
        let before = self.prepared.overlapping(range);
        before.into_iter().for_each(|(view, seq)| self.commit_entry(view, seq));
    }

    fn prepare(
        &mut self,
        from: NodeId,
        entry: PreparedEntry,
        source: EntrySource,
        (op, ctx): (WriteOp, Ctx),
        effects: &mut Effects,
    ) {
        if self.prepared.contains((entry.view, entry.seq)) {
            tracing::error!(node = from.0, "an op number is assigned twice");
            return;
        }
        // It waits for readers that hold the range, never for those that wait: they may wait for
        // writes that wait, on other nodes, for others like this (attack 61).
        let lock = self.range_locks.enter_with_priority(entry.range);
        let (held, awaited_lock) =
            if lock.is_held() { (Some(lock), None) } else { (None, Some(lock)) };
        let regions = self.guard_regions(entry.range);
        self.prepared.insert(entry, held, regions, source);
        effects.push(Effect::Apply(PreparedApply { from, entry, source, op, ctx, awaited_lock }));
    }

    /// The leg has applied an entry that the primary sent, or failed it.
    pub(in super::super) fn on_prepared_applied(
        &mut self,
        from: NodeId,
        (entry, source): (PreparedEntry, EntrySource),
        applied: Result<(), Error>,
        effects: &mut Effects,
    ) {
        let PreparedEntry { view, seq, write_id, .. } = entry;
        if applied == Err(Error::NoSpace)
            && source == EntrySource::Client
            && self.reject_for_space(&entry, effects)
        {
            effects.send(from, Message::NoSpace { view, seq });
            return;
        }
        effects.reach(if self.is_resync_target() {
            FaultPoint::JoinerCopyApplied
        } else {
            FaultPoint::MemberLegApplied
        });
        if let Err(e) = applied {
            self.prepared.mark_failed((view, seq), e);
            self.on_leg_error(e, effects);
            effects.wake();
            return;
        }
        self.prepared.mark_applied((view, seq));
        if self.view != view {
            effects.wake();
            return;
        }
        // The local client first: it is waiting.
        if self.local_writes.on_applied(write_id, (view, seq)) {
            self.commit_entry(view, seq);
        }
        effects.send(from, Message::Applied { view, seq });
        effects.reach_when_sent(FaultPoint::MemberAppliedSent);
    }

    /// The primary has answered the local write `number`.
    pub(in super::super) fn answer(&mut self, number: u64, outcome: LocalWriteOutcome) {
        self.local_writes.complete(number, outcome);
    }

    /// All other members have applied a write of this node.
    pub(in super::super) fn on_peers_applied(&mut self, number: u64, effects: &mut Effects) {
        let Some(committed) = self.local_writes.on_peers_applied(number) else { return };
        effects.reach(FaultPoint::EntryPeersApplied);
        if let Some((view, seq)) = committed {
            self.commit_entry(view, seq);
        }
    }

    /// All members have applied the write with this op number.
    pub(in super::super) fn commit_entry(&mut self, view: View, seq: Seq) {
        let Some(committed) = self.prepared.commit((view, seq)) else { return };
        let outcome = if committed.no_space {
            LocalWriteOutcome::Failed(Error::NoSpace)
        } else {
            LocalWriteOutcome::Committed
        };
        self.local_writes.complete_by_id(committed.entry.write_id, outcome);
    }

    /// Asks the primary to send the commits of the writes that overlap `range` now.
    pub(in super::super) fn request_commits(&self, range: Blocks, effects: &mut Effects) {
        let Some(primary) = self.primary().filter(|_| !self.is_primary()) else { return };
        for (view, seq) in self.prepared.overlapping(range) {
            effects.send(primary, Message::RequestCommit { view, seq });
        }
    }

    /// Whether a client's write for which this leg has no space may wait for the other members.
    /// (Metadata blocks hold a table, of which a mixture of old and new contents must not be kept.)
    fn may_reject(&self, entry: &PreparedEntry) -> bool {
        self.view == entry.view
            && !self.write_targets().is_empty()
            && !self.is_resync_target()
            && !is_metadata(entry.range)
    }

    /// The leg has no space for a client's write. Returns whether the write waits for the other
    /// members.
    fn reject_for_space(&mut self, entry: &PreparedEntry, effects: &mut Effects) -> bool {
        let is_waiting =
            self.may_reject(entry) && self.prepared.mark_no_space((entry.view, entry.seq));
        if is_waiting {
            self.note_no_space(effects);
        }
        is_waiting
    }

    /// Notes that this leg had no space for a write.
    pub(super) fn note_no_space(&mut self, effects: &mut Effects) {
        let now = self.awake_clock;
        let before = self.no_space_at.replace(now);
        if before.is_none_or(|last| now >= last + FULL_STATUS_WINDOW) {
            tracing::warn!("this copy has no space for a write");
        }
        effects.wake();
    }

    /// Whether this leg has recently had no space for a write.
    pub(in super::super) fn is_full(&self) -> bool {
        self.no_space_at.is_some_and(|last| self.awake_clock < last + FULL_STATUS_WINDOW)
    }

    /// Whether free space is to be checked now, because the leg is full. Notes that it is.
    pub(in super::super) fn begin_space_check(&mut self) -> bool {
        let is_due = self.is_full()
            && self.awake_clock >= self.free_space_checked_at + FREE_SPACE_CHECK_INTERVAL;
        if is_due {
            self.free_space_checked_at = self.awake_clock;
        }
        is_due
    }

    /// There is room for this leg again.
    pub(in super::super) fn on_space_freed(&mut self, effects: &mut Effects) {
        self.no_space_at = None;
        effects.wake();
    }

    /// A member has no space for a write; or this member has none for a write that others keep.
    pub(in super::super) fn on_no_space(
        &mut self,
        from: NodeId,
        view: View,
        seq: Seq,
        effects: &mut Effects,
    ) {
        if self.is_primary() {
            self.sequencer.reject(seq, from);
        } else if self.primary() == Some(from)
            && self.prepared.status((view, seq)).is_some_and(|status| status.no_space)
        {
            self.fail_no_space_writes(effects);
        }
    }

    /// Fails the leg if writes without space still wait for replacements, which will not come.
    /// Returns whether this member takes part in the view.
    pub(in super::super) fn fail_no_space_writes(&mut self, effects: &mut Effects) -> bool {
        let any = self.prepared.fail_no_space();
        !any || self.on_leg_error(Error::NoSpace, effects)
    }

    /// At the primary: no admission of a joiner may list it before it has the replacement of a
    /// rejected write. Returns whether one may be listed already.
    pub(in super::super) fn cancel_admissions(&mut self, effects: &mut Effects) -> bool {
        // If the put has been sent, the joiner may be a member that has applied the write.
        let proposed: Vec<_> =
            self.joiners.iter().filter(|(_, j)| j.admission_proposed).map(|(n, _)| n).collect();
        proposed.into_iter().for_each(|node| self.drop_joiner(node, effects));
        self.joiners.iter().any(|(_, joiner)| joiner.admission_proposed)
    }

    /// At the primary: members without space for the write leave, because others have it and room
    /// for more.
    pub(in super::super) fn keep_write(
        &mut self,
        entry: &PreparedEntry,
        rejected_by: &[NodeId],
        effects: &mut Effects,
    ) -> WriteOutcome {
        let PreparedEntry { view, seq, .. } = *entry;
        for node in rejected_by.iter().filter(|node| **node != self.me) {
            effects.send(*node, Message::NoSpace { view, seq });
        }
        if self.others().is_empty() && self.membership.pending_admission().is_none() {
            // The copy of the last member is the volume.
            return self.fail_if_sole_member((view, seq), Error::NoSpace, effects);
        }
        if rejected_by.contains(&self.me) {
            self.fail_no_space_writes(effects);
        }
        WriteOutcome::ViewEnded
    }

    /// The leg of a primary has failed a write, or its replacement. Joiners of a sole member begin
    /// again.
    fn fail_if_sole_member(
        &mut self,
        op_number: OpNumber,
        e: Error,
        effects: &mut Effects,
    ) -> WriteOutcome {
        if !self.on_leg_error(e, effects) {
            return WriteOutcome::ViewEnded;
        }
        self.prepared.commit(op_number);
        WriteOutcome::Failed(e)
    }

    /// At the primary: sends the replacement of a rejected write to all that must apply it.
    pub(in super::super) fn order_replacement(
        &mut self,
        entry: &PreparedEntry,
        op: &WriteOp,
        effects: &mut Effects,
    ) {
        let PreparedEntry { view, seq, write_id, .. } = *entry;
        let targets = self.write_targets();
        self.sequencer.track_copy(seq, targets.iter().copied().chain([self.me]), self.awake_clock);
        for node in targets {
            let op = op.clone();
            effects.send(node, Message::Write { view, seq, write_id, is_copy: true, op });
            effects.reach_when_sent(FaultPoint::PrimaryOpSent);
        }
    }

    /// At the primary: all members hold the same contents in the range of a rejected write.
    pub(in super::super) fn commit_rejected(
        &mut self,
        entry: &PreparedEntry,
        effects: &mut Effects,
    ) {
        self.prepared.commit((entry.view, entry.seq));
        effects.reach(FaultPoint::PrimaryCommitted);
        let refused = LocalWriteOutcome::Failed(Error::NoSpace);
        self.local_writes.complete_by_id(entry.write_id, refused);
        // The commit may be announced.
        let targets = self.write_targets();
        self.sequencer.queue_commit(entry.seq, targets);
        self.send_pending_commits(entry.view, effects);
    }

    /// The leg failed even a write that needs no space.
    pub(in super::super) fn on_replacement_failed(
        &mut self,
        op_number: OpNumber,
        e: Error,
        effects: &mut Effects,
    ) -> WriteOutcome {
        self.prepared.mark_failed(op_number, e);
        if self.view == op_number.0 {
            self.sequencer.forget(op_number.1);
        }
        self.fail_if_sole_member(op_number, e, effects)
    }

    /// The primary has sent the replacement of a rejected write.
    fn on_replacement(
        &mut self,
        from: NodeId,
        entry: PreparedEntry,
        (op, ctx): (WriteOp, Ctx),
        effects: &mut Effects,
    ) {
        if !self.prepared.begin_replacement(&entry) {
            tracing::error!(
                node = from.0,
                "a replacement arrived for a write that does not wait for one"
            );
            return;
        }
        let source = EntrySource::Client;
        let awaited_lock = None;
        effects.push(Effect::Replace(PreparedApply { from, entry, source, op, ctx, awaited_lock }));
    }

    /// The leg has applied the replacement of a rejected write that the primary sent, or failed it.
    pub(in super::super) fn on_replaced(
        &mut self,
        from: NodeId,
        entry: PreparedEntry,
        applied: Result<(), Error>,
        effects: &mut Effects,
    ) {
        let PreparedEntry { view, seq, .. } = entry;
        if let Err(e) = applied {
            self.on_replacement_failed((view, seq), e, effects);
            return;
        }
        self.prepared.mark_applied((view, seq));
        effects.reach(FaultPoint::MemberLegApplied);
        if self.view == view {
            effects.send(from, Message::Applied { view, seq });
        } else {
            effects.wake();
        }
    }
}

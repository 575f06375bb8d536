//! Writes: how they are ordered, and applied by all members (RFD 0010, 4.2).

use std::future::poll_fn;
use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Ctx, Error, RangeLock};
use peer::{Link, Message, NodeId, PreparedEntry, Seq, View, WriteId, WriteOp};
use rt::fault_point::{self, FaultPoint};

use super::Mistake;
use super::local_writes::{LocalWrite, LocalWriteOutcome};
use super::prepared_list::EntrySource;
use super::replica::Replica;
use super::sequencer::{AckProgress, ReplicationOutcome};
use super::state::ReplicaState;

/// How long a commit notice waits for others, to be sent with them.
const COMMIT_DELAY: Duration = Duration::from_millis(1);

/// Most commits in one message.
const COMMIT_BATCH_MAX: usize = 1024;

/// Where the payload of a write is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PayloadSource {
    /// At the origin, which waits for the op number.
    Origin,
    /// At the primary only.
    Primary,
}

/// The outcome of a write at the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteOutcome {
    /// All members have applied it.
    Committed,
    /// The view ended before it had an op number.
    NotOrdered,
    /// The view ended; the next one decides whether the write took effect.
    ViewEnded,
    /// The leg, the only one, failed it.
    Failed(Error),
}

impl Replica {
    /// Executes a write of a client of this node.
    pub(super) async fn write(self: &Rc<Self>, op: WriteOp, ctx: &Ctx) -> Result<(), Error> {
        let local_write = self.local_writes.begin();
        fault_point::reach(FaultPoint::EntryWriteAccepted);
        loop {
            let view = self.wait_serving(ctx).await?;
            local_write.reset();
            if self.is_primary() {
                match self.replicate(view, local_write.id(), &op, ctx).await {
                    WriteOutcome::Committed => return Ok(()),
                    WriteOutcome::Failed(e) => return Err(e),
                    WriteOutcome::NotOrdered => continue,
                    WriteOutcome::ViewEnded => {}
                }
            } else {
                self.send_write_request(view, &local_write, &op, ctx);
            }
            match local_write.outcome().await {
                LocalWriteOutcome::Committed | LocalWriteOutcome::CompareAndWrite(_) => {
                    return Ok(());
                }
                LocalWriteOutcome::Retry => {}
                LocalWriteOutcome::RetryWithNewStamp => self.wait_lease_renewed(view).await,
                LocalWriteOutcome::Fenced => return Err(Error::Fenced),
                LocalWriteOutcome::Failed(e) => return Err(e),
            }
        }
    }

    fn send_write_request(&self, view: View, local_write: &LocalWrite, op: &WriteOp, ctx: &Ctx) {
        let Some(link) = self.primary_link() else { return };
        local_write.keep_op(op.clone(), ctx.clone());
        let (number, stamp) = (local_write.id().number, self.granted_stamp(link.node()));
        link.send(Message::WriteRequest { view, number, stamp, op: op.clone() });
        fault_point::reach_when_sent(FaultPoint::EntryWriteRequested);
    }

    /// Executes a write request of another member, at the primary.
    pub(super) async fn serve_write_request(
        self: Rc<Self>,
        link: Link,
        view: View,
        write_id: WriteId,
        op: WriteOp,
        ctx: Ctx,
    ) {
        // Once the write has an op number, its origin learns the outcome by PEERS APPLIED or in the
        // next view.
        if self.replicate(view, write_id, &op, &ctx).await == WriteOutcome::NotOrdered {
            // If the view goes on after all, the origin sends it again.
            link.send(Message::RetryRequest { view, number: write_id.number });
        }
    }

    /// Orders `op`, and waits until all members have applied it.
    pub(super) async fn replicate(
        self: &Rc<Self>,
        view: View,
        write_id: WriteId,
        op: &WriteOp,
        ctx: &Ctx,
    ) -> WriteOutcome {
        let lock = self.range_locks.enter(op.range, true);
        if !lock.is_held() {
            let over = || self.view() != view || self.rejects_clients();
            if Box::pin(self.signal.unless(over, lock.acquired())).await.is_none() {
                return WriteOutcome::NotOrdered;
            }
        }
        if self.view() != view {
            return WriteOutcome::NotOrdered;
        }
        if ctx.is_aborted() {
            return WriteOutcome::Failed(Error::Aborted);
        }
        self.replicate_locked(view, write_id, PayloadSource::Origin, op, lock, ctx).await
    }

    /// The same, if the caller holds the lock of the range.
    pub(super) async fn replicate_locked(
        self: &Rc<Self>,
        view: View,
        write_id: WriteId,
        payload: PayloadSource,
        op: &WriteOp,
        lock: RangeLock,
        ctx: &Ctx,
    ) -> WriteOutcome {
        fault_point::reach(FaultPoint::PrimaryRangeLocked);
        let seq = self.state_mut().sequencer.next_seq();
        let WriteOp { range, kind, fua, .. } = *op;
        let entry = PreparedEntry { view, seq, write_id, range, kind, fua };
        let regions = self.guard_regions(range);
        self.state_mut().prepared.insert(entry, Some(lock), regions, EntrySource::Client);
        if self.send_to_peers(view, seq, write_id, payload, op) {
            // Send the payload before the write to the local disk starts, which may complete at
            // once. The origin gets the op number along with that.
            rt::yield_to_ready_tasks().await;
        }
        let op_number = (view, seq);
        let bytes = self.byte_range(range);
        match self.leg.apply(op, bytes, ctx, self.awake_now()).await {
            Ok(()) => self.state_mut().prepared.mark_applied(op_number),
            Err(Error::NoSpace) if self.reject_for_space(&entry) => {
                self.state_mut().sequencer.reject(seq, self.me);
                return self.await_outcome(entry).await;
            }
            Err(e) => {
                self.state_mut().prepared.mark_failed(op_number, e);
                if self.view() == view {
                    self.state_mut().sequencer.forget(seq);
                }
                let alone = self.on_leg_error(e);
                if alone {
                    self.state_mut().prepared.commit(op_number);
                }
                self.signal.raise();
                // This leg never acknowledges the write: the next view goes on without it.
                return if alone { WriteOutcome::Failed(e) } else { WriteOutcome::ViewEnded };
            }
        }
        if self.view() != view {
            // It was applied while the view ended: wake the tasks that wait for the drain.
            self.signal.raise();
            return WriteOutcome::ViewEnded;
        }
        fault_point::reach(FaultPoint::PrimaryLegApplied);
        self.on_applied(view, seq, self.me);
        if self.settings.has_mistake(Mistake::AcknowledgesBeforeReplication) {
            return WriteOutcome::Committed;
        }
        self.await_outcome(entry).await
    }

    /// Gives a copy, which `nodes` must apply, its sequence number.
    pub(super) fn order_copy(&self, nodes: impl IntoIterator<Item = NodeId>) -> Seq {
        let ReplicaState { sequencer, awake_clock, .. } = &mut *self.state_mut();
        let seq = sequencer.next_seq();
        sequencer.track_copy(seq, nodes, *awake_clock);
        seq
    }

    /// Waits until members have applied or refused the write or copy `seq`, or the view ends.
    pub(super) async fn replication_outcome(&self, seq: Seq) -> ReplicationOutcome {
        poll_fn(|cx| self.state_mut().sequencer.poll_outcome(seq, cx)).await
    }

    /// Waits for the outcome of a write that has an op number.
    async fn await_outcome(self: &Rc<Self>, entry: PreparedEntry) -> WriteOutcome {
        match self.replication_outcome(entry.seq).await {
            ReplicationOutcome::Committed => WriteOutcome::Committed,
            ReplicationOutcome::NoSpace(refused) => {
                Box::pin(self.resolve_no_space(entry, refused)).await
            }
            ReplicationOutcome::ViewEnded => WriteOutcome::ViewEnded,
        }
    }

    /// Sends an ordered write to all that must apply it. Returns whether any of them lacked the
    /// payload.
    fn send_to_peers(
        &self,
        view: View,
        seq: Seq,
        write_id: WriteId,
        payload: PayloadSource,
        op: &WriteOp,
    ) -> bool {
        let mut nodes = self.others();
        if !self.settings.has_mistake(Mistake::SkipsNewWritesDuringResync) {
            nodes.extend(self.state().joiners.attached());
        }
        let origin_waits = payload == PayloadSource::Origin && write_id.origin != self.me;
        let origin_has_payload = origin_waits && nodes.contains(&write_id.origin);
        let all = nodes.iter().copied().chain([self.me]);
        let origin = origin_has_payload.then_some(write_id.origin);
        let now = self.awake_now();
        self.state_mut().sequencer.track_write(seq, all, origin, now);
        let mut sent = false;
        for node in nodes {
            let Some(link) = self.link(node) else { continue };
            if origin_has_payload && node == write_id.origin {
                link.send(Message::OpAssigned { view, number: write_id.number, seq });
            } else {
                link.send(Message::Write { view, seq, write_id, is_copy: false, op: op.clone() });
                sent = true;
            }
            fault_point::reach_when_sent(FaultPoint::PrimaryOpSent);
        }
        sent
    }

    /// `node` has applied the write `seq`.
    pub(super) fn on_applied(self: &Rc<Self>, view: View, seq: Seq, node: NodeId) {
        let step = self.state_mut().sequencer.acknowledge(seq, node);
        match step {
            AckProgress::Pending => {}
            AckProgress::OnlyOriginLeft(origin) => self.notify_origin(view, seq, origin),
            AckProgress::Committed(origin) => {
                // If the origin was not the last to apply it, it has not been told that the others
                // have.
                if let Some(first) = origin.filter(|origin| *origin != node) {
                    self.notify_origin(view, seq, first);
                }
                self.on_committed(view, seq, origin);
            }
        }
    }

    fn notify_origin(&self, view: View, seq: Seq, origin: NodeId) {
        let write_id = self.state().prepared.write_id((view, seq));
        if let (Some(write_id), Some(link)) = (write_id, self.link(origin)) {
            link.send(Message::PeersApplied { view, number: write_id.number });
        }
    }

    fn on_committed(self: &Rc<Self>, view: View, seq: Seq, origin: Option<NodeId>) {
        let committed = self.state_mut().prepared.commit((view, seq));
        let Some(committed) = committed else { return };
        fault_point::reach(FaultPoint::PrimaryCommitted);
        // At once: if the view ends before the task of the write runs, no trace of the commit is
        // left.
        self.local_writes.complete_by_id(committed.entry.write_id, LocalWriteOutcome::Committed);
        // The origin knows by itself.
        let mut nodes = self.others();
        nodes.retain(|node| Some(*node) != origin);
        nodes.extend(self.state().joiners.attached());
        let is_first = self.state_mut().sequencer.queue_commit(seq, nodes);
        if is_first {
            let this = Rc::clone(self);
            self.spawn(async move {
                tokio::time::sleep(COMMIT_DELAY).await;
                this.send_pending_commits(view);
            });
        }
    }

    /// Tells the members which writes are committed.
    pub(super) fn send_pending_commits(&self, view: View) {
        if self.view() != view {
            return;
        }
        let pending = self.state_mut().sequencer.take_pending_commits();
        for (node, seqs) in pending {
            let Some(link) = self.link(node) else { continue };
            for seqs in seqs.chunks(COMMIT_BATCH_MAX) {
                link.send(Message::Commit { view, seqs: seqs.to_vec() });
            }
        }
    }

    /// The primary has sent an ordered write.
    pub(super) fn on_write(
        self: &Rc<Self>,
        link: Link,
        entry: PreparedEntry,
        is_copy: bool,
        op: WriteOp,
        ctx: Ctx,
    ) {
        let from = link.node();
        // A joiner without this write handles the replacement like any other copy.
        if is_copy && self.state().prepared.contains((entry.view, entry.seq)) {
            return self.on_replacement(link, entry, op, ctx);
        }
        if is_copy && !self.is_resync_target() {
            self.state_mut().prepared.release_locks(entry.range);
        } else {
            self.commit_overlapping(entry.range);
        }
        fault_point::reach(FaultPoint::MemberWriteReceived);
        let source = match is_copy {
            false => EntrySource::Client,
            true if self.is_resync_target() => EntrySource::Resync,
            true => EntrySource::Reconciliation,
        };
        self.prepare(entry, source, op, ctx, from);
    }

    /// A write of this node has got its op number.
    pub(super) fn on_op_assigned(self: &Rc<Self>, from: NodeId, view: View, number: u64, seq: Seq) {
        let assigned = self.local_writes.on_op_assigned(number, (view, seq));
        let Some((op, ctx)) = assigned else { return };
        fault_point::reach(FaultPoint::EntryOpAssigned);
        let write_id = WriteId { origin: self.me, number };
        let WriteOp { range, kind, fua, .. } = op;
        self.commit_overlapping(range);
        self.prepare(
            PreparedEntry { view, seq, write_id, range, kind, fua },
            EntrySource::Client,
            op,
            ctx,
            from,
        );
    }

    /// Commits what overlaps `range`: the primary releases a range only in an active view, after
    /// all have applied the write before.
    fn commit_overlapping(&self, range: Blocks) {
        if self.range_locks.is_free(range) && !self.state().prepared.may_have_unlocked() {
            debug_assert!(
                self.state().prepared.overlapping(range).is_empty(),
                "an entry is prepared without a range lock"
            );
            return;
        }
        let before = self.state().prepared.overlapping(range);
        before.into_iter().for_each(|(view, seq)| self.commit_entry(view, seq));
    }

    fn prepare(
        self: &Rc<Self>,
        entry: PreparedEntry,
        source: EntrySource,
        op: WriteOp,
        ctx: Ctx,
        from: NodeId,
    ) {
        if self.state().prepared.contains((entry.view, entry.seq)) {
            tracing::error!(node = from.0, "an op number is assigned twice");
            return;
        }
        // It waits for readers that hold the range, never for those that wait: they may wait for
        // writes that wait, on other nodes, for others like this (attack 61).
        let lock = self.range_locks.enter_with_priority(entry.range);
        let (held, awaited) = if lock.is_held() { (Some(lock), None) } else { (None, Some(lock)) };
        let regions = self.guard_regions(entry.range);
        self.state_mut().prepared.insert(entry, held, regions, source);
        self.spawn_eager(Rc::clone(self).apply_prepared(from, (entry, source), op, awaited, ctx));
    }

    /// Applies an ordered write once its range is locked; `awaited` is the lock, if it is not held
    /// yet.
    async fn apply_prepared(
        self: Rc<Self>,
        from: NodeId,
        (entry, source): (PreparedEntry, EntrySource),
        op: WriteOp,
        awaited: Option<RangeLock>,
        ctx: Ctx,
    ) {
        let op_number = (entry.view, entry.seq);
        if let Some(lock) = awaited {
            lock.acquired().await;
            self.state_mut().prepared.set_lock(op_number, lock);
        }
        let bytes = self.byte_range(entry.range);
        let mut applied = self.leg.apply(&op, bytes.clone(), &ctx, self.awake_now()).await;
        if applied == Err(Error::NoSpace) {
            if source != EntrySource::Client {
                // The contents of the other members need no more space here than there.
                applied = self.leg.apply_thin(&op, bytes, &ctx, self.awake_now()).await;
            } else if self.reject_for_space(&entry) {
                if let Some(link) = self.link(from) {
                    link.send(Message::NoSpace { view: entry.view, seq: entry.seq });
                }
                return;
            }
        }
        fault_point::reach(if self.is_resync_target() {
            FaultPoint::JoinerCopyApplied
        } else {
            FaultPoint::MemberLegApplied
        });
        if let Err(e) = applied {
            self.state_mut().prepared.mark_failed(op_number, e);
            self.on_leg_error(e);
            self.signal.raise();
            return;
        }
        self.state_mut().prepared.mark_applied(op_number);
        if self.view() != entry.view {
            self.signal.raise();
            return;
        }
        // The local client first: it is waiting.
        if self.local_writes.on_applied(entry.write_id, op_number) {
            self.commit_entry(entry.view, entry.seq);
        }
        if let Some(link) = self.link(from) {
            link.send(Message::Applied { view: entry.view, seq: entry.seq });
            fault_point::reach_when_sent(FaultPoint::MemberAppliedSent);
        }
    }

    /// All other members have applied a write of this node.
    pub(super) fn on_peers_applied(&self, number: u64) {
        let Some(committed) = self.local_writes.on_peers_applied(number) else { return };
        fault_point::reach(FaultPoint::EntryPeersApplied);
        if let Some((view, seq)) = committed {
            self.commit_entry(view, seq);
        }
    }

    /// All members have applied the write with this op number.
    pub(super) fn commit_entry(&self, view: View, seq: Seq) {
        let committed = self.state_mut().prepared.commit((view, seq));
        let Some(committed) = committed else { return };
        let outcome = if committed.no_space {
            LocalWriteOutcome::Failed(Error::NoSpace)
        } else {
            LocalWriteOutcome::Committed
        };
        self.local_writes.complete_by_id(committed.entry.write_id, outcome);
    }
}

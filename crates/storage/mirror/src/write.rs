//! Writes: how clients' writes wait for their order and outcome, and reach the leg (RFD 0010, 4.2).

use std::future::poll_fn;
use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Ctx, Error, RangeLock};
use peer::{Link, Message, PreparedEntry, Seq, View, WriteId, WriteOp};
use rt::fault_point::{self, FaultPoint};

use super::replica::Replica;
use super::state::effects::PreparedApply;
use super::state::local_writes::LocalWriteOutcome;
use super::state::prepared_list::EntrySource;
use super::state::sequencer::ReplicationOutcome;
use super::state::write::{OrderedWrite, PayloadSource, WriteOutcome};

/// How long a commit notice waits for others, to be sent with them.
const COMMIT_DELAY: Duration = Duration::from_millis(1);

/// A write of a client of this node, from its acceptance to its answer.
pub(super) struct LocalWrite<'a> {
    replica: &'a Rc<Replica>,
    id: WriteId,
}

impl<'a> LocalWrite<'a> {
    /// Accepts a write.
    pub(super) fn begin(replica: &'a Rc<Replica>) -> Self {
        Self { replica, id: replica.state_mut().local_writes.begin() }
    }

    /// Its id.
    pub(super) fn id(&self) -> WriteId {
        self.id
    }

    /// Resets it, to be sent in a new view.
    pub(super) fn reset(&self) {
        self.replica.state_mut().local_writes.reset(self.id.number);
    }

    /// Waits for its outcome.
    pub(super) async fn outcome(&self) -> LocalWriteOutcome {
        let number = self.id.number;
        poll_fn(|cx| self.replica.state_mut().local_writes.poll_outcome(number, cx)).await
    }
}

impl Drop for LocalWrite<'_> {
    fn drop(&mut self) {
        let ended = self.replica.state_mut().local_writes.end(self.id.number);
        drop(ended);
    }
}

impl Replica {
    /// Executes a write of a client of this node.
    pub(super) async fn write(self: &Rc<Self>, op: WriteOp, ctx: &Ctx) -> Result<(), Error> {
        let local_write = LocalWrite::begin(self);
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
                let number = local_write.id().number;
                let before = self.step(|s, fx| s.request_order(view, number, &op, ctx, fx));
                drop(before);
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
            let over = || self.is_view_over(view);
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
        let OrderedWrite { entry, payload_sent } =
            self.step(|s, fx| s.order(view, write_id, payload, op, lock, fx));
        if payload_sent {
            // Send the payload before the write to the local disk starts, which may complete at
            // once. The origin gets the op number along with that.
            rt::yield_to_ready_tasks().await;
        }
        let bytes = self.byte_range(op.range);
        let result = self.leg.apply(op, bytes, ctx, self.awake_now()).await;
        match self.step(|s, fx| s.on_own_applied(entry, result, fx)) {
            Some(outcome) => outcome,
            None => self.await_outcome(entry).await,
        }
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

    /// Tells the members after a while which writes are committed.
    pub(super) async fn send_commits_later(self: Rc<Self>, view: View) {
        tokio::time::sleep(COMMIT_DELAY).await;
        self.send_pending_commits(view);
    }

    /// Tells the members which writes are committed.
    pub(super) fn send_pending_commits(self: &Rc<Self>, view: View) {
        self.step(|s, fx| s.send_pending_commits(view, fx));
    }

    /// Asks the primary to send the commits of overlapping writes now.
    pub(super) fn request_commits(self: &Rc<Self>, range: Blocks) {
        self.step(|s, fx| s.request_commits(range, fx));
    }

    /// Applies an ordered write to the leg once its range is locked.
    pub(super) async fn apply_prepared(self: Rc<Self>, apply: PreparedApply) {
        let PreparedApply { from, entry, source, op, ctx, awaited_lock } = apply;
        if let Some(lock) = awaited_lock {
            lock.acquired().await;
            self.step(|s, _| s.prepared.set_lock((entry.view, entry.seq), lock));
        }
        let bytes = self.byte_range(entry.range);
        let mut applied = self.leg.apply(&op, bytes.clone(), &ctx, self.awake_now()).await;
        if applied == Err(Error::NoSpace) && source != EntrySource::Client {
            // The contents of the other members need no more space here than there.
            applied = self.leg.apply_thin(&op, bytes, &ctx, self.awake_now()).await;
        }
        self.step(|s, fx| s.on_prepared_applied(from, (entry, source), applied, fx));
    }

    /// Applies the replacement of a rejected write to the leg.
    pub(super) async fn apply_replacement(self: Rc<Self>, apply: PreparedApply) {
        let PreparedApply { from, entry, op, ctx, .. } = apply;
        let bytes = self.byte_range(entry.range);
        let applied = self.leg.apply_thin(&op, bytes, &ctx, self.awake_now()).await;
        drop((op, ctx));
        self.step(|s, fx| s.on_replaced(from, entry, applied, fx));
    }
}

//! What a view change takes time for: draining the leg, and reconciling the members (RFD 0010, 5.7
//! and 5.8). What is decided in it is in [`state::view`](super::state).

use std::collections::BTreeSet;
use std::rc::Rc;

use block::{Bufs, Ctx, Error, MemoryClass};
use peer::{Message, PreparedEntry, View, WriteId, WriteKind, WriteOp};
use rt::fault_point::{self, FaultPoint};

use super::Mistake;
use super::config::MirrorConfig;
use super::membership::Event;
use super::reconcile::EntryCopy;
use super::replica::Replica;
use super::state::ReplicaState;
use super::state::sequencer::ReplicationOutcome;

impl Replica {
    /// Drains the leg for `view`, adopts `config` if it is given, and reports
    /// [`Event::ViewBegun`].
    pub(super) async fn prepare_view(self: Rc<Self>, view: View, config: Option<MirrorConfig>) {
        let is_drained = self.signal.until(|| self.state().is_drained_for(view)).await;
        if !is_drained || !self.step(ReplicaState::on_drained) {
            return;
        }
        let adopted = match &config {
            Some(config) => self.adopt_config(config, true).await,
            None => true,
        };
        if adopted {
            self.handle_event(Event::ViewBegun(view));
        }
    }

    /// At the primary: all members have reported their entries. Reconciles them.
    pub(super) async fn run_reconciliation(self: Rc<Self>, view: View) {
        let Some(committed) = self.reconcile(view).await else { return };
        fault_point::reach(FaultPoint::MembersReconciled);
        self.step(|s, fx| s.on_reconciled(view, committed, fx));
    }

    /// Makes all members equal on the prepared entries. Returns the writes that are committed by
    /// that; `None` if the view ends first, a leg fails, or the members contradict each other.
    async fn reconcile(self: &Rc<Self>, view: View) -> Option<BTreeSet<WriteId>> {
        let plan = match self.step(|s, _| s.plan_reconciliation(view)) {
            Ok(plan) => plan,
            Err(error) => {
                // One of them is wrong, and it is unknown which. The view stays inactive, so that
                // no member serves.
                tracing::error!(%error, %view, "the prepared entries of the members contradict each other");
                return None;
            }
        };
        let skip_copies = self.settings.has_mistake(Mistake::SkipsReconciliation);
        // A sole member has no other member to copy to.
        let skip_copies = skip_copies || self.others().is_empty();
        for copy in plan.copies.iter().filter(|_| !skip_copies) {
            self.copy_to_members(view, copy).await?;
        }
        Some(plan.committed.into_iter().collect())
    }

    /// Sends an entry that some members may lack to all other members, as a write of this view. All
    /// apply it, also those that hold it already. `None` if that does not succeed in this view.
    async fn copy_to_members(self: &Rc<Self>, view: View, copy: &EntryCopy) -> Option<()> {
        let entry = copy.entry;
        let bytes = if entry.kind == WriteKind::Data { self.byte_len(entry.range) } else { 0 };
        let ctx = self
            .while_in_view(view, self.reserve_memory(bytes, MemoryClass::Resync))
            .await?
            .ok()?;
        let data = match entry.kind {
            WriteKind::Data => self.read_from_holder(view, copy, &ctx).await?,
            WriteKind::Zero { .. } => Bufs::new(),
        };
        let PreparedEntry { range, kind, fua, write_id, .. } = entry;
        let op = WriteOp { range, kind, fua, data };
        let others = self.others();
        // The commit of a copy is not announced: `StartView` announces all commits. Until then the
        // copy is a prepared entry with the id of the original write. If this view ends early, the
        // next one finds it.
        let seq = self.step(|s, _| s.order_copy(others.iter().copied()));
        for link in self.open_links(others.iter().copied()) {
            let op = op.clone();
            link.send(Message::Write { view, seq, write_id, is_copy: true, op });
            fault_point::reach_when_sent(FaultPoint::ReconciliationCopySent);
        }
        if !copy.holders.contains(&self.me) {
            self.apply_copy(PreparedEntry { view, seq, write_id, range, kind, fua }, &op, &ctx)
                .await?;
        }
        if others.is_empty() {
            return Some(());
        }
        (self.replication_outcome(seq).await == ReplicationOutcome::Committed).then_some(())
    }

    /// Applies a copy to the leg of the primary, which does not hold the entry. `None` if the leg
    /// fails.
    async fn apply_copy(
        self: &Rc<Self>,
        entry: PreparedEntry,
        op: &WriteOp,
        ctx: &Ctx,
    ) -> Option<()> {
        let op_number = (entry.view, entry.seq);
        let lock = self.step(|s, _| s.prepare_own_copy(entry));
        lock.acquired().await;
        self.step(|s, _| s.prepared.set_lock(op_number, lock));
        let bytes = self.byte_range(entry.range);
        let mut applied = self.leg.apply(op, bytes.clone(), ctx, self.awake_now()).await;
        if applied == Err(Error::NoSpace) {
            // The member that holds the entry had space for its nonzero blocks.
            applied = self.leg.apply_thin(op, bytes, ctx, self.awake_now()).await;
        }
        self.step(|s, fx| s.on_own_copy_applied(op_number, applied, fx))
    }

    /// Reads the contents of an entry from a member that holds it: this one, if it does. `None` if
    /// this leg fails, or the view ends first.
    async fn read_from_holder(
        self: &Rc<Self>,
        view: View,
        copy: &EntryCopy,
        ctx: &Ctx,
    ) -> Option<Bufs> {
        let range = copy.entry.range;
        if copy.holders.contains(&self.me) {
            match self.leg.read(range, ctx, self.awake_now()).await {
                Ok(data) => return Some(data),
                Err(e) => {
                    // The leg cannot read what it has just written, so it has failed. This member
                    // will leave, and the next epoch begins without its entries.
                    self.on_leg_error(e);
                    return None;
                }
            }
        }
        for node in &copy.holders {
            if let Some(data) = self.fetch(view, *node, range, ctx).await {
                return Some(data);
            }
        }
        // No holder has sent the data. One that is silent will be excluded, and one that cannot
        // read will leave. Then another view begins.
        self.while_in_view(view, std::future::pending::<()>()).await;
        None
    }
}

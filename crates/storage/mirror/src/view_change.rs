//! View change: every member stops and reports its prepared entries, and the primary reconciles
//! them: it makes all members equal on these entries (RFD 0010, 5.7 and 5.8).

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use block::{Bufs, Ctx, Error, MemoryClass};
use peer::{Message, NodeId, PreparedEntry, Seq, View, WriteId, WriteKind, WriteOp};
use rt::fault_point::{self, FaultPoint};

use super::Mistake;
use super::config::MirrorConfig;
use super::join::AttemptEnd;
use super::local_writes::LocalWriteOutcome;
use super::membership::Event;
use super::prepared_list::EntrySource;
use super::reachability::UnreachablePairs;
use super::reconcile::{EntryCopy, plan_reconciliation};
use super::replica::Replica;
use super::sequencer::ReplicationOutcome;

/// The entries that members have reported to the primary in a view change.
#[derive(Debug, Default)]
pub(super) struct CollectedEntries {
    view: View,
    by_member: BTreeMap<NodeId, Vec<PreparedEntry>>,
}

/// The contents of [`Message::StartView`].
#[derive(Debug)]
pub(super) struct StartView {
    view: View,
    /// The last sequence number used by reconciliation.
    last_seq: Seq,
    /// The writes of which any member has reported an entry: they are committed once the view is
    /// active.
    committed: BTreeSet<WriteId>,
}

impl Replica {
    /// Begins `view`: from here on nothing of an older view is accepted or started. `config` is
    /// given if it must be adopted, because the epoch is new here. Reports [`Event::ViewBegun`]
    /// once the leg is drained and `config` is durable.
    pub(super) fn begin_view(self: &Rc<Self>, view: View, config: Option<MirrorConfig>) {
        let attempt = {
            let mut state = self.state_mut();
            state.view = view;
            state.view_began_at = state.awake_clock;
            state.join_attempt.take()
        };
        if attempt.is_some() {
            // Only a replica that the configuration lists as a member begins a view. So the join
            // attempt has succeeded.
            self.update_join_backoff(|backoff| backoff.after_admission(self.core.now()));
        }
        let mut state = self.state_mut();
        state.sequencer.end_view();
        state.joiners.end_view();
        // Members may be connected again by now. Those that are not will be reported again.
        state.unreachable_pairs = UnreachablePairs::default();
        // The dirty bits that the old view was about to clear stay set.
        state.pending_clear = None;
        drop(state);
        self.leg.forget_flushes();
        // Wake the readers and writers that wait for range locks: they give up when they see that
        // the view has ended.
        self.signal.raise();
        let this = Rc::clone(self);
        self.spawn(async move {
            let adopt = async || match &config {
                Some(config) => {
                    let is_member = true;
                    this.adopt_config(config, is_member).await
                }
                None => true,
            };
            let reports_partial = this.settings.has_mistake(Mistake::ReportsPartialWrites);
            // No-space writes that still wait for their replacements fail the leg: the
            // replacements will not come any more.
            let takes_part =
                this.drain(view).await && (reports_partial || this.fail_no_space_writes());
            if takes_part && adopt().await {
                this.handle_event(Event::ViewBegun(view));
            }
        });
    }

    /// Waits until every prepared entry has been applied to the leg or has failed. Returns false if
    /// a later view begins first, or the leg is lost.
    async fn drain(&self, view: View) -> bool {
        let check = || {
            if self.view() != view {
                return Some(false);
            }
            if self.leg.is_lost() {
                // It is unknown which entries a lost leg holds. All reported entries are committed
                // by the view, so one that no leg holds must not be reported.
                return Some(false);
            }
            let reports_early = self.settings.has_mistake(Mistake::ReportsBeforeDrain);
            (reports_early || self.state().prepared.is_drained()).then_some(true)
        };
        self.signal.until(check).await
    }

    /// Reports the prepared entries to the primary. Entries that the leg failed are not reported.
    pub(super) fn send_do_view_change(&self, view: View) {
        let failed = self.state_mut().prepared.take_failed();
        self.fail_local_writes(&failed);
        if let Some(link) = self.primary_link() {
            let entries = self.state().prepared.sorted_entries();
            link.send(Message::DoViewChange { view, entries });
            fault_point::reach_when_sent(FaultPoint::DoViewChangeSent);
        }
    }

    /// Answers the local writes that the leg failed with its error. Only a sole member gets here
    /// with such writes: with other members, a failed leg takes part in no view.
    fn fail_local_writes(&self, failed: &[(WriteId, Error)]) {
        for (write_id, e) in failed {
            self.local_writes.complete_by_id(*write_id, LocalWriteOutcome::Failed(*e));
        }
    }

    /// At the primary: a member has reported its entries.
    pub(super) fn on_do_view_change(
        self: &Rc<Self>,
        from: NodeId,
        view: View,
        entries: Vec<PreparedEntry>,
    ) {
        let valid = entries.iter().all(|e| self.contains(e.range));
        if view != self.view() || !self.others().contains(&from) || !valid {
            return;
        }
        {
            let collected = &mut self.state_mut().collected_entries;
            if collected.view != view {
                *collected = CollectedEntries { view, by_member: BTreeMap::new() };
            }
            collected.by_member.insert(from, entries);
        }
        self.handle_event(Event::DoViewChange(from, view));
    }

    /// At the primary: all members have reported their entries. Reconciles them.
    pub(super) fn start_reconciliation(self: &Rc<Self>, view: View) {
        let this = Rc::clone(self);
        self.spawn(async move {
            let Some(committed) = this.reconcile(view).await else { return };
            fault_point::reach(FaultPoint::MembersReconciled);
            let last_seq = this.state().sequencer.last_seq();
            this.state_mut().start_view = Some(StartView { view, last_seq, committed });
            this.handle_event(Event::Reconciled(view));
        });
    }

    /// Makes all members equal on the prepared entries. Returns the writes that are committed by
    /// that; `None` if the view ends first, a leg fails, or the members contradict each other.
    async fn reconcile(self: &Rc<Self>, view: View) -> Option<BTreeSet<WriteId>> {
        let failed = self.state_mut().prepared.take_failed();
        self.fail_local_writes(&failed);
        let own_entries: Vec<_> =
            self.state().prepared.sorted_entries().iter().map(|e| (self.me, *e)).collect();
        let peer_entries = self.collected_from_peers(view);
        let plan = match plan_reconciliation(own_entries.into_iter().chain(peer_entries)) {
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

    fn collected_from_peers(&self, view: View) -> Vec<(NodeId, PreparedEntry)> {
        let state = self.state();
        let collected = &state.collected_entries;
        let of_view = (collected.view == view).then_some(&collected.by_member);
        let all = of_view.into_iter().flatten();
        all.flat_map(|(node, entries)| entries.iter().map(|e| (*node, *e))).collect()
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
        let seq = self.order_copy(others.iter().copied());
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
        // Older entries keep this range locked until the view is active. The copy must not wait for
        // them.
        self.state_mut().prepared.release_locks(entry.range);
        let lock = self.range_locks.enter_with_priority(entry.range);
        let regions = self.guard_regions(entry.range);
        self.state_mut().prepared.insert(entry, None, regions, EntrySource::Reconciliation);
        lock.acquired().await;
        self.state_mut().prepared.set_lock(op_number, lock);
        let bytes = self.byte_range(entry.range);
        let mut applied = self.leg.apply(op, bytes.clone(), ctx, self.awake_now()).await;
        if applied == Err(Error::NoSpace) {
            // The member that holds the entry had space for its nonzero blocks.
            applied = self.leg.apply_thin(op, bytes, ctx, self.awake_now()).await;
        }
        match applied {
            Ok(()) => {
                self.state_mut().prepared.mark_applied(op_number);
                self.signal.raise();
                Some(())
            }
            Err(e) => {
                self.state_mut().prepared.mark_failed(op_number, e);
                self.on_leg_error(e);
                self.signal.raise();
                None
            }
        }
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

    /// At another member: the primary has reconciled all entries.
    pub(super) fn on_start_view(
        self: &Rc<Self>,
        from: NodeId,
        view: View,
        last_seq: Seq,
        committed: Vec<WriteId>,
    ) {
        if self.view() == view && self.primary() == Some(from) {
            let committed = committed.into_iter().collect();
            self.state_mut().start_view = Some(StartView { view, last_seq, committed });
            self.handle_event(Event::StartView(from, view));
        }
    }

    /// Activates the view. All members hold all entries up to the last one of reconciliation, so
    /// these are committed and leave the prepared list.
    pub(super) fn activate_view(self: &Rc<Self>, view: View) {
        let start_view = self.state_mut().start_view.take();
        let Some(start_view) = start_view.filter(|s| s.view == view) else { return };
        let StartView { last_seq, committed, .. } = start_view;
        if self.is_primary() {
            for link in self.open_links(self.others()) {
                let committed = committed.iter().copied().collect();
                link.send(Message::StartView { view, last_seq, committed });
                fault_point::reach_when_sent(FaultPoint::StartViewSent);
            }
            // Invite the out-of-sync replicas to join.
            for link in self.open_links(self.out_of_sync_replicas()) {
                link.send(Message::Rejoin { view });
            }
        }
        let mut state = self.state_mut();
        state.active_view = Some(view);
        state.leg_error = None;
        state.prepared.remove_through((view, last_seq));
        drop(state);
        self.local_writes.on_view_active(&committed);
        self.signal.raise();
    }

    /// This replica is not a member, or not any more. Its prepared entries are dropped, and its
    /// local writes are answered with [`Error::Fenced`].
    pub(super) fn on_out_of_sync(self: &Rc<Self>) {
        // From here on no message of any view is accepted. Writes that only this leg has applied
        // stay on it. Their regions are marked dirty, so that a resync overwrites them.
        self.state_mut().view = View::default();
        self.end_join_attempt(AttemptEnd::Superseded);
        self.update_join_backoff(|backoff| backoff.after_exclusion(self.core.now()));
        let mut state = self.state_mut();
        state.pending_clear = None;
        state.newer_joiners.clear();
        state.prepared.remove_applied();
        state.sequencer.end_view();
        state.joiners.end_view();
        drop(state);
        self.local_writes.fence();
        self.signal.raise();
    }
}

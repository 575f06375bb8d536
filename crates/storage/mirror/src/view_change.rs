//! View change: every member stops and reports its prepared entries, and the primary makes the
//! members equal (RFD 0010, 5.7 and 5.8).

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

/// The contents of START VIEW.
#[derive(Debug)]
pub(super) struct StartView {
    view: View,
    /// The last sequence number used by reconciliation.
    last_seq: Seq,
    /// The writes that the view commits.
    committed: BTreeSet<WriteId>,
}

impl Replica {
    /// Begins `view`: from here on nothing of an older view is accepted or started. Reports to the
    /// membership once the writes in flight have reached the disk and a new configuration is
    /// durable.
    pub(super) fn begin_view(self: &Rc<Self>, view: View, config: Option<MirrorConfig>) {
        let attempt = {
            let mut state = self.state_mut();
            state.view = view;
            state.view_began_at = state.awake_clock;
            state.join_attempt.take()
        };
        if attempt.is_some() {
            // Only a listed member begins a view.
            self.update_join_backoff(|attempts| attempts.after_admission(self.core.now()));
        }
        let mut state = self.state_mut();
        state.sequencer.end_view();
        state.joiners.end_view();
        // These reports are of other members, or the sessions are back by now.
        state.unreachable_pairs = UnreachablePairs::default();
        state.pending_clear = None;
        drop(state);
        self.leg.forget_flushes();
        // Wake readers and writers that wait for locks: they give up.
        self.signal.raise();
        let this = Rc::clone(self);
        self.spawn(async move {
            let adopted = async || match &config {
                Some(config) => this.adopt_config(config, true).await,
                None => true,
            };
            let reports_partial = this.settings.has_mistake(Mistake::ReportsPartialWrites);
            let drained =
                this.drain(view).await && (reports_partial || this.fail_no_space_writes());
            if drained && adopted().await {
                this.handle_event(Event::ViewBegun(view));
            }
        });
    }

    /// Waits until every entry has reached the disk; false if a later view begins first.
    async fn drain(&self, view: View) -> bool {
        let check = || {
            if self.view() != view {
                return Some(false);
            }
            if self.leg.is_lost() {
                // The entries of a lost leg must not be reported (attack 62).
                return Some(false);
            }
            let reports_early = self.settings.has_mistake(Mistake::ReportsBeforeDrain);
            (reports_early || self.state().prepared.is_drained()).then_some(true)
        };
        self.signal.until(check).await
    }

    /// Reports the prepared entries to the primary.
    pub(super) fn send_do_view_change(&self, view: View) {
        let failed = self.state_mut().prepared.take_failed();
        self.fail_local_writes(&failed);
        if let Some(link) = self.primary_link() {
            let entries = self.state().prepared.sorted_entries();
            link.send(Message::DoViewChange { view, entries });
            fault_point::reach_when_sent(FaultPoint::DoViewChangeSent);
        }
    }

    /// Fails the writes that the leg refused. A replica that is a member all the same is the last
    /// one.
    fn fail_local_writes(&self, failed: &[(WriteId, Error)]) {
        for (write_id, e) in failed {
            self.local_writes.complete_by_id(*write_id, LocalWriteOutcome::Failed(*e));
        }
    }

    /// A member has reported its entries.
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

    /// All members have reported their entries: reconciles them.
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

    /// Returns the committed writes; `None` if the view ends first.
    async fn reconcile(self: &Rc<Self>, view: View) -> Option<BTreeSet<WriteId>> {
        let failed = self.state_mut().prepared.take_failed();
        self.fail_local_writes(&failed);
        let own_entries: Vec<_> =
            self.state().prepared.sorted_entries().iter().map(|e| (self.me, *e)).collect();
        let peer_entries = self.collected_from_peers(view);
        let plan = match plan_reconciliation(own_entries.into_iter().chain(peer_entries)) {
            Ok(plan) => plan,
            Err(error) => {
                // Do not serve while the members contradict each other.
                tracing::error!(%error, %view, "the prepared entries of the members contradict each other");
                return None;
            }
        };
        let skip_copies = self.settings.has_mistake(Mistake::SkipsReconciliation);
        // A member alone has no others to copy to.
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

    /// Copies to all members what some of them have.
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
        // No member is told of the commit before START VIEW: until then the copy is an entry with
        // the id of the write it carries.
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

    /// Applies a copy to the leg of the primary, which lacks it.
    async fn apply_copy(
        self: &Rc<Self>,
        entry: PreparedEntry,
        op: &WriteOp,
        ctx: &Ctx,
    ) -> Option<()> {
        let op_number = (entry.view, entry.seq);
        self.state_mut().prepared.release_locks(entry.range);
        let lock = self.range_locks.enter_with_priority(entry.range);
        let regions = self.guard_regions(entry.range);
        self.state_mut().prepared.insert(entry, None, regions, EntrySource::Reconciliation);
        lock.acquired().await;
        self.state_mut().prepared.set_lock(op_number, lock);
        let bytes = self.byte_range(entry.range);
        let mut applied = self.leg.apply(op, bytes.clone(), ctx, self.awake_now()).await;
        if applied == Err(Error::NoSpace) {
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

    /// Reads the range of an entry from a replica that has it.
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
                    // This disk wrote the range moments ago (attack 44).
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
        // The holder is silent: its lease will expire, or it leaves, and another view begins.
        self.while_in_view(view, std::future::pending::<()>()).await;
        None
    }

    /// The primary has reconciled the members.
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

    /// Activates the view: all entries up to the end of reconciliation are at all members.
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

    /// This replica is not a member any more, and forgets its writes.
    pub(super) fn on_out_of_sync(self: &Rc<Self>) {
        // Accept nothing of any view; regions of writes left on the leg are dirty.
        self.state_mut().view = View::default();
        self.end_join_attempt(AttemptEnd::Superseded);
        self.update_join_backoff(|attempts| attempts.after_exclusion(self.core.now()));
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

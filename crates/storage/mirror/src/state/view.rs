//! Views: every member stops and reports its prepared entries, the primary has them reconciled, and
//! the view becomes active (RFD 0010, 5.7).

use std::collections::{BTreeMap, BTreeSet};

use block::{Error, RangeLock};
use peer::{Message, NodeId, PreparedEntry, Seq, View, WriteId};
use rt::fault_point::FaultPoint;

use super::super::Mistake;
use super::super::config::MirrorConfig;
use super::super::membership::Event;
use super::super::reconcile::{EntryConflict, Reconciliation, plan_reconciliation};
use super::ReplicaState;
use super::effects::{Effect, Effects};
use super::join::AttemptEnd;
use super::local_writes::LocalWriteOutcome;
use super::prepared_list::{EntrySource, OpNumber};
use super::reachability::UnreachablePairs;

/// The entries that members have reported to the primary in a view change.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct CollectedEntries {
    view: View,
    by_member: BTreeMap<NodeId, Vec<PreparedEntry>>,
}

/// The contents of [`Message::StartView`].
#[derive(Clone, Debug)]
pub(in super::super) struct StartView {
    view: View,
    /// The last sequence number used by reconciliation.
    last_seq: Seq,
    /// The writes of which any member has reported an entry: they are committed once the view is
    /// active.
    committed: BTreeSet<WriteId>,
}

impl ReplicaState {
    /// Begins `view`: from here on nothing of an older view is accepted or started. `config` is
    /// given if it must be adopted, because the epoch is new here.
    pub(super) fn begin_view(
        &mut self,
        view: View,
        config: Option<MirrorConfig>,
        effects: &mut Effects,
    ) {
        self.view = view;
        self.view_began_at = self.awake_clock;
        if self.join_attempt.take().is_some() {
            // Only a replica that the configuration lists as a member begins a view. So the join
            // attempt has succeeded.
            self.join_backoff = self.join_backoff.after_admission(self.now);
        }
        self.sequencer.end_view();
        self.joiners.end_view();
        // Members may be connected again by now. Those that are not will be reported again.
        self.unreachable_pairs = UnreachablePairs::default();
        // The dirty bits that the old view was about to clear stay set.
        self.pending_clear = None;
        self.image.forget_flushes();
        // Wake the readers and writers that wait for range locks: they give up when they see that
        // the view has ended.
        effects.wake();
        effects.push(Effect::PrepareView(view, config));
    }

    /// Whether every prepared entry has been applied to the leg or has failed; `None` if not yet.
    /// False if `view` is over, or the leg is lost.
    pub(in super::super) fn is_drained_for(&self, view: View) -> Option<bool> {
        // It is unknown which entries a lost leg holds. All reported entries are committed by the
        // view, so one that no leg holds must not be reported.
        if self.view != view || self.leg_loss.is_some() {
            return Some(false);
        }
        let reports_early = self.has_mistake(Mistake::ReportsBeforeDrain);
        (reports_early || self.prepared.is_drained()).then_some(true)
    }

    /// The leg is drained: returns whether this member takes part in the view. No-space writes that
    /// still wait for their replacements fail the leg: the replacements will not come any more.
    pub(in super::super) fn on_drained(&mut self, effects: &mut Effects) -> bool {
        self.has_mistake(Mistake::ReportsPartialWrites) || self.fail_no_space_writes(effects)
    }

    /// Reports the prepared entries to the primary. Entries that the leg failed are not reported.
    pub(super) fn send_do_view_change(&mut self, view: View, effects: &mut Effects) {
        self.fail_local_writes();
        if let Some(primary) = self.primary() {
            let entries = self.prepared.sorted_entries();
            effects.send(primary, Message::DoViewChange { view, entries });
            effects.reach_when_sent(FaultPoint::DoViewChangeSent);
        }
    }

    /// Answers the local writes that the leg failed with its error. Only a sole member gets here
    /// with such writes: with other members, a failed leg takes part in no view.
    fn fail_local_writes(&mut self) {
        for (write_id, e) in self.prepared.take_failed() {
            self.local_writes.complete_by_id(write_id, LocalWriteOutcome::Failed(e));
        }
    }

    /// At the primary: a member has reported its entries.
    pub(in super::super) fn on_do_view_change(
        &mut self,
        from: NodeId,
        view: View,
        entries: Vec<PreparedEntry>,
        effects: &mut Effects,
    ) {
        let valid = entries.iter().all(|e| self.contains(e.range));
        if view != self.view || !self.others().contains(&from) || !valid {
            return;
        }
        let collected = &mut self.collected_entries;
        if collected.view != view {
            *collected = CollectedEntries { view, by_member: BTreeMap::new() };
        }
        collected.by_member.insert(from, entries);
        self.handle_event(Event::DoViewChange(from, view), effects);
    }

    /// At the primary: all members have reported their entries. Returns what has to be made equal.
    ///
    /// # Errors
    /// [`EntryConflict`] if the members contradict each other.
    pub(in super::super) fn plan_reconciliation(
        &mut self,
        view: View,
    ) -> Result<Reconciliation, EntryConflict> {
        self.fail_local_writes();
        let own_entries = self.prepared.sorted_entries().into_iter().map(|e| (self.me, e));
        let collected = &self.collected_entries;
        let of_view = (collected.view == view).then_some(&collected.by_member);
        let reported = of_view.into_iter().flatten();
        let peer_entries = reported.flat_map(|(node, entries)| entries.iter().map(|e| (*node, *e)));
        plan_reconciliation(own_entries.chain(peer_entries))
    }

    /// At the primary: its own leg, which lacks the entry, is to apply the copy of it. Returns the
    /// lock of its range, which is to be held first.
    pub(in super::super) fn prepare_own_copy(&mut self, entry: PreparedEntry) -> RangeLock {
        // Older entries keep this range locked until the view is active. The copy must not wait for
        // them.
        self.prepared.release_locks(entry.range);
        let lock = self.range_locks.enter_with_priority(entry.range);
        let regions = self.guard_regions(entry.range);
        self.prepared.insert(entry, None, regions, EntrySource::Reconciliation);
        lock
    }

    /// At the primary: its own leg has applied a copy, or failed it, which is `None`.
    pub(in super::super) fn on_own_copy_applied(
        &mut self,
        op_number: OpNumber,
        applied: Result<(), Error>,
        effects: &mut Effects,
    ) -> Option<()> {
        match applied {
            Ok(()) => self.prepared.mark_applied(op_number),
            Err(e) => {
                self.prepared.mark_failed(op_number, e);
                self.on_leg_error(e, effects);
            }
        }
        effects.wake();
        applied.ok()
    }

    /// At the primary: all members are equal on the prepared entries.
    pub(in super::super) fn on_reconciled(
        &mut self,
        view: View,
        committed: BTreeSet<WriteId>,
        effects: &mut Effects,
    ) {
        let last_seq = self.sequencer.last_seq();
        self.start_view = Some(StartView { view, last_seq, committed });
        self.handle_event(Event::Reconciled(view), effects);
    }

    /// At another member: the primary has reconciled all entries.
    pub(in super::super) fn on_start_view(
        &mut self,
        from: NodeId,
        view: View,
        last_seq: Seq,
        committed: Vec<WriteId>,
        effects: &mut Effects,
    ) {
        if self.view == view && self.primary() == Some(from) {
            let committed = committed.into_iter().collect();
            self.start_view = Some(StartView { view, last_seq, committed });
            self.handle_event(Event::StartView(from, view), effects);
        }
    }

    /// Activates the view. All members hold all entries up to the last one of reconciliation, so
    /// these are committed and leave the prepared list.
    pub(super) fn activate_view(&mut self, view: View, effects: &mut Effects) {
        let start_view = self.start_view.take().filter(|s| s.view == view);
        let Some(StartView { last_seq, committed, .. }) = start_view else { return };
        if self.is_primary() {
            for node in self.others() {
                let committed = committed.iter().copied().collect();
                effects.send(node, Message::StartView { view, last_seq, committed });
                effects.reach_when_sent(FaultPoint::StartViewSent);
            }
            // Invite the out-of-sync replicas to join.
            for node in self.out_of_sync_replicas() {
                effects.send(node, Message::Rejoin { view });
            }
        }
        self.active_view = Some(view);
        self.leg_error = None;
        self.prepared.remove_through((view, last_seq));
        self.local_writes.on_view_active(&committed);
        effects.wake();
    }

    /// This replica is not a member, or not any more. Its prepared entries are dropped, and its
    /// local writes are answered with [`Error::Fenced`].
    pub(in super::super) fn on_out_of_sync(&mut self, effects: &mut Effects) {
        // From here on no message of any view is accepted. Writes that only this leg has applied
        // stay on it. Their regions are marked dirty, so that a resync overwrites them.
        self.view = View::default();
        self.end_join_attempt(AttemptEnd::Superseded);
        self.join_backoff = self.join_backoff.after_exclusion(self.now);
        self.pending_clear = None;
        self.newer_joiners.clear();
        self.prepared.remove_applied();
        self.sequencer.end_view();
        self.joiners.end_view();
        self.local_writes.fence();
        effects.wake();
    }
}

//! Messages of other replicas.

use std::rc::Rc;

use block::Ctx;
use intent_log::ExportedBitmap;
use peer::{
    Link, Message, NodeId, PreparedEntry, ReceivedMessage, View, WriteId, WriteKind, WriteOp,
};

use super::peer_requests::{NoSpaceReport, PeerAnswer};
use super::replica::Replica;
use super::state::ReplicaState;
use super::state::lease_messages::is_lease_message;
use super::state::local_writes::LocalWriteOutcome;

impl Replica {
    /// Handles a message of the session of `link`. A message of a view that has not begun here
    /// waits for it, and so does its lane; dropping the future drops the message.
    pub(super) async fn receive(self: &Rc<Self>, link: Link, received: ReceivedMessage) {
        let ReceivedMessage { message, ctx } = received;
        // Not a step: it decides nothing, and every message comes by here.
        self.state_mut().note_session_message(link.node());
        if let Some(view) = payload_view(&message)
            && view > self.view()
        {
            let begun = || (self.view() >= view || link.is_closed()).then_some(());
            self.signal.until(begun).await;
        }
        if !link.is_closed() {
            self.dispatch(link, message, ctx);
        }
    }

    fn dispatch(self: &Rc<Self>, link: Link, message: Message, ctx: Option<Ctx>) {
        let from = link.node();
        match message {
            Message::ReplicaReport(_)
            | Message::LeaseRequest { .. }
            | Message::LeaseGrant { .. }
            | Message::NewerEpoch { .. }
            | Message::RevokeLease { .. }
            | Message::LeaseRevoked { .. }
            | Message::StartViewChange { .. } => {
                self.step(|s, fx| s.on_membership_message(from, message, fx));
            }
            Message::DoViewChange { view, entries } => {
                self.step(|s, fx| s.on_do_view_change(from, view, entries, fx));
            }
            Message::StartView { view, last_seq, committed } => {
                self.step(|s, fx| s.on_start_view(from, view, last_seq, committed, fx));
            }
            Message::Rejoin { .. } => self.step(ReplicaState::on_rejoin),
            Message::Join {
                incarnation,
                epoch,
                volume_bytes,
                region_shift,
                generations,
                dirty_bits,
            } => {
                let dirty_bits = ExportedBitmap { volume_bytes, region_shift, bits: dirty_bits };
                self.on_join(from, incarnation, epoch, (generations, dirty_bits));
            }
            // Answered even if its view is over.
            Message::Fetch { view, request, range } => {
                self.spawn(Rc::clone(self).serve_fetch(link, view, request, range));
            }
            Message::JoinAccepted { view, incarnation, generations } => {
                self.step(|s, fx| s.on_join_accepted(from, view, incarnation, generations, fx));
            }
            Message::JoinAborted { incarnation } => self.step(|s, fx| {
                s.on_join_aborted(incarnation);
                s.drop_joiner_attempt(from, incarnation, fx);
            }),
            message => self.dispatch_in_view(link, message, ctx),
        }
    }

    /// Handles messages that are valid in one view only.
    fn dispatch_in_view(self: &Rc<Self>, link: Link, message: Message, ctx: Option<Ctx>) {
        let from = link.node();
        let Some(view) = view_of(&message).filter(|view| *view == self.view()) else { return };
        match message {
            Message::WriteRequest { .. } | Message::CompareAndWrite { .. } => {
                self.on_ordering_request(&link, message, ctx);
            }
            Message::Write { seq, write_id, is_copy, op, .. } => {
                let (Some(ctx), true) = (ctx, self.is_valid_op(&op)) else { return };
                let (range, kind, fua) = (op.range, op.kind, op.fua);
                let entry = PreparedEntry { view, seq, write_id, range, kind, fua };
                self.step(|s, fx| s.on_write(from, entry, is_copy, (op, ctx), fx));
            }
            Message::OpAssigned { number, seq, .. } => {
                self.step(|s, fx| s.on_op_assigned(from, view, number, seq, fx));
            }
            Message::PeersApplied { number, .. } => {
                self.step(|s, fx| s.on_peers_applied(number, fx));
            }
            Message::RetryRequest { number, .. } => {
                self.step(|s, _| s.answer(number, LocalWriteOutcome::RetryWithNewStamp));
            }
            Message::CompareAndWriteResult { number, outcome, .. } => {
                self.step(|s, _| s.answer(number, LocalWriteOutcome::CompareAndWrite(outcome)));
            }
            Message::Applied { seq, .. } => self.step(|s, fx| s.on_applied(view, seq, from, fx)),
            Message::NoSpace { seq, .. } => self.step(|s, fx| s.on_no_space(from, view, seq, fx)),
            Message::NoSpaceQuery { request, seq, .. } => {
                self.spawn(Rc::clone(self).serve_no_space_query(link, view, request, seq));
            }
            Message::NoSpaceReport { request, free_bytes, zero_blocks, .. } => {
                let report = NoSpaceReport { free_bytes, zero_blocks };
                self.peer_requests.complete(request, from, PeerAnswer::NoSpace(report));
            }
            Message::Commit { seqs, .. } => {
                self.step(|s, _| seqs.into_iter().for_each(|seq| s.commit_entry(view, seq)));
            }
            Message::RequestCommit { .. } => self.send_pending_commits(view),
            Message::Flush { request, generation, .. } => {
                self.spawn(Rc::clone(self).serve_flush(from, link, view, (request, generation)));
            }
            Message::Flushed { request, .. } => {
                self.peer_requests.complete(request, from, PeerAnswer::Flushed);
            }
            Message::FetchResult { request, result, .. } => {
                self.peer_requests.complete(request, from, PeerAnswer::Fetched(result));
            }
            Message::RepairRange { range, .. } => {
                let this = Rc::clone(self);
                self.spawn(async move {
                    let _ = this.repair(view, range).await;
                });
            }
            Message::ClearRegions { request, regions, .. } => {
                self.on_clear_regions(view, request, &regions);
            }
            Message::IdleDirtyRegions { regions, .. } => self.step(|s, _| s.on_idle_dirty(regions)),
            Message::PeerUnreachable { node, .. } => {
                self.step(|s, _| s.on_peer_unreachable(from, node));
            }
            Message::Digest { request, range, .. } => {
                self.spawn(Rc::clone(self).serve_digest(link, view, request, range));
            }
            Message::DigestResult { request, result, .. } => {
                self.peer_requests.complete(request, from, PeerAnswer::Digest(result));
            }
            _ => {}
        }
    }

    /// Handles a message of a lease connection.
    pub(super) fn on_lease_message(self: &Rc<Self>, from: NodeId, message: Message) {
        if is_lease_message(&message) {
            self.step(|s, fx| {
                s.note_lease_message(from);
                s.on_membership_message(from, message, fx);
            });
        }
    }

    /// Handles a write or compare-and-write that the primary is to order.
    fn on_ordering_request(self: &Rc<Self>, link: &Link, message: Message, ctx: Option<Ctx>) {
        let from = link.node();
        let (view, number, stamp) = match &message {
            Message::WriteRequest { view, number, stamp, .. }
            | Message::CompareAndWrite { view, number, stamp, .. } => (*view, *number, *stamp),
            _ => return,
        };
        let Some(ctx) = ctx else { return };
        if !self.step(|s, fx| s.accepts_request(from, view, (number, stamp), fx)) {
            return;
        }
        let write_id = WriteId { origin: from, number };
        match message {
            Message::WriteRequest { op, .. } if self.is_valid_op(&op) => {
                self.spawn_eager(Rc::clone(self).serve_write_request(
                    link.clone(),
                    view,
                    write_id,
                    op,
                    ctx,
                ));
            }
            Message::CompareAndWrite { range, fua, data, .. } if self.contains(range) => {
                let request =
                    super::compare_and_write::CompareAndWriteRequest { write_id, range, fua, data };
                self.spawn(Rc::clone(self).serve_compare_and_write(
                    link.clone(),
                    view,
                    request,
                    ctx,
                ));
            }
            _ => tracing::warn!(node = from.0, "dropped a write outside the volume"),
        }
    }

    /// Whether the range of `op` is valid, and its data has the right length.
    fn is_valid_op(&self, op: &WriteOp) -> bool {
        let bytes = if op.kind == WriteKind::Data { self.byte_len(op.range) } else { 0 };
        self.contains(op.range) && op.data.len() == bytes
    }
}

/// The view that a message with payload waits for.
pub(super) fn payload_view(message: &Message) -> Option<View> {
    match message {
        Message::Write { view, .. }
        | Message::WriteRequest { view, .. }
        | Message::CompareAndWrite { view, .. } => Some(*view),
        _ => None,
    }
}

/// The view to which a message belongs.
pub(super) fn view_of(message: &Message) -> Option<View> {
    match message {
        Message::WriteRequest { view, .. }
        | Message::OpAssigned { view, .. }
        | Message::PeersApplied { view, .. }
        | Message::RetryRequest { view, .. }
        | Message::Write { view, .. }
        | Message::Applied { view, .. }
        | Message::NoSpace { view, .. }
        | Message::NoSpaceQuery { view, .. }
        | Message::NoSpaceReport { view, .. }
        | Message::Commit { view, .. }
        | Message::RequestCommit { view, .. }
        | Message::CompareAndWrite { view, .. }
        | Message::CompareAndWriteResult { view, .. }
        | Message::Flush { view, .. }
        | Message::Flushed { view, .. }
        | Message::FetchResult { view, .. }
        | Message::RepairRange { view, .. }
        | Message::ClearRegions { view, .. }
        | Message::IdleDirtyRegions { view, .. }
        | Message::PeerUnreachable { view, .. }
        | Message::Digest { view, .. }
        | Message::DigestResult { view, .. } => Some(*view),
        _ => None,
    }
}

//! Writes that members have no space for (RFD 0040).
//!
//! A write for which a thin leg has no space is applied in part, or not at all. If another member
//! has applied it and has room for more, the leg counts as failed, and its member leaves. If no
//! member has room, none needs to leave: the primary makes all members write the same contents to
//! the range, which needs no space, and the write is rejected.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use block::{Bufs, Ctx, Error, MemoryClass};
use futures_util::future::join_all;
use peer::{Link, Message, NodeId, PreparedEntry, Seq, View, WriteKind, WriteOp};

use super::Mistake;
use super::peer_requests::{NoSpaceReport, PeerAnswer};
use super::replica::Replica;
use super::state::prepared_list::OpNumber;
use super::state::sequencer::ReplicationOutcome;
use super::state::write::WriteOutcome;
use super::state::{Nodes, ReplicaState};
use super::zeroes::split_by_zeroes;

/// How long the system may take to report free space.
const FREE_SPACE_TIMEOUT: Duration = Duration::from_secs(1);

/// What is done with such a write.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NoSpaceDecision {
    /// Members that have it keep it, and the others leave.
    Keep,
    /// All members reject it. These blocks of it (first block, count) are to be zeroes.
    Reject(Vec<(u64, u64)>),
}

impl Replica {
    /// Clears the full state once there is room again.
    pub(super) fn check_free_space(self: &Rc<Self>) {
        if !self.step(|s, _| s.begin_space_check()) {
            return;
        }
        let this = Rc::clone(self);
        self.spawn(async move {
            if this.free_bytes().await >= this.settings.min_free_bytes {
                this.step(ReplicaState::on_space_freed);
            }
        });
    }

    /// At the primary: all members have answered the write, and the `rejected_by` nodes have no
    /// space for it.
    pub(super) async fn resolve_no_space(
        self: &Rc<Self>,
        entry: PreparedEntry,
        rejected_by: Nodes,
    ) -> WriteOutcome {
        let zeroes = match self.decide_no_space(&entry, &rejected_by).await {
            Some(NoSpaceDecision::Reject(zeroes)) => zeroes,
            Some(NoSpaceDecision::Keep) => {
                return self.step(|s, fx| s.keep_write(&entry, &rejected_by, fx));
            }
            None => return self.abandon_write(&entry),
        };
        let skip_replacement = self.settings.has_mistake(Mistake::SkipsNoSpaceReplacement);
        // No joiner is admitted before the replacements are done.
        let joiners = self.step(|s, _| s.joiners.await_replacements());
        let outcome = match skip_replacement {
            true => WriteOutcome::Committed,
            false => self.replace_on_all(&entry, &zeroes).await,
        };
        self.step(|s, fx| {
            s.joiners.replacements_done(&joiners);
            fx.wake();
        });
        if outcome != WriteOutcome::Committed {
            return outcome;
        }
        self.step(|s, fx| s.commit_rejected(&entry, fx));
        WriteOutcome::Failed(Error::NoSpace)
    }

    /// Decides what is done with the write; `None` if the view ends first.
    async fn decide_no_space(
        self: &Rc<Self>,
        entry: &PreparedEntry,
        rejected_by: &Nodes,
    ) -> Option<NoSpaceDecision> {
        let (view, others) = (entry.view, self.others());
        let queries = others.iter().map(|node| self.query_no_space(view, *node, entry.seq));
        let (reports, own_free_bytes) = futures_util::join!(join_all(queries), self.free_bytes());
        let reports = reports.into_iter().collect::<Option<Vec<_>>>()?;
        if self.is_view_over(view) {
            return None;
        }
        let has_room = |node: NodeId, free| {
            !rejected_by.contains(&node) && free >= self.settings.min_free_bytes
        };
        let mut keep = has_room(self.me, own_free_bytes);
        let mut zeroes = Vec::new();
        for (node, report) in others.into_iter().zip(reports) {
            keep |= has_room(node, report.free_bytes);
            match report.zero_blocks {
                Ok(ranges) => zeroes.extend(ranges),
                Err(_) => keep = true,
            }
        }
        // A region without a dirty bit here would not be copied to a joiner.
        keep |= !self.leg.log.is_hot(self.byte_range(entry.range));
        // A joiner whose admission is pending must not differ.
        keep |= self.step(ReplicaState::cancel_admissions);
        Some(if keep { NoSpaceDecision::Keep } else { NoSpaceDecision::Reject(zeroes) })
    }

    /// Makes all members and joiners write the same to the range of a write: the contents at this
    /// member, except for `zeroes`. That needs no space.
    async fn replace_on_all(
        self: &Rc<Self>,
        entry: &PreparedEntry,
        zeroes: &[(u64, u64)],
    ) -> WriteOutcome {
        let PreparedEntry { view, seq, range, .. } = *entry;
        let op_number = (view, seq);
        // From here on this member cannot drain for another view until the replacement is applied.
        let begun = self.step(|s, _| s.prepared.begin_replacement(entry));
        if !begun {
            return WriteOutcome::ViewEnded;
        }
        let (op, ctx) = match self.replacement(entry, zeroes).await {
            Ok(replacement) if !self.is_view_over(view) => replacement,
            Err(e) if !self.is_view_over(view) => return self.fail_replacement(op_number, e),
            _ => {
                self.step(|s, _| s.prepared.mark_applied(op_number));
                return self.abandon_write(entry);
            }
        };
        self.step(|s, fx| s.order_replacement(entry, &op, fx));
        let bytes = self.byte_range(range);
        if let Err(e) = self.leg.apply_thin(&op, bytes, &ctx, self.awake_now()).await {
            return self.fail_replacement(op_number, e);
        }
        drop((op, ctx));
        self.step(|s, _| s.prepared.mark_applied(op_number));
        if self.is_view_over(view) {
            return self.abandon_write(entry);
        }
        self.step(|s, fx| s.on_applied(view, seq, self.me, fx));
        let all = self.replication_outcome(seq);
        match self.signal.unless(|| self.is_view_over(view), all).await {
            Some(ReplicationOutcome::Committed) => WriteOutcome::Committed,
            Some(_) => WriteOutcome::ViewEnded,
            None => self.abandon_write(entry),
        }
    }

    /// Stops waiting for the write: the next view reconciles its range. There will be one, whether
    /// clients are still rejected or not.
    fn abandon_write(self: &Rc<Self>, entry: &PreparedEntry) -> WriteOutcome {
        self.step(|s, fx| s.abandon_view(entry.view, fx));
        WriteOutcome::ViewEnded
    }

    /// The leg failed even a write that needs no space.
    fn fail_replacement(self: &Rc<Self>, op_number: OpNumber, e: Error) -> WriteOutcome {
        self.step(|s, fx| s.on_replacement_failed(op_number, e, fx))
    }

    /// The replacement of a rejected write, and memory to apply it.
    async fn replacement(
        &self,
        entry: &PreparedEntry,
        zeroes: &[(u64, u64)],
    ) -> Result<(WriteOp, Ctx), Error> {
        let PreparedEntry { view, range, kind, .. } = *entry;
        if kind != WriteKind::Data {
            // Zeroes need no space if the blocks may be unmapped.
            let memory = self.reserve_memory(0, MemoryClass::PeerReply);
            let ctx = self.while_in_view(view, memory).await.ok_or(Error::Fenced)??;
            let kind = WriteKind::Zero { unmap: true };
            return Ok((WriteOp { range, kind, fua: false, data: Bufs::new() }, ctx));
        }
        let ctx = self.reserve_answer_memory(view, range).await?;
        let old = self.leg.read(range, &ctx, self.awake_now()).await?;
        let block = self.leg.dev.info().block_size as usize;
        let mut data = Bufs::new();
        for (n, at) in (range.at.0..).zip((0..old.len()).step_by(block)) {
            let is_zero = zeroes.iter().any(|&(first, count)| n >= first && n - first < count);
            let part = if is_zero { Bufs::zeroes(block) } else { old.slice(at..at + block) };
            data.append(part);
        }
        Ok((WriteOp { range, kind, fua: false, data }, ctx))
    }

    /// Free bytes for this replica, less the writes in flight.
    async fn free_bytes(&self) -> u64 {
        let free = tokio::time::timeout(FREE_SPACE_TIMEOUT, self.free_space.free_bytes()).await;
        let block = u64::from(self.leg.dev.info().block_size);
        let applying = self.state().prepared.applying_blocks().saturating_mul(block);
        // Unknown free space is no reason to reject a write.
        free.ok().flatten().map_or(u64::MAX, |free| free.saturating_sub(applying))
    }

    /// Asks `node` about a write; `None` if the view ends first.
    async fn query_no_space(&self, view: View, node: NodeId, seq: Seq) -> Option<NoSpaceReport> {
        let request = self.peer_requests.next_number();
        let pending = self.peer_requests.register(request, node, self.awake_now());
        if let Some(link) = self.link(node) {
            link.send(Message::NoSpaceQuery { view, request, seq });
        }
        // A new session of that node begins a new view.
        match self.signal.unless(|| self.is_view_over(view), pending.wait_answer()).await? {
            PeerAnswer::NoSpace(report) => Some(report),
            _ => None,
        }
    }

    /// Answers a NO SPACE QUERY.
    pub(super) async fn serve_no_space_query(
        self: Rc<Self>,
        link: Link,
        view: View,
        request: u64,
        seq: Seq,
    ) {
        let zero_blocks = self.zero_blocks_of((view, seq)).await;
        let free_bytes = self.free_bytes().await;
        link.send(Message::NoSpaceReport { view, request, free_bytes, zero_blocks });
    }

    /// The blocks of a write without space here that read as zeroes.
    async fn zero_blocks_of(&self, op_number: OpNumber) -> Result<Vec<(u64, u64)>, Error> {
        let status = self.state().prepared.status(op_number).ok_or(Error::Fenced)?;
        let PreparedEntry { range, kind, view, .. } = status.entry;
        if !status.no_space || kind != WriteKind::Data {
            return Ok(Vec::new());
        }
        let ctx = self.reserve_answer_memory(view, range).await?;
        let data = self.leg.read(range, &ctx, self.awake_now()).await?;
        let block = self.leg.dev.info().block_size as usize;
        let zeroes = split_by_zeroes(&data, block).into_iter().filter(|(_, is_zero)| *is_zero);
        let blocks = |bytes: Range<usize>| {
            (range.at.0 + (bytes.start / block) as u64, (bytes.len() / block) as u64)
        };
        Ok(zeroes.map(|(part, _)| blocks(part)).collect())
    }
}

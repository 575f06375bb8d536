//! Verify: compares the members (RFD 0010, 9.5).

use std::rc::Rc;

use block::{Blocks, Error, Lba, MemoryClass};
use peer::{Link, Message, NodeId, View};
use sha2::{Digest, Sha256};

use super::peer_requests::PeerAnswer;
use super::replica::Replica;

/// Bytes compared at once.
const VERIFY_CHUNK_BYTES: u64 = 256 * 1024;

/// A range in which a member differs from the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyMismatch {
    /// The range.
    pub range: Blocks,
    /// The node whose contents differ from the primary's.
    pub node: NodeId,
}

/// The result of a verify.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// The nodes whose copies were compared, the primary first.
    pub nodes: Vec<NodeId>,
    /// Blocks in which at least two members were compared.
    pub compared_blocks: u64,
    /// Ranges that some member could not read.
    pub unreadable_ranges: u64,
    /// Where members differed; at most 1024 are kept.
    pub mismatches: Vec<VerifyMismatch>,
    /// Total blocks of the ranges that differ.
    pub mismatched_blocks: u64,
    /// Blocks of those ranges that were overwritten at all members.
    pub repaired_blocks: u64,
}

impl Replica {
    /// Compares all members over the whole volume. Reads go on; writes wait for one chunk.
    ///
    /// # Errors
    /// [`Error::Fenced`] if this is not the primary, or stops being it.
    pub(super) async fn verify(
        self: &Rc<Self>,
        keep: Option<NodeId>,
    ) -> Result<VerifyReport, Error> {
        let view = self.serving_view().filter(|_| self.is_primary()).ok_or(Error::Fenced)?;
        let is_member = |node: NodeId| node == self.me || self.others().contains(&node);
        if keep.is_some_and(|node| !is_member(node)) {
            return Err(Error::Fenced);
        }
        let info = self.leg.dev.info();
        let step = VERIFY_CHUNK_BYTES / u64::from(info.block_size);
        let nodes: Vec<_> = std::iter::once(self.me).chain(self.others()).collect();
        let mut report = VerifyReport { nodes, ..VerifyReport::default() };
        let starts = (0..info.blocks).step_by(usize::try_from(step).unwrap_or(usize::MAX));
        let chunks = starts.map(|at| Blocks::new(Lba(at), step.min(info.blocks - at)));
        for range in chunks.chain(self.metadata_range()) {
            if self.verify_range(view, range, &mut report).await? {
                continue;
            }
            report.mismatched_blocks += range.count;
            if let Some(node) = keep
                && self.repair_from(view, range, Some(node)).await
            {
                report.repaired_blocks += range.count;
            }
        }
        Ok(report)
    }

    /// Whether all members hold the same contents there, as far as they can be read.
    async fn verify_range(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        report: &mut VerifyReport,
    ) -> Result<bool, Error> {
        let lock = self.range_locks.enter(range, false);
        self.while_in_view(view, lock.acquired()).await.ok_or(Error::Fenced)?;
        // Other members may wait for commits of earlier writes.
        self.send_pending_commits(view);
        let Ok(own) = self.local_digest(range).await else {
            report.unreadable_ranges += 1;
            return Ok(true);
        };
        let (mut equal, mut compared) = (true, false);
        for node in self.others() {
            match self.peer_digest(view, node, range).await? {
                Ok(digest) if digest == own => compared = true,
                Ok(_) => {
                    (equal, compared) = (false, true);
                    tracing::error!(at = range.at.0, node = node.0, "replicas differ");
                    if report.mismatches.len() < 1024 {
                        report.mismatches.push(VerifyMismatch { range, node });
                    }
                }
                Err(_) => report.unreadable_ranges += 1,
            }
        }
        if compared {
            report.compared_blocks += range.count;
        }
        Ok(equal)
    }

    async fn peer_digest(
        self: &Rc<Self>,
        view: View,
        node: NodeId,
        range: Blocks,
    ) -> Result<Result<[u8; 32], Error>, Error> {
        let link = self.link(node).ok_or(Error::Fenced)?;
        let request = self.peer_requests.next_number();
        let pending = self.peer_requests.register(request, node, self.awake_now());
        link.send(Message::Digest { view, request, range });
        match self.while_in_view(view, pending.wait_answer()).await {
            Some(PeerAnswer::Digest(result)) => Ok(result),
            _ => Err(Error::Fenced),
        }
    }

    async fn local_digest(&self, range: Blocks) -> Result<[u8; 32], Error> {
        let ctx = self.reserve_memory(self.byte_len(range), MemoryClass::PeerReply).await?;
        let data = self.leg.read(range, &ctx, self.awake_now()).await?;
        let mut digest = Sha256::new();
        data.iter().for_each(|buf| digest.update(&**buf));
        Ok(digest.finalize().into())
    }

    /// Answers a DIGEST.
    pub(super) async fn serve_digest(
        self: Rc<Self>,
        link: Link,
        view: View,
        request: u64,
        range: Blocks,
    ) {
        if !self.contains(range) || self.byte_len(range) > self.max_transfer() {
            link.send(Message::DigestResult { view, request, result: Err(Error::OutOfRange) });
            return;
        }
        let lock = self.range_locks.enter(range, false);
        if self.while_in_view(view, lock.acquired()).await.is_some() {
            let result = self.local_digest(range).await;
            link.send(Message::DigestResult { view, request, result });
        }
    }
}

//! Comparing the members (RFD 0010, 9.5).

use std::rc::Rc;

use block::{Blocks, Class, Error, Lba};
use peer::{Link, Message, NodeId, View};
use sha2::{Digest, Sha256};

use super::replica::Replica;
use super::requests::Answer;

/// What is compared at once, in bytes.
const STEP: u64 = 256 * 1024;

/// A range that two members have different contents in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Where.
    pub range: Blocks,
    /// Who has other contents than the primary.
    pub node: NodeId,
}

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The nodes whose copies were compared, the primary first.
    pub nodes: Vec<NodeId>,
    /// Blocks in which at least two members were compared.
    pub compared: u64,
    /// Ranges that some member could not read.
    pub unreadable: u64,
    /// Where members differed; at most 1024 are kept.
    pub differences: Vec<Difference>,
    /// Blocks of all ranges in which any differed.
    pub differing: u64,
    /// Blocks that were written to all members since some differed there.
    pub repaired: u64,
}

impl Replica {
    /// Compares all members over the whole volume. Readers go on; writers wait for one step.
    ///
    /// # Errors
    /// [`Error::Fenced`] if this is not the primary, or stops being it.
    pub(super) async fn verify(self: &Rc<Self>, keep: Option<NodeId>) -> Result<Verified, Error> {
        let view = self.serves().filter(|_| self.is_primary()).ok_or(Error::Fenced)?;
        let member = |node: NodeId| node == self.me || self.others().contains(&node);
        if keep.is_some_and(|node| !member(node)) {
            return Err(Error::Fenced);
        }
        let info = self.leg.dev.info();
        let step = STEP / u64::from(info.block_size);
        let nodes: Vec<_> = std::iter::once(self.me).chain(self.others()).collect();
        let mut verified = Verified { nodes, ..Verified::default() };
        let starts = (0..info.blocks).step_by(usize::try_from(step).unwrap_or(usize::MAX));
        let inside = starts.map(|at| Blocks::new(Lba(at), step.min(info.blocks - at)));
        for range in inside.chain(self.aside()) {
            if self.verify_range(view, range, &mut verified).await? {
                continue;
            }
            verified.differing += range.count;
            if let Some(node) = keep
                && self.repair_from(view, range, Some(node)).await
            {
                verified.repaired += range.count;
            }
        }
        Ok(verified)
    }

    /// Whether all members have the same there, as far as they can read it.
    async fn verify_range(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        verified: &mut Verified,
    ) -> Result<bool, Error> {
        let lock = self.locks.enter(range, false);
        self.in_view(view, lock.held()).await.ok_or(Error::Fenced)?;
        // Others may wait for commits of what lies before.
        self.tell(view);
        let Ok(mine) = self.sum(range).await else {
            verified.unreadable += 1;
            return Ok(true);
        };
        let (mut equal, mut compared) = (true, false);
        for node in self.others() {
            match self.sum_of(view, node, range).await? {
                Ok(theirs) if theirs == mine => compared = true,
                Ok(_) => {
                    (equal, compared) = (false, true);
                    tracing::error!(at = range.at.0, node = node.0, "replicas differ");
                    if verified.differences.len() < 1024 {
                        verified.differences.push(Difference { range, node });
                    }
                }
                Err(_) => verified.unreadable += 1,
            }
        }
        if compared {
            verified.compared += range.count;
        }
        Ok(equal)
    }

    async fn sum_of(
        self: &Rc<Self>,
        view: View,
        node: NodeId,
        range: Blocks,
    ) -> Result<Result<[u8; 32], Error>, Error> {
        let link = self.link(node).ok_or(Error::Fenced)?;
        let request = self.requests.number();
        let asked = self.requests.ask(request, node, self.pulse.get());
        link.send(Message::Sum { view, request, range });
        match self.in_view(view, asked.answered()).await {
            Some(Answer::Sum(result)) => Ok(result),
            _ => Err(Error::Fenced),
        }
    }

    async fn sum(&self, range: Blocks) -> Result<[u8; 32], Error> {
        let ctx = self.memory(self.len(range), Class::Answer).await?;
        let data = self.leg.read(range, &ctx, self.pulse.get()).await?;
        let mut digest = Sha256::new();
        data.iter().for_each(|buf| digest.update(&**buf));
        Ok(digest.finalize().into())
    }

    /// Answers a SUM.
    pub(super) async fn serve_sum(
        self: Rc<Self>,
        link: Link,
        view: View,
        request: u64,
        range: Blocks,
    ) {
        if !self.is_inside(range) || self.len(range) > self.max_transfer() {
            link.send(Message::Summed { view, request, result: Err(Error::OutOfRange) });
            return;
        }
        let lock = self.locks.enter(range, false);
        if self.in_view(view, lock.held()).await.is_some() {
            let result = self.sum(range).await;
            link.send(Message::Summed { view, request, result });
        }
    }
}

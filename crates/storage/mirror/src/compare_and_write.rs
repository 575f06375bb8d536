//! COMPARE AND WRITE, executed by the primary (RFD 0010, 4.5); and repair, which writes back what
//! it has read in the same way.

use std::rc::Rc;

use block::{Blocks, Bufs, Ctx, Error, Lba, MemoryClass, RequestError};
use peer::{CompareAndWriteOutcome, Link, Message, NodeId, View, WriteId, WriteKind, WriteOp};

use super::replica::Replica;
use super::state::local_writes::LocalWriteOutcome;
use super::state::write::{PayloadSource, WriteOutcome};
use super::write::LocalWrite;

/// A compare-and-write, local or of another member.
#[derive(Debug)]
pub(super) struct CompareAndWriteRequest {
    pub(super) write_id: WriteId,
    pub(super) range: Blocks,
    pub(super) fua: bool,
    /// The expected contents, then the new ones.
    pub(super) data: Bufs,
}

/// The result of a compare-and-write at the primary.
enum CompareAndWriteProgress {
    Completed(Result<(), RequestError>),
    /// The view ended before it had any effect.
    NotOrdered,
    /// The view ended; the next one decides whether it took effect.
    ViewEnded,
}

impl Replica {
    /// Replaces the contents from `at` on by `write`, if they equal `compare`.
    pub(super) async fn compare_and_write(
        self: &Rc<Self>,
        at: Lba,
        compare: &Bufs,
        write: &Bufs,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), RequestError> {
        let block = u64::from(self.leg.dev.info().block_size);
        let range = Blocks::new(at, write.len() as u64 / block);
        let data: Bufs = compare.iter().chain(write.iter()).cloned().collect();
        let local_write = LocalWrite::begin(self);
        let request = CompareAndWriteRequest { write_id: local_write.id(), range, fua, data };
        loop {
            let view = self.wait_serving(ctx).await?;
            local_write.reset();
            if self.is_primary() {
                match self.compare_and_write_as_primary(view, &request, ctx).await {
                    CompareAndWriteProgress::Completed(result) => return result,
                    CompareAndWriteProgress::NotOrdered => continue,
                    CompareAndWriteProgress::ViewEnded => {}
                }
            } else {
                self.forward_compare_and_write(view, &local_write, &request);
            }
            match local_write.outcome().await {
                LocalWriteOutcome::Committed
                | LocalWriteOutcome::CompareAndWrite(CompareAndWriteOutcome::Done) => return Ok(()),
                LocalWriteOutcome::CompareAndWrite(CompareAndWriteOutcome::Miscompare {
                    offset,
                }) => {
                    return Err(RequestError::Miscompare { offset });
                }
                LocalWriteOutcome::CompareAndWrite(CompareAndWriteOutcome::Failed(e))
                | LocalWriteOutcome::Failed(e) => return Err(e.into()),
                LocalWriteOutcome::Retry => {}
                LocalWriteOutcome::RetryWithNewStamp => self.wait_lease_renewed(view).await,
                LocalWriteOutcome::Fenced => return Err(Error::Fenced.into()),
            }
        }
    }

    fn forward_compare_and_write(
        &self,
        view: View,
        local_write: &LocalWrite<'_>,
        request: &CompareAndWriteRequest,
    ) {
        let Some(link) = self.primary_link() else { return };
        let (number, stamp) = (local_write.id().number, self.granted_stamp(link.node()));
        let CompareAndWriteRequest { range, fua, .. } = *request;
        let data = request.data.clone();
        link.send(Message::CompareAndWrite { view, number, stamp, range, fua, data });
    }

    /// Executes a compare-and-write of another member, at the primary.
    pub(super) async fn serve_compare_and_write(
        self: Rc<Self>,
        link: Link,
        view: View,
        request: CompareAndWriteRequest,
        ctx: Ctx,
    ) {
        let len = self.byte_len(request.range);
        if request.data.len() != len * 2 || len > self.max_transfer() {
            let outcome = CompareAndWriteOutcome::Failed(Error::OutOfRange);
            link.send(Message::CompareAndWriteResult {
                view,
                number: request.write_id.number,
                outcome,
            });
            return;
        }
        let number = request.write_id.number;
        match self.compare_and_write_as_primary(view, &request, &ctx).await {
            CompareAndWriteProgress::Completed(result) => {
                link.send(Message::CompareAndWriteResult {
                    view,
                    number,
                    outcome: to_outcome(result),
                });
            }
            // If the view goes on after all, the origin sends it again.
            CompareAndWriteProgress::NotOrdered => {
                link.send(Message::RetryRequest { view, number });
            }
            CompareAndWriteProgress::ViewEnded => {}
        }
        drop(ctx);
    }

    async fn compare_and_write_as_primary(
        self: &Rc<Self>,
        view: View,
        request: &CompareAndWriteRequest,
        ctx: &Ctx,
    ) -> CompareAndWriteProgress {
        let CompareAndWriteRequest { write_id, range, fua, ref data } = *request;
        let lock = self.range_locks.enter(range, true);
        let over = || self.is_view_over(view);
        if self.signal.unless(over, lock.acquired()).await.is_none() {
            return CompareAndWriteProgress::NotOrdered;
        }
        // The memory that came with the request of another member holds only its data.
        let read_ctx = match write_id.origin == self.me {
            true => ctx.clone(),
            false => match self.reserve_answer_memory(view, range).await {
                Ok(read_ctx) => read_ctx,
                Err(_) => return CompareAndWriteProgress::NotOrdered,
            },
        };
        let current = self.read_under_write_lock(view, range, &read_ctx).await;
        // The data read is valid only if the lease still holds.
        if self.serving_view() != Some(view) {
            return CompareAndWriteProgress::NotOrdered;
        }
        let current = match current {
            Ok(current) => current,
            Err(e) => return CompareAndWriteProgress::Completed(Err(e.into())),
        };
        let half = data.len() / 2;
        if let Some(offset) = data.slice(0..half).first_difference(&current) {
            return CompareAndWriteProgress::Completed(Err(RequestError::Miscompare {
                offset: offset as u64,
            }));
        }
        drop((current, read_ctx));
        let data = data.slice(half..data.len());
        let op = WriteOp { range, kind: WriteKind::Data, fua, data };
        match self.replicate_locked(view, write_id, PayloadSource::Primary, &op, lock, ctx).await {
            WriteOutcome::Committed => CompareAndWriteProgress::Completed(Ok(())),
            WriteOutcome::Failed(e) => CompareAndWriteProgress::Completed(Err(e.into())),
            WriteOutcome::NotOrdered => CompareAndWriteProgress::NotOrdered,
            WriteOutcome::ViewEnded => CompareAndWriteProgress::ViewEnded,
        }
    }

    /// Reads a range that this primary has locked for a write.
    async fn read_under_write_lock(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        match self.leg.read(range, ctx, self.awake_now()).await {
            Err(e @ (Error::Unreadable { .. } | Error::Corrupt { .. })) => {
                // Other members may hold the range for writes whose commits have not been sent yet.
                self.send_pending_commits(view);
                self.fetch_from_any(view, range, ctx).await.ok_or(e)
            }
            result => result,
        }
    }

    /// Writes a good copy of `range` to all members, at the primary. Returns whether all have it.
    pub(super) async fn repair(self: &Rc<Self>, view: View, range: Blocks) -> bool {
        self.repair_from(view, range, None).await
    }

    /// As [`Self::repair`], with the contents at member `node`, if given.
    pub(super) async fn repair_from(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        node: Option<NodeId>,
    ) -> bool {
        let fits = self.contains(range) && self.byte_len(range) <= self.max_transfer();
        if !fits || !self.is_primary() || self.serving_view() != Some(view) {
            return false;
        }
        let Ok(ctx) = self.reserve_memory(self.byte_len(range), MemoryClass::Resync).await else {
            return false;
        };
        let lock = self.range_locks.enter(range, true);
        if self.while_in_view(view, lock.acquired()).await.is_none() {
            return false;
        }
        let result = match node.filter(|node| *node != self.me) {
            None => self.read_under_write_lock(view, range, &ctx).await,
            Some(node) => {
                // It may hold the range for a write whose commit has not been sent yet.
                self.send_pending_commits(view);
                let result = self.fetch(view, node, range, &ctx).await;
                result.ok_or(Error::Unreadable { at: range.at })
            }
        };
        if self.serving_view() != Some(view) {
            return false;
        }
        match result {
            Ok(data) => {
                let local_write = LocalWrite::begin(self);
                let op = WriteOp { range, kind: WriteKind::Data, fua: true, data };
                let outcome = self
                    .replicate_locked(
                        view,
                        local_write.id(),
                        PayloadSource::Primary,
                        &op,
                        lock,
                        &ctx,
                    )
                    .await;
                tracing::warn!(at = range.at.0, blocks = range.count, placed = ?outcome, "repaired");
                outcome == WriteOutcome::Committed
            }
            Err(error) => {
                tracing::error!(at = range.at.0, %error, "no replica can read this");
                false
            }
        }
    }
}

/// The outcome to send for the result of a compare-and-write.
fn to_outcome(result: Result<(), RequestError>) -> CompareAndWriteOutcome {
    match result {
        Ok(()) => CompareAndWriteOutcome::Done,
        Err(RequestError::Miscompare { offset }) => CompareAndWriteOutcome::Miscompare { offset },
        Err(RequestError::Device(e)) => CompareAndWriteOutcome::Failed(e),
        // Reservations and client admission are handled above the mirror.
        Err(RequestError::ReservationConflict | RequestError::NoMemory) => {
            CompareAndWriteOutcome::Failed(Error::Aborted)
        }
    }
}

//! Resync at the primary: copies dirty regions to a joiner, mirrors new writes to it, and has it
//! admitted (RFD 0010, 6.6).

use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Bufs, Ctx, Epoch, Error, Lba, MemoryClass};
use futures_util::{StreamExt, stream};
use intent_log::{ExportedBitmap, GenerationUpdate, Region};
use peer::{Incarnation, Message, NodeId, PeerGenerations, View, WriteId, WriteKind, WriteOp};
use rt::fault_point::{self, FaultPoint};

use super::bitmap_clearing::send_clear_regions;
use super::config::InSyncMember as Listed;
use super::membership::Event;
use super::replica::Replica;
use super::state::is_metadata;
use super::state::joiners::{Joiner, UnreadableData};
use super::state::sequencer::ReplicationOutcome;
use super::zeroes::is_zero;

/// Most bytes copied in one chunk.
const CHUNK_BYTES: u64 = 256 * 1024;

/// Chunks in flight at once.
const COPY_DEPTH: usize = 4;

/// How often unreadable ranges are read again.
const UNREADABLE_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Most unreadable ranges that an attempt remembers.
const MAX_UNREADABLE_RANGES: usize = 4096;

/// Most blocks of such a range: never more bytes than a chunk, whatever the block size.
const MAX_UNREADABLE_BLOCKS: u64 = CHUNK_BYTES / 4096;

/// How often progress is made durable.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(30);

/// Ranges that no replica can read, so that the copy lacks them.
#[derive(Debug, Default)]
struct UnreadableRanges {
    ranges: Vec<Blocks>,
    /// Whether there are more than are remembered.
    is_overflowed: bool,
}

impl UnreadableRanges {
    /// Adds ranges. Adjacent ranges are merged, up to the size of a chunk.
    fn add(&mut self, ranges: Vec<Blocks>) {
        for range in ranges {
            let has_room = self.ranges.len() < MAX_UNREADABLE_RANGES;
            let touches = |last: &&mut Blocks| {
                last.at.0 + last.count == range.at.0
                    && last.count + range.count <= MAX_UNREADABLE_BLOCKS
            };
            match self.ranges.last_mut().filter(touches) {
                Some(last) => last.count += range.count,
                None if has_room => self.ranges.push(range),
                None => self.is_overflowed = true,
            }
        }
    }
}

/// Identifies a resync attempt.
#[derive(Clone, Copy, Debug)]
struct ResyncAttempt {
    view: View,
    node: NodeId,
    incarnation: Incarnation,
}

impl Replica {
    /// Handles the request of an out-of-sync replica to join.
    pub(super) fn on_join(
        self: &Rc<Self>,
        node: NodeId,
        incarnation: Incarnation,
        epoch: Epoch,
        state: (PeerGenerations, ExportedBitmap),
    ) {
        let Some(view) = self.step(|s, fx| s.on_join(node, incarnation, epoch, fx)) else { return };
        let attempt = ResyncAttempt { view, node, incarnation };
        let this = Rc::clone(self);
        self.spawn(async move {
            if let Err(reason) = this.resync(attempt, state).await {
                tracing::info!(node = node.0, why = reason, "a resync has ended");
                this.step(|s, fx| {
                    s.drop_joiner_attempt(node, incarnation, fx);
                    s.joiners.set_failure(node, reason);
                });
            }
        });
    }

    /// The out-of-sync replicas whose last resync failed, and why.
    pub(super) fn failed_resyncs(&self) -> Vec<(NodeId, &'static str)> {
        let state = self.state();
        let out_of_sync = state.out_of_sync_replicas();
        out_of_sync
            .into_iter()
            .filter_map(|node| Some((node, state.joiners.last_failure(node)?)))
            .collect()
    }

    async fn resync(
        self: &Rc<Self>,
        attempt: ResyncAttempt,
        (generations, dirty_bits): (PeerGenerations, ExportedBitmap),
    ) -> Result<(), &'static str> {
        let ResyncAttempt { view, node, incarnation } = attempt;
        let link = self.link(node).ok_or("there is no session")?;
        let image = self.image_of(node).ok_or("it is no longer a replica")?;
        self.check_joiner_generations(node, image, generations).await?;
        self.leg.log.merge_bitmap(image, &dirty_bits).await.map_err(|error| {
            tracing::warn!(%error, node = node.0, "the dirty bitmap of a replica is rejected");
            "its dirty bitmap was rejected"
        })?;
        if self.serving_view() != Some(view) || link.is_closed() {
            return Err("the view is over");
        }
        if self.state().join_requests.get(&node) != Some(&incarnation) {
            return Err("it has sent a new join request");
        }
        // From here on every write goes there too; earlier writes have marked their regions dirty.
        let regions = self.leg.log.dirty_regions(image);
        let bytes = regions.len() as u64 * self.leg.log.geometry().region_bytes();
        self.step(|s, _| s.joiners.attach(node, incarnation, bytes));
        tracing::info!(node = node.0, regions = regions.len(), %view, "a resync begins");
        let other_images = self.leg.log.generations().into_iter().filter(|(of, _)| *of != image);
        let generations = other_images.map(|(of, shared)| (of, shared.common)).collect();
        link.send(Message::JoinAccepted { view, incarnation, generations });
        let unreadable = self.copy_all(attempt, image, regions).await?;
        self.wait_until_readable(attempt, unreadable).await?;
        self.flush_barrier(attempt).await?;
        fault_point::reach(FaultPoint::ResyncFlushed);
        let replacements_done =
            || match self.with_joiner(attempt, |joiner| joiner.pending_replacements == 0) {
                Ok(false) => None,
                Ok(true) => Some(Ok(())),
                Err(reason) => Some(Err(reason)),
            };
        self.signal.until(replacements_done).await?;
        self.propose_admission(attempt)
    }

    /// Accesses the joiner, as long as this attempt lasts.
    fn with_joiner<T>(
        self: &Rc<Self>,
        attempt: ResyncAttempt,
        access: impl FnOnce(&mut Joiner) -> T,
    ) -> Result<T, &'static str> {
        self.step(|s, _| s.joiners.get(attempt.node, attempt.incarnation).map(access))
            .ok_or("it was cancelled")
    }

    /// From here on the joiner takes part in every flush; and all earlier writes are durable
    /// everywhere.
    async fn flush_barrier(self: &Rc<Self>, attempt: ResyncAttempt) -> Result<(), &'static str> {
        self.with_joiner(attempt, |joiner| joiner.in_flushes = true)?;
        match self.flush_members(attempt.view, 0).await {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err("the view is over"),
            Err(_) => Err("the flush failed"),
        }
    }

    fn propose_admission(self: &Rc<Self>, attempt: ResyncAttempt) -> Result<(), &'static str> {
        let ResyncAttempt { view, node, incarnation } = attempt;
        if self.view() != view {
            return Err("the view is over");
        }
        self.step(|s, fx| {
            let joiner = s.joiners.get(node, incarnation).ok_or("it was cancelled")?;
            joiner.admission_proposed = true;
            s.handle_event(Event::Admit(Listed { node, incarnation }), fx);
            Ok(())
        })
    }

    /// Copies the dirty regions, once there is a permit. Returns the ranges that no replica can
    /// read.
    async fn copy_all(
        self: &Rc<Self>,
        attempt: ResyncAttempt,
        image: uuid::Uuid,
        regions: Vec<Region>,
    ) -> Result<UnreadableRanges, &'static str> {
        let permit =
            Box::pin(self.while_in_view(attempt.view, self.resync_permits.acquire())).await;
        let _permit = permit.ok_or("the view is over")?.map_err(|_| "copying has stopped")?;
        let mut saved_at = self.core.now();
        let (mut copied, mut unreadable) = (Vec::new(), UnreadableRanges::default());
        let batches = regions.chunks(COPY_DEPTH * 4);
        for batch in batches {
            let mut chunks =
                stream::iter(batch.iter().flat_map(|r| self.region_chunks(*r)).collect::<Vec<_>>())
                    .map(|range| self.copy_range(attempt, range))
                    .buffer_unordered(COPY_DEPTH);
            // Wait for all chunks, also after a failure: copies in flight are not dropped.
            let mut all = Ok(());
            while let Some(result) = chunks.next().await {
                all = all.and(result.map(|left_out| unreadable.add(left_out)));
            }
            all?;
            self.report_unreadable(attempt, &unreadable, false)?;
            // If some ranges are not remembered, it is unknown which regions they are in.
            if !unreadable.is_overflowed {
                copied.extend(
                    batch.iter().filter(|r| !self.region_overlaps(**r, &unreadable.ranges)),
                );
            }
            if self.core.now() >= saved_at + CHECKPOINT_INTERVAL {
                self.checkpoint_progress(attempt, image, std::mem::take(&mut copied)).await?;
                saved_at = self.core.now();
            }
        }
        Ok(unreadable)
    }

    fn region_overlaps(&self, region: Region, ranges: &[Blocks]) -> bool {
        let bytes = self.leg.log.geometry().region_range(region);
        let overlaps = |r: &Blocks| {
            let (range, region) = (self.byte_range(*r), bytes.clone().unwrap_or_default());
            range.start < region.end && region.start < range.end
        };
        ranges.iter().any(overlaps)
    }

    /// Waits until the unreadable ranges have been rewritten. The joiner has everything else and
    /// gets new writes, so that it has these ranges too once they are rewritten.
    async fn wait_until_readable(
        self: &Rc<Self>,
        attempt: ResyncAttempt,
        mut unreadable: UnreadableRanges,
    ) -> Result<(), &'static str> {
        let mut reported = 0;
        while let Some(first) = unreadable.ranges.first() {
            let (node, at, ranges) = (attempt.node.0, first.at.0, unreadable.ranges.len());
            if reported != ranges {
                tracing::error!(
                    node,
                    at,
                    ranges,
                    "no replica can read this range: the joiner cannot be in sync until it is rewritten"
                );
                reported = ranges;
            }
            self.report_unreadable(attempt, &unreadable, true)?;
            let pause = tokio::time::sleep(UNREADABLE_RETRY_INTERVAL);
            self.while_in_view(attempt.view, pause).await.ok_or("the view is over")?;
            for range in std::mem::take(&mut unreadable.ranges) {
                unreadable.add(self.copy_range(attempt, range).await?);
            }
        }
        self.report_unreadable(attempt, &unreadable, true)?;
        match unreadable.is_overflowed {
            true => Err("too many unreadable ranges to remember: the resync starts again"),
            false => Ok(()),
        }
    }

    /// Reports the unreadable ranges in the status.
    fn report_unreadable(
        self: &Rc<Self>,
        attempt: ResyncAttempt,
        unreadable: &UnreadableRanges,
        blocks_admission: bool,
    ) -> Result<(), &'static str> {
        self.with_joiner(attempt, |_| ())?;
        let mut ranges: Vec<Blocks> =
            unreadable.ranges.iter().copied().filter(|range| !is_metadata(*range)).collect();
        ranges.sort_by_key(|range| range.at.0);
        let data = UnreadableData::from_ranges(
            ranges.iter().map(|range| self.byte_range(*range)),
            blocks_admission,
        );
        self.step(|s, _| s.joiners.set_unreadable(attempt.node, data));
        Ok(())
    }

    /// Clears the dirty bits of copied regions, so that the next attempt continues from there.
    async fn checkpoint_progress(
        self: &Rc<Self>,
        attempt: ResyncAttempt,
        image: uuid::Uuid,
        copied: Vec<Region>,
    ) -> Result<(), &'static str> {
        let ResyncAttempt { view, node, .. } = attempt;
        let Ok(Some((_, stamp))) = self.flush_members(view, 0).await else {
            return Err("the view is over");
        };
        // After the stamp: writes to regions quiet since then were applied at the joiner before
        // this begins.
        let request = self.peer_requests.next_number();
        let generation = self.step(|s, _| s.next_generation(view));
        self.flush_peer(view, node, request, generation.count).await.ok_or("the view is over")?;
        self.with_joiner(attempt, |_| ())?;
        let (shared_with, cleared) = (vec![image], Some((generation, vec![image])));
        let update = GenerationUpdate { generation, shared_with, cleared };
        self.leg.log.record_generation(update).await.map_err(|_| "the source's log failed")?;
        self.with_joiner(attempt, |_| ())?;
        let quiet = self.retain_quiet(copied, stamp);
        // At the joiner too, or its dirty bits bring them back with the next attempt (attack 65).
        if let Some(link) = self.link(node) {
            send_clear_regions(&link, view, request, &self.region_extents(&quiet));
        }
        self.leg.log.clear(&[image], quiet, stamp);
        self.leg.log.write_back().await.map_err(|_| "the source's log failed")
    }

    fn region_chunks(&self, region: Region) -> Vec<Blocks> {
        let block = u64::from(self.leg.dev.info().block_size);
        let Some(bytes) = self.leg.log.geometry().region_range(region) else { return Vec::new() };
        let starts = (bytes.start..bytes.end).step_by(CHUNK_BYTES as usize);
        let chunk = |at| Blocks::new(Lba(at / block), CHUNK_BYTES.min(bytes.end - at) / block);
        // Metadata blocks are marked dirty with the first block of the volume.
        let metadata = self.metadata_range().filter(|_| bytes.start == 0);
        metadata.into_iter().chain(starts.map(chunk)).collect()
    }

    /// Copies one chunk, and returns the blocks that no replica can read.
    async fn copy_range(
        self: &Rc<Self>,
        attempt: ResyncAttempt,
        range: Blocks,
    ) -> Result<Vec<Blocks>, &'static str> {
        let (mut left, mut unreadable) = (vec![range], Vec::new());
        while let Some(part) = left.pop() {
            if self.try_copy(attempt, part).await? {
                continue;
            }
            if part.count == 1 {
                unreadable.push(part);
                continue;
            }
            let half = part.count / 2;
            let rest = Lba(part.at.0 + half);
            left.push(Blocks::new(rest, part.count - half));
            left.push(Blocks::new(part.at, half));
        }
        Ok(unreadable)
    }

    /// Copies a part of a chunk, unless no replica can read it: reads go on, writes wait.
    async fn try_copy(
        self: &Rc<Self>,
        attempt: ResyncAttempt,
        range: Blocks,
    ) -> Result<bool, &'static str> {
        let ResyncAttempt { view, node, .. } = attempt;
        let started_at = self.core.now();
        self.with_joiner(attempt, |_| ())?;
        let ctx = self
            .reserve_memory(self.byte_len(range), MemoryClass::Resync)
            .await
            .map_err(|_| "no memory")?;
        let lock = self.range_locks.enter(range, false);
        self.while_in_view(view, lock.acquired()).await.ok_or("the view is over")?;
        let Some(op) = self.read_for_copy(view, range, &ctx).await? else { return Ok(false) };
        self.with_joiner(attempt, |_| ())?;
        let link = self.link(node).ok_or("there is no session")?;
        let seq = self.step(|s, _| s.order_copy([node]));
        let write_id = WriteId { origin: NodeId(0), number: 0 };
        link.send(Message::Write { view, seq, write_id, is_copy: true, op });
        fault_point::reach_when_sent(FaultPoint::ResyncCopySent);
        let outcome = self.replication_outcome(seq).await;
        drop(lock);
        if outcome != ReplicationOutcome::Committed {
            return Err("the view is over");
        }
        // An aborted attempt is not waited for, whatever the joiner has applied. Metadata blocks do
        // not count as dirty bytes.
        let copied = if is_metadata(range) { 0 } else { self.byte_len(range) as u64 };
        self.with_joiner(attempt, |joiner| joiner.copied_bytes += copied)?;
        self.throttle(self.core.now().saturating_sub(started_at)).await;
        Ok(true)
    }

    /// Reads the contents to copy, from any member; `None` if no member can read them. (Zeroes
    /// instead would be returned to readers as if they had been written: attack 68.)
    async fn read_for_copy(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        ctx: &Ctx,
    ) -> Result<Option<WriteOp>, &'static str> {
        let op = |data| copy_op(range, data);
        match self.leg.read(range, ctx, self.awake_now()).await {
            Ok(data) => Ok(Some(op(data))),
            Err(Error::Unreadable { .. } | Error::Corrupt { .. }) => {
                let data = self.fetch_from_any(view, range, ctx).await;
                if data.is_none() && self.view() != view {
                    return Err("the view is over");
                }
                Ok(data.map(op))
            }
            Err(e) => {
                self.on_leg_error(e);
                Err("the source's disk failed")
            }
        }
    }

    /// Leaves three quarters of the time to active clients, down to a minimum rate.
    async fn throttle(&self, took: Duration) {
        if self.state().local_writes.len() == 0 && self.state().prepared.len() == 0 {
            return;
        }
        let longest = Duration::from_secs_f64(
            CHUNK_BYTES as f64 / self.settings.resync_min_bytes_per_s as f64,
        );
        tokio::time::sleep((took * 3).min(longest)).await;
    }
}

/// The write that copies `data` to `range`. Zeroes are sent without payload and free space: the
/// copy of a thin volume is thin too.
fn copy_op(range: Blocks, data: Bufs) -> WriteOp {
    let (kind, data) = if is_zero(&data) {
        (WriteKind::Zero { unmap: true }, Bufs::new())
    } else {
        (WriteKind::Data, data)
    };
    WriteOp { range, kind, fua: false, data }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_ranges_are_sent_as_zeroes_and_others_as_data() {
        let range = Blocks::new(Lba(3), 16);
        let op = copy_op(range, Bufs::zeroes(8192));
        assert_eq!((op.kind, op.data.len()), (WriteKind::Zero { unmap: true }, 0));
        let mut bytes = vec![0; 8192];
        bytes[8191] = 1;
        let pool = rt::buf::BufferPool::new(1 << 20).unwrap();
        let credit = pool.account().try_credit(8192, MemoryClass::Read).unwrap();
        let op = copy_op(range, rt::buf::copy_in(&credit, &bytes));
        assert_eq!((op.kind, op.data.len()), (WriteKind::Data, 8192));
    }
}

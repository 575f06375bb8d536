//! Which dirty bits may be cleared, and under which data generation (RFD 0010, 6.3; RFD 0032).

use std::time::Duration;

use intent_log::{FlushStamp, Region};
use peer::{DataGeneration, View};
use uuid::Uuid;

use super::ReplicaState;

/// How often dirty bits are considered for clearing.
pub(in super::super) const CLEAR_INTERVAL: Duration = Duration::from_secs(5);

/// Most regions that are cleared at once.
pub(in super::super) const CLEAR_BATCH_MAX: usize = 4096;

/// Regions to be cleared here once the data generation of that clearing has been recorded.
#[derive(Debug)]
pub(in super::super) struct PendingClear {
    pub(in super::super) generation: DataGeneration,
    /// The images in whose bitmaps here the dirty bits are cleared.
    pub(in super::super) images: Vec<Uuid>,
    pub(in super::super) stamp: FlushStamp,
    queued_at: Duration,
    /// In order.
    pub(in super::super) regions: Vec<Region>,
}

impl ReplicaState {
    /// A member has reported idle dirty regions, as byte ranges.
    pub(in super::super) fn on_idle_dirty(&mut self, ranges: Vec<(u64, u64)>) {
        if self.is_primary() && self.reported_dirty.len() < CLEAR_BATCH_MAX {
            self.reported_dirty.extend(ranges.into_iter().take(CLEAR_BATCH_MAX));
        }
    }

    /// What members have reported since this was last asked.
    pub(in super::super) fn take_reported_dirty(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.reported_dirty)
    }

    /// The primary has said that these `regions`, which are in order, may be cleared in the bitmaps
    /// of `images` once `generation` is recorded here.
    pub(in super::super) fn queue_clear(
        &mut self,
        generation: DataGeneration,
        images: Vec<Uuid>,
        stamp: FlushStamp,
        regions: Vec<Region>,
    ) {
        match &mut self.pending_clear {
            Some(pending) if pending.generation == generation => {
                pending.regions.extend(regions);
                pending.regions.sort_unstable();
            }
            // The regions of the older one stay dirty, and are considered again later.
            other => {
                let queued_at = self.now;
                *other = Some(PendingClear { generation, images, stamp, queued_at, regions });
            }
        }
    }

    /// Whether regions have waited two intervals for their generation to be recorded together with
    /// a later one, which saves a write.
    pub(in super::super) fn is_clear_overdue(&self) -> bool {
        let pending = self.pending_clear.as_ref();
        pending.is_some_and(|c| self.now >= c.queued_at + 2 * CLEAR_INTERVAL)
    }

    /// Whether the region is to be cleared here.
    pub(in super::super) fn is_clear_pending(&self, region: &Region) -> bool {
        let pending = self.pending_clear.as_ref();
        pending.is_some_and(|c| c.regions.binary_search(region).is_ok())
    }

    /// What is cleared with the generation that is recorded now.
    pub(in super::super) fn take_pending_clear(&mut self) -> Option<PendingClear> {
        self.pending_clear.take()
    }

    /// The next data generation of the epoch of `view`.
    pub(in super::super) fn next_generation(&mut self, view: View) -> DataGeneration {
        let last = self.last_generation;
        let count = if last.epoch == view.epoch { last.count.saturating_add(1) } else { 1 };
        self.last_generation = DataGeneration { epoch: view.epoch, count };
        self.last_generation
    }
}

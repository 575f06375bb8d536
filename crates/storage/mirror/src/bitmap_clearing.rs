//! Clears dirty bits that are not needed any more (RFD 0010, 6.3).

use std::rc::Rc;

use block::Error;
use intent_log::{GenerationUpdate, Region};
use peer::{DataGeneration, Link, Message, View};
use uuid::Uuid;

use super::Mistake;
use super::membership::Event;
use super::replica::Replica;
use super::state::clearing::{CLEAR_BATCH_MAX, PendingClear};

/// Sends that these regions may be cleared, in as many messages as it takes.
pub(super) fn send_clear_regions(link: &Link, view: View, request: u64, regions: &[(u64, u64)]) {
    for regions in regions.chunks(CLEAR_BATCH_MAX) {
        link.send(Message::ClearRegions { view, request, regions: regions.to_vec() });
    }
}

impl Replica {
    /// Runs each [`CLEAR_INTERVAL`].
    pub(super) async fn clear_idle_regions(self: &Rc<Self>) {
        self.leg.log.tick();
        if self.step(|s, _| s.is_clear_overdue()) {
            self.apply_pending_clear().await;
        }
        if let Some(view) = self.serving_view() {
            if self.is_primary() {
                self.clear_in_view(view).await;
            } else {
                self.report_idle_dirty(view);
            }
        }
        if self.leg.log.write_back().await.is_err() {
            self.on_leg_error(Error::Gone);
        }
    }

    async fn clear_in_view(self: &Rc<Self>, view: View) {
        let images = self.in_sync_images();
        let geometry = self.leg.log.geometry();
        let mut idle = self.leg.log.idle_dirty_regions(&images, CLEAR_BATCH_MAX);
        // Regions that only other members have marked dirty: in resyncs, or under an earlier
        // primary.
        let reported = self.step(|s, _| s.take_reported_dirty());
        let reported =
            reported.iter().flat_map(|(at, len)| geometry.regions_in(*at, *len)).flatten();
        let is_dirty = |r: &Region| images.iter().any(|image| self.leg.log.is_dirty(*image, *r));
        idle.extend(reported.filter(|region| !is_dirty(region)).take(CLEAR_BATCH_MAX));
        idle.sort_unstable();
        idle.dedup();
        idle.truncate(CLEAR_BATCH_MAX);
        if idle.is_empty() {
            return;
        }
        // All other members record the generation before any dirty bit is cleared: a replica that
        // comes back without it is an older copy (RFD 0032).
        let generation = self.step(|s, _| s.next_generation(view));
        let is_late = self.settings.has_mistake(Mistake::ClearsBeforeGeneration);
        let count = if is_late { generation.count & !7 } else { generation.count };
        let Ok(Some((request, stamp))) = self.flush_members(view, count).await else { return };
        let recorded = DataGeneration { count, ..generation };
        let cleared = Some((recorded, images.clone()));
        let update =
            GenerationUpdate { generation: recorded, shared_with: images.clone(), cleared };
        if self.leg.log.record_generation(update).await.is_err() {
            self.on_leg_error(Error::Gone);
            return;
        }
        if self.view() != view {
            return;
        }
        self.handle_event(Event::GenerationRecorded(recorded));
        // Regions written since stay dirty everywhere, even if the write came before the flush:
        // members disagree on which came first (attack 22).
        let quiet = self.retain_quiet(idle, stamp);
        let regions = self.region_extents(&quiet);
        for link in self.open_links(self.others()) {
            send_clear_regions(&link, view, request, &regions);
        }
        self.leg.log.clear(&images, quiet, stamp);
    }

    /// Reports idle dirty regions to the primary, which may not have marked them.
    fn report_idle_dirty(&self, view: View) {
        let mut idle = self.leg.log.idle_dirty_regions(&self.in_sync_images(), CLEAR_BATCH_MAX);
        idle.retain(|region| !self.state().is_clear_pending(region));
        let regions = self.region_extents(&idle);
        if let Some(link) = self.primary_link().filter(|_| !regions.is_empty()) {
            link.send(Message::IdleDirtyRegions { view, regions });
        }
    }

    /// The primary says that these regions are equal and durable at all members, and that all have
    /// recorded the data generation of this clearing. They are cleared here once that is recorded
    /// too, together with the next generation if one follows soon.
    pub(super) fn on_clear_regions(
        self: &Rc<Self>,
        view: View,
        request: u64,
        ranges: &[(u64, u64)],
    ) {
        let Some((stamp, count)) = self.leg.flush_coverage(request) else { return };
        let generation = DataGeneration { epoch: view.epoch, count };
        let Some(images) = self.state().membership.generation_peers(view.epoch) else { return };
        let geometry = self.leg.log.geometry();
        // If regions have another size here, clear only those entirely inside.
        let regions_inside = |&(at, len): &(u64, u64)| {
            let regions = geometry.regions_in(at, len).into_iter().flatten();
            let is_inside = move |r: &Region| {
                let bytes = geometry.region_range(*r);
                bytes.is_some_and(|b| b.start >= at && b.end <= at.saturating_add(len))
            };
            regions.filter(is_inside).collect::<Vec<_>>()
        };
        let is_dirty = |r: &Region| images.iter().any(|image| self.leg.log.is_dirty(*image, *r));
        let mut regions: Vec<_> = ranges.iter().flat_map(regions_inside).filter(is_dirty).collect();
        regions.sort_unstable();
        if !regions.is_empty() {
            self.step(|s, _| s.queue_clear(generation, images, stamp, regions));
        }
    }

    /// Records durably the data generation with this count, and what was cleared under the one
    /// before. Returns whether that succeeded. Records nothing in a view that a later configuration
    /// has ended.
    pub(super) async fn record_flush_generation(self: &Rc<Self>, view: View, count: u32) -> bool {
        let images = self.state().membership.generation_peers(view.epoch);
        let Some(images) = images else { return false };
        self.record_and_clear(DataGeneration { epoch: view.epoch, count }, images).await
    }

    async fn apply_pending_clear(self: &Rc<Self>) {
        self.record_and_clear(DataGeneration::default(), Vec::new()).await;
    }

    async fn record_and_clear(
        self: &Rc<Self>,
        generation: DataGeneration,
        shared_with: Vec<Uuid>,
    ) -> bool {
        let pending = self.step(|s, _| s.take_pending_clear());
        let cleared = pending.as_ref().map(|c| (c.generation, c.images.clone()));
        if self
            .leg
            .log
            .record_generation(GenerationUpdate { generation, shared_with, cleared })
            .await
            .is_err()
        {
            self.on_leg_error(Error::Gone);
            return false;
        }
        if let Some(PendingClear { images, regions, stamp, .. }) = pending {
            self.leg.log.clear(&images, regions, stamp);
        }
        true
    }

    /// The images of the other members.
    fn in_sync_images(&self) -> Vec<Uuid> {
        self.others().into_iter().filter_map(|node| self.image_of(node)).collect()
    }
}

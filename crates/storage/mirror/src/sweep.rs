//! Taking marks away that nobody needs any more (RFD 0010, 6.3).

use std::rc::Rc;
use std::time::Duration;

use block::Error;
use intent_log::{Advance, FlushStamp, Region};
use peer::{Lineage, Link, Message, View};
use uuid::Uuid;

use super::Mistake;
use super::member::Event;
use super::replica::Replica;

/// How often marks are looked at.
pub(super) const PERIOD: Duration = Duration::from_secs(5);

/// Most regions that are cleared at once.
const BATCH: usize = 4096;

/// Regions whose marks go when the lineage under which they do has been recorded here.
#[derive(Debug)]
pub(super) struct Clearing {
    lineage: Lineage,
    images: Vec<Uuid>,
    stamp: FlushStamp,
    since: Duration,
    regions: Vec<Region>,
}

/// Says that the marks of these regions may go, in as many messages as it takes.
pub(super) fn send_clear(link: &Link, view: View, request: u64, regions: &[(u64, u64)]) {
    for regions in regions.chunks(BATCH) {
        link.send(Message::Clear { view, request, regions: regions.to_vec() });
    }
}

impl Replica {
    /// What happens each [`PERIOD`].
    pub(super) async fn sweep(self: &Rc<Self>) {
        self.leg.log.tick();
        if self.clearing.borrow().as_ref().is_some_and(|c| self.core.now() >= c.since + 2 * PERIOD)
        {
            // No other lineage follows that this could be recorded with.
            self.clear_pending().await;
        }
        if let Some(view) = self.serves() {
            if self.is_primary() {
                self.sweep_in(view).await;
            } else {
                self.report_marks(view);
            }
        }
        if self.leg.log.write_back().await.is_err() {
            self.leg_failed(Error::Gone);
        }
    }

    async fn sweep_in(self: &Rc<Self>, view: View) {
        let images = self.images_in_sync();
        let geometry = self.leg.log.geometry();
        let mut idle = self.leg.log.sweepable(&images, BATCH);
        // What only others have marked: of resyncs, and of times when others were primary.
        let theirs = std::mem::take(&mut *self.reported.borrow_mut());
        let theirs = theirs.iter().flat_map(|(at, len)| geometry.regions_of(*at, *len)).flatten();
        let marked = |r: &Region| images.iter().any(|image| self.leg.log.is_marked(*image, *r));
        idle.extend(theirs.filter(|region| !marked(region)).take(BATCH));
        idle.sort_unstable();
        idle.dedup();
        idle.truncate(BATCH);
        if idle.is_empty() {
            return;
        }
        // All others record that there was this moment, before any mark goes: whoever comes back
        // without having recorded it is an older copy (RFD 0032).
        let lineage = self.next_lineage(view);
        let late = self.settings.makes(Mistake::ClearsBeforeLineage);
        let count = if late { lineage.count & !7 } else { lineage.count };
        let Ok(Some((request, stamp))) = self.flush_in(view, count).await else { return };
        let reached = Lineage { count, ..lineage };
        let cleared = Some((reached, images.clone()));
        let advance = Advance { reached, together: images.clone(), cleared };
        if self.leg.log.advance(advance).await.is_err() {
            self.leg_failed(Error::Gone);
            return;
        }
        if self.view.get() != view {
            return;
        }
        self.event(Event::Recorded(reached));
        // What has been written since stays marked everywhere, even where it came before the
        // flush: members do not agree on which side of it the write was (attack 22).
        let quiet = self.quiet(idle, stamp);
        let regions = self.extents(&quiet);
        for link in self.links_to(self.others()) {
            send_clear(&link, view, request, &regions);
        }
        self.leg.log.clear(&images, quiet, stamp);
    }

    /// Tells the primary which regions are marked here and idle: it may not have marked them.
    fn report_marks(&self, view: View) {
        let mut idle = self.leg.log.sweepable(&self.images_in_sync(), BATCH);
        let pending = self.clearing.borrow();
        let waits = |c: &Clearing, region: &Region| c.regions.binary_search(region).is_ok();
        idle.retain(|region| !pending.as_ref().is_some_and(|c| waits(c, region)));
        drop(pending);
        let regions = self.extents(&idle);
        if let Some(link) = self.primary_link().filter(|_| !regions.is_empty()) {
            link.send(Message::Marked { view, regions });
        }
    }

    /// A member has marked these regions, and they are idle there.
    pub(super) fn take_marked(&self, ranges: Vec<(u64, u64)>) {
        let mut reported = self.reported.borrow_mut();
        if self.is_primary() && reported.len() < BATCH {
            reported.extend(ranges.into_iter().take(BATCH));
        }
    }

    /// The primary says that these regions are equal and durable at all members, and that all have
    /// recorded the lineage under which their marks go. Here they go when that has been recorded as
    /// well, together with the next lineage if one follows soon.
    pub(super) fn take_clear(&self, view: View, request: u64, ranges: &[(u64, u64)]) {
        let Some((stamp, count)) = self.leg.covered_by(request) else { return };
        let lineage = Lineage { epoch: view.epoch, count };
        let Some(images) = self.member.borrow().recorded_with(view.epoch) else { return };
        let geometry = self.leg.log.geometry();
        // Where regions have other sizes here, only those that lie inside count.
        let inside = |&(at, len): &(u64, u64)| {
            let regions = geometry.regions_of(at, len).into_iter().flatten();
            let whole = move |r: &Region| {
                let bytes = geometry.bytes_of(*r);
                bytes.is_some_and(|b| b.start >= at && b.end <= at.saturating_add(len))
            };
            regions.filter(whole).collect::<Vec<_>>()
        };
        let marked = |r: &Region| images.iter().any(|image| self.leg.log.is_marked(*image, *r));
        let mut regions: Vec<_> = ranges.iter().flat_map(inside).filter(marked).collect();
        regions.sort_unstable();
        if regions.is_empty() {
            return;
        }
        let mut pending = self.clearing.borrow_mut();
        match &mut *pending {
            Some(clearing) if clearing.lineage == lineage => {
                clearing.regions.extend(regions);
                clearing.regions.sort_unstable();
            }
            // What was pending stays marked: it is swept again.
            other => {
                let since = self.core.now();
                *other = Some(Clearing { lineage, images, stamp, since, regions });
            }
        }
    }

    /// Records the lineage of this count, durably, and what was cleared under the one before; says
    /// whether that succeeded. In a view that a later record has ended nothing is recorded.
    pub(super) async fn record_lineage(self: &Rc<Self>, view: View, count: u32) -> bool {
        let images = self.member.borrow().recorded_with(view.epoch);
        let Some(images) = images else { return false };
        self.advance(Lineage { epoch: view.epoch, count }, images).await
    }

    async fn clear_pending(self: &Rc<Self>) {
        self.advance(Lineage::default(), Vec::new()).await;
    }

    async fn advance(self: &Rc<Self>, reached: Lineage, together: Vec<Uuid>) -> bool {
        let pending = self.clearing.take();
        let cleared = pending.as_ref().map(|c| (c.lineage, c.images.clone()));
        if self.leg.log.advance(Advance { reached, together, cleared }).await.is_err() {
            self.leg_failed(Error::Gone);
            return false;
        }
        if let Some(Clearing { images, regions, stamp, .. }) = pending {
            self.leg.log.clear(&images, regions, stamp);
        }
        true
    }

    /// The next lineage of the view's epoch.
    pub(super) fn next_lineage(&self, view: View) -> Lineage {
        let last = self.lineage.get();
        let count = if last.epoch == view.epoch { last.count.saturating_add(1) } else { 1 };
        self.lineage.set(Lineage { epoch: view.epoch, count });
        self.lineage.get()
    }

    /// The images of the other members.
    fn images_in_sync(&self) -> Vec<Uuid> {
        self.others().into_iter().filter_map(|node| self.image(node)).collect()
    }
}

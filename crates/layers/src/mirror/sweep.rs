//! Taking marks away that nobody needs any more (RFD 0010, 6.3).

use std::rc::Rc;
use std::time::Duration;

use peer::{Link, Message, View};
use uuid::Uuid;

use super::log::Region;
use super::replica::Replica;

/// How often marks are looked at.
pub(super) const PERIOD: Duration = Duration::from_secs(5);

/// Most regions that are cleared at once.
const BATCH: usize = 4096;

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
        if let Some(view) = self.serves() {
            if self.is_primary() {
                self.sweep_in(view).await;
            } else {
                self.report_marks(view);
            }
        }
        if self.leg.log.write_back().await.is_err() {
            self.leg_failed(block::Error::Gone);
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
        let Ok(Some((request, stamp))) = self.flush_in(view).await else { return };
        if self.view.get() != view {
            return;
        }
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
        let regions = self.extents(&self.leg.log.sweepable(&self.images_in_sync(), BATCH));
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

    /// The primary says that these regions are equal and durable at all members.
    pub(super) fn take_clear(&self, request: u64, ranges: &[(u64, u64)]) {
        let Some(stamp) = self.leg.covered_by(request) else { return };
        let geometry = self.leg.log.geometry();
        let images = self.images_in_sync();
        for &(at, len) in ranges {
            // Where regions have other sizes here, only those that lie inside count.
            let whole = geometry.regions_of(at, len).into_iter().flatten().filter(|r| {
                let bytes = geometry.bytes_of(*r);
                bytes.is_some_and(|b| b.start >= at && b.end <= at.saturating_add(len))
            });
            self.leg.log.clear(&images, whole, stamp);
        }
    }

    /// The images of the other members.
    fn images_in_sync(&self) -> Vec<Uuid> {
        self.others().into_iter().filter_map(|node| self.image(node)).collect()
    }
}

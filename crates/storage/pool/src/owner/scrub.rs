//! All of a pool's volumes are read and compared.

use geometry::Scrubbed;

use super::Pool;
use crate::ask::Event;
use crate::error::PoolError;
use crate::metadata::{Change, ScrubRecord};
use crate::report::ScrubReport;

impl Pool {
    /// Begins to read and compare all of its volumes that are open, and to repair them. That goes on.
    ///
    /// # Errors
    /// That it is under way already, or no volume is open.
    pub fn scrub(&self) -> Result<(), PoolError> {
        if self.scrub.get().is_some_and(|(report, _)| report.running) {
            return Err(PoolError::new("it is being scrubbed already"));
        }
        self.tell(|| Event::Scrub);
        let (cores, all_bytes) = (self.seats.borrow().len(), self.report().allocated_bytes);
        if cores == 0 && all_bytes > 0 {
            return Err(PoolError::new("no volume of it is open: it cannot be scrubbed"));
        }
        let report = ScrubReport { running: cores > 0, all_bytes, ..ScrubReport::default() };
        self.scrub.set(Some((report, cores)));
        Ok(())
    }

    /// The scrub that is under way, or the last one, of this opening or an earlier one.
    pub(crate) fn scrub_report(&self) -> Option<ScrubReport> {
        let now = self.scrub.get().map(|(report, _)| report);
        let last = self.writer.metadata().scrubbed();
        let ScrubRecord { ended_s, bytes, repaired, unrepairable } = last;
        let earlier = || ScrubReport {
            running: false,
            done_bytes: bytes,
            all_bytes: bytes,
            repaired,
            unrepairable,
            ended_s: Some(ended_s),
        };
        now.or_else(|| (ended_s > 0).then(earlier))
    }

    pub(super) fn scrubbed(&self, bytes: u64, found: Scrubbed) {
        if let Some((mut report, cores)) = self.scrub.get() {
            report.done_bytes += bytes;
            report.repaired += found.repaired;
            report.unrepairable += found.unrepairable;
            self.scrub.set(Some((report, cores)));
        }
    }

    /// A core has ended it; the last one has that written down.
    pub(super) async fn scrub_ended(&self) {
        let Some((report, cores)) = self.scrub.get() else { return };
        let left = cores.saturating_sub(1);
        let ended_s = (left == 0).then(|| self.now_s());
        self.scrub.set(Some((ScrubReport { running: left > 0, ended_s, ..report }, left)));
        let Some(ended_s) = ended_s else { return };
        let ScrubReport { done_bytes: bytes, repaired, unrepairable, .. } = report;
        let scrub = ScrubRecord { ended_s, bytes, repaired, unrepairable };
        if let Err(error) = self.writer.commit(Change::Scrubbed(scrub)).await {
            tracing::warn!(%error, "what a scrub has found is not written down");
        }
    }
}

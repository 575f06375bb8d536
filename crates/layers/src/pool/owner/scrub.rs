//! All of a pool's volumes are read and compared.

use super::Pool;
use crate::pool::ask::Event;
use crate::pool::error::PoolError;
use crate::pool::report::ScrubReport;
use crate::raid::Scrubbed;

impl Pool {
    /// Begins to read and compare all of its volumes that are open, and to repair them. That goes on.
    ///
    /// # Errors
    /// That it is under way already, or no volume is open.
    pub fn scrub(&self) -> Result<(), PoolError> {
        if self.scrub.get().is_some_and(|(report, _)| report.running) {
            return Err(PoolError::new("the pool is being scrubbed already"));
        }
        self.tell(|| Event::Scrub);
        let (cores, all_bytes) = (self.seats.borrow().len(), self.report().allocated_bytes);
        if cores == 0 && all_bytes > 0 {
            return Err(PoolError::new("no volume of the pool is open: it cannot be scrubbed"));
        }
        let report = ScrubReport { running: cores > 0, all_bytes, ..ScrubReport::default() };
        self.scrub.set(Some((report, cores)));
        Ok(())
    }

    pub(in crate::pool) fn scrub_report(&self) -> Option<ScrubReport> {
        self.scrub.get().map(|(report, _)| report)
    }

    pub(super) fn scrubbed(&self, bytes: u64, found: Scrubbed) {
        if let Some((mut report, cores)) = self.scrub.get() {
            report.done_bytes += bytes;
            report.repaired += found.repaired;
            report.unrepairable += found.unrepairable;
            self.scrub.set(Some((report, cores)));
        }
    }

    pub(super) fn scrub_ended(&self) {
        if let Some((report, cores)) = self.scrub.get() {
            let left = cores.saturating_sub(1);
            self.scrub.set(Some((ScrubReport { running: left > 0, ..report }, left)));
        }
    }
}

//! Scrub of a pool: reads and compares all of its volumes.

use geometry::ScrubResult;
use pool_metadata::{Change, ScrubRecord};

use super::Pool;
use crate::error::PoolError;
use crate::report::PoolScrubReport;
use crate::requests::PoolEvent;

impl Pool {
    /// Starts a scrub of all volumes that are open. It goes on in the background.
    ///
    /// # Errors
    /// A scrub is running already, or no volume is open.
    pub fn start_scrub(&self) -> Result<(), PoolError> {
        if self.state().current_scrub.is_some_and(|(report, _)| report.is_running) {
            return Err(PoolError::new("it is already being scrubbed"));
        }
        self.broadcast(|| PoolEvent::StartScrub);
        let (cores, all_bytes) = (self.state().core_events.len(), self.report().allocated_bytes);
        if cores == 0 && all_bytes > 0 {
            return Err(PoolError::new("it cannot be scrubbed: no volume of it is open"));
        }
        let report = PoolScrubReport {
            is_running: cores > 0,
            total_bytes: all_bytes,
            ..PoolScrubReport::default()
        };
        self.state_mut().current_scrub = Some((report, cores));
        Ok(())
    }

    /// The current scrub, or the last one of any term.
    pub(crate) fn scrub_report(&self) -> Option<PoolScrubReport> {
        let current = self.state().current_scrub.map(|(report, _)| report);
        let last = self.writer.metadata().last_scrub();
        let ScrubRecord {
            ended_s,
            bytes,
            repaired_rows: repaired,
            unrecoverable_rows: unrepairable,
        } = last;
        let earlier = || PoolScrubReport {
            is_running: false,
            done_bytes: bytes,
            total_bytes: bytes,
            repaired_rows: repaired,
            unrecoverable_rows: unrepairable,
            ended_s: Some(ended_s),
        };
        current.or_else(|| (ended_s > 0).then(earlier))
    }

    pub(super) fn add_scrub_progress(&self, bytes: u64, found: ScrubResult) {
        if let Some((report, _)) = &mut self.state_mut().current_scrub {
            report.done_bytes += bytes;
            report.repaired_rows += found.repaired;
            report.unrecoverable_rows += found.unrecoverable;
        }
    }

    /// A core has finished the scrub; the last one has the result recorded.
    pub(super) async fn on_core_scrub_ended(&self) {
        let current = self.state().current_scrub;
        let Some((report, cores)) = current else { return };
        let left = cores.saturating_sub(1);
        let ended_s = (left == 0).then(|| self.now_s());
        self.state_mut().current_scrub =
            Some((PoolScrubReport { is_running: left > 0, ended_s, ..report }, left));
        let Some(ended_s) = ended_s else { return };
        let PoolScrubReport {
            done_bytes: bytes,
            repaired_rows: repaired,
            unrecoverable_rows: unrepairable,
            ..
        } = report;
        let scrub = ScrubRecord {
            ended_s,
            bytes,
            repaired_rows: repaired,
            unrecoverable_rows: unrepairable,
        };
        if let Err(error) = self.writer.commit(Change::RecordScrub(scrub)).await {
            tracing::warn!(%error, "recording the results of a scrub failed");
        }
    }
}

//! Rebuild: reconstructs the stale slots of columns from the other columns, stripe by stripe, while
//! clients use the volume.
//!
//! A writer that holds the stripe lock treats a stale column as if its member were detached. So a
//! stripe may be rebuilt whenever its lock is free, and is current from then on.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use block::{Bufs, Error};
use futures_util::future::join_all;
use geometry::{Redundancy, StripRole};

use super::array_memory::MAX_SCRATCH_PAGES;
use super::extent::Extent;
use super::mistake::Mistake;
use super::row_plan::Available;
use super::stripe::{Stripe, StripeError};
use super::volume::RaidVolume;

/// Most rows that are rebuilt at a time.
const MAX_REBUILD_ROWS: u32 = 16;

/// Stripes that are rebuilt at a time, so that one uses the disks while another waits.
const MAX_CONCURRENT_STRIPES: usize = 4;

/// How a rebuild yields to clients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaintenancePace {
    /// After each stripe, pause for this many times as long as it took, if clients were active
    /// meanwhile.
    pub rest_factor: f64,
}

/// The result of a rebuild.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RebuildReport {
    /// Stripes that were rebuilt.
    pub rebuilt_stripes: u64,
    /// Stripes that could not be rebuilt: too much of them is missing, a member failed, or the
    /// rebuild was stopped. They are still stale.
    pub failed_stripes: u64,
    /// Columns that have no stale slots any more.
    pub complete_columns: Vec<u16>,
}

impl RaidVolume {
    /// Rebuilds the stale slots of the extent at `index` on attached members. The
    /// `complete_columns` of the report are then current, durably.
    ///
    /// # Errors
    /// Errors that stop the array.
    pub async fn rebuild(&self, index: u32, pace: MaintenancePace) -> Result<RebuildReport, Error> {
        let mut report = RebuildReport::default();
        let Some(extent) = self.extent(index) else { return Ok(report) };
        let (columns, changes) =
            (self.array.rebuildable_columns(&extent), self.array.members.changes());
        if columns.is_empty() {
            return Ok(report);
        }
        self.rebuild_columns(index, &extent, &columns, pace, &mut report).await?;
        extent.lost_rows.end_pass();
        if report.failed_stripes == 0 {
            self.array.save_stripe_map(&extent).await?;
            self.array.flush().await?;
            // A member detached meanwhile may have lost its writes, and one attached meanwhile has
            // other stale slots.
            match self.array.members.changes() == changes {
                true => {
                    extent.clear_stale(&columns);
                    report.complete_columns = columns;
                }
                false => report.failed_stripes += 1,
            }
        }
        Ok(report)
    }

    /// Rebuilds until no slot is stale: stripes may move to stale slots meanwhile.
    async fn rebuild_columns(
        &self,
        index: u32,
        extent: &Rc<Extent>,
        columns: &[u16],
        pace: MaintenancePace,
        report: &mut RebuildReport,
    ) -> Result<(), Error> {
        let (mut from, failed) = (0, report.failed_stripes);
        loop {
            // If the extent was replaced meanwhile, its new column is not stale.
            let is_same = self.extent(index).is_some_and(|now| Rc::ptr_eq(&now, extent));
            // Members detached meanwhile cannot be rebuilt.
            let rebuildable = self.array.rebuildable_columns(extent);
            if self.is_maintenance_stopped()
                || !is_same
                || !columns.iter().all(|column| rebuildable.contains(column))
            {
                report.failed_stripes += 1;
                return Ok(());
            }
            let stripes = extent.stale_stripes(from, MAX_CONCURRENT_STRIPES, columns);
            let Some(last) = stripes.last().copied() else { break };
            let (begun, busy) = (tokio::time::Instant::now(), self.submitted_ops());
            let each = stripes.into_iter().map(|stripe| self.rebuild_stripe(index, stripe));
            for outcome in join_all(each).await {
                match outcome {
                    Ok(()) => report.rebuilt_stripes += 1,
                    Err(StripeError::Unrecoverable) => report.failed_stripes += 1,
                    Err(StripeError::Array(error)) => return Err(error),
                }
            }
            self.yield_to_clients(begun, busy, pace).await;
            from = last + 1;
            if report.failed_stripes == failed && extent.stale_stripes(from, 1, columns).is_empty()
            {
                from = 0;
            }
        }
        Ok(())
    }

    /// Pauses if clients have been active since `begun`, in proportion to the time since then.
    pub(super) async fn yield_to_clients(
        &self,
        begun: tokio::time::Instant,
        busy: u64,
        pace: MaintenancePace,
    ) {
        if self.submitted_ops() != busy {
            tokio::time::sleep(begun.elapsed().mul_f64(pace.rest_factor).min(MAX_YIELD)).await;
        }
    }

    async fn rebuild_stripe(&self, index: u32, number: u32) -> Result<(), StripeError> {
        let _lock = match self.array.makes_mistake(Mistake::RebuildsWithoutStripeLock) {
            true => None,
            false => Some(self.lock_stripe((index, number)).await),
        };
        if self.extent(index).is_none() {
            // The extent was freed meanwhile.
            return Err(StripeError::Unrecoverable);
        }
        let stripe = self.stripe((index, number))?;
        self.array.wait_durable(stripe.slot_id()).await?;
        let changes = self.array.members.changes();
        let most = (MAX_SCRATCH_PAGES / stripe.rebuild_pages_per_row()).clamp(1, MAX_REBUILD_ROWS);
        let (key, rows, mut complete) = ((index, number), self.geometry.strip_rows(), true);
        for start in (0..rows).step_by(most as usize) {
            let rows = start..rows.min(start + most);
            match stripe.rebuild_rows(&rows).await {
                Err(StripeError::Unrecoverable) => {
                    complete &= self.rebuild_row_by_row(key, &stripe, &rows).await?;
                }
                outcome => outcome?,
            }
        }
        if !complete {
            return Err(StripeError::Unrecoverable);
        }
        match self.array.mark_current(&stripe.extent, stripe.slot, changes) {
            true => Ok(()),
            false => Err(StripeError::Unrecoverable),
        }
    }
}

impl RaidVolume {
    /// Rebuilds row by row what cannot be rebuilt at once; gives up lost rows in the end. Whether
    /// all rows are rebuilt.
    async fn rebuild_row_by_row(
        &self,
        key: (u32, u32),
        stripe: &Stripe<'_>,
        rows: &Range<u32>,
    ) -> Result<bool, StripeError> {
        let mut complete = true;
        for row in rows.clone() {
            let outcome = stripe.rebuild_rows(&(row..row + 1)).await;
            match outcome {
                Err(StripeError::Unrecoverable) if self.give_up_row(key, stripe, row).await? => {
                    stripe.rebuild_rows(&(row..row + 1)).await?;
                }
                Err(StripeError::Unrecoverable) => complete = false,
                outcome => outcome?,
            }
        }
        Ok(complete)
    }
}

/// Longest pause between two stripes.
const MAX_YIELD: Duration = Duration::from_secs(1);

impl Stripe<'_> {
    fn rebuild_pages_per_row(&self) -> u32 {
        self.reconstruct_pages_per_row() + u32::from(self.geometry.redundancy().parity_strips())
    }

    /// Rebuilds rows of the stale columns.
    async fn rebuild_rows(&self, rows: &Range<u32>) -> Result<(), StripeError> {
        let _scratch = self
            .array
            .memory
            .acquire_scratch((rows.end - rows.start) * self.rebuild_pages_per_row())
            .await;
        if let Redundancy::Copies(_) = self.geometry.redundancy() {
            return self.rebuild_copies(rows).await;
        }
        let (read_set, _) = self.reconstruct(rows, Available::default()).await?;
        let stale = Available::from_roles(self.stale_roles());
        let strip = |n| read_set.pages_of(StripRole::Data(n)).iter().cloned().collect();
        let strips: Vec<Bufs> = (0..self.data_strips()).map(strip).collect();
        for strip in stale.data.iter() {
            let data = strips[usize::from(strip)].clone();
            self.rebuild_strip(StripRole::Data(strip), rows, data).await?;
        }
        if stale.parity_count() > 0 {
            let parities = self.compute_parities(&strips).into_iter();
            for (role, data) in parities.filter(|(role, _)| stale.contains(*role)) {
                self.rebuild_strip(role, rows, data).await?;
            }
        }
        Ok(())
    }

    /// Strips that are stale on an attached member.
    fn stale_roles(&self) -> impl Iterator<Item = StripRole> {
        self.geometry.roles().filter(|role| {
            let mut columns = self.stale_columns(*role);
            columns.next().is_some()
        })
    }

    async fn rebuild_copies(&self, rows: &Range<u32>) -> Result<(), StripeError> {
        for strip in 0..self.data_strips() {
            let role = StripRole::Data(strip);
            if self.stale_columns(role).next().is_some() {
                let data = self.read_and_repair_copies(strip, rows).await?;
                self.rebuild_strip(role, rows, data.iter().cloned().collect()).await?;
            }
        }
        Ok(())
    }

    async fn rebuild_strip(
        &self,
        role: StripRole,
        rows: &Range<u32>,
        data: Bufs,
    ) -> Result<(), StripeError> {
        for column in self.stale_columns(role).collect::<Vec<_>>() {
            self.write_at(column, rows.start, data.clone(), false).await?;
            if self.array.is_detached(column.member) {
                return Err(StripeError::Unrecoverable);
            }
        }
        Ok(())
    }
}

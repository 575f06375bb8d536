//! Relocation: moves a column to another place while clients use the volume.

use std::rc::Rc;

use block::Error;
use geometry::Column;

use super::extent::Extent;
use super::stripe_locks::stripe_key;
use super::volume::RaidVolume;

/// Rows that are copied at a time.
const MAX_COPY_ROWS: u32 = 64;

impl RaidVolume {
    /// Copies column number `column` of the extent at `index` to `to`, and calls `commit` to make
    /// the new position durable. Meanwhile client reads continue and writes wait. Returns whether
    /// the column was moved; not so if a column of the extent is stale.
    ///
    /// `commit` returns whether the new position is committed. If it fails, that is unknown, so all
    /// writes stop: the pool may next be opened with either position.
    ///
    /// # Errors
    /// Errors that stop the array.
    pub async fn relocate_column(
        &self,
        index: u32,
        column: u16,
        to: Column,
        commit: impl AsyncFnOnce() -> Result<bool, Error>,
    ) -> Result<bool, Error> {
        let mut locks = Vec::new();
        for stripe in 0..self.geometry.stripes() {
            locks.push(self.lock_stripe((index, stripe)).await);
        }
        let Some(extent) = self.extent(index) else { return Ok(false) };
        let Some(from) = extent.columns().get(usize::from(column)).copied() else {
            return Ok(false);
        };
        // Entries in the logs refer to the column's present position.
        self.array.quiesce_extent(&extent).await?;
        self.array.adopt_column(&to);
        if extent.has_stale_columns() || !self.copy_column(&extent, from, to).await? {
            return Ok(false);
        }
        let is_same = |now: &Rc<Extent>| Rc::ptr_eq(now, &extent);
        if !self.extent(index).as_ref().is_some_and(is_same) {
            return Ok(false);
        }
        let mut exclusions = Vec::new();
        for stripe in 0..self.geometry.stripes() {
            exclusions.push(self.read_locks.lock_exclusive(stripe_key((index, stripe))).await);
        }
        if !commit().await.inspect_err(|why| self.array.stop_writes(*why))? {
            return Ok(false);
        }
        if let Some(Some(entry)) = self.extents.borrow_mut().get_mut(index as usize)
            && Rc::ptr_eq(entry, &extent)
        {
            *entry = Rc::new(extent.with_column(column, to));
        }
        Ok(true)
    }

    /// Copies a column. Whether all rows in use could be read, and are durable in the new place.
    async fn copy_column(&self, extent: &Extent, from: Column, to: Column) -> Result<bool, Error> {
        let (mut row, end) = (0, extent.column_rows());
        // Rows below this one are read one at a time, after a failed read.
        let mut single_until = 0;
        while row < end {
            if self.is_maintenance_stopped() {
                return Ok(false);
            }
            let most = if row < single_until { 1 } else { MAX_COPY_ROWS };
            let rows = u32::try_from(end - row).unwrap_or(most).min(most);
            let _scratch = self.array.memory.acquire_scratch(rows).await;
            let read = self
                .array
                .read_member(from.member, from.first_row + row, rows, &self.array.memory.scratch)
                .await;
            match read {
                Ok(data) => {
                    self.array.write_member(to.member, to.first_row + row, data, false).await?;
                }
                // Free slots need not be copied.
                Err(_) if (row..row + u64::from(rows)).all(|row| extent.is_free_slot_row(row)) => {}
                Err(_) if rows > 1 => {
                    single_until = row + u64::from(rows);
                    continue;
                }
                Err(why) => {
                    tracing::warn!(member = from.member, error = %why, "moving a column failed");
                    return Ok(false);
                }
            }
            row += u64::from(rows);
        }
        self.array.flush().await?;
        Ok(!self.array.is_detached(to.member) && !self.array.is_detached(from.member))
    }
}

//! A column is moved to another place while clients use the volume.

use std::rc::Rc;

use block::Error;
use geometry::Column;

use super::stripe::key;
use super::{Extent, Raid};

/// Rows that are copied at once.
const AT_ONCE: u32 = 64;

impl Raid {
    /// Copies column number `column` of the extent at `index`, which lacks nothing, to another place, and has `commit` make
    /// durable that it is there. Meanwhile clients read the extent, and wait where they write. Says whether that was done.
    ///
    /// `commit` says whether it was made so. If it fails nobody knows, and nothing more is written: the pool may be opened next
    /// as if it were there.
    ///
    /// # Errors
    /// What stops the array.
    pub async fn relocate(
        &self,
        index: u32,
        column: u16,
        to: Column,
        commit: impl AsyncFnOnce() -> Result<bool, Error>,
    ) -> Result<bool, Error> {
        let mut turns = Vec::new();
        for stripe in 0..self.shape.stripes() {
            turns.push(self.turn(index, stripe).await);
        }
        let Some(extent) = self.extent(index) else { return Ok(false) };
        let Some(from) = extent.columns().get(usize::from(column)).copied() else {
            return Ok(false);
        };
        // What the logs still have names members by what is where now.
        self.array.let_go(&extent).await?;
        self.array.takes(&to);
        if extent.is_lacking() || !self.copy_column(&extent, from, to).await? {
            return Ok(false);
        }
        let is_it = |now: &Rc<Extent>| Rc::ptr_eq(now, &extent);
        if !self.extent(index).as_ref().is_some_and(is_it) {
            return Ok(false);
        }
        let mut quiet = Vec::new();
        for stripe in 0..self.shape.stripes() {
            quiet.push(self.reads.quiet(key(index, stripe)).await);
        }
        if !commit().await.inspect_err(|why| self.array.give_up(*why))? {
            return Ok(false);
        }
        if let Some(Some(place)) = self.extents.borrow_mut().get_mut(index as usize)
            && Rc::ptr_eq(place, &extent)
        {
            *place = Rc::new(extent.with(column, to));
        }
        Ok(true)
    }

    /// Copies all of a column; whether all that belongs to a stripe could be read, and is durable where it is now.
    async fn copy_column(&self, extent: &Extent, from: Column, to: Column) -> Result<bool, Error> {
        let (mut row, end) = (0, extent.rows());
        // Where some cannot be read they are read one by one.
        let mut singly = 0;
        while row < end {
            if self.stops() {
                return Ok(false);
            }
            let most = if row < singly { 1 } else { AT_ONCE };
            let rows = u32::try_from(end - row).unwrap_or(most).min(most);
            let _room = self.array.room(rows).await;
            let read = self.array.read(from.member, from.at + row, rows, &self.array.scratch).await;
            match read {
                Ok(data) => self.array.write(to.member, to.at + row, data, false).await?,
                // Nobody misses what belongs to no stripe.
                Err(_) if (row..row + u64::from(rows)).all(|row| extent.is_spare(row)) => {}
                Err(_) if rows > 1 => {
                    singly = row + u64::from(rows);
                    continue;
                }
                Err(why) => {
                    tracing::warn!(member = from.member, error = %why, "a piece cannot be moved");
                    return Ok(false);
                }
            }
            row += u64::from(rows);
        }
        self.array.flush().await?;
        Ok(!self.array.is_out(to.member) && !self.array.is_out(from.member))
    }
}

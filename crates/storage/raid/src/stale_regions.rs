//! What detached members miss: the stale regions of an extent's columns, recorded before they are
//! written, and its stale slots, which a rebuild or a full-stripe write makes current.

use block::Error;
use geometry::Column;

use super::array::Array;
use super::extent::Extent;
use super::mistake::Mistake;

impl Array {
    /// Records that detached columns are stale in these regions. Called before a write to them, and
    /// once more after it, for members that were detached meanwhile.
    pub(super) async fn mark_stale(&self, extent: &Extent, regions: u32) -> Result<(), Error> {
        if self.makes_mistake(Mistake::SkipsStaleRegions) {
            return Ok(());
        }
        let is_detached = |column: &Column| self.is_detached(column.member);
        // The position that a moved column had before misses these writes.
        while extent.uncommitted_columns.get() != 0 || extent.columns.iter().any(is_detached) {
            let changes = self.members.changes();
            let known = |(at, regions)| if at == changes { regions } else { 0 };
            if known(extent.announced_stale.get()) & regions == regions {
                break;
            }
            // Members whose detach is not recorded yet would be missed.
            for column in extent.columns.iter().filter(|column| self.is_detached(column.member)) {
                self.detach_member(column.member, Error::Gone).await?;
            }
            let recorded = self.metadata.mark_regions_stale(extent.number, regions).await;
            recorded.inspect_err(|why| self.stop_writes(*why))?;
            if self.members.changes() == changes {
                extent
                    .announced_stale
                    .set((changes, known(extent.announced_stale.get()) | regions));
            }
        }
        Ok(())
    }

    /// Records stale regions again before the members are written, because a member may have been
    /// detached meanwhile. The log of a detached parity member lacks this entry: without the
    /// record, log recovery would trust that parity once the member is reattached.
    pub(super) async fn mark_stale_before_write(
        &self,
        extent: &Extent,
        regions: u32,
    ) -> Result<(), Error> {
        if self.makes_mistake(Mistake::MarksStaleOnce) {
            return Ok(());
        }
        self.mark_stale(extent, regions).await
    }

    /// Marks a slot current on all attached columns, after its contents were written to them. Does
    /// nothing and returns false if the membership has changed since it was `changes`: a member
    /// attached meanwhile may have got none or a part of the writes.
    pub(super) fn mark_current(&self, extent: &Extent, slot: u32, changes: u64) -> bool {
        if self.members.changes() != changes {
            return false;
        }
        let mut stale = extent.stale_slots.borrow_mut();
        let attached = stale.iter_mut().filter(|(column, _)| self.has_column(extent, *column));
        attached.for_each(|(_, slots)| slots.remove(slot));
        true
    }

    /// Columns with stale slots whose members are attached: these can be rebuilt.
    pub(super) fn rebuildable_columns(&self, extent: &Extent) -> Vec<u16> {
        let stale = extent.stale_slots.borrow();
        let columns = stale.iter().map(|(column, _)| *column);
        columns.filter(|column| self.has_column(extent, *column)).collect()
    }

    /// Whether the member of a column is attached.
    fn has_column(&self, extent: &Extent, column: u16) -> bool {
        let column = extent.columns.get(usize::from(column));
        column.is_some_and(|column| !self.is_detached(column.member))
    }
}

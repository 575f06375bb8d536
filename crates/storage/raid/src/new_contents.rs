//! The new contents of a band: of the strips that are written, and of the parities.

use block::{Buf, BufMut, Bufs};
use geometry::{ROW_BYTES, StripRole};
use smallvec::SmallVec;

use super::band::RowBand;
use super::mistake::Mistake;
use super::row_parity::complete_parity;
use super::row_plan::{RowPlan, StripSet, Unrecoverable, WriteMethod};
use super::stripe::{ReadSet, RowPages, Stripe, page_aligned, split_into_rows};

const ROW: usize = ROW_BYTES as usize;

/// The new contents of a strip.
pub(super) struct NewStrip {
    pub(super) strip: u16,
    pub(super) data: Bufs,
    /// The same, row by row.
    pub(super) pages: RowPages,
}

/// The new contents of a parity strip.
pub(super) struct NewParity {
    pub(super) role: StripRole,
    /// The partial parity of the unchanged strips, row by row.
    pub(super) partial: RowPages,
    /// The parity of all strips.
    pub(super) full: RowPages,
}

impl Stripe<'_> {
    /// The new contents of the strips of a band, in pages.
    pub(super) fn new_contents(&self, band: &RowBand) -> SmallVec<[NewStrip; 2]> {
        let new = |(strip, data): &(u16, Bufs)| {
            let data = page_aligned(data.clone(), || self.array.memory.scratch.alloc(data.len()));
            NewStrip { strip: *strip, pages: split_into_rows(&data), data }
        };
        band.data.iter().map(new).collect()
    }

    /// The new contents of the available parities, from what `plan` has read.
    pub(super) fn new_parities(
        &self,
        plan: &RowPlan,
        band: &RowBand,
        mut read_set: ReadSet,
        new: &[NewStrip],
    ) -> Result<SmallVec<[NewParity; 2]>, Unrecoverable> {
        if plan.method == WriteMethod::ReconstructLost {
            let unread = StripSet::first(self.data_strips()).difference(plan.reads.data);
            let scratch = &self.array.memory.scratch;
            read_set = self.reconstruct_missing(&band.rows, unread, read_set, scratch)?;
        }
        let roles = self.available().roles().filter(|role| !matches!(role, StripRole::Data(_)));
        Ok(roles.map(|role| self.new_parity(role, plan.method, band, &read_set, new)).collect())
    }

    fn new_parity(
        &self,
        role: StripRole,
        method: WriteMethod,
        band: &RowBand,
        read_set: &ReadSet,
        new: &[NewStrip],
    ) -> NewParity {
        let (changed, count) = (band.changed(), band.rows.len());
        let parity = self.array.parity;
        let offset = u16::from(self.array.makes_mistake(Mistake::WrongQCoefficient));
        let is_full_stripe = changed.len() == u32::from(self.data_strips());
        let partial: RowPages = if is_full_stripe {
            (0..count).map(|_| Buf::zeroes(ROW)).collect()
        } else {
            let mut pages = self.scratch_pages(count);
            for (n, page) in pages.iter_mut().enumerate() {
                read_set
                    .known_row(self.data_strips(), n)
                    .partial_parity(parity, role, method, changed, page);
            }
            pages.into_iter().map(BufMut::freeze).collect()
        };
        let mut all = self.scratch_pages(count);
        for (n, page) in all.iter_mut().enumerate() {
            let new: SmallVec<[(u16, &[u8]); 4]> =
                new.iter().map(|new| (new.strip + offset, &new.pages[n][..])).collect();
            complete_parity(parity, role, &partial[n], &new, page);
        }
        NewParity { role, partial, full: all.into_iter().map(BufMut::freeze).collect() }
    }
}

//! Writes that begin or end within a row: the row is read, and written completely.

use std::collections::BTreeMap;

use block::{BufMut, Bufs};
use geometry::{ROW_BYTES, StripRole};
use smallvec::SmallVec;
use tokio::sync::SemaphorePermit;

use super::band::StripWrite;
use super::stripe::{Stripe, StripeError};

const ROW: usize = ROW_BYTES as usize;

/// The part of a write in one strip. Fragments do not overlap.
#[derive(Clone, Debug)]
pub(super) struct StripFragment {
    pub(super) strip: u16,
    /// Offset in the strip, in bytes.
    pub(super) byte_offset: usize,
    pub(super) data: Bufs,
}

impl StripFragment {
    /// The byte range of its complete rows in the strip; empty if there are none.
    fn whole_row_bytes(&self) -> (usize, usize) {
        let end = self.byte_offset + self.data.len();
        let start = self.byte_offset.next_multiple_of(ROW);
        (start, (end / ROW * ROW).max(start))
    }

    /// Its complete rows.
    pub(super) fn whole_rows(&self) -> Option<StripWrite> {
        let (start, end) = self.whole_row_bytes();
        let rows = row_of_byte(start)..row_of_byte(end);
        (start < end && end <= self.byte_offset + self.data.len()).then(|| StripWrite {
            strip: self.strip,
            rows,
            data: self.data.slice(start - self.byte_offset..end - self.byte_offset),
        })
    }

    /// Its incomplete rows: up to two, with their byte offset in the strip.
    pub(super) fn partial_rows(&self) -> SmallVec<[(usize, Bufs); 2]> {
        let end = self.byte_offset + self.data.len();
        let (start, tail_start) = self.whole_row_bytes();
        let (head, tail) =
            (self.byte_offset..start.min(end), tail_start.min(end).max(self.byte_offset)..end);
        let is_within_a_row =
            self.whole_rows().is_none() && row_of_byte(self.byte_offset) == row_of_byte(end - 1);
        let ranges = if is_within_a_row { [self.byte_offset..end, end..end] } else { [head, tail] };
        let cut = |range: std::ops::Range<usize>| {
            (
                range.start,
                self.data.slice(range.start - self.byte_offset..range.end - self.byte_offset),
            )
        };
        ranges.into_iter().filter(|range| !range.is_empty()).map(cut).collect()
    }
}

fn row_of_byte(byte: usize) -> u32 {
    u32::try_from(byte / ROW).unwrap_or(u32::MAX)
}

/// Partially written rows, by strip and row: the new parts, with their offset in the row.
type PartialRows = BTreeMap<(u16, u32), Vec<(usize, Bufs)>>;

/// Splits `fragments` into complete and partial rows.
fn split_fragments(fragments: &[StripFragment]) -> (Vec<StripWrite>, PartialRows) {
    let mut partial = PartialRows::new();
    for fragment in fragments {
        for (at, data) in fragment.partial_rows() {
            partial.entry((fragment.strip, row_of_byte(at))).or_default().push((at % ROW, data));
        }
    }
    (fragments.iter().filter_map(StripFragment::whole_rows).collect(), partial)
}

impl<'a> Stripe<'a> {
    /// The rows to write, with partial ones completed, and the permit for the memory of these.
    pub(super) async fn complete_rows(
        &self,
        fragments: &[StripFragment],
    ) -> Result<(Vec<StripWrite>, Option<SemaphorePermit<'a>>), StripeError> {
        let (mut writes, partial) = split_fragments(fragments);
        if partial.is_empty() {
            return Ok((writes, None));
        }
        let pages = u32::try_from(partial.len()).unwrap_or(u32::MAX);
        let permit = self.array.memory.acquire_partial_rows(pages).await;
        for ((strip, row), parts) in partial {
            let mut page = self.read_row(strip, row).await?;
            for (at, data) in parts {
                data.copy_to(&mut page[at..at + data.len()]);
            }
            writes.push(StripWrite { strip, rows: row..row + 1, data: page.into() });
        }
        Ok((writes, Some(permit)))
    }

    /// Reads one row of data, to be changed.
    async fn read_row(&self, strip: u16, row: u32) -> Result<BufMut, StripeError> {
        let (role, rows) = (StripRole::Data(strip), row..row + 1);
        let mut page = self.array.memory.scratch.credit().alloc_page(ROW);
        match self.read(role, &rows, &self.array.memory.scratch).await {
            Ok(data) => data.copy_to(&mut page),
            Err(failure) => {
                self.handle_read_failure(failure).await?;
                let data = self
                    .reconstruct_and_repair(strip, &rows, failure, &self.array.memory.scratch)
                    .await?;
                data.copy_to(&mut page);
            }
        }
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use block::Buf;
    use proptest::prelude::*;

    use super::*;

    fn fragment(at: usize, len: usize) -> StripFragment {
        let mut data = Bufs::new();
        let mut left = len;
        while left > 0 {
            let page = Buf::zeroes(left.min(ROW));
            left -= page.len();
            data.push(page);
        }
        StripFragment { strip: 3, byte_offset: at, data }
    }

    proptest! {
        #[test]
        fn each_byte_is_in_a_whole_or_a_partial_row(at in 0usize..30_000, len in 1usize..30_000) {
            let (writes, partial) = split_fragments(&[fragment(at, len)]);
            let mut bytes: Vec<usize> = writes.iter().flat_map(|p| {
                assert_eq!(p.data.len(), p.rows.len() * ROW);
                p.rows.start as usize * ROW..p.rows.end as usize * ROW
            }).collect();
            for ((_, row), parts) in &partial {
                for (at, data) in parts {
                    assert!(at + data.len() <= ROW && data.len() < ROW);
                    bytes.extend((0..data.len()).map(|n| *row as usize * ROW + at + n));
                }
            }
            bytes.sort_unstable();
            prop_assert!(bytes == (at..at + len).collect::<Vec<_>>());
        }
    }
}

//! Splits operations: bytes of a volume at extents, stripes and strips, and the parts of a strip
//! into complete and partial rows. Pure arithmetic.

use std::collections::BTreeMap;
use std::ops::Range;

use block::Bufs;
use geometry::{ROW_BYTES, RaidGeometry, StripRun};
use smallvec::SmallVec;

use super::array_memory::MAX_SCRATCH_PAGES;
use super::band::StripWrite;
use super::stripe_locks::StripeId;

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
        let cut = |range: Range<usize>| {
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

/// Splits rows of a volume at extents and strips; with the index of the extent.
pub(super) fn strip_runs(
    geometry: RaidGeometry,
    rows: &Range<u64>,
) -> impl Iterator<Item = (u32, StripRun)> + use<> {
    let (rows, each) = (rows.clone(), geometry.total_rows());
    (rows.start / each..rows.end.div_ceil(each)).flat_map(move |n| {
        let (from, to) = (rows.start.max(n * each), rows.end.min((n + 1) * each));
        let index = u32::try_from(n).unwrap_or(u32::MAX);
        geometry.strip_runs(from - n * each, to - from).map(move |run| (index, run))
    })
}

/// Splits `data`, from byte `at` of the extents on, at strips, and groups it by stripe.
pub(super) fn split_by_stripe(
    geometry: RaidGeometry,
    at: u64,
    data: &Bufs,
) -> Vec<(StripeId, Vec<StripFragment>)> {
    let (row, end) = (u64::from(ROW_BYTES), at + data.len() as u64);
    let mut all: Vec<(StripeId, Vec<StripFragment>)> = Vec::new();
    let mut next = at;
    for (index, run) in strip_runs(geometry, &(at / row..end.div_ceil(row))) {
        let skipped = usize::try_from(next % row).unwrap_or(0);
        let space = run.rows.len() * ROW - skipped;
        let done = usize::try_from(next - at).unwrap_or(0);
        let len = space.min(data.len() - done);
        let fragment = StripFragment {
            strip: run.strip,
            byte_offset: run.rows.start as usize * ROW + skipped,
            data: data.slice(done..done + len),
        };
        next += len as u64;
        let stripe = (index, run.stripe);
        match all.last_mut() {
            Some((last, fragments)) if *last == stripe => fragments.push(fragment),
            _ => all.push((stripe, vec![fragment])),
        }
    }
    all
}

/// Whether `fragments`, which do not overlap, cover a stripe that may be written out of place: it
/// has parity, and fits the scratch memory.
pub(super) fn is_full_stripe(geometry: &RaidGeometry, fragments: &[StripFragment]) -> bool {
    let bytes: usize = fragments.iter().map(|fragment| fragment.data.len()).sum();
    let parities = u64::from(geometry.redundancy().parity_strips());
    let all = geometry.stripe_rows();
    let needed = parities * u64::from(geometry.strip_rows()) + all;
    parities > 0
        && bytes as u64 == all * u64::from(ROW_BYTES)
        && needed <= u64::from(MAX_SCRATCH_PAGES)
}

/// Partially written rows, by strip and row: the new parts, with their offset in the row.
pub(super) type PartialRows = BTreeMap<(u16, u32), Vec<(usize, Bufs)>>;

/// Splits `fragments` into complete and partial rows.
pub(super) fn split_fragments(fragments: &[StripFragment]) -> (Vec<StripWrite>, PartialRows) {
    let mut partial = PartialRows::new();
    for fragment in fragments {
        for (at, data) in fragment.partial_rows() {
            partial.entry((fragment.strip, row_of_byte(at))).or_default().push((at % ROW, data));
        }
    }
    (fragments.iter().filter_map(StripFragment::whole_rows).collect(), partial)
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

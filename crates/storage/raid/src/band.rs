//! Splits a stripe write into bands: rows in which the same strips are written. Pure arithmetic.

use std::ops::Range;

use block::Bufs;
use geometry::ROW_BYTES;
use smallvec::SmallVec;

use super::log_batch::{BATCH_BLOCKS, payload_blocks_per_row};
use super::row_plan::StripSet;

/// Most rows of a band; bounds its memory.
const MAX_BAND_ROWS: u32 = 16;

/// Most strips of a row that are written at once: with their parity they fit a batch several times
/// over. Further strips are written afterwards.
const MAX_BAND_STRIPS: usize = 15;

/// Rows of one strip to be written.
#[derive(Clone, Debug)]
pub(super) struct StripWrite {
    pub(super) strip: u16,
    pub(super) rows: Range<u32>,
    /// The new contents.
    pub(super) data: Bufs,
}

/// Rows in which the same strips are written.
#[derive(Clone, Debug)]
pub(super) struct RowBand {
    pub(super) rows: Range<u32>,
    /// The strips, in ascending order, with the new contents of these rows.
    pub(super) data: SmallVec<[(u16, Bufs); 2]>,
}

impl RowBand {
    /// Number of rows.
    pub(super) fn row_count(&self) -> u32 {
        self.rows.end - self.rows.start
    }

    /// The strips that are written.
    pub(super) fn changed(&self) -> StripSet {
        self.data.iter().map(|(strip, _)| *strip).collect()
    }
}

impl StripWrite {
    fn slice(&self, rows: &Range<u32>) -> Bufs {
        let at = |row: u32| (row - self.rows.start) as usize * ROW_BYTES as usize;
        self.data.slice(at(rows.start)..at(rows.end))
    }
}

/// Most rows of a band in which these strips are written, so that its log entry fits a batch.
fn max_band_rows(changed: StripSet) -> u32 {
    let fit = (BATCH_BLOCKS - 1) / payload_blocks_per_row(changed);
    u32::try_from(fit).unwrap_or(1).clamp(1, MAX_BAND_ROWS)
}

/// Splits a write into rounds of bands; the bands of a round have no row in common. `writes` do not
/// overlap.
pub(super) fn split_into_bands(writes: &[StripWrite]) -> SmallVec<[Vec<RowBand>; 1]> {
    let mut bounds: Vec<u32> = writes.iter().flat_map(|p| [p.rows.start, p.rows.end]).collect();
    bounds.sort_unstable();
    bounds.dedup();
    let mut rounds = SmallVec::new();
    for pair in bounds.windows(2) {
        let mut writes_of_rows: Vec<&StripWrite> =
            writes.iter().filter(|p| p.rows.contains(&pair[0])).collect();
        writes_of_rows.sort_unstable_by_key(|p| p.strip);
        for (round, writes) in writes_of_rows.chunks(MAX_BAND_STRIPS).enumerate() {
            if rounds.len() <= round {
                rounds.push(Vec::new());
            }
            push_bands(pair[0]..pair[1], writes, &mut rounds[round]);
        }
    }
    rounds
}

fn push_bands(rows: Range<u32>, writes: &[&StripWrite], bands: &mut Vec<RowBand>) {
    let most = max_band_rows(writes.iter().map(|p| p.strip).collect());
    let mut start = rows.start;
    while start < rows.end {
        let rows = start..rows.end.min(start + most);
        start = rows.end;
        let data = writes.iter().map(|p| (p.strip, p.slice(&rows))).collect();
        bands.push(RowBand { rows, data });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part(strip: u16, rows: Range<u32>) -> StripWrite {
        let len = (rows.end - rows.start) as usize * ROW_BYTES as usize;
        StripWrite { strip, rows, data: Bufs::zeroes(len) }
    }

    fn bands(writes: &[StripWrite]) -> Vec<(Range<u32>, Vec<u16>)> {
        let all = split_into_bands(writes).into_iter().flatten();
        all.map(|b| (b.rows.clone(), b.changed().iter().collect())).collect()
    }

    #[test]
    fn rows_with_the_same_changed_strips_form_one_band() {
        assert_eq!(bands(&[part(2, 3..5)]), [(3..5, vec![2])]);
        let two = [part(1, 8..16), part(2, 0..12)];
        assert_eq!(bands(&two), [(0..8, vec![2]), (8..12, vec![1, 2]), (12..16, vec![1])]);
    }

    #[test]
    fn an_entry_fits_into_a_batch() {
        assert_eq!(
            bands(&[part(0, 0..40)]),
            [(0..16, vec![0]), (16..32, vec![0]), (32..40, vec![0])]
        );
        let wide: Vec<_> = (0..3).map(|n| part(n, 0..8)).collect();
        assert_eq!(bands(&wide), [(0..7, vec![0, 1, 2]), (7..8, vec![0, 1, 2])]);
        let widest: Vec<_> = (0..62).map(|n| part(n, 0..2)).collect();
        let rounds = split_into_bands(&widest);
        assert_eq!(rounds.len(), 5);
        assert!(rounds.iter().all(|t| t.iter().all(|b| b.data.len() <= MAX_BAND_STRIPS)));
    }

    proptest! {
        #[test]
        fn each_row_belongs_to_one_band(all in prop::collection::btree_set((0u16..20, 0u32..30), 1..60)) {
            let parts: Vec<_> = all.iter().map(|(strip, row)| part(*strip, *row..*row + 1)).collect();
            let mut found: Vec<_> = split_into_bands(&parts).into_iter().flatten().flat_map(|band| {
                let rows = band.rows.clone();
                assert!(band.row_count() <= max_band_rows(band.changed()));
                band.data.into_iter().flat_map(move |(strip, data)| {
                    assert_eq!(data.len(), rows.len() * ROW_BYTES as usize);
                    rows.clone().map(move |row| (strip, row))
                })
            }).collect();
            found.sort_unstable();
            prop_assert_eq!(found, all.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn bands_written_together_share_no_row(writes in prop::collection::vec((0u32..30, 1u32..20), 1..40)) {
            let writes: Vec<_> = (0..).zip(writes).map(|(n, (at, len))| part(n, at..at + len)).collect();
            for round in split_into_bands(&writes) {
                let mut rows: Vec<_> = round.iter().flat_map(|b| b.rows.clone()).collect();
                let count = rows.len();
                rows.sort_unstable();
                rows.dedup();
                prop_assert_eq!(rows.len(), count);
            }
        }
    }
}

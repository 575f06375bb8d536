//! What is written of a stripe, in bands: rows of which the same strips change. Arithmetic, and nothing else.

use std::ops::Range;

use block::Bufs;
use geometry::ROW_BYTES;
use smallvec::SmallVec;

use super::batch::{SLOT_BLOCKS, blocks_of_row};
use super::row::Strips;

/// Most rows of a band, which bounds its memory.
const MOST_ROWS: u32 = 16;

/// Most strips that change of one row at once: with their sum, as many blocks as fit a batch beside its head several times
/// over. If more change, some do after the others.
const MOST_STRIPS: usize = 15;

/// Rows of one strip that are written.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) strip: u16,
    pub(super) rows: Range<u32>,
    /// What they are to hold.
    pub(super) data: Bufs,
}

/// Rows of which the same strips change.
#[derive(Clone, Debug)]
pub(super) struct Band {
    pub(super) rows: Range<u32>,
    /// Strips and what these rows of them are to hold, in ascending order.
    pub(super) data: SmallVec<[(u16, Bufs); 2]>,
}

impl Band {
    /// How many rows.
    pub(super) fn len(&self) -> u32 {
        self.rows.end - self.rows.start
    }

    /// The strips that change.
    pub(super) fn changed(&self) -> Strips {
        self.data.iter().map(|(strip, _)| *strip).collect()
    }
}

impl Part {
    fn slice(&self, rows: &Range<u32>) -> Bufs {
        let at = |row: u32| (row - self.rows.start) as usize * ROW_BYTES as usize;
        self.data.slice(at(rows.start)..at(rows.end))
    }
}

/// Most rows of a band in which so many strips change: its entry fits a batch.
fn most_rows(changed: Strips) -> u32 {
    let fit = (SLOT_BLOCKS - 1) / blocks_of_row(changed);
    u32::try_from(fit).unwrap_or(1).clamp(1, MOST_ROWS)
}

/// The bands of what is written: turn by turn, where those of one turn have no row in common. No two of `parts` have one.
pub(super) fn bands(parts: &[Part]) -> SmallVec<[Vec<Band>; 1]> {
    let mut bounds: Vec<u32> = parts.iter().flat_map(|p| [p.rows.start, p.rows.end]).collect();
    bounds.sort_unstable();
    bounds.dedup();
    let mut turns = SmallVec::new();
    for pair in bounds.windows(2) {
        let mut of: Vec<&Part> = parts.iter().filter(|p| p.rows.contains(&pair[0])).collect();
        of.sort_unstable_by_key(|p| p.strip);
        for (turn, parts) in of.chunks(MOST_STRIPS).enumerate() {
            if turns.len() <= turn {
                turns.push(Vec::new());
            }
            cut(pair[0]..pair[1], parts, &mut turns[turn]);
        }
    }
    turns
}

fn cut(rows: Range<u32>, parts: &[&Part], bands: &mut Vec<Band>) {
    let most = most_rows(parts.iter().map(|p| p.strip).collect());
    let mut start = rows.start;
    while start < rows.end {
        let rows = start..rows.end.min(start + most);
        start = rows.end;
        let data = parts.iter().map(|p| (p.strip, p.slice(&rows))).collect();
        bands.push(Band { rows, data });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part(strip: u16, rows: Range<u32>) -> Part {
        let len = (rows.end - rows.start) as usize * ROW_BYTES as usize;
        Part { strip, rows, data: Bufs::zeroes(len) }
    }

    fn shape(parts: &[Part]) -> Vec<(Range<u32>, Vec<u16>)> {
        let all = bands(parts).into_iter().flatten();
        all.map(|b| (b.rows.clone(), b.changed().iter().collect())).collect()
    }

    #[test]
    fn rows_of_which_the_same_strips_change_go_together() {
        assert_eq!(shape(&[part(2, 3..5)]), [(3..5, vec![2])]);
        let two = [part(1, 8..16), part(2, 0..12)];
        assert_eq!(shape(&two), [(0..8, vec![2]), (8..12, vec![1, 2]), (12..16, vec![1])]);
    }

    #[test]
    fn an_entry_fits_a_batch() {
        assert_eq!(
            shape(&[part(0, 0..40)]),
            [(0..16, vec![0]), (16..32, vec![0]), (32..40, vec![0])]
        );
        let wide: Vec<_> = (0..3).map(|n| part(n, 0..8)).collect();
        assert_eq!(shape(&wide), [(0..7, vec![0, 1, 2]), (7..8, vec![0, 1, 2])]);
        let widest: Vec<_> = (0..62).map(|n| part(n, 0..2)).collect();
        let turns = bands(&widest);
        assert_eq!(turns.len(), 5);
        assert!(turns.iter().all(|t| t.iter().all(|b| b.data.len() <= MOST_STRIPS)));
    }

    proptest! {
        #[test]
        fn every_row_is_in_one_band(all in prop::collection::btree_set((0u16..20, 0u32..30), 1..60)) {
            let parts: Vec<_> = all.iter().map(|(strip, row)| part(*strip, *row..*row + 1)).collect();
            let mut found: Vec<_> = bands(&parts).into_iter().flatten().flat_map(|band| {
                let rows = band.rows.clone();
                assert!(band.len() <= most_rows(band.changed()));
                band.data.into_iter().flat_map(move |(strip, data)| {
                    assert_eq!(data.len(), rows.len() * ROW_BYTES as usize);
                    rows.clone().map(move |row| (strip, row))
                })
            }).collect();
            found.sort_unstable();
            prop_assert_eq!(found, all.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn bands_of_a_turn_have_no_row_in_common(parts in prop::collection::vec((0u32..30, 1u32..20), 1..40)) {
            let parts: Vec<_> = (0..).zip(parts).map(|(n, (at, len))| part(n, at..at + len)).collect();
            for turn in bands(&parts) {
                let mut rows: Vec<_> = turn.iter().flat_map(|b| b.rows.clone()).collect();
                let before = rows.len();
                rows.sort_unstable();
                rows.dedup();
                prop_assert_eq!(rows.len(), before);
            }
        }
    }
}

//! Writes that begin or end within a row: the row is read, and written whole.

use std::collections::BTreeMap;

use block::{BufMut, Bufs};
use geometry::{ROW_BYTES, Role};
use smallvec::SmallVec;
use tokio::sync::SemaphorePermit;

use super::band::Part;
use super::stripe::{Failure, Stripe};

const ROW: usize = ROW_BYTES as usize;

/// What is written of one strip. No two have a byte in common.
#[derive(Clone, Debug)]
pub(super) struct Fragment {
    pub(super) strip: u16,
    /// Where in the strip, in bytes.
    pub(super) at: usize,
    pub(super) data: Bufs,
}

impl Fragment {
    /// Where its first whole row begins, and where its last one ends, in bytes of the strip; nothing between them if there is none.
    fn whole(&self) -> (usize, usize) {
        let end = self.at + self.data.len();
        let start = self.at.next_multiple_of(ROW);
        (start, (end / ROW * ROW).max(start))
    }

    /// The whole rows of it.
    pub(super) fn part(&self) -> Option<Part> {
        let (start, end) = self.whole();
        let rows = row(start)..row(end);
        (start < end && end <= self.at + self.data.len()).then(|| Part {
            strip: self.strip,
            rows,
            data: self.data.slice(start - self.at..end - self.at),
        })
    }

    /// What of it is less than a row: up to two pieces, by where they begin in the strip.
    pub(super) fn rests(&self) -> SmallVec<[(usize, Bufs); 2]> {
        let end = self.at + self.data.len();
        let (whole, behind) = self.whole();
        let (head, tail) = (self.at..whole.min(end), behind.min(end).max(self.at)..end);
        let is_within_a_row = self.part().is_none() && row(self.at) == row(end - 1);
        let pieces = if is_within_a_row { [self.at..end, end..end] } else { [head, tail] };
        let cut = |range: std::ops::Range<usize>| {
            (range.start, self.data.slice(range.start - self.at..range.end - self.at))
        };
        pieces.into_iter().filter(|range| !range.is_empty()).map(cut).collect()
    }
}

fn row(byte: usize) -> u32 {
    u32::try_from(byte / ROW).unwrap_or(u32::MAX)
}

/// Rows that are written in part, by strip and number: what each is given, and where in it.
type Rests = BTreeMap<(u16, u32), Vec<(usize, Bufs)>>;

/// The whole rows of `fragments`, and the rest.
fn split(fragments: &[Fragment]) -> (Vec<Part>, Rests) {
    let mut rests = Rests::new();
    for fragment in fragments {
        for (at, data) in fragment.rests() {
            rests.entry((fragment.strip, row(at))).or_default().push((at % ROW, data));
        }
    }
    (fragments.iter().filter_map(Fragment::part).collect(), rests)
}

impl<'a> Stripe<'a> {
    /// Whole rows of what is written, and what to hold until they are.
    pub(super) async fn whole_rows(
        &self,
        fragments: &[Fragment],
    ) -> Result<(Vec<Part>, Option<SemaphorePermit<'a>>), Failure> {
        let (mut parts, rests) = split(fragments);
        if rests.is_empty() {
            return Ok((parts, None));
        }
        let pages = u32::try_from(rests.len()).unwrap_or(u32::MAX);
        let held = self.array.partial(pages).await;
        for ((strip, row), pieces) in rests {
            let mut page = self.row(strip, row).await?;
            for (at, data) in pieces {
                data.copy_to(&mut page[at..at + data.len()]);
            }
            parts.push(Part { strip, rows: row..row + 1, data: page.into() });
        }
        Ok((parts, Some(held)))
    }

    /// One row of data, to be changed.
    async fn row(&self, strip: u16, row: u32) -> Result<BufMut, Failure> {
        let (role, rows) = (Role::Data(strip), row..row + 1);
        let mut page = self.array.scratch.credit().alloc_page(ROW);
        match self.read(role, &rows, &self.array.scratch).await {
            Ok(data) => data.copy_to(&mut page),
            Err(unread) => {
                self.unread(unread).await?;
                let data = self.made_again(strip, &rows, unread, &self.array.scratch).await?;
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

    fn fragment(at: usize, len: usize) -> Fragment {
        let mut data = Bufs::new();
        let mut left = len;
        while left > 0 {
            let page = Buf::zeroes(left.min(ROW));
            left -= page.len();
            data.push(page);
        }
        Fragment { strip: 3, at, data }
    }

    proptest! {
        #[test]
        fn every_byte_is_in_a_whole_row_or_a_rest(at in 0usize..30_000, len in 1usize..30_000) {
            let (parts, rests) = split(&[fragment(at, len)]);
            let mut bytes: Vec<usize> = parts.iter().flat_map(|p| {
                assert_eq!(p.data.len(), p.rows.len() * ROW);
                p.rows.start as usize * ROW..p.rows.end as usize * ROW
            }).collect();
            for ((_, row), pieces) in &rests {
                for (at, data) in pieces {
                    assert!(at + data.len() <= ROW && data.len() < ROW);
                    bytes.extend((0..data.len()).map(|n| *row as usize * ROW + at + n));
                }
            }
            bytes.sort_unstable();
            prop_assert!(bytes == (at..at + len).collect::<Vec<_>>());
        }
    }
}

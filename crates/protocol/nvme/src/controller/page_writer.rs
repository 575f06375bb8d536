//! Writes a part of a page into a command's buffers.

use block::BufsMut;

/// The window from `offset` on of a page, as long as the buffers. Bytes put outside of it are
/// dropped; bytes never put read as zeroes.
pub(crate) struct PageWriter<'a> {
    offset: u64,
    buffers: &'a mut BufsMut,
    end: u64,
}

impl<'a> PageWriter<'a> {
    /// A window of zeroes.
    pub(crate) fn new(offset: u64, buffers: &'a mut BufsMut) -> Self {
        let mut end = offset;
        for buffer in &mut *buffers {
            buffer.fill(0);
            end = end.saturating_add(buffer.len() as u64);
        }
        Self { offset, buffers, end }
    }

    /// First byte of the window.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// End of the window in the page.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Writes `bytes` at byte `at` of the page.
    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        let last = at.saturating_add(bytes.len() as u64);
        let mut start = self.offset;
        for buffer in &mut *self.buffers {
            let stop = start.saturating_add(buffer.len() as u64);
            let (from, to) = (at.max(start), last.min(stop));
            if from < to {
                let part = &bytes[index(from - at)..index(to - at)];
                buffer[index(from - start)..index(to - start)].copy_from_slice(part);
            }
            start = stop;
        }
    }
}

/// An offset within a slice, which is smaller than any address space.
fn index(offset: u64) -> usize {
    usize::try_from(offset).expect("an offset within a slice")
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{BufferPool, MemoryClass};
    use proptest::prelude::*;

    fn buffers(lengths: &[usize]) -> BufsMut {
        let pool = BufferPool::new(1 << 20).unwrap();
        let credit = pool.account().try_credit(1 << 19, MemoryClass::LocalIo).unwrap();
        lengths.iter().flat_map(|&n| credit.alloc(n)).collect()
    }

    proptest! {
        #[test]
        fn any_window_shows_that_part_of_the_page(
            page in prop::collection::vec(1u8.., 1..300),
            offset in 0u64..320,
            lengths in prop::collection::vec(1usize..100, 1..5),
            cut in 1usize..64,
        ) {
            let mut bufs = buffers(&lengths);
            let mut window = PageWriter::new(offset, &mut bufs);
            for (i, piece) in page.chunks(cut).enumerate() {
                window.put((i * cut) as u64, piece);
            }
            let total: usize = lengths.iter().sum();
            prop_assert_eq!(window.end(), offset + total as u64);
            let got: Vec<u8> = bufs.iter().flat_map(|b| b.to_vec()).collect();
            let expect: Vec<u8> = page
                .iter()
                .copied()
                .chain(std::iter::repeat(0))
                .skip(offset as usize)
                .take(total)
                .collect();
            prop_assert_eq!(got, expect);
        }
    }
}

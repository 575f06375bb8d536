//! Which blocks of data are zeroes.

use std::ops::Range;

use block::Bufs;

/// Whether all bytes are zero. Without a branch for each byte.
pub(super) fn is_zero(data: &Bufs) -> bool {
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |any, byte| any | byte) == 0;
    data.iter().all(|piece| piece.chunks(4096).all(is_zero))
}

/// Splits `data`, in order, into runs of blocks that are all zeroes and runs of blocks that are
/// not.
pub(super) fn split_by_zeroes(data: &Bufs, block: usize) -> Vec<(Range<usize>, bool)> {
    let mut parts: Vec<(Range<usize>, bool)> = Vec::new();
    for at in (0..data.len()).step_by(block) {
        let end = (at + block).min(data.len());
        let zeroes = is_zero(&data.slice(at..end));
        match parts.last_mut().filter(|(_, last)| *last == zeroes) {
            Some((part, _)) => part.end = end,
            None => parts.push((at..end, zeroes)),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use block::MemoryClass;
    use rt::buf::{BufferPool, copy_in};

    use super::*;

    #[test]
    fn data_is_split_at_zero_blocks() {
        let pool = BufferPool::new(1 << 20).unwrap();
        let credit = pool.account().try_credit(8 * 512, MemoryClass::Read).unwrap();
        let mut bytes = vec![0; 6 * 512];
        bytes[2 * 512 + 511] = 1;
        bytes[3 * 512] = 1;
        let data = copy_in(&credit, &bytes);
        let expected = [(0..1024, true), (1024..2048, false), (2048..3072, true)];
        assert_eq!(split_by_zeroes(&data, 512), expected);
        assert_eq!(split_by_zeroes(&Bufs::zeroes(512), 512), [(0..512, true)]);
        assert_eq!(split_by_zeroes(&Bufs::new(), 512), []);
    }
}

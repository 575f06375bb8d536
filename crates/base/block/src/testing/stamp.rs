//! Blocks stamped with their writer, which show when they are torn or misdirected.
//!
//! A block is filled with 32-byte self-contained little-endian cells:
//! ```text
//!  0        8        16       24                    28      31
//!  | volume | lba    | sequence | check (of the rest) | writer | cell number |
//! ```
//! so wherever two writes are mixed in a block, both leave a cell that disagrees with its
//! neighbours.

use std::fmt;

use crate::Lba;

const CELL: usize = 32;

/// Who wrote a block, where and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// Number of the volume, as the test counts them.
    pub volume: u64,
    /// The block it was written to.
    pub at: Lba,
    /// Number of the writer, below 2^24.
    pub writer: u32,
    /// Number of the write; never used twice in a volume.
    pub sequence: u64,
}

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeroes.
    Zero,
    /// A whole stamped block, not necessarily one that belongs here.
    Stamped(Stamp),
    /// Parts of different writes.
    Torn {
        /// Offset in bytes of the first cell that differs from the first one's write.
        offset: usize,
    },
    /// No valid stamp.
    Unknown,
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { volume, at, writer, sequence } = self;
        write!(f, "write {sequence} by {writer} to block {at} of volume {volume}")
    }
}

impl Stamp {
    /// Fills a block.
    ///
    /// # Panics
    /// If the block is not a whole number of cells, at most 256, or the writer's number too large.
    pub fn fill(&self, block: &mut [u8]) {
        assert!(block.len().is_multiple_of(CELL) && block.len() <= 256 * CELL);
        assert!(self.writer < 1 << 24, "writer {}", self.writer);
        let [a, b, c, tail] = self.words();
        for (cell, number) in block.chunks_exact_mut(CELL).zip(0u64..) {
            cell[0..8].copy_from_slice(&a.to_le_bytes());
            cell[8..16].copy_from_slice(&b.to_le_bytes());
            cell[16..24].copy_from_slice(&c.to_le_bytes());
            cell[24..32].copy_from_slice(&(tail | number << 56).to_le_bytes());
        }
    }

    fn words(&self) -> [u64; 4] {
        let mut check = 0x5749_4e44_524f_5345;
        for word in [self.volume, self.at.0, self.sequence, u64::from(self.writer)] {
            check = (check ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            check ^= check >> 29;
        }
        let tail = check & 0xffff_ffff | u64::from(self.writer) << 32;
        [self.volume, self.at.0, self.sequence, tail]
    }

    fn from_cell(cell: &[u8], number: u64) -> Option<Self> {
        let [a, b, c, d] = words_of(cell);
        let writer = u32::try_from(d >> 32 & 0xff_ffff).ok()?;
        let stamp = Self { volume: a, at: Lba(b), sequence: c, writer };
        (stamp.words()[3] | number << 56 == d).then_some(stamp)
    }
}

impl Contents {
    /// Recognises what a block holds.
    #[must_use]
    pub fn parse(block: &[u8]) -> Self {
        let Some((first, rest)) = block.split_at_checked(CELL) else { return Self::Unknown };
        if first.iter().all(|&b| b == 0) {
            return match rest.iter().position(|&b| b != 0) {
                None => Self::Zero,
                Some(i) if contains_stamp(block) => Self::Torn { offset: (CELL + i) / CELL * CELL },
                Some(_) => Self::Unknown,
            };
        }
        let Some(stamp) = Stamp::from_cell(first, 0) else {
            return if contains_stamp(block) { Self::Torn { offset: 0 } } else { Self::Unknown };
        };
        let [.., tail] = words_of(first);
        let odd = rest.chunks(CELL).zip(1u64..).find(|(cell, number)| {
            cell.len() != CELL
                || cell[..24] != first[..24]
                || words_of(cell)[3] != tail | number << 56
        });
        match odd {
            None => Self::Stamped(stamp),
            Some((_, number)) => {
                Self::Torn { offset: CELL * usize::try_from(number).unwrap_or(usize::MAX) }
            }
        }
    }
}

fn contains_stamp(block: &[u8]) -> bool {
    block.chunks_exact(CELL).zip(0u64..).any(|(cell, number)| {
        cell.iter().any(|&b| b != 0) && Stamp::from_cell(cell, number).is_some()
    })
}

fn words_of(cell: &[u8]) -> [u64; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(cell.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stamped(sequence: u64) -> Vec<u8> {
        let mut block = vec![0; 4096];
        Stamp { volume: 1, at: Lba(7), writer: 3, sequence }.fill(&mut block);
        block
    }

    #[test]
    fn a_block_identifies_its_write() {
        for writer in [0, 1, (1 << 24) - 1] {
            for len in [512, 4096] {
                let stamp = Stamp { volume: u64::MAX, at: Lba(u64::MAX), writer, sequence: 9 };
                let mut block = vec![0; len];
                assert_eq!(Contents::parse(&block), Contents::Zero);
                stamp.fill(&mut block);
                assert_eq!(Contents::parse(&block), Contents::Stamped(stamp));
            }
        }
        assert_eq!(Contents::parse(&[0xff; 512]), Contents::Unknown);
        assert_eq!(Contents::parse(&[]), Contents::Unknown);
    }

    #[test]
    fn a_tear_is_detected_at_any_offset() {
        for (head, tail) in
            [(stamped(1), stamped(2)), (vec![0; 4096], stamped(2)), (stamped(1), vec![0; 4096])]
        {
            for cut in (512..4096).step_by(512) {
                let mut torn = head.clone();
                torn[cut..].copy_from_slice(&tail[cut..]);
                assert_eq!(Contents::parse(&torn), Contents::Torn { offset: cut });
            }
        }
    }

    #[test]
    fn a_block_shifted_within_itself_is_torn() {
        let whole = stamped(1);
        let mut shifted = whole.clone();
        shifted[..2048].copy_from_slice(&whole[2048..]);
        assert_eq!(Contents::parse(&shifted), Contents::Torn { offset: 0 });
    }

    proptest! {
        #[test]
        fn one_flipped_bit_is_detected(bit in 0usize..4096 * 8) {
            let mut block = stamped(5);
            block[bit / 8] ^= 1 << (bit % 8);
            let torn = matches!(Contents::parse(&block), Contents::Torn { .. });
            prop_assert!(torn);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = Contents::parse(&bytes);
        }
    }
}

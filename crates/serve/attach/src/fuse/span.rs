//! Splits byte ranges into blocks.

use block::{Blocks, Lba};

/// The part of a block that a range covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartialBlock {
    pub(super) at: Lba,
    /// First byte.
    pub(super) from: usize,
    /// Length in bytes.
    pub(super) bytes: usize,
}

/// A byte range: a block whose end it covers (or a middle part, if it is that short), whole blocks,
/// and one whose beginning it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockSpan {
    pub(super) head: Option<PartialBlock>,
    pub(super) body: Blocks,
    pub(super) tail: Option<PartialBlock>,
}

impl BlockSpan {
    /// `len` bytes from `at`; their end must not overflow.
    pub(super) fn new(at: u64, len: u64, block_size: u32) -> Self {
        let each = u64::from(block_size);
        let part = |at: u64, len: u64| PartialBlock {
            at: Lba(at / each),
            from: usize::try_from(at % each).unwrap_or(0),
            bytes: usize::try_from(len).unwrap_or(0),
        };
        let to_boundary = at.next_multiple_of(each) - at;
        let head = to_boundary.min(len);
        let (rest, left) = (at + head, len - head);
        let tail = left % each;
        Self {
            head: (head > 0).then(|| part(at, head)),
            body: Blocks::new(Lba(rest / each), left / each),
            tail: (tail > 0).then(|| part(at + len - tail, tail)),
        }
    }

    /// Whether it consists of whole blocks.
    pub(super) fn is_whole(&self) -> bool {
        self.head.is_none() && self.tail.is_none()
    }
}

/// The blocks that contain the range, and the offset of the range in the first one.
pub(super) fn covering(at: u64, len: u64, block_size: u32) -> (Blocks, usize) {
    let each = u64::from(block_size);
    let first = at / each;
    let end = (at + len).div_ceil(each);
    (Blocks::new(Lba(first), end - first), usize::try_from(at % each).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_range_within_a_block_is_a_part_of_it() {
        let span = BlockSpan::new(512 + 3, 5, 512);
        assert_eq!(span.head, Some(PartialBlock { at: Lba(1), from: 3, bytes: 5 }));
        assert_eq!((span.body.count, span.tail), (0, None));
        assert!(
            BlockSpan::new(4096, 8192, 4096).is_whole() && BlockSpan::new(512, 0, 512).is_whole()
        );
    }

    proptest! {
        /// The three parts form the range in order, and partial ones are shorter than a block.
        #[test]
        fn a_span_is_its_range(at in 0u64..1 << 40, len in 0u64..1 << 22, large: bool) {
            let size: u32 = if large { 4096 } else { 512 };
            let span = BlockSpan::new(at, len, size);
            let mut next = at;
            let mut part = |part: Option<PartialBlock>| {
                let Some(part) = part else { return };
                assert_eq!(part.at.0 * u64::from(size) + part.from as u64, next);
                assert!(part.bytes > 0 && part.bytes < size as usize);
                assert!(part.from + part.bytes <= size as usize);
                next += part.bytes as u64;
            };
            part(span.head);
            let (body, bytes) = (span.body, span.body.count * u64::from(size));
            let begin = at + span.head.map_or(0, |p| p.bytes as u64);
            if body.count > 0 {
                assert_eq!(body.at.0 * u64::from(size), begin);
            }
            if let Some(tail) = span.tail {
                assert_eq!((tail.at.0 * u64::from(size), tail.from), (begin + bytes, 0));
            }
            let tail = span.tail.map_or(0, |p| p.bytes as u64);
            assert_eq!(begin + bytes + tail, at + len);
            let (blocks, lead) = covering(at, len, size);
            assert_eq!(blocks.at.0 * u64::from(size) + lead as u64, at);
            assert!(blocks.end().unwrap() * u64::from(size) >= at + len);
        }
    }
}

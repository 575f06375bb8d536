//! The operations of a layer.

use std::fmt;

use rt::buf::Bufs;

/// Address of a logical block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lba(pub u64);

impl fmt::Display for Lba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A range of logical blocks: first block and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blocks {
    /// First block.
    pub at: Lba,
    /// Number of blocks.
    pub count: u64,
}

impl Blocks {
    /// The range of `count` blocks from `at`.
    #[must_use]
    pub fn new(at: Lba, count: u64) -> Self {
        Self { at, count }
    }

    /// First block behind the range; `None` on overflow.
    #[must_use]
    pub fn end(&self) -> Option<u64> {
        self.at.0.checked_add(self.count)
    }

    /// The range split into pieces of `most` blocks (at least one); the last may be shorter.
    pub fn chunks(self, most: u64) -> impl Iterator<Item = Self> {
        let most = most.max(1);
        (0..self.count.div_ceil(most)).map(move |n| {
            let done = n * most;
            Self::new(Lba(self.at.0 + done), most.min(self.count - done))
        })
    }

    /// Whether the two have a block in common.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let before = |a: &Self, b: &Self| b.at.0 - a.at.0 < a.count;
        if self.at <= other.at {
            before(self, other) && other.count > 0
        } else {
            before(other, self) && self.count > 0
        }
    }
}

/// An operation on a layer. Every layer matches all of them; there is no default.
///
/// Ranges lie inside the device, are not empty, and data is a whole number of blocks:
/// [`crate::Dev`] checks that once for all layers.
#[derive(Clone, Debug)]
pub enum Op {
    /// Returns the contents of the range, in buffers of the callee's choice.
    Read {
        /// First block.
        at: Lba,
        /// How many blocks.
        blocks: u32,
    },
    /// Replaces the contents of the range that `data` covers.
    Write {
        /// First block.
        at: Lba,
        /// The new contents, a whole number of blocks.
        data: Bufs,
        /// Durable when it completes.
        fua: bool,
    },
    /// Makes the range read as zeroes.
    Zero {
        /// First block.
        at: Lba,
        /// How many blocks.
        blocks: u32,
        /// Whether the space may be freed. If not, later writes there cannot fail for lack of
        /// space.
        unmap: bool,
        /// Durable when it completes.
        fua: bool,
    },
    /// Declares that the range is no longer needed. Afterwards it reads as zeroes if
    /// [`crate::Info::unmap_zeroes`]; otherwise, until rewritten, as zeroes or anything ever
    /// written there, not necessarily the same each time.
    Unmap {
        /// First block.
        at: Lba,
        /// How many blocks.
        blocks: u32,
    },
    /// Returns the [`BlockStatus`](crate::BlockStatus) of the run that begins at `at`: mapped or
    /// unmapped. Blocks that a completed write has written are mapped; unmapped blocks read as
    /// zeroes. A block that reads as zeroes may be mapped, and a run may end early.
    ///
    /// Contents are not read, so a write of the same blocks may be in flight: it counts or not.
    BlockStatus {
        /// First block.
        at: Lba,
        /// Number of blocks, at most as many as a run can have.
        blocks: u32,
    },
    /// Makes durable every write that completed before this was submitted.
    Flush,
}

impl Op {
    /// The range of the operation; `None` for [`Op::Flush`]. `block_size` in bytes.
    #[must_use]
    pub fn range(&self, block_size: u32) -> Option<Blocks> {
        match *self {
            Self::Read { at, blocks }
            | Self::Zero { at, blocks, .. }
            | Self::BlockStatus { at, blocks }
            | Self::Unmap { at, blocks } => Some(Blocks::new(at, u64::from(blocks))),
            Self::Write { at, ref data, .. } => {
                Some(Blocks::new(at, data.len() as u64 / u64::from(block_size)))
            }
            Self::Flush => None,
        }
    }

    /// Whether the operation changes contents.
    #[must_use]
    pub fn is_write(&self) -> bool {
        match self {
            Self::Write { .. } | Self::Zero { .. } | Self::Unmap { .. } => true,
            Self::Read { .. } | Self::BlockStatus { .. } | Self::Flush => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_range_in_order() {
        let of = |at, count, most| -> Vec<_> { Blocks::new(Lba(at), count).chunks(most).collect() };
        let r = |at, count| Blocks::new(Lba(at), count);
        assert_eq!(of(5, 7, 3), [r(5, 3), r(8, 3), r(11, 1)]);
        assert_eq!(of(5, 6, 3), [r(5, 3), r(8, 3)]);
        assert_eq!(of(5, 2, 3), [r(5, 2)]);
        assert_eq!(of(5, 2, 0), [r(5, 1), r(6, 1)]);
        assert!(of(5, 0, 3).is_empty());
        assert_eq!(of(u64::MAX - 2, 2, u64::MAX), [r(u64::MAX - 2, 2)]);
    }

    #[test]
    fn overlap_is_symmetric_and_exact() {
        let r = |at, count| Blocks::new(Lba(at), count);
        for (a, b, expect) in [
            (r(0, 4), r(4, 1), false),
            (r(0, 4), r(3, 1), true),
            (r(u64::MAX - 1, 1), r(u64::MAX, 1), false),
            (r(5, 10), r(7, 1), true),
            (r(5, 0), r(5, 1), false),
        ] {
            assert_eq!((a.overlaps(&b), b.overlaps(&a)), (expect, expect), "{a:?} {b:?}");
        }
    }
}

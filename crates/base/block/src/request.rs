//! What a front end asks of a volume. The volume composes it from the six operations.

use rt::buf::Bufs;

use crate::{Blocks, Error, Lba};

/// A command as SCSI and NVMe know it. Ranges come from outside and are checked by the volume.
#[derive(Clone, Debug)]
pub enum Request {
    /// Returns the contents.
    Read {
        /// What to read.
        range: Blocks,
    },
    /// Replaces the contents.
    Write {
        /// First block.
        at: Lba,
        /// New contents, a whole number of blocks.
        data: Bufs,
        /// Durable when it completes.
        fua: bool,
    },
    /// Repeats one block over a range.
    WriteSame {
        /// What to fill.
        range: Blocks,
        /// One block.
        pattern: Bufs,
        /// Durable when it completes.
        fua: bool,
    },
    /// Makes the range read as zeroes.
    Zero {
        /// What to zero.
        range: Blocks,
        /// Whether the space may be freed.
        unmap: bool,
        /// Durable when it completes.
        fua: bool,
    },
    /// Frees ranges; afterwards they read as zeroes.
    Unmap {
        /// What to free, in any order.
        ranges: Vec<Blocks>,
    },
    /// Fails with [`Failure::Miscompare`] unless the contents are `data`.
    Compare {
        /// First block.
        at: Lba,
        /// Expected contents.
        data: Bufs,
    },
    /// Reads the range from the medium and returns nothing.
    Verify {
        /// What to verify.
        range: Blocks,
    },
    /// Replaces the contents by `write` if they are `compare`, as one atomic step.
    CompareAndWrite {
        /// First block.
        at: Lba,
        /// Expected contents.
        compare: Bufs,
        /// New contents, as long as `compare`.
        write: Bufs,
        /// Durable when it completes.
        fua: bool,
    },
    /// Sets the bits that are set in `data`, as one step: what overlaps comes before or after.
    OrWrite {
        /// First block.
        at: Lba,
        /// Bits to set, a whole number of blocks.
        data: Bufs,
        /// Durable when it completes.
        fua: bool,
    },
    /// Ends once no change of the ranges is under way that was accepted before.
    Settle {
        /// Which blocks.
        ranges: Vec<Blocks>,
    },
    /// Returns the [`Run`](crate::Run)s that the range begins with, each other than the one before, as data. They cover
    /// one block at least, unless there is none, and not always all.
    Map {
        /// What to tell about.
        range: Blocks,
        /// Most runs that are wanted, one at least.
        most: u16,
    },
    /// Makes durable every write completed before this was submitted.
    Flush,
}

/// Why a [`Request`] failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The device failed it.
    #[error(transparent)]
    Device(#[from] Error),
    /// A comparison found a difference.
    #[error("the contents differ from byte {offset} on")]
    Miscompare {
        /// Offset in bytes, from the start of the compared data, of the first difference.
        offset: u64,
    },
    /// The core had no memory for it for seconds: nothing has been done, and the same request may
    /// be tried again.
    #[error("there is no memory for it now")]
    Busy,
    /// A reservation keeps the caller from it. Nothing has been done, or, of a command in several pieces (WRITE SAME, UNMAP) that
    /// had begun before the reservation, some of them.
    #[error("it conflicts with a reservation")]
    Conflict,
}

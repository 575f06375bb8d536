//! Requests of front ends to a volume, which composes them from layer operations.

use rt::buf::Bufs;

use crate::{Blocks, Error, Lba};

/// A command as SCSI and NVMe know it. Ranges come from clients; the volume checks them.
#[derive(Clone, Debug)]
pub enum Request {
    /// Returns the contents.
    Read {
        /// The range to read.
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
        /// The range to fill.
        range: Blocks,
        /// One block.
        pattern: Bufs,
        /// Durable when it completes.
        fua: bool,
    },
    /// Makes the range read as zeroes.
    Zero {
        /// The range to zero.
        range: Blocks,
        /// Whether the space may be freed.
        unmap: bool,
        /// Durable when it completes.
        fua: bool,
    },
    /// Frees ranges; afterwards they read as zeroes.
    Unmap {
        /// The ranges to free, in any order.
        ranges: Vec<Blocks>,
    },
    /// Fails with [`RequestError::Miscompare`] unless the contents are `data`.
    Compare {
        /// First block.
        at: Lba,
        /// Expected contents.
        data: Bufs,
    },
    /// Reads the range from the medium and returns nothing.
    Verify {
        /// The range to verify.
        range: Blocks,
    },
    /// Replaces the contents by `write` if they equal `compare`, atomically.
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
    /// Sets the bits that are set in `data`, atomically with respect to overlapping commands.
    OrWrite {
        /// First block.
        at: Lba,
        /// Bits to set, a whole number of blocks.
        data: Bufs,
        /// Durable when it completes.
        fua: bool,
    },
    /// Ends once every change of the ranges that was accepted before has ended.
    DrainWrites {
        /// Which blocks.
        ranges: Vec<Blocks>,
    },
    /// Returns the [`BlockStatus`](crate::BlockStatus) runs at the start of the range, each
    /// different from the one before. They cover at least one block, if there is one, but not
    /// always the whole range.
    BlockStatus {
        /// The range to report.
        range: Blocks,
        /// Most runs to return, at least one.
        max_runs: u16,
    },
    /// Makes durable every write completed before this was submitted.
    Flush,
}

/// Why a [`Request`] failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The device failed it.
    #[error(transparent)]
    Device(#[from] Error),
    /// A comparison found a difference.
    #[error("the contents differ from byte {offset} on")]
    Miscompare {
        /// Offset in bytes, from the start of the compared data, of the first difference.
        offset: u64,
    },
    /// The core had no memory for it for seconds: nothing has been done, and the request may be
    /// retried.
    #[error("out of memory, try again")]
    NoMemory,
    /// A reservation forbids it. Nothing has been done; of a command in several pieces (WRITE SAME,
    /// UNMAP) that began before the reservation, some pieces may have been.
    #[error("it conflicts with a reservation")]
    ReservationConflict,
}

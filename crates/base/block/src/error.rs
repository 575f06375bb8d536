//! Errors, classified by what the caller has to do.

use crate::Lba;

/// A failed operation. Front ends map these by complete tables to SCSI sense and NVMe status; the
/// cause (an errno, a path) is logged where it occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Error {
    /// The medium cannot read the block: read it from another copy, or report it.
    #[error("block {at} cannot be read")]
    Unreadable {
        /// First block that failed.
        at: Lba,
    },
    /// The block was read and differs from what was written: read it from another copy, or report
    /// it.
    #[error("block {at} is corrupt")]
    Corrupt {
        /// First block that failed.
        at: Lba,
    },
    /// The medium refused the write; the range holds old or new contents, block by block.
    #[error("block {at} cannot be written")]
    Unwritable {
        /// First block of the write that failed.
        at: Lba,
    },
    /// The range is not inside the device: correct the request.
    #[error("the range lies outside the device")]
    OutOfRange,
    /// A thin device has run out of space: free some or grow the pool, then retry.
    #[error("no space left")]
    NoSpace,
    /// The device does not accept writes.
    #[error("the device is read-only")]
    ReadOnly,
    /// The caller's epoch is over: read the new configuration, then retry.
    #[error("the epoch has ended")]
    Fenced,
    /// The operation was aborted at the caller's request. A write's range holds the old or the
    /// new contents, block by block.
    #[error("aborted")]
    Aborted,
    /// The device is lost; no later operation will succeed.
    #[error("the device is gone")]
    Gone,
}

//! The metadata of a pool: which disks hold which columns of which volumes, in versions ([RFD
//! 0030](../../../../docs/rfd/0030-pools.md)). No I/O: `pool` reads and writes what this crate
//! decides.
//!
//! | module | subject |
//! |---|---|
//! | `metadata` | one version of the metadata, and the changes that make the next |
//! | `extent_bitmap` | the allocated physical extents of a member |
//! | `journal`, `snapshot` | on-disk formats: the changes of a version, and all of the metadata |
//! | `replay` | rebuilds the metadata that one member holds |
//! | `quorum` | which version may be opened, and which voters may be dropped |
//! | `allocator` | places new columns |
//! | `evacuation` | whether the columns of a disk fit on the others |

pub mod allocator;
pub mod evacuation;
mod extent_bitmap;
pub mod journal;
mod metadata;
pub mod quorum;
pub mod replay;
#[cfg(any(test, feature = "testing"))]
pub mod samples;
pub mod snapshot;

pub use metadata::*;

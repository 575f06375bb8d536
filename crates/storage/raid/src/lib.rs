//! RAID levels 0, 1, 10, 5 and 6 over the disks of a node, without a write hole ([RFD
//! 0029](../../../../docs/rfd/0029-raid-without-a-write-hole.md)). The layout of an extent is in
//! the crate `geometry`.
//!
//! Modules that decide and do no I/O:
//!
//! | module | subject |
//! |---|---|
//! | `row_plan` | how to write a row of a stripe |
//! | `band` | splits a stripe write into rows that are written the same way |
//! | `row_parity` | the parity arithmetic of a row |
//! | `stripe_map`, `stripe_map_format` | the slots of stripes, and how they are stored |
//! | `lost` | rows that are lost until they are rewritten |
//! | `bounded_concurrency` | runs a bounded number of operations at a time |
//! | `log_batch` | the format of the parity log on a member |
//! | `row_recovery` | how to recover a row after a crash |
//!
//! Modules that do the I/O:
//!
//! | module | subject |
//! |---|---|
//! | `array` | the members of a pool on one core, and which of them are available |
//! | `extent` | a part of a volume: its columns, and their stale slots |
//! | `parity_log` | the parity log of one member |
//! | `write_intents` | mirrored regions that are being written |
//! | `stripe` | one stripe: its lock, reads, and reconstruction |
//! | `read_locks` | keeps reads away from blocks that are being rewritten |
//! | `health` | response times of members: which are slow, which are detached |
//! | `read`, `write`, `partial_rows`, `full_stripe` | the operations of a volume |
//! | `hedged_read` | reads that are redirected from a late member |
//! | `rebuild`, `relocate` | rebuild the stale slots of a column, and move a current column |
//! | `scrub` | reads and compares all of an extent |
//! | `unrecoverable` | gives up rows that no disk returns |
//! | `log_recovery` | recovers the array after a crash |

mod array;
mod array_memory;
mod band;
mod bounded_concurrency;
mod column_checksums;
mod copy_intents;
mod extent;
mod flush;
mod fragments;
mod full_stripe;
mod health;
mod hedged_read;
mod intent_locks;
pub mod log_batch;
mod log_recovery;
mod logs;
mod lost_rows;
mod member_bits;
mod members;
mod mistake;
mod parity_log;
mod partial_rows;
mod pool_metadata;
mod quiesce;
mod read;
mod read_locks;
mod rebuild;
mod relocate;
mod row_parity;
pub mod row_plan;
pub mod row_recovery;
mod scrub;
mod stale_regions;
mod stripe;
mod stripe_locks;
mod stripe_map;
pub mod stripe_map_format;
mod stripe_map_io;
mod submit;
mod unflushed_writes;
mod unmap;
mod unrecoverable;
mod volume;
mod write;
mod write_queues;

pub use array::Array;
pub use extent::Extent;
pub use full_stripe::for_contiguous_runs;
pub use health::DiskCounters;
pub use log_recovery::{LogContents, PreviousRing, RecoveryReport};
pub use members::{ArrayMember, MemberBusy};
pub use mistake::Mistake;
pub use parity_log::RING_BLOCKS;
pub use pool_metadata::{Damage, DetachFuture, MetadataFuture, PoolMetadata};
pub use rebuild::{MaintenancePace, RebuildReport};
pub use stripe_map::{StripeLocation, StripeMap};
pub use unrecoverable::MIN_FAILING_TIME;
pub use volume::{ExtentAllocator, MaintenanceGuard, RaidSettings, RaidVolume};

#[cfg(test)]
pub(crate) mod tests;

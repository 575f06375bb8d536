//! RAID levels 0, 1, 10, 5 and 6 over the disks of a node, without a write hole ([RFD
//! 0029](../../../../docs/rfd/0029-raid-without-a-write-hole.md)). The layout of an extent is in
//! the crate `geometry`.
//!
//! A write takes five hops, each in its own module (RFD 0029, 6 names what each of them decides and
//! waits for):
//!
//! 1. `submit`: which operation, on which bytes of the volume,
//! 2. `write`: splits them by stripe, and takes each stripe lock,
//! 3. `stripe_write`, or `full_stripe`, or `copies_write`: plans the write, reads what the plan
//!    needs and computes parity,
//! 4. `logs`: makes the log entry durable on the parity members (`parity_log`),
//! 5. `array`: writes the members (`health` begins the operation on the disk).
//!
//! Modules import each other without circles. Plans and formats do no I/O:
//!
//! | module | subject |
//! |---|---|
//! | **plans and formats** | |
//! | `fragments` | splits bytes at extents, stripes and strips, and strips into rows |
//! | `band` | splits a stripe write into rows that are written the same way |
//! | `row_plan` | how to write a row of a stripe, and what to read for it |
//! | `row_parity` | the parity arithmetic of a row |
//! | `row_recovery` | how to recover a row after a crash |
//! | `stripe_map`, `stripe_map_format` | the slots of stripes, and how they are stored |
//! | `log_batch` | the format of the parity log on a member |
//! | `bounded_concurrency` | runs a bounded number of operations at a time |
//! | `member_bits`, `pool_metadata` | sets of members; what an array asks of its pool |
//! | **state** | |
//! | `extent`, `lost_rows` | a part of a volume: its columns, stale slots and lost rows |
//! | `unflushed_writes` | writes that have completed but may not be durable |
//! | `array_memory` | the memory of an array |
//! | **locks** | |
//! | `stripe_locks`, `write_queues` | one writer of a stripe at a time, and the writes that wait |
//! | `read_locks` | keeps reads away from blocks that are being rewritten |
//! | `intent_locks` | mirrored regions that are being written |
//! | **members** | |
//! | `health` | response times of members: which are slow, which are detached |
//! | `parity_log` | the parity log of one member |
//! | `members` | the attached members, and which of them are available |
//! | `array` | reads, writes and detaches members |
//! | `stale_regions`, `column_checksums` | what detached members miss; checksums of columns |
//! | `flush`, `stripe_map_io` | make writes and stripe maps durable, to retire log entries |
//! | `logs`, `copy_intents` | log entries of rows, and of regions of copies |
//! | `quiesce` | ends writing, to an extent or of a core |
//! | **stripes** | |
//! | `stripe` | one stripe: its available strips, reads, and reconstruction |
//! | `repair`, `partial_rows` | rewrites what a member does not return; completes rows |
//! | `new_contents` | the new data and parities of a band |
//! | `stripe_write`, `full_stripe`, `copies_write` | writes of a stripe |
//! | `log_recovery` | recovers the array after a crash |
//! | **volumes** | |
//! | `volume` | the extents of a volume, and its locks |
//! | `unrecoverable` | gives up rows that no disk returns |
//! | `read`, `hedged_read` | reads, and reads that are redirected from a late member |
//! | `write`, `unmap` | writes and zeroes |
//! | `submit` | the operations of clients |
//! | `rebuild`, `relocate`, `scrub` | maintenance: stale columns, moves of columns, comparison |

mod array;
mod array_memory;
mod band;
mod bounded_concurrency;
mod column_checksums;
mod copies_write;
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
mod new_contents;
mod parity_log;
mod partial_rows;
mod pool_metadata;
mod quiesce;
mod read;
mod read_locks;
mod rebuild;
mod relocate;
mod repair;
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
mod stripe_write;
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

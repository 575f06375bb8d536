//! Pools: disks of one node that hold volumes together ([RFD
//! 0030](../../../../docs/rfd/0030-pools.md)).
//!
//! | module | subject |
//! |---|---|
//! | `member_layout` | offsets and sizes of a member's areas |
//! | `member_label` | on-disk format: the identity of a member |
//! | `disk_name` | resolves the names of disks that the operator types |
//! | `disk_admission` | which disks are in use, arrive, are away and leave |
//! | `version_log` | what a version holds, and when it is committed |
//!
//! These modules are pure, and so is all of `pool_metadata`. The following do the I/O:
//!
//! | module | subject |
//! |---|---|
//! | `member_disk` | one member's label, journal and snapshots |
//! | `disk_claims` | claims of disks that other machines may reach |
//! | `discovery` | finds the disks of a pool, and recovers its state |
//! | `crash_recovery` | recovers checksums and parity logs |
//! | `metadata_writer` | writes metadata versions |
//! | `open_pool` | an open pool, on its owner core |
//! | `requests` | requests of other cores to the owner core |
//! | `core_pool` | a core's access to a pool |
//! | `report` | status of a pool |

mod core_pool;
mod crash_recovery;
mod damage_log;
mod discovery;
mod disk_admission;
mod disk_claims;
mod disk_name;
mod error;
mod error_counts;
mod member_disk;
pub mod member_label;
pub mod member_layout;
mod metadata_writer;
mod mistake;
mod open_pool;
mod report;
mod requests;
mod response_tracker;
mod version_log;

pub use core_pool::CorePool;
pub use discovery::{DiskInspection, NewDisk, inspect};
pub use disk_name::disk_argument;
pub use error::PoolError;
pub use mistake::Mistake;
pub use open_pool::{CreatePool, NewPoolVolume, OpenPool, Pool};
pub use report::{
    DamagedRange, PoolDiskReport, PoolDiskState, PoolReport, PoolScrubReport, PoolVolumeReport,
};
pub use requests::PoolHandle;

//! Pools: disks of one node that hold volumes together ([RFD 0030](../../../../docs/rfd/0030-pools.md)).
//!
//! | module | subject |
//! |---|---|
//! | `layout` | what of a member is where |
//! | `metadata` | what is known about a pool, and how one change makes it the next version |
//! | `units` | which units of a member are taken |
//! | `label`, `journal`, `snapshot` | who a member is, changes, and all at once, as they lie on it |
//! | `knowledge` | what one member knows by them |
//! | `allocate` | where new pieces go |
//! | `called` | which disk a person means |
//! | `vote` | who may be believed when a pool is opened, and what a version may drop |
//!
//! These decide, and do nothing. What carries it out:
//!
//! | module | subject |
//! |---|---|
//! | `disk` | one member's label, journal and snapshots |
//! | `multihost` | disks that another machine may reach |
//! | `opening` | which disks there are, and who of them is believed |
//! | `recovery` | what a crash has left |
//! | `writer` | versions |
//! | `owner` | a pool, on the core that keeps its metadata |
//! | `ask` | what other cores ask of that one |
//! | `seat` | a core that has volumes of it |
//! | `report` | what there is to be told |

pub mod allocate;
mod ask;
mod called;
mod damage;
mod disk;
mod error;
pub mod evacuate;
pub mod journal;
pub mod knowledge;
pub mod label;
pub mod layout;
pub mod metadata;
mod mistake;
mod multihost;
mod opening;
mod owner;
mod recovery;
mod report;
mod seat;
mod silent;
pub mod snapshot;
pub mod units;
pub mod vote;
mod writer;

pub use ask::PoolHandle;
pub use called::disk_argument;
pub use error::PoolError;
pub use mistake::Mistake;
pub use opening::{Inspected, NewDisk, inspect};
pub use owner::{CreatePool, NewPoolVolume, OpenPool, Pool};
pub use report::{LostRange, PoolDisk, PoolDiskState, PoolReport, PoolVolumeReport, ScrubReport};
pub use seat::PoolSeat;

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
//! | `journal` | changes, as they lie on a member |
//! | `vote` | who may be believed when a pool is opened, and what a version may drop |
//!
//! These decide, and do nothing: what carries it out is still to come, and so is the rest of the RFD.

pub mod allocate;
pub mod journal;
pub mod knowledge;
pub mod label;
pub mod layout;
pub mod metadata;
pub mod snapshot;
mod text;
pub mod units;
pub mod vote;

pub use text::{TEXT_BYTES, Text};

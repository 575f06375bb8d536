//! Pools: disks of one node that hold volumes together ([RFD 0030](../../../../docs/rfd/0030-pools.md)).
//!
//! | module | subject |
//! |---|---|
//! | `metadata` | what is known about a pool, and how one change makes it the next version |
//! | `units` | which units of a member are taken |
//! | `journal` | changes, as they lie on a member |
//!
//! These decide, and do nothing: what carries it out is still to come, and so is the rest of the RFD.

pub mod journal;
pub mod metadata;
mod stand_in;
mod text;
pub mod units;

pub use stand_in::*;
pub use text::{TEXT_BYTES, Text};

//! RAID over the disks of a node ([RFD 0029](../../../../docs/rfd/0029-raid-without-a-write-hole.md)): levels 0, 1, 10, 5 and 6,
//! without a write hole.
//!
//! | module | subject |
//! |---|---|
//! | `geometry` | where blocks lie |
//! | `row` | how a row of a stripe is written |
//! | `batch` | what the log holds, as it lies on a member |
//! | `recover` | what is done for one after a crash |
//!
//! These decide, and do nothing: what carries it out is still to come.

pub mod batch;
pub mod geometry;
pub mod recover;
pub mod row;

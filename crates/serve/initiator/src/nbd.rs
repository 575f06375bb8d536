//! NBD client: a disk of any NBD server, as a layer (`docs/rfd/0025-nbd.md`).
//!
//! * [`Disk`] is an export, through one connection or several.
//! * [`Options`] select the export and set time limits.
//!
//! **A lost connection is not made again: the disk has failed permanently.** NBD has no identifier
//! that tells one volume from another, and no way to see whether a server lost its cache with
//! acknowledged, unflushed writes. To continue, a user has to open the disk again, aware of that.

mod disk;
mod link;
mod options;

pub use disk::{ConnectError, Disk};
pub use link::ConnectionEnd;
pub use options::Options;

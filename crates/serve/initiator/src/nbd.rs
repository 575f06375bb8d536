//! NBD, the client's role: a disk of any NBD server, as a layer (`docs/rfd/0025-nbd.md`).
//!
//! * [`Disk`] is an export, by one connection or several.
//! * [`Options`] say which, and how long anything may take.
//!
//! **A connection that is lost is not made again: the disk is gone for ever.** NBD has no name by which a
//! volume could be told from another, and no way to see whether a server has lost, with its cache, what it had
//! confirmed and not yet flushed. Who wants to go on opens the disk anew, and knows what that means.

mod disk;
mod link;
mod options;

pub use disk::{ConnectError, Disk};
pub use link::End;
pub use options::Options;

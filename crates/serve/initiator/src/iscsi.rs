//! iSCSI initiator (RFC 7143) and its disks (SAM-5, SPC-4, SBC-3).
//!
//! * [`Session`] is a session with a target: it logs in, keeps alive, listens, and logs in again
//!   after a loss.
//! * [`Lun`] is a logical unit of the target, as a layer.
//! * [`discover`] lists the targets of a portal.
//!
//! Everything belongs to one core. To use a target from several cores, log in on each.

mod active_session;
mod cdb;
mod connect;
mod discovery;
mod identity;
mod link;
mod lun;
mod options;
mod response_action;
mod sense;
mod session;
#[cfg(feature = "testing")]
pub mod testing;

pub use active_session::{ScsiFailure, SessionError};
pub use connect::ConnectError;
pub use discovery::{DiscoveredTarget, discover};
pub use identity::{Identity, UnitAttributes, UnitDescription};
pub use link::SessionEnd;
pub use lun::{CompareError, Lun, OpenError};
pub use options::{Backoff, Options};
pub use sense::Sense;
pub use session::Session;

pub use crate::connection::Staging;

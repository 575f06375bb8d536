//! iSCSI, the initiator's role (RFC 7143), and disks behind it (SAM-5, SPC-4, SBC-3).
//!
//! * [`Session`] is a session with a target: it is logged in, kept alive, listened to, and logged in again.
//! * [`Lun`] is a logical unit behind it, as a layer.
//! * [`discover`] asks which targets there are.
//!
//! Everything belongs to one core. Who wants more of them logs in on each.

mod cdb;
mod connect;
mod discovery;
mod identity;
mod link;
mod live;
mod lun;
mod options;
mod sense;
mod session;
#[cfg(feature = "testing")]
pub mod testing;
mod verdict;

pub use connect::ConnectError;
pub use discovery::{Found, discover};
pub use identity::{Described, Identity, Told};
pub use link::End;
pub use live::{Failed, Refusal};
pub use lun::{CompareError, Lun, OpenError};
pub use options::{Backoff, Options};
pub use sense::Sense;
pub use session::Session;

pub use crate::drive::Staging;

//! The iSCSI protocol (RFC 7143), sans-io: bytes, decisions and the time in; bytes and actions
//! out. No sockets, no clock, no randomness, and no SCSI: command descriptor blocks and data pass
//! through.
//!
//! * [`pdu`]: the PDUs, shared by both roles.
//! * [`text`], [`value`], [`params`]: text keys and their negotiation.
//! * [`name`]: names of initiators and targets.
//! * [`chap`]: CHAP computations.
//! * [`target`]: a connection in the target role.
//! * [`initiator`]: a connection in the initiator role.
//! * [`isns`]: registration of targets with a name server (RFC 4171).
//!
//! Error recovery level 0, one connection per session. `docs/conformance/iscsi.md` lists the
//! clauses implemented.

pub mod chap;
pub mod initiator;
pub mod isns;
pub mod name;
pub mod params;
pub mod pdu;
pub mod sequence_number;
mod stream;
pub mod target;
#[cfg(feature = "testing")]
pub mod testing;
pub mod text;
pub mod value;

pub use stream::{Digests, Tag};

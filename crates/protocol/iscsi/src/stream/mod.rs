//! What both ends of a connection do alike (RFC 7143 11.2): cut PDUs out of the byte stream, bring data
//! into its place, check digests, and put PDUs together.
//!
//! Which PDUs come, what they mean and who owns which data is the machines': [`crate::target::Connection`]
//! is the target's, [`crate::initiator::Connection`] the initiator's.

mod receive;
mod send;

pub(crate) use receive::{Event, Owners, Receiver, Sink};
pub(crate) use send::{push_bytes, push_data, push_header};

/// A command, as a machine and its driver call it: small numbers, used again after the command
/// has been completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u32);

/// Which parts of PDUs carry CRC-32C (RFC 7143 13.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// Headers.
    pub header: bool,
    /// Data.
    pub data: bool,
}

//! What both sides of a connection share (RFC 7143 11.2): split the byte stream into PDUs, receive
//! data into its buffers, check digests, and build PDUs.
//!
//! The machines handle the PDUs and own the data: [`crate::target::Connection`] is the target's,
//! [`crate::initiator::Connection`] the initiator's.

mod receive;
mod send;

pub(crate) use receive::{Event, Receiver, Sink, TaskBuffers};
pub(crate) use send::{push_bytes, push_data, push_header};

/// Handle of a command, shared by machine and driver: a small number, reused after the command has
/// completed.
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

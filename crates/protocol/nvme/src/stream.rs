//! What both sides of a connection share (NVMe/TCP 3.6): split the byte stream into PDUs, receive
//! payload into its buffers, check digests, and build PDUs.
//!
//! The machines handle the PDUs and own the payload: [`crate::Connection`] is the controller's,
//! [`crate::host::Connection`] the host's.

mod incoming;
mod receive;
mod send;

pub(crate) use incoming::IncomingData;
pub(crate) use receive::{CommandBuffers, Payload, ReceiveEvent, Receiver, Violation, at};
pub(crate) use send::{Sender, u32_len};

use crate::pdu::{DIGEST_DATA, DIGEST_HEADER};

/// Handle of a command in flight on one connection: dense, from 0, reused once the command has
/// ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(pub(crate) u16);

impl Tag {
    /// The tag as an index, below the number of entries of the queue.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Negotiated digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// Headers carry digests.
    pub header: bool,
    /// Data carries digests.
    pub data: bool,
}

impl Digests {
    /// Decodes a DGST field (NVMe/TCP 3.6.2.2).
    #[must_use]
    pub fn from_bits(dgst: u8) -> Self {
        Self { header: dgst & DIGEST_HEADER != 0, data: dgst & DIGEST_DATA != 0 }
    }

    /// The DGST field.
    #[must_use]
    pub fn bits(self) -> u8 {
        let header = if self.header { DIGEST_HEADER } else { 0 };
        header | if self.data { DIGEST_DATA } else { 0 }
    }
}

//! What both ends of a connection do alike (NVMe/TCP 3.6): cut PDUs out of the byte stream, bring payload
//! into its place, check digests, and put PDUs together.
//!
//! Which PDUs come, what they mean and who owns which payload is the machines': [`crate::Connection`]
//! is the controller's, [`crate::host::Connection`] the host's.

mod incoming;
mod receive;
mod send;

pub(crate) use incoming::Incoming;
pub(crate) use receive::{Owners, Payload, Received, Receiver, Violation, at};
pub(crate) use send::{Sender, small};

use crate::pdu::{DIGEST_DATA, DIGEST_HEADER};

/// Handle to a command in flight on one connection: dense, from 0, reused once the command is
/// over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(pub(crate) u16);

impl Tag {
    /// The tag as an index, below the number of entries of the queue.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Digests that both sides have agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// Headers carry digests.
    pub header: bool,
    /// Data carries digests.
    pub data: bool,
}

impl Digests {
    /// Those in a DGST field (NVMe/TCP 3.6.2.2).
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

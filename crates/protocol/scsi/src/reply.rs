//! How a command ends.

use block::Bufs;

use crate::sense::{Code, Format, Sense, SenseBytes};

/// Status codes (SAM-5 5.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Good = 0x00,
    /// Failed; the sense data says why.
    CheckCondition = 0x02,
    /// Not now; try again.
    Busy = 0x08,
    /// Another initiator has reserved the unit.
    ReservationConflict = 0x18,
    /// Too many commands, or no memory for this one; try again.
    TaskSetFull = 0x28,
    /// Aborted on behalf of another initiator.
    TaskAborted = 0x40,
}

/// How many bytes move which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes from the initiator.
    pub data_out: u64,
    /// Bytes to the initiator.
    pub data_in: u64,
}

impl Transfer {
    /// Nothing moves.
    pub const NONE: Self = Self { data_out: 0, data_in: 0 };

    /// `bytes` from the initiator.
    #[must_use]
    pub const fn from_initiator(bytes: u64) -> Self {
        Self { data_out: bytes, data_in: 0 }
    }

    /// `bytes` to the initiator.
    #[must_use]
    pub const fn to_initiator(bytes: u64) -> Self {
        Self { data_out: 0, data_in: bytes }
    }
}

/// What goes back to the initiator.
#[derive(Clone, Debug, Default)]
pub enum Data {
    /// Nothing.
    #[default]
    None,
    /// A few bytes about the device.
    Bytes(Vec<u8>),
    /// Contents of the device.
    Bufs(Bufs),
}

impl Data {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Bytes(b) => b.len(),
            Self::Bufs(b) => b.len(),
        }
    }

    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// At most the first `limit` bytes.
    pub(crate) fn clipped(self, limit: u64) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        if self.len() <= limit {
            return self;
        }
        match self {
            Self::None => Self::None,
            Self::Bytes(mut b) => {
                b.truncate(limit);
                Self::Bytes(b)
            }
            Self::Bufs(b) => Self::Bufs(b.slice(0..limit)),
        }
    }
}

/// The end of a command.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Status.
    pub status: Status,
    /// Sense data; empty unless the status is [`Status::CheckCondition`], or a copy that went well has
    /// been asked to tell of it.
    pub sense: SenseBytes,
    /// What the initiator gets: never more than the command's allocation length and never more
    /// than the transport's window ([`crate::Arrival::window`]).
    pub data: Data,
    /// What the command moves if the transport's window is no limit. Compared with that window it
    /// gives the residual count (RFC 7143 11.4.5).
    pub wanted: Transfer,
}

impl Reply {
    /// An end without data and sense: BUSY, TASK SET FULL and the like.
    #[must_use]
    pub fn status(status: Status) -> Self {
        Self { status, sense: SenseBytes::new(), data: Data::None, wanted: Transfer::NONE }
    }

    /// CHECK CONDITION with `sense`; the command has moved nothing.
    #[must_use]
    pub fn check(sense: &Sense, format: Format) -> Self {
        let mut reply = Self::status(Status::CheckCondition);
        reply.sense = sense.to_bytes(format);
        reply
    }

    /// GOOD with `data`, of which `window` passes at most so much.
    pub(crate) fn good(data: Data, wanted: Transfer, window_in: u64) -> Self {
        let data = data.clipped(window_in);
        Self { status: Status::Good, sense: SenseBytes::new(), data, wanted }
    }
}

/// Why a command ends before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: Status,
    pub(crate) sense: Option<Sense>,
    pub(crate) wanted: Transfer,
}

impl Refusal {
    /// The transport's window does not fit what the command needs: nothing is moved, and the
    /// residual tells how much should have been.
    pub(crate) fn window(wanted: Transfer) -> Self {
        let sense = Sense::illegal(Code::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT);
        Self { status: Status::CheckCondition, sense: Some(sense), wanted }
    }

    pub(crate) fn into_reply(self, format: Format) -> Reply {
        let sense = self.sense.map(|s| s.to_bytes(format)).unwrap_or_default();
        Reply { status: self.status, sense, data: Data::None, wanted: self.wanted }
    }
}

impl From<Sense> for Refusal {
    fn from(sense: Sense) -> Self {
        Self { status: Status::CheckCondition, sense: Some(sense), wanted: Transfer::NONE }
    }
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self { status, sense: None, wanted: Transfer::NONE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_never_exceeds_the_window() {
        for (data, len) in [
            (Data::None, 0),
            (Data::Bytes(vec![1; 10]), 10),
            (Data::Bufs(Bufs::zeroes(100_000)), 100_000),
        ] {
            for window in [0, 5, 10, 70_000, u64::MAX] {
                let reply = Reply::good(data.clone(), Transfer::to_initiator(len), window);
                assert_eq!(reply.data.len() as u64, len.min(window));
                assert_eq!(reply.wanted.data_in, len);
            }
        }
    }
}

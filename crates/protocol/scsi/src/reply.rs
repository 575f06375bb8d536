//! The end of a command: status, sense data and data.

use block::Bufs;

use crate::sense::{Sense, SenseBytes, SenseCode, SenseFormat};
use crate::status::Status;

/// Bytes moved in each direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferLengths {
    /// Bytes from the initiator.
    pub data_out: u64,
    /// Bytes to the initiator.
    pub data_in: u64,
}

impl TransferLengths {
    /// No transfer.
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

/// Data returned to the initiator.
#[derive(Clone, Debug, Default)]
pub enum DataIn {
    /// Nothing.
    #[default]
    None,
    /// Data about the device.
    Bytes(Vec<u8>),
    /// Contents of the device.
    Bufs(Bufs),
}

impl DataIn {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Bytes(b) => b.len(),
            Self::Bufs(b) => b.len(),
        }
    }

    /// Whether there is no data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// At most the first `limit` bytes.
    pub(crate) fn truncated(self, limit: u64) -> Self {
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
    /// Sense data; empty unless the status is [`Status::CheckCondition`], or a successful copy was
    /// asked to report.
    pub sense: SenseBytes,
    /// Data for the initiator: never more than the command's allocation length nor the expected
    /// transfer ([`crate::ReceivedCommand::expected_transfer`]).
    pub data: DataIn,
    /// How much the command would move without the limit of the expected transfer. The difference
    /// is the residual count (RFC 7143 11.4.5).
    pub full_transfer: TransferLengths,
}

impl Reply {
    /// A reply without data and sense: BUSY, TASK SET FULL and the like.
    #[must_use]
    pub fn status(status: Status) -> Self {
        Self {
            status,
            sense: SenseBytes::new(),
            data: DataIn::None,
            full_transfer: TransferLengths::NONE,
        }
    }

    /// CHECK CONDITION with `sense`; nothing was moved.
    #[must_use]
    pub fn check(sense: &Sense, format: SenseFormat) -> Self {
        let mut reply = Self::status(Status::CheckCondition);
        reply.sense = sense.to_bytes(format);
        reply
    }

    /// GOOD with `data`, of which `window` passes at most so much.
    pub(crate) fn good(
        data: DataIn,
        full_transfer: TransferLengths,
        expected_data_in: u64,
    ) -> Self {
        let data = data.truncated(expected_data_in);
        Self { status: Status::Good, sense: SenseBytes::new(), data, full_transfer }
    }
}

/// Why a command ends before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: Status,
    pub(crate) sense: Option<Sense>,
    pub(crate) full_transfer: TransferLengths,
}

impl Refusal {
    /// The expected transfer does not fit the command: nothing is moved, and the residual shows how
    /// much should have been.
    pub(crate) fn transfer_mismatch(full_transfer: TransferLengths) -> Self {
        let sense = Sense::illegal(SenseCode::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT);
        Self { status: Status::CheckCondition, sense: Some(sense), full_transfer }
    }

    pub(crate) fn into_reply(self, format: SenseFormat) -> Reply {
        let sense = self.sense.map(|s| s.to_bytes(format)).unwrap_or_default();
        Reply { status: self.status, sense, data: DataIn::None, full_transfer: self.full_transfer }
    }
}

impl From<Sense> for Refusal {
    fn from(sense: Sense) -> Self {
        Self {
            status: Status::CheckCondition,
            sense: Some(sense),
            full_transfer: TransferLengths::NONE,
        }
    }
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self { status, sense: None, full_transfer: TransferLengths::NONE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_never_exceeds_the_window() {
        for (data, len) in [
            (DataIn::None, 0),
            (DataIn::Bytes(vec![1; 10]), 10),
            (DataIn::Bufs(Bufs::zeroes(100_000)), 100_000),
        ] {
            for window in [0, 5, 10, 70_000, u64::MAX] {
                let reply = Reply::good(data.clone(), TransferLengths::to_initiator(len), window);
                assert_eq!(reply.data.len() as u64, len.min(window));
                assert_eq!(reply.full_transfer.data_in, len);
            }
        }
    }
}

//! How a connection ends: fatal errors and C2HTermReq (NVMe/TCP 3.6.1.3).

use super::{Connection, Phase};
use crate::pdu::{FatalError, MAX_HEADER_BYTES, PduType, TermReq};
use zerocopy::IntoBytes;

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This side closed it.
    Closed,
    /// The host broke the protocol; it was told so by C2HTermReq.
    Violation {
        /// What was wrong (FES).
        error: FatalError,
        /// More about it (FEI).
        information: u32,
    },
    /// The host found this side in error, by H2CTermReq.
    HostTerminated {
        /// What was wrong (FES).
        error: FatalError,
    },
    /// No Connect succeeded in time.
    EstablishTimeout,
    /// The host left a PDU unfinished, or did not send the data it was asked for.
    ReceiveTimeout,
}

/// A fatal error: FES and FEI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Violation {
    pub(super) error: FatalError,
    pub(super) information: u32,
}

impl Violation {
    /// The header field at byte `at` is invalid.
    pub(super) fn field(at: u32) -> Self {
        Self { error: FatalError::InvalidHeaderField, information: at }
    }

    /// A PDU that must not come now.
    pub(super) fn sequence() -> Self {
        Self { error: FatalError::PduSequence, information: 0 }
    }
}

impl Connection {
    /// Tells the host what it did, shows it the header, and waits for it to close.
    pub(super) fn violated(&mut self, violation: Violation) {
        let Violation { error, information } = violation;
        let mut pdu = [0; size_of::<TermReq>() + MAX_HEADER_BYTES];
        let header = self.receiver.header();
        let end = size_of::<TermReq>() + header.len();
        let term = TermReq::new(PduType::C2HTermReq, error, information, header.len());
        pdu[..size_of::<TermReq>()].copy_from_slice(term.as_bytes());
        pdu[size_of::<TermReq>()..end].copy_from_slice(header);
        self.push(&pdu[..end]);
        self.end.get_or_insert(End::Violation { error, information });
        self.phase = Phase::Lingering { until: self.now + self.config.linger };
        self.actions.clear();
        self.commands.forget_ended();
    }
}

//! How a connection ends: fatal errors and C2HTermReq (NVMe/TCP 3.6.1.3).

use super::{Connection, Phase};
use crate::pdu::{FatalError, PduType};
use crate::stream::Violation;

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

impl Connection {
    /// Tells the host what it did, shows it the header, and waits for it to close.
    pub(super) fn violated(&mut self, violation: Violation) {
        self.sender.terminate(PduType::C2HTermReq, violation, self.receiver.header());
        let Violation { error, information } = violation;
        self.end.get_or_insert(End::Violation { error, information });
        self.phase = Phase::Lingering { until: self.now + self.config.linger };
        self.actions.clear();
        self.commands.forget_ended();
    }
}

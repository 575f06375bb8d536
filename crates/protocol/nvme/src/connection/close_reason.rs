//! Ending a connection: fatal errors and C2HTermReq (NVMe/TCP 3.6.1.3).

use super::{Connection, Phase};
use crate::pdu::{FatalError, PduType};
use crate::stream::Violation;

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// This side closed it.
    Closed,
    /// The host violated the protocol; C2HTermReq told it so.
    Violation {
        /// What was wrong (FES).
        error: FatalError,
        /// More about it (FEI).
        information: u32,
    },
    /// The host reported an error of this side by H2CTermReq.
    HostTerminated {
        /// What was wrong (FES).
        error: FatalError,
    },
    /// No Connect succeeded in time.
    EstablishTimeout,
    /// The host did not finish a PDU, or did not send solicited data, in time.
    ReceiveTimeout,
}

impl Connection {
    /// Reports the violation to the host, with the offending header, and waits for it to close.
    pub(super) fn terminate(&mut self, violation: Violation) {
        self.sender.terminate(PduType::C2HTermReq, violation, self.receiver.header());
        let Violation { error, information } = violation;
        self.close_reason.get_or_insert(CloseReason::Violation { error, information });
        self.phase = Phase::Terminating { until: self.now + self.config.linger };
        self.actions.clear();
        self.commands.forget_ended();
    }
}

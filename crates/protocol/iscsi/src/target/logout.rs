//! Logout (RFC 7143 11.14 and 11.15), and asynchronous messages (11.9).

use zerocopy::big_endian::{U16, U32};

use super::Connection;
use super::action::{AsyncNotification, CloseReason};
use super::response::sense_segment;
use super::send::StatSnUse;
use crate::pdu::{
    AsyncEvent, AsyncMessage, FINAL, LogoutOutcome, LogoutReason, LogoutRequest, LogoutResponse,
    NO_TAG, RejectReason,
};

/// A logout that waits for the commands of the session to end, so that none of its writes can take
/// effect after the writes of a later session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logout {
    itt: u32,
}

impl Connection {
    pub(super) fn on_logout(&mut self, request: &LogoutRequest) {
        let itt = request.itt.get();
        let ours = request.cid.get() == self.cid;
        match request.reason() {
            LogoutReason::CloseSession => self.begin_logout(itt),
            LogoutReason::CloseConnection if ours => self.begin_logout(itt),
            LogoutReason::CloseConnection => self.respond_logout(itt, LogoutOutcome::NoConnection),
            LogoutReason::Recovery => {
                self.respond_logout(itt, LogoutOutcome::RecoveryUnsupported);
            }
            _ => self.reject(RejectReason::InvalidField),
        }
    }

    fn begin_logout(&mut self, itt: u32) {
        self.logout = Some(Logout { itt });
        for tag in self.tasks.select(|_| true) {
            self.abort(tag, 0);
        }
        self.finish_logout();
    }

    /// Completes a requested logout once nothing is running any more.
    pub(super) fn finish_logout(&mut self) {
        if let Some(Logout { itt }) = self.logout
            && self.tasks.is_empty()
        {
            self.respond_logout(itt, LogoutOutcome::Closed);
            self.end(CloseReason::Logout);
        }
    }

    fn respond_logout(&mut self, itt: u32, outcome: LogoutOutcome) {
        let mut pdu = LogoutResponse::zeroed();
        pdu.flags = FINAL;
        pdu.response = outcome.0;
        pdu.itt = U32::new(itt);
        pdu.time2wait = U16::new(self.params.time2wait);
        self.send(pdu, StatSnUse::Advance);
    }

    /// Sends an asynchronous message. Ignored before the full feature phase.
    pub fn notify(&mut self, notice: AsyncNotification<'_>) {
        if !self.is_full_feature() {
            return;
        }
        let mut pdu = AsyncMessage::zeroed();
        pdu.flags = FINAL;
        pdu.itt = U32::new(NO_TAG);
        let mut data = &[][..];
        pdu.event = match notice {
            AsyncNotification::Scsi { lun, sense } => {
                (pdu.lun, data) = (lun, sense);
                AsyncEvent::Scsi
            }
            AsyncNotification::LogoutRequest { within_s } => {
                pdu.parameter3 = U16::new(within_s);
                AsyncEvent::LogoutRequest
            }
            AsyncNotification::Drop { time2wait_s } => {
                // The session has one connection; none of its tasks are retained.
                pdu.parameter2 = U16::new(time2wait_s);
                AsyncEvent::SessionDrop
            }
        }
        .0;
        self.send_bytes(pdu, StatSnUse::Advance, &sense_segment(data));
    }
}

//! Logout (RFC 7143 11.14 and 11.15), and what the target says by itself (11.9).

use zerocopy::big_endian::{U16, U32};

use super::Connection;
use super::action::{CloseReason, Notice};
use super::answer::sense_segment;
use super::send::Status;
use crate::pdu::{
    AsyncEvent, AsyncMessage, FINAL, LogoutOutcome, LogoutReason, LogoutRequest, LogoutResponse,
    NO_TAG, RejectReason,
};

/// A logout that waits for the commands of the session to end, so that nothing the session has
/// written can land after what another one writes next.
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

    /// Ends the session if that was asked for and nothing is running any more.
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
        self.send(pdu, Status::Advance);
    }

    /// Tells the initiator something it has not asked for. Nothing is sent before the full
    /// feature phase.
    pub fn notify(&mut self, notice: Notice<'_>) {
        if !self.is_full_feature() {
            return;
        }
        let mut pdu = AsyncMessage::zeroed();
        pdu.flags = FINAL;
        pdu.itt = U32::new(NO_TAG);
        let mut data = &[][..];
        pdu.event = match notice {
            Notice::Scsi { lun, sense } => {
                (pdu.lun, data) = (lun, sense);
                AsyncEvent::Scsi
            }
            Notice::LogoutRequest { within_s } => {
                pdu.parameter3 = U16::new(within_s);
                AsyncEvent::LogoutRequest
            }
            Notice::Drop { time2wait_s } => {
                // The session has one connection; nothing of it is kept.
                pdu.parameter2 = U16::new(time2wait_s);
                AsyncEvent::SessionDrop
            }
        }
        .0;
        self.send_bytes(pdu, Status::Advance, &sense_segment(data));
    }
}

//! Pings both ways (RFC 7143 11.18 and 11.19).

use zerocopy::big_endian::U32;

use super::Connection;
use super::send::StatSnUse;
use crate::pdu::{FINAL, NO_TAG, NopIn, NopOut};

/// Most ping data that is sent back, in bytes.
const MAX_PING: usize = 64 * 1024;

impl Connection {
    /// How much of a ping's data is returned: no more than the initiator accepts.
    pub(super) fn ping_len(&self) -> usize {
        MAX_PING.min(self.params.initiator_max_segment as usize)
    }

    pub(super) fn on_nop(&mut self, ping: &NopOut, data: &[u8]) {
        // Any PDU is a sign of life; an answer to our ping needs no handling.
        if ping.itt.get() == NO_TAG {
            return;
        }
        let mut pdu = NopIn::zeroed();
        (pdu.flags, pdu.itt, pdu.ttt) = (FINAL, ping.itt, U32::new(NO_TAG));
        self.send_bytes(pdu, StatSnUse::Advance, data);
    }

    /// Sends a ping.
    pub(super) fn ping(&mut self) {
        let ttt = self.new_ttt();
        self.send_nop(ttt);
    }

    /// Announces a larger command window.
    pub(super) fn announce_window(&mut self) {
        self.send_nop(NO_TAG);
    }

    fn send_nop(&mut self, ttt: u32) {
        let mut pdu = NopIn::zeroed();
        (pdu.flags, pdu.itt, pdu.ttt) = (FINAL, U32::new(NO_TAG), U32::new(ttt));
        self.send(pdu, StatSnUse::Report);
    }
}

//! Sends PDUs:

use rt::buf::Bufs;
use zerocopy::big_endian::U32;

use super::Connection;
use crate::pdu::{FINAL, NO_TAG, Reject, RejectReason, SequenceNumbers, TargetPdu, segment_len};
use crate::stream::{self, Digests};

/// How a PDU uses the status number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatSnUse {
    /// A response with a number of its own.
    Advance,
    /// It reports the next number.
    Report,
    /// It has none.
    None,
}

impl Connection {
    /// Sends a PDU without data.
    pub(super) fn send(&mut self, pdu: impl TargetPdu, status: StatSnUse) {
        self.send_header(pdu, status, 0);
    }

    /// Sends a PDU with a few bytes of data, which are copied.
    pub(super) fn send_bytes(&mut self, pdu: impl TargetPdu, status: StatSnUse, data: &[u8]) {
        self.send_header(pdu, status, data.len());
        let digest = self.digests().data;
        stream::push_bytes(&mut self.output, data, digest);
    }

    /// Sends a PDU with data, which is not copied.
    pub(super) fn send_data(&mut self, pdu: impl TargetPdu, status: StatSnUse, data: &Bufs) {
        self.send_header(pdu, status, data.len());
        let digest = self.digests().data;
        stream::push_data(&mut self.output, data, digest);
    }

    fn send_header(&mut self, mut pdu: impl TargetPdu, status: StatSnUse, data_len: usize) {
        *pdu.numbers() = SequenceNumbers {
            stat_sn: U32::new(if status == StatSnUse::None { 0 } else { self.stat_sn.0 }),
            exp_cmd_sn: U32::new(self.window.expected().0),
            max_cmd_sn: U32::new(self.window.max().0),
        };
        if status == StatSnUse::Advance {
            self.stat_sn = self.stat_sn.plus(1);
        }
        *pdu.data_len() = segment_len(data_len);
        let digest = self.digests().header;
        stream::push_header(&mut self.output, pdu.bytes(), digest);
    }

    /// Digests begin with the full feature phase (RFC 7143 13.1).
    fn digests(&self) -> Digests {
        if self.is_full_feature() { self.params.digests() } else { Digests::default() }
    }

    /// Rejects the PDU whose header was received last (RFC 7143 11.17).
    pub(super) fn reject(&mut self, reason: RejectReason) {
        let mut pdu = Reject::zeroed();
        pdu.flags = FINAL;
        pdu.reason = reason.0;
        pdu.itt = U32::new(NO_TAG);
        let header = *self.receiver.basic();
        self.send_bytes(pdu, StatSnUse::Advance, &header);
    }

    /// A target transfer tag not used recently.
    pub(super) fn new_ttt(&mut self) -> u32 {
        self.last_ttt = self.last_ttt.wrapping_add(1);
        if self.last_ttt == NO_TAG {
            self.last_ttt = 1;
        }
        self.last_ttt
    }
}

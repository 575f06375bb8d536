//! Sends the controller's PDUs:

use block::Bufs;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U64};

use super::{Connection, Tag};
use crate::entry::{Completion, Cqe};
use crate::pdu::{CapsuleResp, DataPdu, FLAG_LAST, FLAG_SUCCESS, IcResp, PduType, R2t};
use crate::stream::u32_len;

impl Connection {
    pub(super) fn send_ic_resp(&mut self, digest: u8) {
        let resp = IcResp::new(digest, self.config.max_h2c_data);
        self.sender.push(resp.as_bytes());
    }

    pub(super) fn send_r2t(&mut self, cid: u16, tag: Tag, length: u32) {
        let r2t = R2t::new(cid, tag.0, length);
        self.sender.pdu(r2t.as_bytes(), 0, &Bufs::new());
    }

    /// Sends a response capsule; its slot is freed once it has been sent.
    pub(super) fn respond(&mut self, cid: u16, completion: Completion) {
        self.advance_sq_head();
        let resp = CapsuleResp::new(Cqe {
            result: U64::new(completion.result),
            sq_head: U16::new(self.sq_head),
            sq_id: U16::new(self.queue.id),
            cid: U16::new(cid),
            status: U16::new(completion.status.field() << 1),
        });
        self.sender.pdu(resp.as_bytes(), 0, &Bufs::new());
        self.unsent_responses.push_back(self.sender.queued_total());
    }

    /// Sends data of a command that succeeded, then its response: as the SUCCESS flag of the
    /// last data PDU where the host does not use SQHD (NVMe/TCP 3.6.2.9).
    pub(super) fn send_data_and_respond(&mut self, cid: u16, completion: Completion, data: &Bufs) {
        let success = !self.queue.flow_control && completion == Completion::OK;
        let chunk = self.config.max_c2h_data as usize;
        let mut at = 0;
        while at < data.len() {
            let end = data.len().min(at + chunk);
            let mut flags = 0;
            if end == data.len() {
                flags |= FLAG_LAST | if success { FLAG_SUCCESS } else { 0 };
            }
            let header = DataPdu::new(PduType::C2HData, cid, 0, u32_len(at), u32_len(end - at));
            if end - at == data.len() {
                self.sender.pdu(header.as_bytes(), flags, data);
            } else {
                self.sender.pdu(header.as_bytes(), flags, &data.slice(at..end));
            }
            at = end;
        }
        if success {
            self.unsent_responses.push_back(self.sender.queued_total());
        } else {
            self.respond(cid, completion);
        }
    }

    fn advance_sq_head(&mut self) {
        if !self.queue.flow_control {
            // In the response to Connect this value means agreement to work without SQHD (NVMe Base
            // 2.0, 6.3).
            self.sq_head = u16::MAX;
            return;
        }
        let next = self.sq_head.wrapping_add(1);
        self.sq_head = if next >= self.queue.entries { 0 } else { next };
    }
}

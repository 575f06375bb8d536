//! What the controller sends: ICResp, R2T, C2HData, CapsuleResp.

use block::Bufs;
use wire::Crc32c;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use super::{Connection, Tag};
use crate::entry::{Completion, Cqe};
use crate::pdu::{
    CapsuleResp, Common, DIGEST_BYTES, Data, FLAG_DDGST, FLAG_HDGST, FLAG_LAST, FLAG_SUCCESS,
    IcResp, PduType, R2t,
};

/// Length in bytes of the header of every PDU sent while a queue is served.
const HEADER_BYTES: usize = size_of::<Data>();
const _: () = assert!(size_of::<CapsuleResp>() == HEADER_BYTES);
const _: () = assert!(size_of::<R2t>() == HEADER_BYTES);

/// Zeroes for padding up to the largest alignment of data.
const PADDING: [u8; 128] = [0; 128];

impl Connection {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.pushed += bytes.len() as u64;
        self.out.push_bytes(bytes);
    }

    /// Bytes of a header with its digest.
    fn header_bytes(&self) -> usize {
        HEADER_BYTES + if self.header_digest { DIGEST_BYTES } else { 0 }
    }

    /// Sends a header; `common` must be its first field, with all lengths in place.
    fn push_header(&mut self, header: &[u8]) {
        let mut bytes = [0; HEADER_BYTES + DIGEST_BYTES];
        bytes[..HEADER_BYTES].copy_from_slice(header);
        if self.header_digest {
            let digest = wire::crc32c(header).to_le_bytes();
            bytes[HEADER_BYTES..].copy_from_slice(&digest);
        }
        let length = self.header_bytes();
        self.push(&bytes[..length]);
    }

    /// Completes the common header of a PDU without data.
    fn seal(&self, common: &mut Common) {
        if self.header_digest {
            common.flags |= FLAG_HDGST;
        }
        common.plen = U32::new(small(self.header_bytes()));
    }

    pub(super) fn send_ic_resp(&mut self, digest: u8) {
        let resp = IcResp::new(digest, self.config.max_h2c_data);
        self.push(resp.as_bytes());
    }

    pub(super) fn send_r2t(&mut self, cid: u16, tag: Tag, length: u32) {
        let mut r2t = R2t::new(cid, tag.0, length);
        self.seal(&mut r2t.common);
        self.push_header(r2t.as_bytes());
    }

    /// Sends a response capsule and gives its slot back once that has been sent.
    pub(super) fn respond(&mut self, cid: u16, completion: Completion) {
        self.advance_sq_head();
        let mut resp = CapsuleResp::new(Cqe {
            result: U64::new(completion.result),
            sq_head: U16::new(self.sq_head),
            sq_id: U16::new(self.queue.id),
            cid: U16::new(cid),
            status: U16::new(completion.status.field() << 1),
        });
        self.seal(&mut resp.common);
        self.push_header(resp.as_bytes());
        self.unsent.push_back(self.pushed);
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
            let header = Data::new(PduType::C2HData, cid, 0, small(at), small(end - at));
            if end - at == data.len() {
                self.send_data(header, flags, data);
            } else {
                self.send_data(header, flags, &data.slice(at..end));
            }
            at = end;
        }
        if success {
            self.unsent.push_back(self.pushed);
        } else {
            self.respond(cid, completion);
        }
    }

    /// Sends one C2HData PDU.
    fn send_data(&mut self, mut header: Data, flags: u8, data: &Bufs) {
        let header_end = self.header_bytes();
        let offset = header_end.next_multiple_of(self.host_alignment);
        let trailer = if self.data_digest { DIGEST_BYTES } else { 0 };
        let common = &mut header.common;
        common.flags = flags
            | if self.header_digest { FLAG_HDGST } else { 0 }
            | if self.data_digest { FLAG_DDGST } else { 0 };
        common.pdo = u8::try_from(offset).expect("headers and alignment are at most 128 bytes");
        common.plen = U32::new(small(offset + data.len() + trailer));
        self.push_header(header.as_bytes());
        self.push(&PADDING[..offset - header_end]);
        self.pushed += data.len() as u64;
        self.out.push_data(data);
        if self.data_digest {
            let crc = data.iter().fold(Crc32c::new(), |crc, piece| crc.update(piece));
            self.push(&crc.value().to_le_bytes());
        }
    }

    fn advance_sq_head(&mut self) {
        if !self.queue.flow_control {
            // In the response to Connect this value agrees to do without (NVMe Base 2.0, 6.3).
            self.sq_head = u16::MAX;
            return;
        }
        let next = self.sq_head.wrapping_add(1);
        self.sq_head = if next >= self.queue.entries { 0 } else { next };
    }
}

/// A length in bytes that is bounded by the size of one transfer.
fn small(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("transfers are shorter than 4 GiB")
}

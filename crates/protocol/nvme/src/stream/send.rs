//! Sending: PDUs with their digests and padding.

use block::Bufs;
use frame::SendQueue;
use wire::Crc32c;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

use super::{Digests, Violation};
use crate::pdu::{
    CapsuleCmd, CommonHeader, DIGEST_BYTES, FLAG_DDGST, FLAG_HDGST, MAX_HEADER_BYTES, PduType,
    TermReq,
};

/// Longest header of a PDU that has digests, in bytes.
const HEADER_BYTES: usize = size_of::<CapsuleCmd>();

/// Zeroes for padding up to the largest alignment of data.
const PADDING: [u8; 128] = [0; 128];

/// Builds PDUs, and tracks how much of its output has been sent.
#[derive(Debug)]
pub(crate) struct Sender {
    /// Data to send.
    pub(crate) out: SendQueue,
    /// Negotiated digests.
    pub(crate) digests: Digests,
    /// Alignment of data that the peer requested, in bytes.
    pub(crate) alignment: usize,
    /// Bytes ever queued in `out`.
    queued_total: u64,
}

impl Default for Sender {
    fn default() -> Self {
        Self {
            out: SendQueue::default(),
            digests: Digests::default(),
            alignment: 4,
            queued_total: 0,
        }
    }
}

impl Sender {
    /// Bytes ever queued.
    pub(crate) fn queued_total(&self) -> u64 {
        self.queued_total
    }

    /// Bytes of them that have been sent.
    pub(crate) fn sent_total(&self) -> u64 {
        self.queued_total - self.out.len() as u64
    }

    /// Sends a PDU that has neither data nor, ever, digests.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.queued_total += bytes.len() as u64;
        self.out.push_bytes(bytes);
    }

    /// Sends a PDU: this header, which begins with a common header, and `data`. Sets lengths and
    /// digests, and adds `flags`.
    pub(crate) fn pdu(&mut self, header: &[u8], flags: u8, data: &Bufs) {
        let mut bytes = [0; HEADER_BYTES + DIGEST_BYTES];
        let hlen = header.len();
        bytes[..hlen].copy_from_slice(header);
        let header_end = hlen + if self.digests.header { DIGEST_BYTES } else { 0 };
        let (common, _) = CommonHeader::mut_from_prefix(&mut bytes).expect("longer than that");
        common.flags = flags | if self.digests.header { FLAG_HDGST } else { 0 };
        common.plen = U32::new(u32_len(header_end));
        let data_at = header_end.next_multiple_of(self.alignment);
        if !data.is_empty() {
            let trailer = if self.digests.data { DIGEST_BYTES } else { 0 };
            common.flags |= if self.digests.data { FLAG_DDGST } else { 0 };
            common.pdo =
                u8::try_from(data_at).expect("headers and alignment are at most 128 bytes");
            common.plen = U32::new(u32_len(data_at + data.len() + trailer));
        }
        if self.digests.header {
            let digest = wire::crc32c(&bytes[..hlen]).to_le_bytes();
            bytes[hlen..header_end].copy_from_slice(&digest);
        }
        self.push(&bytes[..header_end]);
        if !data.is_empty() {
            if data_at > header_end {
                self.push(&PADDING[..data_at - header_end]);
            }
            self.data(data);
        }
    }

    /// Queues data and its digest.
    fn data(&mut self, data: &Bufs) {
        self.queued_total += data.len() as u64;
        self.out.push_data(data);
        if self.digests.data {
            let crc = data.iter().fold(Crc32c::new(), |crc, piece| crc.update(piece));
            self.push(&crc.value().to_le_bytes());
        }
    }

    /// Reports a violation to the peer, with the offending `header`.
    pub(crate) fn terminate(&mut self, kind: PduType, violation: Violation, header: &[u8]) {
        let Violation { error, information } = violation;
        let mut pdu = [0; size_of::<TermReq>() + MAX_HEADER_BYTES];
        let end = size_of::<TermReq>() + header.len();
        let term = TermReq::new(kind, error, information, header.len());
        pdu[..size_of::<TermReq>()].copy_from_slice(term.as_bytes());
        pdu[size_of::<TermReq>()..end].copy_from_slice(header);
        self.push(&pdu[..end]);
    }
}

/// A length in bytes that is bounded by the size of one transfer.
pub(crate) fn u32_len(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("transfers are shorter than 4 GiB")
}

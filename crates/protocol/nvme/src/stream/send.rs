//! The way out: PDUs with their digests and padding.

use block::Bufs;
use frame::SendQueue;
use wire::Crc32c;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

use super::{Digests, Violation};
use crate::pdu::{
    CapsuleCmd, Common, DIGEST_BYTES, FLAG_DDGST, FLAG_HDGST, MAX_HEADER_BYTES, PduType, TermReq,
};

/// Longest header of a PDU that has digests, in bytes.
const HEADER_BYTES: usize = size_of::<CapsuleCmd>();

/// Zeroes for padding up to the largest alignment of data.
const PADDING: [u8; 128] = [0; 128];

/// Puts PDUs together, and knows how much of what it was given has been sent.
#[derive(Debug)]
pub(crate) struct Sender {
    /// What waits to be sent.
    pub(crate) out: SendQueue,
    /// Digests agreed on.
    pub(crate) digests: Digests,
    /// Alignment of data that the peer wants, in bytes.
    pub(crate) alignment: usize,
    /// Bytes ever put into `out`.
    pushed: u64,
}

impl Default for Sender {
    fn default() -> Self {
        Self { out: SendQueue::default(), digests: Digests::default(), alignment: 4, pushed: 0 }
    }
}

impl Sender {
    /// Bytes ever given to this.
    pub(crate) fn pushed(&self) -> u64 {
        self.pushed
    }

    /// Bytes of them that have been sent.
    pub(crate) fn sent(&self) -> u64 {
        self.pushed - self.out.len() as u64
    }

    /// Sends a PDU that has no digests and no data, whatever was agreed on.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.pushed += bytes.len() as u64;
        self.out.push_bytes(bytes);
    }

    /// Sends a PDU: this header, which begins with a common header, and `data`. Lengths and
    /// digests are put in here, `flags` beside them.
    pub(crate) fn pdu(&mut self, header: &[u8], flags: u8, data: &Bufs) {
        let mut bytes = [0; HEADER_BYTES + DIGEST_BYTES];
        let hlen = header.len();
        bytes[..hlen].copy_from_slice(header);
        let header_end = hlen + if self.digests.header { DIGEST_BYTES } else { 0 };
        let (common, _) = Common::mut_from_prefix(&mut bytes).expect("longer than that");
        common.flags = flags | if self.digests.header { FLAG_HDGST } else { 0 };
        common.plen = U32::new(small(header_end));
        let data_at = header_end.next_multiple_of(self.alignment);
        if !data.is_empty() {
            let trailer = if self.digests.data { DIGEST_BYTES } else { 0 };
            common.flags |= if self.digests.data { FLAG_DDGST } else { 0 };
            common.pdo =
                u8::try_from(data_at).expect("headers and alignment are at most 128 bytes");
            common.plen = U32::new(small(data_at + data.len() + trailer));
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

    /// Data, and its digest.
    fn data(&mut self, data: &Bufs) {
        self.pushed += data.len() as u64;
        self.out.push_data(data);
        if self.digests.data {
            let crc = data.iter().fold(Crc32c::new(), |crc, piece| crc.update(piece));
            self.push(&crc.value().to_le_bytes());
        }
    }

    /// Tells the peer what it did, and shows it the `header` in which it did.
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
pub(crate) fn small(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("transfers are shorter than 4 GiB")
}

//! Sends PDUs: digests and padding.

use frame::SendQueue;
use rt::buf::Bufs;
use wire::{Crc32c, crc32c};

use crate::pdu::{BHS_LEN, DIGEST_LEN, padding};

/// Sends a basic header, whose lengths are set, with its digest if negotiated.
pub(crate) fn push_header(out: &mut SendQueue, header: &[u8; BHS_LEN], digest: bool) {
    if digest {
        let mut bytes = [0; BHS_LEN + DIGEST_LEN];
        bytes[..BHS_LEN].copy_from_slice(header);
        bytes[BHS_LEN..].copy_from_slice(&crc32c(header).to_le_bytes());
        out.push_bytes(&bytes);
    } else {
        out.push_bytes(header);
    }
}

/// Sends the data segment behind a header: a few bytes, which are copied.
pub(crate) fn push_bytes(out: &mut SendQueue, data: &[u8], digest: bool) {
    if !data.is_empty() {
        out.push_bytes(data);
        let crc = if digest { Crc32c::new().update(data) } else { Crc32c::new() };
        push_tail(out, data.len(), crc, digest);
    }
}

/// Sends the data segment behind a header, which is not copied.
pub(crate) fn push_data(out: &mut SendQueue, data: &Bufs, digest: bool) {
    if !data.is_empty() {
        out.push_data(data);
        let mut crc = Crc32c::new();
        if digest {
            crc = data.iter().fold(crc, |crc, piece| crc.update(piece));
        }
        push_tail(out, data.len(), crc, digest);
    }
}

fn push_tail(out: &mut SendQueue, len: usize, crc: Crc32c, digest: bool) {
    let (zeroes, pad) = ([0; 3], padding(len));
    if pad > 0 {
        out.push_bytes(&zeroes[..pad]);
    }
    if digest {
        let crc = crc.update(&zeroes[..pad]);
        out.push_bytes(&crc.value().to_le_bytes());
    }
}

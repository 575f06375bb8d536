//! Data of one command as it arrives, in order.

use block::{Bufs, BufsMut};
use wire::Crc32c;

#[derive(Debug, Default)]
pub(crate) struct IncomingData {
    buffers: BufsMut,
    /// Where the next byte goes: index of the buffer and offset in it.
    position: (usize, usize),
    /// Bytes received, including discarded ones.
    pub(crate) received: u32,
    /// A data digest was wrong.
    pub(crate) corrupt: bool,
}

impl IncomingData {
    pub(crate) fn new(buffers: BufsMut) -> Self {
        Self { buffers, ..Self::default() }
    }

    /// Releases the memory; further data is only counted.
    pub(crate) fn discard(&mut self) {
        *self = Self { received: self.received, ..Self::default() };
    }

    /// The rest of the current buffer, at most `limit` bytes; `None` without buffers.
    pub(super) fn space(&mut self, limit: usize) -> Option<&mut [u8]> {
        let (index, offset) = self.position;
        let buffer = self.buffers.get_mut(index)?;
        let end = buffer.len().min(offset.saturating_add(limit));
        buffer.get_mut(offset..end).filter(|s| !s.is_empty())
    }

    pub(super) fn advance(&mut self, n: usize) {
        self.received = self.received.saturating_add(u32::try_from(n).unwrap_or(u32::MAX));
        let (index, offset) = self.position;
        if let Some(buffer) = self.buffers.get(index) {
            let full = offset + n >= buffer.len();
            self.position = if full { (index + 1, 0) } else { (index, offset + n) };
        }
    }

    /// CRC-32C of the last `length` bytes received; `None` without buffers.
    pub(super) fn checksum_of_last(&self, length: u32) -> Option<u32> {
        if self.buffers.is_empty() {
            return None;
        }
        let end = self.received as usize;
        let start = end.saturating_sub(length as usize);
        let (mut crc, mut at) = (Crc32c::new(), 0);
        for buffer in &self.buffers {
            let (from, to) = (start.max(at), end.min(at + buffer.len()));
            if from < to {
                crc = crc.update(&buffer[from - at..to - at]);
            }
            at += buffer.len();
        }
        Some(crc.value())
    }

    /// The buffers, shared from now on.
    pub(crate) fn finish(&mut self) -> Bufs {
        self.take().into()
    }

    /// The buffers.
    pub(crate) fn take(&mut self) -> BufsMut {
        std::mem::take(self).buffers
    }
}

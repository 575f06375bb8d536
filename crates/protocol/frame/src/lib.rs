//! Sans-io byte-stream plumbing shared by every protocol machine.
//!
//! A machine owns no socket and no clock. Its driver
//! 1. fills the space that [`Machine::receive_space`] returns, in any portions, and reports how
//!    much with [`Machine::on_received`] — payload is thus received directly into its final buffer;
//! 2. sends what [`Machine::output`] holds, in any portions;
//! 3. calls [`Machine::on_timer`] on every wake-up, and at the latest at [`Machine::next_timer`];
//! 4. takes the machine's actions (each protocol has its own) after every call.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Duration;

use arrayvec::ArrayVec;
use rt::buf::{Buf, Bufs};

/// One side of a connection of one protocol. Plain data (`Send`), so that a connection can migrate
/// to another core.
pub trait Machine: Send {
    /// The buffer for the next bytes of the stream. `None`: the machine waits for something else
    /// (memory, a decision, output to be sent, its end), and the driver does not read. Never empty.
    ///
    /// Machines limit their output by returning `None`: the driver reads whenever there is space.
    fn receive_space(&mut self) -> Option<&mut [u8]>;

    /// The first `n` bytes of [`Self::receive_space`] have been filled, `1 <= n <= its length`.
    fn on_received(&mut self, n: usize);

    /// Data to send.
    fn output(&mut self) -> &mut SendQueue;

    /// When to call [`Self::on_timer`] at the latest, as time since the connection began.
    fn next_timer(&self) -> Option<Duration>;

    /// Advances the machine's only clock to `now`, the time since the connection began. Called on
    /// every wake-up of the driver, thus at any time; `now` never decreases.
    fn on_timer(&mut self, now: Duration);

    /// Whether to close the connection as soon as the output has been sent.
    fn is_closing(&self) -> bool;
}

/// Longest piece that [`SendQueue::push_bytes`] stores inline: a header with its digest and
/// padding.
pub const MAX_INLINE_LEN: usize = 64;

/// Bytes waiting to be sent: headers by value, payload by reference.
#[derive(Debug, Default)]
pub struct SendQueue {
    parts: VecDeque<QueuedPart>,
    /// Bytes of the first part already sent.
    front_offset: usize,
    bytes: usize,
}

#[derive(Debug)]
enum QueuedPart {
    Inline(ArrayVec<u8, MAX_INLINE_LEN>),
    Owned(Vec<u8>),
    Payload(Buf),
}

impl QueuedPart {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Inline(b) => b,
            Self::Owned(b) => b,
            Self::Payload(b) => b,
        }
    }
}

impl SendQueue {
    /// Number of queued bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the queue is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Appends a copy of `bytes`; for headers, digests and padding.
    pub fn push_bytes(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len();
        if let Some(QueuedPart::Inline(last)) = self.parts.back_mut() {
            let n = bytes.len().min(last.remaining_capacity());
            last.try_extend_from_slice(&bytes[..n]).expect("no more than there is room for");
            bytes = &bytes[n..];
        }
        for piece in bytes.chunks(MAX_INLINE_LEN) {
            let mut part = ArrayVec::new();
            part.try_extend_from_slice(piece).expect("no longer than a part");
            self.parts.push_back(QueuedPart::Inline(part));
        }
    }

    /// Appends bytes of ordinary memory without copying them: lists, records.
    pub fn push_vec(&mut self, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.bytes += bytes.len();
            self.parts.push_back(QueuedPart::Owned(bytes));
        }
    }

    /// Appends payload without copying it.
    pub fn push_data(&mut self, data: &Bufs) {
        for b in data.iter() {
            self.bytes += b.len();
            self.parts.push_back(QueuedPart::Payload(b.clone()));
        }
    }

    /// The bytes to send, in order.
    pub fn slices(&self) -> impl Iterator<Item = IoSlice<'_>> {
        let mut skip = self.front_offset;
        self.parts.iter().map(move |part| IoSlice::new(&part.bytes()[std::mem::take(&mut skip)..]))
    }

    /// Removes the first `n` bytes, which have been sent.
    ///
    /// # Panics
    /// If fewer bytes are queued.
    pub fn advance(&mut self, n: usize) {
        assert!(n <= self.bytes, "{n} bytes sent of {}", self.bytes);
        self.bytes -= n;
        self.front_offset += n;
        while let Some(first) = self.parts.front() {
            let len = first.bytes().len();
            if self.front_offset < len {
                break;
            }
            self.front_offset -= len;
            self.parts.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sends_the_same_bytes_in_any_portions() {
        let mut q = SendQueue::default();
        let mut expect = Vec::new();
        for i in 0..50u8 {
            let head = vec![i; usize::from(i) * 3];
            q.push_bytes(&head);
            expect.extend(head);
            q.push_data(&Bufs::zeroes(usize::from(i) * 101));
            expect.extend(vec![0; usize::from(i) * 101]);
            q.push_vec(vec![!i; usize::from(i) * 7]);
            expect.extend(vec![!i; usize::from(i) * 7]);
        }
        assert_eq!(q.len(), expect.len());
        let (mut got, mut step) = (Vec::<u8>::new(), 1);
        while !q.is_empty() {
            let flat: Vec<u8> = q.slices().flat_map(|s| s.to_vec()).collect();
            let n = flat.len().min(step);
            got.extend(&flat[..n]);
            q.advance(n);
            step = step * 3 % 4099 + 1;
        }
        assert_eq!(got, expect);
        assert_eq!(q.slices().count(), 0);
    }
}

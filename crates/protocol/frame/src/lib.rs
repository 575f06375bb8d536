//! Sans-io byte-stream plumbing shared by every protocol machine.
//!
//! A machine owns no socket and no clock. Its driver
//! 1. fills the space that [`Machine::receive_space`] names, in any portions, and says how much
//!    with [`Machine::received`] — payload thus lands in its final buffer at once;
//! 2. sends what [`Machine::output`] holds, in any portions;
//! 3. calls [`Machine::on_timer`] on every wake-up, and wakes up when [`Machine::next_timer`] has
//!    come;
//! 4. takes the machine's own actions (each protocol has its own) after every call.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Duration;

use arrayvec::ArrayVec;
use rt::buf::{Buf, Bufs};

/// One side of one connection of one protocol. Plain data (`Send`), so that a connection can move
/// to another core.
pub trait Machine: Send {
    /// Where the next bytes of the stream belong. `None`: the machine waits for something else
    /// (memory, a decision, output to be sent, the end); the driver does not read. Never an empty
    /// slice.
    ///
    /// The machine bounds its output by this: the driver reads whatever there is space for.
    fn receive_space(&mut self) -> Option<&mut [u8]>;

    /// The first `n` bytes of [`Self::receive_space`] have been filled, `1 <= n <= its length`.
    fn received(&mut self, n: usize);

    /// What is to be sent.
    fn output(&mut self) -> &mut SendQueue;

    /// When the machine next wants [`Self::on_timer`], as time since the connection began.
    fn next_timer(&self) -> Option<Duration>;

    /// It is `now`, as time since the connection began: the machine's only clock. Called on every
    /// wake-up of the driver, thus often and at any time; never with an earlier time than before.
    fn on_timer(&mut self, now: Duration);

    /// Whether the connection is to be closed as soon as the output has been sent.
    fn is_closing(&self) -> bool;
}

/// Longest piece that [`SendQueue::push_bytes`] takes: a header with its digest and padding.
pub const SMALL: usize = 64;

/// Bytes waiting to be sent: headers by value, payload by reference.
#[derive(Debug, Default)]
pub struct SendQueue {
    parts: VecDeque<Part>,
    /// Bytes of the first part already sent.
    skip: usize,
    bytes: usize,
}

#[derive(Debug)]
enum Part {
    Small(ArrayVec<u8, SMALL>),
    Owned(Vec<u8>),
    Data(Buf),
}

impl Part {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Small(b) => b,
            Self::Owned(b) => b,
            Self::Data(b) => b,
        }
    }
}

impl SendQueue {
    /// Bytes waiting.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Appends a copy of `bytes`; for headers, digests and padding.
    pub fn push_bytes(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len();
        if let Some(Part::Small(last)) = self.parts.back_mut() {
            let n = bytes.len().min(last.remaining_capacity());
            last.try_extend_from_slice(&bytes[..n]).expect("no more than there is room for");
            bytes = &bytes[n..];
        }
        for piece in bytes.chunks(SMALL) {
            let mut part = ArrayVec::new();
            part.try_extend_from_slice(piece).expect("no longer than a part");
            self.parts.push_back(Part::Small(part));
        }
    }

    /// Appends bytes of ordinary memory without copying them: lists, records.
    pub fn push_vec(&mut self, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.bytes += bytes.len();
            self.parts.push_back(Part::Owned(bytes));
        }
    }

    /// Appends payload without copying it.
    pub fn push_data(&mut self, data: &Bufs) {
        for b in data.iter() {
            self.bytes += b.len();
            self.parts.push_back(Part::Data(b.clone()));
        }
    }

    /// The bytes to send, in order.
    pub fn slices(&self) -> impl Iterator<Item = IoSlice<'_>> {
        let mut skip = self.skip;
        self.parts.iter().map(move |part| IoSlice::new(&part.bytes()[std::mem::take(&mut skip)..]))
    }

    /// The first `n` waiting bytes have been sent.
    ///
    /// # Panics
    /// If fewer bytes waited.
    pub fn sent(&mut self, n: usize) {
        assert!(n <= self.bytes, "{n} bytes sent of {}", self.bytes);
        self.bytes -= n;
        self.skip += n;
        while let Some(first) = self.parts.front() {
            let len = first.bytes().len();
            if self.skip < len {
                break;
            }
            self.skip -= len;
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
            q.sent(n);
            step = step * 3 % 4099 + 1;
        }
        assert_eq!(got, expect);
        assert_eq!(q.slices().count(), 0);
    }
}

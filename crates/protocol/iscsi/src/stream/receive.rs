//! Reception: headers, digests, padding, and data into its buffers.

use wire::{Crc32c, crc32c};

use super::Tag;
use crate::pdu::{BHS_LEN, DIGEST_LEN, Header, MAX_AHS, padding};

/// Size of the buffer for discarded data, in bytes.
const SCRATCH_LEN: usize = 8192;

/// Control data buffers of up to this size are reused.
const MAX_REUSED_CONTROL: usize = 8192;

/// Destination of the current PDU's data segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sink {
    /// Discarded.
    Discard,
    /// Into memory of the machine, up to this length.
    Control(usize),
    /// Into the memory of a command, from this offset on.
    Task(Tag, u32),
}

/// Provides the buffers for the data of commands.
pub(crate) trait TaskBuffers {
    /// Memory for data of a command from byte `at` on, at most `max` bytes; `None` if the data is
    /// to be discarded. Never empty.
    fn space(&mut self, tag: Tag, at: usize, max: usize) -> Option<&mut [u8]>;
}

/// Result of receiving bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// More bytes are needed.
    More,
    /// The header has arrived: decide with [`Receiver::accept`], [`Receiver::block_on`] or
    /// [`Receiver::stop`].
    Header,
    /// Wrong header digest.
    HeaderDigest,
    /// The PDU is complete; `intact` unless its data digest is wrong.
    Complete { intact: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PduStage {
    /// Basic header, additional header segments, header digest.
    Header,
    /// The header has arrived; its data waits for memory.
    Blocked,
    /// Data.
    Data,
    /// Padding and data digest.
    Tail,
}

/// Splits the byte stream into PDUs.
#[derive(Debug)]
pub(crate) struct Receiver {
    header: [u8; BHS_LEN + MAX_AHS + DIGEST_LEN],
    /// Received and needed bytes of the header or tail.
    filled_bytes: usize,
    needed_bytes: usize,
    stage: PduStage,
    sink: Sink,
    /// Length of the data segment, and bytes received.
    segment: usize,
    segment_received: usize,
    tail: [u8; 8],
    crc: Crc32c,
    control: Vec<u8>,
    scratch: Vec<u8>,
    header_digest: bool,
    data_digest: bool,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Self {
            header: [0; _],
            filled_bytes: 0,
            needed_bytes: BHS_LEN,
            stage: PduStage::Header,
            sink: Sink::Discard,
            segment: 0,
            segment_received: 0,
            tail: [0; 8],
            crc: Crc32c::new(),
            control: Vec::new(),
            scratch: Vec::new(),
            header_digest: false,
            data_digest: false,
        }
    }

    /// Sets the digests expected from the next PDU on.
    pub(crate) fn set_digests(&mut self, header: bool, data: bool) {
        (self.header_digest, self.data_digest) = (header, data);
        if self.is_between_pdus() {
            self.next_pdu();
        }
    }

    /// Whether the stream is between two PDUs.
    pub(crate) fn is_between_pdus(&self) -> bool {
        self.stage == PduStage::Header && self.filled_bytes == 0
    }

    /// Whether the current PDU's data waits for memory.
    pub(crate) fn is_blocked(&self) -> bool {
        self.stage == PduStage::Blocked
    }

    /// The basic header of the current PDU.
    pub(crate) fn basic(&self) -> &[u8; BHS_LEN] {
        self.header.first_chunk().expect("the array is longer")
    }

    /// The additional header segments of the current PDU.
    pub(crate) fn ahs(&self) -> &[u8] {
        &self.header[BHS_LEN..BHS_LEN + Header::of(self.basic()).ahs_len()]
    }

    /// Length of the current PDU's data segment in bytes.
    pub(crate) fn segment_len(&self) -> usize {
        self.segment
    }

    /// The control data of the PDU that has just been completed.
    pub(crate) fn control(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.control)
    }

    /// Returns the memory of [`Self::control`].
    pub(crate) fn reuse(&mut self, mut control: Vec<u8>) {
        control.clear();
        if control.capacity() <= MAX_REUSED_CONTROL {
            self.control = control;
        }
    }

    /// Buffer for the next bytes.
    pub(crate) fn space<'a>(&'a mut self, tasks: &'a mut impl TaskBuffers) -> Option<&'a mut [u8]> {
        match self.stage {
            PduStage::Header => Some(&mut self.header[self.filled_bytes..self.needed_bytes]),
            PduStage::Tail => Some(&mut self.tail[self.filled_bytes..self.needed_bytes]),
            PduStage::Data => Some(self.data_space(tasks)),
            PduStage::Blocked => None,
        }
    }

    fn data_space<'a>(&'a mut self, tasks: &'a mut impl TaskBuffers) -> &'a mut [u8] {
        let left = self.segment - self.segment_received;
        match self.sink {
            Sink::Control(keep) if self.segment_received < keep => {
                let end = self.segment.min(keep);
                return &mut self.control[self.segment_received..end];
            }
            Sink::Task(tag, offset) => {
                if let Some(space) = tasks.space(tag, offset as usize + self.segment_received, left)
                {
                    return space;
                }
            }
            Sink::Control(_) | Sink::Discard => {}
        }
        if self.scratch.is_empty() {
            self.scratch = vec![0; SCRATCH_LEN];
        }
        &mut self.scratch[..left.min(SCRATCH_LEN)]
    }

    /// `n` bytes of the space were filled.
    pub(crate) fn filled(&mut self, n: usize, tasks: &mut impl TaskBuffers) -> Event {
        match self.stage {
            PduStage::Header => self.header_filled(n),
            PduStage::Data => {
                if self.data_digest {
                    self.crc = self.crc.update(&self.data_space(tasks)[..n]);
                }
                self.segment_received += n;
                if self.segment_received == self.segment { self.data_filled() } else { Event::More }
            }
            PduStage::Tail => {
                self.filled_bytes += n;
                if self.filled_bytes == self.needed_bytes { self.complete() } else { Event::More }
            }
            PduStage::Blocked => Event::More,
        }
    }

    fn header_filled(&mut self, n: usize) -> Event {
        self.filled_bytes += n;
        if self.filled_bytes < self.needed_bytes {
            return Event::More;
        }
        let header = Header::of(self.basic());
        let (len, segment) = (BHS_LEN + header.ahs_len(), header.data_segment_len());
        self.needed_bytes = len + if self.header_digest { DIGEST_LEN } else { 0 };
        if self.filled_bytes < self.needed_bytes {
            return Event::More;
        }
        if self.header_digest && !digest_is(crc32c(&self.header[..len]), &self.header[len..]) {
            return Event::HeaderDigest;
        }
        self.segment = segment;
        self.sink = Sink::Discard;
        self.stage = PduStage::Blocked;
        Event::Header
    }

    /// Blocks reception before the header's data until [`Self::resume`].
    pub(crate) fn block_on(&mut self, sink: Sink) {
        self.sink = sink;
    }

    /// The command whose data waits for memory.
    pub(crate) fn blocked_on(&self) -> Option<(Tag, u32)> {
        match self.sink {
            Sink::Task(tag, offset) if self.is_blocked() => Some((tag, offset)),
            _ => None,
        }
    }

    /// Continues reception: the memory is available.
    pub(crate) fn resume(&mut self) {
        debug_assert!(self.is_blocked() && self.segment > 0);
        self.accept(self.sink);
    }

    /// The header is accepted: its data goes to `sink`. Returns [`Event::Complete`] if there is no
    /// data.
    pub(crate) fn accept(&mut self, sink: Sink) -> Event {
        self.control.clear();
        if self.segment == 0 {
            self.next_pdu();
            return Event::Complete { intact: true };
        }
        if let Sink::Control(keep) = sink {
            self.control.resize(self.segment.min(keep), 0);
        }
        self.sink = sink;
        self.segment_received = 0;
        self.crc = Crc32c::new();
        self.stage = PduStage::Data;
        Event::More
    }

    /// Stops reception for good.
    pub(crate) fn stop(&mut self) {
        self.sink = Sink::Discard;
        self.control = Vec::new();
        self.scratch = Vec::new();
    }

    fn data_filled(&mut self) -> Event {
        self.filled_bytes = 0;
        self.needed_bytes = padding(self.segment) + if self.data_digest { DIGEST_LEN } else { 0 };
        if self.needed_bytes == 0 {
            return self.complete();
        }
        self.stage = PduStage::Tail;
        Event::More
    }

    fn complete(&mut self) -> Event {
        let pad = padding(self.segment);
        let intact = !self.data_digest
            || digest_is(self.crc.update(&self.tail[..pad]).value(), &self.tail[pad..]);
        self.next_pdu();
        Event::Complete { intact }
    }

    fn next_pdu(&mut self) {
        self.stage = PduStage::Header;
        self.filled_bytes = 0;
        self.needed_bytes = BHS_LEN + if self.header_digest { DIGEST_LEN } else { 0 };
    }
}

/// RFC 7143 13.1: digests are sent least significant byte first, as CRC-32C is defined.
fn digest_is(value: u32, bytes: &[u8]) -> bool {
    bytes.starts_with(&value.to_le_bytes())
}

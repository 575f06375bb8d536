//! From bytes to PDUs: headers, digests, padding, and where data goes.

use wire::{Crc32c, crc32c};

use super::Tag;
use crate::pdu::{BHS, DIGEST, Header, MAX_AHS, padding};

/// Size of the buffer for data that nobody wants, in bytes.
const SCRATCH: usize = 8192;

/// Control data is received into memory of this size or less that is kept.
const KEPT: usize = 8192;

/// Where the data segment of the current PDU goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sink {
    /// Nowhere.
    Discard,
    /// Into memory of the machine, as far as this length.
    Control(usize),
    /// Into the memory of a command, from this offset on.
    Task(Tag, u32),
}

/// Who knows where the data of a command goes.
pub(crate) trait Owners {
    /// Memory for data of a command from byte `at` on, at most `max` bytes of it; `None` where they are
    /// not wanted. Never empty.
    fn space(&mut self, tag: Tag, at: usize, max: usize) -> Option<&mut [u8]>;
}

/// What receiving bytes led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// More bytes are needed.
    More,
    /// The header is there: decide with [`Receiver::take`], [`Receiver::wait`] or
    /// [`Receiver::stop`].
    Header,
    /// The header is not what its digest says.
    HeaderDigest,
    /// The PDU is there; `intact` unless its data is not what its digest says.
    Complete { intact: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Basic header, additional header segments, header digest.
    Header,
    /// The header is there; its data has no place yet.
    Blocked,
    /// Data.
    Data,
    /// Padding and data digest.
    Tail,
}

/// Takes the byte stream apart.
#[derive(Debug)]
pub(crate) struct Receiver {
    header: [u8; BHS + MAX_AHS + DIGEST],
    /// Bytes of the header or of the tail that are there, and that are needed.
    have: usize,
    need: usize,
    stage: Stage,
    sink: Sink,
    /// Bytes of the data segment in all, and those that are there.
    segment: usize,
    done: usize,
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
            have: 0,
            need: BHS,
            stage: Stage::Header,
            sink: Sink::Discard,
            segment: 0,
            done: 0,
            tail: [0; 8],
            crc: Crc32c::new(),
            control: Vec::new(),
            scratch: Vec::new(),
            header_digest: false,
            data_digest: false,
        }
    }

    /// From the next PDU on, digests are expected as said.
    pub(crate) fn set_digests(&mut self, header: bool, data: bool) {
        (self.header_digest, self.data_digest) = (header, data);
        if self.is_between() {
            self.next_pdu();
        }
    }

    /// Whether the stream is between two PDUs.
    pub(crate) fn is_between(&self) -> bool {
        self.stage == Stage::Header && self.have == 0
    }

    /// Whether the current PDU's data has no place yet.
    pub(crate) fn is_blocked(&self) -> bool {
        self.stage == Stage::Blocked
    }

    /// The basic header of the current PDU.
    pub(crate) fn basic(&self) -> &[u8; BHS] {
        self.header.first_chunk().expect("the array is longer")
    }

    /// The additional header segments of the current PDU.
    pub(crate) fn ahs(&self) -> &[u8] {
        &self.header[BHS..BHS + Header::of(self.basic()).ahs()]
    }

    /// Length of the current PDU's data segment in bytes.
    pub(crate) fn segment(&self) -> usize {
        self.segment
    }

    /// The control data of the PDU that has just been completed.
    pub(crate) fn control(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.control)
    }

    /// Gives the memory of [`Self::control`] back.
    pub(crate) fn reuse(&mut self, mut control: Vec<u8>) {
        control.clear();
        if control.capacity() <= KEPT {
            self.control = control;
        }
    }

    /// Where the next bytes go.
    pub(crate) fn space<'a>(&'a mut self, tasks: &'a mut impl Owners) -> Option<&'a mut [u8]> {
        match self.stage {
            Stage::Header => Some(&mut self.header[self.have..self.need]),
            Stage::Tail => Some(&mut self.tail[self.have..self.need]),
            Stage::Data => Some(self.data_space(tasks)),
            Stage::Blocked => None,
        }
    }

    fn data_space<'a>(&'a mut self, tasks: &'a mut impl Owners) -> &'a mut [u8] {
        let left = self.segment - self.done;
        match self.sink {
            Sink::Control(keep) if self.done < keep => {
                let end = self.segment.min(keep);
                return &mut self.control[self.done..end];
            }
            Sink::Task(tag, offset) => {
                if let Some(space) = tasks.space(tag, offset as usize + self.done, left) {
                    return space;
                }
            }
            Sink::Control(_) | Sink::Discard => {}
        }
        if self.scratch.is_empty() {
            self.scratch = vec![0; SCRATCH];
        }
        &mut self.scratch[..left.min(SCRATCH)]
    }

    /// `n` bytes of the space were filled.
    pub(crate) fn filled(&mut self, n: usize, tasks: &mut impl Owners) -> Event {
        match self.stage {
            Stage::Header => self.header_filled(n),
            Stage::Data => {
                if self.data_digest {
                    self.crc = self.crc.update(&self.data_space(tasks)[..n]);
                }
                self.done += n;
                if self.done == self.segment { self.data_filled() } else { Event::More }
            }
            Stage::Tail => {
                self.have += n;
                if self.have == self.need { self.complete() } else { Event::More }
            }
            Stage::Blocked => Event::More,
        }
    }

    fn header_filled(&mut self, n: usize) -> Event {
        self.have += n;
        if self.have < self.need {
            return Event::More;
        }
        let header = Header::of(self.basic());
        let (len, segment) = (BHS + header.ahs(), header.segment());
        self.need = len + if self.header_digest { DIGEST } else { 0 };
        if self.have < self.need {
            return Event::More;
        }
        if self.header_digest && !digest_is(crc32c(&self.header[..len]), &self.header[len..]) {
            return Event::HeaderDigest;
        }
        self.segment = segment;
        self.sink = Sink::Discard;
        self.stage = Stage::Blocked;
        Event::Header
    }

    /// The header's data has no place yet: nothing is received before [`Self::resume`].
    pub(crate) fn wait(&mut self, sink: Sink) {
        self.sink = sink;
    }

    /// The command whose data waits for a place.
    pub(crate) fn waits_for(&self) -> Option<(Tag, u32)> {
        match self.sink {
            Sink::Task(tag, offset) if self.is_blocked() => Some((tag, offset)),
            _ => None,
        }
    }

    /// Data for which a place was awaited can be received.
    pub(crate) fn resume(&mut self) {
        debug_assert!(self.is_blocked() && self.segment > 0);
        self.take(self.sink);
    }

    /// The header is accepted: its data goes to `sink`. Returns what receiving nothing more
    /// leads to: [`Event::Complete`] where there is no data.
    pub(crate) fn take(&mut self, sink: Sink) -> Event {
        self.control.clear();
        if self.segment == 0 {
            self.next_pdu();
            return Event::Complete { intact: true };
        }
        if let Sink::Control(keep) = sink {
            self.control.resize(self.segment.min(keep), 0);
        }
        self.sink = sink;
        self.done = 0;
        self.crc = Crc32c::new();
        self.stage = Stage::Data;
        Event::More
    }

    /// Nothing will be received any more.
    pub(crate) fn stop(&mut self) {
        self.sink = Sink::Discard;
        self.control = Vec::new();
        self.scratch = Vec::new();
    }

    fn data_filled(&mut self) -> Event {
        self.have = 0;
        self.need = padding(self.segment) + if self.data_digest { DIGEST } else { 0 };
        if self.need == 0 {
            return self.complete();
        }
        self.stage = Stage::Tail;
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
        self.stage = Stage::Header;
        self.have = 0;
        self.need = BHS + if self.header_digest { DIGEST } else { 0 };
    }
}

/// RFC 7143 13.1: digests are sent least significant byte first, as CRC-32C is defined.
fn digest_is(value: u32, bytes: &[u8]) -> bool {
    bytes.starts_with(&value.to_le_bytes())
}

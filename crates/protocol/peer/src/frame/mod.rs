//! Frames: what messages look like on a connection, one file per family (RFD 0010, 8.3 and 8.4;
//! `docs/format/peer.md`). No I/O: [`Incoming`] judges headers and makes messages of bodies,
//! [`Outgoing`] queues frames.
//!
//! What [`Outgoing`] writes [`Incoming`] reads as the same message, and nothing else is read: bytes
//! have one meaning, and a message has one form.

mod fetch;
mod flush;
mod header;
mod hello;
mod join;
mod lease;
mod list;
mod opening;
mod order;
#[cfg(test)]
mod tests;

pub use header::{HEADER_BYTES, Type};
pub use hello::{HELLO_BYTES, HandshakeFrame, Hello, MAX_HELLO_BYTES, PROOF_BYTES, Refusal};

use ::frame::SendQueue;
use block::{Bufs, Epoch};
use wire::Crc32c;

use crate::{Lane, Line, Message};
use header::{Fields, Header, ZERO};

/// The highest version of the protocol that this release speaks.
pub const MAX_VERSION: u8 = 1;
/// The lowest.
pub const MIN_VERSION: u8 = 1;

/// Most bytes of data in one message; [`Message::Forward`] carries twice as many.
pub const MAX_DATA_BYTES: u32 = 1 << 20;
/// Longest record in [`Message::Start`], in bytes.
pub const MAX_RECORD_BYTES: usize = 4096;
/// Most entries in [`Message::Started`].
pub const MAX_ENTRIES: usize = 4096;
/// Most tags in [`Message::Open`]: the entries of four replicas.
pub const MAX_TAGS: usize = 4 * MAX_ENTRIES;
/// Most places in [`Message::Commit`].
pub const MAX_SEQS: usize = MAX_ENTRIES;
/// Most regions in [`Message::Clear`] and [`Message::Marked`], and ranges in [`Message::Assessed`].
pub const MAX_REGIONS: usize = 8192;
/// Most other images in [`Message::Accept`]: those that an intent log keeps marks for.
pub const MAX_REACHED: usize = 3;
/// Most bytes of marks in [`Message::Join`]: 2^20 regions.
pub const MAX_MARK_BYTES: usize = 128 << 10;

/// A frame's body is followed by zeroes up to a multiple of this many bytes.
pub const ALIGN_BYTES: usize = 8;

/// Why bytes are not a frame that may stand here, or a message has no frame. Ends the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// The header does not begin like one.
    #[error("no frame")]
    NoMagic,
    /// The header is damaged.
    #[error("a frame whose header is damaged")]
    HeaderChecksum,
    /// It is of another version than was agreed.
    #[error("a frame of version {0}")]
    Version(u8),
    /// There is no such type in this version.
    #[error("a frame of unknown type {0:?}")]
    Type(Type),
    /// It does not belong on this connection.
    #[error("{kind:?} on the {line} connection")]
    Line {
        /// Its type.
        kind: Type,
        /// The connection.
        line: Line,
    },
    /// A frame is missing, or is there twice.
    #[error("frame {got} where {expected} should be")]
    Gap {
        /// The number that was due.
        expected: u32,
        /// The frame's.
        got: u32,
    },
    /// Its body is longer than any of its type, or than what was agreed.
    #[error("{kind:?} with a body of {bytes} bytes; {limit} is the most")]
    TooLong {
        /// Its type.
        kind: Type,
        /// Length of its body in bytes.
        bytes: u64,
        /// The most, in bytes.
        limit: u64,
    },
    /// The length of its body does not fit what the header says.
    #[error("{kind:?} with a body of {bytes} bytes, which does not fit its header")]
    Length {
        /// Its type.
        kind: Type,
        /// Length of its body in bytes.
        bytes: u64,
    },
    /// The body is damaged.
    #[error("{0:?} with a damaged body")]
    BodyChecksum(Type),
    /// A bit is set that means nothing here.
    #[error("{0:?} with something in a reserved place")]
    Reserved(Type),
    /// A field makes no sense.
    #[error("{0:?} whose {1} makes no sense")]
    Field(Type, &'static str),
}

/// The body of a frame.
#[derive(Clone, Debug)]
pub enum Body {
    /// Of ordinary memory: lists, records. Empty where there is none.
    Bytes(Vec<u8>),
    /// Contents of the volume, in the pool's memory.
    Data(Bufs),
}

impl Body {
    const NONE: Self = Self::Bytes(Vec::new());

    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Data(data) => data.len(),
        }
    }

    fn checksum(&self) -> u32 {
        match self {
            Self::Bytes(bytes) => wire::crc32c(bytes),
            Self::Data(data) => data_checksum(data),
        }
    }

    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Data(data) => data.to_vec(),
        }
    }

    /// The data; `None` if they lie elsewhere.
    fn data(self) -> Option<Bufs> {
        match self {
            Self::Bytes(bytes) => bytes.is_empty().then(Bufs::new),
            Self::Data(data) => Some(data),
        }
    }
}

/// CRC-32C over the pieces.
fn data_checksum(data: &Bufs) -> u32 {
    data.iter().fold(Crc32c::new(), |sum, piece| sum.update(piece)).value()
}

/// Bytes of zeroes behind a body of `len` bytes.
#[must_use]
pub fn padding(len: usize) -> usize {
    len.wrapping_neg() % ALIGN_BYTES
}

/// Whether what stands behind a body is nothing but zeroes.
///
/// # Errors
/// [`Bad::Reserved`].
pub fn check_padding(kind: Type, bytes: &[u8]) -> Result<(), Bad> {
    if bytes.iter().all(|&b| b == 0) { Ok(()) } else { Err(Bad::Reserved(kind)) }
}

/// What a connection carries, as its two ends have agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Which connection it is.
    pub line: Line,
    /// Version of the protocol.
    pub version: u8,
    /// Most bytes of data in a message.
    pub max_data_bytes: u32,
}

/// The receiving side of a connection: frames one after another.
#[derive(Debug)]
pub struct Incoming {
    rules: Rules,
    number: u32,
}

/// The header of a frame whose body is yet to come: its type, its place and its length are right.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    header: Header,
}

/// What has to be at hand before a body is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Ordinary memory for the body; none where it is empty.
    Nothing,
    /// Memory of class `Copy` for the data and for applying them.
    Copy,
    /// Memory of class `Ordered`, likewise.
    Ordered,
    /// What was laid ready for this request.
    Expected(u64),
}

impl Incoming {
    /// A connection on which nothing has come.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self { rules, number: 0 }
    }

    /// Judges the header of the next frame.
    ///
    /// # Errors
    /// [`Bad`], whatever the bytes are. The connection is over then.
    pub fn head(&mut self, bytes: &[u8; HEADER_BYTES]) -> Result<Head, Bad> {
        let header = Header::parse(bytes)?;
        let Header { fields, version, number, length, .. } = header;
        let Rules { line, max_data_bytes, .. } = self.rules;
        if version != self.rules.version {
            return Err(Bad::Version(version));
        }
        if number != self.number {
            return Err(Bad::Gap { expected: self.number, got: number });
        }
        let kind = fields.kind;
        if !line.carries(kind.lane().ok_or(Bad::Type(kind))?, kind) {
            return Err(Bad::Line { kind, line });
        }
        check_length(&fields, u64::from(length), max_data_bytes)?;
        // Wraps after 2^32 frames; a gap that large does not go unnoticed.
        self.number = self.number.wrapping_add(1);
        Ok(Head { header })
    }
}

impl Head {
    /// The frame's type.
    #[must_use]
    pub fn kind(&self) -> Type {
        self.header.fields.kind
    }

    /// The epoch that the message speaks of.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.header.fields.epoch)
    }

    /// Length of the body in bytes, without what pads it.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.header.length as usize
    }

    /// What its body needs.
    #[must_use]
    pub fn needs(&self) -> Needs {
        match self.kind() {
            Type::Write => Needs::Copy,
            Type::Order | Type::Forward => Needs::Ordered,
            Type::Data => Needs::Expected(self.header.fields.id),
            _ => Needs::Nothing,
        }
    }

    /// The message, now that its body is here. `body` is as long as [`Self::body_bytes`] said, and
    /// [`Body::Data`] where memory of the pool was needed.
    ///
    /// # Errors
    /// [`Bad`], whatever the bytes are.
    pub fn message(self, body: Body) -> Result<Message, Bad> {
        let Header { fields, length, body_checksum, .. } = self.header;
        let kind = fields.kind;
        if body.len() as u64 != u64::from(length) {
            return Err(Bad::Length { kind, bytes: body.len() as u64 });
        }
        if body.checksum() != body_checksum {
            return Err(Bad::BodyChecksum(kind));
        }
        let message = parse(&fields, body)?;
        // Fields that the type does not use are zero, and flags that it does not know.
        if self::fields(&message)? != fields {
            return Err(Bad::Reserved(kind));
        }
        Ok(message)
    }
}

/// The sending side of a connection.
#[derive(Debug)]
pub struct Outgoing {
    rules: Rules,
    number: u32,
}

impl Outgoing {
    /// A connection on which nothing was sent.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self { rules, number: 0 }
    }

    /// Queues the frame of `message`, its data by reference.
    ///
    /// # Errors
    /// [`Bad`] for a message that the other side would refuse: nothing was queued.
    pub fn push(&mut self, message: Message, queue: &mut SendQueue) -> Result<(), Bad> {
        let Rules { line, version, max_data_bytes } = self.rules;
        let fields = fields(&message)?;
        if !line.carries(message.lane(), fields.kind) {
            return Err(Bad::Line { kind: fields.kind, line });
        }
        let body = body(message)?;
        let bytes = body.len();
        check_length(&fields, bytes as u64, max_data_bytes)?;
        let header = Header {
            fields,
            version,
            number: self.number,
            length: u32::try_from(bytes).expect("checked against limits far below that"),
            body_checksum: body.checksum(),
        };
        queue.push_bytes(&header.to_bytes());
        match body {
            Body::Bytes(bytes) => queue.push_vec(bytes),
            Body::Data(data) => queue.push_data(&data),
        }
        queue.push_bytes(&[0; ALIGN_BYTES][..padding(bytes)]);
        self.number = self.number.wrapping_add(1);
        Ok(())
    }
}

impl Type {
    /// The lane of a message of this type; `None` for types that this version does not know, and
    /// for those of the handshake.
    fn lane(self) -> Option<Lane> {
        match self {
            Self::Write | Self::Data => Some(Lane::Down),
            Self::Order | Self::Forward | Self::Join => Some(Lane::Up),
            Self::Hello | Self::Proof | Self::Ready | Self::Refused => None,
            Self(2..=5 | 7..=8 | 10..=11 | 16..=25 | 27..=44) => Some(Lane::Control),
            _ => None,
        }
    }
}

/// Whether a body of `bytes` is what `fields` announce, and no longer than any.
fn check_length(fields: &Fields, bytes: u64, max_data_bytes: u32) -> Result<(), Bad> {
    let kind = fields.kind;
    let (blocks, data) = (u64::from(fields.blocks), u64::from(max_data_bytes));
    let list = |item: usize, most: usize| (blocks * item as u64, (item * most) as u64);
    let failed = fields.status != 0;
    let (exact, limit) = match kind {
        Type::Standing => (lease::STANDING_BYTES as u64, lease::STANDING_BYTES as u64),
        Type::Start => (bytes, MAX_RECORD_BYTES as u64),
        Type::Started => list(list::ENTRY_BYTES, MAX_ENTRIES),
        Type::Open => list(list::TAG_BYTES, MAX_TAGS),
        Type::Commit => list(list::SEQ_BYTES, MAX_SEQS),
        Type::Clear | Type::Marked => list(list::REGION_BYTES, MAX_REGIONS),
        Type::Assessed if !failed => list(list::REGION_BYTES, MAX_REGIONS),
        Type::Join => (bytes, (lease::SHARED_BYTES + MAX_MARK_BYTES) as u64),
        Type::Accept => list(join::REACHED_BYTES, MAX_REACHED),
        Type::Summed if !failed => (fetch::DIGEST_BYTES as u64, fetch::DIGEST_BYTES as u64),
        Type::Data if !failed => (bytes, data),
        Type::Order | Type::Write if !fields.has(ZERO) => (whole(bytes, blocks), data),
        Type::Forward => (whole(bytes, blocks.saturating_mul(2)), 2 * data),
        _ => (0, 0),
    };
    match bytes {
        _ if bytes > limit => Err(Bad::TooLong { kind, bytes, limit }),
        _ if bytes != exact => Err(Bad::Length { kind, bytes }),
        _ => Ok(()),
    }
}

/// `bytes` if `parts` parts of one length, not none, make them up; else another number.
fn whole(bytes: u64, parts: u64) -> u64 {
    if bytes > 0 && parts > 0 && bytes.is_multiple_of(parts) { bytes } else { !bytes }
}

/// The header fields of a message.
fn fields(message: &Message) -> Result<Fields, Bad> {
    use Message as M;
    Ok(match message {
        M::Standing(standing) => lease::standing(standing),
        M::Renew { epoch, incarnation, stamp } => {
            lease::lease(Type::Renew, *epoch, *incarnation, *stamp)
        }
        M::Promise { epoch, incarnation, stamp } => {
            lease::lease(Type::Promise, *epoch, *incarnation, *stamp)
        }
        M::Newer { epoch } => lease::newer(*epoch),
        M::Yield { view, incarnation } => lease::yielding(Type::Yield, *view, *incarnation),
        M::Yielded { view, incarnation } => lease::yielding(Type::Yielded, *view, *incarnation),
        M::Start { view, .. } => opening::start(*view),
        M::Started { view, entries } => opening::started(*view, entries.len()),
        M::Open { view, through, settled } => opening::open(*view, *through, settled.len()),
        M::Rejoin { view } => opening::rejoin(*view),
        M::Order { view, number, stamp, change } => order::order(*view, *number, *stamp, change)?,
        M::Grant { view, number, seq } => order::grant(*view, *number, *seq),
        M::Done { view, number } => order::numbered(Type::Done, *view, *number),
        M::Late { view, number } => order::numbered(Type::Late, *view, *number),
        M::Write { view, seq, tag, copy, change } => {
            order::write(*view, *seq, *tag, *copy, change)?
        }
        M::Applied { view, seq } => order::numbered(Type::Applied, *view, seq.0),
        M::Commit { view, seqs } => order::commit(*view, seqs.len()),
        M::NoSpace { view, seq } => order::numbered(Type::NoSpace, *view, seq.0),
        M::Assess { view, request, seq } => order::assess(*view, *request, *seq),
        M::Assessed { view, request, free_bytes, zeroes } => {
            order::assessed(*view, *request, *free_bytes, zeroes)
        }
        M::Want { view, seq } => order::numbered(Type::Want, *view, seq.0),
        M::Forward { view, number, stamp, range, fua, .. } => {
            order::forward(*view, *number, *stamp, *range, *fua)?
        }
        M::Outcome { view, number, outcome } => order::outcome(*view, *number, *outcome),
        M::Flush { view, request, lineage } => flush::flush(*view, *request, *lineage),
        M::Flushed { view, request } => order::numbered(Type::Flushed, *view, *request),
        M::Fetch { view, request, range } => fetch::asked(Type::Fetch, *view, *request, *range)?,
        M::Data { view, request, result } => {
            fetch::answered(Type::Data, *view, *request, result.as_ref().err().copied())
        }
        M::Repair { view, range } => fetch::asked(Type::Repair, *view, 0, *range)?,
        M::Join { incarnation, epoch, volume_bytes, region_shift, .. } => {
            join::join(*incarnation, *epoch, *volume_bytes, *region_shift)
        }
        M::Accept { view, incarnation, reached } => {
            join::accept(*view, *incarnation, reached.len())
        }
        M::Detached { incarnation } => join::detached(*incarnation),
        M::Clear { view, request, regions } => flush::clear(*view, *request, regions.len()),
        M::Marked { view, regions } => flush::marked(*view, regions.len()),
        M::Unreachable { view, node } => flush::unreachable(*view, *node),
        M::Sum { view, request, range } => fetch::asked(Type::Sum, *view, *request, *range)?,
        M::Summed { view, request, result } => {
            fetch::answered(Type::Summed, *view, *request, result.err())
        }
    })
}

/// The body of a message.
fn body(message: Message) -> Result<Body, Bad> {
    use Message as M;
    Ok(match message {
        M::Standing(standing) => lease::standing_body(&standing),
        M::Start { record, .. } => Body::Bytes(record),
        M::Started { entries, .. } => list::entries(&entries)?,
        M::Open { settled, .. } => list::tags(&settled),
        M::Commit { seqs, .. } => list::seqs(&seqs),
        M::Clear { regions, .. } | M::Marked { regions, .. } => list::regions(&regions),
        M::Assessed { zeroes, .. } => zeroes.map_or(Body::NONE, |zeroes| list::regions(&zeroes)),
        M::Join { shared, marks, .. } => join::join_body(&shared, &marks),
        M::Accept { reached, .. } => join::accept_body(&reached),
        M::Summed { result, .. } => fetch::digest(&result),
        M::Order { change, .. } | M::Write { change, .. } => Body::Data(change.data),
        M::Forward { data, .. } => Body::Data(data),
        M::Data { result, .. } => result.map_or(Body::NONE, Body::Data),
        M::Renew { .. }
        | M::Promise { .. }
        | M::Newer { .. }
        | M::Yield { .. }
        | M::Yielded { .. }
        | M::Rejoin { .. }
        | M::Grant { .. }
        | M::Done { .. }
        | M::Late { .. }
        | M::Applied { .. }
        | M::NoSpace { .. }
        | M::Assess { .. }
        | M::Want { .. }
        | M::Outcome { .. }
        | M::Flush { .. }
        | M::Flushed { .. }
        | M::Fetch { .. }
        | M::Repair { .. }
        | M::Detached { .. }
        | M::Unreachable { .. }
        | M::Sum { .. } => Body::NONE,
    })
}

/// The message that a header and a body make.
fn parse(fields: &Fields, body: Body) -> Result<Message, Bad> {
    if matches!(fields.kind, Type::Order | Type::Write | Type::Forward | Type::Data) {
        let data = body.data().ok_or(fields.bad("body"))?;
        return match fields.kind {
            Type::Order => order::parse_order(fields, data),
            Type::Write => order::parse_write(fields, data),
            Type::Forward => order::parse_forward(fields, data),
            _ => fetch::parse_data(fields, data),
        };
    }
    let body = body.bytes();
    let (view, id) = (fields.view(), fields.id);
    Ok(match fields.kind {
        Type::Standing => lease::parse_standing(fields, &body)?,
        Type::Renew => lease::parse_renew(fields),
        Type::Promise => lease::parse_promise(fields),
        Type::Newer => lease::parse_newer(fields),
        Type::Yield => lease::parse_yield(fields),
        Type::Yielded => lease::parse_yielded(fields),
        Type::Start => opening::parse_start(fields, body),
        Type::Started => opening::parse_started(fields, &body)?,
        Type::Open => opening::parse_open(fields, &body)?,
        Type::Rejoin => opening::parse_rejoin(fields),
        Type::Grant => order::parse_grant(fields),
        Type::Done => Message::Done { view, number: id },
        Type::Late => Message::Late { view, number: id },
        Type::Applied => Message::Applied { view, seq: crate::Seq(id) },
        Type::Commit => order::parse_commit(fields, &body)?,
        Type::NoSpace => Message::NoSpace { view, seq: crate::Seq(id) },
        Type::Assess => order::parse_assess(fields),
        Type::Assessed => order::parse_assessed(fields, &body)?,
        Type::Want => Message::Want { view, seq: crate::Seq(id) },
        Type::Outcome => order::parse_outcome(fields)?,
        Type::Flush => flush::parse_flush(fields),
        Type::Flushed => Message::Flushed { view, request: id },
        Type::Fetch => fetch::parse_fetch(fields)?,
        Type::Repair => fetch::parse_repair(fields)?,
        Type::Join => join::parse_join(fields, &body)?,
        Type::Accept => join::parse_accept(fields, &body)?,
        Type::Detached => join::parse_detached(fields),
        Type::Clear => flush::parse_clear(fields, &body)?,
        Type::Marked => flush::parse_marked(fields, &body)?,
        Type::Unreachable => flush::parse_unreachable(fields),
        Type::Sum => fetch::parse_sum(fields)?,
        Type::Summed => fetch::parse_summed(fields, &body)?,
        kind => return Err(Bad::Type(kind)),
    })
}

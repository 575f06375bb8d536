//! Frames: the form of messages on a connection, one file per family (RFD 0010, 8.3 and 8.4;
//! `docs/format/peer.md`). No I/O: [`FrameDecoder`] checks headers and decodes bodies,
//! [`FrameEncoder`] queues frames.
//!
//! [`FrameDecoder`] decodes exactly what [`FrameEncoder`] writes: bytes have one meaning, and a
//! message has one encoding.

mod fetch;
mod flush;
mod header;
mod hello;
mod join;
mod lease;
mod list;
#[cfg(test)]
mod tests;
mod view_change;
mod write;

pub use header::{FrameType, HEADER_BYTES};
pub use hello::{
    HELLO_BYTES, HandshakeFrame, HandshakeRefusal, Hello, MAX_HELLO_BYTES, PROOF_BYTES,
};

use ::frame::SendQueue;
use block::{Bufs, Epoch};
use wire::Crc32c;

use crate::{ConnectionPurpose, Lane, Message};
use header::{FLAG_ZERO, Header, HeaderFields};

/// The highest version of the protocol that this release speaks.
pub const MAX_VERSION: u8 = 1;
/// The lowest version.
pub const MIN_VERSION: u8 = 1;

/// Most bytes of data in one message; [`Message::CompareAndWrite`] carries twice as many.
pub const MAX_DATA_BYTES: u32 = 1 << 20;
/// Longest configuration in [`Message::StartViewChange`], in bytes.
pub const MAX_CONFIG_BYTES: usize = 4096;
/// Most entries in [`Message::DoViewChange`].
pub const MAX_ENTRIES: usize = 4096;
/// Most write ids in [`Message::StartView`]: the entries of four replicas.
pub const MAX_WRITE_IDS: usize = 4 * MAX_ENTRIES;
/// Most sequence numbers in [`Message::Commit`].
pub const MAX_SEQS: usize = MAX_ENTRIES;
/// Most regions in [`Message::ClearRegions`] and [`Message::IdleDirtyRegions`], and ranges in
/// [`Message::NoSpaceReport`].
pub const MAX_REGIONS: usize = 8192;
/// Most other images in [`Message::JoinAccepted`]: as many as an intent log has slots.
pub const MAX_GENERATIONS: usize = 3;
/// Most bytes of dirty bits in [`Message::Join`]: 2^20 regions.
pub const MAX_DIRTY_BITS_BYTES: usize = 128 << 10;

/// Zeroes pad the body of a frame to a multiple of this many bytes.
pub const ALIGN_BYTES: usize = 8;

/// Why bytes are not a valid frame here, or a message cannot be encoded. Ends the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The magic is wrong.
    #[error("no frame")]
    NoMagic,
    /// The header is damaged.
    #[error("a frame with a damaged header")]
    HeaderChecksum,
    /// It has another version than was negotiated.
    #[error("a frame of version {0}")]
    Version(u8),
    /// There is no such type in this version.
    #[error("a frame of unknown type {0:?}")]
    UnknownType(FrameType),
    /// Its type does not belong on this connection.
    #[error("{kind:?} on the {purpose} connection")]
    WrongConnection {
        /// Its type.
        kind: FrameType,
        /// The connection.
        purpose: ConnectionPurpose,
    },
    /// A frame is missing or duplicated.
    #[error("frame number {found} instead of {expected}")]
    WrongFrameNumber {
        /// The expected number.
        expected: u32,
        /// The number of the frame.
        found: u32,
    },
    /// Its body is longer than its type allows, or than was negotiated.
    #[error("{kind:?} with a body of {bytes} bytes; {limit} is the most")]
    TooLong {
        /// Its type.
        kind: FrameType,
        /// Length of its body in bytes.
        bytes: u64,
        /// The most, in bytes.
        limit: u64,
    },
    /// The length of its body contradicts its header.
    #[error("{kind:?} with a body of {bytes} bytes, which does not fit its header")]
    Length {
        /// Its type.
        kind: FrameType,
        /// Length of its body in bytes.
        bytes: u64,
    },
    /// The body is damaged.
    #[error("{0:?} with a damaged body")]
    BodyChecksum(FrameType),
    /// A reserved bit is set.
    #[error("{0:?} with a reserved field that is not zero")]
    ReservedNotZero(FrameType),
    /// A field has an invalid value.
    #[error("{0:?} with an invalid {1}")]
    InvalidField(FrameType, &'static str),
}

/// The body of a frame.
#[derive(Clone, Debug)]
pub enum FrameBody {
    /// In ordinary memory: lists, configurations; possibly empty.
    Bytes(Vec<u8>),
    /// Payload, in pool memory.
    Data(Bufs),
}

impl FrameBody {
    const EMPTY: Self = Self::Bytes(Vec::new());

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

    /// The payload; `None` if the body is in ordinary memory.
    fn data(self) -> Option<Bufs> {
        match self {
            Self::Bytes(bytes) => bytes.is_empty().then(Bufs::new),
            Self::Data(data) => Some(data),
        }
    }
}

/// CRC-32C over all pieces.
fn data_checksum(data: &Bufs) -> u32 {
    data.iter().fold(Crc32c::new(), |sum, piece| sum.update(piece)).value()
}

/// Bytes of padding after a body of `len` bytes.
#[must_use]
pub fn padding(len: usize) -> usize {
    len.wrapping_neg() % ALIGN_BYTES
}

/// Checks that the padding is zero.
///
/// # Errors
/// [`FrameError::ReservedNotZero`].
pub fn check_padding(kind: FrameType, bytes: &[u8]) -> Result<(), FrameError> {
    if bytes.iter().all(|&b| b == 0) { Ok(()) } else { Err(FrameError::ReservedNotZero(kind)) }
}

/// The negotiated parameters of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionParams {
    /// The purpose of the connection.
    pub purpose: ConnectionPurpose,
    /// Version of the protocol.
    pub version: u8,
    /// Most bytes of data in a message.
    pub max_data_bytes: u32,
}

/// Decodes the frames of the receiving side of a connection.
#[derive(Debug)]
pub struct FrameDecoder {
    params: ConnectionParams,
    number: u32,
}

/// A valid header of a frame whose body has not been received: its type, its number and its length
/// are right.
#[derive(Clone, Copy, Debug)]
pub struct FrameHead {
    header: Header,
}

/// The memory that a body needs before it is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyNeeds {
    /// Ordinary memory; none if it is empty.
    Heap,
    /// Memory of class `ReplicaWrite` for the payload and for applying it.
    Copy,
    /// Memory of class `PeerRequest`, likewise.
    Ordered,
    /// The memory posted for this request.
    Posted(u64),
}

impl FrameDecoder {
    /// A decoder for a new connection.
    #[must_use]
    pub fn new(params: ConnectionParams) -> Self {
        Self { params, number: 0 }
    }

    /// Checks the header of the next frame.
    ///
    /// # Errors
    /// [`FrameError`] for invalid bytes. The connection is over then.
    pub fn decode_header(&mut self, bytes: &[u8; HEADER_BYTES]) -> Result<FrameHead, FrameError> {
        let header = Header::parse(bytes)?;
        let Header { fields, version, frame_number, body_bytes, .. } = header;
        let ConnectionParams { purpose, max_data_bytes, .. } = self.params;
        if version != self.params.version {
            return Err(FrameError::Version(version));
        }
        if frame_number != self.number {
            return Err(FrameError::WrongFrameNumber {
                expected: self.number,
                found: frame_number,
            });
        }
        let kind = fields.kind;
        if !purpose.carries(kind.lane().ok_or(FrameError::UnknownType(kind))?, kind) {
            return Err(FrameError::WrongConnection { kind, purpose });
        }
        check_length(&fields, u64::from(body_bytes), max_data_bytes)?;
        // Wraps after 2^32 frames; a gap that large is noticed otherwise.
        self.number = self.number.wrapping_add(1);
        Ok(FrameHead { header })
    }
}

impl FrameHead {
    /// The frame's type.
    #[must_use]
    pub fn kind(&self) -> FrameType {
        self.header.fields.kind
    }

    /// The epoch of the message.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.header.fields.epoch)
    }

    /// Length of the body in bytes, without padding.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.header.body_bytes as usize
    }

    /// The memory that its body needs.
    #[must_use]
    pub fn needs(&self) -> BodyNeeds {
        match self.kind() {
            FrameType::Write => BodyNeeds::Copy,
            FrameType::WriteRequest | FrameType::CompareAndWrite => BodyNeeds::Ordered,
            FrameType::FetchResult => BodyNeeds::Posted(self.header.fields.id),
            _ => BodyNeeds::Heap,
        }
    }

    /// Decodes the message. `body` must have the length [`Self::body_bytes`], and be
    /// [`FrameBody::Data`] if pool memory was needed.
    ///
    /// # Errors
    /// [`FrameError`] for invalid bytes.
    pub fn message(self, body: FrameBody) -> Result<Message, FrameError> {
        let Header { fields, body_bytes, body_checksum, .. } = self.header;
        let kind = fields.kind;
        if body.len() as u64 != u64::from(body_bytes) {
            return Err(FrameError::Length { kind, bytes: body.len() as u64 });
        }
        if body.checksum() != body_checksum {
            return Err(FrameError::BodyChecksum(kind));
        }
        let message = parse(&fields, body)?;
        // Fields that the type does not use, and flags that it does not know, are zero.
        if self::fields(&message)? != fields {
            return Err(FrameError::ReservedNotZero(kind));
        }
        Ok(message)
    }
}

/// Encodes the frames of the sending side of a connection.
#[derive(Debug)]
pub struct FrameEncoder {
    params: ConnectionParams,
    number: u32,
}

impl FrameEncoder {
    /// An encoder for a new connection.
    #[must_use]
    pub fn new(params: ConnectionParams) -> Self {
        Self { params, number: 0 }
    }

    /// Queues the frame of `message`; its payload by reference.
    ///
    /// # Errors
    /// [`FrameError`] for a message that the peer would refuse; then nothing was queued.
    pub fn encode(&mut self, message: Message, queue: &mut SendQueue) -> Result<(), FrameError> {
        let ConnectionParams { purpose, version, max_data_bytes } = self.params;
        let fields = fields(&message)?;
        if !purpose.carries(message.lane(), fields.kind) {
            return Err(FrameError::WrongConnection { kind: fields.kind, purpose });
        }
        let body = body(message)?;
        let bytes = body.len();
        check_length(&fields, bytes as u64, max_data_bytes)?;
        let header = Header {
            fields,
            version,
            frame_number: self.number,
            body_bytes: u32::try_from(bytes).expect("checked against limits far below that"),
            body_checksum: body.checksum(),
        };
        queue.push_bytes(&header.to_bytes());
        match body {
            FrameBody::Bytes(bytes) => queue.push_vec(bytes),
            FrameBody::Data(data) => queue.push_data(&data),
        }
        queue.push_bytes(&[0; ALIGN_BYTES][..padding(bytes)]);
        self.number = self.number.wrapping_add(1);
        Ok(())
    }
}

impl FrameType {
    /// The lane of messages of this type; `None` for unknown types and handshake types.
    fn lane(self) -> Option<Lane> {
        match self {
            Self::Write | Self::FetchResult => Some(Lane::Replication),
            Self::WriteRequest | Self::CompareAndWrite | Self::Join => Some(Lane::Requests),
            Self::Hello | Self::Proof | Self::Ready | Self::Refused => None,
            Self(2..=5 | 7..=8 | 10..=11 | 16..=25 | 27..=44) => Some(Lane::Control),
            _ => None,
        }
    }
}

/// Checks the length of a body against `fields` and the limit of its type.
fn check_length(fields: &HeaderFields, bytes: u64, max_data_bytes: u32) -> Result<(), FrameError> {
    let kind = fields.kind;
    let (blocks, data) = (u64::from(fields.blocks), u64::from(max_data_bytes));
    let list = |item: usize, max_items: usize| (blocks * item as u64, (item * max_items) as u64);
    let failed = fields.status != 0;
    let (exact, limit) = match kind {
        FrameType::ReplicaReport => {
            (lease::REPLICA_REPORT_BYTES as u64, lease::REPLICA_REPORT_BYTES as u64)
        }
        FrameType::StartViewChange => (bytes, MAX_CONFIG_BYTES as u64),
        FrameType::DoViewChange => list(list::ENTRY_BYTES, MAX_ENTRIES),
        FrameType::StartView => list(list::WRITE_ID_BYTES, MAX_WRITE_IDS),
        FrameType::Commit => list(list::SEQ_BYTES, MAX_SEQS),
        FrameType::ClearRegions | FrameType::IdleDirtyRegions => {
            list(list::REGION_BYTES, MAX_REGIONS)
        }
        FrameType::NoSpaceReport if !failed => list(list::REGION_BYTES, MAX_REGIONS),
        FrameType::Join => (bytes, (lease::PEER_GENERATIONS_BYTES + MAX_DIRTY_BITS_BYTES) as u64),
        FrameType::JoinAccepted => list(join::IMAGE_GENERATION_BYTES, MAX_GENERATIONS),
        FrameType::DigestResult if !failed => {
            (fetch::DIGEST_BYTES as u64, fetch::DIGEST_BYTES as u64)
        }
        FrameType::FetchResult if !failed => (bytes, data),
        FrameType::WriteRequest | FrameType::Write if !fields.has_flag(FLAG_ZERO) => {
            (exact_if_divisible(bytes, blocks), data)
        }
        FrameType::CompareAndWrite => {
            (exact_if_divisible(bytes, blocks.saturating_mul(2)), 2 * data)
        }
        _ => (0, 0),
    };
    match bytes {
        _ if bytes > limit => Err(FrameError::TooLong { kind, bytes, limit }),
        _ if bytes != exact => Err(FrameError::Length { kind, bytes }),
        _ => Ok(()),
    }
}

/// `bytes` if that is positive and divides into `parts` equal parts; otherwise another number.
fn exact_if_divisible(bytes: u64, parts: u64) -> u64 {
    if bytes > 0 && parts > 0 && bytes.is_multiple_of(parts) { bytes } else { !bytes }
}

/// The header fields of a message.
#[expect(clippy::too_many_lines, reason = "one arm for each message")]
fn fields(message: &Message) -> Result<HeaderFields, FrameError> {
    use Message as M;
    Ok(match message {
        M::ReplicaReport(report) => lease::replica_report(report),
        M::LeaseRequest { epoch, incarnation, stamp } => {
            lease::lease_message(FrameType::LeaseRequest, *epoch, *incarnation, *stamp)
        }
        M::LeaseGrant { epoch, incarnation, stamp } => {
            lease::lease_message(FrameType::LeaseGrant, *epoch, *incarnation, *stamp)
        }
        M::NewerEpoch { epoch } => lease::newer_epoch(*epoch),
        M::RevokeLease { view, incarnation } => {
            lease::lease_revocation(FrameType::RevokeLease, *view, *incarnation)
        }
        M::LeaseRevoked { view, incarnation } => {
            lease::lease_revocation(FrameType::LeaseRevoked, *view, *incarnation)
        }
        M::StartViewChange { view, .. } => view_change::start_view_change(*view),
        M::DoViewChange { view, entries } => view_change::do_view_change(*view, entries.len()),
        M::StartView { view, last_seq, committed } => {
            view_change::start_view(*view, *last_seq, committed.len())
        }
        M::Rejoin { view } => view_change::rejoin(*view),
        M::WriteRequest { view, number, stamp, op } => {
            write::write_request(*view, *number, *stamp, op)?
        }
        M::OpAssigned { view, number, seq } => write::op_assigned(*view, *number, *seq),
        M::PeersApplied { view, number } => {
            write::number_message(FrameType::PeersApplied, *view, *number)
        }
        M::RetryRequest { view, number } => {
            write::number_message(FrameType::RetryRequest, *view, *number)
        }
        M::Write { view, seq, write_id, is_copy, op } => {
            write::write(*view, *seq, *write_id, *is_copy, op)?
        }
        M::Applied { view, seq } => write::number_message(FrameType::Applied, *view, seq.0),
        M::Commit { view, seqs } => write::commit(*view, seqs.len()),
        M::NoSpace { view, seq } => write::number_message(FrameType::NoSpace, *view, seq.0),
        M::NoSpaceQuery { view, request, seq } => write::no_space_query(*view, *request, *seq),
        M::NoSpaceReport { view, request, free_bytes, zero_blocks } => {
            write::no_space_report(*view, *request, *free_bytes, zero_blocks)
        }
        M::RequestCommit { view, seq } => {
            write::number_message(FrameType::RequestCommit, *view, seq.0)
        }
        M::CompareAndWrite { view, number, stamp, range, fua, .. } => {
            write::compare_and_write(*view, *number, *stamp, *range, *fua)?
        }
        M::CompareAndWriteResult { view, number, outcome } => {
            write::compare_and_write_result(*view, *number, *outcome)
        }
        M::Flush { view, request, generation } => flush::flush(*view, *request, *generation),
        M::Flushed { view, request } => write::number_message(FrameType::Flushed, *view, *request),
        M::Fetch { view, request, range } => {
            fetch::range_request(FrameType::Fetch, *view, *request, *range)?
        }
        M::FetchResult { view, request, result } => fetch::range_result(
            FrameType::FetchResult,
            *view,
            *request,
            result.as_ref().err().copied(),
        ),
        M::RepairRange { view, range } => {
            fetch::range_request(FrameType::RepairRange, *view, 0, *range)?
        }
        M::Join { incarnation, epoch, volume_bytes, region_shift, .. } => {
            join::join(*incarnation, *epoch, *volume_bytes, *region_shift)
        }
        M::JoinAccepted { view, incarnation, generations } => {
            join::join_accepted(*view, *incarnation, generations.len())
        }
        M::JoinAborted { incarnation } => join::join_aborted(*incarnation),
        M::ClearRegions { view, request, regions } => {
            flush::clear_regions(*view, *request, regions.len())
        }
        M::IdleDirtyRegions { view, regions } => flush::idle_dirty_regions(*view, regions.len()),
        M::PeerUnreachable { view, node } => flush::peer_unreachable(*view, *node),
        M::Digest { view, request, range } => {
            fetch::range_request(FrameType::Digest, *view, *request, *range)?
        }
        M::DigestResult { view, request, result } => {
            fetch::range_result(FrameType::DigestResult, *view, *request, result.err())
        }
    })
}

/// The body of a message.
fn body(message: Message) -> Result<FrameBody, FrameError> {
    use Message as M;
    Ok(match message {
        M::ReplicaReport(report) => lease::replica_report_body(&report),
        M::StartViewChange { config, .. } => FrameBody::Bytes(config),
        M::DoViewChange { entries, .. } => list::entries(&entries)?,
        M::StartView { committed, .. } => list::write_ids(&committed),
        M::Commit { seqs, .. } => list::seqs(&seqs),
        M::ClearRegions { regions, .. } | M::IdleDirtyRegions { regions, .. } => {
            list::regions(&regions)
        }
        M::NoSpaceReport { zero_blocks, .. } => {
            zero_blocks.map_or(FrameBody::EMPTY, |zero_blocks| list::regions(&zero_blocks))
        }
        M::Join { generations, dirty_bits, .. } => join::join_body(&generations, &dirty_bits),
        M::JoinAccepted { generations, .. } => join::join_accepted_body(&generations),
        M::DigestResult { result, .. } => fetch::digest_body(&result),
        M::WriteRequest { op, .. } | M::Write { op, .. } => FrameBody::Data(op.data),
        M::CompareAndWrite { data, .. } => FrameBody::Data(data),
        M::FetchResult { result, .. } => result.map_or(FrameBody::EMPTY, FrameBody::Data),
        M::LeaseRequest { .. }
        | M::LeaseGrant { .. }
        | M::NewerEpoch { .. }
        | M::RevokeLease { .. }
        | M::LeaseRevoked { .. }
        | M::Rejoin { .. }
        | M::OpAssigned { .. }
        | M::PeersApplied { .. }
        | M::RetryRequest { .. }
        | M::Applied { .. }
        | M::NoSpace { .. }
        | M::NoSpaceQuery { .. }
        | M::RequestCommit { .. }
        | M::CompareAndWriteResult { .. }
        | M::Flush { .. }
        | M::Flushed { .. }
        | M::Fetch { .. }
        | M::RepairRange { .. }
        | M::JoinAborted { .. }
        | M::PeerUnreachable { .. }
        | M::Digest { .. } => FrameBody::EMPTY,
    })
}

/// Decodes a message from the fields of its header and its body.
fn parse(fields: &HeaderFields, body: FrameBody) -> Result<Message, FrameError> {
    if matches!(
        fields.kind,
        FrameType::WriteRequest
            | FrameType::Write
            | FrameType::CompareAndWrite
            | FrameType::FetchResult
    ) {
        let data = body.data().ok_or(fields.invalid("body"))?;
        return match fields.kind {
            FrameType::WriteRequest => write::parse_write_request(fields, data),
            FrameType::Write => write::parse_write(fields, data),
            FrameType::CompareAndWrite => write::parse_compare_and_write(fields, data),
            _ => fetch::parse_fetch_result(fields, data),
        };
    }
    let body = body.bytes();
    let (view, id) = (fields.view(), fields.id);
    Ok(match fields.kind {
        FrameType::ReplicaReport => lease::parse_replica_report(fields, &body)?,
        FrameType::LeaseRequest => lease::parse_lease_request(fields),
        FrameType::LeaseGrant => lease::parse_lease_grant(fields),
        FrameType::NewerEpoch => lease::parse_newer_epoch(fields),
        FrameType::RevokeLease => lease::parse_revoke_lease(fields),
        FrameType::LeaseRevoked => lease::parse_lease_revoked(fields),
        FrameType::StartViewChange => view_change::parse_start_view_change(fields, body),
        FrameType::DoViewChange => view_change::parse_do_view_change(fields, &body)?,
        FrameType::StartView => view_change::parse_start_view(fields, &body)?,
        FrameType::Rejoin => view_change::parse_rejoin(fields),
        FrameType::OpAssigned => write::parse_op_assigned(fields),
        FrameType::PeersApplied => Message::PeersApplied { view, number: id },
        FrameType::RetryRequest => Message::RetryRequest { view, number: id },
        FrameType::Applied => Message::Applied { view, seq: crate::Seq(id) },
        FrameType::Commit => write::parse_commit(fields, &body)?,
        FrameType::NoSpace => Message::NoSpace { view, seq: crate::Seq(id) },
        FrameType::NoSpaceQuery => write::parse_no_space_query(fields),
        FrameType::NoSpaceReport => write::parse_no_space_report(fields, &body)?,
        FrameType::RequestCommit => Message::RequestCommit { view, seq: crate::Seq(id) },
        FrameType::CompareAndWriteResult => write::parse_compare_and_write_result(fields)?,
        FrameType::Flush => flush::parse_flush(fields),
        FrameType::Flushed => Message::Flushed { view, request: id },
        FrameType::Fetch => fetch::parse_fetch(fields)?,
        FrameType::RepairRange => fetch::parse_repair(fields)?,
        FrameType::Join => join::parse_join(fields, &body)?,
        FrameType::JoinAccepted => join::parse_join_accepted(fields, &body)?,
        FrameType::JoinAborted => join::parse_join_aborted(fields),
        FrameType::ClearRegions => flush::parse_clear_regions(fields, &body)?,
        FrameType::IdleDirtyRegions => flush::parse_idle_dirty_regions(fields, &body)?,
        FrameType::PeerUnreachable => flush::parse_peer_unreachable(fields),
        FrameType::Digest => fetch::parse_digest(fields)?,
        FrameType::DigestResult => fetch::parse_digest_result(fields, &body)?,
        kind => return Err(FrameError::UnknownType(kind)),
    })
}

//! The header of a frame (RFD 0010, 8.3). Little-endian.
//!
//! ```text
//!  byte   0         2         3        4                  8              12              16
//!       +---------+---------+--------+------------------+--------------+---------------+
//!       | "WP"    | version | type   | header checksum  | body length  | body checksum |
//!  16   +---------+---------+--------+------------------+--------------+---------------+
//!       | epoch                               | round            | frame number         |
//!  32   +-------------------------------------+------------------+----------------------+
//!       | id                                  | lba                                     |
//!  48   +-------------------------------------+------------------+------+-------+--------+
//!       | second                              | blocks           | node | flags | status |
//!       +-------------------------------------+------------------+------+-------+--------+
//! ```

use block::{Blocks, Epoch, Error, Lba};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::FrameError;
use crate::{View, WriteKind};

/// Length of a frame's header in bytes.
pub const HEADER_BYTES: usize = 64;

const MAGIC: [u8; 2] = *b"WP";

/// FLAGS: durable when it completes.
pub(super) const FLAG_FUA: u8 = 1;
/// FLAGS: the space may be freed.
pub(super) const FLAG_UNMAP: u8 = 2;
/// FLAGS: zeroes, no payload.
pub(super) const FLAG_ZERO: u8 = 4;
/// FLAGS: copies existing contents.
pub(super) const FLAG_COPY: u8 = 8;

wire::open_enum! {
    /// Type of a frame (RFD 0010, 8.4).
    pub enum FrameType: u8 {
        /// HELLO, first on every connection.
        Hello = 1,
        /// [`crate::Message::ReplicaReport`].
        ReplicaReport = 2,
        /// [`crate::Message::LeaseRequest`].
        LeaseRequest = 3,
        /// [`crate::Message::LeaseGrant`].
        LeaseGrant = 4,
        /// [`crate::Message::NewerEpoch`].
        NewerEpoch = 5,
        /// [`crate::Message::StartViewChange`].
        StartViewChange = 7,
        /// [`crate::Message::DoViewChange`].
        DoViewChange = 8,
        /// [`crate::Message::StartView`].
        StartView = 10,
        /// [`crate::Message::Rejoin`].
        Rejoin = 11,
        /// The sender knows the cluster secret.
        Proof = 12,
        /// The acceptor has all lanes.
        Ready = 13,
        /// The connection is refused; the status says why.
        Refused = 14,
        /// [`crate::Message::WriteRequest`].
        WriteRequest = 16,
        /// [`crate::Message::OpAssigned`].
        OpAssigned = 17,
        /// [`crate::Message::PeersApplied`].
        PeersApplied = 18,
        /// [`crate::Message::RetryRequest`].
        RetryRequest = 19,
        /// [`crate::Message::Write`].
        Write = 20,
        /// [`crate::Message::Applied`].
        Applied = 21,
        /// [`crate::Message::Commit`].
        Commit = 22,
        /// [`crate::Message::RequestCommit`].
        RequestCommit = 23,
        /// [`crate::Message::CompareAndWrite`].
        CompareAndWrite = 24,
        /// [`crate::Message::CompareAndWriteResult`].
        CompareAndWriteResult = 25,
        /// [`crate::Message::Flush`].
        Flush = 27,
        /// [`crate::Message::Flushed`].
        Flushed = 28,
        /// [`crate::Message::Fetch`].
        Fetch = 29,
        /// [`crate::Message::FetchResult`].
        FetchResult = 30,
        /// [`crate::Message::RepairRange`].
        RepairRange = 31,
        /// [`crate::Message::Join`].
        Join = 32,
        /// [`crate::Message::JoinAccepted`].
        JoinAccepted = 33,
        /// [`crate::Message::JoinAborted`].
        JoinAborted = 34,
        /// [`crate::Message::ClearRegions`].
        ClearRegions = 35,
        /// [`crate::Message::IdleDirtyRegions`].
        IdleDirtyRegions = 38,
        /// [`crate::Message::Digest`].
        Digest = 36,
        /// [`crate::Message::DigestResult`].
        DigestResult = 37,
        /// [`crate::Message::PeerUnreachable`].
        PeerUnreachable = 39,
        /// [`crate::Message::RevokeLease`].
        RevokeLease = 40,
        /// [`crate::Message::LeaseRevoked`].
        LeaseRevoked = 41,
        /// [`crate::Message::NoSpace`].
        NoSpace = 42,
        /// [`crate::Message::NoSpaceQuery`].
        NoSpaceQuery = 43,
        /// [`crate::Message::NoSpaceReport`].
        NoSpaceReport = 44,
    }
}

wire::open_enum! {
    /// The status byte: 0, or the error instead of a result.
    pub(super) enum WireStatus: u8 {
        Good = 0,
        Unreadable = 1,
        Corrupt = 2,
        Unwritable = 3,
        OutOfRange = 4,
        NoSpace = 5,
        ReadOnly = 6,
        Fenced = 7,
        Aborted = 8,
        Gone = 9,
        Miscompare = 64,
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireHeader {
    magic: [u8; 2],
    version: u8,
    kind: u8,
    checksum: U32,
    length: U32,
    body_checksum: U32,
    epoch: U64,
    round: U32,
    number: U32,
    id: U64,
    lba: U64,
    second: U64,
    blocks: U32,
    node: U16,
    flags: u8,
    status: u8,
}
const _: () = assert!(size_of::<WireHeader>() == HEADER_BYTES);

/// The fields of a header, whose meaning depends on the type; unused ones are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeaderFields {
    pub(super) kind: FrameType,
    pub(super) epoch: u64,
    pub(super) round: u32,
    pub(super) id: u64,
    pub(super) lba: u64,
    pub(super) second: u64,
    pub(super) blocks: u32,
    pub(super) node: u16,
    pub(super) flags: u8,
    pub(super) status: u8,
}

/// A header whose checksum is right.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) fields: HeaderFields,
    pub(super) version: u8,
    pub(super) frame_number: u32,
    pub(super) body_bytes: u32,
    pub(super) body_checksum: u32,
}

impl Header {
    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let Self { fields, version, frame_number, body_bytes, body_checksum } = self;
        let mut raw = WireHeader {
            magic: MAGIC,
            version,
            kind: fields.kind.0,
            checksum: U32::ZERO,
            length: U32::new(body_bytes),
            body_checksum: U32::new(body_checksum),
            epoch: U64::new(fields.epoch),
            round: U32::new(fields.round),
            number: U32::new(frame_number),
            id: U64::new(fields.id),
            lba: U64::new(fields.lba),
            second: U64::new(fields.second),
            blocks: U32::new(fields.blocks),
            node: U16::new(fields.node),
            flags: fields.flags,
            status: fields.status,
        };
        raw.checksum = U32::new(wire::crc32c(raw.as_bytes()));
        zerocopy::transmute!(raw)
    }

    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let mut raw: WireHeader = zerocopy::transmute!(*bytes);
        if raw.magic != MAGIC {
            return Err(FrameError::NoMagic);
        }
        let checksum = std::mem::take(&mut raw.checksum);
        if checksum.get() != wire::crc32c(raw.as_bytes()) {
            return Err(FrameError::HeaderChecksum);
        }
        let fields = HeaderFields {
            kind: FrameType(raw.kind),
            epoch: raw.epoch.get(),
            round: raw.round.get(),
            id: raw.id.get(),
            lba: raw.lba.get(),
            second: raw.second.get(),
            blocks: raw.blocks.get(),
            node: raw.node.get(),
            flags: raw.flags,
            status: raw.status,
        };
        Ok(Self {
            fields,
            version: raw.version,
            frame_number: raw.number.get(),
            body_bytes: raw.length.get(),
            body_checksum: raw.body_checksum.get(),
        })
    }
}

impl HeaderFields {
    pub(super) fn new(kind: FrameType) -> Self {
        Self {
            kind,
            epoch: 0,
            round: 0,
            id: 0,
            lba: 0,
            second: 0,
            blocks: 0,
            node: 0,
            flags: 0,
            status: 0,
        }
    }

    pub(super) fn with_epoch(kind: FrameType, epoch: Epoch) -> Self {
        Self { epoch: epoch.0, ..Self::new(kind) }
    }

    pub(super) fn with_view(kind: FrameType, view: View) -> Self {
        Self { epoch: view.epoch.0, round: view.round, ..Self::new(kind) }
    }

    pub(super) fn view(&self) -> View {
        View { epoch: Epoch(self.epoch), round: self.round }
    }

    pub(super) fn with_id(self, id: u64) -> Self {
        Self { id, ..self }
    }

    pub(super) fn with_second(self, second: u64) -> Self {
        Self { second, ..self }
    }

    /// Sets the number of items in the body; a count that does not fit contradicts the length of
    /// the body.
    pub(super) fn with_count(self, count: usize) -> Self {
        Self { blocks: u32::try_from(count).unwrap_or(u32::MAX), ..self }
    }

    pub(super) fn with_range(self, range: Blocks) -> Result<Self, FrameError> {
        let blocks = u32::try_from(range.count).map_err(|_| self.invalid("range"))?;
        let fields = Self { lba: range.at.0, blocks, ..self };
        fields.range().map(|_| fields)
    }

    pub(super) fn range(&self) -> Result<Blocks, FrameError> {
        let range = Blocks::new(Lba(self.lba), u64::from(self.blocks));
        match range.end() {
            Some(_) if range.count > 0 => Ok(range),
            _ => Err(self.invalid("range")),
        }
    }

    pub(super) fn with_flag(self, flag: u8, is_set: bool) -> Self {
        Self { flags: self.flags | if is_set { flag } else { 0 }, ..self }
    }

    pub(super) fn has_flag(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn with_kind(self, kind: WriteKind) -> Self {
        match kind {
            WriteKind::Data => self,
            WriteKind::Zero { unmap } => {
                self.with_flag(FLAG_ZERO, true).with_flag(FLAG_UNMAP, unmap)
            }
        }
    }

    /// A stray unmap flag is detected when the fields are compared with those of the decoded
    /// message.
    pub(super) fn write_kind(&self) -> WriteKind {
        if self.has_flag(FLAG_ZERO) {
            WriteKind::Zero { unmap: self.has_flag(FLAG_UNMAP) }
        } else {
            WriteKind::Data
        }
    }

    pub(super) fn with_error(self, error: Error) -> Self {
        let (status, at) = match error {
            Error::Unreadable { at } => (WireStatus::Unreadable, at),
            Error::Corrupt { at } => (WireStatus::Corrupt, at),
            Error::Unwritable { at } => (WireStatus::Unwritable, at),
            Error::OutOfRange => (WireStatus::OutOfRange, Lba(0)),
            Error::NoSpace => (WireStatus::NoSpace, Lba(0)),
            Error::ReadOnly => (WireStatus::ReadOnly, Lba(0)),
            Error::Fenced => (WireStatus::Fenced, Lba(0)),
            Error::Aborted => (WireStatus::Aborted, Lba(0)),
            Error::Gone => (WireStatus::Gone, Lba(0)),
        };
        Self { status: status.0, lba: at.0, ..self }
    }

    /// The error in the status; `None` for success.
    pub(super) fn error(&self) -> Result<Option<Error>, FrameError> {
        let at = Lba(self.lba);
        Ok(Some(match WireStatus(self.status) {
            WireStatus::Good => return Ok(None),
            WireStatus::Unreadable => Error::Unreadable { at },
            WireStatus::Corrupt => Error::Corrupt { at },
            WireStatus::Unwritable => Error::Unwritable { at },
            WireStatus::OutOfRange => Error::OutOfRange,
            WireStatus::NoSpace => Error::NoSpace,
            WireStatus::ReadOnly => Error::ReadOnly,
            WireStatus::Fenced => Error::Fenced,
            WireStatus::Aborted => Error::Aborted,
            WireStatus::Gone => Error::Gone,
            _ => return Err(self.invalid("status")),
        }))
    }

    pub(super) fn invalid(&self, what: &'static str) -> FrameError {
        FrameError::InvalidField(self.kind, what)
    }
}

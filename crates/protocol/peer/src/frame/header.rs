//! The header that every frame begins with (RFD 0010, 8.3). Little-endian.
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

use super::Bad;
use crate::{Kind, View};

/// Length of a frame's header in bytes.
pub const HEADER_BYTES: usize = 64;

const MAGIC: [u8; 2] = *b"WP";

/// FLAGS: durable when it completes.
pub(super) const FUA: u8 = 1;
/// FLAGS: the space may be freed.
pub(super) const UNMAP: u8 = 2;
/// FLAGS: zeroes, no data.
pub(super) const ZERO: u8 = 4;
/// FLAGS: copies contents.
pub(super) const COPY: u8 = 8;

wire::open_enum! {
    /// Type of a frame (RFD 0010, 8.4).
    pub enum Type: u8 {
        /// Who one is, first on every connection.
        Hello = 1,
        /// [`crate::Message::Standing`].
        Standing = 2,
        /// [`crate::Message::Renew`].
        Renew = 3,
        /// [`crate::Message::Promise`].
        Promise = 4,
        /// [`crate::Message::Newer`].
        Newer = 5,
        /// [`crate::Message::Start`].
        Start = 7,
        /// [`crate::Message::Started`].
        Started = 8,
        /// [`crate::Message::Open`].
        Open = 10,
        /// [`crate::Message::Rejoin`].
        Rejoin = 11,
        /// That one knows the cluster's secret.
        Proof = 12,
        /// The acceptor has all lanes.
        Ready = 13,
        /// The other one is not wanted, and why.
        Refused = 14,
        /// [`crate::Message::Order`].
        Order = 16,
        /// [`crate::Message::Grant`].
        Grant = 17,
        /// [`crate::Message::Done`].
        Done = 18,
        /// [`crate::Message::Late`].
        Late = 19,
        /// [`crate::Message::Write`].
        Write = 20,
        /// [`crate::Message::Applied`].
        Applied = 21,
        /// [`crate::Message::Commit`].
        Commit = 22,
        /// [`crate::Message::Want`].
        Want = 23,
        /// [`crate::Message::Forward`].
        Forward = 24,
        /// [`crate::Message::Outcome`].
        Outcome = 25,
        /// [`crate::Message::Flush`].
        Flush = 27,
        /// [`crate::Message::Flushed`].
        Flushed = 28,
        /// [`crate::Message::Fetch`].
        Fetch = 29,
        /// [`crate::Message::Data`].
        Data = 30,
        /// [`crate::Message::Repair`].
        Repair = 31,
        /// [`crate::Message::Join`].
        Join = 32,
        /// [`crate::Message::Accept`].
        Accept = 33,
        /// [`crate::Message::Detached`].
        Detached = 34,
        /// [`crate::Message::Clear`].
        Clear = 35,
        /// [`crate::Message::Marked`].
        Marked = 38,
        /// [`crate::Message::Sum`].
        Sum = 36,
        /// [`crate::Message::Summed`].
        Summed = 37,
        /// [`crate::Message::Unreachable`].
        Unreachable = 39,
        /// [`crate::Message::Yield`].
        Yield = 40,
        /// [`crate::Message::Yielded`].
        Yielded = 41,
        /// [`crate::Message::NoSpace`].
        NoSpace = 42,
        /// [`crate::Message::Assess`].
        Assess = 43,
        /// [`crate::Message::Assessed`].
        Assessed = 44,
    }
}

wire::open_enum! {
    /// The status byte: 0, or what became of it instead.
    pub(super) enum Status: u8 {
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
struct Stored {
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
const _: () = assert!(size_of::<Stored>() == HEADER_BYTES);

/// What the fields mean is each type's own affair; those that a type does not use are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fields {
    pub(super) kind: Type,
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

/// A header that is whole: its checksum fits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) fields: Fields,
    pub(super) version: u8,
    pub(super) number: u32,
    pub(super) length: u32,
    pub(super) body_checksum: u32,
}

impl Header {
    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let Self { fields, version, number, length, body_checksum } = self;
        let mut stored = Stored {
            magic: MAGIC,
            version,
            kind: fields.kind.0,
            checksum: U32::ZERO,
            length: U32::new(length),
            body_checksum: U32::new(body_checksum),
            epoch: U64::new(fields.epoch),
            round: U32::new(fields.round),
            number: U32::new(number),
            id: U64::new(fields.id),
            lba: U64::new(fields.lba),
            second: U64::new(fields.second),
            blocks: U32::new(fields.blocks),
            node: U16::new(fields.node),
            flags: fields.flags,
            status: fields.status,
        };
        stored.checksum = U32::new(wire::crc32c(stored.as_bytes()));
        zerocopy::transmute!(stored)
    }

    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Bad> {
        let mut stored: Stored = zerocopy::transmute!(*bytes);
        if stored.magic != MAGIC {
            return Err(Bad::NoMagic);
        }
        let checksum = std::mem::take(&mut stored.checksum);
        if checksum.get() != wire::crc32c(stored.as_bytes()) {
            return Err(Bad::HeaderChecksum);
        }
        let fields = Fields {
            kind: Type(stored.kind),
            epoch: stored.epoch.get(),
            round: stored.round.get(),
            id: stored.id.get(),
            lba: stored.lba.get(),
            second: stored.second.get(),
            blocks: stored.blocks.get(),
            node: stored.node.get(),
            flags: stored.flags,
            status: stored.status,
        };
        Ok(Self {
            fields,
            version: stored.version,
            number: stored.number.get(),
            length: stored.length.get(),
            body_checksum: stored.body_checksum.get(),
        })
    }
}

impl Fields {
    pub(super) fn new(kind: Type) -> Self {
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

    pub(super) fn of_epoch(kind: Type, epoch: Epoch) -> Self {
        Self { epoch: epoch.0, ..Self::new(kind) }
    }

    pub(super) fn of_view(kind: Type, view: View) -> Self {
        Self { epoch: view.epoch.0, round: view.round, ..Self::new(kind) }
    }

    pub(super) fn view(&self) -> View {
        View { epoch: Epoch(self.epoch), round: self.round }
    }

    pub(super) fn id(self, id: u64) -> Self {
        Self { id, ..self }
    }

    pub(super) fn second(self, second: u64) -> Self {
        Self { second, ..self }
    }

    /// How many of something follow; more than any number allows is refused by the body's length.
    pub(super) fn count(self, count: usize) -> Self {
        Self { blocks: u32::try_from(count).unwrap_or(u32::MAX), ..self }
    }

    pub(super) fn with_range(self, range: Blocks) -> Result<Self, Bad> {
        let blocks = u32::try_from(range.count).map_err(|_| self.bad("range"))?;
        let fields = Self { lba: range.at.0, blocks, ..self };
        fields.range().map(|_| fields)
    }

    pub(super) fn range(&self) -> Result<Blocks, Bad> {
        let range = Blocks::new(Lba(self.lba), u64::from(self.blocks));
        match range.end() {
            Some(_) if range.count > 0 => Ok(range),
            _ => Err(self.bad("range")),
        }
    }

    pub(super) fn with_flag(self, flag: u8, set: bool) -> Self {
        Self { flags: self.flags | if set { flag } else { 0 }, ..self }
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn with_kind(self, kind: Kind) -> Self {
        match kind {
            Kind::Write => self,
            Kind::Zero { unmap } => self.with_flag(ZERO, true).with_flag(UNMAP, unmap),
        }
    }

    /// A stray unmap flag is found when the fields are compared with those of the message.
    pub(super) fn change_kind(&self) -> Kind {
        if self.has(ZERO) { Kind::Zero { unmap: self.has(UNMAP) } } else { Kind::Write }
    }

    pub(super) fn with_error(self, error: Error) -> Self {
        let (status, at) = match error {
            Error::Unreadable { at } => (Status::Unreadable, at),
            Error::Corrupt { at } => (Status::Corrupt, at),
            Error::Unwritable { at } => (Status::Unwritable, at),
            Error::OutOfRange => (Status::OutOfRange, Lba(0)),
            Error::NoSpace => (Status::NoSpace, Lba(0)),
            Error::ReadOnly => (Status::ReadOnly, Lba(0)),
            Error::Fenced => (Status::Fenced, Lba(0)),
            Error::Aborted => (Status::Aborted, Lba(0)),
            Error::Gone => (Status::Gone, Lba(0)),
        };
        Self { status: status.0, lba: at.0, ..self }
    }

    /// The error that the status stands for; `None` for success.
    pub(super) fn error(&self) -> Result<Option<Error>, Bad> {
        let at = Lba(self.lba);
        Ok(Some(match Status(self.status) {
            Status::Good => return Ok(None),
            Status::Unreadable => Error::Unreadable { at },
            Status::Corrupt => Error::Corrupt { at },
            Status::Unwritable => Error::Unwritable { at },
            Status::OutOfRange => Error::OutOfRange,
            Status::NoSpace => Error::NoSpace,
            Status::ReadOnly => Error::ReadOnly,
            Status::Fenced => Error::Fenced,
            Status::Aborted => Error::Aborted,
            Status::Gone => Error::Gone,
            _ => return Err(self.bad("status")),
        }))
    }

    pub(super) fn bad(&self, what: &'static str) -> Bad {
        Bad::Field(self.kind, what)
    }
}

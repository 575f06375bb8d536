//! The label of a flat image or device: one record, kept twice, outside the data.
//!
//! The layout is that of `docs/format/label.md`; [`Label::parse`] is total.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use block::ASIDE_BYTES;
use uuid::Uuid;
use wire::seal::{is_sealed, seal};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Length in bytes of a label, and of the reserved area of each copy.
pub const LABEL_BYTES: usize = 4096;

/// Where the two copies are, in bytes from the start.
pub const SLOTS: [u64; 2] = [0, 512 << 10];

/// Where data begins in new images: everything before is for labels.
pub const DATA_OFFSET: u64 = 1 << 20;

/// How much larger than its volume a new image is, in bytes.
pub const LABEL_AREA_BYTES: u64 = DATA_OFFSET;

/// Largest volume in bytes: 256 TiB.
pub const MAX_BYTES: u64 = 256 << 40;

/// Carriage return and line feed show transfers that took it for text.
const MAGIC: [u8; 16] = *b"WINDROSE LABEL\r\n";

/// The only version so far.
const VERSION: u16 = 1;

/// The bytes of an image in which its intent log lies, if it has one: behind the second label.
pub const LOG_AREA: Range<u64> = 516 << 10..936 << 10;
const _: () = assert!(LOG_AREA.start == SLOTS[1] + LABEL_BYTES as u64);

/// Where the blocks beside the volume lie, in bytes from the start: behind the log.
pub const ASIDE_OFFSET: u64 = LOG_AREA.end;
const _: () = assert!(ASIDE_OFFSET + ASIDE_BYTES as u64 == DATA_OFFSET);

/// Required feature: the image has an intent log, and nobody changes its data but through that.
const INTENT_LOG: u32 = 1;

/// Everything that readers must know to use an image with such a flag.
const KNOWN_REQUIRED: u32 = INTENT_LOG;

wire::open_enum! {
    /// Where an image is in its life, as stored.
    enum StoredState: u8 {
        Creating = 1,
        Active = 2,
    }
}

wire::open_enum! {
    /// How space is put behind an image, as stored.
    enum StoredProvisioning: u8 {
        Thin = 1,
        Full = 2,
    }
}

/// The fields in their places; the rest of the label is zeroes.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Stored {
    magic: [u8; 16],
    version: U16,
    slot: U16,
    length: U32,
    checksum: U32,
    reserved_a: U32,
    generation: U64,
    required: U32,
    optional: U32,
    volume: [u8; 16],
    image: [u8; 16],
    block_size: U32,
    state: u8,
    provisioning: u8,
    reserved_b: [u8; 2],
    data_offset: U64,
    data_bytes: U64,
    created_ns: U64,
}

const FIELDS: usize = 112;
const _: () = assert!(size_of::<Stored>() == FIELDS);
const CHECKSUM_AT: usize = std::mem::offset_of!(Stored, checksum);

/// Where an image is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its creation has begun: it holds nothing.
    Creating,
    /// In use.
    Active,
}

/// How space is put behind an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provisioning {
    /// When it is first written; unmapping gives it back.
    Thin,
    /// All of it at creation, and it stays.
    Full,
}

/// What a label says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Counts the changes of the label.
    pub generation: u64,
    /// Whether the image has an intent log, in [`LOG_AREA`].
    pub intent_log: bool,
    /// Flags that readers may ignore, kept as they are.
    pub optional: u32,
    /// The volume whose data this is.
    pub volume: Uuid,
    /// This image: copies of one volume differ in it.
    pub image: Uuid,
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Where it is in its life.
    pub state: State,
    /// How space is put behind it.
    pub provisioning: Provisioning,
    /// Where the data begins, in bytes.
    pub data_offset: u64,
    /// How much data there is, in bytes.
    pub data_bytes: u64,
    /// When it was created, since the Unix epoch.
    pub created: Duration,
}

/// Why bytes are not a usable label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadLabel {
    /// They do not begin like one.
    #[error("no label")]
    NoMagic,
    /// They begin like one and the checksum does not fit: torn or damaged.
    #[error("a damaged label")]
    Damaged,
    /// A newer version's.
    #[error("a label of version {0}, which this release does not know")]
    Version(u16),
    /// It has features without which it cannot be used.
    #[error("a label with features ({0:#x}) that this release does not know")]
    Features(u32),
    /// The checksum fits and a field makes no sense.
    #[error("a label whose {0} makes no sense")]
    Field(&'static str),
}

impl fmt::Display for Provisioning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Thin => "thin",
            Self::Full => "full",
        })
    }
}

impl Label {
    /// The label's bytes for copy number `slot`.
    #[must_use]
    pub fn to_bytes(&self, slot: u16) -> [u8; LABEL_BYTES] {
        let state = match self.state {
            State::Creating => StoredState::Creating,
            State::Active => StoredState::Active,
        };
        let provisioning = match self.provisioning {
            Provisioning::Thin => StoredProvisioning::Thin,
            Provisioning::Full => StoredProvisioning::Full,
        };
        let fields = Stored {
            magic: MAGIC,
            version: U16::new(VERSION),
            slot: U16::new(slot),
            length: U32::new(LABEL_BYTES as u32),
            checksum: U32::ZERO,
            reserved_a: U32::ZERO,
            generation: U64::new(self.generation),
            required: U32::new(if self.intent_log { INTENT_LOG } else { 0 }),
            optional: U32::new(self.optional),
            volume: self.volume.into_bytes(),
            image: self.image.into_bytes(),
            block_size: U32::new(self.block_size),
            state: state.0,
            provisioning: provisioning.0,
            reserved_b: [0; 2],
            data_offset: U64::new(self.data_offset),
            data_bytes: U64::new(self.data_bytes),
            // Representable until the year 2554.
            created_ns: U64::new(u64::try_from(self.created.as_nanos()).unwrap_or(u64::MAX)),
        };
        let mut out = [0; LABEL_BYTES];
        out[..FIELDS].copy_from_slice(fields.as_bytes());
        seal(&mut out, CHECKSUM_AT);
        out
    }

    /// Reads the label that copy number `slot` holds.
    ///
    /// # Errors
    /// [`BadLabel`]; whatever the bytes are.
    pub fn parse(bytes: &[u8; LABEL_BYTES], slot: u16) -> Result<Self, BadLabel> {
        let (fields, rest) =
            Stored::read_from_prefix(bytes).map_err(|_| BadLabel::Field("length"))?;
        if fields.magic != MAGIC {
            return Err(BadLabel::NoMagic);
        }
        if !is_sealed(bytes, CHECKSUM_AT) {
            return Err(BadLabel::Damaged);
        }
        if fields.version.get() != VERSION {
            return Err(BadLabel::Version(fields.version.get()));
        }
        let unknown = fields.required.get() & !KNOWN_REQUIRED;
        if unknown != 0 {
            return Err(BadLabel::Features(unknown));
        }
        let reserved = fields.reserved_a.get() == 0 && fields.reserved_b == [0; 2];
        if !reserved || rest.iter().any(|&b| b != 0) {
            return Err(BadLabel::Field("reserved part"));
        }
        // A copy in the other's place strayed there.
        if fields.slot.get() != slot {
            return Err(BadLabel::Damaged);
        }
        Self::of_fields(&fields)
    }

    fn of_fields(fields: &Stored) -> Result<Self, BadLabel> {
        let state = match StoredState(fields.state) {
            StoredState::Creating => State::Creating,
            StoredState::Active => State::Active,
            _ => return Err(BadLabel::Field("state")),
        };
        let provisioning = match StoredProvisioning(fields.provisioning) {
            StoredProvisioning::Thin => Provisioning::Thin,
            StoredProvisioning::Full => Provisioning::Full,
            _ => return Err(BadLabel::Field("provisioning")),
        };
        let label = Self {
            generation: fields.generation.get(),
            intent_log: fields.required.get() & INTENT_LOG != 0,
            optional: fields.optional.get(),
            volume: Uuid::from_bytes(fields.volume),
            image: Uuid::from_bytes(fields.image),
            block_size: fields.block_size.get(),
            state,
            provisioning,
            data_offset: fields.data_offset.get(),
            data_bytes: fields.data_bytes.get(),
            created: Duration::from_nanos(fields.created_ns.get()),
        };
        match label.nonsense() {
            Some(field) => Err(BadLabel::Field(field)),
            None if fields.length.get() as usize != LABEL_BYTES => Err(BadLabel::Field("length")),
            None => Ok(label),
        }
    }

    /// The first field that no label may have so.
    fn nonsense(&self) -> Option<&'static str> {
        let block = u64::from(self.block_size);
        let behind_labels = SLOTS[1] + LABEL_BYTES as u64;
        if !matches!(self.block_size, 512 | 4096) {
            Some("block size")
        } else if self.data_offset < behind_labels
            || self.data_offset > MAX_BYTES
            || !self.data_offset.is_multiple_of(4096)
        {
            Some("data offset")
        } else if self.intent_log && !self.has_room_for_log() {
            Some("data offset, in its intent log,")
        } else if self.data_bytes == 0
            || self.data_bytes > MAX_BYTES
            || !self.data_bytes.is_multiple_of(block)
        {
            Some("data size")
        } else if self.generation == 0 {
            Some("generation")
        } else {
            None
        }
    }

    /// Whether the data begins behind [`LOG_AREA`].
    #[must_use]
    pub fn has_room_for_log(&self) -> bool {
        self.data_offset >= LOG_AREA.end
    }

    /// Whether the data begins behind the room for what lies beside the volume.
    pub fn has_room_aside(&self) -> bool {
        self.data_offset >= ASIDE_OFFSET + u64::from(ASIDE_BYTES)
    }

    /// Size in bytes of what holds the labels and the data.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.data_offset + self.data_bytes
    }
}

#[cfg(test)]
mod tests;

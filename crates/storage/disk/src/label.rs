//! The label of a flat image: one record, kept in two copies, outside the data.
//!
//! The layout is in `docs/format/label.md`; [`ImageLabel::parse`] never panics.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use block::METADATA_BYTES;
use uuid::Uuid;
use wire::embedded_checksum::{verify_checksum, write_checksum};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Length in bytes of a label, and of the reserved area of each copy.
pub const LABEL_BYTES: usize = 4096;

/// Offsets of the two copies, in bytes.
pub const LABEL_OFFSETS: [u64; 2] = [0, 512 << 10];

/// Offset of the data in new images, in bytes; everything before is metadata.
pub const DATA_OFFSET: u64 = 1 << 20;

/// How much larger than its volume a new image is, in bytes.
pub const LABEL_AREA_BYTES: u64 = DATA_OFFSET;

/// Largest volume in bytes: 256 TiB.
pub const MAX_BYTES: u64 = 256 << 40;

/// Carriage return and line feed show transfers that took it for text.
const MAGIC: [u8; 16] = *b"WINDROSE LABEL\r\n";

/// The only version so far.
const VERSION: u16 = 1;

/// The bytes of an image for its intent log, if it has one: after the second label.
pub const LOG_AREA: Range<u64> = 516 << 10..936 << 10;
const _: () = assert!(LOG_AREA.start == LABEL_OFFSETS[1] + LABEL_BYTES as u64);

/// Offset of the [metadata blocks](block::METADATA_LBA) of a volume, in bytes: after the log.
pub const METADATA_OFFSET: u64 = LOG_AREA.end;
const _: () = assert!(METADATA_OFFSET + METADATA_BYTES as u64 == DATA_OFFSET);

/// Required feature: the image has an intent log, and its data may only be changed through that.
const FEATURE_INTENT_LOG: u32 = 1;

/// All required features that this release supports.
const SUPPORTED_REQUIRED: u32 = FEATURE_INTENT_LOG;

wire::open_enum! {
    /// The state of an image, as stored.
    enum StoredState: u8 {
        Creating = 1,
        Active = 2,
    }
}

wire::open_enum! {
    /// When space is allocated for an image, as stored.
    enum StoredProvisioning: u8 {
        Thin = 1,
        Full = 2,
    }
}

/// The fields, as stored; the rest of the label is zeroes.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredImageLabel {
    magic: [u8; 16],
    version: U16,
    copy: U16,
    length: U32,
    checksum: U32,
    reserved_a: U32,
    generation: U64,
    required_features: U32,
    optional_features: U32,
    volume: [u8; 16],
    image_id: [u8; 16],
    block_size: U32,
    state: u8,
    provisioning: u8,
    reserved_b: [u8; 2],
    data_offset: U64,
    data_bytes: U64,
    created_ns: U64,
}

const FIELD_BYTES: usize = 112;
const _: () = assert!(size_of::<StoredImageLabel>() == FIELD_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(StoredImageLabel, checksum);

/// The state of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageState {
    /// It is being created: it holds nothing.
    Creating,
    /// In use.
    Active,
}

/// When space is allocated for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provisioning {
    /// When a block is first written; unmapping frees it.
    Thin,
    /// At creation, for good.
    Thick,
}

/// The contents of a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLabel {
    /// Counts the writes of the label.
    pub generation: u64,
    /// Whether the image has an intent log, in [`LOG_AREA`].
    pub has_intent_log: bool,
    /// Features that readers may ignore; they are preserved.
    pub optional_features: u32,
    /// The volume whose data this is.
    pub volume_id: Uuid,
    /// This image's identity: copies of one volume differ in it.
    pub image_id: Uuid,
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Its state.
    pub state: ImageState,
    /// When its space is allocated.
    pub provisioning: Provisioning,
    /// Offset of the data, in bytes.
    pub data_offset: u64,
    /// How much data there is, in bytes.
    pub data_bytes: u64,
    /// When it was created, since the Unix epoch.
    pub created: Duration,
}

/// Why a label is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageLabelError {
    /// The bytes do not begin like one.
    #[error("no label")]
    NoMagic,
    /// The checksum is wrong: torn or damaged.
    #[error("a damaged label")]
    Damaged,
    /// Of a newer format version.
    #[error("a label of version {0}, which this release does not know")]
    UnsupportedVersion(u16),
    /// It requires features that this release lacks.
    #[error("a label with features ({0:#x}) that this release does not know")]
    UnsupportedFeatures(u32),
    /// The checksum is right, but a field is invalid.
    #[error("a label with an invalid {0}")]
    InvalidField(&'static str),
}

impl fmt::Display for Provisioning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Thin => "thin",
            Self::Thick => "full",
        })
    }
}

impl ImageLabel {
    /// The bytes of copy number `slot`.
    #[must_use]
    pub fn to_bytes(&self, slot: u16) -> [u8; LABEL_BYTES] {
        let state = match self.state {
            ImageState::Creating => StoredState::Creating,
            ImageState::Active => StoredState::Active,
        };
        let provisioning = match self.provisioning {
            Provisioning::Thin => StoredProvisioning::Thin,
            Provisioning::Thick => StoredProvisioning::Full,
        };
        let fields = StoredImageLabel {
            magic: MAGIC,
            version: U16::new(VERSION),
            copy: U16::new(slot),
            length: U32::new(LABEL_BYTES as u32),
            checksum: U32::ZERO,
            reserved_a: U32::ZERO,
            generation: U64::new(self.generation),
            required_features: U32::new(if self.has_intent_log { FEATURE_INTENT_LOG } else { 0 }),
            optional_features: U32::new(self.optional_features),
            volume: self.volume_id.into_bytes(),
            image_id: self.image_id.into_bytes(),
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
        out[..FIELD_BYTES].copy_from_slice(fields.as_bytes());
        write_checksum(&mut out, CHECKSUM_AT);
        out
    }

    /// Parses copy number `slot`.
    ///
    /// # Errors
    /// [`ImageLabelError`].
    pub fn parse(bytes: &[u8; LABEL_BYTES], slot: u16) -> Result<Self, ImageLabelError> {
        let (fields, rest) = StoredImageLabel::read_from_prefix(bytes)
            .map_err(|_| ImageLabelError::InvalidField("length"))?;
        if fields.magic != MAGIC {
            return Err(ImageLabelError::NoMagic);
        }
        if !verify_checksum(bytes, CHECKSUM_AT) {
            return Err(ImageLabelError::Damaged);
        }
        if fields.version.get() != VERSION {
            return Err(ImageLabelError::UnsupportedVersion(fields.version.get()));
        }
        let unknown = fields.required_features.get() & !SUPPORTED_REQUIRED;
        if unknown != 0 {
            return Err(ImageLabelError::UnsupportedFeatures(unknown));
        }
        let reserved = fields.reserved_a.get() == 0 && fields.reserved_b == [0; 2];
        if !reserved || rest.iter().any(|&b| b != 0) {
            return Err(ImageLabelError::InvalidField("reserved part"));
        }
        // The other copy was written here by mistake.
        if fields.copy.get() != slot {
            return Err(ImageLabelError::Damaged);
        }
        Self::from_stored(&fields)
    }

    fn from_stored(fields: &StoredImageLabel) -> Result<Self, ImageLabelError> {
        let state = match StoredState(fields.state) {
            StoredState::Creating => ImageState::Creating,
            StoredState::Active => ImageState::Active,
            _ => return Err(ImageLabelError::InvalidField("state")),
        };
        let provisioning = match StoredProvisioning(fields.provisioning) {
            StoredProvisioning::Thin => Provisioning::Thin,
            StoredProvisioning::Full => Provisioning::Thick,
            _ => return Err(ImageLabelError::InvalidField("provisioning")),
        };
        let label = Self {
            generation: fields.generation.get(),
            has_intent_log: fields.required_features.get() & FEATURE_INTENT_LOG != 0,
            optional_features: fields.optional_features.get(),
            volume_id: Uuid::from_bytes(fields.volume),
            image_id: Uuid::from_bytes(fields.image_id),
            block_size: fields.block_size.get(),
            state,
            provisioning,
            data_offset: fields.data_offset.get(),
            data_bytes: fields.data_bytes.get(),
            created: Duration::from_nanos(fields.created_ns.get()),
        };
        match label.first_invalid_field() {
            Some(field) => Err(ImageLabelError::InvalidField(field)),
            None if fields.length.get() as usize != LABEL_BYTES => {
                Err(ImageLabelError::InvalidField("length"))
            }
            None => Ok(label),
        }
    }

    /// The first field with an invalid value.
    fn first_invalid_field(&self) -> Option<&'static str> {
        let block = u64::from(self.block_size);
        let behind_labels = LABEL_OFFSETS[1] + LABEL_BYTES as u64;
        if !matches!(self.block_size, 512 | 4096) {
            Some("block size")
        } else if self.data_offset < behind_labels
            || self.data_offset > MAX_BYTES
            || !self.data_offset.is_multiple_of(4096)
        {
            Some("data offset")
        } else if self.has_intent_log && !self.has_log_area() {
            Some("data offset (inside its intent log)")
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

    /// Whether the data begins after [`LOG_AREA`].
    #[must_use]
    pub fn has_log_area(&self) -> bool {
        self.data_offset >= LOG_AREA.end
    }

    /// Whether the data begins after the [metadata blocks](block::METADATA_LBA).
    pub fn has_metadata_area(&self) -> bool {
        self.data_offset >= METADATA_OFFSET + u64::from(METADATA_BYTES)
    }

    /// Bytes from the start to the end of the data.
    #[must_use]
    pub fn end_offset(&self) -> u64 {
        self.data_offset + self.data_bytes
    }
}

#[cfg(test)]
mod tests;

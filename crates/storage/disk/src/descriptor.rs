//! The descriptor of a volume: a text about it that an image holds in two copies before its data
//! ([format](../../../../docs/format/descriptor.md)). If the cluster's record of the volume is
//! lost, the descriptor tells its name and who could reach it. [`Descriptor::parse`] never panics.

use rt::buf::Account;
use rt::disk::DiskError;
use uuid::Uuid;
use wire::embedded_checksum::{verify_checksum, write_checksum};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::label::LABEL_OFFSETS;
use crate::medium::Medium;
use crate::{CLAIM_COPY_OFFSET, HEARTBEAT_OFFSET, OWNER_RECORD_BYTES, PAGE};

/// Space for one copy, in bytes.
const COPY_BYTES: usize = 64 << 10;

/// Offsets of the two copies in bytes: between the labels, and beside the owner record.
pub const COPY_OFFSETS: [u64; 2] = [160 << 10, 256 << 10];
const _: () = assert!(COPY_OFFSETS[0] + COPY_BYTES as u64 <= COPY_OFFSETS[1]);
const _: () = assert!(COPY_OFFSETS[1] + COPY_BYTES as u64 <= LABEL_OFFSETS[1]);
const _: () = assert!(
    COPY_OFFSETS[0] >= HEARTBEAT_OFFSET + OWNER_RECORD_BYTES as u64
        && COPY_OFFSETS[1] + COPY_BYTES as u64 <= CLAIM_COPY_OFFSET
);

const MAGIC: [u8; 16] = *b"WINDROSE VOLUME\n";

/// The only version so far.
const VERSION: u16 = 1;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct DescriptorHeader {
    magic: [u8; 16],
    version: U16,
    copy: U16,
    length: U32,
    checksum: U32,
    reserved_a: U32,
    generation: U64,
    volume: [u8; 16],
    reserved_b: [u8; 8],
}

const HEADER_BYTES: usize = 64;
const _: () = assert!(size_of::<DescriptorHeader>() == HEADER_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(DescriptorHeader, checksum);

/// Longest text of a descriptor, in bytes.
pub const DESCRIPTOR_TEXT_MAX: usize = COPY_BYTES - HEADER_BYTES;

/// The description of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Counts the writes of the descriptor.
    pub generation: u64,
    /// The volume that it describes.
    pub volume: Uuid,
    /// The text, in a form that this crate does not interpret.
    pub text: Vec<u8>,
}

/// Why a descriptor is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// The bytes do not begin like one.
    #[error("no descriptor")]
    NoMagic,
    /// The checksum is wrong, or it is the other copy.
    #[error("a damaged descriptor")]
    Damaged,
    /// Of a newer format version.
    #[error("a descriptor of version {0}, which this release does not know")]
    Version(u16),
    /// The checksum is right, but a field is invalid.
    #[error("a descriptor with an invalid {0}")]
    InvalidField(&'static str),
}

impl Descriptor {
    /// The bytes of copy number `copy`, in whole pages; `None` if the text is too long.
    #[must_use]
    pub fn to_bytes(&self, copy: u16) -> Option<Vec<u8>> {
        let length = HEADER_BYTES + self.text.len();
        if length > COPY_BYTES {
            return None;
        }
        let fields = DescriptorHeader {
            magic: MAGIC,
            version: U16::new(VERSION),
            copy: U16::new(copy),
            length: U32::new(u32::try_from(length).ok()?),
            checksum: U32::ZERO,
            reserved_a: U32::ZERO,
            generation: U64::new(self.generation),
            volume: self.volume.into_bytes(),
            reserved_b: [0; 8],
        };
        let mut out = Vec::with_capacity(length.next_multiple_of(PAGE as usize));
        out.extend_from_slice(fields.as_bytes());
        out.extend_from_slice(&self.text);
        out.resize(length.next_multiple_of(PAGE as usize), 0);
        write_checksum(&mut out, CHECKSUM_AT);
        Some(out)
    }

    /// Length of the descriptor that begins with `head`, in bytes, rounded up to whole pages.
    fn padded_len(head: &[u8]) -> usize {
        let length = match DescriptorHeader::read_from_prefix(head) {
            Ok((fields, _)) if fields.magic == MAGIC => fields.length.get() as usize,
            _ => HEADER_BYTES,
        };
        length.clamp(HEADER_BYTES, COPY_BYTES).next_multiple_of(PAGE as usize)
    }

    /// Parses copy number `copy`.
    ///
    /// # Errors
    /// [`DescriptorError`].
    pub fn parse(bytes: &[u8], copy: u16) -> Result<Self, DescriptorError> {
        let (fields, _) =
            DescriptorHeader::read_from_prefix(bytes).map_err(|_| DescriptorError::NoMagic)?;
        if fields.magic != MAGIC {
            return Err(DescriptorError::NoMagic);
        }
        let whole = bytes.get(..Self::padded_len(bytes)).ok_or(DescriptorError::Damaged)?;
        if !verify_checksum(whole, CHECKSUM_AT) || fields.copy.get() != copy {
            return Err(DescriptorError::Damaged);
        }
        if fields.version.get() != VERSION {
            return Err(DescriptorError::Version(fields.version.get()));
        }
        let length = fields.length.get() as usize;
        let (Some(text), Some(rest)) = (whole.get(HEADER_BYTES..length), whole.get(length..))
        else {
            return Err(DescriptorError::InvalidField("length"));
        };
        if fields.generation.get() == 0 {
            return Err(DescriptorError::InvalidField("generation"));
        }
        let reserved = fields.reserved_a.get() == 0 && fields.reserved_b == [0; 8];
        if !reserved || rest.iter().any(|b| *b != 0) {
            return Err(DescriptorError::InvalidField("reserved part"));
        }
        let volume = Uuid::from_bytes(fields.volume);
        Ok(Self { generation: fields.generation.get(), volume, text: text.to_vec() })
    }
}

/// The descriptors read from the two copies.
type DescriptorCopies = [Result<Descriptor, DescriptorError>; 2];

/// The current descriptor: the newest intact one. A copy with an unknown version is an error,
/// because it may be newer.
pub fn newest_valid(
    copies: &DescriptorCopies,
    volume: Uuid,
) -> Result<Option<&Descriptor>, DescriptorError> {
    let errors = copies.iter().filter_map(|copy| copy.as_ref().err());
    let strange = |why: &&DescriptorError| {
        matches!(why, DescriptorError::Version(_) | DescriptorError::InvalidField(_))
    };
    if let Some(strange) = errors.clone().find(strange) {
        return Err(*strange);
    }
    let whole = copies.iter().filter_map(|copy| copy.as_ref().ok());
    let newest = whole.filter(|d| d.volume == volume).max_by_key(|d| d.generation);
    match newest {
        None if errors.clone().any(|why| *why == DescriptorError::Damaged) => {
            Err(DescriptorError::Damaged)
        }
        newest => Ok(newest),
    }
}

/// Reads both copies.
///
/// # Errors
/// Neither can be read.
pub async fn read_copies(medium: &Medium, memory: &Account) -> Result<DescriptorCopies, DiskError> {
    let mut copies: DescriptorCopies =
        [Err(DescriptorError::NoMagic), Err(DescriptorError::NoMagic)];
    for ((copy, at), found) in (0u16..).zip(COPY_OFFSETS).zip(&mut copies) {
        *found = match read_copy(medium, memory, at).await {
            Ok(bytes) => Descriptor::parse(&bytes, copy),
            // A descriptor is optional: an unreadable copy counts as damaged.
            Err(_) => Err(DescriptorError::Damaged),
        };
    }
    Ok(copies)
}

async fn read_copy(medium: &Medium, memory: &Account, at: u64) -> Result<Box<[u8]>, DiskError> {
    let head = medium.read_bytes(memory, at, PAGE as usize).await?;
    match Descriptor::padded_len(&head) {
        one if one <= head.len() => Ok(head),
        more => medium.read_bytes(memory, at, more).await,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VOLUME: Uuid = Uuid::from_u128(0x0123_4567_89ab_4def_8123_4567_89ab_cdef);

    fn descriptor(generation: u64, text: &str) -> Descriptor {
        Descriptor { generation, volume: VOLUME, text: text.as_bytes().to_vec() }
    }

    /// What lies on disks is read for ever.
    #[test]
    fn golden_descriptor() {
        let bytes = descriptor(7, r#"{"name":"web"}"#).to_bytes(1).unwrap();
        assert_eq!(bytes.len(), 4096);
        let hex = |range: std::ops::Range<usize>| {
            bytes[range].iter().map(|b| format!("{b:02x}")).collect::<String>()
        };
        assert_eq!(hex(0..16), "57494e44524f534520564f4c554d450a");
        assert_eq!(hex(16..24), "010001004e000000");
        assert_eq!(hex(32..40), "0700000000000000");
        assert_eq!(hex(40..56), "0123456789ab4def8123456789abcdef");
        assert_eq!(hex(56..78), "00000000000000007b226e616d65223a22776562227d");
        assert_eq!(wire::crc32c(&bytes), GOLDEN);
    }

    const GOLDEN: u32 = 2_991_651_787;

    #[test]
    fn texts_up_to_the_limit_round_trip() {
        for len in [0, 1, 4032, 4033, DESCRIPTOR_TEXT_MAX] {
            let one = descriptor(1, &"x".repeat(len));
            let bytes = one.to_bytes(0).unwrap();
            assert!(bytes.len().is_multiple_of(4096) && bytes.len() <= COPY_BYTES);
            assert_eq!(Descriptor::parse(&bytes, 0), Ok(one));
            assert_eq!(Descriptor::parse(&bytes, 1), Err(DescriptorError::Damaged));
        }
        assert_eq!(descriptor(1, &"x".repeat(DESCRIPTOR_TEXT_MAX + 1)).to_bytes(0), None);
    }

    #[test]
    fn damage_and_unknown_versions_are_reported() {
        let good = descriptor(1, "abc").to_bytes(0).unwrap();
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            write_checksum(&mut bytes, CHECKSUM_AT);
            Descriptor::parse(&bytes, 0)
        };
        assert_eq!(with(0, b'X'), Err(DescriptorError::NoMagic));
        assert_eq!(with(16, 2), Err(DescriptorError::Version(2)));
        assert_eq!(with(20, 0), Err(DescriptorError::InvalidField("length")));
        assert_eq!(with(23, 9), Err(DescriptorError::Damaged), "longer than there is room");
        assert_eq!(with(32, 0), Err(DescriptorError::InvalidField("generation")));
        assert_eq!(with(60, 1), Err(DescriptorError::InvalidField("reserved part")));
        assert_eq!(with(4000, 1), Err(DescriptorError::InvalidField("reserved part")));
        let mut torn = good;
        torn[65] ^= 1;
        assert_eq!(Descriptor::parse(&torn, 0), Err(DescriptorError::Damaged));
    }

    #[test]
    fn the_newest_intact_copy_wins_and_an_unknown_one_is_refused() {
        let (old, new) = (descriptor(1, "old"), descriptor(2, "new"));
        let other = Descriptor { volume: Uuid::from_u128(1), ..descriptor(9, "another volume's") };
        let choose = |a, b| newest_valid(&[a, b], VOLUME).map(Option::<&_>::cloned);
        assert_eq!(choose(Ok(old.clone()), Ok(new.clone())), Ok(Some(new)));
        assert_eq!(choose(Ok(old.clone()), Err(DescriptorError::Damaged)), Ok(Some(old.clone())));
        assert_eq!(choose(Ok(other), Ok(old.clone())), Ok(Some(old.clone())));
        let none = || Err(DescriptorError::NoMagic);
        assert_eq!(choose(none(), none()), Ok(None));
        assert_eq!(choose(none(), Err(DescriptorError::Damaged)), Err(DescriptorError::Damaged));
        assert_eq!(
            choose(Ok(old), Err(DescriptorError::Version(2))),
            Err(DescriptorError::Version(2))
        );
    }

    proptest! {
        #[test]
        fn arbitrary_descriptor_bytes_do_not_panic(
            fields in prop::collection::vec(any::<u8>(), 16..200),
            sealed in any::<bool>(),
        ) {
            let mut bytes = vec![0; 4096];
            bytes[..16].copy_from_slice(&MAGIC);
            bytes[16..16 + fields.len()].copy_from_slice(&fields);
            if sealed {
                bytes[22..24].fill(0);
                write_checksum(&mut bytes, CHECKSUM_AT);
            }
            if let Ok(found) = Descriptor::parse(&bytes, 0) {
                prop_assert_eq!(found.to_bytes(0), Some(bytes));
            }
        }
    }
}

//! What an image tells of its volume beside its data: a text that the volume's owner keeps there, twice, in front of
//! the data ([format](../../../../docs/format/descriptor.md)). Without a record of the volume, an image says by it
//! what the volume was called and who could reach it. [`Descriptor::parse`] is total.

use rt::buf::Account;
use rt::disk::DiskError;
use uuid::Uuid;
use wire::seal::{is_sealed, seal};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::label::SLOTS;
use crate::medium::Medium;
use crate::{BEAT_AT, OWNER_BYTES, PAGE, SECOND_AT, slots};

/// Room of one copy, in bytes.
const ROOM: usize = 64 << 10;

/// Where the two copies are, in bytes from the start: between the labels, and beside the owner record.
pub const PLACES: [u64; 2] = [160 << 10, 256 << 10];
const _: () = assert!(PLACES[0] + ROOM as u64 <= PLACES[1]);
const _: () = assert!(PLACES[1] + ROOM as u64 <= SLOTS[1]);
const _: () =
    assert!(PLACES[0] >= BEAT_AT + OWNER_BYTES as u64 && PLACES[1] + ROOM as u64 <= SECOND_AT);

const MAGIC: [u8; 16] = *b"WINDROSE VOLUME\n";

/// The only version so far.
const VERSION: u16 = 1;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Stored {
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

const HEADER: usize = 64;
const _: () = assert!(size_of::<Stored>() == HEADER);
const CHECKSUM_AT: usize = std::mem::offset_of!(Stored, checksum);

/// Longest text of a descriptor, in bytes.
pub const DESCRIPTOR_TEXT_MAX: usize = ROOM - HEADER;

/// What an image tells of its volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Counts the changes of the descriptor.
    pub generation: u64,
    /// The volume that it tells of.
    pub volume: Uuid,
    /// What it tells, in its owner's form.
    pub text: Vec<u8>,
}

/// Why bytes are not a usable descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadDescriptor {
    /// They do not begin like one.
    #[error("no descriptor")]
    NoMagic,
    /// The checksum does not fit, or it is in the other copy's place.
    #[error("a damaged descriptor")]
    Damaged,
    /// A newer version's.
    #[error("a descriptor of version {0}, which this release does not know")]
    Version(u16),
    /// The checksum fits and a field makes no sense.
    #[error("a descriptor whose {0} makes no sense")]
    Field(&'static str),
}

impl Descriptor {
    /// The bytes of copy number `copy`, whole pages; `None` if the text is too long.
    #[must_use]
    pub fn to_bytes(&self, copy: u16) -> Option<Vec<u8>> {
        let length = HEADER + self.text.len();
        if length > ROOM {
            return None;
        }
        let fields = Stored {
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
        seal(&mut out, CHECKSUM_AT);
        Some(out)
    }

    /// How many bytes, whole pages, the descriptor has that begins with these.
    fn pages(head: &[u8]) -> usize {
        let length = match Stored::read_from_prefix(head) {
            Ok((fields, _)) if fields.magic == MAGIC => fields.length.get() as usize,
            _ => HEADER,
        };
        length.clamp(HEADER, ROOM).next_multiple_of(PAGE as usize)
    }

    /// Reads copy number `copy`.
    ///
    /// # Errors
    /// [`BadDescriptor`]; whatever the bytes are.
    pub fn parse(bytes: &[u8], copy: u16) -> Result<Self, BadDescriptor> {
        let (fields, _) = Stored::read_from_prefix(bytes).map_err(|_| BadDescriptor::NoMagic)?;
        if fields.magic != MAGIC {
            return Err(BadDescriptor::NoMagic);
        }
        let whole = bytes.get(..Self::pages(bytes)).ok_or(BadDescriptor::Damaged)?;
        if !is_sealed(whole, CHECKSUM_AT) || fields.copy.get() != copy {
            return Err(BadDescriptor::Damaged);
        }
        if fields.version.get() != VERSION {
            return Err(BadDescriptor::Version(fields.version.get()));
        }
        let length = fields.length.get() as usize;
        let (Some(text), Some(rest)) = (whole.get(HEADER..length), whole.get(length..)) else {
            return Err(BadDescriptor::Field("length"));
        };
        if fields.generation.get() == 0 {
            return Err(BadDescriptor::Field("generation"));
        }
        let reserved = fields.reserved_a.get() == 0 && fields.reserved_b == [0; 8];
        if !reserved || rest.iter().any(|b| *b != 0) {
            return Err(BadDescriptor::Field("reserved part"));
        }
        let volume = Uuid::from_bytes(fields.volume);
        Ok(Self { generation: fields.generation.get(), volume, text: text.to_vec() })
    }
}

/// What the two places hold.
type Copies = [Result<Descriptor, BadDescriptor>; 2];

/// The descriptor that counts: the newest whole one. One of another version may be newer than any that is known.
pub fn choose(copies: &Copies, volume: Uuid) -> Result<Option<&Descriptor>, BadDescriptor> {
    let errors = copies.iter().filter_map(|copy| copy.as_ref().err());
    let strange =
        |why: &&BadDescriptor| matches!(why, BadDescriptor::Version(_) | BadDescriptor::Field(_));
    if let Some(strange) = errors.clone().find(strange) {
        return Err(*strange);
    }
    let whole = copies.iter().filter_map(|copy| copy.as_ref().ok());
    let newest = whole.filter(|d| d.volume == volume).max_by_key(|d| d.generation);
    match newest {
        None if errors.clone().any(|why| *why == BadDescriptor::Damaged) => {
            Err(BadDescriptor::Damaged)
        }
        newest => Ok(newest),
    }
}

/// Both copies, as they lie on the disk.
///
/// # Errors
/// That neither can be read.
pub async fn read(medium: &Medium, memory: &Account) -> Result<Copies, DiskError> {
    let mut copies: Copies = [Err(BadDescriptor::NoMagic), Err(BadDescriptor::NoMagic)];
    for ((copy, at), place) in (0u16..).zip(PLACES).zip(&mut copies) {
        *place = match read_copy(medium, memory, at).await {
            Ok(bytes) => Descriptor::parse(&bytes, copy),
            // It is a help, and nothing that a volume cannot do without.
            Err(_) => Err(BadDescriptor::Damaged),
        };
    }
    Ok(copies)
}

async fn read_copy(medium: &Medium, memory: &Account, at: u64) -> Result<Box<[u8]>, DiskError> {
    let head = slots::read(medium, memory, at, PAGE as usize).await?;
    match Descriptor::pages(&head) {
        one if one <= head.len() => Ok(head),
        more => slots::read(medium, memory, at, more).await,
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
    fn the_golden_descriptor_is_what_it_was() {
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
    fn texts_of_any_length_read_back_and_no_longer_ones_are_written() {
        for len in [0, 1, 4032, 4033, DESCRIPTOR_TEXT_MAX] {
            let one = descriptor(1, &"x".repeat(len));
            let bytes = one.to_bytes(0).unwrap();
            assert!(bytes.len().is_multiple_of(4096) && bytes.len() <= ROOM);
            assert_eq!(Descriptor::parse(&bytes, 0), Ok(one));
            assert_eq!(Descriptor::parse(&bytes, 1), Err(BadDescriptor::Damaged));
        }
        assert_eq!(descriptor(1, &"x".repeat(DESCRIPTOR_TEXT_MAX + 1)).to_bytes(0), None);
    }

    #[test]
    fn what_is_damaged_or_of_another_version_is_named() {
        let good = descriptor(1, "abc").to_bytes(0).unwrap();
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            seal(&mut bytes, CHECKSUM_AT);
            Descriptor::parse(&bytes, 0)
        };
        assert_eq!(with(0, b'X'), Err(BadDescriptor::NoMagic));
        assert_eq!(with(16, 2), Err(BadDescriptor::Version(2)));
        assert_eq!(with(20, 0), Err(BadDescriptor::Field("length")));
        assert_eq!(with(23, 9), Err(BadDescriptor::Damaged), "longer than there is room");
        assert_eq!(with(32, 0), Err(BadDescriptor::Field("generation")));
        assert_eq!(with(60, 1), Err(BadDescriptor::Field("reserved part")));
        assert_eq!(with(4000, 1), Err(BadDescriptor::Field("reserved part")));
        let mut torn = good;
        torn[65] ^= 1;
        assert_eq!(Descriptor::parse(&torn, 0), Err(BadDescriptor::Damaged));
    }

    #[test]
    fn the_newest_whole_one_counts_and_a_strange_one_forbids_all() {
        let (old, new) = (descriptor(1, "old"), descriptor(2, "new"));
        let other = Descriptor { volume: Uuid::from_u128(1), ..descriptor(9, "another volume's") };
        let choose = |a, b| choose(&[a, b], VOLUME).map(Option::<&_>::cloned);
        assert_eq!(choose(Ok(old.clone()), Ok(new.clone())), Ok(Some(new)));
        assert_eq!(choose(Ok(old.clone()), Err(BadDescriptor::Damaged)), Ok(Some(old.clone())));
        assert_eq!(choose(Ok(other), Ok(old.clone())), Ok(Some(old.clone())));
        let none = || Err(BadDescriptor::NoMagic);
        assert_eq!(choose(none(), none()), Ok(None));
        assert_eq!(choose(none(), Err(BadDescriptor::Damaged)), Err(BadDescriptor::Damaged));
        assert_eq!(choose(Ok(old), Err(BadDescriptor::Version(2))), Err(BadDescriptor::Version(2)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_descriptor_or_none(
            fields in prop::collection::vec(any::<u8>(), 16..200),
            sealed in any::<bool>(),
        ) {
            let mut bytes = vec![0; 4096];
            bytes[..16].copy_from_slice(&MAGIC);
            bytes[16..16 + fields.len()].copy_from_slice(&fields);
            if sealed {
                bytes[22..24].fill(0);
                seal(&mut bytes, CHECKSUM_AT);
            }
            if let Ok(found) = Descriptor::parse(&bytes, 0) {
                prop_assert_eq!(found.to_bytes(0), Some(bytes));
            }
        }
    }
}

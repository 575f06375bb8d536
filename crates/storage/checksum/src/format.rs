//! The on-disk format of checksums and of the dirty list
//! ([format](../../../../docs/format/pool.md)). Parsing is total.

use uuid::Uuid;
use wire::embedded_checksum::{verify_checksum, write_checksum};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::layout::{CHECKSUMS_PER_BLOCK, COPIES, ChecksumArea, ChecksumLayout, HEADER_BYTES, ROW};

/// Blocks of the dirty list: two lists that are written alternately, with two copies each.
pub const DIRTY_LIST_BLOCKS: u64 = 2 * COPIES as u64;

/// Most areas in a dirty list.
pub const MAX_DIRTY_AREAS: usize = 128;

const MAGIC: [u8; 8] = *b"WR SUMS\n";
const DIRTY_LIST_MAGIC: [u8; 16] = *b"WINDROSE WRITES\n";

/// The only version so far of both.
const VERSION: u16 = 1;

const DIRTY_LIST_HEADER_BYTES: usize = 80;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ChecksumHeader {
    magic: [u8; 8],
    version: U16,
    area_index: U16,
    checksum: U32,
    unit: U32,
    reserved: U32,
    member: [u8; 8],
}

const _: () = assert!(size_of::<ChecksumHeader>() == HEADER_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(ChecksumHeader, checksum);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct DirtyListHeader {
    magic: [u8; 16],
    version: U16,
    areas: U16,
    checksum: U32,
    pool: [u8; 16],
    member: [u8; 16],
    sequence: U64,
    ring: U32,
    reserved: [u8; 12],
}

const _: () = assert!(size_of::<DirtyListHeader>() == DIRTY_LIST_HEADER_BYTES);
const DIRTY_LIST_CHECKSUM_AT: usize = std::mem::offset_of!(DirtyListHeader, checksum);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredArea {
    unit: U32,
    index: U16,
    reserved: U16,
}

/// The owner of a dirty list and of checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumOwner {
    /// The pool.
    pub pool: Uuid,
    /// The member.
    pub member: Uuid,
    /// The ring of the core that writes the list.
    pub ring: u16,
}

/// The checksums of an area: for each row its CRC-32C, XORed with that of a zero row.
pub type Checksums = Box<[u32; CHECKSUMS_PER_BLOCK]>;

/// Stands for the checksum of a row that could not be read to compute it. No row has this checksum.
pub const UNKNOWN_CHECKSUM: u32 = u32::MAX;

/// The checksum of a row, given in parts.
#[must_use]
pub fn row_checksum<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let crc = parts.into_iter().fold(wire::Crc32c::new(), wire::Crc32c::update);
    (crc.value() ^ CRC_OF_ZEROES).min(UNKNOWN_CHECKSUM - 1)
}

/// CRC-32C of 4096 zeroes.
const CRC_OF_ZEROES: u32 = 0x98f9_4189;

/// The checksums of an area about which nothing is known.
pub(super) fn unknown_checksums() -> Checksums {
    Box::new([UNKNOWN_CHECKSUM; CHECKSUMS_PER_BLOCK])
}

/// The checksums of a zeroed area.
pub(super) fn zero_checksums() -> Checksums {
    Box::new([0; CHECKSUMS_PER_BLOCK])
}

fn uuid_prefix(member: Uuid) -> [u8; 8] {
    let mut prefix = [0; 8];
    prefix.copy_from_slice(&member.into_bytes()[..8]);
    prefix
}

/// Serializes the checksums of `area`.
#[must_use]
pub fn checksums_to_bytes(
    checksums: &[u32; CHECKSUMS_PER_BLOCK],
    area: ChecksumArea,
    member: Uuid,
) -> [u8; ROW] {
    let header = ChecksumHeader {
        magic: MAGIC,
        version: VERSION.into(),
        area_index: area.index.into(),
        checksum: 0.into(),
        unit: area.unit.into(),
        reserved: 0.into(),
        member: uuid_prefix(member),
    };
    let mut out = [0; ROW];
    let (start, rest) = out.split_at_mut(HEADER_BYTES);
    start.copy_from_slice(header.as_bytes());
    for (stored, checksum) in rest.chunks_exact_mut(4).zip(checksums) {
        stored.copy_from_slice(&checksum.to_le_bytes());
    }
    write_checksum(&mut out, CHECKSUM_AT);
    out
}

/// Parses the copies of the checksums of `area`. Written copies take precedence over zeroes. None
/// if no copy is valid.
#[must_use]
pub fn parse_copies(blocks: &[u8], area: ChecksumArea, member: Uuid) -> Option<Checksums> {
    let blocks = blocks.as_chunks().0.iter();
    let (zeroes, written): (Vec<_>, Vec<_>) = blocks.partition(|block| block == &&[0; ROW]);
    let mut candidates = written.into_iter().chain(zeroes);
    candidates.find_map(|block| parse_checksums(block, area, member))
}

/// Parses the checksums of `area`; none if the bytes are something else.
#[must_use]
pub fn parse_checksums(bytes: &[u8; ROW], area: ChecksumArea, member: Uuid) -> Option<Checksums> {
    let (header, rest) = ChecksumHeader::read_from_prefix(bytes).ok()?;
    if bytes.iter().all(|b| *b == 0) {
        return Some(zero_checksums());
    }
    let is_own = header.magic == MAGIC
        && header.version.get() == VERSION
        && header.reserved.get() == 0
        && (header.unit.get(), header.area_index.get()) == (area.unit, area.index)
        && header.member == uuid_prefix(member);
    if !is_own || !verify_checksum(bytes, CHECKSUM_AT) {
        return None;
    }
    let mut checksums = zero_checksums();
    for (checksum, stored) in checksums.iter_mut().zip(rest.chunks_exact(4)) {
        *checksum = u32::from_le_bytes(stored.try_into().ok()?);
    }
    Some(checksums)
}

/// Serializes a dirty list of at most [`MAX_DIRTY_AREAS`] areas.
#[must_use]
pub fn dirty_list_to_bytes(
    areas: &[ChecksumArea],
    sequence: u64,
    owner: ChecksumOwner,
) -> [u8; ROW] {
    let areas = &areas[..areas.len().min(MAX_DIRTY_AREAS)];
    let header = DirtyListHeader {
        magic: DIRTY_LIST_MAGIC,
        version: VERSION.into(),
        areas: u16::try_from(areas.len()).unwrap_or(u16::MAX).into(),
        checksum: 0.into(),
        pool: owner.pool.into_bytes(),
        member: owner.member.into_bytes(),
        sequence: sequence.into(),
        ring: u32::from(owner.ring).into(),
        reserved: [0; 12],
    };
    let mut out = [0; ROW];
    let (start, rest) = out.split_at_mut(DIRTY_LIST_HEADER_BYTES);
    start.copy_from_slice(header.as_bytes());
    for (entry, area) in rest.chunks_exact_mut(size_of::<StoredArea>()).zip(areas) {
        let stored =
            StoredArea { unit: area.unit.into(), index: area.index.into(), reserved: 0.into() };
        entry.copy_from_slice(stored.as_bytes());
    }
    write_checksum(&mut out, DIRTY_LIST_CHECKSUM_AT);
    out
}

/// Parses a dirty list: its sequence number and areas; none if it is no list of this member and
/// ring.
///
/// # Errors
/// [`UnsupportedDirtyList`]: such a list must not be ignored.
pub fn parse_dirty_list(
    bytes: &[u8; ROW],
    layout: &ChecksumLayout,
    owner: ChecksumOwner,
) -> Result<Option<(u64, Vec<ChecksumArea>)>, UnsupportedDirtyList> {
    let Ok((header, rest)) = DirtyListHeader::read_from_prefix(bytes) else { return Ok(None) };
    let is_own = header.magic == DIRTY_LIST_MAGIC
        && header.pool == owner.pool.into_bytes()
        && header.member == owner.member.into_bytes()
        && header.ring.get() == u32::from(owner.ring);
    if !is_own || !verify_checksum(bytes, DIRTY_LIST_CHECKSUM_AT) {
        return Ok(None);
    }
    if header.version.get() != VERSION || header.reserved != [0; 12] {
        return Err(UnsupportedDirtyList);
    }
    let count = usize::from(header.areas.get());
    let (stored, padding) =
        rest.split_at_checked(count * size_of::<StoredArea>()).ok_or(UnsupportedDirtyList)?;
    let areas = stored.chunks_exact(size_of::<StoredArea>()).map(|stored| {
        let stored = StoredArea::read_from_bytes(stored).ok()?;
        let area = ChecksumArea { unit: stored.unit.get(), index: stored.index.get() };
        (stored.reserved.get() == 0 && layout.contains(area)).then_some(area)
    });
    let areas: Option<Vec<ChecksumArea>> = areas.collect();
    let is_last = header.sequence.get() == u64::MAX;
    let is_valid = count <= MAX_DIRTY_AREAS && !is_last && padding.iter().all(|b| *b == 0);
    let areas = areas.filter(|_| is_valid).ok_or(UnsupportedDirtyList)?;
    Ok(Some((header.sequence.get(), areas)))
}

/// A dirty list with an unknown format version, or with inconsistent contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a dirty list of a version that this release does not know")]
pub struct UnsupportedDirtyList;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AREA: ChecksumArea = ChecksumArea { unit: 7, index: 3 };
    const MEMBER: Uuid = Uuid::from_u128(0x0102_0304_0506_0708 << 64);
    const WHOSE: ChecksumOwner =
        ChecksumOwner { pool: Uuid::from_u128(9), member: MEMBER, ring: 2 };
    const PLACE: ChecksumLayout = ChecksumLayout { first_row: 16, unit_rows: 4240, units: 9 };

    fn sums() -> Checksums {
        let mut checksums = zero_checksums();
        (0u32..).zip(checksums.iter_mut()).for_each(|(n, checksum)| *checksum = n * 7);
        checksums
    }

    #[test]
    fn zeroes_have_checksum_zero() {
        assert_eq!(row_checksum([&[0; ROW][..]]), 0);
        assert_eq!(parse_checksums(&[0; ROW], AREA, MEMBER), Some(zero_checksums()));
        let mut row = [0; ROW];
        row[17] = 1;
        assert_ne!(row_checksum([&row[..]]), 0);
        assert_eq!(
            row_checksum([&row[..5], &row[5..]]),
            row_checksum([&row[..]]),
            "whatever its pieces"
        );
    }

    #[test]
    fn a_checksum_block_parses_only_at_its_own_position() {
        let bytes = checksums_to_bytes(&sums(), AREA, MEMBER);
        assert_eq!(parse_checksums(&bytes, AREA, MEMBER), Some(sums()));
        assert_eq!(parse_checksums(&bytes, ChecksumArea { unit: 8, ..AREA }, MEMBER), None);
        assert_eq!(parse_checksums(&bytes, ChecksumArea { index: 2, ..AREA }, MEMBER), None);
        assert_eq!(parse_checksums(&bytes, AREA, Uuid::from_u128(1)), None);
    }

    #[test]
    fn a_dirty_list_parses_only_for_its_owner() {
        let areas = [AREA, ChecksumArea { unit: 0, index: 4 }];
        let bytes = dirty_list_to_bytes(&areas, 5, WHOSE);
        assert_eq!(parse_dirty_list(&bytes, &PLACE, WHOSE), Ok(Some((5, areas.to_vec()))));
        assert_eq!(parse_dirty_list(&bytes, &PLACE, ChecksumOwner { ring: 3, ..WHOSE }), Ok(None));
        assert_eq!(parse_dirty_list(&[0; ROW], &PLACE, WHOSE), Ok(None));
        let fewer = ChecksumLayout { units: 7, ..PLACE };
        assert_eq!(parse_dirty_list(&bytes, &fewer, WHOSE), Err(UnsupportedDirtyList));
    }

    /// The format on disk must never change.
    #[test]
    fn golden_blocks() {
        let list = dirty_list_to_bytes(&[AREA], 5, WHOSE);
        let block = checksums_to_bytes(&sums(), AREA, MEMBER);
        assert_eq!(
            [
                wire::crc32c(&list[DIRTY_LIST_CHECKSUM_AT + 4..]),
                wire::crc32c(&block[CHECKSUM_AT + 4..])
            ],
            GOLDEN
        );
    }

    const GOLDEN: [u32; 2] = [725_982_285, 3_774_974];

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(at in 0usize..ROW, value in any::<u8>(), long in any::<bool>()) {
            let mut bytes = if long { checksums_to_bytes(&sums(), AREA, MEMBER) } else { dirty_list_to_bytes(&[AREA], 5, WHOSE) };
            bytes[at] = value;
            write_checksum(&mut bytes, if long { CHECKSUM_AT } else { DIRTY_LIST_CHECKSUM_AT });
            if let Some(found) = parse_checksums(&bytes, AREA, MEMBER) {
                prop_assert_eq!(checksums_to_bytes(&found, AREA, MEMBER), bytes);
            }
            if let Ok(Some((sequence, areas))) = parse_dirty_list(&bytes, &PLACE, WHOSE) {
                prop_assert_eq!(dirty_list_to_bytes(&areas, sequence, WHOSE), bytes);
            }
        }
    }
}

//! Sums, and the list of areas that are being written, as they lie on a disk ([format](../../../../docs/format/pool.md)). Parsing
//! is total.

use uuid::Uuid;
use wire::seal::{is_sealed, seal};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::place::{Area, COPIES, Place};

/// Length in bytes of a row, and of every structure here.
pub const ROW: usize = 4096;

/// Sums in a block.
pub const SUMS: usize = (ROW - HEAD_BYTES) / 4;

/// Blocks of a list: two, each twice, one behind the other, written in turn.
pub const LIST_BLOCKS: u64 = 2 * COPIES as u64;

/// Most areas in a list.
pub const MAX_LISTED: usize = 128;

const MAGIC: [u8; 8] = *b"WR SUMS\n";
const LIST_MAGIC: [u8; 16] = *b"WINDROSE WRITES\n";

/// The only version so far of both.
const VERSION: u16 = 1;

const HEAD_BYTES: usize = 32;
const LIST_HEAD_BYTES: usize = 80;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    version: U16,
    number: U16,
    checksum: U32,
    unit: U32,
    reserved: U32,
    member: [u8; 8],
}

const _: () = assert!(size_of::<Head>() == HEAD_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(Head, checksum);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ListHead {
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

const _: () = assert!(size_of::<ListHead>() == LIST_HEAD_BYTES);
const LIST_CHECKSUM_AT: usize = std::mem::offset_of!(ListHead, checksum);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredArea {
    unit: U32,
    number: U16,
    reserved: U16,
}

/// Whose list it is, and whose sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whose {
    /// The pool.
    pub pool: Uuid,
    /// The member.
    pub member: Uuid,
    /// The ring of the core that writes the list.
    pub ring: u16,
}

/// The sums of an area: CRC-32C of each row, with that of a row of zeroes taken away.
pub type Sums = Box<[u32; SUMS]>;

/// In the place of the sum of a row that could not be read when it was to be made. No row has it.
pub const UNREADABLE: u32 = u32::MAX;

/// The sum of a row that is in these pieces.
#[must_use]
pub fn sum<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let crc = pieces.into_iter().fold(wire::Crc32c::new(), wire::Crc32c::update);
    (crc.value() ^ OF_ZEROES).min(UNREADABLE - 1)
}

/// CRC-32C of 4096 zeroes.
const OF_ZEROES: u32 = 0x98f9_4189;

/// Those of an area of which nothing is known.
pub(super) fn unknown_sums() -> Sums {
    Box::new([UNREADABLE; SUMS])
}

/// The sums of an area of zeroes.
pub(super) fn no_sums() -> Sums {
    Box::new([0; SUMS])
}

fn begin_of(member: Uuid) -> [u8; 8] {
    let mut begin = [0; 8];
    begin.copy_from_slice(&member.into_bytes()[..8]);
    begin
}

/// The bytes of the sums of `area`.
#[must_use]
pub fn sums_to_bytes(sums: &[u32; SUMS], area: Area, member: Uuid) -> [u8; ROW] {
    let head = Head {
        magic: MAGIC,
        version: VERSION.into(),
        number: area.number.into(),
        checksum: 0.into(),
        unit: area.unit.into(),
        reserved: 0.into(),
        member: begin_of(member),
    };
    let mut out = [0; ROW];
    let (begin, rest) = out.split_at_mut(HEAD_BYTES);
    begin.copy_from_slice(head.as_bytes());
    for (place, sum) in rest.chunks_exact_mut(4).zip(sums) {
        place.copy_from_slice(&sum.to_le_bytes());
    }
    seal(&mut out, CHECKSUM_AT);
    out
}

/// The sums of `area` that blocks with copies of them have: of one that has been written, before zeroes. None if no block has any.
#[must_use]
pub fn parse_copies(blocks: &[u8], area: Area, member: Uuid) -> Option<Sums> {
    let blocks = blocks.as_chunks().0.iter();
    let (zeroes, written): (Vec<_>, Vec<_>) = blocks.partition(|block| block == &&[0; ROW]);
    let mut all = written.into_iter().chain(zeroes);
    all.find_map(|block| parse_sums(block, area, member))
}

/// The sums of `area` that these bytes are; none if they are something else.
#[must_use]
pub fn parse_sums(bytes: &[u8; ROW], area: Area, member: Uuid) -> Option<Sums> {
    let (head, rest) = Head::read_from_prefix(bytes).ok()?;
    if bytes.iter().all(|b| *b == 0) {
        return Some(no_sums());
    }
    let is_mine = head.magic == MAGIC
        && head.version.get() == VERSION
        && head.reserved.get() == 0
        && (head.unit.get(), head.number.get()) == (area.unit, area.number)
        && head.member == begin_of(member);
    if !is_mine || !is_sealed(bytes, CHECKSUM_AT) {
        return None;
    }
    let mut sums = no_sums();
    for (sum, stored) in sums.iter_mut().zip(rest.chunks_exact(4)) {
        *sum = u32::from_le_bytes(stored.try_into().ok()?);
    }
    Some(sums)
}

/// The bytes of a list of at most [`MAX_LISTED`] areas.
#[must_use]
pub fn list_to_bytes(areas: &[Area], sequence: u64, whose: Whose) -> [u8; ROW] {
    let areas = &areas[..areas.len().min(MAX_LISTED)];
    let head = ListHead {
        magic: LIST_MAGIC,
        version: VERSION.into(),
        areas: u16::try_from(areas.len()).unwrap_or(u16::MAX).into(),
        checksum: 0.into(),
        pool: whose.pool.into_bytes(),
        member: whose.member.into_bytes(),
        sequence: sequence.into(),
        ring: u32::from(whose.ring).into(),
        reserved: [0; 12],
    };
    let mut out = [0; ROW];
    let (begin, rest) = out.split_at_mut(LIST_HEAD_BYTES);
    begin.copy_from_slice(head.as_bytes());
    for (place, area) in rest.chunks_exact_mut(size_of::<StoredArea>()).zip(areas) {
        let stored =
            StoredArea { unit: area.unit.into(), number: area.number.into(), reserved: 0.into() };
        place.copy_from_slice(stored.as_bytes());
    }
    seal(&mut out, LIST_CHECKSUM_AT);
    out
}

/// The sequence and the areas of the list that these bytes are; none if they are no list of this member and ring.
///
/// # Errors
/// [`UnknownList`]: it may not be passed over.
pub fn parse_list(
    bytes: &[u8; ROW],
    place: &Place,
    whose: Whose,
) -> Result<Option<(u64, Vec<Area>)>, UnknownList> {
    let Ok((head, rest)) = ListHead::read_from_prefix(bytes) else { return Ok(None) };
    let is_mine = head.magic == LIST_MAGIC
        && head.pool == whose.pool.into_bytes()
        && head.member == whose.member.into_bytes()
        && head.ring.get() == u32::from(whose.ring);
    if !is_mine || !is_sealed(bytes, LIST_CHECKSUM_AT) {
        return Ok(None);
    }
    if head.version.get() != VERSION || head.reserved != [0; 12] {
        return Err(UnknownList);
    }
    let count = usize::from(head.areas.get());
    let (stored, behind) =
        rest.split_at_checked(count * size_of::<StoredArea>()).ok_or(UnknownList)?;
    let areas = stored.chunks_exact(size_of::<StoredArea>()).map(|stored| {
        let stored = StoredArea::read_from_bytes(stored).ok()?;
        let area = Area { unit: stored.unit.get(), number: stored.number.get() };
        (stored.reserved.get() == 0 && place.has(area)).then_some(area)
    });
    let areas: Option<Vec<Area>> = areas.collect();
    let is_last = head.sequence.get() == u64::MAX;
    let is_sane = count <= MAX_LISTED && !is_last && behind.iter().all(|b| *b == 0);
    let areas = areas.filter(|_| is_sane).ok_or(UnknownList)?;
    Ok(Some((head.sequence.get(), areas)))
}

/// A list of a release that is not known, or that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a list of what was being written that this release does not know")]
pub struct UnknownList;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AREA: Area = Area { unit: 7, number: 3 };
    const MEMBER: Uuid = Uuid::from_u128(0x0102_0304_0506_0708 << 64);
    const WHOSE: Whose = Whose { pool: Uuid::from_u128(9), member: MEMBER, ring: 2 };
    const PLACE: Place = Place { at: 16, rows: 4240, units: 9 };

    fn sums() -> Sums {
        let mut sums = no_sums();
        (0u32..).zip(sums.iter_mut()).for_each(|(n, sum)| *sum = n * 7);
        sums
    }

    #[test]
    fn zeroes_have_no_sum_and_their_sums_are_zeroes() {
        assert_eq!(sum([&[0; ROW][..]]), 0);
        assert_eq!(parse_sums(&[0; ROW], AREA, MEMBER), Some(no_sums()));
        let mut row = [0; ROW];
        row[17] = 1;
        assert_ne!(sum([&row[..]]), 0);
        assert_eq!(sum([&row[..5], &row[5..]]), sum([&row[..]]), "whatever its pieces");
    }

    #[test]
    fn sums_are_read_in_their_own_place_only() {
        let bytes = sums_to_bytes(&sums(), AREA, MEMBER);
        assert_eq!(parse_sums(&bytes, AREA, MEMBER), Some(sums()));
        assert_eq!(parse_sums(&bytes, Area { unit: 8, ..AREA }, MEMBER), None);
        assert_eq!(parse_sums(&bytes, Area { number: 2, ..AREA }, MEMBER), None);
        assert_eq!(parse_sums(&bytes, AREA, Uuid::from_u128(1)), None);
    }

    #[test]
    fn a_list_is_read_by_whose_it_is() {
        let areas = [AREA, Area { unit: 0, number: 4 }];
        let bytes = list_to_bytes(&areas, 5, WHOSE);
        assert_eq!(parse_list(&bytes, &PLACE, WHOSE), Ok(Some((5, areas.to_vec()))));
        assert_eq!(parse_list(&bytes, &PLACE, Whose { ring: 3, ..WHOSE }), Ok(None));
        assert_eq!(parse_list(&[0; ROW], &PLACE, WHOSE), Ok(None));
        let fewer = Place { units: 7, ..PLACE };
        assert_eq!(parse_list(&bytes, &fewer, WHOSE), Err(UnknownList));
    }

    /// What lies on disks is read for ever.
    #[test]
    fn the_golden_blocks_are_what_they_were() {
        let list = list_to_bytes(&[AREA], 5, WHOSE);
        let sums = sums_to_bytes(&sums(), AREA, MEMBER);
        assert_eq!(
            [wire::crc32c(&list[LIST_CHECKSUM_AT + 4..]), wire::crc32c(&sums[CHECKSUM_AT + 4..])],
            GOLDEN
        );
    }

    const GOLDEN: [u32; 2] = [725_982_285, 3_774_974];

    proptest! {
        #[test]
        fn any_bytes_are_one_or_none(at in 0usize..ROW, value in any::<u8>(), long in any::<bool>()) {
            let mut bytes = if long { sums_to_bytes(&sums(), AREA, MEMBER) } else { list_to_bytes(&[AREA], 5, WHOSE) };
            bytes[at] = value;
            seal(&mut bytes, if long { CHECKSUM_AT } else { LIST_CHECKSUM_AT });
            if let Some(found) = parse_sums(&bytes, AREA, MEMBER) {
                prop_assert_eq!(sums_to_bytes(&found, AREA, MEMBER), bytes);
            }
            if let Ok(Some((sequence, areas))) = parse_list(&bytes, &PLACE, WHOSE) {
                prop_assert_eq!(list_to_bytes(&areas, sequence, WHOSE), bytes);
            }
        }
    }
}

//! Where the stripes of an extent lie, as it lies on a member ([format](../../../../docs/format/pool.md)): twice behind the
//! stripes of each column, and the newer one that is whole counts.

use geometry::{ROW_BYTES, Shape};
use uuid::Uuid;
use wire::seal::{is_sealed, seal};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::map::{Map, Placed};

const MAGIC: [u8; 16] = *b"WINDROSE STRIPE\n";

/// The only version so far.
const VERSION: u32 = 1;

const ROW: usize = ROW_BYTES as usize;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    magic: [u8; 16],
    version: U32,
    checksum: U32,
    pool: [u8; 16],
    extent: U64,
    era: U64,
    sequence: U64,
    stripes: U32,
    reserved: U32,
}

const HEAD_BYTES: usize = 72;
const _: () = assert!(size_of::<Head>() == HEAD_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(Head, checksum);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredPlaced {
    number: U64,
    place: U32,
    reserved: U32,
}

/// Rows that a map of this shape takes, once; none where stripes do not move.
#[must_use]
pub fn rows(shape: &Shape) -> u32 {
    if shape.places() == shape.stripes() {
        return 0;
    }
    let bytes = HEAD_BYTES as u64 + u64::from(shape.stripes()) * size_of::<StoredPlaced>() as u64;
    u32::try_from(bytes.div_ceil(ROW as u64)).unwrap_or(u32::MAX)
}

/// Whose map it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whose {
    /// The pool.
    pub pool: Uuid,
    /// Number of the extent.
    pub extent: u64,
}

/// What stands in a map's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// This map; the one of the highest sequence counts.
    Map {
        /// One more than that of the map before it.
        sequence: u64,
        /// Itself.
        map: Map,
    },
    /// Nothing of this extent.
    Nothing,
    /// A map that is torn, damaged, or of a release that is not known.
    Damaged,
}

/// The bytes of a map, in whole rows.
#[must_use]
pub fn to_bytes(map: &Map, sequence: u64, whose: Whose) -> Vec<u8> {
    let head = Head {
        magic: MAGIC,
        version: VERSION.into(),
        checksum: 0.into(),
        pool: whose.pool.into_bytes(),
        extent: whose.extent.into(),
        era: map.era().into(),
        sequence: sequence.into(),
        stripes: u32::try_from(map.stripes().len()).unwrap_or(u32::MAX).into(),
        reserved: 0.into(),
    };
    let mut out = head.as_bytes().to_vec();
    for placed in map.stripes() {
        let (number, place) = (placed.number.into(), placed.place.into());
        out.extend_from_slice(StoredPlaced { number, place, reserved: 0.into() }.as_bytes());
    }
    out.resize(out.len().next_multiple_of(ROW), 0);
    seal(&mut out, CHECKSUM_AT);
    out
}

/// What these bytes are, of an extent of this shape.
#[must_use]
pub fn parse(bytes: &[u8], shape: &Shape, whose: Whose) -> Found {
    let Ok((head, rest)) = Head::read_from_prefix(bytes) else { return Found::Nothing };
    let mine = head.pool == whose.pool.into_bytes() && head.extent.get() == whose.extent;
    if head.magic != MAGIC {
        // Who has lost the beginning of one does not take it for none.
        let is_zero = bytes.iter().all(|b| *b == 0);
        return if is_zero { Found::Nothing } else { Found::Damaged };
    }
    if !is_sealed(bytes, CHECKSUM_AT) {
        return Found::Damaged;
    }
    if !mine {
        return Found::Nothing;
    }
    let known = head.version.get() == VERSION && head.reserved.get() == 0;
    let map = known.then(|| placed(&head, rest, shape)).flatten();
    let map = map.and_then(|stripes| Map::of(head.era.get(), stripes, shape.places()));
    map.map_or(Found::Damaged, |map| Found::Map { sequence: head.sequence.get(), map })
}

fn placed(head: &Head, rest: &[u8], shape: &Shape) -> Option<Vec<Placed>> {
    let count = usize::try_from(shape.stripes()).ok()?;
    let bytes = count.checked_mul(size_of::<StoredPlaced>())?;
    let (records, behind) = rest.split_at_checked(bytes)?;
    if head.stripes.get() != shape.stripes() || behind.iter().any(|b| *b != 0) {
        return None;
    }
    let records = records.chunks_exact(size_of::<StoredPlaced>());
    let parsed = records.map(|record| {
        let record = StoredPlaced::read_from_bytes(record).ok()?;
        let placed = Placed { place: record.place.get(), number: record.number.get() };
        (record.reserved.get() == 0).then_some(placed)
    });
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use geometry::Level;

    const WHOSE: Whose = Whose { pool: Uuid::from_u128(1), extent: 7 };

    fn shape() -> Shape {
        Shape::new(Level::Parity, 5, 16, 256).unwrap()
    }

    fn map() -> Map {
        let stripes = (0..256).map(|n| Placed { place: (n + 3) % 264, number: u64::from(n) * 5 });
        Map::of(9, stripes.collect(), 264).unwrap()
    }

    #[test]
    fn it_reads_back_for_its_own_extent_only() {
        let bytes = to_bytes(&map(), 3, WHOSE);
        assert_eq!(bytes.len(), rows(&shape()) as usize * ROW);
        assert_eq!(parse(&bytes, &shape(), WHOSE), Found::Map { sequence: 3, map: map() });
        let other = Whose { extent: 8, ..WHOSE };
        assert_eq!(parse(&bytes, &shape(), other), Found::Nothing);
        assert_eq!(parse(&vec![0; ROW], &shape(), WHOSE), Found::Nothing);
        assert_eq!(parse(&bytes[..ROW], &shape(), WHOSE), Found::Damaged);
        let less = Shape::new(Level::Parity, 5, 16, 128).unwrap();
        assert_eq!(parse(&bytes, &less, WHOSE), Found::Damaged);
        let copies = Shape::new(Level::Copies(2), 4, 16, 256).unwrap();
        assert_eq!(rows(&copies), 0, "their stripes stay where they are");
    }

    /// What lies on disks is read for ever.
    #[test]
    fn the_golden_map_is_what_it_was() {
        assert_eq!(wire::crc32c(&to_bytes(&map(), 3, WHOSE)[CHECKSUM_AT + 4..]), GOLDEN);
    }

    const GOLDEN: u32 = 2_413_417_663;

    proptest! {
        #[test]
        fn any_bytes_are_one_or_none(at in 16usize..4096, value in any::<u8>()) {
            let mut bytes = to_bytes(&map(), 3, WHOSE);
            bytes[at] = value;
            seal(&mut bytes, CHECKSUM_AT);
            if let Found::Map { sequence, map } = parse(&bytes, &shape(), WHOSE) {
                prop_assert_eq!(to_bytes(&map, sequence, WHOSE), bytes);
            }
        }
    }
}

//! The format of a stripe map on a member ([format](../../../../docs/format/pool.md)).
//!
//! A stripe map says which slot each stripe of an extent occupies. Only extents with parity have
//! one: their full-stripe writes move stripes to free slots. Each column holds two copies after its
//! slots, and they are written in turn. The valid copy with the highest sequence number counts,
//! among those on all columns that are not stale.

use geometry::{ROW_BYTES, RaidGeometry};
use uuid::Uuid;
use wire::embedded_checksum::{verify_checksum, write_checksum};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::stripe_map::{StripeLocation, StripeMap};

const MAGIC: [u8; 16] = *b"WINDROSE STRIPE\n";

/// The only version so far.
const VERSION: u32 = 1;

const ROW: usize = ROW_BYTES as usize;

/// The beginning of a stored map. One [`StoredLocation`] for each stripe follows.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct MapHeader {
    magic: [u8; 16],
    /// Of the format.
    version: U32,
    /// CRC-32C of the whole map, calculated with zero here.
    checksum: U32,
    pool: [u8; 16],
    /// Number of the extent in the pool.
    extent: U64,
    /// The log generation of the entry numbers in the map.
    log_generation: U64,
    /// One more than that of the map before.
    sequence: U64,
    /// Number of stripes.
    stripes: U32,
    reserved: U32,
}

const HEADER_BYTES: usize = 72;
const _: () = assert!(size_of::<MapHeader>() == HEADER_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(MapHeader, checksum);

/// A [`StripeLocation`] on disk.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredLocation {
    /// Number of the parity log entry that moved the stripe to this slot; 0 if that was in an
    /// earlier log generation.
    entry_number: U64,
    slot: U32,
    reserved: U32,
}

/// Rows (4 KiB) that one stored map takes. 0 for an extent without parity: it has no free slots, so
/// its stripes do not move, and it has no map.
#[must_use]
pub fn map_rows(geometry: &RaidGeometry) -> u32 {
    if geometry.slots() == geometry.stripes() {
        return 0;
    }
    let bytes =
        HEADER_BYTES as u64 + u64::from(geometry.stripes()) * size_of::<StoredLocation>() as u64;
    u32::try_from(bytes.div_ceil(ROW as u64)).unwrap_or(u32::MAX)
}

/// The extent that a map belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapOwner {
    /// The pool.
    pub pool: Uuid,
    /// Number of the extent in the pool.
    pub extent: u64,
}

/// The contents of a stored map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParsedMap {
    /// A valid map; of several, the one with the highest sequence number counts.
    Map {
        /// Sequence number, one more than that of the map before.
        sequence: u64,
        /// The map.
        map: StripeMap,
    },
    /// No map of this extent was written here: there are only zeroes, or a map of another extent
    /// that had this place before.
    Absent,
    /// A map that is torn, damaged, or of an unknown format version, or that does not fit the
    /// geometry.
    Damaged,
}

/// The bytes of a map, in whole rows.
#[must_use]
pub fn to_bytes(map: &StripeMap, sequence: u64, owner: MapOwner) -> Vec<u8> {
    let header = MapHeader {
        magic: MAGIC,
        version: VERSION.into(),
        checksum: 0.into(),
        pool: owner.pool.into_bytes(),
        extent: owner.extent.into(),
        log_generation: map.log_generation().into(),
        sequence: sequence.into(),
        stripes: u32::try_from(map.stripes().len()).unwrap_or(u32::MAX).into(),
        reserved: 0.into(),
    };
    let mut out = header.as_bytes().to_vec();
    for location in map.stripes() {
        let (number, slot) = (location.entry_number.into(), location.slot.into());
        out.extend_from_slice(
            StoredLocation { entry_number: number, slot, reserved: 0.into() }.as_bytes(),
        );
    }
    out.resize(out.len().next_multiple_of(ROW), 0);
    write_checksum(&mut out, CHECKSUM_AT);
    out
}

/// Parses a map of an extent with this geometry.
#[must_use]
pub fn parse(bytes: &[u8], geometry: &RaidGeometry, owner: MapOwner) -> ParsedMap {
    let Ok((header, rest)) = MapHeader::read_from_prefix(bytes) else { return ParsedMap::Absent };
    let is_own = header.pool == owner.pool.into_bytes() && header.extent.get() == owner.extent;
    if header.magic != MAGIC {
        // A damaged header must not be taken for an absent map: without a map, each stripe would
        // count as lying in the slot of its own number.
        let is_zero = bytes.iter().all(|b| *b == 0);
        return if is_zero { ParsedMap::Absent } else { ParsedMap::Damaged };
    }
    if !verify_checksum(bytes, CHECKSUM_AT) {
        return ParsedMap::Damaged;
    }
    if !is_own {
        return ParsedMap::Absent;
    }
    let is_known_format = header.version.get() == VERSION && header.reserved.get() == 0;
    let map = is_known_format.then(|| parse_locations(&header, rest, geometry)).flatten();
    let map = map.and_then(|stripes| {
        StripeMap::from_locations(header.log_generation.get(), stripes, geometry.slots())
    });
    map.map_or(ParsedMap::Damaged, |map| ParsedMap::Map { sequence: header.sequence.get(), map })
}

fn parse_locations(
    header: &MapHeader,
    rest: &[u8],
    geometry: &RaidGeometry,
) -> Option<Vec<StripeLocation>> {
    let count = usize::try_from(geometry.stripes()).ok()?;
    let bytes = count.checked_mul(size_of::<StoredLocation>())?;
    let (records, padding) = rest.split_at_checked(bytes)?;
    if header.stripes.get() != geometry.stripes() || padding.iter().any(|b| *b != 0) {
        return None;
    }
    let records = records.chunks_exact(size_of::<StoredLocation>());
    let parsed = records.map(|record| {
        let record = StoredLocation::read_from_bytes(record).ok()?;
        let location =
            StripeLocation { slot: record.slot.get(), entry_number: record.entry_number.get() };
        (record.reserved.get() == 0).then_some(location)
    });
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use geometry::Redundancy;

    const OWNER: MapOwner = MapOwner { pool: Uuid::from_u128(1), extent: 7 };

    fn geometry() -> RaidGeometry {
        RaidGeometry::new(Redundancy::Parity, 5, 16, 256).unwrap()
    }

    fn map() -> StripeMap {
        let stripes = (0..256)
            .map(|n| StripeLocation { slot: (n + 3) % 264, entry_number: u64::from(n) * 5 });
        StripeMap::from_locations(9, stripes.collect(), 264).unwrap()
    }

    #[test]
    fn a_map_parses_only_for_its_own_extent() {
        let bytes = to_bytes(&map(), 3, OWNER);
        assert_eq!(bytes.len(), map_rows(&geometry()) as usize * ROW);
        assert_eq!(parse(&bytes, &geometry(), OWNER), ParsedMap::Map { sequence: 3, map: map() });
        let other = MapOwner { extent: 8, ..OWNER };
        assert_eq!(parse(&bytes, &geometry(), other), ParsedMap::Absent);
        assert_eq!(parse(&vec![0; ROW], &geometry(), OWNER), ParsedMap::Absent);
        assert_eq!(parse(&bytes[..ROW], &geometry(), OWNER), ParsedMap::Damaged);
        let fewer_stripes = RaidGeometry::new(Redundancy::Parity, 5, 16, 128).unwrap();
        assert_eq!(parse(&bytes, &fewer_stripes, OWNER), ParsedMap::Damaged);
        let copies = RaidGeometry::new(Redundancy::Copies(2), 4, 16, 256).unwrap();
        assert_eq!(map_rows(&copies), 0, "their stripes stay where they are");
    }

    /// The format on disk must never change.
    #[test]
    fn golden_stripe_map() {
        assert_eq!(wire::crc32c(&to_bytes(&map(), 3, OWNER)[CHECKSUM_AT + 4..]), GOLDEN);
    }

    const GOLDEN: u32 = 2_413_417_663;

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(at in 16usize..4096, value in any::<u8>()) {
            let mut bytes = to_bytes(&map(), 3, OWNER);
            bytes[at] = value;
            write_checksum(&mut bytes, CHECKSUM_AT);
            if let ParsedMap::Map { sequence, map } = parse(&bytes, &geometry(), OWNER) {
                prop_assert_eq!(to_bytes(&map, sequence, OWNER), bytes);
            }
        }
    }
}

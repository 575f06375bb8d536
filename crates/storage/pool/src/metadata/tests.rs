use geometry::{ALL_REGIONS, Level, ROW_BYTES, Shape};
use proptest::prelude::*;
use wire::Text;

use super::*;

pub(crate) const ROOM: u32 = 1024;
const UNITS: u32 = 6;
const EXTENT: u64 = 64 << 20;

pub(crate) fn raid5(columns: u16) -> Shape {
    Shape::new(Level::Parity, columns, 16, (16 << 20) / 16 / ROW_BYTES).unwrap()
}

fn mirror() -> Shape {
    Shape::new(Level::Copies(2), 2, 16, (16 << 20) / 16 / ROW_BYTES).unwrap()
}

fn add(n: u16) -> Change {
    Change::Add {
        member: MemberId(n),
        uuid: Uuid::from_u128(100 + u128::from(n)),
        serial: Text::new(&format!("S{n}")),
        units: UNITS,
        room: ROOM,
        units_at: 1 << 20,
        spare: false,
    }
}

fn create(volume: u32, shape: Shape, bytes: u64) -> Change {
    Change::CreateVolume {
        volume: VolumeId(volume),
        uuid: Uuid::from_u128(1000 + u128::from(volume)),
        shape,
        bytes,
        block_size: 4096,
        thick: false,
    }
}

/// A pool of so many members, version 1, which does not count yet.
pub(crate) fn pool(members: u16) -> Metadata {
    let mut pool = Metadata::new(Uuid::from_u128(1), Text::new("tank"), raid5(3), 16);
    pool.start(0).unwrap();
    pool.apply(&Change::Opened { id: Uuid::from_u128(10), forced: false }).unwrap();
    (0..members).for_each(|n| pool.apply(&add(n)).unwrap());
    pool
}

/// The next version, with these changes.
fn next(pool: &mut Metadata, changes: &[Change]) {
    pool.start(pool.version).unwrap();
    changes.iter().for_each(|change| pool.apply(change).unwrap());
    pool.check().unwrap();
}

fn pieces(at: &[(u16, u32)]) -> Vec<Piece> {
    at.iter().map(|(member, unit)| Piece { member: MemberId(*member), unit: *unit }).collect()
}

fn allocate(index: u32, at: &[(u16, u32)]) -> Change {
    Change::Allocate { volume: VolumeId(1), index, pieces: pieces(at) }
}

/// Pieces of four members with one extent of a RAID 5 over three of them.
fn with_an_extent() -> Metadata {
    let mut pool = pool(4);
    next(&mut pool, &[create(1, raid5(3), EXTENT), allocate(0, &[(0, 0), (1, 0), (2, 0)])]);
    pool
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let pool = with_an_extent();
    let (volume, m) = (VolumeId(1), MemberId);
    let to = |member, unit| Piece { member: m(member), unit };
    let moved = |to| Change::Move { volume, index: 0, column: 0, to };
    let table = [
        (add(0), Refused::MemberExists(m(0))),
        (Change::Out(m(9)), Refused::NoMember(m(9))),
        (Change::Back { member: m(0), marked: true }, Refused::Standing(m(0))),
        (Change::Remove(m(0)), Refused::Occupied { member: m(0), taken: 1 }),
        (create(1, raid5(3), EXTENT), Refused::VolumeExists(volume)),
        (allocate(0, &[(0, 1), (1, 1), (2, 1)]), Refused::ExtentExists { volume, index: 0 }),
        (allocate(1, &[(0, 0), (1, 1), (2, 1)]), Refused::Taken(to(0, 0))),
        (allocate(1, &[(0, 1), (0, 2), (2, 1)]), Refused::Twice(m(0))),
        (
            allocate(1, &[(0, UNITS), (1, 1), (2, 1)]),
            Refused::Senseless("a unit behind a member's end"),
        ),
        (
            allocate(9, &[(0, 1), (1, 1), (2, 1)]),
            Refused::Senseless("an extent behind a volume's end"),
        ),
        (moved(to(1, 3)), Refused::Twice(m(1))),
        (moved(to(1, 0)), Refused::Taken(to(1, 0))),
        (Change::Free { volume, index: 1 }, Refused::NoExtent { volume, index: 1 }),
        (Change::DeleteVolume(VolumeId(2)), Refused::NoVolume(VolumeId(2))),
        (
            Change::GrowVolume { volume, bytes: 4096 },
            Refused::Senseless("a volume that becomes smaller"),
        ),
    ];
    for (change, refused) in table {
        let mut next = pool.clone();
        next.start(next.version).unwrap();
        let before = next.clone();
        assert_eq!(next.apply(&change), Err(refused), "{change:?}");
        assert_eq!(next, before, "{change:?}");
    }
}

#[test]
fn what_is_written_while_a_member_is_out_is_behind_on_it() {
    let (volume, m) = (VolumeId(1), MemberId);
    let mut pool = with_an_extent();
    next(&mut pool, &[Change::Out(m(1))]);
    assert_eq!(pool.member(m(1)).unwrap().standing, Standing::Out { since: 3, knew: 2 });
    next(&mut pool, &[Change::Mark { volume, index: 0, regions: 5 }]);
    next(&mut pool, &[allocate(1, &[(1, 4), (0, 4), (3, 4)])]);
    next(&mut pool, &[Change::Back { member: m(1), marked: true }]);
    let behind =
        |pool: &Metadata, index, column| pool.volume(volume).unwrap().behind(index, column);
    assert_eq!((behind(&pool, 0, 1), behind(&pool, 0, 0)), (5, 0));
    assert_eq!(behind(&pool, 1, 0), ALL_REGIONS);
    let without = |n| pool.voters().without(Members::default().with(m(n)));
    assert_eq!(pool.lost(pool.voters()).count(), 0);
    assert_eq!(pool.lost(without(1)).count(), 0, "the one that is behind anyway");
    assert_eq!(pool.lost(without(0)).collect::<Vec<_>>(), [volume]);
    let caught = |index, column| Change::Caught { volume, index, column, regions: ALL_REGIONS };
    next(&mut pool, &[caught(0, 1), caught(1, 0)]);
    assert_eq!(pool.lost(pool.voters().without(Members(1))).count(), 0);
}

#[test]
fn lost_rows_are_remembered_until_they_are_written_or_freed() {
    let (mut pool, volume) = (with_an_extent(), VolumeId(1));
    let lost = |index, row, rows| Change::Lost { volume, index, row, rows };
    let rewritten = |row, rows| Change::Rewritten { volume, index: 0, row, rows };
    let told = |pool: &Metadata| -> Vec<_> { pool.volumes[&volume].all_lost().collect() };
    next(&mut pool, &[lost(0, 10, 4), lost(0, 14, 2), lost(0, 40, 1)]);
    assert_eq!(told(&pool), [(0, 10..16), (0, 40..41)]);
    next(&mut pool, &[rewritten(12, 1), rewritten(40, 1)]);
    assert_eq!(told(&pool), [(0, 10..12), (0, 13..16)]);
    pool.start(pool.version).unwrap();
    let none = Refused::NoExtent { volume, index: 1 };
    assert_eq!(pool.apply(&lost(1, 0, 1)), Err(none));
    for (row, rows) in [(0, 0), (8191, 2), (u32::MAX, 1)] {
        assert_eq!(pool.apply(&lost(0, row, rows)), Err(Refused::Senseless("a range of rows")));
    }
    // No more than a snapshot has room for.
    let ranges = (0..).take_while(|n| pool.apply(&lost(0, 100 + 2 * n, 1)).is_ok()).count();
    assert_eq!(ranges + 2, MAX_LOST);
    assert_eq!(pool.apply(&lost(0, 8000, 1)), Err(Refused::TooManyLost));
    pool.check().unwrap();
    next(&mut pool, &[Change::Free { volume, index: 0 }]);
    assert!(told(&pool).is_empty());
}

#[test]
fn rows_that_were_not_repaired_are_remembered_until_they_are_written_lost_or_freed() {
    let (mut pool, volume) = (with_an_extent(), VolumeId(1));
    let unrepaired = |row, rows| Change::Unrepaired { volume, index: 0, row, rows };
    let rewritten = |row, rows| Change::Rewritten { volume, index: 0, row, rows };
    let lost = |row, rows| Change::Lost { volume, index: 0, row, rows };
    let told = |pool: &Metadata| -> Vec<_> {
        pool.volumes[&volume].all_unrepaired().map(|(_, rows)| rows).collect()
    };
    next(&mut pool, &[lost(20, 2), unrepaired(10, 20), rewritten(12, 1)]);
    assert_eq!(told(&pool), [10..12, 13..20, 22..30], "what is lost is known to be");
    next(&mut pool, &[lost(28, 4)]);
    assert_eq!(told(&pool), [10..12, 13..20, 22..28]);
    pool.start(pool.version).unwrap();
    let ranges = (0..).take_while(|n| pool.apply(&unrepaired(100 + 2 * n, 1)).is_ok()).count();
    assert_eq!(ranges + 3, MAX_UNREPAIRED);
    assert_eq!(pool.apply(&unrepaired(8000, 1)), Err(Refused::TooManyUnrepaired));
    pool.apply(&lost(8000, 1)).unwrap();
    pool.check().unwrap();
    next(&mut pool, &[Change::Free { volume, index: 0 }]);
    assert!(told(&pool).is_empty());
}

/// A number that is used again must not begin with what was said of another extent.
#[test]
fn an_extent_that_is_freed_takes_its_marks_along() {
    let (volume, regions) = (VolumeId(1), 1);
    let mut pool = with_an_extent();
    next(&mut pool, &[Change::Out(MemberId(1)), Change::Mark { volume, index: 0, regions }]);
    next(&mut pool, &[Change::Free { volume, index: 0 }]);
    next(&mut pool, &[allocate(0, &[(0, 0), (2, 0), (3, 0)])]);
    assert_eq!(pool.volume(volume).unwrap().behind(0, 1), 0);
}

#[test]
fn one_that_returns_without_what_it_had_is_behind_with_everything() {
    let mut pool = with_an_extent();
    next(&mut pool, &[Change::Out(MemberId(1))]);
    next(&mut pool, &[Change::Back { member: MemberId(1), marked: false }]);
    assert_eq!(pool.volume(VolumeId(1)).unwrap().behind(0, 1), ALL_REGIONS);
}

#[test]
fn mirrors_of_pairs_bear_one_of_each_pair() {
    let shape = Shape::new(Level::Copies(2), 4, 16, 256).unwrap();
    let mut pool = pool(4);
    next(&mut pool, &[create(1, shape, EXTENT)]);
    let volume = pool.volume(VolumeId(1)).unwrap();
    assert_eq!(volume.extent_bytes(), 32 << 20);
    assert!(volume.survives(0b0101) && !volume.survives(0b0011));
    assert_eq!(
        (volume.bears(0), volume.bears(0b0100), volume.bears(0b1100)),
        (Some(1), Some(0), None)
    );
}

#[test]
fn a_version_is_followed_by_those_of_its_own_history_only() {
    let mut pool = pool(2);
    let first = pool.stamp();
    next(&mut pool, &[Change::Opened { id: Uuid::from_u128(11), forced: false }]);
    assert!(pool.follows(first) && pool.follows(pool.stamp()));
    assert!(!pool.follows(Stamp { id: Uuid::from_u128(12), ..pool.stamp() }));
    assert!(!pool.follows(Stamp { version: 3, ..pool.stamp() }), "the future");
    assert!(!pool.follows(Stamp { version: 2, ..first }), "what its opening did not make");
}

#[test]
fn the_window_begins_with_the_last_version_that_counts() {
    let mut pool = pool(3);
    let all = pool.voters();
    next(&mut pool, &[]);
    pool.start(1).unwrap();
    pool.apply(&Change::Out(MemberId(2))).unwrap();
    assert_eq!(pool.window(), [(1, all), (3, pool.voters())]);
    pool.start(3).unwrap();
    assert_eq!(pool.window(), [(3, pool.voters())]);
}

/// Any change, sensible or not, of a small pool.
fn changes() -> impl Strategy<Value = Change> {
    let (m, v) = (|| (0u16..6).prop_map(MemberId), || (1u32..4).prop_map(VolumeId));
    let piece = move || (m(), 0..UNITS + 1).prop_map(|(member, unit)| Piece { member, unit });
    let standing = prop_oneof![Just(Standing::In), Just(Standing::Spare), Just(Standing::Leaving)];
    let regions = || 0u32..=ALL_REGIONS + 1;
    prop_oneof![
        2 => any::<u64>().prop_map(|n| Change::Opened { id: Uuid::from_u128(n.into()), forced: n % 2 == 0 }),
        1 => Just(Change::Recovered),
        3 => (0u16..6).prop_map(add),
        2 => m().prop_map(Change::Out),
        2 => (m(), any::<bool>()).prop_map(|(member, marked)| Change::Back { member, marked }),
        1 => (m(), standing).prop_map(|(member, standing)| Change::Stand { member, standing }),
        1 => m().prop_map(Change::Remove),
        2 => (1u32..4, any::<bool>()).prop_map(|(n, two)| create(n, if two { mirror() } else { raid5(3) }, EXTENT)),
        1 => v().prop_map(|volume| Change::GrowVolume { volume, bytes: 2 * EXTENT }),
        1 => v().prop_map(Change::DeleteVolume),
        9 => (v(), 0u32..5, prop::collection::vec(piece(), 2..4))
            .prop_map(|(volume, index, pieces)| Change::Allocate { volume, index, pieces }),
        1 => (v(), 0u32..5).prop_map(|(volume, index)| Change::Free { volume, index }),
        3 => (v(), 0u32..5, 0u16..3, piece())
            .prop_map(|(volume, index, column, to)| Change::Move { volume, index, column, to }),
        2 => (v(), 0u32..5, regions()).prop_map(|(volume, index, regions)| Change::Mark { volume, index, regions }),
        2 => (v(), 0u32..5, 0u16..3, regions())
            .prop_map(|(volume, index, column, regions)| Change::Caught { volume, index, column, regions }),
        2 => (v(), 0u32..3, 0u32..40, 0u32..9)
            .prop_map(|(volume, index, row, rows)| Change::Lost { volume, index, row, rows }),
        2 => (v(), 0u32..3, 0u32..40, 0u32..9)
            .prop_map(|(volume, index, row, rows)| Change::Rewritten { volume, index, row, rows }),
        2 => (v(), 0u32..3, 0u32..40, 0u32..9)
            .prop_map(|(volume, index, row, rows)| Change::Unrepaired { volume, index, row, rows }),
        1 => (m(), any::<[u64; 6]>()).prop_map(|(member, [reads, writes, checksums, repaired, unrepairable, since_s])| {
            let errors = ErrorCounts { reads, writes, checksums, repaired, unrepairable, since_s };
            Change::Counted { member, errors }
        }),
        1 => any::<[u64; 4]>().prop_map(|[ended_s, bytes, repaired, unrepairable]| {
            Change::Scrubbed(ScrubRecord { ended_s, bytes, repaired, unrepairable })
        }),
    ]
}

/// What a writer would write: versions, each of the changes that were not refused, and whether what was before it counts.
pub(crate) fn histories() -> impl Strategy<Value = Vec<(bool, Vec<Change>)>> {
    prop::collection::vec((any::<bool>(), prop::collection::vec(changes(), 0..6)), 0..40)
}

proptest! {
    #[test]
    fn every_change_leaves_it_whole_or_is_refused_and_leaves_it(history in histories()) {
        let mut pool = with_an_extent();
        for (counts, changes) in history {
            let counted = if counts { pool.version } else { pool.counted };
            prop_assume!(pool.start(counted).is_ok());
            for change in changes {
                let before = pool.clone();
                if pool.apply(&change).is_err() {
                    prop_assert_eq!(&pool, &before, "{:?}", change);
                }
                prop_assert_eq!(pool.check(), Ok(()), "{:?}", change);
            }
        }
    }
}

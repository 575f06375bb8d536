use geometry::{ALL_REGIONS, ROW_BYTES, RaidGeometry, Redundancy};
use proptest::prelude::*;

use super::*;
use crate::samples::{PHYSICAL_EXTENTS as UNITS, add_member as add, pool, raid5};

const EXTENT: u64 = 64 << 20;

fn mirror() -> RaidGeometry {
    RaidGeometry::new(Redundancy::Copies(2), 2, 16, (16 << 20) / 16 / ROW_BYTES).unwrap()
}

fn create(volume: u32, geometry: RaidGeometry, bytes: u64) -> Change {
    Change::CreateVolume {
        volume: PoolVolumeId(volume),
        uuid: Uuid::from_u128(1000 + u128::from(volume)),
        geometry,
        bytes,
        block_size: 4096,
        is_thick: false,
    }
}

/// The next version, with these changes.
fn next(pool: &mut Metadata, changes: &[Change]) {
    pool.begin_version(pool.version).unwrap();
    changes.iter().for_each(|change| pool.apply(change).unwrap());
    pool.check().unwrap();
}

fn pieces(at: &[(u16, u32)]) -> Vec<PhysicalExtent> {
    at.iter()
        .map(|(member, index)| PhysicalExtent { member: MemberId(*member), index: *index })
        .collect()
}

fn allocate(index: u32, at: &[(u16, u32)]) -> Change {
    Change::AllocateExtent { volume: PoolVolumeId(1), index, columns: pieces(at) }
}

/// A pool of four members with one extent of a RAID 5 over three of them.
fn with_an_extent() -> Metadata {
    let mut pool = pool(4);
    next(&mut pool, &[create(1, raid5(3), EXTENT), allocate(0, &[(0, 0), (1, 0), (2, 0)])]);
    pool
}

#[test]
fn invalid_changes_are_refused_and_change_nothing() {
    let pool = with_an_extent();
    let (volume, m) = (PoolVolumeId(1), MemberId);
    let to = |member, index| PhysicalExtent { member: m(member), index };
    let moved = |to| Change::MoveColumn { volume, index: 0, column: 0, to };
    let table = [
        (add(0), ChangeError::MemberExists(m(0))),
        (Change::Detach(m(9)), ChangeError::NoMember(m(9))),
        (
            Change::Reattach { member: m(0), only_stale_regions: true },
            ChangeError::WrongMemberState(m(0)),
        ),
        (Change::RemoveMember(m(0)), ChangeError::Occupied { member: m(0), allocated: 1 }),
        (create(1, raid5(3), EXTENT), ChangeError::WrongVolumeId(volume)),
        (allocate(0, &[(0, 1), (1, 1), (2, 1)]), ChangeError::ExtentExists { volume, index: 0 }),
        (allocate(1, &[(0, 0), (1, 1), (2, 1)]), ChangeError::ExtentInUse(to(0, 0))),
        (allocate(1, &[(0, 1), (0, 2), (2, 1)]), ChangeError::MemberUsedTwice(m(0))),
        (
            allocate(1, &[(0, UNITS), (1, 1), (2, 1)]),
            ChangeError::InvalidValue("a physical extent past a member's end"),
        ),
        (
            allocate(9, &[(0, 1), (1, 1), (2, 1)]),
            ChangeError::InvalidValue("an extent past a volume's end"),
        ),
        (moved(to(1, 3)), ChangeError::MemberUsedTwice(m(1))),
        (moved(to(1, 0)), ChangeError::ExtentInUse(to(1, 0))),
        (Change::FreeExtent { volume, index: 1 }, ChangeError::NoExtent { volume, index: 1 }),
        (Change::DeleteVolume(PoolVolumeId(2)), ChangeError::NoVolume(PoolVolumeId(2))),
        (
            Change::GrowVolume { volume, bytes: 4096 },
            ChangeError::InvalidValue("a smaller volume size"),
        ),
    ];
    for (change, refused) in table {
        let mut next = pool.clone();
        next.begin_version(next.version).unwrap();
        let before = next.clone();
        assert_eq!(next.apply(&change), Err(refused), "{change:?}");
        assert_eq!(next, before, "{change:?}");
    }
}

#[test]
fn writes_while_a_member_is_detached_make_it_stale() {
    let (volume, m) = (PoolVolumeId(1), MemberId);
    let mut pool = with_an_extent();
    next(&mut pool, &[Change::Detach(m(1))]);
    assert_eq!(
        pool.member(m(1)).unwrap().state,
        PoolMemberState::Detached { since: 3, min_version: 2 }
    );
    next(&mut pool, &[Change::MarkStale { volume, index: 0, regions: 5 }]);
    next(&mut pool, &[allocate(1, &[(1, 4), (0, 4), (3, 4)])]);
    next(&mut pool, &[Change::Reattach { member: m(1), only_stale_regions: true }]);
    let stale = |pool: &Metadata, index, column| {
        pool.volume(volume).unwrap().stale_regions_of(index, column)
    };
    assert_eq!((stale(&pool, 0, 1), stale(&pool, 0, 0)), (5, 0));
    assert_eq!(stale(&pool, 1, 0), ALL_REGIONS);
    let without = |n| pool.voters().difference(MemberSet::default().with(m(n)));
    assert_eq!(pool.lost_volumes(pool.voters()).count(), 0);
    assert_eq!(pool.lost_volumes(without(1)).count(), 0, "the one that is behind anyway");
    assert_eq!(pool.lost_volumes(without(0)).collect::<Vec<_>>(), [volume]);
    let caught = |index, column| Change::ClearStale { volume, index, column, regions: ALL_REGIONS };
    next(&mut pool, &[caught(0, 1), caught(1, 0)]);
    assert_eq!(pool.lost_volumes(pool.voters().difference(MemberSet(1))).count(), 0);
}

#[test]
fn lost_rows_are_recorded_until_rewritten_or_freed() {
    let (mut pool, volume) = (with_an_extent(), PoolVolumeId(1));
    let lost =
        |index, row, rows| Change::MarkLost { volume, index, first_row: row, row_count: rows };
    let rewritten =
        |row, rows| Change::MarkRewritten { volume, index: 0, first_row: row, row_count: rows };
    let recorded = |pool: &Metadata| -> Vec<_> { pool.volumes[&volume].all_lost().collect() };
    next(&mut pool, &[lost(0, 10, 4), lost(0, 14, 2), lost(0, 40, 1)]);
    assert_eq!(recorded(&pool), [(0, 10..16), (0, 40..41)]);
    next(&mut pool, &[rewritten(12, 1), rewritten(40, 1)]);
    assert_eq!(recorded(&pool), [(0, 10..12), (0, 13..16)]);
    pool.begin_version(pool.version).unwrap();
    let none = ChangeError::NoExtent { volume, index: 1 };
    assert_eq!(pool.apply(&lost(1, 0, 1)), Err(none));
    for (row, rows) in [(0, 0), (8191, 2), (u32::MAX, 1)] {
        assert_eq!(
            pool.apply(&lost(0, row, rows)),
            Err(ChangeError::InvalidValue("a range of rows"))
        );
    }
    // At most as many as fit a snapshot.
    let ranges = (0..).take_while(|n| pool.apply(&lost(0, 100 + 2 * n, 1)).is_ok()).count();
    assert_eq!(ranges + 2, MAX_DAMAGED_RANGES);
    assert_eq!(pool.apply(&lost(0, 8000, 1)), Err(ChangeError::TooManyDamagedRanges));
    pool.check().unwrap();
    next(&mut pool, &[Change::FreeExtent { volume, index: 0 }]);
    assert!(recorded(&pool).is_empty());
}

#[test]
fn unrepaired_rows_are_recorded_until_rewritten_lost_or_freed() {
    let (mut pool, volume) = (with_an_extent(), PoolVolumeId(1));
    let unrepaired =
        |row, rows| Change::MarkUnrepaired { volume, index: 0, first_row: row, row_count: rows };
    let rewritten =
        |row, rows| Change::MarkRewritten { volume, index: 0, first_row: row, row_count: rows };
    let lost = |row, rows| Change::MarkLost { volume, index: 0, first_row: row, row_count: rows };
    let recorded = |pool: &Metadata| -> Vec<_> {
        pool.volumes[&volume].all_unrepaired().map(|(_, rows)| rows).collect()
    };
    next(&mut pool, &[lost(20, 2), unrepaired(10, 20), rewritten(12, 1)]);
    assert_eq!(recorded(&pool), [10..12, 13..20, 22..30], "what is lost is known to be");
    next(&mut pool, &[lost(28, 4)]);
    assert_eq!(recorded(&pool), [10..12, 13..20, 22..28]);
    pool.begin_version(pool.version).unwrap();
    let ranges = (0..).take_while(|n| pool.apply(&unrepaired(100 + 2 * n, 1)).is_ok()).count();
    assert_eq!(ranges + 3, MAX_UNREPAIRED_RANGES);
    assert_eq!(pool.apply(&unrepaired(8000, 1)), Err(ChangeError::TooManyUnrepairedRanges));
    pool.apply(&lost(8000, 1)).unwrap();
    pool.check().unwrap();
    next(&mut pool, &[Change::FreeExtent { volume, index: 0 }]);
    assert!(recorded(&pool).is_empty());
}

/// A reused index must not inherit the damage of the extent that had it before.
#[test]
fn freeing_an_extent_drops_its_marks() {
    let (volume, regions) = (PoolVolumeId(1), 1);
    let mut pool = with_an_extent();
    next(
        &mut pool,
        &[Change::Detach(MemberId(1)), Change::MarkStale { volume, index: 0, regions }],
    );
    next(&mut pool, &[Change::FreeExtent { volume, index: 0 }]);
    next(&mut pool, &[allocate(0, &[(0, 0), (2, 0), (3, 0)])]);
    assert_eq!(pool.volume(volume).unwrap().stale_regions_of(0, 1), 0);
}

#[test]
fn a_member_that_lost_its_contents_is_entirely_stale() {
    let mut pool = with_an_extent();
    next(&mut pool, &[Change::Detach(MemberId(1))]);
    next(&mut pool, &[Change::Reattach { member: MemberId(1), only_stale_regions: false }]);
    assert_eq!(pool.volume(PoolVolumeId(1)).unwrap().stale_regions_of(0, 1), ALL_REGIONS);
}

#[test]
fn raid10_survives_one_of_each_pair() {
    let geometry = RaidGeometry::new(Redundancy::Copies(2), 4, 16, 256).unwrap();
    let mut pool = pool(4);
    next(&mut pool, &[create(1, geometry, EXTENT)]);
    let volume = pool.volume(PoolVolumeId(1)).unwrap();
    assert_eq!(volume.extent_bytes(), 32 << 20);
    assert!(volume.survives_loss_of(0b0101) && !volume.survives_loss_of(0b0011));
    assert_eq!(
        (volume.fault_tolerance(0), volume.fault_tolerance(0b0100), volume.fault_tolerance(0b1100)),
        (Some(1), Some(0), None)
    );
}

#[test]
fn only_versions_of_the_same_history_are_descendants() {
    let mut pool = pool(2);
    let first = pool.version_id();
    next(&mut pool, &[Change::StartTerm { term_id: Uuid::from_u128(11), is_forced: false }]);
    assert!(pool.descends_from(first) && pool.descends_from(pool.version_id()));
    assert!(!pool.descends_from(VersionId { term_id: Uuid::from_u128(12), ..pool.version_id() }));
    assert!(!pool.descends_from(VersionId { version: 3, ..pool.version_id() }), "the future");
    assert!(
        !pool.descends_from(VersionId { version: 2, ..first }),
        "what its opening did not make"
    );
}

#[test]
fn the_voter_history_begins_with_the_last_committed_version() {
    let mut pool = pool(3);
    let all = pool.voters();
    next(&mut pool, &[]);
    pool.begin_version(1).unwrap();
    pool.apply(&Change::Detach(MemberId(2))).unwrap();
    assert_eq!(pool.voter_history(), [(1, all), (3, pool.voters())]);
    pool.begin_version(3).unwrap();
    assert_eq!(pool.voter_history(), [(3, pool.voters())]);
}

/// Any change of a small pool, valid or not.
fn changes() -> impl Strategy<Value = Change> {
    let (m, v) = (|| (0u16..6).prop_map(MemberId), || (1u32..4).prop_map(PoolVolumeId));
    let physical_extent =
        move || (m(), 0..UNITS + 1).prop_map(|(member, index)| PhysicalExtent { member, index });
    let state = prop_oneof![
        Just(PoolMemberState::Active),
        Just(PoolMemberState::Spare),
        Just(PoolMemberState::Draining)
    ];
    let regions = || 0u32..=ALL_REGIONS + 1;
    prop_oneof![
        2 => any::<u64>().prop_map(|n| Change::StartTerm { term_id: Uuid::from_u128(n.into()), is_forced: n % 2 == 0 }),
        1 => Just(Change::LogsRecovered),
        3 => (0u16..6).prop_map(add),
        2 => m().prop_map(Change::Detach),
        2 => (m(), any::<bool>()).prop_map(|(member, only_stale_regions)| Change::Reattach { member, only_stale_regions }),
        1 => (m(), state).prop_map(|(member, state)| Change::SetMemberState { member, state }),
        1 => m().prop_map(Change::RemoveMember),
        2 => (1u32..4, any::<bool>()).prop_map(|(n, two)| create(n, if two { mirror() } else { raid5(3) }, EXTENT)),
        1 => v().prop_map(|volume| Change::GrowVolume { volume, bytes: 2 * EXTENT }),
        1 => v().prop_map(Change::DeleteVolume),
        9 => (v(), 0u32..5, prop::collection::vec(physical_extent(), 2..4))
            .prop_map(|(volume, index, columns)| Change::AllocateExtent { volume, index, columns }),
        1 => (v(), 0u32..5).prop_map(|(volume, index)| Change::FreeExtent { volume, index }),
        3 => (v(), 0u32..5, 0u16..3, physical_extent())
            .prop_map(|(volume, index, column, to)| Change::MoveColumn { volume, index, column, to }),
        2 => (v(), 0u32..5, regions()).prop_map(|(volume, index, regions)| Change::MarkStale { volume, index, regions }),
        2 => (v(), 0u32..5, 0u16..3, regions())
            .prop_map(|(volume, index, column, regions)| Change::ClearStale { volume, index, column, regions }),
        2 => (v(), 0u32..3, 0u32..40, 0u32..9)
            .prop_map(|(volume, index, row, rows)| Change::MarkLost { volume, index, first_row: row, row_count: rows }),
        2 => (v(), 0u32..3, 0u32..40, 0u32..9)
            .prop_map(|(volume, index, row, rows)| Change::MarkRewritten { volume, index, first_row: row, row_count: rows }),
        2 => (v(), 0u32..3, 0u32..40, 0u32..9)
            .prop_map(|(volume, index, row, rows)| Change::MarkUnrepaired { volume, index, first_row: row, row_count: rows }),
        1 => (m(), any::<[u64; 6]>()).prop_map(|(member, [reads, writes, checksums, repaired, unrepairable, since_s])| {
            let errors = MemberErrorCounts { read_errors: reads, write_errors: writes, corrupt_reads: checksums, repaired_rows: repaired, unrecoverable_rows: unrepairable, since_s };
            Change::RecordErrors { member, errors }
        }),
        1 => any::<[u64; 4]>().prop_map(|[ended_s, bytes, repaired, unrepairable]| {
            Change::RecordScrub(ScrubRecord { ended_s, bytes, repaired_rows: repaired, unrecoverable_rows: unrepairable })
        }),
    ]
}

/// What a writer would write: the accepted changes of each version, and whether the version before
/// it is committed.
pub(crate) fn histories() -> impl Strategy<Value = Vec<(bool, Vec<Change>)>> {
    prop::collection::vec((any::<bool>(), prop::collection::vec(changes(), 0..6)), 0..40)
}

proptest! {
    #[test]
    fn each_change_keeps_the_invariants_or_is_refused(history in histories()) {
        let mut pool = with_an_extent();
        for (counts, changes) in history {
            let committed = if counts { pool.version } else { pool.committed };
            prop_assume!(pool.begin_version(committed).is_ok());
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

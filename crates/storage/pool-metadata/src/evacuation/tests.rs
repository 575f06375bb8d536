use uuid::Uuid;

use super::*;
use crate::allocator::place_columns;
use crate::metadata::{Change, PoolVolumeId};
use crate::samples::{pool, raid5};

const VOLUME: PoolVolumeId = PoolVolumeId(1);
const NONE: fn() -> ReservedExtents = ReservedExtents::default;
/// Physical extents of a disk in these tests.
const UNITS: u32 = 6;

/// A RAID 5 over three of so many disks of six physical extents each, with a thin volume of `full`
/// extents of which so many are allocated.
fn with_volume(disks: u16, full: u64, extents: u32) -> Metadata {
    let mut pool = pool(disks);
    let (uuid, geometry, bytes) = (Uuid::from_u128(9), raid5(3), full * pool.extent_bytes());
    apply(
        &mut pool,
        &Change::CreateVolume {
            volume: VOLUME,
            uuid,
            geometry,
            bytes,
            block_size: 4096,
            is_thick: false,
        },
    );
    (0..extents).for_each(|index| allocate(&mut pool, index));
    pool
}

fn apply(pool: &mut Metadata, change: &Change) {
    pool.begin_version(pool.version_id().version).unwrap();
    pool.apply(change).unwrap();
}

fn allocate(pool: &mut Metadata, index: u32) {
    let columns = place_columns(pool, &NONE(), &raid5(3)).unwrap();
    apply(pool, &Change::AllocateExtent { volume: VOLUME, index, columns });
}

fn spare(pool: &mut Metadata, n: u16, physical_extents: u32) {
    let (uuid, serial) = (Uuid::from_u128(200 + u128::from(n)), wire::ShortText::new("S"));
    let (snapshot_blocks, extents_at) = (crate::samples::SNAPSHOT_BLOCKS, 1 << 20);
    let member = MemberId(n);
    apply(
        pool,
        &Change::AddMember {
            member,
            uuid,
            serial,
            physical_extents,
            snapshot_blocks,
            extents_at,
            is_spare: true,
        },
    );
}

fn refusal(pool: &Metadata, n: u16) -> String {
    pool.check_removal(MemberId(n), &NONE()).unwrap_err().to_string()
}

#[test]
fn a_stripe_needs_as_many_disks_as_it_has_columns() {
    for extents in [0, 1, 6] {
        let pool = with_volume(3, 6, extents);
        let is =
            "without it 2 disks would hold data, but a stripe of this pool needs 3 different disks";
        assert_eq!(refusal(&pool, 1), is, "{extents} extents");
    }
    assert!(with_volume(4, 6, 1).check_removal(MemberId(1), &NONE()).unwrap().is_empty());
}

/// There are enough free physical extents, but not on different disks.
#[test]
fn capacity_counts_what_can_be_placed() {
    let mut pool = with_volume(4, 12, 8);
    // Two free physical extents on each of four disks, less the two columns of each extent.
    assert!(refusal(&pool, 0).contains("it holds 6 columns, and"));
    apply(&mut pool, &Change::FreeExtent { volume: VOLUME, index: 0 });
    let all = MemberSet(0b1111);
    let plan = pool.plan_evacuation(MemberSet(1), all, &NONE());
    assert!(plan.columns >= 5 && plan.unplaceable > 0, "{plan:?}");
    let mut reserved = NONE();
    let few = with_volume(4, 2, 2);
    assert_eq!(few.plan_evacuation(MemberSet(1), all, &reserved).unplaceable, 0);
    for index in 0..UNITS {
        reserved.reserve(&[super::super::metadata::PhysicalExtent { member: MemberId(3), index }]);
    }
    assert!(
        few.plan_evacuation(MemberSet(1), all, &reserved).unplaceable > 0,
        "what is chosen is not free"
    );
}

#[test]
fn volumes_keep_space_for_unallocated_extents() {
    // Four disks hold eight extents in all, three hold six.
    let pool = with_volume(4, 8, 2);
    assert_eq!((pool.free_extents(), pool.unallocated_extents()), (6, 6));
    let said = refusal(&pool, 0);
    assert!(said.starts_with("volumes of the pool may still write 192 MiB"), "{said}");
    assert!(said.ends_with("there is space for only 128 MiB"), "{said}");
    assert!(with_volume(4, 6, 2).check_removal(MemberId(0), &NONE()).is_ok());
    // Volumes may already grow beyond the space: removal is allowed then, unless it takes the last
    // free extent.
    assert!(with_volume(4, 20, 2).check_removal(MemberId(0), &NONE()).is_ok());
    assert!(refusal(&with_volume(4, 20, 6), 0).contains("space for only 0 MiB"));
}

#[test]
fn the_smallest_sufficient_spare_is_activated() {
    let mut pool = with_volume(3, 6, 5);
    spare(&mut pool, 3, 2);
    spare(&mut pool, 4, 9);
    spare(&mut pool, 5, 6);
    assert_eq!(pool.spare_to_activate(true, &NONE()), None, "all are there");
    apply(&mut pool, &Change::Detach(MemberId(1)));
    assert_eq!(pool.spare_to_activate(true, &NONE()), Some(MemberId(5)), "the smallest that fits");
    assert_eq!(pool.spare_to_activate(false, &NONE()), Some(MemberId(5)), "nothing else has room");
}

#[test]
fn spares_that_are_too_small_are_activated_one_by_one() {
    let mut pool = with_volume(3, 6, 5);
    spare(&mut pool, 3, 2);
    spare(&mut pool, 4, 3);
    apply(&mut pool, &Change::Detach(MemberId(1)));
    let stand = |member| Change::SetMemberState { member, state: PoolMemberState::Active };
    assert_eq!(pool.spare_to_activate(true, &NONE()), Some(MemberId(4)), "the larger one first");
    apply(&mut pool, &stand(MemberId(4)));
    assert_eq!(pool.spare_to_activate(false, &NONE()), Some(MemberId(3)));
    apply(&mut pool, &stand(MemberId(3)));
    assert_eq!(pool.spare_to_activate(false, &NONE()), None);
}

#[test]
fn removing_a_disk_activates_a_sufficient_spare() {
    let mut pool = with_volume(3, 5, 5);
    spare(&mut pool, 3, 2);
    assert!(refusal(&pool, 1).contains("2 disks would hold data"), "the spare is too small");
    spare(&mut pool, 4, 6);
    spare(&mut pool, 5, 9);
    let called = pool.check_removal(MemberId(1), &NONE()).unwrap();
    assert_eq!(called, MemberSet::default().with(MemberId(4)));
    assert!(pool.check_removal(MemberId(4), &NONE()).unwrap().is_empty(), "a spare may go");
}

#[test]
fn detached_disks_offer_no_space() {
    let mut pool = with_volume(4, 6, 0);
    let (free, all) = (pool.free_extents(), pool.total_extents());
    apply(&mut pool, &Change::Detach(MemberId(2)));
    assert!(pool.free_extents() < free);
    assert_eq!(pool.total_extents(), all, "that is what it will be when the disk is back");
    apply(&mut pool, &Change::Detach(MemberId(3)));
    assert_eq!(pool.free_extents(), 0, "two disks are too few for three columns");
}

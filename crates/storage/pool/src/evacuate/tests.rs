use uuid::Uuid;

use super::*;
use crate::allocate::choose;
use crate::metadata::tests::{pool, raid5};
use crate::metadata::{Change, VolumeId};

const VOLUME: VolumeId = VolumeId(1);
const NONE: fn() -> Reserved = Reserved::default;
/// Units of a disk of these tests.
const UNITS: u32 = 6;

/// A RAID 5 over three of so many disks of six units each, with a thin volume of `full` extents of which it has so many.
fn with_volume(disks: u16, full: u64, extents: u32) -> Metadata {
    let mut pool = pool(disks);
    let (uuid, shape, bytes) = (Uuid::from_u128(9), raid5(3), full * pool.extent_bytes());
    apply(
        &mut pool,
        &Change::CreateVolume {
            volume: VOLUME,
            uuid,
            shape,
            bytes,
            block_size: 4096,
            thick: false,
        },
    );
    (0..extents).for_each(|index| allocate(&mut pool, index));
    pool
}

fn apply(pool: &mut Metadata, change: &Change) {
    pool.start(pool.stamp().version).unwrap();
    pool.apply(change).unwrap();
}

fn allocate(pool: &mut Metadata, index: u32) {
    let pieces = choose(pool, &NONE(), &raid5(3)).unwrap();
    apply(pool, &Change::Allocate { volume: VOLUME, index, pieces });
}

fn spare(pool: &mut Metadata, n: u16, units: u32) {
    let (uuid, serial) = (Uuid::from_u128(200 + u128::from(n)), wire::Text::new("S"));
    let (room, units_at) = (crate::metadata::tests::ROOM, 1 << 20);
    let member = MemberId(n);
    apply(pool, &Change::Add { member, uuid, serial, units, room, units_at, spare: true });
}

fn refusal(pool: &Metadata, n: u16) -> String {
    let why = pool.may_leave(MemberId(n), &NONE()).unwrap_err();
    assert!(why.is_no_space() && why.hint().is_some());
    why.to_string()
}

#[test]
fn a_stripe_needs_as_many_disks_as_it_has_columns() {
    for extents in [0, 1, 6] {
        let pool = with_volume(3, 6, extents);
        let is =
            "without it 2 disks would hold data, and a stripe of this pool needs 3 different ones";
        assert_eq!(refusal(&pool, 1), is, "{extents} extents");
    }
    assert!(with_volume(4, 6, 1).may_leave(MemberId(1), &NONE()).unwrap().is_empty());
}

/// There are free units enough, but not on different disks.
#[test]
fn what_really_fits_is_counted() {
    let mut pool = with_volume(4, 12, 8);
    // Two free units on each of four disks less the two pieces of each extent.
    assert!(refusal(&pool, 0).contains("6 pieces on it, and"));
    apply(&mut pool, &Change::Free { volume: VOLUME, index: 0 });
    let all = Members(0b1111);
    let goes = pool.evacuation(Members(1), all, &NONE());
    assert!(goes.pieces >= 5 && goes.stranded > 0, "{goes:?}");
    let mut reserved = NONE();
    let few = with_volume(4, 2, 2);
    assert_eq!(few.evacuation(Members(1), all, &reserved).stranded, 0);
    for unit in 0..UNITS {
        reserved.take(&[super::super::metadata::Piece { member: MemberId(3), unit }]);
    }
    assert!(few.evacuation(Members(1), all, &reserved).stranded > 0, "what is chosen is not free");
}

#[test]
fn volumes_that_may_still_write_have_room_afterwards() {
    // Eight extents in all of four disks; six of three.
    let pool = with_volume(4, 8, 2);
    assert_eq!((pool.extents_free(), pool.extents_promised()), (6, 6));
    let said = refusal(&pool, 0);
    assert!(said.starts_with("volumes of the pool may still write 192 MiB"), "{said}");
    assert!(said.ends_with("there is room for 128 MiB"), "{said}");
    assert!(with_volume(4, 6, 2).may_leave(MemberId(0), &NONE()).is_ok());
    // More was promised than there is: that is not made worse than it was, but for the last room.
    assert!(with_volume(4, 20, 2).may_leave(MemberId(0), &NONE()).is_ok());
    assert!(refusal(&with_volume(4, 20, 6), 0).contains("room for 0 MiB"));
}

#[test]
fn the_spare_that_fits_is_called_and_not_the_first() {
    let mut pool = with_volume(3, 6, 5);
    spare(&mut pool, 3, 2);
    spare(&mut pool, 4, 9);
    spare(&mut pool, 5, 6);
    assert_eq!(pool.spare_to_call(true, &NONE()), None, "all are there");
    apply(&mut pool, &Change::Out(MemberId(1)));
    assert_eq!(pool.spare_to_call(true, &NONE()), Some(MemberId(5)), "the smallest that fits");
    assert_eq!(pool.spare_to_call(false, &NONE()), Some(MemberId(5)), "nothing else has room");
}

#[test]
fn spares_that_are_too_small_are_called_one_after_the_other() {
    let mut pool = with_volume(3, 6, 5);
    spare(&mut pool, 3, 2);
    spare(&mut pool, 4, 3);
    apply(&mut pool, &Change::Out(MemberId(1)));
    let stand = |member| Change::Stand { member, standing: Standing::In };
    assert_eq!(pool.spare_to_call(true, &NONE()), Some(MemberId(4)), "the larger one first");
    apply(&mut pool, &stand(MemberId(4)));
    assert_eq!(pool.spare_to_call(false, &NONE()), Some(MemberId(3)));
    apply(&mut pool, &stand(MemberId(3)));
    assert_eq!(pool.spare_to_call(false, &NONE()), None);
}

#[test]
fn a_disk_that_leaves_has_a_spare_called_that_fits() {
    let mut pool = with_volume(3, 5, 5);
    spare(&mut pool, 3, 2);
    assert!(refusal(&pool, 1).contains("2 disks would hold data"), "the spare is too small");
    spare(&mut pool, 4, 6);
    spare(&mut pool, 5, 9);
    let called = pool.may_leave(MemberId(1), &NONE()).unwrap();
    assert_eq!(called, Members::default().with(MemberId(4)));
    assert!(pool.may_leave(MemberId(4), &NONE()).unwrap().is_empty(), "a spare may go");
}

#[test]
fn room_on_disks_that_are_out_is_none() {
    let mut pool = with_volume(4, 6, 0);
    let (free, all) = (pool.extents_free(), pool.extents_in_all());
    apply(&mut pool, &Change::Out(MemberId(2)));
    assert!(pool.extents_free() < free);
    assert_eq!(pool.extents_in_all(), all, "that is what it will be when the disk is back");
    apply(&mut pool, &Change::Out(MemberId(3)));
    assert_eq!(pool.extents_free(), 0, "two disks are too few for three columns");
}

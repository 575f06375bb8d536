//! RELEASE (5.12.11.2.2) and CLEAR (5.12.11.2.7).

use reservation::{Change, Kind, Notice, Refusal};

use crate::world::{World, a, b, c, release};

/// 5.12.11.2.2: the holder releases, registrations stay, and registrants are told if it gave them
/// rights.
#[test]
fn clause_5_12_11_2_2_the_holder_releases() {
    for kind in Kind::ALL {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2), (c(), 3)]);
        world.done(&a(), &release(1, kind));
        assert_eq!((world.kind(), world.counted()), (None, 0));
        assert_eq!(world.keys(), [(a(), 1), (b(), 2), (c(), 3)]);
        let told: &[Notice] = if kind.is_registrants_only() || kind.is_all_registrants() {
            &[Notice::ReservationsReleased]
        } else {
            &[]
        };
        world.told_only(&[(b(), told), (c(), told)]);
    }
}

/// 5.12.11.2.2: of all registrants any one.
#[test]
fn clause_5_12_11_2_2_any_of_all_registrants_releases() {
    let mut world = World::reserved(Kind::ExclusiveAccessAll, &[(a(), 1), (b(), 2)]);
    world.done(&b(), &release(2, Kind::ExclusiveAccessAll));
    world.told_only(&[(a(), &[Notice::ReservationsReleased])]);
}

/// 5.12.11.2.2: nothing to release is no error.
#[test]
fn clause_5_12_11_2_2_who_holds_nothing_releases_nothing() {
    let world = World::of(&[(a(), 1)]);
    for kind in Kind::ALL {
        world.nothing(&a(), &release(1, kind));
        world.conflict(&a(), &release(2, kind));
        world.conflict(&b(), &release(0, kind));
    }
    let world = World::reserved(Kind::ExclusiveAccess, &[(a(), 1), (b(), 2)]);
    for kind in Kind::ALL {
        world.nothing(&b(), &release(2, kind));
        world.conflict(&b(), &release(1, kind));
        world.conflict(&c(), &release(0, kind));
    }
}

/// 5.12.11.2.2: INVALID RELEASE OF PERSISTENT RESERVATION.
#[test]
fn clause_5_12_11_2_2_another_type_is_not_released() {
    for kind in Kind::ALL {
        let world = World::reserved(kind, &[(a(), 1)]);
        for other in Kind::ALL.into_iter().filter(|other| *other != kind) {
            world.refused(&a(), &release(1, other), Refusal::InvalidRelease);
            world.conflict(&a(), &release(2, other));
        }
    }
}

/// 5.12.11.2.7: anybody who is registered clears everything, and all others are told.
#[test]
fn clause_5_12_11_2_7_clear() {
    for kind in Kind::ALL {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2), (c(), 3)]);
        world.conflict(&b(), &Change::Clear { key: 1 });
        world.done(&b(), &Change::Clear { key: 2 });
        assert_eq!((world.keys(), world.kind(), world.counted()), (vec![], None, 1));
        let told: &[Notice] = &[Notice::ReservationsPreempted];
        world.told_only(&[(a(), told), (c(), told)]);
        world.conflict(&b(), &Change::Clear { key: 2 });
    }
}

/// 5.12.11.2.7: it needs no reservation.
#[test]
fn clause_5_12_11_2_7_clear_without_a_reservation() {
    let mut world = World::of(&[(a(), 1), (b(), 2)]);
    world.done(&a(), &Change::Clear { key: 1 });
    assert_eq!(world.keys(), []);
    world.told_only(&[(b(), &[Notice::ReservationsPreempted])]);
}

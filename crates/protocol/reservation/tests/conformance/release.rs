//! RELEASE (5.12.11.2.2) and CLEAR (5.12.11.2.7).

use reservation::{Change, Notification, ReservationError, ReservationType};

use crate::harness::{Harness, a, b, c, release};

/// 5.12.11.2.2: the holder releases, registrations stay, and registrants are notified if it gave
/// them rights.
#[test]
fn clause_5_12_11_2_2_the_holder_releases() {
    for kind in ReservationType::ALL {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2), (c(), 3)]);
        world.apply(&a(), &release(1, kind));
        assert_eq!((world.kind(), world.pr_generation()), (None, 0));
        assert_eq!(world.keys(), [(a(), 1), (b(), 2), (c(), 3)]);
        let notified: &[Notification] = if kind.is_registrants_only() || kind.is_all_registrants() {
            &[Notification::ReservationsReleased]
        } else {
            &[]
        };
        world.expect_notifications(&[(b(), notified), (c(), notified)]);
    }
}

/// 5.12.11.2.2: of all registrants any one.
#[test]
fn clause_5_12_11_2_2_any_of_all_registrants_releases() {
    let mut world =
        Harness::reserved(ReservationType::ExclusiveAccessAllRegistrants, &[(a(), 1), (b(), 2)]);
    world.apply(&b(), &release(2, ReservationType::ExclusiveAccessAllRegistrants));
    world.expect_notifications(&[(a(), &[Notification::ReservationsReleased])]);
}

/// 5.12.11.2.2: nothing to release is no error.
#[test]
fn clause_5_12_11_2_2_a_non_holder_releases_nothing() {
    let world = Harness::of(&[(a(), 1)]);
    for kind in ReservationType::ALL {
        world.nothing(&a(), &release(1, kind));
        world.conflict(&a(), &release(2, kind));
        world.conflict(&b(), &release(0, kind));
    }
    let world = Harness::reserved(ReservationType::ExclusiveAccess, &[(a(), 1), (b(), 2)]);
    for kind in ReservationType::ALL {
        world.nothing(&b(), &release(2, kind));
        world.conflict(&b(), &release(1, kind));
        world.conflict(&c(), &release(0, kind));
    }
}

/// 5.12.11.2.2: INVALID RELEASE OF PERSISTENT RESERVATION.
#[test]
fn clause_5_12_11_2_2_another_type_is_not_released() {
    for kind in ReservationType::ALL {
        let world = Harness::reserved(kind, &[(a(), 1)]);
        for other in ReservationType::ALL.into_iter().filter(|other| *other != kind) {
            world.refused(&a(), &release(1, other), ReservationError::InvalidRelease);
            world.conflict(&a(), &release(2, other));
        }
    }
}

/// 5.12.11.2.7: any registered nexus can clear everything, and all others are notified.
#[test]
fn clause_5_12_11_2_7_clear() {
    for kind in ReservationType::ALL {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2), (c(), 3)]);
        world.conflict(&b(), &Change::Clear { key: 1 });
        world.apply(&b(), &Change::Clear { key: 2 });
        assert_eq!((world.keys(), world.kind(), world.pr_generation()), (vec![], None, 1));
        let notified: &[Notification] = &[Notification::ReservationsPreempted];
        world.expect_notifications(&[(a(), notified), (c(), notified)]);
        world.conflict(&b(), &Change::Clear { key: 2 });
    }
}

/// 5.12.11.2.7: it needs no reservation.
#[test]
fn clause_5_12_11_2_7_clear_without_a_reservation() {
    let mut world = Harness::of(&[(a(), 1), (b(), 2)]);
    world.apply(&a(), &Change::Clear { key: 1 });
    assert_eq!(world.keys(), []);
    world.expect_notifications(&[(b(), &[Notification::ReservationsPreempted])]);
}

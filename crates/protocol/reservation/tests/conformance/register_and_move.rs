//! REGISTER AND MOVE (5.12.8).

use reservation::{Change, InvalidField, ItNexus, ReservationError, ReservationType};

use crate::harness::{Harness, a, b, c, nexus};

fn move_to(key: u64, new_key: u64, to: ItNexus) -> Change {
    Change::RegisterAndMove { key, new_key, to, unregister: false, persist: false }
}

fn of_one() -> impl Iterator<Item = ReservationType> {
    ReservationType::ALL.into_iter().filter(|kind| !kind.is_all_registrants())
}

/// 5.12.8: a nexus that is not registered, gives another key or does not hold the reservation.
#[test]
fn clause_5_12_8_only_the_holder_moves() {
    for kind in of_one() {
        let world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.conflict(&c(), &move_to(0, 3, b()));
        world.conflict(&a(), &move_to(2, 3, b()));
        world.conflict(&b(), &move_to(2, 3, c()));
        world.conflict(&b(), &move_to(2, 0, b()));
    }
}

/// 5.12.8: a reservation of all registrants cannot be moved; without a reservation the CDB is
/// invalid.
#[test]
fn clause_5_12_8_nothing_to_move() {
    for kind in [
        ReservationType::WriteExclusiveAllRegistrants,
        ReservationType::ExclusiveAccessAllRegistrants,
    ] {
        let world = Harness::reserved(kind, &[(a(), 1)]);
        world.conflict(&a(), &move_to(1, 3, b()));
        world.conflict(&a(), &move_to(1, 0, a()));
    }
    let world = Harness::of(&[(a(), 1)]);
    world.conflict(&a(), &move_to(2, 3, b()));
    world.refused(
        &a(),
        &move_to(1, 3, b()),
        ReservationError::InvalidField(InvalidField::ServiceAction),
    );
}

/// 5.12.8: a key of zero, or oneself at any port.
#[test]
fn clause_5_12_8_wrong_parameters() {
    let world = Harness::reserved(ReservationType::WriteExclusive, &[(a(), 1)]);
    world.refused(&a(), &move_to(1, 0, b()), ReservationError::InvalidField(InvalidField::NewKey));
    for to in [a(), nexus("a", 2), nexus(&"n".repeat(223), 1)] {
        world.refused(
            &a(),
            &move_to(1, 3, to),
            ReservationError::InvalidField(InvalidField::TransportId),
        );
    }
}

/// 5.12.8: to one that is not registered yet.
#[test]
fn clause_5_12_8_the_reservation_moves() {
    for kind in of_one() {
        let mut world = Harness::reserved(kind, &[(a(), 1), (c(), 3)]);
        world.apply(&a(), &move_to(1, 2, b()));
        assert_eq!((world.keys(), world.pr_generation()), (vec![(a(), 1), (b(), 2), (c(), 3)], 1));
        assert!(world.table.is_holder(&b()) && !world.table.is_holder(&a()));
        assert_eq!((world.kind(), world.table.holder_key()), (Some(kind), 2));
        world.expect_notifications(&[]);
    }
}

/// 5.12.8: to one that is, under the same key or another; and with UNREG.
#[test]
fn clause_5_12_8_to_a_registrant_and_away() {
    for kind in of_one() {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2), (c(), 3)]);
        let to = Change::RegisterAndMove {
            key: 1,
            new_key: 4,
            to: b(),
            unregister: true,
            persist: true,
        };
        world.apply(&a(), &to);
        assert_eq!((world.keys(), world.pr_generation()), (vec![(b(), 4), (c(), 3)], 1));
        assert!(world.table.is_holder(&b()) && world.table.persist);
        // The reservation was not released but moved, so there is no notification.
        world.expect_notifications(&[]);
    }
}

//! REGISTER AND MOVE (5.12.8).

use reservation::{Change, Field, Kind, Party, Refusal};

use crate::world::{World, a, at, b, c};

fn move_to(key: u64, new_key: u64, to: Party) -> Change {
    Change::Move { key, new_key, to, unregister: false, persists: false }
}

fn of_one() -> impl Iterator<Item = Kind> {
    Kind::ALL.into_iter().filter(|kind| !kind.is_all_registrants())
}

/// 5.12.8: who is not registered, gives another key or does not hold the reservation.
#[test]
fn clause_5_12_8_only_the_holder_moves() {
    for kind in of_one() {
        let world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.conflict(&c(), &move_to(0, 3, b()));
        world.conflict(&a(), &move_to(2, 3, b()));
        world.conflict(&b(), &move_to(2, 3, c()));
        world.conflict(&b(), &move_to(2, 0, b()));
    }
}

/// 5.12.8: what all hold cannot be moved, and what nobody holds is a field of the CDB.
#[test]
fn clause_5_12_8_nothing_to_move() {
    for kind in [Kind::WriteExclusiveAll, Kind::ExclusiveAccessAll] {
        let world = World::reserved(kind, &[(a(), 1)]);
        world.conflict(&a(), &move_to(1, 3, b()));
        world.conflict(&a(), &move_to(1, 0, a()));
    }
    let world = World::of(&[(a(), 1)]);
    world.conflict(&a(), &move_to(2, 3, b()));
    world.refused(&a(), &move_to(1, 3, b()), Refusal::Parameter(Field::Action));
}

/// 5.12.8: a key of zero, or oneself at any port.
#[test]
fn clause_5_12_8_wrong_parameters() {
    let world = World::reserved(Kind::WriteExclusive, &[(a(), 1)]);
    world.refused(&a(), &move_to(1, 0, b()), Refusal::Parameter(Field::NewKey));
    for to in [a(), at("a", 2), at(&"n".repeat(223), 1)] {
        world.refused(&a(), &move_to(1, 3, to), Refusal::Parameter(Field::Initiator));
    }
}

/// 5.12.8: to one that is not registered yet.
#[test]
fn clause_5_12_8_the_reservation_moves() {
    for kind in of_one() {
        let mut world = World::reserved(kind, &[(a(), 1), (c(), 3)]);
        world.done(&a(), &move_to(1, 2, b()));
        assert_eq!((world.keys(), world.counted()), (vec![(a(), 1), (b(), 2), (c(), 3)], 1));
        assert!(world.table.holds(&b()) && !world.table.holds(&a()));
        assert_eq!((world.kind(), world.table.holder_key()), (Some(kind), 2));
        world.told_only(&[]);
    }
}

/// 5.12.8: to one that is, under the same key or another; and with UNREG.
#[test]
fn clause_5_12_8_to_a_registrant_and_away() {
    for kind in of_one() {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2), (c(), 3)]);
        let to = Change::Move { key: 1, new_key: 4, to: b(), unregister: true, persists: true };
        world.done(&a(), &to);
        assert_eq!((world.keys(), world.counted()), (vec![(b(), 4), (c(), 3)], 1));
        assert!(world.table.holds(&b()) && world.table.persists);
        // The reservation was not released but moved, so nobody is told.
        world.told_only(&[]);
    }
}

//! PREEMPT (5.12.11.2.4, 5.12.11.2.5), PREEMPT AND ABORT (5.12.11.2.6).

use reservation::{Change, Field, Kind, Notice, Refusal, Reservation};

use crate::world::{World, a, b, c, host, preempt, preempt_and_abort};

const LOST: &[Notice] = &[Notice::RegistrationsPreempted];
const RELEASED: &[Notice] = &[Notice::ReservationsReleased];
const ABORTED: &[Notice] = &[Notice::RegistrationsPreempted, Notice::Aborted];

fn of_one() -> impl Iterator<Item = Kind> {
    Kind::ALL.into_iter().filter(|kind| !kind.is_all_registrants())
}

fn of_all() -> impl Iterator<Item = Kind> {
    Kind::ALL.into_iter().filter(|kind| kind.is_all_registrants())
}

fn held(kind: Kind, by: reservation::Party) -> Option<Reservation> {
    Some(Reservation { kind, holder: (!kind.is_all_registrants()).then_some(by) })
}

/// 5.12.1, 5.12.11.2.4.1: only who is registered, under its key.
#[test]
fn clause_5_12_11_2_4_only_registrants_preempt() {
    for kind in Kind::ALL {
        let world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.conflict(&c(), &preempt(0, 1, kind));
        world.conflict(&b(), &preempt(1, 1, kind));
    }
}

/// 5.12.11.2.4.3: the holder's key. Its registrations go, and the one who asks holds what it asked
/// for.
#[test]
fn clause_5_12_11_2_4_3_the_holder_is_preempted() {
    for kind in of_one() {
        for wanted in Kind::ALL {
            let all = [(a(), 1), (b(), 2), (c(), 1), (host(), 3)];
            let mut world = World::reserved(kind, &all);
            world.done(&b(), &preempt(2, 1, wanted));
            assert_eq!(world.keys(), [(b(), 2), (host(), 3)]);
            assert_eq!((&world.table.reservation, world.counted()), (&held(wanted, b()), 1));
            let released = if wanted == kind { &[] } else { RELEASED };
            world.told_only(&[(a(), LOST), (c(), LOST), (host(), released)]);
        }
    }
}

/// 5.12.11.2.4.3: one of the holder's key takes it over and keeps its registration.
#[test]
fn clause_5_12_11_2_4_3_a_registrant_of_the_same_key_preempts() {
    for kind in of_one() {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 1), (c(), 3)]);
        world.done(&b(), &preempt(1, 1, kind));
        assert_eq!(world.keys(), [(b(), 1), (c(), 3)]);
        assert_eq!(world.table.reservation, held(kind, b()));
        world.told_only(&[(a(), LOST)]);
    }
}

/// 5.12.11.2.4.3: the holder preempts itself. So it changes the type in place.
#[test]
fn clause_5_12_11_2_4_3_the_holder_preempts_itself() {
    for kind in of_one() {
        for wanted in Kind::ALL {
            let mut world = World::reserved(kind, &[(a(), 1), (b(), 2), (c(), 1)]);
            world.done(&a(), &preempt(1, 1, wanted));
            assert_eq!(world.keys(), [(a(), 1), (b(), 2)]);
            assert_eq!(world.table.reservation, held(wanted, a()));
            let released = if wanted == kind { &[] } else { RELEASED };
            world.told_only(&[(b(), released), (c(), LOST)]);
        }
    }
}

/// 5.12.11.2.4.1: what all hold goes by a key of zero, with all registrations but one.
#[test]
fn clause_5_12_11_2_4_1_all_registrants_and_zero() {
    for kind in of_all() {
        for wanted in Kind::ALL {
            let mut world = World::reserved(kind, &[(a(), 1), (b(), 2), (c(), 2)]);
            world.done(&b(), &preempt(2, 0, wanted));
            assert_eq!(world.keys(), [(b(), 2)]);
            assert_eq!((&world.table.reservation, world.counted()), (&held(wanted, b()), 1));
            world.told_only(&[(a(), LOST), (c(), LOST)]);
        }
    }
}

/// 5.12.11.2.4.1: any other key takes only registrations away.
#[test]
fn clause_5_12_11_2_4_1_all_registrants_and_a_key() {
    for kind in of_all() {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2), (c(), 1)]);
        world.done(&b(), &preempt(2, 1, Kind::WriteExclusive));
        assert_eq!((world.keys(), world.kind()), (vec![(b(), 2)], Some(kind)));
        world.told_only(&[(a(), LOST), (c(), LOST)]);
        world.conflict(&b(), &preempt(2, 1, kind));
        // The last one goes by its own key, and with it the reservation (5.12.11.2.1).
        world.done(&b(), &preempt(2, 2, kind));
        assert_eq!((world.keys(), world.kind()), (vec![], None));
        world.told_only(&[]);
    }
}

/// 5.12.11.2.4.1: all other types have a holder to name.
#[test]
fn clause_5_12_11_2_4_1_zero_is_nobodys_key() {
    for kind in of_one() {
        let world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        let wrong = Refusal::Parameter(Field::NewKey);
        world.refused(&b(), &preempt(2, 0, kind), wrong);
        world.conflict(&b(), &preempt(1, 0, kind));
    }
    // Without a reservation it is a key that nobody has (5.12.11.2.5).
    World::of(&[(a(), 1)]).conflict(&a(), &preempt(1, 0, Kind::WriteExclusive));
}

/// 5.12.11.2.5: a key that does not hold the reservation.
#[test]
fn clause_5_12_11_2_5_registrations_are_removed() {
    for kind in of_one() {
        let all = [(a(), 1), (b(), 2), (c(), 3), (host(), 3)];
        let mut world = World::reserved(kind, &all);
        world.done(&b(), &preempt(2, 3, Kind::ExclusiveAccessAll));
        assert_eq!(world.keys(), [(a(), 1), (b(), 2)]);
        assert_eq!((&world.table.reservation, world.counted()), (&held(kind, a()), 1));
        world.told_only(&[(c(), LOST), (host(), LOST)]);
    }
}

/// 5.12.11.2.5: and without any reservation.
#[test]
fn clause_5_12_11_2_5_without_a_reservation() {
    let mut world = World::of(&[(a(), 1), (b(), 2), (c(), 3)]);
    world.done(&b(), &preempt(2, 3, Kind::ExclusiveAccess));
    assert_eq!((world.keys(), world.kind()), (vec![(a(), 1), (b(), 2)], None));
    world.told_only(&[(c(), LOST)]);
}

/// 5.12.11.2.5: one's own key is no error; the registration is removed and nobody is told.
#[test]
fn clause_5_12_11_2_5_ones_own_key() {
    for kind in Kind::ALL {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2), (c(), 2)]);
        world.done(&b(), &preempt(2, 2, kind));
        assert_eq!((world.keys(), world.kind()), (vec![(a(), 1)], Some(kind)));
        world.told_only(&[(c(), LOST)]);
    }
}

/// 5.12.11.2.5: a key that nobody has.
#[test]
fn clause_5_12_11_2_5_an_unknown_key() {
    World::of(&[(a(), 1)]).conflict(&a(), &preempt(1, 9, Kind::WriteExclusive));
    for kind in Kind::ALL {
        World::reserved(kind, &[(a(), 1)]).conflict(&a(), &preempt(1, 9, kind));
    }
}

/// 5.12.11.2.5 b: TYPE is ignored where no reservation is made, and must be one where one is.
#[test]
fn clause_5_12_11_2_5_the_type_is_ignored() {
    let without = |victim| Change::Preempt { key: 1, victim, kind: None, abort: false };
    let mut world = World::reserved(Kind::WriteExclusive, &[(a(), 1), (b(), 2)]);
    world.refused(&a(), &without(1), Refusal::Parameter(Field::Kind));
    world.done(&a(), &without(2));
    let mut world = World::reserved(Kind::WriteExclusiveAll, &[(a(), 1), (b(), 2)]);
    world.refused(&a(), &without(0), Refusal::Parameter(Field::Kind));
    world.done(&a(), &without(2));
}

/// 5.12.11.2.6: commands of those who are preempted are aborted, whether they hold anything or not.
#[test]
fn clause_5_12_11_2_6_preempt_and_abort() {
    for kind in of_one() {
        let all = [(a(), 1), (b(), 2), (c(), 3)];
        let mut world = World::reserved(kind, &all);
        world.done(&b(), &preempt_and_abort(2, 1, kind));
        assert_eq!((world.keys(), world.kind()), (vec![(b(), 2), (c(), 3)], Some(kind)));
        world.told_only(&[(a(), ABORTED)]);
        let mut world = World::reserved(kind, &all);
        world.done(&b(), &preempt_and_abort(2, 3, kind));
        assert_eq!(world.keys(), [(a(), 1), (b(), 2)]);
        world.told_only(&[(c(), ABORTED)]);
        world.conflict(&b(), &preempt_and_abort(2, 3, kind));
    }
}

/// 5.12.11.2.6: those of everybody registered under the key, the one who asks too.
#[test]
fn clause_5_12_11_2_6_ones_own_commands() {
    let mut world = World::reserved(Kind::WriteExclusive, &[(a(), 1), (b(), 2)]);
    world.done(&a(), &preempt_and_abort(1, 1, Kind::WriteExclusive));
    world.told_only(&[(a(), &[Notice::Aborted])]);
    let mut world = World::reserved(Kind::WriteExclusive, &[(a(), 1), (b(), 2), (c(), 2)]);
    world.done(&b(), &preempt_and_abort(2, 2, Kind::WriteExclusive));
    world.told_only(&[(b(), &[Notice::Aborted]), (c(), ABORTED)]);
}

/// 5.12.11.2.6: zero, where all hold the reservation, is everybody who is registered.
#[test]
fn clause_5_12_11_2_6_all_registrants() {
    for kind in of_all() {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.done(&b(), &preempt_and_abort(2, 0, kind));
        world.told_only(&[(a(), ABORTED), (b(), &[Notice::Aborted])]);
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.done(&b(), &preempt_and_abort(2, 1, kind));
        world.told_only(&[(a(), ABORTED)]);
    }
}

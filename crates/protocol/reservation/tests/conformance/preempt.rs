//! PREEMPT (5.12.11.2.4, 5.12.11.2.5), PREEMPT AND ABORT (5.12.11.2.6).

use reservation::{
    Change, InvalidField, Notification, Reservation, ReservationError, ReservationType,
};

use crate::harness::{Harness, a, b, c, host, preempt, preempt_and_abort};

const LOST: &[Notification] = &[Notification::RegistrationsPreempted];
const RELEASED: &[Notification] = &[Notification::ReservationsReleased];
const ABORTED: &[Notification] =
    &[Notification::RegistrationsPreempted, Notification::AbortCommands];

fn of_one() -> impl Iterator<Item = ReservationType> {
    ReservationType::ALL.into_iter().filter(|kind| !kind.is_all_registrants())
}

fn of_all() -> impl Iterator<Item = ReservationType> {
    ReservationType::ALL.into_iter().filter(|kind| kind.is_all_registrants())
}

fn held(kind: ReservationType, by: reservation::ItNexus) -> Option<Reservation> {
    Some(Reservation { kind, holder: (!kind.is_all_registrants()).then_some(by) })
}

/// 5.12.1, 5.12.11.2.4.1: only a registered nexus, with its key.
#[test]
fn clause_5_12_11_2_4_only_registrants_preempt() {
    for kind in ReservationType::ALL {
        let world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.conflict(&c(), &preempt(0, 1, kind));
        world.conflict(&b(), &preempt(1, 1, kind));
    }
}

/// 5.12.11.2.4.3: the holder's key. Its registrations are removed, and the preempting nexus holds
/// the reservation that it requested.
#[test]
fn clause_5_12_11_2_4_3_the_holder_is_preempted() {
    for kind in of_one() {
        for wanted in ReservationType::ALL {
            let all = [(a(), 1), (b(), 2), (c(), 1), (host(), 3)];
            let mut world = Harness::reserved(kind, &all);
            world.apply(&b(), &preempt(2, 1, wanted));
            assert_eq!(world.keys(), [(b(), 2), (host(), 3)]);
            assert_eq!((&world.table.reservation, world.pr_generation()), (&held(wanted, b()), 1));
            let released = if wanted == kind { &[] } else { RELEASED };
            world.expect_notifications(&[(a(), LOST), (c(), LOST), (host(), released)]);
        }
    }
}

/// 5.12.11.2.4.3: one of the holder's key takes it over and keeps its registration.
#[test]
fn clause_5_12_11_2_4_3_a_registrant_of_the_same_key_preempts() {
    for kind in of_one() {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 1), (c(), 3)]);
        world.apply(&b(), &preempt(1, 1, kind));
        assert_eq!(world.keys(), [(b(), 1), (c(), 3)]);
        assert_eq!(world.table.reservation, held(kind, b()));
        world.expect_notifications(&[(a(), LOST)]);
    }
}

/// 5.12.11.2.4.3: the holder preempts itself, which changes the type in place.
#[test]
fn clause_5_12_11_2_4_3_the_holder_preempts_itself() {
    for kind in of_one() {
        for wanted in ReservationType::ALL {
            let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2), (c(), 1)]);
            world.apply(&a(), &preempt(1, 1, wanted));
            assert_eq!(world.keys(), [(a(), 1), (b(), 2)]);
            assert_eq!(world.table.reservation, held(wanted, a()));
            let released = if wanted == kind { &[] } else { RELEASED };
            world.expect_notifications(&[(b(), released), (c(), LOST)]);
        }
    }
}

/// 5.12.11.2.4.1: a key of zero preempts a reservation of all registrants, and all registrations
/// but one.
#[test]
fn clause_5_12_11_2_4_1_all_registrants_and_zero() {
    for kind in of_all() {
        for wanted in ReservationType::ALL {
            let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2), (c(), 2)]);
            world.apply(&b(), &preempt(2, 0, wanted));
            assert_eq!(world.keys(), [(b(), 2)]);
            assert_eq!((&world.table.reservation, world.pr_generation()), (&held(wanted, b()), 1));
            world.expect_notifications(&[(a(), LOST), (c(), LOST)]);
        }
    }
}

/// 5.12.11.2.4.1: any other key takes only registrations away.
#[test]
fn clause_5_12_11_2_4_1_all_registrants_and_a_key() {
    for kind in of_all() {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2), (c(), 1)]);
        world.apply(&b(), &preempt(2, 1, ReservationType::WriteExclusive));
        assert_eq!((world.keys(), world.kind()), (vec![(b(), 2)], Some(kind)));
        world.expect_notifications(&[(a(), LOST), (c(), LOST)]);
        world.conflict(&b(), &preempt(2, 1, kind));
        // The last one goes by its own key, and with it the reservation (5.12.11.2.1).
        world.apply(&b(), &preempt(2, 2, kind));
        assert_eq!((world.keys(), world.kind()), (vec![], None));
        world.expect_notifications(&[]);
    }
}

/// 5.12.11.2.4.1: all other types have a holder to name.
#[test]
fn clause_5_12_11_2_4_1_zero_is_no_key() {
    for kind in of_one() {
        let world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        let wrong = ReservationError::InvalidField(InvalidField::NewKey);
        world.refused(&b(), &preempt(2, 0, kind), wrong);
        world.conflict(&b(), &preempt(1, 0, kind));
    }
    // Without a reservation it is an unknown key (5.12.11.2.5).
    Harness::of(&[(a(), 1)]).conflict(&a(), &preempt(1, 0, ReservationType::WriteExclusive));
}

/// 5.12.11.2.5: a key that does not hold the reservation.
#[test]
fn clause_5_12_11_2_5_registrations_are_removed() {
    for kind in of_one() {
        let all = [(a(), 1), (b(), 2), (c(), 3), (host(), 3)];
        let mut world = Harness::reserved(kind, &all);
        world.apply(&b(), &preempt(2, 3, ReservationType::ExclusiveAccessAllRegistrants));
        assert_eq!(world.keys(), [(a(), 1), (b(), 2)]);
        assert_eq!((&world.table.reservation, world.pr_generation()), (&held(kind, a()), 1));
        world.expect_notifications(&[(c(), LOST), (host(), LOST)]);
    }
}

/// 5.12.11.2.5: and without any reservation.
#[test]
fn clause_5_12_11_2_5_without_a_reservation() {
    let mut world = Harness::of(&[(a(), 1), (b(), 2), (c(), 3)]);
    world.apply(&b(), &preempt(2, 3, ReservationType::ExclusiveAccess));
    assert_eq!((world.keys(), world.kind()), (vec![(a(), 1), (b(), 2)], None));
    world.expect_notifications(&[(c(), LOST)]);
}

/// 5.12.11.2.5: one's own key is no error; the registration is removed without a notification.
#[test]
fn clause_5_12_11_2_5_ones_own_key() {
    for kind in ReservationType::ALL {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2), (c(), 2)]);
        world.apply(&b(), &preempt(2, 2, kind));
        assert_eq!((world.keys(), world.kind()), (vec![(a(), 1)], Some(kind)));
        world.expect_notifications(&[(c(), LOST)]);
    }
}

/// 5.12.11.2.5: an unknown key.
#[test]
fn clause_5_12_11_2_5_an_unknown_key() {
    Harness::of(&[(a(), 1)]).conflict(&a(), &preempt(1, 9, ReservationType::WriteExclusive));
    for kind in ReservationType::ALL {
        Harness::reserved(kind, &[(a(), 1)]).conflict(&a(), &preempt(1, 9, kind));
    }
}

/// 5.12.11.2.5 b: TYPE is ignored where no reservation is made, and must be one where one is.
#[test]
fn clause_5_12_11_2_5_the_type_is_ignored() {
    let without =
        |victim| Change::Preempt { key: 1, preempt_key: victim, kind: None, abort: false };
    let mut world = Harness::reserved(ReservationType::WriteExclusive, &[(a(), 1), (b(), 2)]);
    world.refused(&a(), &without(1), ReservationError::InvalidField(InvalidField::Type));
    world.apply(&a(), &without(2));
    let mut world =
        Harness::reserved(ReservationType::WriteExclusiveAllRegistrants, &[(a(), 1), (b(), 2)]);
    world.refused(&a(), &without(0), ReservationError::InvalidField(InvalidField::Type));
    world.apply(&a(), &without(2));
}

/// 5.12.11.2.6: commands of preempted nexuses are aborted, whether they hold anything or not.
#[test]
fn clause_5_12_11_2_6_preempt_and_abort() {
    for kind in of_one() {
        let all = [(a(), 1), (b(), 2), (c(), 3)];
        let mut world = Harness::reserved(kind, &all);
        world.apply(&b(), &preempt_and_abort(2, 1, kind));
        assert_eq!((world.keys(), world.kind()), (vec![(b(), 2), (c(), 3)], Some(kind)));
        world.expect_notifications(&[(a(), ABORTED)]);
        let mut world = Harness::reserved(kind, &all);
        world.apply(&b(), &preempt_and_abort(2, 3, kind));
        assert_eq!(world.keys(), [(a(), 1), (b(), 2)]);
        world.expect_notifications(&[(c(), ABORTED)]);
        world.conflict(&b(), &preempt_and_abort(2, 3, kind));
    }
}

/// 5.12.11.2.6: those of every nexus registered under the key, including the preempting one.
#[test]
fn clause_5_12_11_2_6_ones_own_commands() {
    let mut world = Harness::reserved(ReservationType::WriteExclusive, &[(a(), 1), (b(), 2)]);
    world.apply(&a(), &preempt_and_abort(1, 1, ReservationType::WriteExclusive));
    world.expect_notifications(&[(a(), &[Notification::AbortCommands])]);
    let mut world =
        Harness::reserved(ReservationType::WriteExclusive, &[(a(), 1), (b(), 2), (c(), 2)]);
    world.apply(&b(), &preempt_and_abort(2, 2, ReservationType::WriteExclusive));
    world.expect_notifications(&[(b(), &[Notification::AbortCommands]), (c(), ABORTED)]);
}

/// 5.12.11.2.6: if all registrants hold the reservation, zero means every registrant.
#[test]
fn clause_5_12_11_2_6_all_registrants() {
    for kind in of_all() {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.apply(&b(), &preempt_and_abort(2, 0, kind));
        world.expect_notifications(&[(a(), ABORTED), (b(), &[Notification::AbortCommands])]);
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.apply(&b(), &preempt_and_abort(2, 1, kind));
        world.expect_notifications(&[(a(), ABORTED)]);
    }
}

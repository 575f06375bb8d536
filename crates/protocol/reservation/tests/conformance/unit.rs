//! RESERVE and RELEASE of the unit (SPC-2), lost nexuses, mode pages, resets, administrators.

use reservation::{Change, ItNexus, Notification, ReservationType, Rights, Spc2Reservation};

use crate::harness::{Harness, INCARNATION, a, b, c, host, preempt, register, release, reserve};

const ALONE: Change = Change::Spc2Reserve;
const FREE: Change = Change::Spc2Release;

/// SPC-2 7.21.
#[test]
fn spc_2_clause_7_21_one_has_the_unit() {
    let mut world = Harness::default();
    world.apply(&a(), &ALONE);
    assert_eq!(
        world.table.spc2_reservation,
        Some(Spc2Reservation { nexus: a(), incarnation: INCARNATION })
    );
    assert!(!world.table.is_unreserved());
    world.expect_notifications(&[]);
    world.nothing(&a(), &ALONE);
    world.conflict(&b(), &ALONE);
    assert_eq!(world.table.rights(&a()), Rights { is_registered: false, ..Rights::ALL });
    let none =
        Rights { can_read: false, can_write: false, is_registered: false, passes_spc2: false };
    assert_eq!((world.table.rights(&b()), world.table.rights(&host())), (none, none));
    // From another incarnation of its node it is another nexus of the same names.
    let again = world.table.with_change(&a(), INCARNATION + 1, &ALONE).unwrap().unwrap();
    assert_eq!(
        again.spc2_reservation,
        Some(Spc2Reservation { nexus: a(), incarnation: INCARNATION + 1 })
    );
}

/// SPC-2 7.17.
#[test]
fn spc_2_clause_7_17_only_the_holder_releases() {
    let mut world = Harness::default();
    world.nothing(&a(), &FREE);
    world.apply(&a(), &ALONE);
    world.nothing(&b(), &FREE);
    world.apply(&a(), &FREE);
    assert!(world.table.is_unreserved());
    world.expect_notifications(&[]);
}

/// SPC-2 5.5.1: during an SPC-2 reservation no persistent reservations can be made.
#[test]
fn spc_2_clause_5_5_1_no_persistent_reservations_of_a_reserved_unit() {
    let mut world = Harness::default();
    world.apply(&a(), &ALONE);
    for who in [a(), b(), host()] {
        world.conflict(&who, &register(0, 1));
        world.conflict(&who, &register(0, 0));
        world.conflict(&who, &reserve(0, ReservationType::WriteExclusive));
        world.conflict(&who, &release(0, ReservationType::WriteExclusive));
        world.conflict(&who, &preempt(0, 0, ReservationType::WriteExclusive));
        world.conflict(&who, &Change::Clear { key: 0 });
        let to = Change::RegisterAndMove {
            key: 0,
            new_key: 0,
            to: c(),
            unregister: false,
            persist: false,
        };
        world.conflict(&who, &to);
    }
}

/// SPC-2 5.5.1: with any registration SPC-2 reservations conflict.
#[test]
fn spc_2_clause_5_5_1_a_unit_with_registrants_is_not_reserved() {
    let mut world = Harness::of(&[(a(), 1)]);
    for change in [ALONE, FREE] {
        world.conflict(&a(), &change);
        world.conflict(&b(), &change);
    }
    world.apply(&a(), &register(1, 0));
    world.apply(&b(), &ALONE);
}

/// 5.12.3: but for whom the persistent reservation gives as much, it succeeds and does nothing.
#[test]
fn clause_5_12_3_reserve_of_a_persistent_holder_succeeds() {
    for kind in ReservationType::ALL {
        let world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        for change in [ALONE, FREE] {
            world.nothing(&a(), &change);
            world.conflict(&c(), &change);
            if kind.is_registrants_only() || kind.is_all_registrants() {
                world.nothing(&b(), &change);
            } else {
                world.conflict(&b(), &change);
            }
        }
    }
}

/// SAM-5 6.3.4, SPC-2 7.21: a lost nexus has nothing any more, but registrations.
#[test]
fn sam_5_clause_6_3_4_a_lost_nexus_frees_the_unit() {
    let mut world = Harness::default();
    world.nothing(&a(), &Change::NexusLoss);
    world.apply(&a(), &ALONE);
    world.nothing(&b(), &Change::NexusLoss);
    world.apply(&a(), &Change::NexusLoss);
    assert!(world.table.is_unreserved());
    let world = Harness::reserved(ReservationType::ExclusiveAccess, &[(a(), 1)]);
    world.nothing(&a(), &Change::NexusLoss);
}

/// 6.11: others are notified of changed mode pages.
#[test]
fn clause_6_11_mode_pages() {
    let mut world = Harness::default();
    world.nothing(&a(), &Change::SetModePages(0));
    world.apply(&a(), &Change::SetModePages(5));
    assert_eq!(world.table.mode_pages, 5);
    let notified: &[Notification] = &[Notification::ModePagesChanged];
    world.expect_notifications(&[(b(), notified), (c(), notified), (host(), notified)]);
    world.nothing(&b(), &Change::SetModePages(5));
    // Not by a nexus that has lost the right while it waited.
    let mut world = Harness::reserved(ReservationType::WriteExclusive, &[(a(), 1), (b(), 2)]);
    world.apply(&a(), &Change::SetModePages(5));
    world.conflict(&b(), &Change::SetModePages(6));
    world.conflict(&c(), &Change::SetModePages(6));
}

/// SAM-5 6.3.2, 6.3.3: a reset ends SPC-2 reservations and restores the defaults, and all are
/// notified; 5.12.1: persistent reservations survive it; 6.15.2: PRgeneration does, too.
#[test]
fn sam_5_clause_6_3_resets() {
    for (target, notified) in
        [(false, [Notification::UnitReset]), (true, [Notification::TargetReset])]
    {
        let all: Vec<(ItNexus, &[Notification])> =
            [a(), b(), c(), host()].into_iter().map(|who| (who, &notified[..])).collect();
        let mut world = Harness::default();
        world.apply(&a(), &ALONE);
        world.apply(&a(), &Change::SetModePages(3));
        world.apply(&b(), &Change::Reset { whole_target: target });
        assert!(world.table.is_unreserved());
        assert_eq!((world.table.mode_pages, world.table.reset_count), (0, 1));
        world.expect_notifications(&all);
        let mut world = Harness::reserved(ReservationType::ExclusiveAccess, &[(a(), 1), (b(), 2)]);
        let (keys, held) = (world.keys(), world.table.reservation.clone());
        world.apply(&b(), &Change::Reset { whole_target: target });
        assert_eq!(
            (world.keys(), &world.table.reservation, world.pr_generation()),
            (keys, &held, 0)
        );
        world.expect_notifications(&all);
    }
}

/// SAM-5 7.5: CLEAR TASK SET ends the others' commands, whatever they hold, and nothing else.
#[test]
fn sam_5_clause_7_5_clear_task_set() {
    let notified: &[Notification] = &[Notification::AbortCommands];
    let mut world = Harness::reserved(ReservationType::ExclusiveAccess, &[(a(), 1), (b(), 2)]);
    let (keys, held) = (world.keys(), world.table.reservation.clone());
    world.apply(&c(), &Change::ClearTaskSet);
    assert_eq!((world.keys(), &world.table.reservation, world.pr_generation()), (keys, &held, 0));
    world.expect_notifications(&[(a(), notified), (b(), notified), (host(), notified)]);
    let mut world = Harness::default();
    world.apply(&a(), &ALONE);
    world.apply(&b(), &Change::ClearTaskSet);
    assert!(!world.table.is_unreserved());
}

/// An administrator clears as CLEAR does, from outside: all are notified.
#[test]
fn an_administrator_frees_the_volume() {
    let evict = |world: &mut Harness| world.apply(&ItNexus::ADMINISTRATOR, &Change::AdminClear);
    let notified: &[Notification] = &[Notification::ReservationsPreempted];
    Harness::default().nothing(&ItNexus::ADMINISTRATOR, &Change::AdminClear);
    for kind in ReservationType::ALL {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        evict(&mut world);
        assert_eq!((world.keys(), world.kind(), world.pr_generation()), (vec![], None, 1));
        world.expect_notifications(&[(a(), notified), (b(), notified)]);
    }
    let mut world = Harness::default();
    world.apply(&a(), &ALONE);
    evict(&mut world);
    assert!(world.table.is_unreserved() && world.pr_generation() == 0);
    world.expect_notifications(&[(a(), notified)]);
}

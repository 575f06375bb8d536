//! RESERVE and RELEASE of the unit (SPC-2), lost nexuses, mode pages, resets, administrators.

use reservation::{Change, Kind, Notice, Party, Rights, Sole};

use crate::world::{SEAT, World, a, b, c, host, preempt, register, release, reserve};

const ALONE: Change = Change::ReserveUnit;
const FREE: Change = Change::ReleaseUnit;

/// SPC-2 7.21.
#[test]
fn spc_2_clause_7_21_one_has_the_unit() {
    let mut world = World::default();
    world.done(&a(), &ALONE);
    assert_eq!(world.table.sole, Some(Sole { party: a(), seat: SEAT }));
    assert!(!world.table.is_free());
    world.told_only(&[]);
    world.nothing(&a(), &ALONE);
    world.conflict(&b(), &ALONE);
    assert_eq!(world.table.rights(&a()), Rights { registered: false, ..Rights::ALL });
    let none = Rights { reads: false, writes: false, registered: false, sole: false };
    assert_eq!((world.table.rights(&b()), world.table.rights(&host())), (none, none));
    // From another incarnation of its node it is another nexus of the same names.
    let again = world.table.change(&a(), SEAT + 1, &ALONE).unwrap().unwrap();
    assert_eq!(again.sole, Some(Sole { party: a(), seat: SEAT + 1 }));
}

/// SPC-2 7.17.
#[test]
fn spc_2_clause_7_17_only_the_holder_releases() {
    let mut world = World::default();
    world.nothing(&a(), &FREE);
    world.done(&a(), &ALONE);
    world.nothing(&b(), &FREE);
    world.done(&a(), &FREE);
    assert!(world.table.is_free());
    world.told_only(&[]);
}

/// SPC-2 5.5.1: while the unit is RESERVEd nobody makes persistent reservations.
#[test]
fn spc_2_clause_5_5_1_no_persistent_reservations_of_a_reserved_unit() {
    let mut world = World::default();
    world.done(&a(), &ALONE);
    for who in [a(), b(), host()] {
        world.conflict(&who, &register(0, 1));
        world.conflict(&who, &register(0, 0));
        world.conflict(&who, &reserve(0, Kind::WriteExclusive));
        world.conflict(&who, &release(0, Kind::WriteExclusive));
        world.conflict(&who, &preempt(0, 0, Kind::WriteExclusive));
        world.conflict(&who, &Change::Clear { key: 0 });
        let to = Change::Move { key: 0, new_key: 0, to: c(), unregister: false, persists: false };
        world.conflict(&who, &to);
    }
}

/// SPC-2 5.5.1: while anybody is registered nobody has the unit alone.
#[test]
fn spc_2_clause_5_5_1_a_unit_with_registrants_is_not_reserved() {
    let mut world = World::of(&[(a(), 1)]);
    for change in [ALONE, FREE] {
        world.conflict(&a(), &change);
        world.conflict(&b(), &change);
    }
    world.done(&a(), &register(1, 0));
    world.done(&b(), &ALONE);
}

/// 5.12.3: but for whom the persistent reservation gives as much, it succeeds and does nothing.
#[test]
fn clause_5_12_3_who_has_a_persistent_reservation_succeeds() {
    for kind in Kind::ALL {
        let world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
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
    let mut world = World::default();
    world.nothing(&a(), &Change::Leave);
    world.done(&a(), &ALONE);
    world.nothing(&b(), &Change::Leave);
    world.done(&a(), &Change::Leave);
    assert!(world.table.is_free());
    let world = World::reserved(Kind::ExclusiveAccess, &[(a(), 1)]);
    world.nothing(&a(), &Change::Leave);
}

/// 6.11: others are told of changed mode pages.
#[test]
fn clause_6_11_mode_pages() {
    let mut world = World::default();
    world.nothing(&a(), &Change::Modes(0));
    world.done(&a(), &Change::Modes(5));
    assert_eq!(world.table.modes, 5);
    let told: &[Notice] = &[Notice::Modes];
    world.told_only(&[(b(), told), (c(), told), (host(), told)]);
    world.nothing(&b(), &Change::Modes(5));
    // Not by whoever has lost the right while it waited.
    let mut world = World::reserved(Kind::WriteExclusive, &[(a(), 1), (b(), 2)]);
    world.done(&a(), &Change::Modes(5));
    world.conflict(&b(), &Change::Modes(6));
    world.conflict(&c(), &Change::Modes(6));
}

/// SAM-5 6.3.2, 6.3.3: a reset frees the unit and brings back the defaults, and everybody is told;
/// 5.12.1: persistent reservations outlive it; 6.15.2: PRgeneration does, too.
#[test]
fn sam_5_clause_6_3_resets() {
    for (target, told) in [(false, [Notice::UnitReset]), (true, [Notice::TargetReset])] {
        let all: Vec<(Party, &[Notice])> =
            [a(), b(), c(), host()].into_iter().map(|who| (who, &told[..])).collect();
        let mut world = World::default();
        world.done(&a(), &ALONE);
        world.done(&a(), &Change::Modes(3));
        world.done(&b(), &Change::Reset { target });
        assert!(world.table.is_free());
        assert_eq!((world.table.modes, world.table.resets), (0, 1));
        world.told_only(&all);
        let mut world = World::reserved(Kind::ExclusiveAccess, &[(a(), 1), (b(), 2)]);
        let (keys, held) = (world.keys(), world.table.reservation.clone());
        world.done(&b(), &Change::Reset { target });
        assert_eq!((world.keys(), &world.table.reservation, world.counted()), (keys, &held, 0));
        world.told_only(&all);
    }
}

/// SAM-5 7.5: CLEAR TASK SET ends the others' commands, whoever holds what, and nothing else.
#[test]
fn sam_5_clause_7_5_clear_task_set() {
    let told: &[Notice] = &[Notice::Aborted];
    let mut world = World::reserved(Kind::ExclusiveAccess, &[(a(), 1), (b(), 2)]);
    let (keys, held) = (world.keys(), world.table.reservation.clone());
    world.done(&c(), &Change::ClearTasks);
    assert_eq!((world.keys(), &world.table.reservation, world.counted()), (keys, &held, 0));
    world.told_only(&[(a(), told), (b(), told), (host(), told)]);
    let mut world = World::default();
    world.done(&a(), &ALONE);
    world.done(&b(), &Change::ClearTasks);
    assert!(!world.table.is_free());
}

/// An administrator does what CLEAR does, from outside: everybody is told.
#[test]
fn an_administrator_frees_the_volume() {
    let evict = |world: &mut World| world.done(&Party::NOBODY, &Change::Evict);
    let told: &[Notice] = &[Notice::ReservationsPreempted];
    World::default().nothing(&Party::NOBODY, &Change::Evict);
    for kind in Kind::ALL {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        evict(&mut world);
        assert_eq!((world.keys(), world.kind(), world.counted()), (vec![], None, 1));
        world.told_only(&[(a(), told), (b(), told)]);
    }
    let mut world = World::default();
    world.done(&a(), &ALONE);
    evict(&mut world);
    assert!(world.table.is_free() && world.counted() == 0);
    world.told_only(&[(a(), told)]);
}

//! What a node tells when it has missed tables. What single changes say stands with their tests.

use reservation::{Change, Kind, Notice, Notices, Party, Table};

use crate::world::{World, a, b, c, host, preempt, preempt_and_abort, register, release, reserve};

fn missed(old: &Table, new: &World, party: &Party) -> Vec<Notice> {
    Table::notices(old, &new.table, party).iter().collect()
}

const PREEMPTED: [Notice; 2] = [Notice::ReservationsPreempted, Notice::RegistrationsPreempted];

#[test]
fn the_same_table_says_nothing() {
    let mut world = World::of(&[(a(), 1)]);
    world.done(&a(), &Change::Reset { target: false });
    assert!(Table::notices(&world.table, &world.table, &a()).is_empty());
}

#[test]
fn whose_registration_is_gone_was_preempted() {
    let mut world = World::of(&[(a(), 1), (b(), 2), (c(), 3)]);
    let old = world.table.clone();
    world.done(&b(), &preempt(2, 1, Kind::WriteExclusive));
    world.done(&host(), &register(0, 4));
    assert_eq!(missed(&old, &world, &a()), PREEMPTED);
    for other in [b(), c(), host()] {
        assert_eq!(missed(&old, &world, &other), []);
    }
}

#[test]
fn a_reservation_that_went_or_changed_was_released() {
    for kind in Kind::ALL {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        let old = world.table.clone();
        world.done(&a(), &release(1, kind));
        world.done(&host(), &register(0, 4));
        assert_eq!(missed(&old, &world, &b()), [Notice::ReservationsReleased]);
        assert_eq!(missed(&old, &world, &c()), []);
        world.done(&a(), &reserve(1, kind));
        assert_eq!(missed(&old, &world, &b()), []);
    }
}

#[test]
fn an_abort_may_have_been_of_anybody() {
    let mut world = World::of(&[(a(), 1), (b(), 2)]);
    let before = world.table.clone();
    world.done(&b(), &preempt_and_abort(2, 1, Kind::WriteExclusive));
    let after = world.table.clone();
    world.done(&a(), &register(0, 1));
    world.done(&a(), &register(1, 3));
    for who in [a(), b(), c()] {
        assert_eq!(missed(&before, &world, &who), [Notice::Aborted]);
        assert_eq!(missed(&after, &world, &who), []);
    }
}

#[test]
fn resets_and_mode_pages_differ() {
    let mut world = World::default();
    let old = world.table.clone();
    world.done(&a(), &Change::Reset { target: true });
    world.done(&a(), &Change::Modes(1));
    assert_eq!(missed(&old, &world, &b()), [Notice::UnitReset, Notice::Modes]);
    world.done(&a(), &Change::Modes(0));
    assert_eq!(missed(&old, &world, &b()), [Notice::UnitReset]);
}

/// A node that has lived through what the others lost power in.
#[test]
fn another_era_is_a_reset() {
    let mut world = World::of(&[(a(), 1)]);
    let old = world.table.clone();
    world.table = world.table.as_of(1, |_| true);
    assert_eq!(missed(&old, &world, &b()), [Notice::TargetReset]);
    let all = [Notice::TargetReset].into_iter().chain(PREEMPTED).collect::<Vec<_>>();
    assert_eq!(missed(&old, &world, &a()), all);
}

/// Even if the table behind it is the next one by its number.
#[test]
fn another_era_has_no_successor() {
    let mut world = World::of(&[(a(), 1)]);
    let old = world.table.clone();
    world.table = world.table.as_of(1, |_| true);
    world.done(&b(), &register(0, 2));
    let all = [Notice::TargetReset].into_iter().chain(PREEMPTED).collect::<Vec<_>>();
    assert_eq!(missed(&old, &world, &a()), all);
}

#[test]
fn notices_are_a_set() {
    let some: Notices = [Notice::Modes, Notice::Aborted, Notice::Modes].into_iter().collect();
    assert_eq!(some.iter().collect::<Vec<_>>(), [Notice::Modes, Notice::Aborted]);
    assert!(some.contains(Notice::Aborted) && !some.contains(Notice::UnitReset));
    let all: Notices = Notice::ALL.into_iter().collect();
    assert_eq!(some.union(all), all);
    assert!(Notices::NONE.is_empty() && !some.is_empty());
}

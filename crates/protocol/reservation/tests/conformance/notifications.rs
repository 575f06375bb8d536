//! Notifications on a node that has missed tables. Those of single changes are tested with the
//! changes.

use reservation::{Change, ItNexus, Notification, Notifications, ReservationType, Table};

use crate::harness::{
    Harness, a, b, c, host, preempt, preempt_and_abort, register, release, reserve,
};

fn missed(old: &Table, new: &Harness, party: &ItNexus) -> Vec<Notification> {
    Table::notifications(old, &new.table, party).iter().collect()
}

const PREEMPTED: [Notification; 2] =
    [Notification::ReservationsPreempted, Notification::RegistrationsPreempted];

#[test]
fn the_same_table_says_nothing() {
    let mut world = Harness::of(&[(a(), 1)]);
    world.apply(&a(), &Change::Reset { whole_target: false });
    assert!(Table::notifications(&world.table, &world.table, &a()).is_empty());
}

#[test]
fn a_lost_registration_notifies_preempted() {
    let mut world = Harness::of(&[(a(), 1), (b(), 2), (c(), 3)]);
    let old = world.table.clone();
    world.apply(&b(), &preempt(2, 1, ReservationType::WriteExclusive));
    world.apply(&host(), &register(0, 4));
    assert_eq!(missed(&old, &world, &a()), PREEMPTED);
    for other in [b(), c(), host()] {
        assert_eq!(missed(&old, &world, &other), []);
    }
}

#[test]
fn a_lost_or_changed_reservation_notifies_released() {
    for kind in ReservationType::ALL {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        let old = world.table.clone();
        world.apply(&a(), &release(1, kind));
        world.apply(&host(), &register(0, 4));
        assert_eq!(missed(&old, &world, &b()), [Notification::ReservationsReleased]);
        assert_eq!(missed(&old, &world, &c()), []);
        world.apply(&a(), &reserve(1, kind));
        assert_eq!(missed(&old, &world, &b()), []);
    }
}

#[test]
fn an_abort_may_concern_any_client() {
    let mut world = Harness::of(&[(a(), 1), (b(), 2)]);
    let before = world.table.clone();
    world.apply(&b(), &preempt_and_abort(2, 1, ReservationType::WriteExclusive));
    let after = world.table.clone();
    world.apply(&a(), &register(0, 1));
    world.apply(&a(), &register(1, 3));
    for who in [a(), b(), c()] {
        assert_eq!(missed(&before, &world, &who), [Notification::AbortCommands]);
        assert_eq!(missed(&after, &world, &who), []);
    }
}

#[test]
fn resets_and_mode_pages_differ() {
    let mut world = Harness::default();
    let old = world.table.clone();
    world.apply(&a(), &Change::Reset { whole_target: true });
    world.apply(&a(), &Change::SetModePages(1));
    assert_eq!(
        missed(&old, &world, &b()),
        [Notification::UnitReset, Notification::ModePagesChanged]
    );
    world.apply(&a(), &Change::SetModePages(0));
    assert_eq!(missed(&old, &world, &b()), [Notification::UnitReset]);
}

/// A node that kept its power while the others lost theirs.
#[test]
fn another_power_epoch_is_a_reset() {
    let mut world = Harness::of(&[(a(), 1)]);
    let old = world.table.clone();
    world.table = world.table.as_of(1, |_| true);
    assert_eq!(missed(&old, &world, &b()), [Notification::TargetReset]);
    let all = [Notification::TargetReset].into_iter().chain(PREEMPTED).collect::<Vec<_>>();
    assert_eq!(missed(&old, &world, &a()), all);
}

/// Even if the following table has the next generation.
#[test]
fn another_power_epoch_has_no_successor() {
    let mut world = Harness::of(&[(a(), 1)]);
    let old = world.table.clone();
    world.table = world.table.as_of(1, |_| true);
    world.apply(&b(), &register(0, 2));
    let all = [Notification::TargetReset].into_iter().chain(PREEMPTED).collect::<Vec<_>>();
    assert_eq!(missed(&old, &world, &a()), all);
}

#[test]
fn notices_are_a_set() {
    let some: Notifications = [
        Notification::ModePagesChanged,
        Notification::AbortCommands,
        Notification::ModePagesChanged,
    ]
    .into_iter()
    .collect();
    assert_eq!(
        some.iter().collect::<Vec<_>>(),
        [Notification::ModePagesChanged, Notification::AbortCommands]
    );
    assert!(some.contains(Notification::AbortCommands) && !some.contains(Notification::UnitReset));
    let all: Notifications = Notification::ALL.into_iter().collect();
    assert_eq!(some.union(all), all);
    assert!(Notifications::NONE.is_empty() && !some.is_empty());
}

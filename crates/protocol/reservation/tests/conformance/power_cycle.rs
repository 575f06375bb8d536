//! What survives a loss of power, and the end of a node's process (5.12.5.1).

use reservation::{Change, ReservationType, Table};

use crate::harness::{Harness, INCARNATION, a, reserve};

fn persisting(persists: bool) -> Harness {
    let mut world = Harness::default();
    let change = Change::Register {
        key: 0,
        new_key: 1,
        ignore_key: false,
        persist: persists,
        ports: vec![],
        other_initiators: vec![],
    };
    world.table = world.table.as_of(1, |_| true);
    world.apply(&a(), &change);
    world.apply(&a(), &reserve(1, ReservationType::ExclusiveAccess));
    world.apply(&a(), &Change::SetModePages(5));
    world
}

/// In the same power epoch nothing changes.
#[test]
fn the_power_epoch_continues() {
    for persists in [false, true] {
        let table = persisting(persists).table;
        assert_eq!(table.clone().as_of(1, |_| false), table);
    }
}

/// 5.12.5.1: APTPL was one.
#[test]
fn clause_5_12_5_1_registrations_persist() {
    let old = persisting(true).table;
    let new = old.clone().as_of(2, |_| true);
    assert_eq!(new.registrants(), old.registrants());
    assert_eq!((&new.reservation, new.persist), (&old.reservation, true));
    // 6.15.2: but PRgeneration is 0, and mode pages were not saved.
    assert_eq!((new.pr_generation, new.mode_pages, &new.last_change), (0, 0, &None));
    assert_eq!((new.generation, new.power_epoch), (old.generation, 2));
}

/// 5.12.11.2.1: APTPL was zero.
#[test]
fn clause_5_12_11_2_1_registrations_do_not_persist() {
    let new = persisting(false).table.as_of(2, |_| true);
    assert_eq!(new.registrants(), []);
    assert!(new.is_unreserved() && new.pr_generation == 0);
}

/// SPC-2 7.21: a RESERVEd unit is free after a loss of power, and once the nexus is lost because
/// its node is.
#[test]
fn spc_2_clause_7_21_the_unit_is_free_without_its_nexus() {
    let mut world = Harness::default();
    world.apply(&a(), &Change::Spc2Reserve);
    let table = world.table;
    assert_eq!(table.clone().as_of(0, |incarnation| incarnation == INCARNATION), table);
    assert!(table.clone().as_of(0, |incarnation| incarnation != INCARNATION).is_unreserved());
    assert!(table.as_of(1, |_| true).is_unreserved());
}

/// A table that was never changed is empty in every power epoch.
#[test]
fn nothing_persists_of_nothing() {
    let table = Table::default().as_of(9, |_| true);
    let mut expected = Table::default();
    expected.power_epoch = 9;
    assert_eq!(table, expected);
}

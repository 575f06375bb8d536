//! REGISTER, REGISTER AND IGNORE EXISTING KEY (5.12.7, 5.12.11.2.3).

use reservation::{Initiator, InvalidField, Notification, ReservationError, ReservationType};

use crate::harness::{
    Harness, a, b, c, host, initiator, nexus, register, register_at, register_ignoring_key,
    register_with_others,
};

/// 5.12.7, an unregistered nexus.
#[test]
fn clause_5_12_7_an_unregistered_nexus_registers() {
    let mut world = Harness::default();
    world.nothing(&a(), &register(0, 0));
    world.conflict(&a(), &register(1, 2));
    world.conflict(&a(), &register(1, 0));
    world.apply(&a(), &register(0, 1));
    assert_eq!((world.keys(), world.pr_generation()), (vec![(a(), 1)], 1));
    world.expect_notifications(&[]);
}

/// 5.12.7, a registered nexus.
#[test]
fn clause_5_12_7_a_registered_nexus_takes_another_key() {
    let mut world = Harness::of(&[(a(), 1)]);
    world.conflict(&a(), &register(0, 2));
    world.conflict(&a(), &register(2, 3));
    world.conflict(&a(), &register(2, 0));
    world.apply(&a(), &register(1, 2));
    assert_eq!((world.keys(), world.pr_generation()), (vec![(a(), 2)], 1));
    // Registering again under the same key is no error, and counts.
    world.apply(&a(), &register(2, 2));
    assert_eq!((world.keys(), world.pr_generation()), (vec![(a(), 2)], 1));
    world.apply(&a(), &register(2, 0));
    assert_eq!((world.keys(), world.pr_generation()), (vec![], 1));
}

/// 5.12.7, REGISTER AND IGNORE EXISTING KEY.
#[test]
fn clause_5_12_7_an_existing_key_is_ignored() {
    let mut world = Harness::default();
    world.nothing(&a(), &register_ignoring_key(0));
    world.apply(&a(), &register_ignoring_key(1));
    world.apply(&a(), &register_ignoring_key(2));
    assert_eq!((world.keys(), world.pr_generation()), (vec![(a(), 2)], 1));
    world.apply(&a(), &register_ignoring_key(0));
    assert_eq!((world.keys(), world.pr_generation()), (vec![], 1));
}

/// 5.12.1: one key for each nexus, whatever its value; the same initiator at another port is
/// another nexus, and so is another session of the same name.
#[test]
fn clause_5_12_1_each_nexus_has_a_key_of_its_own() {
    let mut world = Harness::of(&[(a(), 1), (nexus("a", 2), 1), (host(), 1)]);
    let mut other = a();
    if let Initiator::Iscsi { isid, .. } = &mut other.initiator {
        isid[5] = 2;
    }
    world.apply(&other, &register(0, 5));
    world.apply(&nexus("a", 2), &register(1, 4));
    assert_eq!(world.keys(), [(a(), 1), (nexus("a", 2), 4), (other, 5), (host(), 1)]);
}

/// 5.12.7: registering and taking another key change no reservation.
#[test]
fn clause_5_12_7_registering_leaves_the_reservation() {
    for kind in ReservationType::ALL {
        let mut world = Harness::reserved(kind, &[(a(), 1)]);
        let held = world.table.reservation.clone();
        world.apply(&b(), &register(0, 2));
        world.apply(&a(), &register(1, 3));
        assert_eq!(world.table.reservation, held);
        assert_eq!(world.table.holder_key(), if kind.is_all_registrants() { 0 } else { 3 });
    }
}

/// 5.12.11.2.3: the reservation ends with its holder's registration, and registrants are notified
/// if it gave them rights.
#[test]
fn clause_5_12_11_2_3_a_holder_that_unregisters_releases() {
    for kind in ReservationType::ALL.into_iter().filter(|kind| !kind.is_all_registrants()) {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.apply(&a(), &register(1, 0));
        assert_eq!((world.keys(), world.kind()), (vec![(b(), 2)], None));
        let notified: &[Notification] =
            if kind.is_registrants_only() { &[Notification::ReservationsReleased] } else { &[] };
        world.expect_notifications(&[(b(), notified)]);
    }
}

/// 5.12.11.2.3: any other registrant may go.
#[test]
fn clause_5_12_11_2_3_a_non_holder_releases_nothing() {
    for kind in ReservationType::ALL {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.apply(&b(), &register(2, 0));
        assert_eq!((world.keys(), world.kind()), (vec![(a(), 1)], Some(kind)));
        world.expect_notifications(&[]);
    }
}

/// 5.12.11.2.1, 5.12.11.2.3: a reservation of all registrants is released with the last of them.
#[test]
fn clause_5_12_11_2_3_the_last_of_all_registrants_releases() {
    for kind in [
        ReservationType::WriteExclusiveAllRegistrants,
        ReservationType::ExclusiveAccessAllRegistrants,
    ] {
        let mut world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.apply(&a(), &register(1, 0));
        assert_eq!(world.kind(), Some(kind));
        world.expect_notifications(&[]);
        world.apply(&b(), &register_ignoring_key(0));
        assert_eq!((world.keys(), world.kind()), (vec![], None));
        world.expect_notifications(&[]);
    }
}

/// 5.12.7, 6.16.3: ALL_TG_PT registers at all target ports.
#[test]
fn clause_6_16_3_all_target_ports() {
    let mut world = Harness::of(&[(b(), 9)]);
    world.apply(&a(), &register_at(0, 1, &[1, 2, 3]));
    let all = [(a(), 1), (nexus("a", 2), 1), (nexus("a", 3), 1), (b(), 9)];
    assert_eq!((world.keys(), world.pr_generation()), (all.to_vec(), 1));
    let flags = world.table.registrants().iter().map(|r| r.all_ports);
    assert_eq!(flags.collect::<Vec<_>>(), [true, true, true, false]);
    // A key of one port, and then of all.
    world.apply(&nexus("a", 2), &register(1, 5));
    assert!(!world.table.registrant(&nexus("a", 2)).unwrap().all_ports);
    world.conflict(&a(), &register_at(1, 6, &[1, 2, 3]));
    world.conflict(&a(), &register_at(1, 0, &[1, 2, 3]));
    world.apply(&nexus("a", 2), &register(5, 1));
    // A port that came later is registered along.
    world.apply(&a(), &register_at(1, 6, &[1, 2, 3, 4]));
    let all = [(a(), 6), (nexus("a", 2), 6), (nexus("a", 3), 6), (nexus("a", 4), 6), (b(), 9)];
    assert_eq!(world.keys(), all);
    // A port without registrations is no reason to keep the others.
    world.apply(&a(), &register_at(6, 0, &[1, 2, 3, 4, 5]));
    assert_eq!(world.keys(), [(b(), 9)]);
}

/// The same with REGISTER AND IGNORE EXISTING KEY, which also cleans up at other ports.
#[test]
fn clause_6_16_3_all_target_ports_whatever_their_keys() {
    let anyway = |key, ports: &[u16]| {
        let reservation::Change::Register { persist: persists, other_initiators: also, .. } =
            register(0, 0)
        else {
            unreachable!()
        };
        let ports = ports.to_vec();
        reservation::Change::Register {
            key,
            new_key: key,
            ignore_key: true,
            persist: persists,
            ports,
            other_initiators: also,
        }
    };
    let mut world = Harness::of(&[(a(), 1), (nexus("a", 2), 2)]);
    world.apply(&a(), &anyway(3, &[1, 2, 3]));
    assert_eq!(world.keys(), [(a(), 3), (nexus("a", 2), 3), (nexus("a", 3), 3)]);
    world.apply(&nexus("a", 4), &anyway(0, &[1, 2, 3, 4]));
    assert_eq!(world.keys(), []);
    world.nothing(&a(), &anyway(0, &[1, 2, 3, 4]));
}

/// 5.12.11.2.3: the reservation goes with its holder, whichever port it was asked at.
#[test]
fn clause_5_12_11_2_3_unregistering_everywhere_releases() {
    let held = ReservationType::WriteExclusiveRegistrantsOnly;
    let mut world = Harness::reserved(held, &[(a(), 1), (nexus("a", 2), 1), (b(), 2)]);
    world.apply(&nexus("a", 2), &register_at(1, 0, &[1, 2]));
    assert_eq!((world.keys(), world.kind()), (vec![(b(), 2)], None));
    world.expect_notifications(&[(b(), &[Notification::ReservationsReleased])]);
}

/// 5.12.7: SPEC_I_PT registers others along with oneself.
#[test]
fn clause_5_12_7_specified_initiator_ports() {
    let others = [initiator("b"), initiator("c"), initiator("b"), initiator("a")];
    let mut world = Harness::default();
    world.nothing(&a(), &register_with_others(0, 0, &others));
    world.conflict(&a(), &register_with_others(1, 2, &others));
    world.apply(&a(), &register_with_others(0, 1, &others));
    assert_eq!((world.keys(), world.pr_generation()), (vec![(a(), 1), (b(), 1), (c(), 1)], 1));
    world.expect_notifications(&[]);
}

/// 5.12.7: not of a nexus that is registered.
#[test]
fn clause_5_12_7_a_registered_nexus_cannot_specify_initiator_ports() {
    let world = Harness::of(&[(a(), 1)]);
    let wrong = ReservationError::InvalidField(InvalidField::SpecIPt);
    world.conflict(&a(), &register_with_others(2, 3, &[initiator("b")]));
    world.refused(&a(), &register_with_others(1, 2, &[initiator("b")]), wrong);
    world.refused(&a(), &register_with_others(1, 0, &[initiator("b")]), wrong);
}

/// 5.12.7, 6.16.3: all or nothing.
#[test]
fn clause_6_16_3_a_specified_nexus_that_is_registered() {
    let world = Harness::of(&[(c(), 3)]);
    let wrong = ReservationError::InvalidField(InvalidField::TransportId);
    world.refused(&a(), &register_with_others(0, 1, &[initiator("b"), initiator("c")]), wrong);
    // At another port the same initiator is another nexus.
    let mut world = Harness::of(&[(nexus("c", 2), 3)]);
    world.apply(&a(), &register_with_others(0, 1, &[initiator("c")]));
    assert_eq!(world.keys(), [(a(), 1), (c(), 1), (nexus("c", 2), 3)]);
}

/// 5.12.7: SPEC_I_PT and ALL_TG_PT together.
#[test]
fn clause_5_12_7_specified_initiators_at_all_target_ports() {
    let both = |key, new_key| reservation::Change::Register {
        key,
        new_key,
        ignore_key: false,
        persist: true,
        ports: vec![2, 1],
        other_initiators: vec![initiator("b")],
    };
    let mut world = Harness::default();
    world.apply(&a(), &both(0, 1));
    assert_eq!(world.keys(), [(a(), 1), (nexus("a", 2), 1), (b(), 1), (nexus("b", 2), 1)]);
    assert!(world.table.persist);
    let world = Harness::of(&[(nexus("b", 2), 3)]);
    world.refused(&a(), &both(0, 1), ReservationError::InvalidField(InvalidField::TransportId));
}

/// 5.12.7: REGISTER AND IGNORE EXISTING KEY has no SPEC_I_PT.
#[test]
fn clause_5_12_7_ignoring_the_key_cannot_specify_initiator_ports() {
    let change = |new_key| reservation::Change::Register {
        key: 0,
        new_key,
        ignore_key: true,
        persist: false,
        ports: vec![],
        other_initiators: vec![initiator("b")],
    };
    for world in [Harness::default(), Harness::of(&[(a(), 1)])] {
        world.refused(&a(), &change(1), ReservationError::InvalidField(InvalidField::SpecIPt));
        world.refused(&a(), &change(0), ReservationError::InvalidField(InvalidField::SpecIPt));
    }
}

/// A name is kept as it is or not at all (RFC 7143 4.2.7.1).
#[test]
fn names_have_a_length_and_no_control_characters() {
    let named = |name: String| Initiator::Iscsi { name, isid: [0; 6] };
    let world = Harness::default();
    for bad in [String::new(), "n".repeat(224), "iqn.2024-01.net\n".into()] {
        let wrong = ReservationError::InvalidField(InvalidField::TransportId);
        world.refused(&a(), &register_with_others(0, 1, &[named(bad.clone())]), wrong);
        let party = reservation::ItNexus { initiator: named(bad), port: 1 };
        world.refused(&party, &register(0, 1), wrong);
    }
    let mut world = Harness::default();
    world.apply(&a(), &register_with_others(0, 1, &[named("ä".repeat(111))]));
}

/// 6.15.2: PRgeneration wraps.
#[test]
fn clause_6_15_2_the_generation_wraps() {
    let mut world = Harness::of(&[(a(), 1)]);
    world.table.pr_generation = u32::MAX;
    world.apply(&a(), &register(1, 2));
    assert_eq!(world.table.pr_generation, 0);
}

/// 5.12.5.1: the last processed APTPL counts, from any nexus.
#[test]
fn clause_5_12_5_1_the_last_aptpl_counts() {
    let change = |key, new_key, persists| reservation::Change::Register {
        key,
        new_key,
        ignore_key: false,
        persist: persists,
        ports: vec![],
        other_initiators: vec![],
    };
    let mut world = Harness::default();
    world.nothing(&a(), &change(0, 0, true));
    world.apply(&a(), &change(0, 1, true));
    assert!(world.table.persist);
    world.apply(&b(), &change(0, 1, false));
    assert!(!world.table.persist);
    world.apply(&b(), &change(1, 0, true));
    assert!(world.table.persist);
    world.conflict(&b(), &change(1, 0, false));
    world.apply(&a(), &reservation::Change::Clear { key: 1 });
    assert!(world.table.persist);
}

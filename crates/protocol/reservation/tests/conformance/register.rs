//! REGISTER, REGISTER AND IGNORE EXISTING KEY (5.12.7, 5.12.11.2.3).

use reservation::{Field, Initiator, Kind, Notice, Refusal};

use crate::world::{
    World, a, at, b, c, host, initiator, register, register_also, register_anyway, register_at,
};

/// 5.12.7, an unregistered nexus.
#[test]
fn clause_5_12_7_an_unregistered_nexus_registers() {
    let mut world = World::default();
    world.nothing(&a(), &register(0, 0));
    world.conflict(&a(), &register(1, 2));
    world.conflict(&a(), &register(1, 0));
    world.done(&a(), &register(0, 1));
    assert_eq!((world.keys(), world.counted()), (vec![(a(), 1)], 1));
    world.told_only(&[]);
}

/// 5.12.7, a registered nexus.
#[test]
fn clause_5_12_7_a_registered_nexus_takes_another_key() {
    let mut world = World::of(&[(a(), 1)]);
    world.conflict(&a(), &register(0, 2));
    world.conflict(&a(), &register(2, 3));
    world.conflict(&a(), &register(2, 0));
    world.done(&a(), &register(1, 2));
    assert_eq!((world.keys(), world.counted()), (vec![(a(), 2)], 1));
    // Registering again under the same key is no error, and counts.
    world.done(&a(), &register(2, 2));
    assert_eq!((world.keys(), world.counted()), (vec![(a(), 2)], 1));
    world.done(&a(), &register(2, 0));
    assert_eq!((world.keys(), world.counted()), (vec![], 1));
}

/// 5.12.7, REGISTER AND IGNORE EXISTING KEY.
#[test]
fn clause_5_12_7_an_existing_key_is_ignored() {
    let mut world = World::default();
    world.nothing(&a(), &register_anyway(0));
    world.done(&a(), &register_anyway(1));
    world.done(&a(), &register_anyway(2));
    assert_eq!((world.keys(), world.counted()), (vec![(a(), 2)], 1));
    world.done(&a(), &register_anyway(0));
    assert_eq!((world.keys(), world.counted()), (vec![], 1));
}

/// 5.12.1: one key for each nexus, whatever its value; the same initiator at another port is
/// another nexus, and so is another session of the same name.
#[test]
fn clause_5_12_1_each_nexus_has_a_key_of_its_own() {
    let mut world = World::of(&[(a(), 1), (at("a", 2), 1), (host(), 1)]);
    let mut other = a();
    if let Initiator::Iscsi { isid, .. } = &mut other.initiator {
        isid[5] = 2;
    }
    world.done(&other, &register(0, 5));
    world.done(&at("a", 2), &register(1, 4));
    assert_eq!(world.keys(), [(a(), 1), (at("a", 2), 4), (other, 5), (host(), 1)]);
}

/// 5.12.7: registering and taking another key change no reservation.
#[test]
fn clause_5_12_7_registering_leaves_the_reservation() {
    for kind in Kind::ALL {
        let mut world = World::reserved(kind, &[(a(), 1)]);
        let held = world.table.reservation.clone();
        world.done(&b(), &register(0, 2));
        world.done(&a(), &register(1, 3));
        assert_eq!(world.table.reservation, held);
        assert_eq!(world.table.holder_key(), if kind.is_all_registrants() { 0 } else { 3 });
    }
}

/// 5.12.11.2.3: the reservation goes with its holder, and registrants are told if it gave them
/// rights.
#[test]
fn clause_5_12_11_2_3_a_holder_that_unregisters_releases() {
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.is_all_registrants()) {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.done(&a(), &register(1, 0));
        assert_eq!((world.keys(), world.kind()), (vec![(b(), 2)], None));
        let told: &[Notice] =
            if kind.is_registrants_only() { &[Notice::ReservationsReleased] } else { &[] };
        world.told_only(&[(b(), told)]);
    }
}

/// 5.12.11.2.3: any other registrant may go.
#[test]
fn clause_5_12_11_2_3_who_does_not_hold_it_releases_nothing() {
    for kind in Kind::ALL {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.done(&b(), &register(2, 0));
        assert_eq!((world.keys(), world.kind()), (vec![(a(), 1)], Some(kind)));
        world.told_only(&[]);
    }
}

/// 5.12.11.2.1, 5.12.11.2.3: what all hold is released with the last of them.
#[test]
fn clause_5_12_11_2_3_the_last_of_all_registrants_releases() {
    for kind in [Kind::WriteExclusiveAll, Kind::ExclusiveAccessAll] {
        let mut world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.done(&a(), &register(1, 0));
        assert_eq!(world.kind(), Some(kind));
        world.told_only(&[]);
        world.done(&b(), &register_anyway(0));
        assert_eq!((world.keys(), world.kind()), (vec![], None));
        world.told_only(&[]);
    }
}

/// 5.12.7, 6.16.3: ALL_TG_PT registers at all target ports.
#[test]
fn clause_6_16_3_all_target_ports() {
    let mut world = World::of(&[(b(), 9)]);
    world.done(&a(), &register_at(0, 1, &[1, 2, 3]));
    let all = [(a(), 1), (at("a", 2), 1), (at("a", 3), 1), (b(), 9)];
    assert_eq!((world.keys(), world.counted()), (all.to_vec(), 1));
    let flags = world.table.registrants().iter().map(|r| r.all_ports);
    assert_eq!(flags.collect::<Vec<_>>(), [true, true, true, false]);
    // A key of one port, and then of all.
    world.done(&at("a", 2), &register(1, 5));
    assert!(!world.table.registrant(&at("a", 2)).unwrap().all_ports);
    world.conflict(&a(), &register_at(1, 6, &[1, 2, 3]));
    world.conflict(&a(), &register_at(1, 0, &[1, 2, 3]));
    world.done(&at("a", 2), &register(5, 1));
    // A port that came later is registered along.
    world.done(&a(), &register_at(1, 6, &[1, 2, 3, 4]));
    let all = [(a(), 6), (at("a", 2), 6), (at("a", 3), 6), (at("a", 4), 6), (b(), 9)];
    assert_eq!(world.keys(), all);
    // And one that nobody has registered at is no reason to keep the others.
    world.done(&a(), &register_at(6, 0, &[1, 2, 3, 4, 5]));
    assert_eq!(world.keys(), [(b(), 9)]);
}

/// The same with REGISTER AND IGNORE EXISTING KEY, which also cleans up at other ports.
#[test]
fn clause_6_16_3_all_target_ports_whatever_their_keys() {
    let anyway = |key, ports: &[u16]| {
        let reservation::Change::Register { persists, also, .. } = register(0, 0) else {
            unreachable!()
        };
        let ports = ports.to_vec();
        reservation::Change::Register { key, new_key: key, ignore_key: true, persists, ports, also }
    };
    let mut world = World::of(&[(a(), 1), (at("a", 2), 2)]);
    world.done(&a(), &anyway(3, &[1, 2, 3]));
    assert_eq!(world.keys(), [(a(), 3), (at("a", 2), 3), (at("a", 3), 3)]);
    world.done(&at("a", 4), &anyway(0, &[1, 2, 3, 4]));
    assert_eq!(world.keys(), []);
    world.nothing(&a(), &anyway(0, &[1, 2, 3, 4]));
}

/// 5.12.11.2.3: the reservation goes with its holder, whichever port it was asked at.
#[test]
fn clause_5_12_11_2_3_unregistering_everywhere_releases() {
    let held = Kind::WriteExclusiveRegistrants;
    let mut world = World::reserved(held, &[(a(), 1), (at("a", 2), 1), (b(), 2)]);
    world.done(&at("a", 2), &register_at(1, 0, &[1, 2]));
    assert_eq!((world.keys(), world.kind()), (vec![(b(), 2)], None));
    world.told_only(&[(b(), &[Notice::ReservationsReleased])]);
}

/// 5.12.7: SPEC_I_PT registers others along with oneself.
#[test]
fn clause_5_12_7_specified_initiator_ports() {
    let others = [initiator("b"), initiator("c"), initiator("b"), initiator("a")];
    let mut world = World::default();
    world.nothing(&a(), &register_also(0, 0, &others));
    world.conflict(&a(), &register_also(1, 2, &others));
    world.done(&a(), &register_also(0, 1, &others));
    assert_eq!((world.keys(), world.counted()), (vec![(a(), 1), (b(), 1), (c(), 1)], 1));
    world.told_only(&[]);
}

/// 5.12.7: not of a nexus that is registered.
#[test]
fn clause_5_12_7_a_registered_nexus_specifies_nobody() {
    let world = World::of(&[(a(), 1)]);
    let wrong = Refusal::Parameter(Field::Also);
    world.conflict(&a(), &register_also(2, 3, &[initiator("b")]));
    world.refused(&a(), &register_also(1, 2, &[initiator("b")]), wrong);
    world.refused(&a(), &register_also(1, 0, &[initiator("b")]), wrong);
}

/// 5.12.7, 6.16.3: all or nothing.
#[test]
fn clause_6_16_3_a_specified_nexus_that_is_registered() {
    let world = World::of(&[(c(), 3)]);
    let wrong = Refusal::Parameter(Field::Initiator);
    world.refused(&a(), &register_also(0, 1, &[initiator("b"), initiator("c")]), wrong);
    // At another port the same initiator is another nexus.
    let mut world = World::of(&[(at("c", 2), 3)]);
    world.done(&a(), &register_also(0, 1, &[initiator("c")]));
    assert_eq!(world.keys(), [(a(), 1), (c(), 1), (at("c", 2), 3)]);
}

/// 5.12.7: SPEC_I_PT and ALL_TG_PT together.
#[test]
fn clause_5_12_7_specified_initiators_at_all_target_ports() {
    let both = |key, new_key| reservation::Change::Register {
        key,
        new_key,
        ignore_key: false,
        persists: true,
        ports: vec![2, 1],
        also: vec![initiator("b")],
    };
    let mut world = World::default();
    world.done(&a(), &both(0, 1));
    assert_eq!(world.keys(), [(a(), 1), (at("a", 2), 1), (b(), 1), (at("b", 2), 1)]);
    assert!(world.table.persists);
    let world = World::of(&[(at("b", 2), 3)]);
    world.refused(&a(), &both(0, 1), Refusal::Parameter(Field::Initiator));
}

/// 5.12.7: REGISTER AND IGNORE EXISTING KEY has no SPEC_I_PT.
#[test]
fn clause_5_12_7_ignoring_the_key_specifies_nobody() {
    let change = |new_key| reservation::Change::Register {
        key: 0,
        new_key,
        ignore_key: true,
        persists: false,
        ports: vec![],
        also: vec![initiator("b")],
    };
    for world in [World::default(), World::of(&[(a(), 1)])] {
        world.refused(&a(), &change(1), Refusal::Parameter(Field::Also));
        world.refused(&a(), &change(0), Refusal::Parameter(Field::Also));
    }
}

/// A name is kept as it is or not at all (RFC 7143 4.2.7.1).
#[test]
fn names_have_a_length_and_no_control_characters() {
    let named = |name: String| Initiator::Iscsi { name, isid: [0; 6] };
    let world = World::default();
    for bad in [String::new(), "n".repeat(224), "iqn.2024-01.net\n".into()] {
        let wrong = Refusal::Parameter(Field::Initiator);
        world.refused(&a(), &register_also(0, 1, &[named(bad.clone())]), wrong);
        let party = reservation::Party { initiator: named(bad), port: 1 };
        world.refused(&party, &register(0, 1), wrong);
    }
    let mut world = World::default();
    world.done(&a(), &register_also(0, 1, &[named("ä".repeat(111))]));
}

/// 6.15.2: PRgeneration wraps.
#[test]
fn clause_6_15_2_the_generation_wraps() {
    let mut world = World::of(&[(a(), 1)]);
    world.table.pr_generation = u32::MAX;
    world.done(&a(), &register(1, 2));
    assert_eq!(world.table.pr_generation, 0);
}

/// 5.12.5.1: the last APTPL that was processed counts, whoever sent it.
#[test]
fn clause_5_12_5_1_the_last_aptpl_counts() {
    let change = |key, new_key, persists| reservation::Change::Register {
        key,
        new_key,
        ignore_key: false,
        persists,
        ports: vec![],
        also: vec![],
    };
    let mut world = World::default();
    world.nothing(&a(), &change(0, 0, true));
    world.done(&a(), &change(0, 1, true));
    assert!(world.table.persists);
    world.done(&b(), &change(0, 1, false));
    assert!(!world.table.persists);
    world.done(&b(), &change(1, 0, true));
    assert!(world.table.persists);
    world.conflict(&b(), &change(1, 0, false));
    world.done(&a(), &reservation::Change::Clear { key: 1 });
    assert!(world.table.persists);
}

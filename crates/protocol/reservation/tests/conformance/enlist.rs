//! Reservation Register (NVMe Base 2.0, 7.3 and 8.19): where it differs from REGISTER.

use reservation::{Change, Enlisting, Field, Kind, Notice, Refusal};

use crate::world::{World, a, b, enlist, host, register, reserve};

/// A host that has registered registers again with its key only: another one it has to take by
/// Replace.
#[test]
fn a_host_registers_once_or_with_the_same_key() {
    let mut world = World::default();
    world.done(&host(), &enlist(Enlisting::Register { new_key: 5 }));
    assert_eq!((world.keys(), world.counted()), (vec![(host(), 5)], 1));
    world.conflict(&host(), &enlist(Enlisting::Register { new_key: 6 }));
    world.done(&host(), &enlist(Enlisting::Register { new_key: 5 }));
    assert_eq!((world.keys(), world.counted()), (vec![(host(), 5)], 1));
}

/// Replace and Unregister are for those who have registered, and whose key fits unless it is to be
/// ignored.
#[test]
fn only_registrants_replace_and_unregister() {
    let mut world = World::default();
    for key in [None, Some(0), Some(5)] {
        world.conflict(&host(), &enlist(Enlisting::Replace { key, new_key: 6 }));
        world.conflict(&host(), &enlist(Enlisting::Unregister { key }));
    }
    world.done(&host(), &enlist(Enlisting::Register { new_key: 5 }));
    world.conflict(&host(), &enlist(Enlisting::Replace { key: Some(4), new_key: 6 }));
    world.conflict(&host(), &enlist(Enlisting::Unregister { key: Some(4) }));
    world.done(&host(), &enlist(Enlisting::Replace { key: Some(5), new_key: 6 }));
    world.done(&host(), &enlist(Enlisting::Replace { key: None, new_key: 7 }));
    assert_eq!((world.keys(), world.counted()), (vec![(host(), 7)], 1));
    world.done(&host(), &enlist(Enlisting::Unregister { key: Some(7) }));
    assert_eq!((world.keys(), world.counted()), (vec![], 1));
}

/// No key is 0.
#[test]
fn a_key_of_zero_is_refused() {
    let mut world = World::default();
    let zero = Refusal::Parameter(Field::NewKey);
    world.refused(&host(), &enlist(Enlisting::Register { new_key: 0 }), zero);
    world.done(&host(), &enlist(Enlisting::Register { new_key: 5 }));
    world.refused(&host(), &enlist(Enlisting::Replace { key: None, new_key: 0 }), zero);
}

/// 8.19: with its holder's registration a reservation goes, and registrants that had rights by it
/// are told; of all registrants, with the last of them.
#[test]
fn an_unregistered_holder_releases() {
    let goes = enlist(Enlisting::Unregister { key: None });
    let mut world = World::of(&[(a(), 1)]);
    world.done(&host(), &enlist(Enlisting::Register { new_key: 5 }));
    world.done(&host(), &reserve(5, Kind::WriteExclusiveRegistrants));
    world.done(&host(), &goes);
    assert_eq!(world.kind(), None);
    world.told_only(&[(a(), &[Notice::ReservationsReleased])]);
    world.done(&host(), &enlist(Enlisting::Register { new_key: 5 }));
    world.done(&host(), &reserve(5, Kind::ExclusiveAccessAll));
    world.done(&host(), &goes);
    assert_eq!(world.kind(), Some(Kind::ExclusiveAccessAll));
    world.done(&a(), &register(1, 0));
    assert_eq!(world.kind(), None);
}

/// 7.3 (CPTPL) and 5.27.1.27: what outlives a loss of power is said with a registration or by
/// itself, and stays as it is otherwise.
#[test]
fn persistence_stays_until_it_is_changed() {
    let mut world = World::default();
    let with = |persists| Change::Enlist { action: Enlisting::Register { new_key: 5 }, persists };
    world.done(&host(), &with(Some(true)));
    assert!(world.table.persists);
    world.done(&host(), &with(None));
    assert!(world.table.persists);
    let counted = world.table.pr_generation;
    world.nothing(&b(), &Change::Persist(true));
    world.done(&b(), &Change::Persist(false));
    assert_eq!((world.table.persists, world.table.pr_generation), (false, counted));
    world.told_only(&[]);
}

/// The codes of the types (RTYPE).
#[test]
fn types_have_codes_of_their_own() {
    let all: Vec<_> = (0..=8).map(Kind::from_nvme).collect();
    let kinds = Kind::ALL.map(Some);
    assert_eq!(all, [&[None], &kinds[..], &[None, None]].concat());
    assert!(Kind::ALL.iter().all(|kind| Kind::from_nvme(kind.nvme()) == Some(*kind)));
}

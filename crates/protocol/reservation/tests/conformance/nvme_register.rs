//! Reservation Register (NVMe Base 2.0, 7.3 and 8.19): where it differs from REGISTER.

use reservation::{
    Change, InvalidField, Notification, NvmeRegisterAction, ReservationError, ReservationType,
};

use crate::harness::{Harness, a, b, host, nvme_register, register, reserve};

/// A registered host may register again only with the same key: to change it, it must use Replace.
#[test]
fn a_host_registers_once_or_with_the_same_key() {
    let mut world = Harness::default();
    world.apply(&host(), &nvme_register(NvmeRegisterAction::Register { new_key: 5 }));
    assert_eq!((world.keys(), world.pr_generation()), (vec![(host(), 5)], 1));
    world.conflict(&host(), &nvme_register(NvmeRegisterAction::Register { new_key: 6 }));
    world.apply(&host(), &nvme_register(NvmeRegisterAction::Register { new_key: 5 }));
    assert_eq!((world.keys(), world.pr_generation()), (vec![(host(), 5)], 1));
}

/// Replace and Unregister need a registration, and the right key unless that is ignored.
#[test]
fn only_registrants_replace_and_unregister() {
    let mut world = Harness::default();
    for key in [None, Some(0), Some(5)] {
        world.conflict(&host(), &nvme_register(NvmeRegisterAction::Replace { key, new_key: 6 }));
        world.conflict(&host(), &nvme_register(NvmeRegisterAction::Unregister { key }));
    }
    world.apply(&host(), &nvme_register(NvmeRegisterAction::Register { new_key: 5 }));
    world.conflict(
        &host(),
        &nvme_register(NvmeRegisterAction::Replace { key: Some(4), new_key: 6 }),
    );
    world.conflict(&host(), &nvme_register(NvmeRegisterAction::Unregister { key: Some(4) }));
    world.apply(&host(), &nvme_register(NvmeRegisterAction::Replace { key: Some(5), new_key: 6 }));
    world.apply(&host(), &nvme_register(NvmeRegisterAction::Replace { key: None, new_key: 7 }));
    assert_eq!((world.keys(), world.pr_generation()), (vec![(host(), 7)], 1));
    world.apply(&host(), &nvme_register(NvmeRegisterAction::Unregister { key: Some(7) }));
    assert_eq!((world.keys(), world.pr_generation()), (vec![], 1));
}

/// No key is 0.
#[test]
fn a_key_of_zero_is_refused() {
    let mut world = Harness::default();
    let zero = ReservationError::InvalidField(InvalidField::NewKey);
    world.refused(&host(), &nvme_register(NvmeRegisterAction::Register { new_key: 0 }), zero);
    world.apply(&host(), &nvme_register(NvmeRegisterAction::Register { new_key: 5 }));
    world.refused(
        &host(),
        &nvme_register(NvmeRegisterAction::Replace { key: None, new_key: 0 }),
        zero,
    );
}

/// 8.19: the reservation ends with its holder's registration, which notifies registrants that had
/// rights by it; one of all registrants ends with the last of them.
#[test]
fn an_unregistered_holder_releases() {
    let goes = nvme_register(NvmeRegisterAction::Unregister { key: None });
    let mut world = Harness::of(&[(a(), 1)]);
    world.apply(&host(), &nvme_register(NvmeRegisterAction::Register { new_key: 5 }));
    world.apply(&host(), &reserve(5, ReservationType::WriteExclusiveRegistrantsOnly));
    world.apply(&host(), &goes);
    assert_eq!(world.kind(), None);
    world.expect_notifications(&[(a(), &[Notification::ReservationsReleased])]);
    world.apply(&host(), &nvme_register(NvmeRegisterAction::Register { new_key: 5 }));
    world.apply(&host(), &reserve(5, ReservationType::ExclusiveAccessAllRegistrants));
    world.apply(&host(), &goes);
    assert_eq!(world.kind(), Some(ReservationType::ExclusiveAccessAllRegistrants));
    world.apply(&a(), &register(1, 0));
    assert_eq!(world.kind(), None);
}

/// 7.3 (CPTPL) and 5.27.1.27: persistence through power loss is set with a registration or by
/// itself, and otherwise unchanged.
#[test]
fn persistence_stays_until_it_is_changed() {
    let mut world = Harness::default();
    let with = |persists| Change::NvmeRegister {
        action: NvmeRegisterAction::Register { new_key: 5 },
        persist: persists,
    };
    world.apply(&host(), &with(Some(true)));
    assert!(world.table.persist);
    world.apply(&host(), &with(None));
    assert!(world.table.persist);
    let counted = world.table.pr_generation;
    world.nothing(&b(), &Change::SetPersistence(true));
    world.apply(&b(), &Change::SetPersistence(false));
    assert_eq!((world.table.persist, world.table.pr_generation), (false, counted));
    world.expect_notifications(&[]);
}

/// The codes of the types (RTYPE).
#[test]
fn types_have_codes_of_their_own() {
    let all: Vec<_> = (0..=8).map(ReservationType::from_nvme).collect();
    let kinds = ReservationType::ALL.map(Some);
    assert_eq!(all, [&[None], &kinds[..], &[None, None]].concat());
    assert!(
        ReservationType::ALL
            .iter()
            .all(|kind| ReservationType::from_nvme(kind.nvme()) == Some(*kind))
    );
}

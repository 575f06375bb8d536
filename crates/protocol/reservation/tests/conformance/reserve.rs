//! RESERVE (5.12.9), the holder (5.12.10), and the access that it denies (5.12.1).

use reservation::{ReservationType, Rights};

use crate::harness::{Harness, a, b, c, host, register, reserve};

/// 6.15.3.4.
#[test]
fn clause_6_15_3_4_types_and_their_codes() {
    let known = [1, 3, 5, 6, 7, 8];
    for code in 0..=u8::MAX {
        let kind = ReservationType::from_scsi(code);
        assert_eq!(kind.is_some(), known.contains(&code));
        assert!(kind.is_none_or(|kind| kind.scsi() == code));
    }
}

/// 5.12.1, 5.12.9: only a registered nexus, with its key.
#[test]
fn clause_5_12_9_only_registrants_reserve() {
    for kind in ReservationType::ALL {
        let mut world = Harness::of(&[(a(), 1)]);
        world.conflict(&b(), &reserve(0, kind));
        world.conflict(&b(), &reserve(1, kind));
        world.conflict(&a(), &reserve(2, kind));
        world.apply(&a(), &reserve(1, kind));
        assert_eq!((world.kind(), world.pr_generation()), (Some(kind), 0));
        world.expect_notifications(&[]);
    }
}

/// 5.12.9: one at a time; repeating one's own request is no error, another type is.
#[test]
fn clause_5_12_9_one_reservation_at_a_time() {
    for kind in ReservationType::ALL {
        let world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.nothing(&a(), &reserve(1, kind));
        world.conflict(&a(), &reserve(9, kind));
        for other in ReservationType::ALL.into_iter().filter(|other| *other != kind) {
            world.conflict(&a(), &reserve(1, other));
            world.conflict(&b(), &reserve(2, other));
        }
        if kind.is_all_registrants() {
            world.nothing(&b(), &reserve(2, kind));
        } else {
            world.conflict(&b(), &reserve(2, kind));
        }
    }
}

/// 5.12.10.
#[test]
fn clause_5_12_10_the_holder() {
    for kind in ReservationType::ALL {
        let world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        let all = kind.is_all_registrants();
        assert!(world.table.is_holder(&a()) && !world.table.is_holder(&c()));
        assert_eq!(world.table.is_holder(&b()), all);
        assert_eq!(world.table.holder_key(), if all { 0 } else { 1 });
    }
    let world = Harness::of(&[(a(), 1)]);
    assert!(!world.table.is_holder(&a()) && world.table.holder_key() == 0);
}

fn rights(reads: bool, writes: bool, registered: bool) -> Rights {
    Rights { can_read: reads, can_write: writes, is_registered: registered, passes_spc2: true }
}

/// 5.12.1: the holder, a registrant, and any other initiator.
#[test]
fn clause_5_12_1_access_by_type() {
    let expected = [
        (ReservationType::WriteExclusive, (true, false), (true, false)),
        (ReservationType::ExclusiveAccess, (false, false), (false, false)),
        (ReservationType::WriteExclusiveRegistrantsOnly, (true, true), (true, false)),
        (ReservationType::ExclusiveAccessRegistrantsOnly, (true, true), (false, false)),
        (ReservationType::WriteExclusiveAllRegistrants, (true, true), (true, false)),
        (ReservationType::ExclusiveAccessAllRegistrants, (true, true), (false, false)),
    ];
    for (kind, registrant, other) in expected {
        let world = Harness::reserved(kind, &[(a(), 1), (b(), 2)]);
        assert!(!world.table.is_unreserved());
        assert_eq!(world.table.rights(&a()), rights(true, true, true));
        assert_eq!(world.table.rights(&b()), rights(registrant.0, registrant.1, true));
        assert_eq!(world.table.rights(&c()), rights(other.0, other.1, false));
        assert_eq!(world.table.rights(&host()), rights(other.0, other.1, false));
    }
}

/// 5.12.7: registrations alone deny no access.
#[test]
fn clause_5_12_7_registrations_restrict_no_access() {
    let mut world = Harness::default();
    assert!(world.table.is_unreserved());
    world.apply(&a(), &register(0, 1));
    assert!(world.table.is_unreserved());
    assert_eq!(world.table.rights(&a()), Rights::ALL);
    assert_eq!(world.table.rights(&b()), Rights { is_registered: false, ..Rights::ALL });
}

#[test]
fn rights_meet() {
    let all = Rights::ALL;
    let some = Rights { can_write: false, is_registered: false, ..all };
    assert_eq!((all.intersection(some), some.intersection(all)), (some, some));
    let other = Rights { can_read: false, passes_spc2: false, ..all };
    let none =
        Rights { can_read: false, can_write: false, is_registered: false, passes_spc2: false };
    assert_eq!(some.intersection(other), none);
}

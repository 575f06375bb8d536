//! RESERVE (5.12.9), who holds it (5.12.10), and what it keeps whom from (5.12.1).

use reservation::{Kind, Rights};

use crate::world::{World, a, b, c, host, register, reserve};

/// 6.15.3.4.
#[test]
fn clause_6_15_3_4_types_and_their_codes() {
    let known = [1, 3, 5, 6, 7, 8];
    for code in 0..=u8::MAX {
        let kind = Kind::from_scsi(code);
        assert_eq!(kind.is_some(), known.contains(&code));
        assert!(kind.is_none_or(|kind| kind.scsi() == code));
    }
}

/// 5.12.1, 5.12.9: only who is registered, under its key.
#[test]
fn clause_5_12_9_only_registrants_reserve() {
    for kind in Kind::ALL {
        let mut world = World::of(&[(a(), 1)]);
        world.conflict(&b(), &reserve(0, kind));
        world.conflict(&b(), &reserve(1, kind));
        world.conflict(&a(), &reserve(2, kind));
        world.done(&a(), &reserve(1, kind));
        assert_eq!((world.kind(), world.counted()), (Some(kind), 0));
        world.told_only(&[]);
    }
}

/// 5.12.9: one at a time; to ask for what one holds is no error, to ask for another type is.
#[test]
fn clause_5_12_9_one_reservation_at_a_time() {
    for kind in Kind::ALL {
        let world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        world.nothing(&a(), &reserve(1, kind));
        world.conflict(&a(), &reserve(9, kind));
        for other in Kind::ALL.into_iter().filter(|other| *other != kind) {
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
    for kind in Kind::ALL {
        let world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        let all = kind.is_all_registrants();
        assert!(world.table.holds(&a()) && !world.table.holds(&c()));
        assert_eq!(world.table.holds(&b()), all);
        assert_eq!(world.table.holder_key(), if all { 0 } else { 1 });
    }
    let world = World::of(&[(a(), 1)]);
    assert!(!world.table.holds(&a()) && world.table.holder_key() == 0);
}

fn rights(reads: bool, writes: bool, registered: bool) -> Rights {
    Rights { reads, writes, registered, sole: true }
}

/// 5.12.1: the holder, a registrant, and anybody.
#[test]
fn clause_5_12_1_what_each_type_keeps_whom_from() {
    let expected = [
        (Kind::WriteExclusive, (true, false), (true, false)),
        (Kind::ExclusiveAccess, (false, false), (false, false)),
        (Kind::WriteExclusiveRegistrants, (true, true), (true, false)),
        (Kind::ExclusiveAccessRegistrants, (true, true), (false, false)),
        (Kind::WriteExclusiveAll, (true, true), (true, false)),
        (Kind::ExclusiveAccessAll, (true, true), (false, false)),
    ];
    for (kind, registrant, anybody) in expected {
        let world = World::reserved(kind, &[(a(), 1), (b(), 2)]);
        assert!(!world.table.is_free());
        assert_eq!(world.table.rights(&a()), rights(true, true, true));
        assert_eq!(world.table.rights(&b()), rights(registrant.0, registrant.1, true));
        assert_eq!(world.table.rights(&c()), rights(anybody.0, anybody.1, false));
        assert_eq!(world.table.rights(&host()), rights(anybody.0, anybody.1, false));
    }
}

/// 5.12.7: registrations by themselves keep nobody from anything.
#[test]
fn clause_5_12_7_registrations_restrict_nobody() {
    let mut world = World::default();
    assert!(world.table.is_free());
    world.done(&a(), &register(0, 1));
    assert!(world.table.is_free());
    assert_eq!(world.table.rights(&a()), Rights::ALL);
    assert_eq!(world.table.rights(&b()), Rights { registered: false, ..Rights::ALL });
}

#[test]
fn rights_meet() {
    let all = Rights::ALL;
    let some = Rights { writes: false, registered: false, ..all };
    assert_eq!((all.meet(some), some.meet(all)), (some, some));
    let other = Rights { reads: false, sole: false, ..all };
    let none = Rights { reads: false, writes: false, registered: false, sole: false };
    assert_eq!(some.meet(other), none);
}

//! How much a table holds.

use reservation::{
    COPY_BYTES, Change, Initiator, ItNexus, MAX_REGISTRANTS, ReservationError, ReservationType,
    Table,
};

use crate::harness::{Harness, a, initiator, register, register_at, register_with_others, reserve};

/// A nexus whose initiator's name has `len` bytes.
fn named(number: usize, len: usize, port: u16) -> ItNexus {
    let name = format!("iqn.2024-01.net.example:{number:0>199}");
    ItNexus { initiator: Initiator::Iscsi { name: name[..len].to_owned(), isid: [1; 6] }, port }
}

/// 64 hosts with the longest names, with 16 paths each.
fn many() -> Harness {
    let mut world = Harness::default();
    let ports: Vec<u16> = (1..=16).collect();
    for number in 0..64 {
        world.apply(&named(number, 223, 1), &register_at(0, 1, &ports));
    }
    world
}

/// Changes that never add a registration must always be possible.
fn nothing_else_is_full(full: &Table) {
    let stranger = named(9999, 223, 1);
    let holder = full.registrants()[0].nexus.clone();
    let ask = |table: &Table, by: &ItNexus, change| {
        let next = table.with_change(by, 1, &change).expect("there is room").expect("a change");
        assert_eq!(Table::parse(&next.encode()).as_ref(), Ok(&next));
        next
    };
    ask(full, &holder, register(1, 2));
    let held = ask(full, &holder, reserve(1, ReservationType::WriteExclusive));
    ask(&held, &holder, Change::SetModePages(1));
    ask(&held, &stranger, Change::Reset { whole_target: true });
    ask(&held, &holder, Change::Clear { key: 1 });
    let unregistered = ask(&held, &holder, register(1, 0));
    assert_eq!(unregistered.registrants().len() + 1, full.registrants().len());
    let freed = ask(&unregistered, &stranger, Change::AdminClear);
    ask(&ask(&freed, &stranger, Change::Spc2Reserve), &stranger, Change::SetModePages(1));
}

#[test]
fn sixty_four_hosts_with_sixteen_paths_fit() {
    let world = many();
    assert_eq!(world.table.registrants().len(), MAX_REGISTRANTS);
    assert_eq!(world.table.encode().len(), COPY_BYTES);
    world.refused(&a(), &register(0, 1), ReservationError::InsufficientResources);
    nothing_else_is_full(&world.table);
}

/// 5.12.7, 5.12.8: INSUFFICIENT REGISTRATION RESOURCES, and nothing is changed.
#[test]
fn clause_5_12_7_long_names_fill_it_before() {
    let mut table = Table::default();
    let full = loop {
        let number = table.registrants().len();
        match table.with_change(&named(number, 223, 1), 1, &register(0, 1)) {
            Ok(next) => table = next.expect("a registration"),
            Err(why) => break why,
        }
    };
    assert_eq!(full, ReservationError::InsufficientResources);
    assert_eq!(table.registrants().len(), (COPY_BYTES - 144 - 2 * 225) / (24 + 225));
    nothing_else_is_full(&table);
    // A known name has room where a new one has not.
    let world = Harness { table, ..Harness::default() };
    let (known, new) = (named(0, 223, 2), named(5000, 223, 1));
    assert!(world.table.with_change(&known, 1, &register(0, 1)).is_ok());
    world.refused(
        &new,
        &register_with_others(0, 1, &[initiator("b")]),
        ReservationError::InsufficientResources,
    );
    let held =
        world.table.with_change(&named(0, 223, 1), 1, &reserve(1, ReservationType::WriteExclusive));
    let world = Harness { table: held.unwrap().unwrap(), ..Harness::default() };
    let to = |unregister| Change::RegisterAndMove {
        key: 1,
        new_key: 1,
        to: new.clone(),
        unregister,
        persist: false,
    };
    world.refused(&named(0, 223, 1), &to(false), ReservationError::InsufficientResources);
    assert!(world.table.with_change(&named(0, 223, 1), 1, &to(true)).is_ok());
}

/// More than ever fits is refused before it is made.
#[test]
fn a_product_of_long_lists_is_full() {
    let ports: Vec<u16> = (0..u16::MAX).collect();
    let also: Vec<Initiator> = (0..2000).map(|n| named(n, 223, 1).initiator).collect();
    let change = Change::Register {
        key: 0,
        new_key: 1,
        ignore_key: false,
        persist: false,
        ports,
        other_initiators: also,
    };
    Harness::default().refused(&a(), &change, ReservationError::InsufficientResources);
}

#[test]
fn generations_end() {
    let mut world = Harness::of(&[(a(), 1)]);
    world.table.generation = u64::MAX;
    world.refused(&a(), &register(1, 2), ReservationError::InsufficientResources);
}

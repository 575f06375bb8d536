//! A table, those who ask things of it, and what came of the last change.

use reservation::{Change, Enlisting, Initiator, Kind, Notice, Party, Refusal, Table};

/// The node's incarnation through which everything comes that does not say otherwise.
pub(crate) const SEAT: u64 = 7;

pub(crate) fn initiator(name: &str) -> Initiator {
    Initiator::Iscsi {
        name: format!("iqn.2024-01.net.example:{name}"),
        isid: [0x80, 0, 0, 0, 0, 1],
    }
}

/// The initiator `name` at port `port`.
pub(crate) fn at(name: &str, port: u16) -> Party {
    Party { initiator: initiator(name), port }
}

pub(crate) fn a() -> Party {
    at("a", 1)
}

pub(crate) fn b() -> Party {
    at("b", 1)
}

pub(crate) fn c() -> Party {
    at("c", 1)
}

/// An NVMe host.
pub(crate) fn host() -> Party {
    Party { initiator: Initiator::Host([9; 16]), port: 0 }
}

/// REGISTER of oneself with nothing special.
pub(crate) fn register(key: u64, new_key: u64) -> Change {
    Change::Register {
        key,
        new_key,
        ignore_key: false,
        persists: false,
        ports: vec![],
        also: vec![],
    }
}

/// REGISTER AND IGNORE EXISTING KEY.
pub(crate) fn register_anyway(new_key: u64) -> Change {
    Change::Register {
        key: 0xbad,
        new_key,
        ignore_key: true,
        persists: false,
        ports: vec![],
        also: vec![],
    }
}

/// REGISTER with ALL_TG_PT.
pub(crate) fn register_at(key: u64, new_key: u64, at: &[u16]) -> Change {
    let Change::Register { ignore_key, persists, also, .. } = register(key, new_key) else {
        unreachable!()
    };
    Change::Register { key, new_key, ignore_key, persists, ports: at.to_vec(), also }
}

/// REGISTER with SPEC_I_PT.
pub(crate) fn register_also(key: u64, new_key: u64, with: &[Initiator]) -> Change {
    let Change::Register { ignore_key, persists, ports, .. } = register(key, new_key) else {
        unreachable!()
    };
    Change::Register { key, new_key, ignore_key, persists, ports, also: with.to_vec() }
}

/// Reservation Register.
pub(crate) fn enlist(action: Enlisting) -> Change {
    Change::Enlist { action, persists: None }
}

pub(crate) fn reserve(key: u64, kind: Kind) -> Change {
    Change::Reserve { key, kind }
}

pub(crate) fn release(key: u64, kind: Kind) -> Change {
    Change::Release { key, kind }
}

pub(crate) fn preempt(key: u64, victim: u64, kind: Kind) -> Change {
    Change::Preempt { key, victim, kind: Some(kind), abort: false }
}

pub(crate) fn preempt_and_abort(key: u64, victim: u64, kind: Kind) -> Change {
    Change::Preempt { key, victim, kind: Some(kind), abort: true }
}

/// A table under test.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) table: Table,
    pub(crate) before: Table,
}

impl World {
    /// These are registered under these keys.
    pub(crate) fn of(registered: &[(Party, u64)]) -> Self {
        let mut world = Self::default();
        for (party, key) in registered {
            world.done(party, &register(0, *key));
        }
        world
    }

    /// The first of these holds a reservation of type `kind`.
    pub(crate) fn reserved(kind: Kind, registered: &[(Party, u64)]) -> Self {
        let mut world = Self::of(registered);
        let (first, key) = &registered[0];
        world.done(first, &reserve(*key, kind));
        world
    }

    /// It is granted, and changes the table.
    pub(crate) fn done(&mut self, by: &Party, change: &Change) {
        self.before = self.table.clone();
        let next = self.table.change(by, SEAT, change);
        self.table = next.expect("not refused").expect("a change");
        assert_eq!(self.table.generation, self.before.generation + 1);
        assert_eq!(Table::parse(&self.table.encode()), Ok(self.table.clone()));
    }

    /// It is granted, and there is nothing to change.
    pub(crate) fn nothing(&self, by: &Party, change: &Change) {
        assert_eq!(self.table.change(by, SEAT, change), Ok(None), "{change:?}");
    }

    pub(crate) fn refused(&self, by: &Party, change: &Change, why: Refusal) {
        assert_eq!(self.table.change(by, SEAT, change), Err(why), "{change:?}");
    }

    pub(crate) fn conflict(&self, by: &Party, change: &Change) {
        self.refused(by, change, Refusal::Conflict);
    }

    /// Who is registered under which key.
    pub(crate) fn keys(&self) -> Vec<(Party, u64)> {
        self.table.registrants().iter().map(|r| (r.party.clone(), r.key)).collect()
    }

    pub(crate) fn kind(&self) -> Option<Kind> {
        self.table.reservation.as_ref().map(|held| held.kind)
    }

    /// By how much PRgeneration went on with the last change.
    pub(crate) fn counted(&self) -> u32 {
        self.table.pr_generation.wrapping_sub(self.before.pr_generation)
    }

    /// What the last change says to a party.
    pub(crate) fn told(&self, party: &Party) -> Vec<Notice> {
        Table::notices(&self.before, &self.table, party).iter().collect()
    }

    /// The last change says these things to these, and nothing to `a`, `b`, `c` and the host
    /// otherwise.
    pub(crate) fn told_only(&self, expected: &[(Party, &[Notice])]) {
        for party in [a(), b(), c(), host()] {
            let said = expected.iter().find(|(who, _)| *who == party).map_or(&[][..], |(_, n)| n);
            assert_eq!(self.told(&party), said, "{party:?}");
        }
    }
}

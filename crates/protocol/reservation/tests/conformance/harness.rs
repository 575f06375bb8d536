//! A table, its nexuses, and the result of the last change.

use reservation::{
    Change, Initiator, ItNexus, Notification, NvmeRegisterAction, ReservationError,
    ReservationType, Table,
};

/// The node's incarnation through which everything comes that does not say otherwise.
pub(crate) const INCARNATION: u64 = 7;

pub(crate) fn initiator(name: &str) -> Initiator {
    Initiator::Iscsi {
        name: format!("iqn.2024-01.net.example:{name}"),
        isid: [0x80, 0, 0, 0, 0, 1],
    }
}

/// The initiator `name` at port `port`.
pub(crate) fn nexus(name: &str, port: u16) -> ItNexus {
    ItNexus { initiator: initiator(name), port }
}

pub(crate) fn a() -> ItNexus {
    nexus("a", 1)
}

pub(crate) fn b() -> ItNexus {
    nexus("b", 1)
}

pub(crate) fn c() -> ItNexus {
    nexus("c", 1)
}

/// An NVMe host.
pub(crate) fn host() -> ItNexus {
    ItNexus { initiator: Initiator::Host([9; 16]), port: 0 }
}

/// REGISTER of oneself with nothing special.
pub(crate) fn register(key: u64, new_key: u64) -> Change {
    Change::Register {
        key,
        new_key,
        ignore_key: false,
        persist: false,
        ports: vec![],
        other_initiators: vec![],
    }
}

/// REGISTER AND IGNORE EXISTING KEY.
pub(crate) fn register_ignoring_key(new_key: u64) -> Change {
    Change::Register {
        key: 0xbad,
        new_key,
        ignore_key: true,
        persist: false,
        ports: vec![],
        other_initiators: vec![],
    }
}

/// REGISTER with ALL_TG_PT.
pub(crate) fn register_at(key: u64, new_key: u64, at: &[u16]) -> Change {
    let Change::Register { ignore_key, persist: persists, other_initiators: also, .. } =
        register(key, new_key)
    else {
        unreachable!()
    };
    Change::Register {
        key,
        new_key,
        ignore_key,
        persist: persists,
        ports: at.to_vec(),
        other_initiators: also,
    }
}

/// REGISTER with SPEC_I_PT.
pub(crate) fn register_with_others(key: u64, new_key: u64, with: &[Initiator]) -> Change {
    let Change::Register { ignore_key, persist: persists, ports, .. } = register(key, new_key)
    else {
        unreachable!()
    };
    Change::Register {
        key,
        new_key,
        ignore_key,
        persist: persists,
        ports,
        other_initiators: with.to_vec(),
    }
}

/// Reservation Register.
pub(crate) fn nvme_register(action: NvmeRegisterAction) -> Change {
    Change::NvmeRegister { action, persist: None }
}

pub(crate) fn reserve(key: u64, kind: ReservationType) -> Change {
    Change::Reserve { key, kind }
}

pub(crate) fn release(key: u64, kind: ReservationType) -> Change {
    Change::Release { key, kind }
}

pub(crate) fn preempt(key: u64, victim: u64, kind: ReservationType) -> Change {
    Change::Preempt { key, preempt_key: victim, kind: Some(kind), abort: false }
}

pub(crate) fn preempt_and_abort(key: u64, victim: u64, kind: ReservationType) -> Change {
    Change::Preempt { key, preempt_key: victim, kind: Some(kind), abort: true }
}

/// A table under test.
#[derive(Default)]
pub(crate) struct Harness {
    pub(crate) table: Table,
    pub(crate) before: Table,
}

impl Harness {
    /// These are registered under these keys.
    pub(crate) fn of(registered: &[(ItNexus, u64)]) -> Self {
        let mut world = Self::default();
        for (party, key) in registered {
            world.apply(party, &register(0, *key));
        }
        world
    }

    /// The first of these holds a reservation of type `kind`.
    pub(crate) fn reserved(kind: ReservationType, registered: &[(ItNexus, u64)]) -> Self {
        let mut world = Self::of(registered);
        let (first, key) = &registered[0];
        world.apply(first, &reserve(*key, kind));
        world
    }

    /// It is granted, and changes the table.
    pub(crate) fn apply(&mut self, by: &ItNexus, change: &Change) {
        self.before = self.table.clone();
        let next = self.table.with_change(by, INCARNATION, change);
        self.table = next.expect("not refused").expect("a change");
        assert_eq!(self.table.generation, self.before.generation + 1);
        assert_eq!(Table::parse(&self.table.encode()), Ok(self.table.clone()));
    }

    /// It is granted, and there is nothing to change.
    pub(crate) fn nothing(&self, by: &ItNexus, change: &Change) {
        assert_eq!(self.table.with_change(by, INCARNATION, change), Ok(None), "{change:?}");
    }

    pub(crate) fn refused(&self, by: &ItNexus, change: &Change, why: ReservationError) {
        assert_eq!(self.table.with_change(by, INCARNATION, change), Err(why), "{change:?}");
    }

    pub(crate) fn conflict(&self, by: &ItNexus, change: &Change) {
        self.refused(by, change, ReservationError::Conflict);
    }

    /// Who is registered under which key.
    pub(crate) fn keys(&self) -> Vec<(ItNexus, u64)> {
        self.table.registrants().iter().map(|r| (r.nexus.clone(), r.key)).collect()
    }

    pub(crate) fn kind(&self) -> Option<ReservationType> {
        self.table.reservation.as_ref().map(|held| held.kind)
    }

    /// By how much PRgeneration went on with the last change.
    pub(crate) fn pr_generation(&self) -> u32 {
        self.table.pr_generation.wrapping_sub(self.before.pr_generation)
    }

    /// The notifications of the last change for a nexus.
    pub(crate) fn notifications(&self, party: &ItNexus) -> Vec<Notification> {
        Table::notifications(&self.before, &self.table, party).iter().collect()
    }

    /// The last change says these things to these, and nothing to `a`, `b`, `c` and the host
    /// otherwise.
    pub(crate) fn expect_notifications(&self, expected: &[(ItNexus, &[Notification])]) {
        for party in [a(), b(), c(), host()] {
            let said = expected.iter().find(|(who, _)| *who == party).map_or(&[][..], |(_, n)| n);
            assert_eq!(self.notifications(&party), said, "{party:?}");
        }
    }
}

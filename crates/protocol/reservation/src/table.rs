//! The table and what holds of it.

use crate::format;
use crate::party::Party;
use crate::rights::Rights;

/// Type of a persistent reservation (SPC-4 6.15.3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Only the holder writes.
    WriteExclusive = 1,
    /// Only the holder reads and writes.
    ExclusiveAccess = 3,
    /// Only registrants write; one of them holds the reservation.
    WriteExclusiveRegistrants = 5,
    /// Only registrants read and write; one of them holds the reservation.
    ExclusiveAccessRegistrants = 6,
    /// Only registrants write; all of them hold the reservation.
    WriteExclusiveAll = 7,
    /// Only registrants read and write; all of them hold the reservation.
    ExclusiveAccessAll = 8,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrants,
        Self::ExclusiveAccessRegistrants,
        Self::WriteExclusiveAll,
        Self::ExclusiveAccessAll,
    ];

    /// The type with SCSI's code `code`.
    #[must_use]
    pub fn from_scsi(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.scsi() == code)
    }

    /// SCSI's code.
    #[must_use]
    pub const fn scsi(self) -> u8 {
        self as u8
    }

    /// The type with NVMe's code `code` (RTYPE; NVMe Base 2.0, 7.2).
    #[must_use]
    pub fn from_nvme(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.nvme() == code)
    }

    /// NVMe's code.
    #[must_use]
    pub const fn nvme(self) -> u8 {
        match self {
            Self::WriteExclusive => 1,
            Self::ExclusiveAccess => 2,
            Self::WriteExclusiveRegistrants => 3,
            Self::ExclusiveAccessRegistrants => 4,
            Self::WriteExclusiveAll => 5,
            Self::ExclusiveAccessAll => 6,
        }
    }

    /// Whether one registrant holds it and all registrants have its rights.
    #[must_use]
    pub const fn is_registrants_only(self) -> bool {
        matches!(self, Self::WriteExclusiveRegistrants | Self::ExclusiveAccessRegistrants)
    }

    /// Whether every registrant holds it.
    #[must_use]
    pub const fn is_all_registrants(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }

    /// Whether who has no part in it may not even read.
    #[must_use]
    pub const fn keeps_readers_out(self) -> bool {
        matches!(
            self,
            Self::ExclusiveAccess | Self::ExclusiveAccessRegistrants | Self::ExclusiveAccessAll
        )
    }
}

/// A party that has registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registrant {
    /// Who.
    pub party: Party,
    /// The reservation key; never 0.
    pub key: u64,
    /// Whether it was registered at all target ports at once (ALL_TG_PT).
    pub all_ports: bool,
}

/// The persistent reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// What it keeps whom from.
    pub kind: Kind,
    /// The registrant that holds it; `None` if all do.
    pub holder: Option<Party>,
}

impl Reservation {
    pub(crate) fn new(kind: Kind, by: &Party) -> Self {
        Self { kind, holder: (!kind.is_all_registrants()).then(|| by.clone()) }
    }
}

/// The unit is RESERVEd (SPC-2 7.21).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sole {
    /// By whom.
    pub party: Party,
    /// The incarnation of the node through which it came. Once that is no more the nexus is lost,
    /// and the unit is free.
    pub seat: u64,
}

/// The last change of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Last {
    /// Who made it; `None` if it makes no difference: everybody is told the same.
    pub by: Option<Party>,
    /// What it was.
    pub what: What,
}

/// What a change was, as far as others must be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Nobody is told.
    Quiet,
    /// The reservation was released; who is registered is told.
    Released,
    /// All registrations were removed; who had one is told.
    Cleared,
    /// Registrations were removed by PREEMPT; who had one is told.
    Preempted {
        /// The key of those that were to go; 0: all but the one who did it.
        victim: u64,
        /// Whether the reservation's type changed; who is still registered is told.
        changed: bool,
        /// Whether commands of those registered under `victim` are to be aborted.
        abort: bool,
    },
    /// Mode pages changed.
    Modes,
    /// All commands were aborted; whose they were is told.
    TasksCleared,
    /// The unit was reset.
    Reset {
        /// As all units of the target were.
        target: bool,
    },
}

/// What all nodes know of one volume's initiators.
///
/// Invariants: registrants are sorted and have keys; the holder of the reservation is a registrant;
/// where nobody is registered there is no reservation; who RESERVEd the unit is alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Counts the changes of the table; 0 if it was never changed.
    pub generation: u64,
    /// The era in which it was changed last; another one begins when the nodes lose power.
    pub era: u64,
    /// Whether registrations and the reservation outlive an era (APTPL as last received).
    pub persists: bool,
    /// PRgeneration (SPC-4 6.15.2); wraps.
    pub pr_generation: u32,
    /// The persistent reservation.
    pub reservation: Option<Reservation>,
    /// Who RESERVEd the unit.
    pub sole: Option<Sole>,
    /// What the mode pages say that can be changed, opaque here; 0 are the defaults.
    pub modes: u128,
    /// Counts resets of the unit; wraps.
    pub resets: u32,
    /// The last change.
    pub last: Option<Last>,
    /// The generation that the last PREEMPT AND ABORT made; 0 if there was none.
    pub(crate) aborted: u64,
    /// Sorted by party.
    pub(crate) registrants: Vec<Registrant>,
}

impl Table {
    /// Who is registered, sorted by party.
    #[must_use]
    pub fn registrants(&self) -> &[Registrant] {
        &self.registrants
    }

    /// The registration of `party`.
    #[must_use]
    pub fn registrant(&self, party: &Party) -> Option<&Registrant> {
        let at = self.registrants.binary_search_by(|r| r.party.cmp(party)).ok()?;
        self.registrants.get(at)
    }

    /// Whether `party` holds the reservation (SPC-4 5.12.10).
    #[must_use]
    pub fn holds(&self, party: &Party) -> bool {
        match &self.reservation {
            Some(Reservation { holder: Some(holder), .. }) => holder == party,
            Some(Reservation { holder: None, .. }) => self.registrant(party).is_some(),
            None => false,
        }
    }

    /// The key under which the reservation is held; 0 if there is none, or if all registrants hold
    /// it (SPC-4 5.12.10).
    #[must_use]
    pub fn holder_key(&self) -> u64 {
        let holder = self.reservation.as_ref().and_then(|r| r.holder.as_ref());
        holder.and_then(|holder| self.registrant(holder)).map_or(0, |holder| holder.key)
    }

    /// Whether nobody can be in conflict with anybody: there is no reservation of any sort.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.reservation.is_none() && self.sole.is_none()
    }

    /// What `party` may do (SPC-4 5.12.1, SPC-2 5.5.1).
    #[must_use]
    pub fn rights(&self, party: &Party) -> Rights {
        let registered = self.registrant(party).is_some();
        if self.sole.as_ref().is_some_and(|sole| sole.party != *party) {
            return Rights { reads: false, writes: false, registered, sole: false };
        }
        let Some(Reservation { kind, .. }) = self.reservation else {
            return Rights { registered, ..Rights::ALL };
        };
        let has_part = self.holds(party) || kind.is_registrants_only() && registered;
        let reads = has_part || !kind.keeps_readers_out();
        Rights { reads, writes: has_part, registered, sole: true }
    }

    /// What holds now. In another `era` than the table's the unit was powered on since: unless
    /// registrations persist they are gone, and the reservation with them (SPC-4 5.12.5.1);
    /// PRgeneration begins at 0 in any case (SPC-4 6.15.2), and mode pages have their defaults. The
    /// unit is no longer RESERVEd if that came through a node's incarnation that is not `seated`: a
    /// lost nexus frees it (SPC-2 7.21).
    #[must_use]
    pub fn as_of(mut self, era: u64, seated: impl Fn(u64) -> bool) -> Self {
        if self.era != era {
            if !self.persists {
                self.registrants.clear();
                self.reservation = None;
            }
            self.era = era;
            (self.pr_generation, self.modes, self.aborted) = (0, 0, 0);
            (self.sole, self.last) = (None, None);
        }
        if self.sole.as_ref().is_some_and(|sole| !seated(sole.seat)) {
            self.sole = None;
        }
        self
    }

    pub(crate) fn fits(&self) -> bool {
        format::fits(&self.registrants)
    }
}

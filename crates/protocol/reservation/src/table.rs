//! The reservation table and its current state.

use crate::nexus::ItNexus;
use crate::rights::Rights;

/// Type of a persistent reservation (SPC-4 6.15.3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReservationType {
    /// Only the holder writes.
    WriteExclusive = 1,
    /// Only the holder reads and writes.
    ExclusiveAccess = 3,
    /// Only registrants write; one of them holds the reservation.
    WriteExclusiveRegistrantsOnly = 5,
    /// Only registrants read and write; one of them holds the reservation.
    ExclusiveAccessRegistrantsOnly = 6,
    /// Only registrants write; all of them hold the reservation.
    WriteExclusiveAllRegistrants = 7,
    /// Only registrants read and write; all of them hold the reservation.
    ExclusiveAccessAllRegistrants = 8,
}

impl ReservationType {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrantsOnly,
        Self::ExclusiveAccessRegistrantsOnly,
        Self::WriteExclusiveAllRegistrants,
        Self::ExclusiveAccessAllRegistrants,
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
            Self::WriteExclusiveRegistrantsOnly => 3,
            Self::ExclusiveAccessRegistrantsOnly => 4,
            Self::WriteExclusiveAllRegistrants => 5,
            Self::ExclusiveAccessAllRegistrants => 6,
        }
    }

    /// Whether one registrant holds it and all registrants have its rights.
    #[must_use]
    pub const fn is_registrants_only(self) -> bool {
        matches!(self, Self::WriteExclusiveRegistrantsOnly | Self::ExclusiveAccessRegistrantsOnly)
    }

    /// Whether every registrant holds it.
    #[must_use]
    pub const fn is_all_registrants(self) -> bool {
        matches!(self, Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants)
    }

    /// Whether other nexuses may not even read.
    #[must_use]
    pub const fn is_exclusive_access(self) -> bool {
        matches!(
            self,
            Self::ExclusiveAccess
                | Self::ExclusiveAccessRegistrantsOnly
                | Self::ExclusiveAccessAllRegistrants
        )
    }
}

/// A registered nexus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registrant {
    /// The nexus.
    pub nexus: ItNexus,
    /// The reservation key; never 0.
    pub key: u64,
    /// Whether it was registered at all target ports at once (ALL_TG_PT).
    pub all_ports: bool,
}

/// The persistent reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Its type.
    pub kind: ReservationType,
    /// The registrant that holds it; `None` if all do.
    pub holder: Option<ItNexus>,
}

impl Reservation {
    pub(crate) fn new(kind: ReservationType, by: &ItNexus) -> Self {
        Self { kind, holder: (!kind.is_all_registrants()).then(|| by.clone()) }
    }
}

/// An SPC-2 reservation of the unit (SPC-2 7.21).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spc2Reservation {
    /// The holder.
    pub nexus: ItNexus,
    /// The incarnation of the node through which it was made. When that ends the nexus is lost, and
    /// the unit is free.
    pub incarnation: u64,
}

/// The last change of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastChange {
    /// Its author; `None` if all initiators get the same notifications.
    pub by: Option<ItNexus>,
    /// Its effect.
    pub effect: ChangeEffect,
}

/// The effect of a change, as far as others must be notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeEffect {
    /// No notifications.
    Silent,
    /// The reservation was released; notifies registrants.
    Released,
    /// All registrations were removed; notifies their owners.
    Cleared,
    /// PREEMPT removed registrations; notifies their owners.
    Preempted {
        /// The key of the removed registrations; 0: all but the author's.
        preempt_key: u64,
        /// Whether the reservation's type changed; notifies remaining registrants.
        type_changed: bool,
        /// Whether to abort commands of those registered under `preempt_key`.
        abort: bool,
    },
    /// Mode pages changed.
    ModePagesChanged,
    /// All commands were aborted; notifies their initiators.
    TasksCleared,
    /// The unit was reset.
    Reset {
        /// Together with all units of the target.
        whole_target: bool,
    },
}

/// State of one volume that its initiators share across all nodes.
///
/// Invariants: registrants are sorted and have keys; the holder of the reservation is a registrant;
/// without registrants there is no reservation; an SPC-2 reservation excludes registrations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Number of changes of the table; 0 if it was never changed.
    pub generation: u64,
    /// The power epoch of the last change; a new one begins when the nodes lose power.
    pub power_epoch: u64,
    /// Whether registrations and the reservation survive the power epoch (APTPL as last received).
    pub persist: bool,
    /// PRgeneration (SPC-4 6.15.2); wraps.
    pub pr_generation: u32,
    /// The persistent reservation.
    pub reservation: Option<Reservation>,
    /// The SPC-2 reservation.
    pub spc2_reservation: Option<Spc2Reservation>,
    /// The changeable parameters of the mode pages, opaque here; 0 for the defaults.
    pub mode_pages: u128,
    /// Number of resets of the unit; wraps.
    pub reset_count: u32,
    /// The last change.
    pub last_change: Option<LastChange>,
    /// The generation made by the last PREEMPT AND ABORT; 0 if there was none.
    pub(crate) abort_generation: u64,
    /// Sorted by nexus.
    pub(crate) registrants: Vec<Registrant>,
}

impl Table {
    /// The registrants, sorted by nexus.
    #[must_use]
    pub fn registrants(&self) -> &[Registrant] {
        &self.registrants
    }

    /// The registration of `nexus`.
    #[must_use]
    pub fn registrant(&self, nexus: &ItNexus) -> Option<&Registrant> {
        let at = self.registrants.binary_search_by(|r| r.nexus.cmp(nexus)).ok()?;
        self.registrants.get(at)
    }

    /// Whether `nexus` holds the reservation (SPC-4 5.12.10).
    #[must_use]
    pub fn is_holder(&self, nexus: &ItNexus) -> bool {
        match &self.reservation {
            Some(Reservation { holder: Some(holder), .. }) => holder == nexus,
            Some(Reservation { holder: None, .. }) => self.registrant(nexus).is_some(),
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

    /// Whether no conflict is possible: there is no reservation of any kind.
    #[must_use]
    pub fn is_unreserved(&self) -> bool {
        self.reservation.is_none() && self.spc2_reservation.is_none()
    }

    /// SPC-4 6.15.2: all successful service actions except RESERVE and RELEASE increment it.
    pub(crate) fn bump_pr_generation(&mut self) {
        self.pr_generation = self.pr_generation.wrapping_add(1);
    }

    /// What `nexus` may do (SPC-4 5.12.1, SPC-2 5.5.1).
    #[must_use]
    pub fn rights(&self, nexus: &ItNexus) -> Rights {
        let registered = self.registrant(nexus).is_some();
        if self.spc2_reservation.as_ref().is_some_and(|spc2| spc2.nexus != *nexus) {
            return Rights {
                can_read: false,
                can_write: false,
                is_registered: registered,
                passes_spc2: false,
            };
        }
        let Some(Reservation { kind, .. }) = self.reservation else {
            return Rights { is_registered: registered, ..Rights::ALL };
        };
        let has_part = self.is_holder(nexus) || kind.is_registrants_only() && registered;
        let reads = has_part || !kind.is_exclusive_access();
        Rights {
            can_read: reads,
            can_write: has_part,
            is_registered: registered,
            passes_spc2: true,
        }
    }

    /// The table as valid now. If the current `power_epoch` is not the table's, the unit was
    /// powered on since: unless registrations persist they are gone, and the reservation with them
    /// (SPC-4 5.12.5.1); PRgeneration restarts at 0 in any case (SPC-4 6.15.2), and mode pages have
    /// their defaults. An SPC-2 reservation ends if its incarnation does not satisfy `is_serving`:
    /// a lost nexus frees the unit (SPC-2 7.21).
    #[must_use]
    pub fn as_of(mut self, power_epoch: u64, is_serving: impl Fn(u64) -> bool) -> Self {
        if self.power_epoch != power_epoch {
            if !self.persist {
                self.registrants.clear();
                self.reservation = None;
            }
            self.power_epoch = power_epoch;
            (self.pr_generation, self.mode_pages, self.abort_generation) = (0, 0, 0);
            (self.spc2_reservation, self.last_change) = (None, None);
        }
        if self.spc2_reservation.as_ref().is_some_and(|spc2| !is_serving(spc2.incarnation)) {
            self.spc2_reservation = None;
        }
        self
    }
}

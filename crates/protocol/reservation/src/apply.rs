//! Applies changes to the reservation table.

use crate::change::{Change, InvalidField, ReservationError};
use crate::nexus::ItNexus;
use crate::register::RegisterRequest;
use crate::table::{
    ChangeEffect, LastChange, Reservation, ReservationType, Spc2Reservation, Table,
};

impl Table {
    /// The table after `change`, requested by `by` through the node incarnation `incarnation`;
    /// `None` if nothing changes, which is a success too. The table must be valid now
    /// ([`Table::as_of`]).
    ///
    /// # Errors
    /// [`ReservationError`]; the table is unchanged.
    pub fn with_change(
        &self,
        by: &ItNexus,
        incarnation: u64,
        change: &Change,
    ) -> Result<Option<Self>, ReservationError> {
        if !by.initiator.is_valid() {
            return Err(ReservationError::InvalidField(InvalidField::TransportId));
        }
        let mut next = self.clone();
        let Some(what) = next.apply(by, incarnation, change)? else { return Ok(None) };
        next.generation =
            self.generation.checked_add(1).ok_or(ReservationError::InsufficientResources)?;
        if let ChangeEffect::Preempted { abort: true, .. } | ChangeEffect::TasksCleared = what {
            next.abort_generation = next.generation;
        }
        let for_all = matches!(change, Change::Reset { .. } | Change::AdminClear);
        next.last_change = Some(LastChange { by: (!for_all).then(|| by.clone()), effect: what });
        Ok(Some(next))
    }

    fn apply(
        &mut self,
        by: &ItNexus,
        incarnation: u64,
        change: &Change,
    ) -> Result<Option<ChangeEffect>, ReservationError> {
        match change {
            Change::Spc2Reserve => self.spc2_reserve(by, incarnation),
            Change::Spc2Release => self.spc2_release(by),
            Change::NexusLoss => Ok(self.lose_nexus(by)),
            // It was allowed when it arrived; another initiator may have reserved since.
            Change::SetModePages(_) if !self.rights(by).may_write() => {
                Err(ReservationError::Conflict)
            }
            Change::SetModePages(modes) => Ok(self.set_mode_pages(*modes)),
            Change::ClearTaskSet => Ok(Some(ChangeEffect::TasksCleared)),
            Change::Reset { whole_target: target } => Ok(Some(self.reset(*target))),
            Change::AdminClear => Ok(self.admin_clear()),
            // During an SPC-2 reservation even its holder must not make persistent reservations
            // (SPC-2 5.5.1).
            _ if self.spc2_reservation.is_some() => Err(ReservationError::Conflict),
            Change::Register {
                key,
                new_key,
                ignore_key,
                persist: persists,
                ports,
                other_initiators: also,
            } => {
                let key = (!ignore_key).then_some(*key);
                let ask =
                    RegisterRequest { by, key, new_key: *new_key, ports, other_initiators: also };
                self.persist = *persists;
                self.register(&ask)
            }
            Change::NvmeRegister { action, persist: persists } => {
                let what = self.nvme_register(by, *action)?;
                let persisted = persists.and_then(|persists| self.set_persistence(persists));
                Ok(what.or(persisted))
            }
            Change::SetPersistence(persists) => Ok(self.set_persistence(*persists)),
            Change::RegisterAndMove { key, new_key, to, unregister, persist: persists } => {
                self.register_and_move(by, *key, *new_key, to, *unregister)?;
                self.persist = *persists;
                Ok(Some(ChangeEffect::Silent))
            }
            Change::Reserve { key, kind } => {
                self.check_key(by, *key)?;
                self.reserve(by, *kind)
            }
            Change::Release { key, kind } => {
                self.check_key(by, *key)?;
                self.release(by, *kind)
            }
            Change::Clear { key } => {
                self.check_key(by, *key)?;
                Ok(Some(self.clear()))
            }
            Change::Preempt { key, preempt_key: victim, kind, abort } => {
                self.check_key(by, *key)?;
                self.preempt(by, *victim, *kind, *abort).map(Some)
            }
        }
    }

    /// SPC-4 5.12.9: one reservation at a time; the holder may repeat its request.
    fn reserve(
        &mut self,
        by: &ItNexus,
        kind: ReservationType,
    ) -> Result<Option<ChangeEffect>, ReservationError> {
        match &self.reservation {
            None => {
                self.reservation = Some(Reservation::new(kind, by));
                Ok(Some(ChangeEffect::Silent))
            }
            Some(held) if held.kind == kind && self.is_holder(by) => Ok(None),
            Some(_) => Err(ReservationError::Conflict),
        }
    }

    /// SPC-4 5.12.11.2.2. Registrants learn that the reservation that gave them rights has ended.
    fn release(
        &mut self,
        by: &ItNexus,
        kind: ReservationType,
    ) -> Result<Option<ChangeEffect>, ReservationError> {
        let held = match &self.reservation {
            Some(held) if self.is_holder(by) => held.kind,
            _ => return Ok(None),
        };
        if held != kind {
            return Err(ReservationError::InvalidRelease);
        }
        self.reservation = None;
        let gives_rights = held.is_registrants_only() || held.is_all_registrants();
        Ok(Some(if gives_rights { ChangeEffect::Released } else { ChangeEffect::Silent }))
    }

    /// SPC-4 5.12.11.2.7.
    fn clear(&mut self) -> ChangeEffect {
        self.registrants.clear();
        self.reservation = None;
        self.bump_pr_generation();
        ChangeEffect::Cleared
    }

    /// As CLEAR by an initiator that gets no notification. PRgeneration is incremented, which shows
    /// initiators that registrations have changed (SPC-4 5.12.6.2).
    fn admin_clear(&mut self) -> Option<ChangeEffect> {
        let is_unregistered = self.registrants.is_empty();
        if is_unregistered && self.spc2_reservation.is_none() {
            return None;
        }
        self.spc2_reservation = None;
        Some(if is_unregistered { ChangeEffect::Cleared } else { self.clear() })
    }

    /// Whether RESERVE and RELEASE of the unit succeed without effect, because the persistent
    /// reservation already gives the nexus these rights (SPC-4 5.12.3).
    fn persistent_reservation_covers(&self, by: &ItNexus) -> bool {
        let shared = self.reservation.as_ref().is_some_and(|r| r.kind.is_registrants_only());
        self.is_holder(by) || shared && self.registrant(by).is_some()
    }

    /// SPC-2 7.21. Conflicts if there is any registration (SPC-2 5.5.1).
    fn spc2_reserve(
        &mut self,
        by: &ItNexus,
        incarnation: u64,
    ) -> Result<Option<ChangeEffect>, ReservationError> {
        if self.persistent_reservation_covers(by) {
            return Ok(None);
        }
        let taken = self.spc2_reservation.as_ref().is_some_and(|spc2| spc2.nexus != *by);
        if taken || !self.registrants.is_empty() {
            return Err(ReservationError::Conflict);
        }
        let spc2 = Some(Spc2Reservation { nexus: by.clone(), incarnation });
        if self.spc2_reservation == spc2 {
            return Ok(None);
        }
        self.spc2_reservation = spc2;
        Ok(Some(ChangeEffect::Silent))
    }

    /// SPC-2 7.17: without effect from any nexus but the holder, which is no error.
    fn spc2_release(&mut self, by: &ItNexus) -> Result<Option<ChangeEffect>, ReservationError> {
        if !self.registrants.is_empty() && !self.persistent_reservation_covers(by) {
            return Err(ReservationError::Conflict);
        }
        Ok(self.lose_nexus(by))
    }

    fn lose_nexus(&mut self, by: &ItNexus) -> Option<ChangeEffect> {
        self.spc2_reservation.take_if(|spc2| spc2.nexus == *by).map(|_| ChangeEffect::Silent)
    }

    fn set_persistence(&mut self, persists: bool) -> Option<ChangeEffect> {
        (std::mem::replace(&mut self.persist, persists) != persists).then_some(ChangeEffect::Silent)
    }

    fn set_mode_pages(&mut self, modes: u128) -> Option<ChangeEffect> {
        (std::mem::replace(&mut self.mode_pages, modes) != modes)
            .then_some(ChangeEffect::ModePagesChanged)
    }

    /// SAM-5 6.3.2, 6.3.3. PRgeneration is unchanged: only power on resets it (SPC-4 6.15.2).
    fn reset(&mut self, target: bool) -> ChangeEffect {
        self.spc2_reservation = None;
        self.mode_pages = 0;
        self.reset_count = self.reset_count.wrapping_add(1);
        ChangeEffect::Reset { whole_target: target }
    }
}

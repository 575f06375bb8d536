//! PREEMPT: taking over the reservation, or removing registrations.

use crate::change::{InvalidField, ReservationError};
use crate::nexus::ItNexus;
use crate::table::{ChangeEffect, Reservation, ReservationType, Table};

impl Table {
    /// SPC-4 5.12.11.2.4.1: the key decides what is removed.
    pub(crate) fn preempt(
        &mut self,
        by: &ItNexus,
        preempt_key: u64,
        kind: Option<ReservationType>,
        abort: bool,
    ) -> Result<ChangeEffect, ReservationError> {
        let held = self.reservation.as_ref().map(|held| held.kind);
        let changed = match held {
            // The holder's key, which is 0 if all registrants hold the reservation.
            Some(held) if self.holder_key() == preempt_key => {
                let kind = kind.ok_or(ReservationError::InvalidField(InvalidField::Type))?;
                self.preempt_reservation(by, preempt_key, kind);
                kind != held
            }
            Some(_) if preempt_key == 0 => {
                return Err(ReservationError::InvalidField(InvalidField::NewKey));
            }
            _ => {
                self.remove_registrations(preempt_key)?;
                false
            }
        };
        self.bump_pr_generation();
        Ok(ChangeEffect::Preempted { preempt_key, type_changed: changed, abort })
    }

    /// SPC-4 5.12.11.2.4.3: removes all registrations with the holder's key except that of the
    /// preempting nexus, which now holds the reservation. A key of 0 means all.
    fn preempt_reservation(&mut self, by: &ItNexus, preempt_key: u64, kind: ReservationType) {
        self.registrants.retain(|r| r.nexus == *by || preempt_key != 0 && r.key != preempt_key);
        self.reservation = Some(Reservation::new(kind, by));
    }

    /// SPC-4 5.12.11.2.5: removes all registrations with that key, even that of the preempting
    /// nexus. The reservation stays, unless all registrants held it and none is left.
    fn remove_registrations(&mut self, preempt_key: u64) -> Result<(), ReservationError> {
        let before = self.registrants.len();
        self.registrants.retain(|r| r.key != preempt_key);
        if self.registrants.len() == before {
            return Err(ReservationError::Conflict);
        }
        self.release_unheld_reservation();
        Ok(())
    }
}

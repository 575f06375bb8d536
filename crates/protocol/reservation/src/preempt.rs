//! PREEMPT: taking the reservation away, or registrations.

use crate::change::{Field, Refusal};
use crate::party::Party;
use crate::table::{Kind, Reservation, Table, What};

impl Table {
    /// SPC-4 5.12.11.2.4.1: whose key it is decides what goes.
    pub(crate) fn preempt(
        &mut self,
        by: &Party,
        victim: u64,
        kind: Option<Kind>,
        abort: bool,
    ) -> Result<What, Refusal> {
        let held = self.reservation.as_ref().map(|held| held.kind);
        let changed = match held {
            // The holder's key, which is 0 where all registrants hold it.
            Some(held) if self.holder_key() == victim => {
                let kind = kind.ok_or(Refusal::Parameter(Field::Kind))?;
                self.replace(by, victim, kind);
                kind != held
            }
            Some(_) if victim == 0 => return Err(Refusal::Parameter(Field::NewKey)),
            _ => {
                self.remove_registrations(victim)?;
                false
            }
        };
        self.count();
        Ok(What::Preempted { victim, changed, abort })
    }

    /// SPC-4 5.12.11.2.4.3: everybody of the holder's key goes but the one who asks, who holds the
    /// reservation now. A key of 0 is everybody's.
    fn replace(&mut self, by: &Party, victim: u64, kind: Kind) {
        self.registrants.retain(|r| r.party == *by || victim != 0 && r.key != victim);
        self.reservation = Some(Reservation::new(kind, by));
    }

    /// SPC-4 5.12.11.2.5: everybody of that key goes, the one who asks too. The reservation stays,
    /// unless all registrants held it and none is left.
    fn remove_registrations(&mut self, victim: u64) -> Result<(), Refusal> {
        let before = self.registrants.len();
        self.registrants.retain(|r| r.key != victim);
        if self.registrants.len() == before {
            return Err(Refusal::Conflict);
        }
        self.settle();
        Ok(())
    }
}

//! What parties ask for, and what becomes of it.

use crate::party::{Initiator, Party};
use crate::register::Registering;
use crate::table::{Kind, Last, Reservation, Sole, Table, What};

/// What is asked of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// REGISTER, REGISTER AND IGNORE EXISTING KEY: register, take another key, or unregister (SPC-4
    /// 5.12.7).
    Register {
        /// RESERVATION KEY.
        key: u64,
        /// SERVICE ACTION RESERVATION KEY; 0 unregisters.
        new_key: u64,
        /// AND IGNORE EXISTING KEY: `key` is not looked at.
        ignore_key: bool,
        /// APTPL.
        persists: bool,
        /// ALL_TG_PT: all target ports. Empty: only the one that it came through.
        ports: Vec<u16>,
        /// SPEC_I_PT: the initiators to register besides. Empty: none.
        also: Vec<Initiator>,
    },
    /// Reservation Register of an NVMe host (NVMe Base 2.0, 7.3).
    Enlist {
        /// RREGA with its keys.
        action: Enlisting,
        /// CPTPL: whether registrations outlive a loss of power from now on; `None` leaves it as it
        /// is.
        persists: Option<bool>,
    },
    /// Whether registrations outlive a loss of power (NVMe Base 2.0, 5.27.1.27).
    Persist(bool),
    /// RESERVE (SPC-4 5.12.9).
    Reserve {
        /// RESERVATION KEY.
        key: u64,
        /// TYPE.
        kind: Kind,
    },
    /// RELEASE (SPC-4 5.12.11.2.2).
    Release {
        /// RESERVATION KEY.
        key: u64,
        /// TYPE.
        kind: Kind,
    },
    /// CLEAR (SPC-4 5.12.11.2.7).
    Clear {
        /// RESERVATION KEY.
        key: u64,
    },
    /// PREEMPT, PREEMPT AND ABORT (SPC-4 5.12.11.2.4 to 5.12.11.2.6).
    Preempt {
        /// RESERVATION KEY.
        key: u64,
        /// SERVICE ACTION RESERVATION KEY.
        victim: u64,
        /// TYPE; `None` if it is no known one, which matters only where a reservation is replaced.
        kind: Option<Kind>,
        /// AND ABORT.
        abort: bool,
    },
    /// REGISTER AND MOVE (SPC-4 5.12.8).
    Move {
        /// RESERVATION KEY.
        key: u64,
        /// SERVICE ACTION RESERVATION KEY.
        new_key: u64,
        /// Who is to hold the reservation.
        to: Party,
        /// UNREG.
        unregister: bool,
        /// APTPL.
        persists: bool,
    },
    /// RESERVE(6), (10) (SPC-2 7.20, 7.21).
    ReserveUnit,
    /// RELEASE(6), (10) (SPC-2 7.16, 7.17).
    ReleaseUnit,
    /// The nexus is lost (SAM-5 6.3.4). Registrations outlive it.
    Leave,
    /// The mode pages are these now.
    Modes(u128),
    /// All commands of the unit are aborted (CLEAR TASK SET, SAM-5 7.5).
    ClearTasks,
    /// The unit was reset (SAM-5 6.3.2, 6.3.3). Registrations and the reservation outlive it.
    Reset {
        /// With all units of its target.
        target: bool,
    },
    /// An administrator frees the volume of all registrations and reservations. Who asks makes no
    /// difference.
    Evict,
}

/// What Reservation Register does. A key that is `None` is not looked at (IEKEY).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enlisting {
    /// Register: a host that has registered may say so again, with its key.
    Register {
        /// NRKEY.
        new_key: u64,
    },
    /// Unregister.
    Unregister {
        /// CRKEY.
        key: Option<u64>,
    },
    /// Replace.
    Replace {
        /// CRKEY.
        key: Option<u64>,
        /// NRKEY.
        new_key: u64,
    },
}

/// Why nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// RESERVATION CONFLICT.
    #[error("a reservation conflict")]
    Conflict,
    /// INVALID RELEASE OF PERSISTENT RESERVATION.
    #[error("not the type of the reservation")]
    InvalidRelease,
    /// A field has a value that it cannot have here.
    #[error("an invalid field: {0:?}")]
    Parameter(Field),
    /// INSUFFICIENT REGISTRATION RESOURCES.
    #[error("no room for more registrations")]
    Full,
}

/// A field of what is asked. All but the last two are in SCSI's parameter list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Field {
    /// SERVICE ACTION RESERVATION KEY.
    NewKey,
    /// SPEC_I_PT.
    Also,
    /// A TransportID.
    Initiator,
    /// TYPE, in the CDB.
    Kind,
    /// SERVICE ACTION, in the CDB.
    Action,
}

impl Table {
    /// The table after `change`, asked for by `by` through the node's incarnation `seat`; `None` if
    /// there is nothing to change, which is a success too. The table must be one that holds now
    /// ([`Table::as_of`]).
    ///
    /// # Errors
    /// [`Refusal`]; the table stays as it is.
    pub fn change(&self, by: &Party, seat: u64, change: &Change) -> Result<Option<Self>, Refusal> {
        if !by.initiator.is_valid() {
            return Err(Refusal::Parameter(Field::Initiator));
        }
        let mut next = self.clone();
        let Some(what) = next.apply(by, seat, change)? else { return Ok(None) };
        next.generation = self.generation.checked_add(1).ok_or(Refusal::Full)?;
        if let What::Preempted { abort: true, .. } | What::TasksCleared = what {
            next.aborted = next.generation;
        }
        let for_all = matches!(change, Change::Reset { .. } | Change::Evict);
        next.last = Some(Last { by: (!for_all).then(|| by.clone()), what });
        Ok(Some(next))
    }

    fn apply(&mut self, by: &Party, seat: u64, change: &Change) -> Result<Option<What>, Refusal> {
        match change {
            Change::ReserveUnit => self.reserve_unit(by, seat),
            Change::ReleaseUnit => self.release_unit(by),
            Change::Leave => Ok(self.leave(by)),
            // It was judged when it came; others may have reserved meanwhile.
            Change::Modes(_) if !self.rights(by).may_write() => Err(Refusal::Conflict),
            Change::Modes(modes) => Ok(self.set_modes(*modes)),
            Change::ClearTasks => Ok(Some(What::TasksCleared)),
            Change::Reset { target } => Ok(Some(self.reset(*target))),
            Change::Evict => Ok(self.evict()),
            // While the unit is RESERVEd even its holder may not make persistent reservations
            // (SPC-2 5.5.1).
            _ if self.sole.is_some() => Err(Refusal::Conflict),
            Change::Register { key, new_key, ignore_key, persists, ports, also } => {
                let key = (!ignore_key).then_some(*key);
                let ask = Registering { by, key, new_key: *new_key, ports, also };
                self.persists = *persists;
                self.register(&ask)
            }
            Change::Enlist { action, persists } => {
                let what = self.enlist(by, *action)?;
                let persisted = persists.and_then(|persists| self.persist(persists));
                Ok(what.or(persisted))
            }
            Change::Persist(persists) => Ok(self.persist(*persists)),
            Change::Move { key, new_key, to, unregister, persists } => {
                self.move_to(by, *key, *new_key, to, *unregister)?;
                self.persists = *persists;
                Ok(Some(What::Quiet))
            }
            Change::Reserve { key, kind } => {
                self.authenticate(by, *key)?;
                self.reserve(by, *kind)
            }
            Change::Release { key, kind } => {
                self.authenticate(by, *key)?;
                self.release(by, *kind)
            }
            Change::Clear { key } => {
                self.authenticate(by, *key)?;
                Ok(Some(self.clear()))
            }
            Change::Preempt { key, victim, kind, abort } => {
                self.authenticate(by, *key)?;
                self.preempt(by, *victim, *kind, *abort).map(Some)
            }
        }
    }

    /// Who is not registered under the key that it gives may not go on (SPC-4 5.12.7, 6.16.3).
    pub(crate) fn authenticate(&self, by: &Party, key: u64) -> Result<(), Refusal> {
        match self.registrant(by) {
            Some(own) if own.key == key => Ok(()),
            _ => Err(Refusal::Conflict),
        }
    }

    /// SPC-4 6.15.2: all service actions count but RESERVE and RELEASE, and those that were
    /// refused.
    pub(crate) fn count(&mut self) {
        self.pr_generation = self.pr_generation.wrapping_add(1);
    }

    /// SPC-4 5.12.9: one reservation at a time; asking again for what one holds is no error.
    fn reserve(&mut self, by: &Party, kind: Kind) -> Result<Option<What>, Refusal> {
        match &self.reservation {
            None => {
                self.reservation = Some(Reservation::new(kind, by));
                Ok(Some(What::Quiet))
            }
            Some(held) if held.kind == kind && self.holds(by) => Ok(None),
            Some(_) => Err(Refusal::Conflict),
        }
    }

    /// SPC-4 5.12.11.2.2. Registrants are told of the end of what gave them rights.
    fn release(&mut self, by: &Party, kind: Kind) -> Result<Option<What>, Refusal> {
        let held = match &self.reservation {
            Some(held) if self.holds(by) => held.kind,
            _ => return Ok(None),
        };
        if held != kind {
            return Err(Refusal::InvalidRelease);
        }
        self.reservation = None;
        let told = held.is_registrants_only() || held.is_all_registrants();
        Ok(Some(if told { What::Released } else { What::Quiet }))
    }

    /// SPC-4 5.12.11.2.7.
    fn clear(&mut self) -> What {
        self.registrants.clear();
        self.reservation = None;
        self.count();
        What::Cleared
    }

    /// As CLEAR by somebody who is told nothing. PRgeneration goes on, because by it initiators see
    /// that registrations are not what they were (SPC-4 5.12.6.2).
    fn evict(&mut self) -> Option<What> {
        let nobody = self.registrants.is_empty();
        if nobody && self.sole.is_none() {
            return None;
        }
        self.sole = None;
        Some(if nobody { What::Cleared } else { self.clear() })
    }

    /// Whether RESERVE and RELEASE of the unit succeed without doing anything, because the
    /// persistent reservation gives the party as much (SPC-4 5.12.3).
    fn has_persistent(&self, by: &Party) -> bool {
        let shared = self.reservation.as_ref().is_some_and(|r| r.kind.is_registrants_only());
        self.holds(by) || shared && self.registrant(by).is_some()
    }

    /// SPC-2 7.21. Where anybody has registered nobody can have the unit so (SPC-2 5.5.1).
    fn reserve_unit(&mut self, by: &Party, seat: u64) -> Result<Option<What>, Refusal> {
        if self.has_persistent(by) {
            return Ok(None);
        }
        let taken = self.sole.as_ref().is_some_and(|sole| sole.party != *by);
        if taken || !self.registrants.is_empty() {
            return Err(Refusal::Conflict);
        }
        let sole = Some(Sole { party: by.clone(), seat });
        if self.sole == sole {
            return Ok(None);
        }
        self.sole = sole;
        Ok(Some(What::Quiet))
    }

    /// SPC-2 7.17: from anybody but the holder it does nothing, and that is no error.
    fn release_unit(&mut self, by: &Party) -> Result<Option<What>, Refusal> {
        if !self.registrants.is_empty() && !self.has_persistent(by) {
            return Err(Refusal::Conflict);
        }
        Ok(self.leave(by))
    }

    fn leave(&mut self, by: &Party) -> Option<What> {
        self.sole.take_if(|sole| sole.party == *by).map(|_| What::Quiet)
    }

    fn persist(&mut self, persists: bool) -> Option<What> {
        (std::mem::replace(&mut self.persists, persists) != persists).then_some(What::Quiet)
    }

    fn set_modes(&mut self, modes: u128) -> Option<What> {
        (std::mem::replace(&mut self.modes, modes) != modes).then_some(What::Modes)
    }

    /// SAM-5 6.3.2, 6.3.3. PRgeneration stays: only power on sets it (SPC-4 6.15.2).
    fn reset(&mut self, target: bool) -> What {
        self.sole = None;
        self.modes = 0;
        self.resets = self.resets.wrapping_add(1);
        What::Reset { target }
    }
}

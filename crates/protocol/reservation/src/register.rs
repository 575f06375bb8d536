//! Registering, unregistering, and moving the reservation.

use std::collections::BTreeSet;

use crate::change::{InvalidField, NvmeRegisterAction, ReservationError};
use crate::format::MAX_REGISTRANTS;
use crate::nexus::{Initiator, ItNexus};
use crate::table::{ChangeEffect, Registrant, Table};

/// A REGISTER request.
pub(crate) struct RegisterRequest<'a> {
    pub(crate) by: &'a ItNexus,
    /// `None` to ignore the registered key.
    pub(crate) key: Option<u64>,
    pub(crate) new_key: u64,
    pub(crate) ports: &'a [u16],
    pub(crate) other_initiators: &'a [Initiator],
}

impl RegisterRequest<'_> {
    /// Whether the given key is that of `registrant`, if it matters.
    fn key_matches(&self, registrant: &Registrant) -> bool {
        self.key.is_none_or(|key| key == registrant.key)
    }

    /// The target ports that it applies to (SPC-4 5.12.7).
    fn ports(&self) -> BTreeSet<u16> {
        self.ports.iter().copied().chain([self.by.port]).collect()
    }
}

impl Table {
    /// SPC-4 5.12.7.
    pub(crate) fn register(
        &mut self,
        request: &RegisterRequest<'_>,
    ) -> Result<Option<ChangeEffect>, ReservationError> {
        match (self.registrant(request.by), request.key) {
            (None, Some(0)) if request.new_key == 0 => return Ok(None),
            (None, Some(key)) if key != 0 => return Err(ReservationError::Conflict),
            (Some(own), _) if !request.key_matches(own) => return Err(ReservationError::Conflict),
            // Other initiators can only be registered along with the requesting one.
            (Some(_), _) | (None, None) if !request.other_initiators.is_empty() => {
                return Err(ReservationError::InvalidField(InvalidField::SpecIPt));
            }
            _ => {}
        }
        if request.new_key == 0 {
            self.unregister(request)
        } else {
            self.add_registrations(request).map(Some)
        }
    }

    /// NVMe Base 2.0, 7.3 and 8.19: only a registrant unregisters or replaces its key, and the
    /// Register action does not replace a key.
    pub(crate) fn nvme_register(
        &mut self,
        by: &ItNexus,
        action: NvmeRegisterAction,
    ) -> Result<Option<ChangeEffect>, ReservationError> {
        let own = self.registrant(by).map(|own| own.key);
        let (key, new_key) = match (action, own) {
            (
                NvmeRegisterAction::Register { new_key: 0 }
                | NvmeRegisterAction::Replace { new_key: 0, .. },
                _,
            ) => {
                return Err(ReservationError::InvalidField(InvalidField::NewKey));
            }
            (NvmeRegisterAction::Register { new_key }, None) => (None, new_key),
            (NvmeRegisterAction::Register { new_key }, Some(own)) if own == new_key => {
                (Some(own), new_key)
            }
            (NvmeRegisterAction::Unregister { key }, Some(_)) => (key, 0),
            (NvmeRegisterAction::Replace { key, new_key }, Some(_)) => (key, new_key),
            _ => return Err(ReservationError::Conflict),
        };
        self.register(&RegisterRequest { by, key, new_key, ports: &[], other_initiators: &[] })
    }

    /// SPC-4 5.12.11.2.3.
    fn unregister(
        &mut self,
        request: &RegisterRequest<'_>,
    ) -> Result<Option<ChangeEffect>, ReservationError> {
        let ports = request.ports();
        let goes = |r: &Registrant| {
            r.nexus.initiator == request.by.initiator && ports.contains(&r.nexus.port)
        };
        if self.registrants.iter().any(|r| goes(r) && !request.key_matches(r)) {
            return Err(ReservationError::Conflict);
        }
        let before = self.registrants.len();
        self.registrants.retain(|r| !goes(r));
        if self.registrants.len() == before {
            return Ok(None);
        }
        self.bump_pr_generation();
        Ok(Some(self.release_unheld_reservation()))
    }

    /// Releases the reservation if its holder is no longer registered (SPC-4 5.12.10, 5.12.11.2.3).
    pub(crate) fn release_unheld_reservation(&mut self) -> ChangeEffect {
        let is_held = self.registrants.iter().any(|r| self.is_holder(&r.nexus));
        let released = self.reservation.take_if(|_| !is_held);
        match released {
            Some(held) if held.kind.is_registrants_only() => ChangeEffect::Released,
            _ => ChangeEffect::Silent,
        }
    }

    /// Registers the nexus, and other named ones, or replaces its key: all or nothing.
    fn add_registrations(
        &mut self,
        request: &RegisterRequest<'_>,
    ) -> Result<ChangeEffect, ReservationError> {
        let ports = request.ports();
        let mut initiators: BTreeSet<&Initiator> = request.other_initiators.iter().collect();
        if !initiators.iter().all(|initiator| initiator.is_valid()) {
            return Err(ReservationError::InvalidField(InvalidField::TransportId));
        }
        for Registrant { nexus, .. } in &self.registrants {
            if initiators.contains(&nexus.initiator) && ports.contains(&nexus.port) {
                return Err(ReservationError::InvalidField(InvalidField::TransportId));
            }
        }
        initiators.insert(&request.by.initiator);
        if initiators.len().saturating_mul(ports.len()) > MAX_REGISTRANTS {
            return Err(ReservationError::InsufficientResources);
        }
        let all_ports = !request.ports.is_empty();
        for initiator in initiators {
            for port in &ports {
                let nexus = ItNexus { initiator: initiator.clone(), port: *port };
                if self.registrant(&nexus).is_some_and(|other| !request.key_matches(other)) {
                    return Err(ReservationError::Conflict);
                }
                self.put_registrant(Registrant { nexus, key: request.new_key, all_ports });
            }
        }
        self.bump_pr_generation();
        if self.fits_one_copy() {
            Ok(ChangeEffect::Silent)
        } else {
            Err(ReservationError::InsufficientResources)
        }
    }

    /// Adds or replaces a registration.
    fn put_registrant(&mut self, registrant: Registrant) {
        match self.registrants.binary_search_by(|r| r.nexus.cmp(&registrant.nexus)) {
            Ok(at) => self.registrants[at] = registrant,
            Err(at) => self.registrants.insert(at, registrant),
        }
    }

    /// Only a nexus registered with the given key may proceed (SPC-4 5.12.7, 6.16.3).
    pub(crate) fn check_key(&self, by: &ItNexus, key: u64) -> Result<(), ReservationError> {
        match self.registrant(by) {
            Some(own) if own.key == key => Ok(()),
            _ => Err(ReservationError::Conflict),
        }
    }

    /// SPC-4 5.12.8.
    pub(crate) fn register_and_move(
        &mut self,
        by: &ItNexus,
        key: u64,
        new_key: u64,
        to: &ItNexus,
        unregister: bool,
    ) -> Result<(), ReservationError> {
        self.check_key(by, key)?;
        let Some(held) = &mut self.reservation else {
            return Err(ReservationError::InvalidField(InvalidField::ServiceAction));
        };
        match &mut held.holder {
            Some(holder) if holder == by => *holder = to.clone(),
            _ => return Err(ReservationError::Conflict),
        }
        if new_key == 0 {
            return Err(ReservationError::InvalidField(InvalidField::NewKey));
        }
        if to.initiator == by.initiator || !to.initiator.is_valid() {
            return Err(ReservationError::InvalidField(InvalidField::TransportId));
        }
        self.put_registrant(Registrant { nexus: to.clone(), key: new_key, all_ports: false });
        if unregister {
            self.registrants.retain(|r| r.nexus != *by);
        }
        self.bump_pr_generation();
        if self.fits_one_copy() { Ok(()) } else { Err(ReservationError::InsufficientResources) }
    }
}

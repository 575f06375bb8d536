//! Registering, unregistering, and moving the reservation.

use std::collections::BTreeSet;

use crate::change::{Enlisting, Field, Refusal};
use crate::format::MAX_REGISTRANTS;
use crate::party::{Initiator, Party};
use crate::table::{Registrant, Table, What};

/// A REGISTER as it came in.
pub(crate) struct Registering<'a> {
    pub(crate) by: &'a Party,
    /// `None` if the key that is registered is to be ignored.
    pub(crate) key: Option<u64>,
    pub(crate) new_key: u64,
    pub(crate) ports: &'a [u16],
    pub(crate) also: &'a [Initiator],
}

impl Registering<'_> {
    /// Whether the key that was given is the one that `registrant` has, if it matters.
    fn fits(&self, registrant: &Registrant) -> bool {
        self.key.is_none_or(|key| key == registrant.key)
    }

    /// The target ports that it applies to (SPC-4 5.12.7).
    fn ports(&self) -> BTreeSet<u16> {
        self.ports.iter().copied().chain([self.by.port]).collect()
    }
}

impl Table {
    /// SPC-4 5.12.7.
    pub(crate) fn register(&mut self, ask: &Registering<'_>) -> Result<Option<What>, Refusal> {
        match (self.registrant(ask.by), ask.key) {
            (None, Some(0)) if ask.new_key == 0 => return Ok(None),
            (None, Some(key)) if key != 0 => return Err(Refusal::Conflict),
            (Some(own), _) if !ask.fits(own) => return Err(Refusal::Conflict),
            // Others can only be registered along with oneself.
            (Some(_), _) | (None, None) if !ask.also.is_empty() => {
                return Err(Refusal::Parameter(Field::Also));
            }
            _ => {}
        }
        if ask.new_key == 0 { self.unregister(ask) } else { self.enroll(ask).map(Some) }
    }

    /// NVMe Base 2.0, 7.3 and 8.19: only a registrant unregisters, or takes another key, and
    /// registering is no way to take one.
    pub(crate) fn enlist(
        &mut self,
        by: &Party,
        action: Enlisting,
    ) -> Result<Option<What>, Refusal> {
        let own = self.registrant(by).map(|own| own.key);
        let (key, new_key) = match (action, own) {
            (Enlisting::Register { new_key: 0 } | Enlisting::Replace { new_key: 0, .. }, _) => {
                return Err(Refusal::Parameter(Field::NewKey));
            }
            (Enlisting::Register { new_key }, None) => (None, new_key),
            (Enlisting::Register { new_key }, Some(own)) if own == new_key => (Some(own), new_key),
            (Enlisting::Unregister { key }, Some(_)) => (key, 0),
            (Enlisting::Replace { key, new_key }, Some(_)) => (key, new_key),
            _ => return Err(Refusal::Conflict),
        };
        self.register(&Registering { by, key, new_key, ports: &[], also: &[] })
    }

    /// SPC-4 5.12.11.2.3.
    fn unregister(&mut self, ask: &Registering<'_>) -> Result<Option<What>, Refusal> {
        let ports = ask.ports();
        let goes =
            |r: &Registrant| r.party.initiator == ask.by.initiator && ports.contains(&r.party.port);
        if self.registrants.iter().any(|r| goes(r) && !ask.fits(r)) {
            return Err(Refusal::Conflict);
        }
        let before = self.registrants.len();
        self.registrants.retain(|r| !goes(r));
        if self.registrants.len() == before {
            return Ok(None);
        }
        self.count();
        Ok(Some(self.settle()))
    }

    /// Releases the reservation if who held it is no longer registered (SPC-4 5.12.10,
    /// 5.12.11.2.3).
    pub(crate) fn settle(&mut self) -> What {
        let is_held = self.registrants.iter().any(|r| self.holds(&r.party));
        let released = self.reservation.take_if(|_| !is_held);
        match released {
            Some(held) if held.kind.is_registrants_only() => What::Released,
            _ => What::Quiet,
        }
    }

    /// Registers the party, and others if they are named, or gives it another key: all or nothing.
    fn enroll(&mut self, ask: &Registering<'_>) -> Result<What, Refusal> {
        let ports = ask.ports();
        let mut initiators: BTreeSet<&Initiator> = ask.also.iter().collect();
        if !initiators.iter().all(|initiator| initiator.is_valid()) {
            return Err(Refusal::Parameter(Field::Initiator));
        }
        for Registrant { party, .. } in &self.registrants {
            if initiators.contains(&party.initiator) && ports.contains(&party.port) {
                return Err(Refusal::Parameter(Field::Initiator));
            }
        }
        initiators.insert(&ask.by.initiator);
        if initiators.len().saturating_mul(ports.len()) > MAX_REGISTRANTS {
            return Err(Refusal::Full);
        }
        let all_ports = !ask.ports.is_empty();
        for initiator in initiators {
            for port in &ports {
                let party = Party { initiator: initiator.clone(), port: *port };
                if self.registrant(&party).is_some_and(|other| !ask.fits(other)) {
                    return Err(Refusal::Conflict);
                }
                self.set_key(Registrant { party, key: ask.new_key, all_ports });
            }
        }
        self.count();
        if self.fits() { Ok(What::Quiet) } else { Err(Refusal::Full) }
    }

    /// Registers a party, or anew.
    fn set_key(&mut self, registrant: Registrant) {
        match self.registrants.binary_search_by(|r| r.party.cmp(&registrant.party)) {
            Ok(at) => self.registrants[at] = registrant,
            Err(at) => self.registrants.insert(at, registrant),
        }
    }

    /// SPC-4 5.12.8.
    pub(crate) fn move_to(
        &mut self,
        by: &Party,
        key: u64,
        new_key: u64,
        to: &Party,
        unregister: bool,
    ) -> Result<(), Refusal> {
        self.authenticate(by, key)?;
        let Some(held) = &mut self.reservation else {
            return Err(Refusal::Parameter(Field::Action));
        };
        match &mut held.holder {
            Some(holder) if holder == by => *holder = to.clone(),
            _ => return Err(Refusal::Conflict),
        }
        if new_key == 0 {
            return Err(Refusal::Parameter(Field::NewKey));
        }
        if to.initiator == by.initiator || !to.initiator.is_valid() {
            return Err(Refusal::Parameter(Field::Initiator));
        }
        self.set_key(Registrant { party: to.clone(), key: new_key, all_ports: false });
        if unregister {
            self.registrants.retain(|r| r.party != *by);
        }
        self.count();
        if self.fits() { Ok(()) } else { Err(Refusal::Full) }
    }
}

//! Secrets in a record (RFD 0016): how each of them stands there, and what is asked of all, whatever they prove.

use ::cluster::vault::{CannotOpen, NoRandom, Place, Ring, Sealed};
use serde::{Deserialize, Serialize};

use super::{StoredChap, StoredDhchap, StoredTls, VolumeRecord};

/// A way to prove who one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// CHAP, of iSCSI initiators.
    Chap,
    /// DH-HMAC-CHAP, of NVMe hosts.
    Dhchap,
    /// The key of TLS, of NVMe hosts.
    Tls,
}

/// Text that is a secret.
pub(super) trait Text: Clone + TryFrom<String> {
    fn expose(&self) -> &str;
}

impl Text for api::Secret {
    fn expose(&self) -> &str {
        Self::expose(self)
    }
}

impl Text for api::DhchapSecret {
    fn expose(&self) -> &str {
        Self::expose(self)
    }
}

impl Text for api::TlsKey {
    fn expose(&self) -> &str {
        Self::expose(self)
    }
}

/// A secret as a record has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Held<S> {
    /// As it is: an older version wrote it, or there is no key.
    #[serde(rename = "secret")]
    Clear(S),
    /// Sealed. What is damaged in it shows when it is opened: the rest of the record is good.
    #[serde(rename = "sealed")]
    Sealed(String),
}

impl<S: Text> Held<S> {
    /// A secret, sealed for a place. A ring without keys leaves it as it is.
    pub(super) fn seal(secret: &S, place: Place<'_>, ring: &Ring) -> Result<Self, NoRandom> {
        Ok(match ring.seal(place, secret.expose().as_bytes())? {
            Some(sealed) => Self::Sealed(sealed.to_text()),
            None => Self::Clear(secret.clone()),
        })
    }

    /// What was sealed for that place.
    pub(super) fn open(&self, place: Place<'_>, ring: &Ring) -> Result<S, CannotOpen> {
        match self {
            Self::Clear(secret) => Ok(secret.clone()),
            Self::Sealed(text) => {
                let bytes = ring.open(place, &Sealed::parse(text)?)?;
                let text = String::from_utf8(bytes).map_err(|_| CannotOpen::Wrong)?;
                S::try_from(text).map_err(|_| CannotOpen::Wrong)
            }
        }
    }

    /// Whether it is as `ring` would seal it now.
    pub(super) fn is_sealed_by(&self, ring: &Ring) -> bool {
        match self {
            Self::Clear(_) => false,
            // What cannot be read is left alone.
            Self::Sealed(text) => {
                Sealed::parse(text).map_or(true, |sealed| Some(sealed.key) == ring.seals_by())
            }
        }
    }

    /// Whether it is sealed by a key that `ring` lacks.
    pub(super) fn lacks_key(&self, ring: &Ring) -> bool {
        match self {
            Self::Clear(_) => false,
            Self::Sealed(text) => Sealed::parse(text).is_ok_and(|sealed| !ring.has(sealed.key)),
        }
    }
}

/// All secrets of a volume, whatever they prove.
impl VolumeRecord {
    /// What those who come to the volume may have to prove who they are by: the first of several. A key of TLS that does not
    /// have to be used guards nothing.
    #[must_use]
    pub fn guard(&self) -> Option<Method> {
        self.methods().find(|method| *method != Method::Tls || self.requires_tls())
    }

    /// What the volume has secrets for.
    pub fn methods(&self) -> impl Iterator<Item = Method> {
        let has = [
            (Method::Chap, self.has_chap()),
            (Method::Dhchap, !self.hosts.is_empty()),
            (Method::Tls, !self.tls.is_empty()),
        ];
        has.into_iter().filter_map(|(method, has)| has.then_some(method))
    }

    /// What cannot be read of them: the first obstacle of each method.
    #[must_use]
    pub fn cannot_open(&self, ring: &Ring) -> Vec<(Method, CannotOpen)> {
        let chap = self.all_proofs().find_map(|(of, held)| held.open(of, ring).err());
        let hosts = self.all_hosts().find_map(|(of, held)| held.known(of, ring).err());
        let tls = self.all_tls().find_map(|(of, held)| held.known(of, ring).err());
        let found = [(Method::Chap, chap), (Method::Dhchap, hosts), (Method::Tls, tls)];
        found.into_iter().filter_map(|(method, why)| Some((method, why?))).collect()
    }

    /// Whether any is sealed by a key that `ring` lacks.
    #[must_use]
    pub fn lacks_key(&self, ring: &Ring) -> bool {
        self.all_proofs().any(|(_, held)| held.lacks_key(ring))
            || self.all_hosts().any(|(_, held)| held.lacks_key(ring))
            || self.all_tls().any(|(_, held)| held.lacks_key(ring))
    }

    /// Whether any can be read, and is not as `ring` would seal it now.
    #[must_use]
    pub fn wants_sealing(&self, ring: &Ring) -> bool {
        let chap =
            |(of, held): (_, &StoredChap)| !held.is_sealed_by(ring) && held.open(of, ring).is_ok();
        let host = |(of, held): (_, &StoredDhchap)| {
            !held.is_sealed_by(ring) && held.open(of, ring).is_ok()
        };
        let tls =
            |(of, held): (_, &StoredTls)| !held.is_sealed_by(ring) && held.open(of, ring).is_ok();
        self.all_proofs().any(chap) || self.all_hosts().any(host) || self.all_tls().any(tls)
    }

    /// Seals what can be read, and is not as `ring` would seal it now.
    ///
    /// # Errors
    /// [`NoRandom`].
    pub fn seal(&mut self, ring: &Ring) -> Result<(), NoRandom> {
        for (of, held) in self.all_proofs_mut().filter(|(_, held)| !held.is_sealed_by(ring)) {
            if let Ok(clear) = held.open(of, ring) {
                *held = StoredChap::seal(&clear, of, ring)?;
            }
        }
        for (of, held) in self.all_hosts_mut().filter(|(_, held)| !held.is_sealed_by(ring)) {
            if let Ok(clear) = held.open(of, ring) {
                *held = StoredDhchap::seal(&clear, of, ring)?;
            }
        }
        for (of, held) in self.all_tls_mut().filter(|(_, held)| !held.is_sealed_by(ring)) {
            if let Ok(clear) = held.open(of, ring) {
                *held = StoredTls::seal(&clear, of, ring)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{HOST, KEYS, chap, dhchap, record, ring, tls};
    use super::super::{Of, OfHost};
    use super::*;

    /// With CHAP of all, of one initiator, and with secrets and a key of TLS of a host.
    fn guarded(sealed_by: &Ring) -> VolumeRecord {
        let mut record = record("a");
        let volume = record.id;
        record.chap = Some(StoredChap::seal(&chap(), volume, sealed_by).unwrap());
        let of = Of { volume, initiator: Some("iqn.a") };
        record.proofs.insert("iqn.a".into(), StoredChap::seal(&chap(), of, sealed_by).unwrap());
        let of = OfHost { volume, host: HOST };
        record.hosts.insert(HOST.into(), StoredDhchap::seal(&dhchap(), of, sealed_by).unwrap());
        let key = tls(KEYS[0], true);
        record.tls.insert(HOST.into(), StoredTls::seal(&key, of, sealed_by).unwrap());
        record
    }

    /// The same with nothing but the key of TLS.
    fn by_tls(sealed_by: &Ring, required: bool) -> VolumeRecord {
        let mut record = record("a");
        let of = OfHost { volume: record.id, host: HOST };
        let sealed = StoredTls::seal(&tls(KEYS[0], required), of, sealed_by).unwrap();
        record.tls.insert(HOST.into(), sealed);
        record
    }

    #[test]
    fn a_volume_is_guarded_by_what_it_has_secrets_for() {
        let all = guarded(&ring(1));
        assert_eq!(all.guard(), Some(Method::Chap));
        let one = VolumeRecord { chap: None, hosts: [].into(), ..all.clone() };
        assert_eq!(one.guard(), Some(Method::Chap));
        let methods = |record: &VolumeRecord| record.methods().collect::<Vec<_>>();
        assert_eq!(methods(&all), [Method::Chap, Method::Dhchap, Method::Tls]);
        let hosts = VolumeRecord { chap: None, proofs: [].into(), ..all };
        assert_eq!(hosts.guard(), Some(Method::Dhchap));
        assert_eq!((record("a").guard(), methods(&record("a"))), (None, vec![]));
        // RFD 0022, 3: who does not have to use his key may come without.
        for (required, guard) in [(true, Some(Method::Tls)), (false, None)] {
            let by_tls = by_tls(&ring(1), required);
            assert_eq!((by_tls.guard(), methods(&by_tls)), (guard, vec![Method::Tls]));
        }
    }

    #[test]
    fn what_cannot_be_read_is_told_by_method() {
        let all = guarded(&ring(1));
        let methods = |record: &VolumeRecord, ring: &Ring| -> Vec<_> {
            record.cannot_open(ring).into_iter().map(|(method, _)| method).collect()
        };
        assert_eq!(methods(&all, &ring(1)), []);
        assert!(!all.lacks_key(&ring(1)));
        assert_eq!(methods(&all, &ring(2)), [Method::Chap, Method::Dhchap, Method::Tls]);
        let by_tls = by_tls(&ring(1), false);
        assert_eq!(
            (methods(&by_tls, &ring(1)), methods(&by_tls, &ring(2))),
            (vec![], vec![Method::Tls])
        );
        assert!(by_tls.lacks_key(&ring(2)) && !by_tls.lacks_key(&ring(1)));
        let all = VolumeRecord { tls: [].into(), ..all };
        let hosts = VolumeRecord { chap: None, proofs: [].into(), ..all.clone() };
        assert_eq!(methods(&hosts, &ring(2)), [Method::Dhchap]);
        let chap = VolumeRecord { hosts: [].into(), ..all };
        assert_eq!(methods(&chap, &ring(2)), [Method::Chap]);
        assert!(hosts.lacks_key(&ring(2)) && chap.lacks_key(&ring(2)));
    }

    /// RFD 0016, 3: also after a change of keys.
    #[test]
    fn every_secret_is_sealed_by_the_first_key() {
        let (old, new) = (::cluster::vault::Key::new([1; 32]), ::cluster::vault::Key::new([2; 32]));
        let both = Ring::new(vec![new, old]).unwrap();
        let mut all = guarded(&ring(1));
        let hosts = VolumeRecord { chap: None, proofs: [].into(), tls: [].into(), ..all.clone() };
        assert!(all.wants_sealing(&both) && hosts.wants_sealing(&both));
        assert!(by_tls(&ring(1), false).wants_sealing(&both));
        assert!(!all.wants_sealing(&ring(1)), "it is as it should be");
        assert!(!all.wants_sealing(&ring(2)), "what cannot be read is for the status to tell");
        let before = all.clone();
        all.seal(&ring(2)).unwrap();
        assert_eq!(all, before, "and left as it is");
        all.seal(&both).unwrap();
        assert!(!all.wants_sealing(&both) && all.cannot_open(&ring(2)).is_empty());
        let sealed = all.clone();
        all.seal(&both).unwrap();
        assert_eq!(all, sealed);
        let mut clear = guarded(&Ring::default());
        assert!(clear.cannot_open(&Ring::default()).is_empty() && clear.wants_sealing(&ring(1)));
        clear.seal(&ring(1)).unwrap();
        assert!(!clear.wants_sealing(&ring(1)) && clear.lacks_key(&ring(2)));
    }
}

//! Secrets in a record (RFD 0016): their stored form, and checks that apply to all kinds.

use ::cluster::secrets::{
    Keyring, RandomnessUnavailable, SealedSecret, SecretContext, SecretUnsealError,
};
use serde::{Deserialize, Serialize};

use super::{StoredChap, StoredDhchap, StoredTls, VolumeRecord};

/// A way for a client to authenticate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeAuthMethod {
    /// CHAP, by iSCSI initiators.
    Chap,
    /// DH-HMAC-CHAP, by NVMe hosts.
    Dhchap,
    /// TLS keys, by NVMe hosts.
    Tls,
}

/// Text that is a secret.
pub(super) trait SecretText: Clone + TryFrom<String> {
    fn expose(&self) -> &str;
}

impl SecretText for api::Secret {
    fn expose(&self) -> &str {
        Self::expose(self)
    }
}

impl SecretText for api::DhchapSecret {
    fn expose(&self) -> &str {
        Self::expose(self)
    }
}

impl SecretText for api::TlsKey {
    fn expose(&self) -> &str {
        Self::expose(self)
    }
}

/// A secret as a record stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum StoredSecret<S> {
    /// Clear text: an older version wrote it, or there is no key.
    #[serde(rename = "secret")]
    Clear(S),
    /// Sealed. Damage shows when it is opened, and does not affect the rest of the record.
    #[serde(rename = "sealed")]
    Sealed(String),
}

impl<S: SecretText> StoredSecret<S> {
    /// Seals a secret, bound to `context`. A ring without keys leaves it in clear text.
    pub(super) fn seal(
        secret: &S,
        context: SecretContext<'_>,
        ring: &Keyring,
    ) -> Result<Self, RandomnessUnavailable> {
        Ok(match ring.seal(context, secret.expose().as_bytes())? {
            Some(sealed) => Self::Sealed(sealed.to_text()),
            None => Self::Clear(secret.clone()),
        })
    }

    /// Decrypts the secret bound to `context`.
    pub(super) fn open(
        &self,
        context: SecretContext<'_>,
        ring: &Keyring,
    ) -> Result<S, SecretUnsealError> {
        match self {
            Self::Clear(secret) => Ok(secret.clone()),
            Self::Sealed(text) => {
                let bytes = ring.open(context, &SealedSecret::parse(text)?)?;
                let text = String::from_utf8(bytes)
                    .map_err(|_| SecretUnsealError::AuthenticationFailed)?;
                S::try_from(text).map_err(|_| SecretUnsealError::AuthenticationFailed)
            }
        }
    }

    /// Whether it is sealed with the current key of `ring`.
    pub(super) fn is_sealed_by(&self, ring: &Keyring) -> bool {
        match self {
            Self::Clear(_) => false,
            // An unreadable one is left alone.
            Self::Sealed(text) => SealedSecret::parse(text)
                .map_or(true, |sealed| Some(sealed.key) == ring.sealing_key()),
        }
    }

    /// Whether it is sealed with a key that `ring` lacks.
    pub(super) fn lacks_key(&self, ring: &Keyring) -> bool {
        match self {
            Self::Clear(_) => false,
            Self::Sealed(text) => {
                SealedSecret::parse(text).is_ok_and(|sealed| !ring.contains(sealed.key))
            }
        }
    }
}

/// All secrets of a volume, of every kind.
impl VolumeRecord {
    /// The first method by which clients of the volume may have to authenticate. A TLS key that is
    /// not required protects nothing.
    #[must_use]
    pub fn required_auth(&self) -> Option<VolumeAuthMethod> {
        self.auth_methods().find(|method| *method != VolumeAuthMethod::Tls || self.requires_tls())
    }

    /// The methods that the volume has secrets for.
    pub fn auth_methods(&self) -> impl Iterator<Item = VolumeAuthMethod> {
        let has = [
            (VolumeAuthMethod::Chap, self.has_chap()),
            (VolumeAuthMethod::Dhchap, !self.dhchap_by_host.is_empty()),
            (VolumeAuthMethod::Tls, !self.tls_by_host.is_empty()),
        ];
        has.into_iter().filter_map(|(method, has)| has.then_some(method))
    }

    /// The unreadable secrets: the first error of each method.
    #[must_use]
    pub fn unreadable_secrets(&self, ring: &Keyring) -> Vec<(VolumeAuthMethod, SecretUnsealError)> {
        let chap =
            self.chap_secrets().find_map(|(context, stored)| stored.open(context, ring).err());
        let hosts = self
            .dhchap_secrets()
            .find_map(|(context, stored)| stored.open_for_target(context, ring).err());
        let tls = self
            .tls_keys()
            .find_map(|(context, stored)| stored.open_for_target(context, ring).err());
        let found = [
            (VolumeAuthMethod::Chap, chap),
            (VolumeAuthMethod::Dhchap, hosts),
            (VolumeAuthMethod::Tls, tls),
        ];
        found.into_iter().filter_map(|(method, why)| Some((method, why?))).collect()
    }

    /// Whether any is sealed with a key that `ring` lacks.
    #[must_use]
    pub fn lacks_secret_key(&self, ring: &Keyring) -> bool {
        self.chap_secrets().any(|(_, stored)| stored.lacks_key(ring))
            || self.dhchap_secrets().any(|(_, stored)| stored.lacks_key(ring))
            || self.tls_keys().any(|(_, stored)| stored.lacks_key(ring))
    }

    /// Whether any is readable and not sealed with the current key of `ring`.
    #[must_use]
    pub fn needs_resealing(&self, ring: &Keyring) -> bool {
        let chap = |(context, stored): (_, &StoredChap)| {
            !stored.is_sealed_by(ring) && stored.open(context, ring).is_ok()
        };
        let host = |(context, stored): (_, &StoredDhchap)| {
            !stored.is_sealed_by(ring) && stored.open(context, ring).is_ok()
        };
        let tls = |(context, stored): (_, &StoredTls)| {
            !stored.is_sealed_by(ring) && stored.open(context, ring).is_ok()
        };
        self.chap_secrets().any(chap) || self.dhchap_secrets().any(host) || self.tls_keys().any(tls)
    }

    /// Seals those that are readable and not sealed with the current key of `ring`.
    ///
    /// # Errors
    /// [`RandomnessUnavailable`].
    pub fn reseal_secrets(&mut self, ring: &Keyring) -> Result<(), RandomnessUnavailable> {
        for (context, stored) in
            self.chap_secrets_mut().filter(|(_, stored)| !stored.is_sealed_by(ring))
        {
            if let Ok(clear) = stored.open(context, ring) {
                *stored = StoredChap::seal(&clear, context, ring)?;
            }
        }
        for (context, stored) in
            self.dhchap_secrets_mut().filter(|(_, stored)| !stored.is_sealed_by(ring))
        {
            if let Ok(clear) = stored.open(context, ring) {
                *stored = StoredDhchap::seal(&clear, context, ring)?;
            }
        }
        for (context, stored) in
            self.tls_keys_mut().filter(|(_, stored)| !stored.is_sealed_by(ring))
        {
            if let Ok(clear) = stored.open(context, ring) {
                *stored = StoredTls::seal(&clear, context, ring)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ChapContext, HostSecretContext};
    use super::*;
    use crate::samples::{HOST, KEYS, chap, dhchap, record, ring, tls};

    /// A record with CHAP for all initiators and for one, and with a secret and a TLS key of a
    /// host.
    fn guarded(sealed_by: &Keyring) -> VolumeRecord {
        let mut record = record("a");
        let volume = record.id;
        record.chap = Some(StoredChap::seal(&chap(), volume, sealed_by).unwrap());
        let context = ChapContext { volume, initiator: Some("iqn.a") };
        record
            .chap_by_initiator
            .insert("iqn.a".into(), StoredChap::seal(&chap(), context, sealed_by).unwrap());
        let context = HostSecretContext { volume, host: HOST };
        record
            .dhchap_by_host
            .insert(HOST.into(), StoredDhchap::seal(&dhchap(), context, sealed_by).unwrap());
        let key = tls(KEYS[0], true);
        record.tls_by_host.insert(HOST.into(), StoredTls::seal(&key, context, sealed_by).unwrap());
        record
    }

    /// A record with a TLS key only.
    fn by_tls(sealed_by: &Keyring, required: bool) -> VolumeRecord {
        let mut record = record("a");
        let context = HostSecretContext { volume: record.id, host: HOST };
        let sealed = StoredTls::seal(&tls(KEYS[0], required), context, sealed_by).unwrap();
        record.tls_by_host.insert(HOST.into(), sealed);
        record
    }

    #[test]
    fn a_volume_is_guarded_by_what_it_has_secrets_for() {
        let all = guarded(&ring(1));
        assert_eq!(all.required_auth(), Some(VolumeAuthMethod::Chap));
        let one = VolumeRecord { chap: None, dhchap_by_host: [].into(), ..all.clone() };
        assert_eq!(one.required_auth(), Some(VolumeAuthMethod::Chap));
        let methods = |record: &VolumeRecord| record.auth_methods().collect::<Vec<_>>();
        assert_eq!(
            methods(&all),
            [VolumeAuthMethod::Chap, VolumeAuthMethod::Dhchap, VolumeAuthMethod::Tls]
        );
        let hosts = VolumeRecord { chap: None, chap_by_initiator: [].into(), ..all };
        assert_eq!(hosts.required_auth(), Some(VolumeAuthMethod::Dhchap));
        assert_eq!((record("a").required_auth(), methods(&record("a"))), (None, vec![]));
        // RFD 0022, 3: a host whose key is not required may connect without TLS.
        for (required, guard) in [(true, Some(VolumeAuthMethod::Tls)), (false, None)] {
            let by_tls = by_tls(&ring(1), required);
            assert_eq!(
                (by_tls.required_auth(), methods(&by_tls)),
                (guard, vec![VolumeAuthMethod::Tls])
            );
        }
    }

    #[test]
    fn what_cannot_be_read_is_told_by_method() {
        let all = guarded(&ring(1));
        let methods = |record: &VolumeRecord, ring: &Keyring| -> Vec<_> {
            record.unreadable_secrets(ring).into_iter().map(|(method, _)| method).collect()
        };
        assert_eq!(methods(&all, &ring(1)), []);
        assert!(!all.lacks_secret_key(&ring(1)));
        assert_eq!(
            methods(&all, &ring(2)),
            [VolumeAuthMethod::Chap, VolumeAuthMethod::Dhchap, VolumeAuthMethod::Tls]
        );
        let by_tls = by_tls(&ring(1), false);
        assert_eq!(
            (methods(&by_tls, &ring(1)), methods(&by_tls, &ring(2))),
            (vec![], vec![VolumeAuthMethod::Tls])
        );
        assert!(by_tls.lacks_secret_key(&ring(2)) && !by_tls.lacks_secret_key(&ring(1)));
        let all = VolumeRecord { tls_by_host: [].into(), ..all };
        let hosts = VolumeRecord { chap: None, chap_by_initiator: [].into(), ..all.clone() };
        assert_eq!(methods(&hosts, &ring(2)), [VolumeAuthMethod::Dhchap]);
        let chap = VolumeRecord { dhchap_by_host: [].into(), ..all };
        assert_eq!(methods(&chap, &ring(2)), [VolumeAuthMethod::Chap]);
        assert!(hosts.lacks_secret_key(&ring(2)) && chap.lacks_secret_key(&ring(2)));
    }

    /// RFD 0016, 3: also after a change of keys.
    #[test]
    fn every_secret_is_sealed_by_the_first_key() {
        let (old, new) = (
            ::cluster::secrets::SealingKey::new([1; 32]),
            ::cluster::secrets::SealingKey::new([2; 32]),
        );
        let both = Keyring::new(vec![new, old]).unwrap();
        let mut all = guarded(&ring(1));
        let hosts = VolumeRecord {
            chap: None,
            chap_by_initiator: [].into(),
            tls_by_host: [].into(),
            ..all.clone()
        };
        assert!(all.needs_resealing(&both) && hosts.needs_resealing(&both));
        assert!(by_tls(&ring(1), false).needs_resealing(&both));
        assert!(!all.needs_resealing(&ring(1)), "it is as it should be");
        assert!(!all.needs_resealing(&ring(2)), "what cannot be read is for the status to tell");
        let before = all.clone();
        all.reseal_secrets(&ring(2)).unwrap();
        assert_eq!(all, before, "and left as it is");
        all.reseal_secrets(&both).unwrap();
        assert!(!all.needs_resealing(&both) && all.unreadable_secrets(&ring(2)).is_empty());
        let sealed = all.clone();
        all.reseal_secrets(&both).unwrap();
        assert_eq!(all, sealed);
        let mut clear = guarded(&Keyring::default());
        assert!(
            clear.unreadable_secrets(&Keyring::default()).is_empty()
                && clear.needs_resealing(&ring(1))
        );
        clear.reseal_secrets(&ring(1)).unwrap();
        assert!(!clear.needs_resealing(&ring(1)) && clear.lacks_secret_key(&ring(2)));
    }
}

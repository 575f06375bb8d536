//! TLS keys in a record (RFD 0022, 3): keys of NVMe hosts, sealed like secrets (RFD 0016), and
//! whether the hosts must use them.

use ::cluster::secrets::{Keyring, RandomnessUnavailable, SecretUnsealError};
use api::{Tls, TlsKey};
use serde::{Deserialize, Serialize};

use super::host_secret::{HostSecretPurpose, of_each_host, of_each_host_mut};
use super::secrets::StoredSecret;
use super::{HostSecretContext, VolumeRecord};

/// The TLS key of one NVMe host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredTls {
    key: StoredSecret<TlsKey>,
    required: bool,
}

impl StoredTls {
    /// Seals a key. A ring without keys leaves it in clear text.
    ///
    /// # Errors
    /// [`RandomnessUnavailable`].
    pub fn seal(
        tls: &Tls,
        context: HostSecretContext<'_>,
        ring: &Keyring,
    ) -> Result<Self, RandomnessUnavailable> {
        let key = context.seal(&tls.key, HostSecretPurpose::Tls, ring)?;
        Ok(Self { key, required: tls.required })
    }

    /// Decrypts the key of that host.
    ///
    /// # Errors
    /// [`SecretUnsealError`].
    pub fn open(
        &self,
        context: HostSecretContext<'_>,
        ring: &Keyring,
    ) -> Result<Tls, SecretUnsealError> {
        let key = context.open(&self.key, HostSecretPurpose::Tls, ring)?;
        Ok(Tls { key, required: self.required })
    }

    /// The key in the form that front ends use.
    ///
    /// # Errors
    /// [`SecretUnsealError`], also if the decrypted text is not a valid key.
    pub fn open_for_target(
        &self,
        context: HostSecretContext<'_>,
        ring: &Keyring,
    ) -> Result<nvme::tls::TlsKey, SecretUnsealError> {
        let Tls { key, .. } = self.open(context, ring)?;
        nvme::tls::TlsKey::parse(key.expose()).map_err(|_| SecretUnsealError::AuthenticationFailed)
    }

    /// Whether it is sealed with the current key of `ring`, or unreadable.
    #[must_use]
    pub fn is_sealed_by(&self, ring: &Keyring) -> bool {
        self.key.is_sealed_by(ring)
    }

    /// Whether it is sealed with a key that `ring` lacks.
    #[must_use]
    pub fn lacks_key(&self, ring: &Keyring) -> bool {
        self.key.lacks_key(ring)
    }

    /// Whether the host must use TLS.
    #[must_use]
    pub fn is_required(&self) -> bool {
        self.required
    }
}

impl VolumeRecord {
    /// Whether any host must use TLS.
    #[must_use]
    pub fn requires_tls(&self) -> bool {
        self.tls_by_host.values().any(StoredTls::is_required)
    }

    /// The key of each host that has one.
    pub fn tls_keys(&self) -> impl Iterator<Item = (HostSecretContext<'_>, &StoredTls)> {
        of_each_host(self.id, &self.tls_by_host)
    }

    /// The same, mutable.
    pub fn tls_keys_mut(
        &mut self,
    ) -> impl Iterator<Item = (HostSecretContext<'_>, &mut StoredTls)> {
        of_each_host_mut(self.id, &mut self.tls_by_host)
    }
}

#[cfg(test)]
mod tests {
    use api::{ChapUser, Initiator};
    use serde_json::json;
    use uuid::Uuid;

    use super::super::{ChapContext, StoredChap, StoredDhchap};
    use super::*;
    use crate::samples::{HOST, KEYS, SECRETS, chap, dhchap, dhchap_of, ring, tls};

    const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:2";
    const VOLUME: Uuid = Uuid::from_u128(7);
    const OF: HostSecretContext<'static> = HostSecretContext { volume: VOLUME, host: HOST };

    #[test]
    fn what_is_sealed_shows_no_key_and_reads_back() {
        for required in [true, false] {
            let given = tls(KEYS[0], required);
            let sealed = StoredTls::seal(&given, OF, &ring(1)).unwrap();
            let text = serde_json::to_string(&sealed).unwrap();
            assert!(!text.contains("NVMeTLS") && !text.contains("\"secret\""), "{text}");
            let again: StoredTls = serde_json::from_str(&text).unwrap();
            assert_eq!((again.open(OF, &ring(1)), again.is_required()), (Ok(given), required));
            let known = again.open_for_target(OF, &ring(1)).unwrap();
            assert!(known == nvme::tls::TlsKey::parse(KEYS[0]).unwrap());
        }
    }

    #[test]
    fn a_key_opens_for_its_volume_and_host() {
        let sealed = StoredTls::seal(&tls(KEYS[0], true), OF, &ring(1)).unwrap();
        let opens = |context, by: &Keyring| sealed.open(context, by).map(|_| ());
        assert_eq!(opens(OF, &ring(1)), Ok(()));
        let other = HostSecretContext { host: OTHER, ..OF };
        assert_eq!(opens(other, &ring(1)), Err(SecretUnsealError::AuthenticationFailed));
        let elsewhere = HostSecretContext { volume: Uuid::from_u128(8), ..OF };
        assert_eq!(opens(elsewhere, &ring(1)), Err(SecretUnsealError::AuthenticationFailed));
        assert!(matches!(opens(OF, &ring(2)), Err(SecretUnsealError::UnknownKey(_))));
    }

    /// The text of what is sealed, at `path` of its JSON.
    fn sealed_text(stored: impl Serialize, path: &str) -> serde_json::Value {
        let text = serde_json::to_value(stored).unwrap().pointer(path).unwrap().clone();
        assert!(text.as_str().unwrap().starts_with("1."));
        text
    }

    /// Write access to the store does not allow using a secret for another purpose.
    #[test]
    fn no_secret_opens_as_a_key_and_no_key_as_a_secret() {
        let ring = ring(1);
        let secrets = StoredDhchap::seal(&dhchap_of(SECRETS[0], Some(KEYS[0])), OF, &ring).unwrap();
        let own = ChapContext { volume: VOLUME, initiator: Some(HOST) };
        let named = format!(r#"{{"user":"{HOST}","secret":"{}"}}"#, KEYS[0]);
        let named: api::Chap = serde_json::from_str(&named).unwrap();
        for sealed in [
            sealed_text(&secrets, "/host/sealed"),
            sealed_text(&secrets, "/controller/sealed"),
            sealed_text(StoredChap::seal(&chap(), VOLUME, &ring).unwrap(), "/sealed"),
            sealed_text(StoredChap::seal(&named, VOLUME, &ring).unwrap(), "/sealed"),
            sealed_text(StoredChap::seal(&named, own, &ring).unwrap(), "/sealed"),
        ] {
            let moved = json!({ "key": { "sealed": sealed }, "required": true });
            let moved: StoredTls = serde_json::from_value(moved).unwrap();
            assert_eq!(moved.open(OF, &ring), Err(SecretUnsealError::AuthenticationFailed));
        }
        let key = StoredTls::seal(&tls(SECRETS[0], true), OF, &ring).unwrap();
        let key = sealed_text(&key, "/key/sealed");
        for moved in [
            json!({ "host": { "sealed": key }, "controller": null }),
            json!({ "host": { "sealed": sealed_text(
                StoredDhchap::seal(&dhchap(), OF, &ring).unwrap(), "/host/sealed"
            ) }, "controller": { "sealed": key } }),
        ] {
            let moved: StoredDhchap = serde_json::from_value(moved).unwrap();
            assert_eq!(moved.open(OF, &ring), Err(SecretUnsealError::AuthenticationFailed));
        }
        let moved = json!({ "user": HOST, "sealed": key, "mutual": null });
        let moved: StoredChap = serde_json::from_value(moved).unwrap();
        assert_eq!(moved.open(VOLUME, &ring), Err(SecretUnsealError::AuthenticationFailed));
        assert_eq!(moved.open(own, &ring), Err(SecretUnsealError::AuthenticationFailed));
        // The bindings cannot collide.
        assert!(ChapUser::try_from(format!(",tls,{HOST}")).is_err());
        assert!(format!("tls,{HOST}").parse::<Initiator>().is_err(), "no host has such a name");
    }

    #[test]
    fn what_is_no_key_is_as_unknown_as_what_does_not_open() {
        let bad = StoredTls::seal(&tls(SECRETS[0], true), OF, &ring(1)).unwrap();
        assert!(bad.open(OF, &ring(1)).is_ok());
        assert_eq!(
            bad.open_for_target(OF, &ring(1)).err(),
            Some(SecretUnsealError::AuthenticationFailed)
        );
        for bad in [
            r"{}",
            r#"{"key":{"sealed":"1"}}"#,
            r#"{"required":true}"#,
            r#"{"key":{"sealed":"1","secret":"1"},"required":true}"#,
            r#"{"key":"1","required":true}"#,
            r#"{"key":{"sealed":"1"},"required":true,"more":1}"#,
        ] {
            assert!(serde_json::from_str::<StoredTls>(bad).is_err(), "{bad}");
        }
        let damaged = r#"{"key":{"sealed":"1"},"required":true}"#;
        let damaged: StoredTls = serde_json::from_str(damaged).unwrap();
        assert_eq!(damaged.open_for_target(OF, &ring(1)).err(), Some(SecretUnsealError::Damaged));
        assert!(damaged.is_sealed_by(&ring(1)), "it is not changed");
    }
}

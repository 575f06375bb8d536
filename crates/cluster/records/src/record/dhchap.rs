//! DH-HMAC-CHAP secrets in a record (RFD 0020, 2), of hosts and of the subsystem, sealed like those
//! of CHAP (RFD 0016).

use ::cluster::secrets::{Keyring, RandomnessUnavailable, SecretUnsealError};
use api::{Dhchap, DhchapSecret};
use nvme::auth::{BadSecret, Secret};
use serde::{Deserialize, Serialize};
use target::catalog::HostSecrets;

use super::host_secret::{HostSecretPurpose, of_each_host, of_each_host_mut};
use super::secrets::StoredSecret;
use super::{HostSecretContext, VolumeRecord};

/// The secret of one NVMe host of a volume, and that of the subsystem for the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredDhchap {
    host: StoredSecret<DhchapSecret>,
    #[serde(deserialize_with = "super::json::required_option")]
    controller: Option<StoredSecret<DhchapSecret>>,
}

/// Which of the two secrets is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DhchapError {
    /// The host's.
    #[error("the secret of the host is invalid: {0}")]
    Host(BadSecret),
    /// The subsystem's.
    #[error("the secret of the controller is invalid: {0}")]
    Controller(BadSecret),
}

/// The secrets in the form that front ends use.
///
/// # Errors
/// [`DhchapError`]; it does not reveal the secrets.
pub fn parse_secrets(dhchap: &Dhchap) -> Result<HostSecrets, DhchapError> {
    let Dhchap { secret, controller_secret } = dhchap;
    let host = Secret::parse(secret.expose()).map_err(DhchapError::Host)?;
    let controller = controller_secret.as_ref().map(|secret| Secret::parse(secret.expose()));
    let controller = controller.transpose().map_err(DhchapError::Controller)?;
    Ok(HostSecrets::Known { host, controller })
}

impl StoredDhchap {
    /// Seals secrets. A ring without keys leaves them in clear text.
    ///
    /// # Errors
    /// [`RandomnessUnavailable`].
    pub fn seal(
        dhchap: &Dhchap,
        context: HostSecretContext<'_>,
        ring: &Keyring,
    ) -> Result<Self, RandomnessUnavailable> {
        let Dhchap { secret, controller_secret } = dhchap;
        let host = context.seal(secret, HostSecretPurpose::Dhchap, ring)?;
        let controller = controller_secret
            .as_ref()
            .map(|secret| context.seal(secret, HostSecretPurpose::DhchapOfSubsystem, ring))
            .transpose()?;
        Ok(Self { host, controller })
    }

    /// Decrypts the secrets of that host.
    ///
    /// # Errors
    /// [`SecretUnsealError`].
    pub fn open(
        &self,
        context: HostSecretContext<'_>,
        ring: &Keyring,
    ) -> Result<Dhchap, SecretUnsealError> {
        let secret = context.open(&self.host, HostSecretPurpose::Dhchap, ring)?;
        let controller = self
            .controller
            .as_ref()
            .map(|stored| context.open(stored, HostSecretPurpose::DhchapOfSubsystem, ring))
            .transpose()?;
        Dhchap::new(secret, controller).map_err(|_| SecretUnsealError::AuthenticationFailed)
    }

    /// The same, in the form that front ends use.
    ///
    /// # Errors
    /// [`SecretUnsealError`], also if the decrypted text is not a valid secret.
    pub fn open_for_target(
        &self,
        context: HostSecretContext<'_>,
        ring: &Keyring,
    ) -> Result<HostSecrets, SecretUnsealError> {
        parse_secrets(&self.open(context, ring)?)
            .map_err(|_| SecretUnsealError::AuthenticationFailed)
    }

    /// Whether every secret is sealed with the current key of `ring`, or is unreadable.
    #[must_use]
    pub fn is_sealed_by(&self, ring: &Keyring) -> bool {
        self.secrets().all(|stored| stored.is_sealed_by(ring))
    }

    /// Whether a secret is sealed with a key that `ring` lacks.
    #[must_use]
    pub fn lacks_key(&self, ring: &Keyring) -> bool {
        self.secrets().any(|stored| stored.lacks_key(ring))
    }

    fn secrets(&self) -> impl Iterator<Item = &StoredSecret<DhchapSecret>> {
        std::iter::once(&self.host).chain(&self.controller)
    }

    /// Whether the subsystem can authenticate too.
    #[must_use]
    pub fn is_mutual(&self) -> bool {
        self.controller.is_some()
    }
}

impl VolumeRecord {
    /// The secret that `host` must prove; `None` if it needs none.
    #[must_use]
    pub fn dhchap_for<'a>(
        &'a self,
        host: &'a str,
    ) -> Option<(HostSecretContext<'a>, &'a StoredDhchap)> {
        Some((HostSecretContext { volume: self.id, host }, self.dhchap_by_host.get(host)?))
    }

    /// The secrets of all hosts that have one.
    pub fn dhchap_secrets(&self) -> impl Iterator<Item = (HostSecretContext<'_>, &StoredDhchap)> {
        of_each_host(self.id, &self.dhchap_by_host)
    }

    /// The same, mutable.
    pub fn dhchap_secrets_mut(
        &mut self,
    ) -> impl Iterator<Item = (HostSecretContext<'_>, &mut StoredDhchap)> {
        of_each_host_mut(self.id, &mut self.dhchap_by_host)
    }
}

#[cfg(test)]
mod tests {
    use api::ChapUser;
    use uuid::Uuid;

    use super::super::{ChapContext, StoredChap};
    use super::*;
    use crate::samples::{HOST, SECRETS, chap, dhchap, dhchap_of, ring};

    const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:2";
    const VOLUME: Uuid = Uuid::from_u128(7);
    const OF: HostSecretContext<'static> = HostSecretContext { volume: VOLUME, host: HOST };

    #[test]
    fn what_is_sealed_shows_no_secret_and_reads_back() {
        let sealed = StoredDhchap::seal(&dhchap(), OF, &ring(1)).unwrap();
        let text = serde_json::to_string(&sealed).unwrap();
        assert!(!text.contains("DHHC") && !text.contains("\"secret\""), "{text}");
        let again: StoredDhchap = serde_json::from_str(&text).unwrap();
        assert_eq!((again.open(OF, &ring(1)), again.is_mutual()), (Ok(dhchap()), true));
        let one = dhchap_of(SECRETS[0], None);
        let sealed = StoredDhchap::seal(&one, OF, &ring(1)).unwrap();
        assert_eq!((sealed.open(OF, &ring(1)), sealed.is_mutual()), (Ok(one), false));
        assert!(serde_json::to_string(&sealed).unwrap().contains(r#""controller":null"#));
    }

    #[test]
    fn a_secret_opens_for_its_volume_host_and_direction() {
        let sealed = StoredDhchap::seal(&dhchap(), OF, &ring(1)).unwrap();
        let opens = |sealed: &StoredDhchap, context| sealed.open(context, &ring(1));
        assert_eq!(
            opens(&sealed, HostSecretContext { host: OTHER, ..OF }),
            Err(SecretUnsealError::AuthenticationFailed)
        );
        let elsewhere = HostSecretContext { volume: Uuid::from_u128(8), ..OF };
        assert_eq!(opens(&sealed, elsewhere), Err(SecretUnsealError::AuthenticationFailed));
        let turned = StoredDhchap {
            host: sealed.controller.clone().unwrap(),
            controller: Some(sealed.host.clone()),
        };
        assert_eq!(opens(&turned, OF), Err(SecretUnsealError::AuthenticationFailed));
        let turned = StoredDhchap { host: sealed.host.clone(), controller: Some(sealed.host) };
        assert_eq!(
            opens(&turned, OF),
            Err(SecretUnsealError::AuthenticationFailed),
            "nor both from one"
        );
        assert!(matches!(turned.open(OF, &ring(2)), Err(SecretUnsealError::UnknownKey(_))));
    }

    /// CHAP secrets are bound to a text that begins with a user name, which contains no comma.
    #[test]
    fn nothing_of_chap_opens_for_a_host() {
        for user in ["", ",", ",nqn.2014-08.org.nvmexpress:uuid:1", "a,b"] {
            assert!(ChapUser::try_from(user.to_owned()).is_err(), "{user:?}");
        }
        // A user with the host's name, and an initiator with the host's name.
        let json = chap_json(HOST);
        for initiator in [None, Some(HOST)] {
            let context = ChapContext { volume: VOLUME, initiator };
            let sealed = StoredChap::seal(&chap(), context, &ring(1)).unwrap();
            let named: api::Chap = serde_json::from_str(&json).unwrap();
            let named = StoredChap::seal(&named, context, &ring(1)).unwrap();
            for sealed in [sealed, named] {
                let text = serde_json::to_value(&sealed).unwrap()["sealed"].clone();
                let moved = serde_json::json!({ "host": { "sealed": text }, "controller": null });
                let moved: StoredDhchap = serde_json::from_value(moved).unwrap();
                assert_eq!(moved.open(OF, &ring(1)), Err(SecretUnsealError::AuthenticationFailed));
            }
        }
    }

    fn chap_json(user: &str) -> String {
        format!(r#"{{"user":"{user}","secret":"{}"}}"#, SECRETS[0])
    }

    #[test]
    fn what_is_no_secret_is_told_without_it() {
        let bad = "DHHC-1:01:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACtVQoa:";
        let first = parse_secrets(&dhchap_of(bad, None)).unwrap_err();
        assert_eq!(first, DhchapError::Host(BadSecret::Checksum));
        let second = parse_secrets(&dhchap_of(SECRETS[0], Some("hush"))).unwrap_err();
        assert_eq!(second, DhchapError::Controller(BadSecret::Form));
        assert!(!first.to_string().contains("AAAA") && !second.to_string().contains("hush"));
        // A sealed invalid secret is as unusable as one that cannot be decrypted.
        let sealed = StoredDhchap::seal(&dhchap_of(bad, None), OF, &ring(1)).unwrap();
        assert!(sealed.open(OF, &ring(1)).is_ok());
        assert_eq!(
            sealed.open_for_target(OF, &ring(1)),
            Err(SecretUnsealError::AuthenticationFailed)
        );
    }

    #[test]
    fn a_record_has_one_secret_for_each_direction() {
        for bad in [
            r"{}",
            r#"{"controller":{"sealed":"1"}}"#,
            r#"{"host":{"sealed":"1"}}"#,
            r#"{"host":{"sealed":"1","secret":"1"},"controller":null}"#,
            r#"{"host":{},"controller":null}"#,
            r#"{"host":"1","controller":null}"#,
            r#"{"host":{"sealed":"1"},"controller":null,"more":1}"#,
            r#"{"host":{"sealed":"1"},"controller":{"more":"1"}}"#,
        ] {
            assert!(serde_json::from_str::<StoredDhchap>(bad).is_err(), "{bad}");
        }
        let damaged: StoredDhchap =
            serde_json::from_str(r#"{"host":{"sealed":"1"},"controller":null}"#).unwrap();
        assert_eq!(damaged.open_for_target(OF, &ring(1)), Err(SecretUnsealError::Damaged));
        assert!(damaged.is_sealed_by(&ring(1)), "it is not changed");
    }
}

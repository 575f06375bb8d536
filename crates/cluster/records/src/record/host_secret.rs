//! The secrets of NVMe hosts in a record: how each is sealed (RFD 0016), and for which host.

use std::collections::BTreeMap;

use ::cluster::secrets::{
    Keyring, RandomnessUnavailable, SecretContext, SecretOwner, SecretUnsealError,
};
use uuid::Uuid;

use super::secrets::{SecretText, StoredSecret};

/// The host that secrets belong to.
#[derive(Clone, Copy, Debug)]
pub struct HostSecretContext<'a> {
    /// The volume.
    pub volume: Uuid,
    /// The host, by its NQN.
    pub host: &'a str,
}

/// What a secret of a host is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum HostSecretPurpose {
    /// The host proves it by DH-HMAC-CHAP.
    Dhchap,
    /// The subsystem proves it to the host by DH-HMAC-CHAP.
    DhchapOfSubsystem,
    /// Both derive the keys of TLS from it.
    Tls,
}

impl HostSecretContext<'_> {
    /// Seals a secret, bound to its volume, host and purpose. A ring without keys leaves it in
    /// clear text.
    pub(super) fn seal<S: SecretText>(
        self,
        secret: &S,
        purpose: HostSecretPurpose,
        ring: &Keyring,
    ) -> Result<StoredSecret<S>, RandomnessUnavailable> {
        self.with_binding(purpose, |context| StoredSecret::seal(secret, context, ring))
    }

    /// Decrypts a secret of that purpose.
    pub(super) fn open<S: SecretText>(
        self,
        stored: &StoredSecret<S>,
        purpose: HostSecretPurpose,
        ring: &Keyring,
    ) -> Result<S, SecretUnsealError> {
        self.with_binding(purpose, |context| stored.open(context, ring))
    }

    /// Calls `work` with what a secret is bound to. CHAP secrets are bound to a text that begins
    /// with a user name, which contains no comma and is never empty; NQNs begin with `nqn.`. So no
    /// secrets of different kinds or hosts are bound to the same text.
    fn with_binding<T>(
        self,
        purpose: HostSecretPurpose,
        work: impl FnOnce(SecretContext<'_>) -> T,
    ) -> T {
        let (owner, prefix) = match purpose {
            HostSecretPurpose::Dhchap => (SecretOwner::Initiator, ","),
            HostSecretPurpose::DhchapOfSubsystem => (SecretOwner::Volume, ","),
            HostSecretPurpose::Tls => (SecretOwner::Initiator, ",tls,"),
        };
        let user = format!("{prefix}{}", self.host);
        work(SecretContext { volume: self.volume, owner, user: &user })
    }
}

/// The stored secrets of the hosts of `volume`, each with its context.
pub(super) fn of_each_host<S>(
    volume: Uuid,
    by_host: &BTreeMap<String, S>,
) -> impl Iterator<Item = (HostSecretContext<'_>, &S)> {
    by_host.iter().map(move |(host, stored)| (HostSecretContext { volume, host }, stored))
}

/// The same, mutable.
pub(super) fn of_each_host_mut<S>(
    volume: Uuid,
    by_host: &mut BTreeMap<String, S>,
) -> impl Iterator<Item = (HostSecretContext<'_>, &mut S)> {
    by_host.iter_mut().map(move |(host, stored)| (HostSecretContext { volume, host }, stored))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{HOST, KEYS, ring, tls};

    /// Records of earlier versions have to open.
    #[test]
    fn the_text_that_a_secret_is_bound_to_does_not_change() {
        let volume = Uuid::from_u128(7);
        let secret = tls(KEYS[0], true).key;
        let of_host = HostSecretContext { volume, host: HOST };
        for (purpose, owner, user) in [
            (HostSecretPurpose::Dhchap, SecretOwner::Initiator, format!(",{HOST}")),
            (HostSecretPurpose::DhchapOfSubsystem, SecretOwner::Volume, format!(",{HOST}")),
            (HostSecretPurpose::Tls, SecretOwner::Initiator, format!(",tls,{HOST}")),
        ] {
            let context = SecretContext { volume, owner, user: &user };
            let sealed = StoredSecret::seal(&secret, context, &ring(1)).unwrap();
            assert_eq!(of_host.open(&sealed, purpose, &ring(1)), Ok(secret.clone()));
        }
    }
}

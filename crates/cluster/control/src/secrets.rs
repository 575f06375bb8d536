//! The secrets of volumes: the keys that seal them, and sealing them for records (RFD 0016).

use std::sync::Arc;

use api::{ApiError, ErrorCode};
use cluster::secrets::{Keyring, RandomnessUnavailable};
use cluster::store::MetadataStore;
use membership::secret_keys::{SecretKeys, SecretsError};
use records::record::{
    ChapContext, HostSecretContext, StoredChap, StoredDhchap, StoredTls, VolumeRecord,
};
use status::node_facts::UnreadableSecret;

use crate::errors::store_error;

pub(super) fn secrets_error(error: &SecretsError) -> ApiError {
    match error {
        SecretsError::Store(error) => store_error(error),
        error => ApiError::new(ErrorCode::Internal, format!("cannot seal secrets: {error}")).with_hint(
            "nothing was changed; repair or restore the file or key named above, which holds the \
             keys that seal secrets",
        ),
    }
}

/// The sealed secret for a record: the one in the record if it `is_good`, else a new one.
fn keep_or_seal<S: Clone>(
    stored: Option<&S>,
    is_good: impl FnOnce(&S) -> bool,
    seal: impl FnOnce() -> Result<S, RandomnessUnavailable>,
) -> Result<S, ApiError> {
    match stored {
        Some(stored) if is_good(stored) => Ok(stored.clone()),
        _ => seal().map_err(|error| secrets_error(&SecretsError::NoRandom(error))),
    }
}

/// Seals the CHAP secrets of a volume; keeps those in the record if they are the same.
pub(super) fn seal_chap(
    chap: &api::Chap,
    (of, stored): (ChapContext<'_>, Option<&StoredChap>),
    keyring: &Keyring,
) -> Result<StoredChap, ApiError> {
    let is_good = |stored: &StoredChap| {
        stored.is_sealed_by(keyring) && stored.open(of, keyring).as_ref() == Ok(chap)
    };
    keep_or_seal(stored, is_good, || StoredChap::seal(chap, of, keyring))
}

/// The same for the secrets of an NVMe host.
pub(super) fn seal_dhchap(
    dhchap: &api::Dhchap,
    (of, stored): (HostSecretContext<'_>, Option<&StoredDhchap>),
    keyring: &Keyring,
) -> Result<StoredDhchap, ApiError> {
    let is_good = |stored: &StoredDhchap| {
        stored.is_sealed_by(keyring) && stored.open(of, keyring).as_ref() == Ok(dhchap)
    };
    keep_or_seal(stored, is_good, || StoredDhchap::seal(dhchap, of, keyring))
}

/// The same for the TLS key of an NVMe host.
pub(super) fn seal_tls(
    tls: &api::Tls,
    (of, stored): (HostSecretContext<'_>, Option<&StoredTls>),
    keyring: &Keyring,
) -> Result<StoredTls, ApiError> {
    let is_good = |stored: &StoredTls| {
        stored.is_sealed_by(keyring) && stored.open(of, keyring).as_ref() == Ok(tls)
    };
    keep_or_seal(stored, is_good, || StoredTls::seal(tls, of, keyring))
}

/// The secrets of volumes: the keys that seal them in the store.
pub(crate) struct SecretControl {
    keys: SecretKeys,
    meta: Arc<dyn MetadataStore>,
}

impl SecretControl {
    /// The secrets in the store `meta`, sealed by `keys`.
    pub(crate) fn new(keys: SecretKeys, meta: Arc<dyn MetadataStore>) -> Self {
        Self { keys, meta }
    }

    /// The keys as last read.
    pub(crate) fn cached_keys(&self) -> Keyring {
        self.keys.cached()
    }

    /// Reads the keys.
    ///
    /// # Errors
    /// [`SecretsError`].
    pub(crate) async fn read_keys(&self) -> Result<Keyring, SecretsError> {
        self.keys.read(&*self.meta).await
    }

    /// The keys for sealing.
    pub(crate) async fn sealing_keys(&self) -> Result<Keyring, ApiError> {
        self.try_sealing_keys().await.map_err(|e| secrets_error(&e))
    }

    /// [`Self::sealing_keys`] for callers that need the cause of an error.
    ///
    /// # Errors
    /// [`SecretsError`].
    pub(crate) async fn try_sealing_keys(&self) -> Result<Keyring, SecretsError> {
        self.keys.sealing(&*self.meta).await
    }

    /// Reads the keys again if a record of `records` needs an unknown one.
    pub(crate) async fn keys_to_open<'a>(
        &self,
        records: impl Iterator<Item = &'a VolumeRecord>,
    ) -> Keyring {
        let keyring = self.keys.cached();
        if { records }.any(|record| record.lacks_secret_key(&keyring)) {
            // An error is logged, and is part of the status.
            let _ = self.read_keys().await;
        }
        self.keys.cached()
    }

    /// The secrets of these volumes that cannot be read, with the reasons.
    pub(crate) async fn unreadable_secrets<'a>(
        &self,
        records: impl Iterator<Item = &'a VolumeRecord> + Clone,
    ) -> Vec<UnreadableSecret> {
        // Another node may have created a volume with a key that is newer than the cached ones.
        self.keys_to_open(records.clone()).await;
        records.flat_map(|record| self.keys.unreadable_secrets(record)).collect()
    }
}

#[cfg(test)]
mod tests {
    use api::Dhchap;
    use cluster::secrets::SealingKey;
    use records::samples::{HOST, KEYS, chap, dhchap, record, tls};

    use super::*;

    #[test]
    fn what_is_there_already_is_not_sealed_anew() {
        let (ring, volume) =
            (Keyring::new(vec![SealingKey::new([9; 32])]).unwrap(), record("a").id);
        let of = HostSecretContext { volume, host: HOST };
        let first = seal_dhchap(&dhchap(), (of, None), &ring).unwrap();
        assert_eq!(seal_dhchap(&dhchap(), (of, Some(&first)), &ring).unwrap(), first);
        let newer = Keyring::new(vec![SealingKey::new([8; 32]), SealingKey::new([9; 32])]).unwrap();
        assert_ne!(seal_dhchap(&dhchap(), (of, Some(&first)), &newer).unwrap(), first);
        let other = Dhchap::new(dhchap().secret, None).unwrap();
        let second = seal_dhchap(&other, (of, Some(&first)), &ring).unwrap();
        assert_eq!(second.open(of, &ring), Ok(other));
        let key = tls(KEYS[0], true);
        let first = seal_tls(&key, (of, None), &ring).unwrap();
        assert_eq!(seal_tls(&key, (of, Some(&first)), &ring).unwrap(), first);
        assert_ne!(seal_tls(&key, (of, Some(&first)), &newer).unwrap(), first);
        for other in [tls(KEYS[0], false), tls(KEYS[1], true)] {
            let second = seal_tls(&other, (of, Some(&first)), &ring).unwrap();
            assert_eq!(second.open(of, &ring), Ok(other));
        }
        let of = ChapContext::from(volume);
        let first = seal_chap(&chap(), (of, None), &ring).unwrap();
        assert_eq!(seal_chap(&chap(), (of, Some(&first)), &ring).unwrap(), first);
        assert_ne!(seal_chap(&chap(), (of, Some(&first)), &newer).unwrap(), first);
    }
}

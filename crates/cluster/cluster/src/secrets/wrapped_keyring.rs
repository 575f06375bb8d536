//! The keyring of a cluster in its store, wrapped by a key derived from the cluster's secret. That
//! secret is in no store; every node received it when it joined.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hkdf::{HKDF_SHA256, Salt};
use uuid::Uuid;

use super::{
    KEY_LEN, Keyring, MAX_KEYS, NONCE_LEN, RandomnessUnavailable, SEALED_VERSION, SealingKey,
    TAG_LEN, random_bytes,
};
use crate::identity::ClusterSecret;
use crate::store::{Change, MetadataStore, Precondition, StoreError};

/// The keyring's key in the store.
pub const KEYRING_KEY: &str = "secrets";

const DOMAIN_SEPARATOR: &[u8] = b"windrose ring 1\0";

/// Why the stored bytes are not a keyring of this cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyringError {
    /// They are damaged.
    #[error("the key `secrets` of the store is damaged, or a newer version has written it")]
    Damaged,
    /// They were wrapped with another secret, or changed.
    #[error("the key `secrets` of the store was changed, or is that of another cluster")]
    AuthenticationFailed,
}

fn associated_data(cluster: Uuid) -> Vec<u8> {
    [DOMAIN_SEPARATOR, &cluster.as_bytes()[..]].concat()
}

/// The key that wraps the keyring in the store of `cluster`.
fn wrapping_key(secret: &ClusterSecret, cluster: Uuid) -> SealingKey {
    let drawn = Salt::new(HKDF_SHA256, cluster.as_bytes()).extract(secret.bytes());
    let mut bytes = [0; 32];
    let filled = drawn.expand(&[b"windrose wrapping key 1"], HKDF_SHA256);
    let filled = filled.and_then(|key| key.fill(&mut bytes));
    filled.expect("32 bytes are what one step of this function gives");
    SealingKey::new(bytes)
}

/// Wraps `ring` for the store.
///
/// # Errors
/// [`RandomnessUnavailable`].
pub fn wrap_keyring(
    keyring: &Keyring,
    cluster: Uuid,
    secret: &ClusterSecret,
) -> Result<Vec<u8>, RandomnessUnavailable> {
    Ok(wrap_with_nonce(random_bytes()?, keyring, cluster, secret))
}

pub(super) fn wrap_with_nonce(
    nonce: [u8; NONCE_LEN],
    keyring: &Keyring,
    cluster: Uuid,
    secret: &ClusterSecret,
) -> Vec<u8> {
    let plain: Vec<u8> = keyring.keys.iter().flat_map(|key| key.0).collect();
    let bytes = wrapping_key(secret, cluster).seal(nonce, &associated_data(cluster), &plain);
    format!("{SEALED_VERSION}.{}", URL_SAFE_NO_PAD.encode(bytes)).into_bytes()
}

/// Unwraps the stored keyring.
///
/// # Errors
/// [`KeyringError`].
pub fn unwrap_keyring(
    stored: &[u8],
    cluster: Uuid,
    secret: &ClusterSecret,
) -> Result<Keyring, KeyringError> {
    const MAX: usize = NONCE_LEN + MAX_KEYS * KEY_LEN + TAG_LEN;
    let text = std::str::from_utf8(stored).map_err(|_| KeyringError::Damaged)?;
    let bytes = text.split_once('.').filter(|(version, _)| *version == SEALED_VERSION);
    let bytes = bytes.map(|(_, bytes)| bytes).filter(|bytes| bytes.len() <= 2 * MAX);
    let bytes = bytes.and_then(|bytes| URL_SAFE_NO_PAD.decode(bytes).ok());
    let bytes = bytes.ok_or(KeyringError::Damaged)?;
    let plain = wrapping_key(secret, cluster).open(&associated_data(cluster), &bytes);
    let plain = plain.ok_or(KeyringError::AuthenticationFailed)?;
    let (keys, rest) = plain.as_chunks::<KEY_LEN>();
    let keys = keys.iter().map(|bytes| SealingKey::new(*bytes)).collect();
    Keyring::new(keys).filter(|_| rest.is_empty()).ok_or(KeyringError::Damaged)
}

/// Wraps the stored keyring of `cluster` with the secret `new`, if it is wrapped with `old`. A
/// keyring that opens with neither stays as it is.
///
/// # Errors
/// [`StoreError`]; [`StoreError::Conflict`] if it was changed concurrently.
pub async fn rewrap(
    meta: &dyn MetadataStore,
    cluster: Uuid,
    new: &ClusterSecret,
    old: &ClusterSecret,
) -> Result<(), StoreError> {
    let Some(entry) = meta.get(KEYRING_KEY).await? else { return Ok(()) };
    let stored = entry.contents()?;
    if unwrap_keyring(stored, cluster, new).is_ok() {
        return Ok(());
    }
    let Ok(keyring) = unwrap_keyring(stored, cluster, old) else { return Ok(()) };
    let failed = |e: RandomnessUnavailable| StoreError::Failed {
        path: KEYRING_KEY.into(),
        why: e.to_string(),
    };
    let value = Some(wrap_keyring(&keyring, cluster, new).map_err(failed)?);
    let change = Change {
        key: KEYRING_KEY.into(),
        precondition: Precondition::AtRevision(entry.revision),
        value,
    };
    meta.commit(vec![change]).await.map(drop)
}

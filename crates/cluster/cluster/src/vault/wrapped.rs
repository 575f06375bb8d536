//! The ring of a cluster, as its store holds it: wrapped by a key that follows from the cluster's secret. That secret is in no
//! store, and every node has it by its token.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use uuid::Uuid;

use super::{KEY_LEN, Key, MAX_KEYS, NONCE, NoRandom, Ring, TAG, VERSION, random};
use crate::identity::ClusterSecret;
use crate::meta::{Change, Expect, Meta, MetaError};

/// Where it is in the store.
pub const KEY: &str = "secrets";

const PURPOSE: &[u8] = b"windrose ring 1\0";

/// What the store holds is no ring of this cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRing {
    /// It is damaged.
    #[error("the key `secrets` of the store is damaged, or a newer version has written it")]
    Damaged,
    /// It was wrapped by another secret, or changed.
    #[error("the key `secrets` of the store was changed, or is that of another cluster")]
    Wrong,
}

fn beside(cluster: Uuid) -> Vec<u8> {
    [PURPOSE, &cluster.as_bytes()[..]].concat()
}

/// What the store is to hold of `ring`.
///
/// # Errors
/// [`NoRandom`].
pub fn wrap(ring: &Ring, cluster: Uuid, secret: &ClusterSecret) -> Result<Vec<u8>, NoRandom> {
    Ok(wrap_with(random()?, ring, cluster, secret))
}

pub(super) fn wrap_with(
    nonce: [u8; NONCE],
    ring: &Ring,
    cluster: Uuid,
    secret: &ClusterSecret,
) -> Vec<u8> {
    let plain: Vec<u8> = ring.keys.iter().flat_map(|key| key.0).collect();
    let bytes = secret.wrapping_key(cluster).seal(nonce, &beside(cluster), &plain);
    format!("{VERSION}.{}", URL_SAFE_NO_PAD.encode(bytes)).into_bytes()
}

/// The ring in what the store holds.
///
/// # Errors
/// [`BadRing`].
pub fn unwrap(held: &[u8], cluster: Uuid, secret: &ClusterSecret) -> Result<Ring, BadRing> {
    const MAX: usize = NONCE + MAX_KEYS * KEY_LEN + TAG;
    let text = std::str::from_utf8(held).map_err(|_| BadRing::Damaged)?;
    let bytes = text.split_once('.').filter(|(version, _)| *version == VERSION);
    let bytes = bytes.map(|(_, bytes)| bytes).filter(|bytes| bytes.len() <= 2 * MAX);
    let bytes = bytes.and_then(|bytes| URL_SAFE_NO_PAD.decode(bytes).ok());
    let bytes = bytes.ok_or(BadRing::Damaged)?;
    let plain = secret.wrapping_key(cluster).open(&beside(cluster), &bytes);
    let plain = plain.ok_or(BadRing::Wrong)?;
    let (keys, rest) = plain.as_chunks::<KEY_LEN>();
    let keys = keys.iter().map(|bytes| Key::new(*bytes)).collect();
    Ring::new(keys).filter(|_| rest.is_empty()).ok_or(BadRing::Damaged)
}

/// Has the store of `cluster` hold its ring wrapped by the secret `new`, where it is wrapped by `old`. What opens by neither
/// stays as it is.
///
/// # Errors
/// [`MetaError`]; [`MetaError::Changed`] where somebody else has changed it meanwhile.
pub async fn wrap_anew(
    meta: &dyn Meta,
    cluster: Uuid,
    new: &ClusterSecret,
    old: &ClusterSecret,
) -> Result<(), MetaError> {
    let Some(entry) = meta.get(KEY).await? else { return Ok(()) };
    let held = entry.contents()?;
    if unwrap(held, cluster, new).is_ok() {
        return Ok(());
    }
    let Ok(ring) = unwrap(held, cluster, old) else { return Ok(()) };
    let failed = |e: NoRandom| MetaError::Failed { path: KEY.into(), why: e.to_string() };
    let value = Some(wrap(&ring, cluster, new).map_err(failed)?);
    let change = Change { key: KEY.into(), expect: Expect::At(entry.revision), value };
    meta.commit(vec![change]).await.map(drop)
}

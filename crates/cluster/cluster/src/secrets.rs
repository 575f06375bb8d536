//! Secrets at rest (RFD 0016): the keys, and how secrets in the store are sealed with them.
//!
//! A [`Keyring`] holds the keys: a standalone node's are in [a file](key_file), a cluster's in its
//! store, wrapped by the [cluster's secret](crate::identity::ClusterSecret). A secret is sealed for
//! one [`SecretContext`] and does not open in another. `docs/format/store.md` describes the bytes.

pub mod key_file;
mod wrapped_keyring;

use std::fmt::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use uuid::Uuid;

pub use wrapped_keyring::{KEYRING_KEY, KeyringError, rewrap, unwrap_keyring, wrap_keyring};

/// Most keys of a keyring.
pub const MAX_KEYS: usize = 16;

/// Longest secret that can be sealed, in bytes: its length is one byte.
pub const MAX_SECRET: usize = 255;

/// Bytes of a key.
const KEY_LEN: usize = 32;

/// Length to which every secret is padded before it is sealed; one byte is its length.
const PADDED_LEN: usize = 1 + MAX_SECRET;

/// Bytes of a nonce, and of the authentication tag.
const NONCE_LEN: usize = 12;
const TAG_LEN: usize = 16;

/// Version at the start of a sealed secret.
const SEALED_VERSION: &str = "1";

/// Start of the associated data.
const DOMAIN_SEPARATOR: &[u8] = b"windrose secret 1\0";

/// A key that seals secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct SealingKey([u8; KEY_LEN]);

/// Identifies a key: the first half of its hash, for people and records. Reveals nothing of the
/// key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(u64);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.id())
    }
}

/// The system provides no random bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot get random bytes from the system")]
pub struct RandomnessUnavailable;

/// Generates random bytes.
fn random_bytes<const N: usize>() -> Result<[u8; N], RandomnessUnavailable> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| RandomnessUnavailable)?;
    Ok(bytes)
}

impl SealingKey {
    /// Builds a key from these bytes.
    #[must_use]
    pub fn new(bytes: [u8; KEY_LEN]) -> Self {
        Self(bytes)
    }

    /// Generates a key.
    ///
    /// # Errors
    /// [`RandomnessUnavailable`].
    pub fn random() -> Result<Self, RandomnessUnavailable> {
        random_bytes().map(Self)
    }

    /// The key's identifier.
    #[must_use]
    pub fn id(&self) -> KeyId {
        let hash = digest(&SHA256, &[b"windrose key 1\0", &self.0[..]].concat());
        let first = hash.as_ref().iter().take(8);
        KeyId(first.fold(0, |id, byte| id << 8 | u64::from(*byte)))
    }

    fn cipher(&self) -> LessSafeKey {
        let key = UnboundKey::new(&CHACHA20_POLY1305, &self.0);
        LessSafeKey::new(key.expect("a key of this cipher has 32 bytes"))
    }

    /// Returns nonce, ciphertext and tag.
    fn seal(&self, nonce: [u8; NONCE_LEN], associated_data: &[u8], plain: &[u8]) -> Vec<u8> {
        let mut bytes = plain.to_vec();
        let aad = Aad::from(associated_data);
        let nonce_of = Nonce::assume_unique_for_key(nonce);
        let sealed = self.cipher().seal_in_place_append_tag(nonce_of, aad, &mut bytes);
        sealed.expect("it is shorter than 256 GiB");
        [&nonce[..], &bytes].concat()
    }

    /// As [`Self::seal`], with a random nonce.
    pub(crate) fn seal_with_random_nonce(
        &self,
        associated_data: &[u8],
        plain: &[u8],
    ) -> Result<Vec<u8>, RandomnessUnavailable> {
        Ok(self.seal(random_bytes()?, associated_data, plain))
    }

    pub(crate) fn open(&self, associated_data: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, rest) = sealed.split_first_chunk::<NONCE_LEN>()?;
        let mut bytes = rest.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let opened = self.cipher().open_in_place(nonce, Aad::from(associated_data), &mut bytes);
        opened.ok().map(|plain| plain.to_vec())
    }

    fn to_hex(&self) -> String {
        self.0.iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }
}

/// Who authenticates with a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretOwner {
    /// Initiators, to the volume.
    Initiator,
    /// The volume, to initiators.
    Volume,
}

/// What a secret is for. A secret sealed for one context does not open in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecretContext<'a> {
    /// The volume.
    pub volume: Uuid,
    /// Who authenticates with it.
    pub owner: SecretOwner,
    /// The user name it belongs to.
    pub user: &'a str,
}

impl SecretContext<'_> {
    /// The associated data of the secret.
    fn associated_data(&self) -> Vec<u8> {
        let owner = match self.owner {
            SecretOwner::Initiator => 0,
            SecretOwner::Volume => 1,
        };
        [DOMAIN_SEPARATOR, &self.volume.as_bytes()[..], &[owner], self.user.as_bytes()].concat()
    }
}

/// Why a sealed secret does not open. Reveals nothing of its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretUnsealError {
    /// The keyring lacks the key.
    #[error("it is sealed by key {0}")]
    UnknownKey(KeyId),
    /// It is not a sealed secret of a known version.
    #[error("it is damaged, or a newer version has sealed it")]
    Damaged,
    /// It was changed, or belongs to another volume or user.
    #[error("it was changed, or is that of another volume or user")]
    AuthenticationFailed,
}

/// A parsed sealed secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedSecret {
    /// The key that sealed it.
    pub key: KeyId,
    bytes: Vec<u8>,
}

impl SealedSecret {
    /// Nonce, padded secret and tag.
    const SEALED_LEN: usize = NONCE_LEN + PADDED_LEN + TAG_LEN;

    /// Parses a sealed secret.
    ///
    /// # Errors
    /// [`SecretUnsealError::Damaged`].
    pub fn parse(text: &str) -> Result<Self, SecretUnsealError> {
        let parts = || {
            let (version, rest) = text.split_once('.')?;
            let (id, bytes) = rest.split_once('.').filter(|_| version == SEALED_VERSION)?;
            let digits = id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            let id = u64::from_str_radix(id, 16).ok().filter(|_| digits && id.len() == 16)?;
            // Check the length before decoding.
            let bytes = Some(bytes).filter(|b| b.len() <= 2 * Self::SEALED_LEN)?;
            let bytes =
                URL_SAFE_NO_PAD.decode(bytes).ok().filter(|b| b.len() == Self::SEALED_LEN)?;
            Some(Self { key: KeyId(id), bytes })
        };
        parts().ok_or(SecretUnsealError::Damaged)
    }

    /// Encodes it; [`Self::parse`] decodes it.
    #[must_use]
    pub fn to_text(&self) -> String {
        format!("{SEALED_VERSION}.{}.{}", self.key, URL_SAFE_NO_PAD.encode(&self.bytes))
    }
}

/// Keys: the first one seals, all of them open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keyring {
    keys: Vec<SealingKey>,
}

impl Keyring {
    /// Builds a keyring from at most [`MAX_KEYS`] distinct keys, the sealing one first; otherwise
    /// `None`.
    #[must_use]
    pub fn new(keys: Vec<SealingKey>) -> Option<Self> {
        let is_duplicate = |(i, key): (usize, &SealingKey)| keys[..i].contains(key);
        let is_valid = keys.len() <= MAX_KEYS && !keys.iter().enumerate().any(is_duplicate);
        is_valid.then_some(Self { keys })
    }

    /// Whether it has no keys, and so can neither seal nor open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The key that seals.
    #[must_use]
    pub fn sealing_key(&self) -> Option<KeyId> {
        self.keys.first().map(SealingKey::id)
    }

    /// Whether it has this key.
    #[must_use]
    pub fn contains(&self, id: KeyId) -> bool {
        self.keys.iter().any(|key| key.id() == id)
    }

    /// Seals a secret of at most [`MAX_SECRET`] bytes for a context. `None` if there is no key or
    /// the secret is too long.
    ///
    /// # Errors
    /// [`RandomnessUnavailable`].
    pub fn seal(
        &self,
        context: SecretContext<'_>,
        secret: &[u8],
    ) -> Result<Option<SealedSecret>, RandomnessUnavailable> {
        Ok(self.seal_with_nonce(random_bytes()?, context, secret))
    }

    fn seal_with_nonce(
        &self,
        nonce: [u8; NONCE_LEN],
        context: SecretContext<'_>,
        secret: &[u8],
    ) -> Option<SealedSecret> {
        let key = self.keys.first()?;
        let mut padded = vec![u8::try_from(secret.len()).ok()?];
        padded.extend_from_slice(secret);
        // Padding hides the length.
        padded.resize(PADDED_LEN, 0);
        Some(SealedSecret {
            key: key.id(),
            bytes: key.seal(nonce, &context.associated_data(), &padded),
        })
    }

    /// Opens a secret that was sealed for `context`.
    ///
    /// # Errors
    /// [`SecretUnsealError`].
    pub fn open(
        &self,
        context: SecretContext<'_>,
        sealed: &SealedSecret,
    ) -> Result<Vec<u8>, SecretUnsealError> {
        let key = self.keys.iter().find(|key| key.id() == sealed.key);
        let key = key.ok_or(SecretUnsealError::UnknownKey(sealed.key))?;
        let padded = key
            .open(&context.associated_data(), &sealed.bytes)
            .ok_or(SecretUnsealError::AuthenticationFailed)?;
        let (len, rest) = padded.split_first().ok_or(SecretUnsealError::AuthenticationFailed)?;
        rest.get(..usize::from(*len))
            .map(<[u8]>::to_vec)
            .ok_or(SecretUnsealError::AuthenticationFailed)
    }
}

#[cfg(test)]
mod tests;

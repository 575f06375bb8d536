//! Secrets at rest (RFD 0016): keys, and how what the store holds of secrets is sealed by them.
//!
//! A [`Ring`] is what can open: the keys of a node by itself, in [a file](file), or those of a cluster, in its store, wrapped by
//! the [cluster's secret](crate::identity::ClusterSecret). A secret is sealed for one [`Place`] and opens nowhere else. The
//! bytes are on the page `docs/format/store.md`.

pub mod file;
mod wrapped;

use std::fmt::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use uuid::Uuid;

pub use wrapped::{BadRing, KEY, unwrap, wrap, wrap_anew};

/// Most keys of a ring.
pub const MAX_KEYS: usize = 16;

/// Longest secret that can be sealed, in bytes: its length is one byte.
pub const MAX_SECRET: usize = 255;

/// Bytes of a key.
const KEY_LEN: usize = 32;

/// What every secret is brought to before it is sealed: its length is one of them.
const PADDED: usize = 1 + MAX_SECRET;

/// Bytes of a nonce, and of what proves that nothing was changed.
const NONCE: usize = 12;
const TAG: usize = 16;

/// What a sealed secret begins with.
const VERSION: &str = "1";

/// The beginning of what is authenticated beside a secret.
const PURPOSE: &[u8] = b"windrose secret 1\0";

/// A key.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; KEY_LEN]);

/// Which key: the first half of a hash of it, for people and records. Tells nothing of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(u64);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.id())
    }
}

/// The system gives no random bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system gives no random bytes")]
pub struct NoRandom;

/// Random bytes.
fn random<const N: usize>() -> Result<[u8; N], NoRandom> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| NoRandom)?;
    Ok(bytes)
}

impl Key {
    /// The key of these bytes.
    #[must_use]
    pub fn new(bytes: [u8; KEY_LEN]) -> Self {
        Self(bytes)
    }

    /// A new one.
    ///
    /// # Errors
    /// [`NoRandom`].
    pub fn random() -> Result<Self, NoRandom> {
        random().map(Self)
    }

    /// Which one it is.
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

    /// Nonce, sealed bytes, tag.
    fn seal(&self, nonce: [u8; NONCE], beside: &[u8], plain: &[u8]) -> Vec<u8> {
        let mut bytes = plain.to_vec();
        let aad = Aad::from(beside);
        let nonce_of = Nonce::assume_unique_for_key(nonce);
        let sealed = self.cipher().seal_in_place_append_tag(nonce_of, aad, &mut bytes);
        sealed.expect("it is shorter than 256 GiB");
        [&nonce[..], &bytes].concat()
    }

    /// As [`Self::seal`], with a nonce of its own.
    pub(crate) fn seal_randomly(&self, beside: &[u8], plain: &[u8]) -> Result<Vec<u8>, NoRandom> {
        Ok(self.seal(random()?, beside, plain))
    }

    pub(crate) fn open(&self, beside: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, rest) = sealed.split_first_chunk::<NONCE>()?;
        let mut bytes = rest.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let opened = self.cipher().open_in_place(nonce, Aad::from(beside), &mut bytes);
        opened.ok().map(|plain| plain.to_vec())
    }

    fn hex(&self) -> String {
        self.0.iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }
}

/// Who proves himself by a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Initiators, to the volume.
    Initiator,
    /// The volume, to initiators.
    Volume,
}

/// What a secret is for. One that is sealed for a place opens at no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// Of which volume.
    pub volume: Uuid,
    /// Who proves himself by it.
    pub whose: Whose,
    /// The name that is proved.
    pub user: &'a str,
}

impl Place<'_> {
    /// What is authenticated beside the secret.
    fn bytes(&self) -> Vec<u8> {
        let whose = match self.whose {
            Whose::Initiator => 0,
            Whose::Volume => 1,
        };
        [PURPOSE, &self.volume.as_bytes()[..], &[whose], self.user.as_bytes()].concat()
    }
}

/// Why a sealed secret does not open. Says nothing of its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotOpen {
    /// The key is not on the ring.
    #[error("it is sealed by key {0}")]
    NoKey(KeyId),
    /// It is no sealed secret of a version that is known.
    #[error("it is damaged, or a newer version has sealed it")]
    Damaged,
    /// It was changed, or belongs to another volume or user.
    #[error("it was changed, or is that of another volume or user")]
    Wrong,
}

/// A sealed secret, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// By which key.
    pub key: KeyId,
    bytes: Vec<u8>,
}

impl Sealed {
    /// Nonce, padded secret and tag.
    const LEN: usize = NONCE + PADDED + TAG;

    /// What `text` says.
    ///
    /// # Errors
    /// [`CannotOpen::Damaged`].
    pub fn parse(text: &str) -> Result<Self, CannotOpen> {
        let parts = || {
            let (version, rest) = text.split_once('.')?;
            let (id, bytes) = rest.split_once('.').filter(|_| version == VERSION)?;
            let digits = id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            let id = u64::from_str_radix(id, 16).ok().filter(|_| digits && id.len() == 16)?;
            // Before it is decoded: what is too long is not looked at.
            let bytes = Some(bytes).filter(|b| b.len() <= 2 * Self::LEN)?;
            let bytes = URL_SAFE_NO_PAD.decode(bytes).ok().filter(|b| b.len() == Self::LEN)?;
            Some(Self { key: KeyId(id), bytes })
        };
        parts().ok_or(CannotOpen::Damaged)
    }

    /// As [`Self::parse`] reads it.
    #[must_use]
    pub fn to_text(&self) -> String {
        format!("{VERSION}.{}.{}", self.key, URL_SAFE_NO_PAD.encode(&self.bytes))
    }
}

/// Keys: the first one seals, all of them open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    keys: Vec<Key>,
}

impl Ring {
    /// These keys, the one that seals first; at most [`MAX_KEYS`], each of them once.
    #[must_use]
    pub fn new(keys: Vec<Key>) -> Option<Self> {
        let twice = |(i, key): (usize, &Key)| keys[..i].contains(key);
        let good = keys.len() <= MAX_KEYS && !keys.iter().enumerate().any(twice);
        good.then_some(Self { keys })
    }

    /// Whether it can neither seal nor open anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The key that seals.
    #[must_use]
    pub fn seals_by(&self) -> Option<KeyId> {
        self.keys.first().map(Key::id)
    }

    /// Whether it has a key.
    #[must_use]
    pub fn has(&self, id: KeyId) -> bool {
        self.keys.iter().any(|key| key.id() == id)
    }

    /// Seals a secret of at most [`MAX_SECRET`] bytes for a place. `None` if there is no key or the secret is too long.
    ///
    /// # Errors
    /// [`NoRandom`].
    pub fn seal(&self, place: Place<'_>, secret: &[u8]) -> Result<Option<Sealed>, NoRandom> {
        Ok(self.seal_with(random()?, place, secret))
    }

    fn seal_with(&self, nonce: [u8; NONCE], place: Place<'_>, secret: &[u8]) -> Option<Sealed> {
        let key = self.keys.first()?;
        let mut padded = vec![u8::try_from(secret.len()).ok()?];
        padded.extend_from_slice(secret);
        // So that its length does not show.
        padded.resize(PADDED, 0);
        Some(Sealed { key: key.id(), bytes: key.seal(nonce, &place.bytes(), &padded) })
    }

    /// The secret that was sealed for `place`.
    ///
    /// # Errors
    /// [`CannotOpen`].
    pub fn open(&self, place: Place<'_>, sealed: &Sealed) -> Result<Vec<u8>, CannotOpen> {
        let key = self.keys.iter().find(|key| key.id() == sealed.key);
        let key = key.ok_or(CannotOpen::NoKey(sealed.key))?;
        let padded = key.open(&place.bytes(), &sealed.bytes).ok_or(CannotOpen::Wrong)?;
        let (len, rest) = padded.split_first().ok_or(CannotOpen::Wrong)?;
        rest.get(..usize::from(*len)).map(<[u8]>::to_vec).ok_or(CannotOpen::Wrong)
    }
}

#[cfg(test)]
mod tests;

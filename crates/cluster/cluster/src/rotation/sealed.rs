//! New credentials on their way to a node: sealed so that only the process that asked can open them, and only if it knows the
//! cluster's present secret, as who seals them does.
//!
//! Who reads the store, now or from a backup, learns nothing, not even with the present secret: the keys of both sides
//! are drawn for this one message (X25519, RFC 7748) and are forgotten. Who writes to the store without the present secret can
//! neither get them nor give other ones.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::rand::SystemRandom;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

use crate::identity::{ClusterSecret, Credentials};
use crate::vault::{Key, NoRandom};

/// Longest sealed credentials, in bytes: a certificate and a key of 4096 bytes each, escaped, and what is around them.
const MAX_SEALED: usize = 32 << 10;

const PURPOSE: &[u8] = b"windrose rotation 1";

/// The public half of a [`OneTimeKey`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

/// A key by which one message is opened.
pub struct OneTimeKey {
    private: EphemeralPrivateKey,
    public: PublicKey,
}

/// Sealed credentials: the sealing side's public key, nonce, bytes, tag.
#[derive(Clone, PartialEq, Eq)]
pub struct Sealed(Vec<u8>);

/// For whom something is sealed.
#[derive(Clone, Copy, Debug)]
pub struct For<'a> {
    /// In which cluster.
    pub cluster: Uuid,
    /// In which rotation.
    pub rotation: Uuid,
    /// The node.
    pub node: u16,
    /// What both sides know.
    pub secret: &'a ClusterSecret,
}

/// What was sealed does not open: it is damaged, or of somebody who does not know the cluster's secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the new credentials of the cluster do not open; they are asked for again")]
pub struct CannotUnseal;

impl For<'_> {
    fn beside(&self) -> Vec<u8> {
        let node = self.node.to_be_bytes();
        [PURPOSE, self.cluster.as_bytes(), self.rotation.as_bytes(), &node[..]].concat()
    }

    /// The key of the message between these two.
    fn key(
        &self,
        private: EphemeralPrivateKey,
        theirs: PublicKey,
        keys: [PublicKey; 2],
    ) -> Option<Key> {
        let theirs = UnparsedPublicKey::new(&X25519, theirs.0);
        let [sealing, opening] = keys;
        agree_ephemeral(private, &theirs, |shared| {
            let drawn = Salt::new(HKDF_SHA256, self.secret.bytes()).extract(shared);
            let info = [&self.beside()[..], &sealing.0, &opening.0];
            let mut bytes = [0; 32];
            drawn.expand(&info, HKDF_SHA256).and_then(|key| key.fill(&mut bytes)).ok()?;
            Some(Key::new(bytes))
        })
        .ok()?
    }
}

impl OneTimeKey {
    /// A new one.
    ///
    /// # Errors
    /// [`NoRandom`].
    pub fn new() -> Result<Self, NoRandom> {
        let random = SystemRandom::new();
        let private = EphemeralPrivateKey::generate(&X25519, &random).map_err(|_| NoRandom)?;
        let public = private.compute_public_key().map_err(|_| NoRandom)?;
        let public = PublicKey(public.as_ref().try_into().map_err(|_| NoRandom)?);
        Ok(Self { private, public })
    }

    /// What others seal by.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        self.public
    }

    /// The credentials in `sealed`. It can be tried once.
    ///
    /// # Errors
    /// [`CannotUnseal`].
    pub fn open(self, of: &For<'_>, sealed: &Sealed) -> Result<Credentials, CannotUnseal> {
        let (sealing, bytes) = sealed.0.split_first_chunk::<32>().ok_or(CannotUnseal)?;
        let sealing = PublicKey(*sealing);
        let key = of.key(self.private, sealing, [sealing, self.public]).ok_or(CannotUnseal)?;
        let plain = key.open(&of.beside(), bytes).ok_or(CannotUnseal)?;
        let opened: Credentials = serde_json::from_slice(&plain).map_err(|_| CannotUnseal)?;
        opened.protection.check().map_err(|_| CannotUnseal)?;
        Ok(opened)
    }
}

/// Seals `credentials` for who has shown the key `to`.
///
/// # Errors
/// [`NoRandom`]; also for a `to` that is no key.
pub fn seal(credentials: &Credentials, of: &For<'_>, to: PublicKey) -> Result<Sealed, NoRandom> {
    let OneTimeKey { private, public } = OneTimeKey::new()?;
    let key = of.key(private, to, [public, to]).ok_or(NoRandom)?;
    let plain = serde_json::to_vec(credentials).map_err(|_| NoRandom)?;
    let bytes = key.seal_randomly(&of.beside(), &plain)?;
    Ok(Sealed([&public.0[..], &bytes].concat()))
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl fmt::Debug for OneTimeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OneTimeKey").field("public", &self.public).finish_non_exhaustive()
    }
}

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealed({} bytes)", self.0.len())
    }
}

impl Serialize for PublicKey {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let bytes = decoded(&String::deserialize(from)?).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| de::Error::custom("a public key has 32 bytes"))
    }
}

impl Serialize for Sealed {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&URL_SAFE_NO_PAD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Sealed {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let bytes = decoded(&String::deserialize(from)?);
        bytes.map(Self).ok_or_else(|| de::Error::custom("sealed credentials have at most 32 KiB"))
    }
}

fn decoded(text: &str) -> Option<Vec<u8>> {
    // Before it is decoded: what is too long is not looked at.
    let text = Some(text).filter(|text| text.len() <= MAX_SEALED * 2)?;
    URL_SAFE_NO_PAD.decode(text).ok().filter(|bytes| bytes.len() <= MAX_SEALED)
}

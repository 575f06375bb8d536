//! Transport of new credentials to a node. They are sealed so that only the requesting process can
//! open them, and sealing and opening both require the cluster's present secret.
//!
//! Reading the store, now or from a backup, reveals nothing, even with the present secret: both
//! sides' keys are ephemeral (X25519, RFC 7748). Writing to the store without the present secret
//! neither yields the credentials nor can it forge others.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::rand::SystemRandom;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

use crate::identity::{ClusterCredentials, ClusterSecret};
use crate::secrets::{RandomnessUnavailable, SealingKey};

/// Longest sealed credentials, in bytes: an escaped certificate and key of 4096 bytes each, plus
/// framing.
const MAX_SEALED_LEN: usize = 32 << 10;

const DOMAIN_SEPARATOR: &[u8] = b"windrose rotation 1";

/// The public half of a [`OneTimeKey`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

/// A private key that opens one message.
pub struct OneTimeKey {
    private: EphemeralPrivateKey,
    public: PublicKey,
}

/// Sealed credentials: the sealer's public key, nonce, ciphertext, tag.
#[derive(Clone, PartialEq, Eq)]
pub struct SealedCredentials(Vec<u8>);

/// What a sealed message is bound to.
#[derive(Clone, Copy, Debug)]
pub struct SealingContext<'a> {
    /// The cluster.
    pub cluster: Uuid,
    /// The rotation.
    pub rotation: Uuid,
    /// The receiving node.
    pub node: u16,
    /// The cluster's present secret, known to both sides.
    pub secret: &'a ClusterSecret,
}

/// The sealed credentials do not open: they are damaged, or sealed without the cluster's secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot unseal the new credentials of the cluster; requesting them again")]
pub struct CredentialsUnsealError;

impl SealingContext<'_> {
    fn associated_data(&self) -> Vec<u8> {
        let node = self.node.to_be_bytes();
        [DOMAIN_SEPARATOR, self.cluster.as_bytes(), self.rotation.as_bytes(), &node[..]].concat()
    }

    /// Derives the message key shared by the two sides.
    fn derive_key(
        &self,
        private: EphemeralPrivateKey,
        peer_key: PublicKey,
        keys: [PublicKey; 2],
    ) -> Option<SealingKey> {
        let peer_key = UnparsedPublicKey::new(&X25519, peer_key.0);
        let [sealing, opening] = keys;
        agree_ephemeral(private, &peer_key, |shared| {
            let drawn = Salt::new(HKDF_SHA256, self.secret.bytes()).extract(shared);
            let info = [&self.associated_data()[..], &sealing.0, &opening.0];
            let mut bytes = [0; 32];
            drawn.expand(&info, HKDF_SHA256).and_then(|key| key.fill(&mut bytes)).ok()?;
            Some(SealingKey::new(bytes))
        })
        .ok()?
    }
}

impl OneTimeKey {
    /// Generates a key.
    ///
    /// # Errors
    /// [`RandomnessUnavailable`].
    pub fn new() -> Result<Self, RandomnessUnavailable> {
        let random = SystemRandom::new();
        let private =
            EphemeralPrivateKey::generate(&X25519, &random).map_err(|_| RandomnessUnavailable)?;
        let public = private.compute_public_key().map_err(|_| RandomnessUnavailable)?;
        let public = PublicKey(public.as_ref().try_into().map_err(|_| RandomnessUnavailable)?);
        Ok(Self { private, public })
    }

    /// The public half, which others seal for.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        self.public
    }

    /// Opens `sealed`. Consumes the key: there is one attempt.
    ///
    /// # Errors
    /// [`CredentialsUnsealError`].
    pub fn open(
        self,
        of: &SealingContext<'_>,
        sealed: &SealedCredentials,
    ) -> Result<ClusterCredentials, CredentialsUnsealError> {
        let (sealing, bytes) = sealed.0.split_first_chunk::<32>().ok_or(CredentialsUnsealError)?;
        let sealing = PublicKey(*sealing);
        let key = of
            .derive_key(self.private, sealing, [sealing, self.public])
            .ok_or(CredentialsUnsealError)?;
        let plain = key.open(&of.associated_data(), bytes).ok_or(CredentialsUnsealError)?;
        let opened: ClusterCredentials =
            serde_json::from_slice(&plain).map_err(|_| CredentialsUnsealError)?;
        opened.transport_security.validate().map_err(|_| CredentialsUnsealError)?;
        Ok(opened)
    }
}

/// Seals `credentials` for the owner of the key `to`.
///
/// # Errors
/// [`RandomnessUnavailable`]; also if `to` is not a valid key.
pub fn seal_credentials(
    credentials: &ClusterCredentials,
    of: &SealingContext<'_>,
    to: PublicKey,
) -> Result<SealedCredentials, RandomnessUnavailable> {
    let OneTimeKey { private, public } = OneTimeKey::new()?;
    let key = of.derive_key(private, to, [public, to]).ok_or(RandomnessUnavailable)?;
    let plain = serde_json::to_vec(credentials).map_err(|_| RandomnessUnavailable)?;
    let bytes = key.seal_with_random_nonce(&of.associated_data(), &plain)?;
    Ok(SealedCredentials([&public.0[..], &bytes].concat()))
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

impl fmt::Debug for SealedCredentials {
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
        let bytes =
            decode_base64(&String::deserialize(from)?).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| de::Error::custom("a public key has 32 bytes"))
    }
}

impl Serialize for SealedCredentials {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&URL_SAFE_NO_PAD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for SealedCredentials {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let bytes = decode_base64(&String::deserialize(from)?);
        bytes.map(Self).ok_or_else(|| de::Error::custom("sealed credentials have at most 32 KiB"))
    }
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    // Check the length before decoding.
    let text = Some(text).filter(|text| text.len() <= MAX_SEALED_LEN * 2)?;
    URL_SAFE_NO_PAD.decode(text).ok().filter(|bytes| bytes.len() <= MAX_SEALED_LEN)
}

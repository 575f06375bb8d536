//! Secrets in their text form,

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::{CrcAlgorithm, checksum};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::hash::Hash;

/// Prefix of a secret.
const PREFIX: &str = "DHHC-1:";

/// Constant hashed with the name of the secret's owner.
const PURPOSE: &[u8] = b"NVMe-over-Fabrics";

/// Lengths in bytes that a secret may have.
const LENGTHS: [usize; 3] = [32, 48, 64];

/// Secret bytes: never printed, and erased when dropped.
#[derive(Clone)]
pub(crate) struct SecretBytes(Zeroizing<Vec<u8>>);

impl SecretBytes {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl PartialEq for SecretBytes {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for SecretBytes {}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("hidden")
    }
}

/// The secret of a host or of a subsystem; never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    transform: Option<Hash>,
    bytes: SecretBytes,
}

/// Why a text is not a secret. Does not contain the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSecret {
    /// Wrong form.
    #[error("a secret has the form DHHC-1:hh:BASE64:")]
    Form,
    /// Unknown hash of the transformation.
    #[error("a secret is transformed by 00 (nothing), 01 (SHA-256), 02 (SHA-384) or 03 (SHA-512)")]
    Transform,
    /// Not Base64.
    #[error("the third part of a secret is not Base64")]
    Base64,
    /// Invalid length.
    #[error("a secret has 32, 48 or 64 bytes and a checksum of 4")]
    Length,
    /// Wrong checksum: mistyped or incomplete.
    #[error("the checksum of the secret is wrong: it was mistyped")]
    Checksum,
}

impl Secret {
    /// Parses a secret: `DHHC-1:`, two digits for the hash of its transformation, `:`, and in
    /// Base64 the secret with its CRC-32. The final `:` may be missing, as in Linux. As in Linux,
    /// the length of a secret is not tied to the hash, although the tool that generates secrets
    /// ties them.
    ///
    /// # Errors
    /// [`BadSecret`].
    pub fn parse(text: &str) -> Result<Self, BadSecret> {
        let rest = text.strip_prefix(PREFIX).ok_or(BadSecret::Form)?;
        let (transform, rest) = rest.split_once(':').ok_or(BadSecret::Form)?;
        let transform = match transform {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err(BadSecret::Transform),
        };
        let encoded = rest.strip_suffix(':').unwrap_or(rest);
        let decoded = STANDARD.decode(encoded).map_err(|_| BadSecret::Base64)?;
        let decoded = Zeroizing::new(decoded);
        let (bytes, crc) = decoded.split_last_chunk().ok_or(BadSecret::Length)?;
        if !LENGTHS.contains(&bytes.len()) {
            return Err(BadSecret::Length);
        }
        let expected = checksum(CrcAlgorithm::Crc32IsoHdlc, bytes);
        if u64::from(u32::from_le_bytes(*crc)) != expected {
            return Err(BadSecret::Checksum);
        }
        Ok(Self { transform, bytes: SecretBytes::new(bytes.to_vec()) })
    }

    /// The hash of its transformation, if any.
    pub(super) fn hash(&self) -> Option<Hash> {
        self.transform
    }

    /// The key made from it for its owner, the host or the subsystem of this name.
    pub(super) fn key(&self, owner: &str) -> SecretBytes {
        match self.transform {
            None => self.bytes.clone(),
            Some(hash) => {
                let key = hash.hmac(self.bytes.bytes(), &[owner.as_bytes(), PURPOSE]);
                SecretBytes::new(key.as_ref().to_vec())
            }
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVMe Base 2.0, 8.13.5.7: the secret of nothing but zeroes (and others) with each hash;
    /// transformed by nvme-cli 2.3, which writes the key as if it were a secret.
    #[test]
    fn keys_match_nvme_cli() {
        for (secret, key) in KEYS {
            let secret = Secret::parse(secret).unwrap();
            let key = Secret::parse(key).unwrap();
            let made = secret.key("nqn.2014-08.org.nvmexpress:uuid:1");
            assert_eq!(made.bytes(), key.bytes.bytes());
            assert_ne!(made.bytes(), secret.key("nqn.2014-08.org.nvmexpress:uuid:2").bytes());
            assert_eq!(format!("{made:?} {secret:?}"), "hidden Secret");
        }
    }

    const KEYS: [(&str, &str); 3] = [
        (
            "DHHC-1:01:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACtVQoZ:",
            "DHHC-1:00:kcxKKkDGIyL6bvTQ4Bt9Ezc0BxjHs3BnOMW1NDVxqM+rLVUt:",
        ),
        (
            "DHHC-1:02:WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaBgfU4w==:",
            "DHHC-1:00:Zhz7nSBcJMcQTyeKff9vvda5vOigtsXngpFUgZn+95ZNn+EvsQopqV/0vlOVlXGuzR35Qw==:",
        ),
        (
            "DHHC-1:03:w8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDwyhgzig=:",
            "DHHC-1:00:Idk0Db/Az+H/qTpY2Vk4iqA4j5Ht2HprncXlYYaNpCpvrx0vMjidkh97hFrJ6xNN4Dvk8RWGrEwNXKVOpHFiFoLmQDw=:",
        ),
    ];
}

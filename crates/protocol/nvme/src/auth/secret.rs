//! Secrets as people hand them round, `DHHC-1:hh:…:` (NVMe Base 2.0, 8.13.5.8), and the keys made of
//! them (8.13.5.7).

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::{CrcAlgorithm, checksum};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::hash::Hash;

/// What a secret begins with.
const PREFIX: &str = "DHHC-1:";

/// What is transformed together with the name of the secret's owner.
const PURPOSE: &[u8] = b"NVMe-over-Fabrics";

/// Lengths in bytes that a secret may have.
const LENGTHS: [usize; 3] = [32, 48, 64];

/// Bytes that nobody is shown and nothing keeps.
#[derive(Clone)]
pub(crate) struct Hidden(Zeroizing<Vec<u8>>);

impl Hidden {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl PartialEq for Hidden {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Hidden {}

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("hidden")
    }
}

/// The secret of a host or of a subsystem; never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    transform: Option<Hash>,
    bytes: Hidden,
}

/// Why something is not a secret. Does not tell what was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSecret {
    /// It does not look like one.
    #[error("a secret has the form DHHC-1:hh:BASE64:")]
    Form,
    /// The hash of its transformation does not exist.
    #[error("a secret is transformed by 00 (nothing), 01 (SHA-256), 02 (SHA-384) or 03 (SHA-512)")]
    Transform,
    /// Not Base64.
    #[error("the third part of a secret is not Base64")]
    Base64,
    /// It is of a length that no secret has.
    #[error("a secret has 32, 48 or 64 bytes and a checksum of 4")]
    Length,
    /// It was mistyped, or is not whole.
    #[error("the checksum of the secret is wrong: it was mistyped")]
    Checksum,
}

impl Secret {
    /// Reads a secret: `DHHC-1:`, two digits for the hash of its transformation, `:`, and in Base64
    /// the secret with its CRC-32. The `:` at the end may be missing, as Linux has it. Nor does Linux
    /// tie the length of a secret to the hash, as the tool that makes them does.
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
        Ok(Self { transform, bytes: Hidden::new(bytes.to_vec()) })
    }

    /// The hash that it is made for, if any.
    pub(super) fn hash(&self) -> Option<Hash> {
        self.transform
    }

    /// The key that it is for its owner, the host or the subsystem of this name.
    pub(super) fn key(&self, owner: &str) -> Hidden {
        match self.transform {
            None => self.bytes.clone(),
            Some(hash) => {
                let key = hash.hmac(self.bytes.bytes(), &[owner.as_bytes(), PURPOSE]);
                Hidden::new(key.as_ref().to_vec())
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
    fn keys_are_those_of_nvme_cli() {
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

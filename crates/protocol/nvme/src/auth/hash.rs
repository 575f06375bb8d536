//! The hash functions of DH-HMAC-CHAP (NVMe Base 2.0, 8.13.5.2).

use ring::{digest, hmac};

/// A hash function, also that of an HMAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hash {
    /// SHA-256, 1.
    Sha256,
    /// SHA-384, 2.
    Sha384,
    /// SHA-512, 3.
    Sha512,
}

impl Hash {
    /// All,
    pub const ALL: [Self; 3] = [Self::Sha256, Self::Sha384, Self::Sha512];

    /// Longest digest in bytes.
    pub const MAX_LEN: usize = 64;

    /// The hash with this identifier.
    #[must_use]
    pub fn from_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| hash.id() == id)
    }

    /// Its identifier.
    #[must_use]
    pub fn id(self) -> u8 {
        match self {
            Self::Sha256 => 1,
            Self::Sha384 => 2,
            Self::Sha512 => 3,
        }
    }

    /// Length of its digest in bytes, as messages encode it (HL).
    pub(crate) fn hl(self) -> u8 {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// Length of its digest in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no hash is empty")]
    pub fn len(self) -> usize {
        usize::from(self.hl())
    }

    /// Computes the digest.
    pub(super) fn digest(self, bytes: &[u8]) -> digest::Digest {
        let algorithm = match self {
            Self::Sha256 => &digest::SHA256,
            Self::Sha384 => &digest::SHA384,
            Self::Sha512 => &digest::SHA512,
        };
        digest::digest(algorithm, bytes)
    }

    /// The HMAC of the concatenated `parts`.
    pub(crate) fn hmac(self, key: &[u8], parts: &[&[u8]]) -> hmac::Tag {
        let algorithm = match self {
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha384 => hmac::HMAC_SHA384,
            Self::Sha512 => hmac::HMAC_SHA512,
        };
        let mut context = hmac::Context::with_key(&hmac::Key::new(algorithm, key));
        for part in parts {
            context.update(part);
        }
        context.sign()
    }
}

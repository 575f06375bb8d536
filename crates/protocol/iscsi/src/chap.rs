//! CHAP challenges and responses (RFC 1994 4.1, RFC 7143 12.1.3).

use std::fmt;

use arrayvec::ArrayVec;
use md5::{Digest, Md5};
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// Length in bytes of the challenges that we send.
pub const CHALLENGE_LEN: usize = 32;

/// A hash that CHAP can use, by its number at IANA (PPP authentication algorithms).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// MD5, 5: supported by every implementation.
    Md5,
    /// SHA-256, 7.
    Sha256,
}

impl Algorithm {
    /// The algorithm with this number, if supported.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        match number {
            5 => Some(Self::Md5),
            7 => Some(Self::Sha256),
            _ => None,
        }
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Md5 => 5,
            Self::Sha256 => 7,
        }
    }

    /// The response of the holder of `secret` to `challenge`.
    #[must_use]
    pub fn response(self, id: u8, secret: &Secret, challenge: &[u8]) -> Response {
        fn hash<D: Digest>(id: u8, secret: &[u8], challenge: &[u8]) -> Response {
            let hash = D::new().chain_update([id]).chain_update(secret).chain_update(challenge);
            Response(hash.finalize().iter().copied().collect())
        }
        match self {
            Self::Md5 => hash::<Md5>(id, &secret.0, challenge),
            Self::Sha256 => hash::<Sha256>(id, &secret.0, challenge),
        }
    }
}

/// The answer to a challenge.
#[derive(Clone, Debug)]
pub struct Response(ArrayVec<u8, 32>);

impl Response {
    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Compares it with `given` in constant time.
    #[must_use]
    pub fn matches(&self, given: &[u8]) -> bool {
        self.0.as_slice().ct_eq(given).into()
    }
}

/// A secret; never printed.
#[derive(Clone)]
pub struct Secret(Box<[u8]>);

/// Error: invalid length of a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a CHAP secret has {} to {} bytes", Secret::MIN_LEN, Secret::MAX_LEN)]
pub struct BadSecret;

impl Secret {
    /// Fewest bytes: 96 bits, without which CHAP must not be used (RFC 7143 9.2.1).
    pub const MIN_LEN: usize = 12;
    /// Most bytes.
    pub const MAX_LEN: usize = 255;

    /// Makes a secret of these bytes.
    ///
    /// # Errors
    /// [`BadSecret`] if it is shorter than [`Self::MIN_LEN`] or longer than [`Self::MAX_LEN`].
    pub fn new(bytes: &[u8]) -> Result<Self, BadSecret> {
        let proper = (Self::MIN_LEN..=Self::MAX_LEN).contains(&bytes.len());
        if proper { Ok(Self(bytes.into())) } else { Err(BadSecret) }
    }

    /// Whether both are the same secret.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
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

    /// RFC 1994 4.1: the hash of identifier, secret and challenge; values made with another
    /// implementation (`printf '\x17secretsecret12challenge' | md5sum`).
    #[test]
    fn responses_are_hashes_of_identifier_secret_and_challenge() {
        let secret = Secret::new(b"secretsecret12").unwrap();
        let md5 = Algorithm::Md5.response(0x17, &secret, b"challenge");
        let sha = Algorithm::Sha256.response(0x17, &secret, b"challenge");
        assert_eq!(crate::value::Hex(md5.as_bytes()).to_string(), MD5);
        assert_eq!(crate::value::Hex(sha.as_bytes()).to_string(), SHA256);
        assert!(md5.matches(md5.as_bytes()) && !md5.matches(sha.as_bytes()) && !md5.matches(&[]));
    }

    const MD5: &str = "0xf5f15080e5cd4747c07556d2edb3e80f";
    const SHA256: &str = "0x58fad0a0fc83a672defeae87c7fcbb573ca60165b663a8d4f014d0dd5332d9d9";

    /// RFC 7143 9.2.1.
    #[test]
    fn short_secrets_are_refused_and_none_is_shown() {
        assert_eq!(Secret::new(b"elevenbytes").unwrap_err(), BadSecret);
        assert!(Secret::new(&[7; 256]).is_err());
        let (a, b) = (Secret::new(b"twelve bytes").unwrap(), Secret::new(b"twelve bytes").unwrap());
        assert!(a.matches(&b) && !a.matches(&Secret::new(b"twelve byteS").unwrap()));
        assert!(!format!("{a:?}").contains("twelve"));
    }
}

//! Pre-shared keys of TLS (NVMe/TCP Transport 1.0c, 3.6.1): their text form, the keys that TLS
//! uses, and their identities. TLS itself is elsewhere.
//!
//! | module | subject |
//! |---|---|
//! | `key` | `NVMeTLSkey-1:…:`, the retained key |
//! | `identity` | names of keys in a ClientHello |
//! | `psk` | the keys that TLS uses, in every way in which hosts derive them |

mod identity;
mod key;
mod psk;

use crate::auth::Hash;

pub use identity::Identity;
pub use key::{BadKey, TlsKey};
pub use psk::{Psk, Psks};

/// A cipher suite: cipher, and hash of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CipherSuite {
    /// `TLS_AES_128_GCM_SHA256`, 01.
    Aes128Sha256,
    /// `TLS_AES_256_GCM_SHA384`, 02.
    Aes256Sha384,
}

impl CipherSuite {
    /// All suites.
    pub const ALL: [Self; 2] = [Self::Aes128Sha256, Self::Aes256Sha384];

    /// Its two digits.
    #[must_use]
    pub fn digits(self) -> &'static str {
        match self {
            Self::Aes128Sha256 => "01",
            Self::Aes256Sha384 => "02",
        }
    }

    fn from_digits(digits: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|suite| suite.digits() == digits)
    }

    fn hash(self) -> Hash {
        match self {
            Self::Aes128Sha256 => Hash::Sha256,
            Self::Aes256Sha384 => Hash::Sha384,
        }
    }

    /// Length of its keys in bytes: that of its hash.
    #[must_use]
    pub fn key_len(self) -> usize {
        self.hash().len()
    }
}

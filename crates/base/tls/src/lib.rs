//! TLS 1.3 with pre-shared keys and nothing else (RFC 8446), sans-io, for both roles.
//!
//! * [`Acceptor`] takes the first bytes of a client until its [`Hello`] is whole: what it calls the keys that it has,
//!   and whether a key that is known here is one of them.
//! * [`Session`] is a connection by one [`Psk`]: ciphertext in and out, plaintext in and out. It belongs to no core and
//!   no socket, and is joined to one call by call.
//!
//! The cryptography and the messages behind the first are those of `s2n-tls`.

mod hello;
mod pipe;
mod session;
mod stream;

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

pub use hello::{Acceptor, Hello, Offer};
pub use session::Session;
pub use stream::Fault;

/// What the first record of a client begins with (RFC 8446, 5.1): a handshake.
pub const FIRST_BYTE: u8 = 22;

/// What protects a connection: a cipher, and the hash that its keys are made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// `TLS_AES_128_GCM_SHA256`.
    Aes128Sha256,
    /// `TLS_AES_256_GCM_SHA384`.
    Aes256Sha384,
}

impl Suite {
    /// Its number (RFC 8446, B.4).
    fn number(self) -> u16 {
        match self {
            Self::Aes128Sha256 => 0x1301,
            Self::Aes256Sha384 => 0x1302,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Aes128Sha256 => "TLS_AES_128_GCM_SHA256",
            Self::Aes256Sha384 => "TLS_AES_256_GCM_SHA384",
        }
    }
}

/// A key that both sides have, with the name that a client calls it by.
#[derive(Clone)]
pub struct Psk {
    identity: Vec<u8>,
    key: Zeroizing<Vec<u8>>,
    suite: Suite,
}

impl Psk {
    /// A key for connections that are protected by `suite`.
    #[must_use]
    pub fn new(identity: &[u8], key: &[u8], suite: Suite) -> Self {
        Self { identity: identity.to_vec(), key: Zeroizing::new(key.to_vec()), suite }
    }

    /// Its name.
    #[must_use]
    pub fn identity(&self) -> &[u8] {
        &self.identity
    }
}

impl PartialEq for Psk {
    fn eq(&self, other: &Self) -> bool {
        let same_key: bool = self.key.ct_eq(&other.key).into();
        same_key && self.identity == other.identity && self.suite == other.suite
    }
}

impl Eq for Psk {}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psk({})", String::from_utf8_lossy(&self.identity))
    }
}

/// Why a connection comes to nothing, or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The first bytes are no ClientHello, or it is longer than anybody's.
    #[error("the client does not begin with a ClientHello of TLS")]
    NoHello,
    /// The client knows older versions only.
    #[error("the client does not know TLS 1.3")]
    OldVersion,
    /// The client has no pre-shared key, or wants to use it without (EC)DHE.
    #[error("the client offers no pre-shared key with (EC)DHE")]
    NoKey,
    /// None of the client's keys is known, or it does not have the one that it names.
    #[error("the client has none of the keys that are known")]
    WrongKey,
    /// The other side has ended TLS, or its stream has ended.
    #[error("the other side has ended TLS")]
    Closed,
    /// The other side has sent an alert (RFC 8446, 6).
    #[error("the other side has sent alert {0}")]
    Alert(u8),
    /// The other side broke the protocol, or a record was changed on its way: what `s2n-tls` calls it.
    #[error("TLS has failed: {0}")]
    Failed(&'static str),
}

impl Error {
    /// What a client is told that is refused by its ClientHello, before anything is encrypted: a record with an alert.
    #[must_use]
    pub fn alert_record(self) -> Option<[u8; 7]> {
        const ALERT: u8 = 21;
        const FATAL: u8 = 2;
        let description = match self {
            Self::NoHello => 50,
            Self::OldVersion => 70,
            Self::NoKey => 109,
            Self::WrongKey => 51,
            Self::Closed | Self::Alert(_) | Self::Failed(_) => return None,
        };
        Some([ALERT, 3, 3, 0, 2, FATAL, description])
    }
}

//! TLS 1.3 with pre-shared keys only (RFC 8446), sans-io, for both roles.
//!
//! * [`Acceptor`] collects the first bytes of a client until its [`ClientHello`] is complete: the
//!   identities of its keys, and whether a key known here is one of them.
//! * [`Session`] is a connection with one [`Psk`]: ciphertext in and out, plaintext in and out. It
//!   belongs to no core and no socket; a byte stream is passed to each call.
//!
//! `s2n-tls` implements the cryptography and the messages after the first.

mod client_hello;
mod s2n_io;
mod session;
mod stream;

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

pub use client_hello::{Acceptor, ClientHello, PskOffer};
pub use session::Session;
pub use stream::StreamError;

/// Type of a client's first record (RFC 8446, 5.1): a handshake.
pub const HANDSHAKE_RECORD: u8 = 22;

/// A cipher, and the hash of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CipherSuite {
    /// `TLS_AES_128_GCM_SHA256`.
    Aes128Sha256,
    /// `TLS_AES_256_GCM_SHA384`.
    Aes256Sha384,
}

impl CipherSuite {
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

/// A pre-shared key with its identity.
#[derive(Clone)]
pub struct Psk {
    identity: Vec<u8>,
    key: Zeroizing<Vec<u8>>,
    suite: CipherSuite,
}

impl Psk {
    /// A key for connections with `suite`.
    #[must_use]
    pub fn new(identity: &[u8], key: &[u8], suite: CipherSuite) -> Self {
        Self { identity: identity.to_vec(), key: Zeroizing::new(key.to_vec()), suite }
    }

    /// Its identity.
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

/// Why a connection fails or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// The first bytes are no ClientHello, or it is too long.
    #[error("the client did not send a TLS ClientHello")]
    NotClientHello,
    /// The client supports only older versions.
    #[error("the client does not support TLS 1.3")]
    UnsupportedVersion,
    /// The client offers no pre-shared key, or only without (EC)DHE.
    #[error("the client offers no pre-shared key with (EC)DHE")]
    NoPskOffered,
    /// None of the client's keys is known, or it cannot prove that it has the one that it names.
    #[error("the client offers no known pre-shared key")]
    UnknownPsk,
    /// The peer has ended TLS, or its stream has ended.
    #[error("the peer closed TLS")]
    Closed,
    /// The peer has sent an alert (RFC 8446, 6).
    #[error("the peer sent alert {0}")]
    Alert(u8),
    /// The peer broke the protocol, or a record was altered: the name of the error in `s2n-tls`.
    #[error("TLS has failed: {0}")]
    ProtocolFailure(&'static str),
}

impl TlsError {
    /// The answer to a client that is refused after its ClientHello, before encryption: a record
    /// with an alert.
    #[must_use]
    pub fn alert_record(self) -> Option<[u8; 7]> {
        const ALERT: u8 = 21;
        const FATAL: u8 = 2;
        let description = match self {
            Self::NotClientHello => 50,
            Self::UnsupportedVersion => 70,
            Self::NoPskOffered => 109,
            Self::UnknownPsk => 51,
            Self::Closed | Self::Alert(_) | Self::ProtocolFailure(_) => return None,
        };
        Some([ALERT, 3, 3, 0, 2, FATAL, description])
    }
}

//! In-band authentication: DH-HMAC-CHAP (NVMe Base 2.0, 8.13; 2.1, 8.3.4.5), both roles, sans-io.
//!
//! The host authenticates to a controller on each queue after its Connect; if the host wants, the
//! controller authenticates as well. The host sends messages by Authentication Send and fetches the
//! controller's by Authentication Receive:
//!
//! ```text
//!  host: Prover                                     controller: Responder
//!    AUTH_Negotiate             ── Send ──────▶      choose hash and group, g^x
//!    g^y, key, proof            ◀── Receive ──       DH-HMAC-CHAP_Challenge: C1, g^x
//!    DH-HMAC-CHAP_Reply         ── Send ──────▶      key, check the host's proof
//!    check the controller's     ◀── Receive ──       DH-HMAC-CHAP_Success1: its proof, if asked
//!    DH-HMAC-CHAP_Success2      ── Send ──────▶      (only if its proof was asked for)
//! ```
//!
//! Exponentiations take milliseconds to tens of them. The machines do not compute them but return a
//! [`DhComputation`], which the driver runs where it delays no other work, and take its result. The
//! caller provides random bytes and timeouts: a peer that falls silent in the middle of a
//! transaction has to be disconnected.
//!
//! Secure channel concatenation (SC_C) is refused.

mod command;
mod controller_authenticator;
mod group;
mod hash;
mod host_authenticator;
mod message;
mod policy;
mod proof;
mod secret;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use zeroize::Zeroizing;

pub use command::{AuthCommand, write_message};
pub use controller_authenticator::{BufferTooShort, ControllerAuthenticator};
pub use group::{DhComputation, DhGroup, DhResult};
pub use hash::Hash;
pub use host_authenticator::{HostAuthenticator, HostStep};
pub use policy::{AuthPolicy, EmptyPolicy};
pub(crate) use secret::SecretBytes;
pub use secret::{BadSecret, Secret};

/// SECP of Authentication Send and Receive: a protocol of NVMe (NVMe Base 2.0, 6.1 and 6.2).
pub const SECURITY_PROTOCOL: u8 = 0xe9;

/// SPSP0 and SPSP1 of Authentication Send and Receive: authentication (NVMe Base 2.0, 6.1 and 6.2).
pub const SECURITY_PROTOCOL_SPECIFIC: [u8; 2] = [0x01, 0x01];

/// Longest accepted message, in bytes. The longest valid one is a Reply with SHA-512 and ffdhe8192,
/// 1168 bytes long; Linux has buffers of this size.
pub const MAX_MESSAGE_BYTES: usize = 4096;

wire::open_enum! {
    /// Why an authentication has failed: the reason code explanation of AUTH_Failure1 and
    /// AUTH_Failure2 (NVMe Base 2.0, 8.13.4). The reason code is always 1, authentication failure.
    pub enum FailureExplanation: u8 {
        /// Wrong proof.
        AuthenticationFailed = 0x01,
        /// No authentication protocol in common.
        ProtocolUnusable = 0x02,
        /// Secure channel concatenation is unsupported or unwanted.
        ConcatenationMismatch = 0x03,
        /// No hash in common.
        HashUnusable = 0x04,
        /// No Diffie-Hellman group in common.
        GroupUnusable = 0x05,
        /// An invalid message.
        IncorrectPayload = 0x06,
        /// An unexpected message.
        IncorrectMessage = 0x07,
    }
}

/// How an authentication has failed; the connection is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthFailure {
    /// This side has refused the other.
    Refused(FailureExplanation),
    /// The other side has refused this one.
    RefusedByPeer(FailureExplanation),
}

impl AuthFailure {
    /// The authentication was not completed.
    const ABANDONED: Self = Self::Refused(FailureExplanation::AuthenticationFailed);
}

/// Names, secrets and policy of an authentication.
#[derive(Clone, Debug)]
pub struct Config {
    /// NQN of the host.
    pub host_nqn: String,
    /// NQN of the subsystem.
    pub subsystem_nqn: String,
    /// The host's secret.
    pub host_secret: Secret,
    /// The controller's secret. A [`ControllerAuthenticator`] without it refuses hosts that request
    /// its proof; a [`HostAuthenticator`] with it requests the proof and insists on it.
    pub controller_secret: Option<Secret>,
    /// Accepted hashes and groups.
    pub policy: AuthPolicy,
}

/// A [`Config`] shared by the queues of an association.
pub type SharedConfig = Arc<Config>;

/// Random data of one transaction. Never to be used twice.
pub struct TransactionRandomness {
    sequence: NonZeroU32,
    challenge: [u8; Hash::MAX_LEN],
    exponent: Zeroizing<[u8; group::MAX_EXPONENT_LEN]>,
}

impl TransactionRandomness {
    /// Number of random bytes needed.
    pub const LEN: usize = Hash::MAX_LEN + group::MAX_EXPONENT_LEN;

    /// From a number of this side's [`SequenceCounter`] and cryptographically secure random bytes.
    #[must_use]
    pub fn new(sequence: NonZeroU32, bytes: &[u8; Self::LEN]) -> Self {
        let mut challenge = [0; Hash::MAX_LEN];
        let mut exponent = Zeroizing::new([0; group::MAX_EXPONENT_LEN]);
        let (first, second) = bytes.split_at(Hash::MAX_LEN);
        challenge.copy_from_slice(first);
        exponent.copy_from_slice(second);
        Self { sequence, challenge, exponent }
    }

    fn challenge(&self, hash: Hash) -> Vec<u8> {
        self.challenge.iter().take(hash.len()).copied().collect()
    }
}

impl fmt::Debug for TransactionRandomness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TransactionRandomness")
    }
}

/// The sequence numbers of a host or a subsystem: they start anywhere and increase by one, skipping
/// 0, which means no number (NVMe Base 2.0, 8.13.5.3 and 8.13.5.4).
#[derive(Clone, Copy, Debug)]
pub struct SequenceCounter(u32);

impl SequenceCounter {
    /// Starts after this number, which has to be random.
    #[must_use]
    pub fn new(random: u32) -> Self {
        Self(random)
    }

    /// The next number.
    pub fn take(&mut self) -> NonZeroU32 {
        let next = NonZeroU32::new(self.0.wrapping_add(1)).unwrap_or(NonZeroU32::MIN);
        self.0 = next.get();
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_leave_out_zero() {
        let mut sequence = SequenceCounter::new(u32::MAX - 1);
        assert_eq!([(); 3].map(|()| sequence.take().get()), [u32::MAX, 1, 2]);
    }
}

//! In-band authentication: DH-HMAC-CHAP (NVMe Base 2.0, 8.13; 2.1, 8.3.4.5), both roles, sans-io.
//!
//! The host proves who it is to a controller, on each queue after its Connect; if it wants, the
//! controller proves itself, too. The host sends by Authentication Send and asks for the
//! controller's messages by Authentication Receive:
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
//! Powers in a group take milliseconds to tens of them. The machines do not raise them: they
//! give out [`Work`], which the driver runs where it delays nobody, and take what came of it. The
//! random bytes of a transaction are the caller's, as are timeouts: whoever is in the middle of a
//! transaction and silent is to be let go.
//!
//! Secure channel concatenation (SC_C) is refused.

mod command;
mod group;
mod hash;
mod message;
mod policy;
mod proof;
mod prover;
mod responder;
mod secret;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use zeroize::Zeroizing;

pub use command::{AuthCommand, write_message};
pub use group::{Done, Group, Work};
pub use hash::Hash;
pub use policy::{EmptyPolicy, Policy};
pub use prover::{Next, Prover};
pub use responder::{Responder, TooShort};
pub(crate) use secret::Hidden;
pub use secret::{BadSecret, Secret};

/// SECP of Authentication Send and Receive: a protocol of NVMe (NVMe Base 2.0, 6.1 and 6.2).
pub const SECURITY_PROTOCOL: u8 = 0xe9;

/// SPSP0 and SPSP1 of Authentication Send and Receive: authentication (NVMe Base 2.0, 6.1 and 6.2).
pub const SECURITY_PROTOCOL_SPECIFIC: [u8; 2] = [0x01, 0x01];

/// Longest message that is taken, in bytes. The longest that makes sense is a Reply with SHA-512 and
/// ffdhe8192, 1168 bytes long; Linux has buffers of this size.
pub const MAX_MESSAGE_BYTES: usize = 4096;

wire::open_enum! {
    /// Why an authentication has failed: the reason code explanation of AUTH_Failure1 and
    /// AUTH_Failure2 (NVMe Base 2.0, 8.13.4). The reason code is always 1, authentication failure.
    pub enum Explanation: u8 {
        /// What was proved is wrong.
        AuthenticationFailed = 0x01,
        /// No authentication protocol in common.
        ProtocolUnusable = 0x02,
        /// Secure channel concatenation is not what the other side wants or can do.
        ConcatenationMismatch = 0x03,
        /// No hash in common.
        HashUnusable = 0x04,
        /// No Diffie-Hellman group in common.
        GroupUnusable = 0x05,
        /// A message that cannot be read, or says what it must not.
        IncorrectPayload = 0x06,
        /// A message that is not due.
        IncorrectMessage = 0x07,
    }
}

/// How an authentication has failed; the connection is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This side has refused the other.
    Refused(Explanation),
    /// The other side has refused this one.
    RefusedByPeer(Explanation),
}

impl End {
    /// Nobody has come to an end, and nothing is proved.
    const GIVEN_UP: Self = Self::Refused(Explanation::AuthenticationFailed);
}

/// Who authenticates to whom, and with what.
#[derive(Clone, Debug)]
pub struct Config {
    /// NQN of the host.
    pub host_nqn: String,
    /// NQN of the subsystem.
    pub subsystem_nqn: String,
    /// What the host proves to know.
    pub host_secret: Secret,
    /// What the controller proves to know. A [`Responder`] without it refuses hosts that ask for its
    /// proof; a [`Prover`] with it asks for the proof and insists on it.
    pub controller_secret: Option<Secret>,
    /// What may be agreed on.
    pub policy: Policy,
}

/// A [`Config`], which the queues of an association have in common.
pub type SharedConfig = Arc<Config>;

/// What one transaction needs of the unforeseeable. Never to be used twice.
pub struct Fresh {
    sequence: NonZeroU32,
    challenge: [u8; Hash::MAX_LEN],
    exponent: Zeroizing<[u8; group::MAX_EXPONENT_LEN]>,
}

impl Fresh {
    /// Random bytes that are needed.
    pub const BYTES: usize = Hash::MAX_LEN + group::MAX_EXPONENT_LEN;

    /// Of a number of this side's [`Sequence`], and bytes of a source that suits secrets.
    #[must_use]
    pub fn new(sequence: NonZeroU32, bytes: &[u8; Self::BYTES]) -> Self {
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

impl fmt::Debug for Fresh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fresh")
    }
}

/// The sequence numbers of a host or a subsystem: they begin anywhere and go on by one, but for 0,
/// which means that there is none (NVMe Base 2.0, 8.13.5.3 and 8.13.5.4).
#[derive(Clone, Copy, Debug)]
pub struct Sequence(u32);

impl Sequence {
    /// Numbers that begin after this one, which is to be random.
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
        let mut sequence = Sequence::new(u32::MAX - 1);
        assert_eq!([(); 3].map(|()| sequence.take().get()), [u32::MAX, 1, 2]);
    }
}

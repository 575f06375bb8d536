//! Proofs of knowledge of a secret

use std::fmt;

use ring::hmac::Tag;
use subtle::ConstantTimeEq;

use super::Config;
use super::hash::Hash;
use super::secret::Secret;

/// SC_C, which the proof covers: no secure channel concatenation.
const NO_CONCATENATION: u8 = 0;

/// The response to a challenge. Never printed: an expected response would authenticate any reader
/// of the log.
#[derive(Clone)]
pub(super) struct Proof(Tag);

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Proof")
    }
}

impl Proof {
    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_ref()
    }

    /// Compares it with `given` in constant time.
    pub(super) fn matches(&self, given: &[u8]) -> bool {
        self.bytes().ct_eq(given).into()
    }
}

/// Names and negotiated parameters that a proof covers.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProofContext<'a> {
    pub(super) config: &'a Config,
    pub(super) hash: Hash,
    /// T_ID.
    pub(super) transaction: u16,
    /// The shared DH secret, as long as the group's modulus; `None` without a group.
    pub(super) shared: Option<&'a [u8]>,
}

impl ProofContext<'_> {
    /// The host's response to the controller's challenge C1, which has sequence number S1.
    pub(super) fn host_proof(&self, challenge: &[u8], sequence: u32) -> Proof {
        let Config { host_nqn, subsystem_nqn, host_secret, .. } = self.config;
        self.proof(host_secret, "HostHost", [host_nqn, subsystem_nqn], challenge, sequence)
    }

    /// The controller's response to the host's challenge C2, which has sequence number S2; `None`
    /// without a secret of the controller.
    pub(super) fn controller_proof(&self, challenge: &[u8], sequence: u32) -> Option<Proof> {
        let Config { host_nqn, subsystem_nqn, controller_secret, .. } = self.config;
        let secret = controller_secret.as_ref()?;
        Some(self.proof(secret, "Controller", [subsystem_nqn, host_nqn], challenge, sequence))
    }

    /// HMAC(key, Ca || S || T_ID || SC_C || role || own name || 0 || name of the other).
    fn proof(
        &self,
        secret: &Secret,
        role: &str,
        [own, other]: [&str; 2],
        challenge: &[u8],
        sequence: u32,
    ) -> Proof {
        let augmented = self.augmented(challenge);
        let challenge = augmented.as_ref().map_or(challenge, AsRef::as_ref);
        Proof(self.hash.hmac(
            secret.key(own).bytes(),
            &[
                challenge,
                &sequence.to_le_bytes(),
                &self.transaction.to_le_bytes(),
                &[NO_CONCATENATION],
                role.as_bytes(),
                own.as_bytes(),
                &[0],
                other.as_bytes(),
            ],
        ))
    }

    /// With a group the challenge is HMAC(H(shared secret), C), which an eavesdropper cannot
    /// compute.
    fn augmented(&self, challenge: &[u8]) -> Option<Tag> {
        let session_key = self.hash.digest(self.shared?);
        Some(self.hash.hmac(session_key.as_ref(), &[challenge]))
    }
}

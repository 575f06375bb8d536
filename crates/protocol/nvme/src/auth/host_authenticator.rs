//! The host's side: authenticates on one queue.

use std::mem;

use super::group::{DhComputation, DhGroup, DhResult};
use super::hash::Hash;
use super::message::{self, Challenge, MessageHeader, MessageKind, Negotiate, Reply, Success1};
use super::proof::{Proof, ProofContext};
use super::{AuthFailure, FailureExplanation, SharedConfig, TransactionRandomness};

/// What the driver has to do next.
#[derive(Debug)]
pub enum HostStep {
    /// Send this by Authentication Send, then pass the result of Authentication Receive to
    /// [`HostAuthenticator::receive`].
    Send(Vec<u8>),
    /// Run this and pass the result to [`HostAuthenticator::on_computed`].
    Compute(DhComputation),
    /// All required proofs succeeded. Send this last, if present.
    Authenticated(Option<Vec<u8>>),
    /// It failed. Send this last, if present, and close the connection.
    Failed(AuthFailure, Option<Vec<u8>>),
}

/// Authenticates a host on one queue, once: another time needs another instance.
///
/// It requests the controller's proof, and insists on it, if the controller's secret is configured.
#[derive(Debug)]
pub struct HostAuthenticator {
    config: SharedConfig,
    transaction: u16,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Waits for Challenge.
    Challenge,
    /// Computing the own public value and the shared secret, by the computation with this
    /// identifier.
    Computing(u64, ControllerChallenge),
    /// Waits for Success1, with this proof if requested.
    Success1(Hash, Option<Proof>),
    /// Done.
    Authenticated,
    /// Failed.
    Failed(AuthFailure),
}

/// The controller's challenge, and the own one.
#[derive(Debug)]
struct ControllerChallenge {
    hash: Hash,
    group: DhGroup,
    challenge: Vec<u8>,
    sequence: u32,
    host_challenge: Vec<u8>,
    host_sequence: u32,
}

impl HostAuthenticator {
    /// Starts. Returns the message to send by Authentication Send. `transaction`: T_ID, unique
    /// among the transactions on this queue.
    #[must_use]
    pub fn start(config: SharedConfig, transaction: u16) -> (Self, Vec<u8>) {
        let message = Negotiate::encode(transaction, &config.policy);
        (Self { config, transaction, state: State::Challenge }, message)
    }

    /// Whether all required proofs succeeded.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        matches!(self.state, State::Authenticated)
    }

    /// Handles the data of an Authentication Receive. `fresh` is called once the controller has
    /// chosen.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        fresh: impl FnOnce() -> TransactionRandomness,
    ) -> HostStep {
        if let State::Failed(end) = self.state {
            return HostStep::Failed(end, None);
        }
        let Some(head) = MessageHeader::read(bytes) else {
            return self.refuse(FailureExplanation::IncorrectPayload);
        };
        let kind = head.kind();
        if kind == Some(MessageKind::Failure1) {
            return match message::read_failure(bytes) {
                Some(explanation) => self.fail(AuthFailure::RefusedByPeer(explanation), None),
                None => self.refuse(FailureExplanation::IncorrectPayload),
            };
        }
        let due = match self.state {
            State::Challenge => kind == Some(MessageKind::Challenge),
            State::Success1(..) => kind == Some(MessageKind::Success1),
            _ => false,
        };
        if !due {
            return self.refuse(FailureExplanation::IncorrectMessage);
        }
        if head.transaction() != self.transaction {
            return self.refuse(FailureExplanation::IncorrectPayload);
        }
        // On any early return nothing is authenticated.
        match mem::replace(&mut self.state, State::Failed(AuthFailure::ABANDONED)) {
            State::Challenge => self.challenge(bytes, fresh),
            State::Success1(hash, expected) => self.success1(bytes, hash, expected.as_ref()),
            _ => self.refuse(FailureExplanation::IncorrectMessage),
        }
    }

    /// Takes the result of a [`DhComputation`]; `None` if it is not the current one.
    pub fn on_computed(&mut self, done: DhResult) -> Option<HostStep> {
        let DhResult { id: ticket, public: Some(public), shared: Some(shared) } = done else {
            return None;
        };
        match mem::replace(&mut self.state, State::Failed(AuthFailure::ABANDONED)) {
            State::Computing(wanted, asked) if wanted == ticket => {
                Some(self.reply(&asked, &public, Some(shared.bytes())))
            }
            state => {
                self.state = state;
                None
            }
        }
    }

    /// DH-HMAC-CHAP_Challenge.
    fn challenge(
        &mut self,
        bytes: &[u8],
        fresh: impl FnOnce() -> TransactionRandomness,
    ) -> HostStep {
        let (challenge, peer) = match self.read_challenge(bytes) {
            Ok(read) => read,
            Err(explanation) => return self.refuse(explanation),
        };
        let fresh = fresh();
        let asked = ControllerChallenge {
            hash: challenge.hash,
            group: challenge.group,
            challenge: challenge.challenge.to_vec(),
            sequence: challenge.sequence,
            host_challenge: fresh.challenge(challenge.hash),
            host_sequence: fresh.sequence.get(),
        };
        match challenge.group.field() {
            None => self.reply(&asked, &[], None),
            Some(field) => {
                let exponent = field.exponent(&fresh);
                let work = DhComputation::new(field, exponent, true, peer);
                self.state = State::Computing(work.id(), asked);
                HostStep::Compute(work)
            }
        }
    }

    /// Parses the message. Returns also the controller's public value, if there is a group.
    fn read_challenge<'a>(
        &self,
        bytes: &'a [u8],
    ) -> Result<(Challenge<'a>, Option<Vec<u8>>), FailureExplanation> {
        let challenge = Challenge::parse(bytes, &self.config.policy)?;
        let peer = challenge.group.check_public(challenge.public)?;
        if challenge.sequence == 0 {
            return Err(FailureExplanation::IncorrectPayload);
        }
        Ok((challenge, peer))
    }

    /// DH-HMAC-CHAP_Reply. It has a sequence number even without a challenge: 0 is for secure
    /// channels.
    fn reply(
        &mut self,
        asked: &ControllerChallenge,
        public: &[u8],
        shared: Option<&[u8]>,
    ) -> HostStep {
        let (config, hash) = (&self.config, asked.hash);
        let session = ProofContext { config, hash, transaction: self.transaction, shared };
        let response = session.host_proof(&asked.challenge, asked.sequence);
        let expected = session.controller_proof(&asked.host_challenge, asked.host_sequence);
        let message = Reply {
            response: response.bytes(),
            challenge: expected.is_some().then_some(&asked.host_challenge),
            sequence: asked.host_sequence,
            public,
        }
        .encode(self.transaction, hash, asked.group);
        self.state = State::Success1(hash, expected);
        HostStep::Send(message)
    }

    /// DH-HMAC-CHAP_Success1.
    fn success1(&mut self, bytes: &[u8], hash: Hash, expected: Option<&Proof>) -> HostStep {
        let Some(success) = Success1::parse(bytes, hash) else {
            return self.refuse(FailureExplanation::IncorrectPayload);
        };
        let last = match (expected, success.response) {
            (None, None) => None,
            (Some(expected), Some(given)) if expected.matches(given) => {
                Some(message::success2(self.transaction))
            }
            (Some(_), Some(_)) => return self.refuse(FailureExplanation::AuthenticationFailed),
            _ => return self.refuse(FailureExplanation::IncorrectPayload),
        };
        self.state = State::Authenticated;
        HostStep::Authenticated(last)
    }

    /// Refuses the controller and tells it why.
    fn refuse(&mut self, explanation: FailureExplanation) -> HostStep {
        let message = message::failure2(self.transaction, explanation);
        self.fail(AuthFailure::Refused(explanation), Some(message))
    }

    fn fail(&mut self, end: AuthFailure, message: Option<Vec<u8>>) -> HostStep {
        self.state = State::Failed(end);
        HostStep::Failed(end, message)
    }
}

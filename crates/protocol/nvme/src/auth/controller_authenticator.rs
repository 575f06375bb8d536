//! The controller's side: authenticates the host of one queue.

use std::mem;

use super::group::{DhComputation, DhGroup, DhResult};
use super::hash::Hash;
use super::message::{self, Challenge, MessageHeader, MessageKind, Negotiate, Reply, Success1};
use super::proof::{Proof, ProofContext};
use super::secret::SecretBytes;
use super::{
    AuthFailure, Config, FailureExplanation, MAX_MESSAGE_BYTES, SharedConfig, TransactionRandomness,
};

/// The host's buffer is too short for the message: the command fails with Invalid Field, and the
/// message stays pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message is {needed} bytes long")]
pub struct BufferTooShort {
    /// Length of the message in bytes.
    pub needed: usize,
}

/// Authenticates the host of one queue, in consecutive transactions.
///
/// The driver passes it the data of each Authentication Send ([`Self::on_send`]) and always
/// completes the command with success: the host learns of errors by its next Authentication Receive
/// ([`Self::on_receive`]). If `on_send` returns a [`DhComputation`], the driver runs it and passes
/// the result to [`Self::on_computed`] before it completes the command. After each call the driver
/// checks [`Self::failure`]: if set, it closes the connection once pending output is sent.
///
/// An authenticated host may authenticate again; it stays authenticated meanwhile, until a failure.
/// A host that starts anew in the middle of a transaction has abandoned that one.
#[derive(Debug, Default)]
pub struct ControllerAuthenticator {
    state: State,
    /// T_ID of the current transaction, or of the last one.
    transaction: u16,
    /// Identifier of the newest [`DhComputation`]; results of older ones are ignored.
    computation_id: u64,
    authenticated: bool,
}

#[derive(Debug, Default)]
enum State {
    /// No message yet, or the last transaction is complete.
    #[default]
    Idle,
    /// Computing the own public value.
    ComputingPublic(Transaction),
    /// Challenge, with the own public value, waits to be fetched.
    Challenge(Transaction, Vec<u8>),
    /// Waits for Reply.
    Reply(Transaction),
    /// Computing the shared secret, to check this reply.
    ComputingShared(Transaction, HostReply),
    /// Success1, with the own proof if requested, waits to be fetched.
    Success1(Hash, Option<Proof>),
    /// Waits for Success2.
    Success2,
    /// Failure1 waits to be fetched.
    SendingFailure(FailureExplanation),
    /// The connection is to be closed.
    Ended(AuthFailure),
}

/// Negotiated parameters and the challenge.
#[derive(Debug)]
struct Transaction {
    config: SharedConfig,
    hash: Hash,
    group: DhGroup,
    sequence: u32,
    challenge: Vec<u8>,
    exponent: Option<SecretBytes>,
}

/// Contents of a Reply without the public value.
#[derive(Debug)]
struct HostReply {
    response: Vec<u8>,
    /// The host's challenge and its sequence number.
    host_challenge: Option<(Vec<u8>, u32)>,
}

impl ControllerAuthenticator {
    /// Whether the host is authenticated, so that its commands on this queue may be executed.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// Whether no transaction is in progress.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle)
    }

    /// Why it failed, if so; then the connection has to be closed.
    #[must_use]
    pub fn failure(&self) -> Option<AuthFailure> {
        match self.state {
            State::Ended(end) => Some(end),
            _ => None,
        }
    }

    /// Handles the data of an Authentication Send. `begin` is called when a transaction begins and
    /// returns the configuration for it, as the secrets may have changed.
    ///
    /// Complete the command at once, or, if this returns a [`DhComputation`], after
    /// [`on_computed`](Self::on_computed).
    pub fn on_send(
        &mut self,
        bytes: &[u8],
        begin: impl FnOnce() -> (SharedConfig, TransactionRandomness),
    ) -> Option<DhComputation> {
        if matches!(self.state, State::SendingFailure(_) | State::Ended(_)) {
            return None;
        }
        let Some(head) = MessageHeader::read(bytes).filter(|_| bytes.len() <= MAX_MESSAGE_BYTES)
        else {
            return self.refuse(FailureExplanation::IncorrectPayload);
        };
        let kind = head.kind();
        if kind == Some(MessageKind::Negotiate) {
            self.transaction = head.transaction();
            return self.negotiate(bytes, begin);
        }
        let due = match kind {
            Some(MessageKind::Reply) => matches!(self.state, State::Reply(_)),
            // Linux 6.3 to 6.5 send it even if the controller was not asked for a proof.
            Some(MessageKind::Success2) => match self.state {
                State::Idle => self.authenticated,
                ref state => matches!(state, State::Success2),
            },
            // The host may abort any transaction that it has begun.
            Some(MessageKind::Failure2) => !matches!(self.state, State::Idle) || self.authenticated,
            _ => false,
        };
        if !due {
            return self.refuse(FailureExplanation::IncorrectMessage);
        }
        if head.transaction() != self.transaction {
            return self.refuse(FailureExplanation::IncorrectPayload);
        }
        match kind {
            Some(MessageKind::Reply) => self.reply(bytes),
            Some(MessageKind::Success2) if message::is_success2(bytes) => {
                self.state = State::Idle;
                self.authenticated = true;
                None
            }
            Some(MessageKind::Failure2) => self.fail(message::read_failure(bytes)),
            _ => self.refuse(FailureExplanation::IncorrectPayload),
        }
    }

    /// Takes the result of a [`DhComputation`]. Results of older ones are ignored.
    pub fn on_computed(&mut self, done: DhResult) {
        if done.id != self.computation_id {
            return;
        }
        self.state = match (mem::replace(&mut self.state, State::Idle), done) {
            (State::ComputingPublic(transaction), DhResult { public: Some(public), .. }) => {
                State::Challenge(transaction, public)
            }
            (State::ComputingShared(transaction, given), DhResult { shared: Some(shared), .. }) => {
                self.check(&transaction, &given, Some(shared.bytes()))
            }
            (state, _) => state,
        };
        self.revoke_if_refused();
    }

    /// The message for an Authentication Receive with a buffer of `allocation` bytes; the driver
    /// fills up the buffer with zeroes.
    ///
    /// # Errors
    /// [`BufferTooShort`] if the message does not fit.
    pub fn on_receive(&mut self, allocation: usize) -> Result<Vec<u8>, BufferTooShort> {
        let due = matches!(
            self.state,
            State::Challenge(..) | State::Success1(..) | State::SendingFailure(_) | State::Ended(_)
        );
        if !due {
            self.refuse(FailureExplanation::IncorrectMessage);
        }
        let message = self.message();
        if message.len() > allocation {
            return Err(BufferTooShort { needed: message.len() });
        }
        self.state = match mem::replace(&mut self.state, State::Idle) {
            State::Challenge(transaction, _) => State::Reply(transaction),
            State::Success1(_, Some(_)) => State::Success2,
            State::Success1(_, None) => {
                self.authenticated = true;
                State::Idle
            }
            State::SendingFailure(explanation) => State::Ended(AuthFailure::Refused(explanation)),
            state => state,
        };
        Ok(message)
    }

    /// The pending message.
    fn message(&self) -> Vec<u8> {
        let explanation = match &self.state {
            State::Challenge(transaction, public) => {
                return Challenge {
                    transaction: self.transaction,
                    hash: transaction.hash,
                    group: transaction.group,
                    sequence: transaction.sequence,
                    challenge: &transaction.challenge,
                    public,
                }
                .encode();
            }
            State::Success1(hash, proof) => {
                let response = proof.as_ref().map(Proof::bytes);
                return Success1 { response }.encode(self.transaction, *hash);
            }
            State::SendingFailure(explanation)
            | State::Ended(AuthFailure::Refused(explanation)) => *explanation,
            _ => FailureExplanation::IncorrectMessage,
        };
        message::failure1(self.transaction, explanation)
    }

    /// AUTH_Negotiate: chooses hash and group
    fn negotiate(
        &mut self,
        bytes: &[u8],
        begin: impl FnOnce() -> (SharedConfig, TransactionRandomness),
    ) -> Option<DhComputation> {
        let (config, fresh) = begin();
        let (hash, group) = match choose(bytes, &config) {
            Ok(chosen) => chosen,
            Err(explanation) => return self.refuse(explanation),
        };
        let exponent = group.field().map(|field| field.exponent(&fresh));
        let (sequence, challenge) = (fresh.sequence.get(), fresh.challenge(hash));
        let transaction = Transaction { config, hash, group, sequence, challenge, exponent };
        let work = self.start_computation(&transaction, None);
        self.state = match work {
            Some(_) => State::ComputingPublic(transaction),
            None => State::Challenge(transaction, Vec::new()),
        };
        work
    }

    /// Starts computing the own public value or, given the host's, the shared secret.
    fn start_computation(
        &mut self,
        transaction: &Transaction,
        peer: Option<Vec<u8>>,
    ) -> Option<DhComputation> {
        let field = transaction.group.field()?;
        let exponent = transaction.exponent.clone()?;
        let work = DhComputation::new(field, exponent, peer.is_none(), peer);
        self.computation_id = work.id();
        Some(work)
    }

    /// DH-HMAC-CHAP_Reply.
    fn reply(&mut self, bytes: &[u8]) -> Option<DhComputation> {
        let State::Reply(transaction) = mem::replace(&mut self.state, State::Idle) else {
            return self.refuse(FailureExplanation::IncorrectMessage);
        };
        let (given, public) = match read_reply(bytes, &transaction) {
            Ok(read) => read,
            Err(explanation) => return self.refuse(explanation),
        };
        let work = match public {
            Some(public) => self.start_computation(&transaction, Some(public)),
            None => None,
        };
        self.state = match work {
            Some(_) => State::ComputingShared(transaction, given),
            None => self.check(&transaction, &given, None),
        };
        self.revoke_if_refused();
        work
    }

    /// Checks the host's proof, and computes the own one if requested.
    fn check(&self, transaction: &Transaction, given: &HostReply, shared: Option<&[u8]>) -> State {
        let Transaction { ref config, hash, sequence, ref challenge, .. } = *transaction;
        let session = ProofContext { config, hash, transaction: self.transaction, shared };
        if !session.host_proof(challenge, sequence).matches(&given.response) {
            return State::SendingFailure(FailureExplanation::AuthenticationFailed);
        }
        match &given.host_challenge {
            None => State::Success1(hash, None),
            Some((challenge, sequence)) => match session.controller_proof(challenge, *sequence) {
                Some(proof) => State::Success1(hash, Some(proof)),
                None => State::SendingFailure(FailureExplanation::AuthenticationFailed),
            },
        }
    }

    /// Restores an invariant: a refused host is not authenticated.
    fn revoke_if_refused(&mut self) {
        if matches!(self.state, State::SendingFailure(_) | State::Ended(_)) {
            self.authenticated = false;
        }
    }

    /// Refuses the host; it learns the reason by its next Authentication Receive.
    fn refuse(&mut self, explanation: FailureExplanation) -> Option<DhComputation> {
        self.state = State::SendingFailure(explanation);
        self.revoke_if_refused();
        None
    }

    /// The host has aborted.
    fn fail(&mut self, explanation: Option<FailureExplanation>) -> Option<DhComputation> {
        let Some(explanation) = explanation else {
            return self.refuse(FailureExplanation::IncorrectPayload);
        };
        self.state = State::Ended(AuthFailure::RefusedByPeer(explanation));
        self.revoke_if_refused();
        None
    }
}

/// Chooses from the host's offer.
fn choose(bytes: &[u8], config: &Config) -> Result<(Hash, DhGroup), FailureExplanation> {
    let negotiate = Negotiate::parse(bytes).ok_or(FailureExplanation::IncorrectPayload)?;
    if negotiate.concatenation != 0 {
        return Err(FailureExplanation::ConcatenationMismatch);
    }
    let (hashes, groups) = negotiate.offer.ok_or(FailureExplanation::ProtocolUnusable)?;
    let suits = config.host_secret.hash();
    let hash = config.policy.choose_hash(&hashes, suits).ok_or(FailureExplanation::HashUnusable)?;
    let group = config.policy.choose_group(&groups).ok_or(FailureExplanation::GroupUnusable)?;
    Ok((hash, group))
}

/// Parses a Reply. Returns also the host's public value, if there is a group.
fn read_reply(
    bytes: &[u8],
    transaction: &Transaction,
) -> Result<(HostReply, Option<Vec<u8>>), FailureExplanation> {
    let payload = FailureExplanation::IncorrectPayload;
    let reply = Reply::parse(bytes, transaction.hash).ok_or(payload)?;
    let public = transaction.group.check_public(reply.public)?;
    let asked = match reply.challenge {
        // Sequence number 0 means that the challenge is for a secure channel only, which is
        // refused.
        Some(_) if reply.sequence == 0 => return Err(payload),
        // The peer reflects our own challenge: never answer it.
        Some(challenge) if challenge == transaction.challenge => {
            return Err(FailureExplanation::AuthenticationFailed);
        }
        Some(challenge) => Some((challenge.to_vec(), reply.sequence)),
        None => None,
    };
    Ok((HostReply { response: reply.response.to_vec(), host_challenge: asked }, public))
}

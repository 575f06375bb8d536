//! The controller's role: the authenticator of one queue.

use std::mem;

use super::group::{Done, Group, Work};
use super::hash::Hash;
use super::message::{self, Challenge, Head, Kind, Negotiate, Reply, Success1};
use super::proof::{Proof, Session};
use super::secret::Hidden;
use super::{Config, End, Explanation, Fresh, MAX_MESSAGE_BYTES, SharedConfig};

/// The room that the host has for the message that is due is too short: the command fails with
/// Invalid Field, and the message is due still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message is {needed} bytes long")]
pub struct TooShort {
    /// Length of the message in bytes.
    pub needed: usize,
}

/// The authenticator of one queue, for one transaction after the other.
///
/// The driver gives it the data of each Authentication Send ([`Self::send`]), and completes the
/// command with success, whatever it was: what is wrong, the host hears by its next Authentication
/// Receive ([`Self::receive`]). If `send` gives [`Work`], that is to be run and given to
/// [`Self::done`] before the command completes. After each call the driver asks [`Self::end`]
/// whether the connection is to be closed, once what it owes is sent.
///
/// A host that has authenticated may do so again; meanwhile it goes on being authenticated, and no
/// longer once that fails. One that begins in the middle of a transaction has given that up.
#[derive(Debug, Default)]
pub struct Responder {
    state: State,
    /// T_ID of the current transaction, or of the last one.
    transaction: u16,
    /// The newest [`Work`]: what comes of older ones nobody wants.
    ticket: u64,
    authenticated: bool,
}

#[derive(Debug, Default)]
enum State {
    /// Nothing has come, or the last transaction is complete.
    #[default]
    Idle,
    /// The own public value is being made.
    Generating(Transaction),
    /// Challenge is to be fetched; with it goes the own public value.
    Challenge(Transaction, Vec<u8>),
    /// Reply is due.
    Reply(Transaction),
    /// The shared secret is being found, to check this.
    Sharing(Transaction, Given),
    /// Success1 is to be fetched; with it goes the own proof, if it was asked for.
    Success1(Hash, Option<Proof>),
    /// Success2 is due.
    Success2,
    /// Failure1 is to be fetched.
    Refusing(Explanation),
    /// The connection is to be closed.
    Ended(End),
}

/// What was agreed on, and asked.
#[derive(Debug)]
struct Transaction {
    config: SharedConfig,
    hash: Hash,
    group: Group,
    sequence: u32,
    challenge: Vec<u8>,
    exponent: Option<Hidden>,
}

/// What a Reply says, but for the public value.
#[derive(Debug)]
struct Given {
    response: Vec<u8>,
    /// The host's challenge and its number.
    asked: Option<(Vec<u8>, u32)>,
}

impl Responder {
    /// Whether the host has proved who it is, and what is asked of it on this queue may be done.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// Whether no transaction is under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle)
    }

    /// How it has failed, if it has, and the connection is to be closed.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        match self.state {
            State::Ended(end) => Some(end),
            _ => None,
        }
    }

    /// Takes the data of an Authentication Send. `begin` is asked when a transaction begins, for what
    /// is to be proved in it: that may be another secret than the last time.
    ///
    /// The command is completed at once or, if there is [`Work`], once that is [`done`](Self::done).
    pub fn send(
        &mut self,
        bytes: &[u8],
        begin: impl FnOnce() -> (SharedConfig, Fresh),
    ) -> Option<Work> {
        if matches!(self.state, State::Refusing(_) | State::Ended(_)) {
            return None;
        }
        let Some(head) = Head::read(bytes).filter(|_| bytes.len() <= MAX_MESSAGE_BYTES) else {
            return self.refuse(Explanation::IncorrectPayload);
        };
        let kind = head.kind();
        if kind == Some(Kind::Negotiate) {
            self.transaction = head.transaction();
            return self.negotiate(bytes, begin);
        }
        let due = match kind {
            Some(Kind::Reply) => matches!(self.state, State::Reply(_)),
            // Linux 6.3 to 6.5 send it also when nobody asked the controller for a proof.
            Some(Kind::Success2) => match self.state {
                State::Idle => self.authenticated,
                ref state => matches!(state, State::Success2),
            },
            // The host may give up at any time, but for what it has not begun.
            Some(Kind::Failure2) => !matches!(self.state, State::Idle) || self.authenticated,
            _ => false,
        };
        if !due {
            return self.refuse(Explanation::IncorrectMessage);
        }
        if head.transaction() != self.transaction {
            return self.refuse(Explanation::IncorrectPayload);
        }
        match kind {
            Some(Kind::Reply) => self.reply(bytes),
            Some(Kind::Success2) if message::is_success2(bytes) => {
                self.state = State::Idle;
                self.authenticated = true;
                None
            }
            Some(Kind::Failure2) => self.fail(message::read_failure(bytes)),
            _ => self.refuse(Explanation::IncorrectPayload),
        }
    }

    /// Takes what has come of [`Work`]. What came of older work is dropped.
    pub fn done(&mut self, done: Done) {
        if done.ticket != self.ticket {
            return;
        }
        self.state = match (mem::replace(&mut self.state, State::Idle), done) {
            (State::Generating(transaction), Done { public: Some(public), .. }) => {
                State::Challenge(transaction, public)
            }
            (State::Sharing(transaction, given), Done { shared: Some(shared), .. }) => {
                self.check(&transaction, &given, Some(shared.bytes()))
            }
            (state, _) => state,
        };
        self.settle();
    }

    /// The message that an Authentication Receive fetches, of which the host has room for
    /// `allocation` bytes; behind it the driver puts zeroes up to there.
    ///
    /// # Errors
    /// [`TooShort`] when there is not room for it.
    pub fn receive(&mut self, allocation: usize) -> Result<Vec<u8>, TooShort> {
        let due = matches!(
            self.state,
            State::Challenge(..) | State::Success1(..) | State::Refusing(_) | State::Ended(_)
        );
        if !due {
            self.refuse(Explanation::IncorrectMessage);
        }
        let message = self.message();
        if message.len() > allocation {
            return Err(TooShort { needed: message.len() });
        }
        self.state = match mem::replace(&mut self.state, State::Idle) {
            State::Challenge(transaction, _) => State::Reply(transaction),
            State::Success1(_, Some(_)) => State::Success2,
            State::Success1(_, None) => {
                self.authenticated = true;
                State::Idle
            }
            State::Refusing(explanation) => State::Ended(End::Refused(explanation)),
            state => state,
        };
        Ok(message)
    }

    /// The message that is due.
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
            State::Refusing(explanation) | State::Ended(End::Refused(explanation)) => *explanation,
            _ => Explanation::IncorrectMessage,
        };
        message::failure1(self.transaction, explanation)
    }

    /// AUTH_Negotiate: chooses (NVMe Base 2.0, 8.13.5.2).
    fn negotiate(
        &mut self,
        bytes: &[u8],
        begin: impl FnOnce() -> (SharedConfig, Fresh),
    ) -> Option<Work> {
        let (config, fresh) = begin();
        let (hash, group) = match choose(bytes, &config) {
            Ok(chosen) => chosen,
            Err(explanation) => return self.refuse(explanation),
        };
        let exponent = group.field().map(|field| field.exponent(&fresh));
        let (sequence, challenge) = (fresh.sequence.get(), fresh.challenge(hash));
        let transaction = Transaction { config, hash, group, sequence, challenge, exponent };
        let work = self.work(&transaction, None);
        self.state = match work {
            Some(_) => State::Generating(transaction),
            None => State::Challenge(transaction, Vec::new()),
        };
        work
    }

    /// What is to be calculated: the own public value or, with that of the host, the shared secret.
    fn work(&mut self, transaction: &Transaction, peer: Option<Vec<u8>>) -> Option<Work> {
        let field = transaction.group.field()?;
        let exponent = transaction.exponent.clone()?;
        let work = Work::new(field, exponent, peer.is_none(), peer);
        self.ticket = work.ticket();
        Some(work)
    }

    /// DH-HMAC-CHAP_Reply.
    fn reply(&mut self, bytes: &[u8]) -> Option<Work> {
        let State::Reply(transaction) = mem::replace(&mut self.state, State::Idle) else {
            return self.refuse(Explanation::IncorrectMessage);
        };
        let (given, public) = match read_reply(bytes, &transaction) {
            Ok(read) => read,
            Err(explanation) => return self.refuse(explanation),
        };
        let work = match public {
            Some(public) => self.work(&transaction, Some(public)),
            None => None,
        };
        self.state = match work {
            Some(_) => State::Sharing(transaction, given),
            None => self.check(&transaction, &given, None),
        };
        self.settle();
        work
    }

    /// Checks what the host has proved, and proves who this is if the host wants that.
    fn check(&self, transaction: &Transaction, given: &Given, shared: Option<&[u8]>) -> State {
        let Transaction { ref config, hash, sequence, ref challenge, .. } = *transaction;
        let session = Session { config, hash, transaction: self.transaction, shared };
        if !session.of_host(challenge, sequence).is(&given.response) {
            return State::Refusing(Explanation::AuthenticationFailed);
        }
        match &given.asked {
            None => State::Success1(hash, None),
            Some((challenge, sequence)) => match session.of_controller(challenge, *sequence) {
                Some(proof) => State::Success1(hash, Some(proof)),
                None => State::Refusing(Explanation::AuthenticationFailed),
            },
        }
    }

    /// Restores what holds of every state: who is refused is not authenticated.
    fn settle(&mut self) {
        if matches!(self.state, State::Refusing(_) | State::Ended(_)) {
            self.authenticated = false;
        }
    }

    /// The host is told why, when it asks.
    fn refuse(&mut self, explanation: Explanation) -> Option<Work> {
        self.state = State::Refusing(explanation);
        self.settle();
        None
    }

    /// The host has given up.
    fn fail(&mut self, explanation: Option<Explanation>) -> Option<Work> {
        let Some(explanation) = explanation else {
            return self.refuse(Explanation::IncorrectPayload);
        };
        self.state = State::Ended(End::RefusedByPeer(explanation));
        self.settle();
        None
    }
}

/// What of the host's offer is taken.
fn choose(bytes: &[u8], config: &Config) -> Result<(Hash, Group), Explanation> {
    let negotiate = Negotiate::parse(bytes).ok_or(Explanation::IncorrectPayload)?;
    if negotiate.concatenation != 0 {
        return Err(Explanation::ConcatenationMismatch);
    }
    let (hashes, groups) = negotiate.offer.ok_or(Explanation::ProtocolUnusable)?;
    let suits = config.host_secret.hash();
    let hash = config.policy.hash(&hashes, suits).ok_or(Explanation::HashUnusable)?;
    let group = config.policy.group(&groups).ok_or(Explanation::GroupUnusable)?;
    Ok((hash, group))
}

/// What a Reply says; behind it the host's public value, if there is a group.
fn read_reply(
    bytes: &[u8],
    transaction: &Transaction,
) -> Result<(Given, Option<Vec<u8>>), Explanation> {
    let payload = Explanation::IncorrectPayload;
    let reply = Reply::parse(bytes, transaction.hash).ok_or(payload)?;
    let public = transaction.group.public(reply.public)?;
    let asked = match reply.challenge {
        // Number 0 says that the challenge is for a secure channel alone, which nobody may want.
        Some(_) if reply.sequence == 0 => return Err(payload),
        // Who is asked what it has asked itself is not to answer.
        Some(challenge) if challenge == transaction.challenge => {
            return Err(Explanation::AuthenticationFailed);
        }
        Some(challenge) => Some((challenge.to_vec(), reply.sequence)),
        None => None,
    };
    Ok((Given { response: reply.response.to_vec(), asked }, public))
}

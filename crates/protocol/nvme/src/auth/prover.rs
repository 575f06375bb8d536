//! The host's role: who proves itself on one queue.

use std::mem;

use super::group::{Done, Group, Work};
use super::hash::Hash;
use super::message::{self, Challenge, Head, Kind, Negotiate, Reply, Success1};
use super::proof::{Proof, Session};
use super::{End, Explanation, Fresh, SharedConfig};

/// What the host's driver does next.
#[derive(Debug)]
pub enum Next {
    /// Sends this by Authentication Send, and then gives [`Prover::receive`] what comes by
    /// Authentication Receive.
    Send(Vec<u8>),
    /// Runs this and gives what came of it to [`Prover::done`].
    Compute(Work),
    /// Whoever was to prove itself has. Sends this last, if there is something.
    Proved(Option<Vec<u8>>),
    /// It has failed. Sends this last, if there is something, and closes the connection.
    Failed(End, Option<Vec<u8>>),
}

/// A host that authenticates on one queue, once: for another time there is another.
///
/// It asks for the controller's proof if there is a secret of the controller, and insists on it.
#[derive(Debug)]
pub struct Prover {
    config: SharedConfig,
    transaction: u16,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Challenge is due.
    Challenge,
    /// The own public value and the shared secret are being found, by work with this ticket.
    Computing(u64, Asked),
    /// Success1 is due, with this proof if there is one.
    Success1(Hash, Option<Proof>),
    /// Done.
    Proved,
    /// Done, in vain.
    Failed(End),
}

/// What the controller has asked, and what it will be asked.
#[derive(Debug)]
struct Asked {
    hash: Hash,
    group: Group,
    challenge: Vec<u8>,
    sequence: u32,
    own_challenge: Vec<u8>,
    own_sequence: u32,
}

impl Prover {
    /// Begins; gives the message that is to be sent by Authentication Send. `transaction`: T_ID, not
    /// that of another transaction on this queue.
    #[must_use]
    pub fn start(config: SharedConfig, transaction: u16) -> (Self, Vec<u8>) {
        let message = Negotiate::encode(transaction, &config.policy);
        (Self { config, transaction, state: State::Challenge }, message)
    }

    /// Whether whoever was to prove itself has.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        matches!(self.state, State::Proved)
    }

    /// Takes what an Authentication Receive has fetched. `fresh` is asked when the controller has
    /// chosen.
    pub fn receive(&mut self, bytes: &[u8], fresh: impl FnOnce() -> Fresh) -> Next {
        if let State::Failed(end) = self.state {
            return Next::Failed(end, None);
        }
        let Some(head) = Head::read(bytes) else {
            return self.refuse(Explanation::IncorrectPayload);
        };
        let kind = head.kind();
        if kind == Some(Kind::Failure1) {
            return match message::read_failure(bytes) {
                Some(explanation) => self.fail(End::RefusedByPeer(explanation), None),
                None => self.refuse(Explanation::IncorrectPayload),
            };
        }
        let due = match self.state {
            State::Challenge => kind == Some(Kind::Challenge),
            State::Success1(..) => kind == Some(Kind::Success1),
            _ => false,
        };
        if !due {
            return self.refuse(Explanation::IncorrectMessage);
        }
        if head.transaction() != self.transaction {
            return self.refuse(Explanation::IncorrectPayload);
        }
        // Whatever happens on the way: nothing is proved until it is.
        match mem::replace(&mut self.state, State::Failed(End::GIVEN_UP)) {
            State::Challenge => self.challenge(bytes, fresh),
            State::Success1(hash, expected) => self.success1(bytes, hash, expected.as_ref()),
            _ => self.refuse(Explanation::IncorrectMessage),
        }
    }

    /// Takes what has come of [`Work`]; `None` if that is not wanted.
    pub fn done(&mut self, done: Done) -> Option<Next> {
        let Done { ticket, public: Some(public), shared: Some(shared) } = done else {
            return None;
        };
        match mem::replace(&mut self.state, State::Failed(End::GIVEN_UP)) {
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
    fn challenge(&mut self, bytes: &[u8], fresh: impl FnOnce() -> Fresh) -> Next {
        let (challenge, peer) = match self.read_challenge(bytes) {
            Ok(read) => read,
            Err(explanation) => return self.refuse(explanation),
        };
        let fresh = fresh();
        let asked = Asked {
            hash: challenge.hash,
            group: challenge.group,
            challenge: challenge.challenge.to_vec(),
            sequence: challenge.sequence,
            own_challenge: fresh.challenge(challenge.hash),
            own_sequence: fresh.sequence.get(),
        };
        match challenge.group.field() {
            None => self.reply(&asked, &[], None),
            Some(field) => {
                let exponent = field.exponent(&fresh);
                let work = Work::new(field, exponent, true, peer);
                self.state = State::Computing(work.ticket(), asked);
                Next::Compute(work)
            }
        }
    }

    /// The message, and the controller's public value if there is a group.
    fn read_challenge<'a>(
        &self,
        bytes: &'a [u8],
    ) -> Result<(Challenge<'a>, Option<Vec<u8>>), Explanation> {
        let challenge = Challenge::parse(bytes, &self.config.policy)?;
        let peer = challenge.group.public(challenge.public)?;
        if challenge.sequence == 0 {
            return Err(Explanation::IncorrectPayload);
        }
        Ok((challenge, peer))
    }

    /// DH-HMAC-CHAP_Reply. It has a number also when it asks for nothing: 0 is for secure channels.
    fn reply(&mut self, asked: &Asked, public: &[u8], shared: Option<&[u8]>) -> Next {
        let (config, hash) = (&self.config, asked.hash);
        let session = Session { config, hash, transaction: self.transaction, shared };
        let response = session.of_host(&asked.challenge, asked.sequence);
        let expected = session.of_controller(&asked.own_challenge, asked.own_sequence);
        let message = Reply {
            response: response.bytes(),
            challenge: expected.is_some().then_some(&asked.own_challenge),
            sequence: asked.own_sequence,
            public,
        }
        .encode(self.transaction, hash, asked.group);
        self.state = State::Success1(hash, expected);
        Next::Send(message)
    }

    /// DH-HMAC-CHAP_Success1.
    fn success1(&mut self, bytes: &[u8], hash: Hash, expected: Option<&Proof>) -> Next {
        let Some(success) = Success1::parse(bytes, hash) else {
            return self.refuse(Explanation::IncorrectPayload);
        };
        let last = match (expected, success.response) {
            (None, None) => None,
            (Some(expected), Some(given)) if expected.is(given) => {
                Some(message::success2(self.transaction))
            }
            (Some(_), Some(_)) => return self.refuse(Explanation::AuthenticationFailed),
            _ => return self.refuse(Explanation::IncorrectPayload),
        };
        self.state = State::Proved;
        Next::Proved(last)
    }

    /// The controller is told why.
    fn refuse(&mut self, explanation: Explanation) -> Next {
        let message = message::failure2(self.transaction, explanation);
        self.fail(End::Refused(explanation), Some(message))
    }

    fn fail(&mut self, end: End, message: Option<Vec<u8>>) -> Next {
        self.state = State::Failed(end);
        Next::Failed(end, message)
    }
}

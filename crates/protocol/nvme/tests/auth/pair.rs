//! A host and a controller, and the wire between them.

use std::num::NonZeroU32;
use std::sync::Arc;

use nvme::auth::{
    AuthFailure, AuthPolicy, Config, ControllerAuthenticator, DhComputation, DhGroup,
    FailureExplanation, Hash, HostAuthenticator, HostStep, Secret, SharedConfig,
    TransactionRandomness,
};

pub(crate) const HOST: &str =
    "nqn.2014-08.org.nvmexpress:uuid:4a6c2d1e-0000-4000-8000-0123456789ab";
pub(crate) const SUBSYSTEM: &str = "nqn.2026-01.io.example:subsystem";

/// Secrets of a host, of a controller, and of neither.
pub(crate) const HOST_SECRET: &str = "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:";
pub(crate) const CONTROLLER_SECRET: &str =
    "DHHC-1:01:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxwYX7k:";
pub(crate) const WRONG_SECRET: &str = "DHHC-1:00:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxwYX7k:";

pub(crate) const T_ID: u16 = 0x1234;

/// Longest message that a host of today has room for.
pub(crate) const ROOM: usize = 4096;

pub(crate) fn secret(text: &str) -> Secret {
    Secret::parse(text).expect("a secret")
}

pub(crate) fn policy(hash: Hash, group: DhGroup) -> AuthPolicy {
    AuthPolicy::new(&[hash], &[group]).expect("not empty")
}

pub(crate) fn config(policy: AuthPolicy, mutual: bool) -> Config {
    Config {
        host_nqn: HOST.into(),
        subsystem_nqn: SUBSYSTEM.into(),
        host_secret: secret(HOST_SECRET),
        controller_secret: mutual.then(|| secret(CONTROLLER_SECRET)),
        policy,
    }
}

/// What the controller is lent of the unforeseeable.
fn of_controller() -> TransactionRandomness {
    let bytes: Vec<u8> = (0u8..120).collect();
    TransactionRandomness::new(
        NonZeroU32::new(0x0102_0304).expect("not 0"),
        &bytes.try_into().expect("120 bytes"),
    )
}

/// What the host is lent of it.
pub(crate) fn of_host() -> TransactionRandomness {
    let bytes: Vec<u8> = (0u8..120).map(|i| 255 - i).collect();
    TransactionRandomness::new(
        NonZeroU32::new(0xa0b0_c0d0).expect("not 0"),
        &bytes.try_into().expect("120 bytes"),
    )
}

pub(crate) struct Pair {
    pub(crate) responder: ControllerAuthenticator,
    pub(crate) controller: SharedConfig,
    host: SharedConfig,
    transaction: u16,
    pub(crate) prover: HostAuthenticator,
    /// AUTH_Negotiate, which the host has sent and the controller not seen.
    pub(crate) negotiate: Vec<u8>,
}

impl Pair {
    pub(crate) fn new(controller: Config, host: Config) -> Self {
        let (host, controller) = (Arc::new(host), Arc::new(controller));
        let (prover, negotiate) = HostAuthenticator::start(SharedConfig::clone(&host), T_ID);
        let responder = ControllerAuthenticator::default();
        Self { responder, controller, host, prover, negotiate, transaction: T_ID }
    }

    /// Both are configured alike.
    pub(crate) fn alike(hash: Hash, group: DhGroup, mutual: bool) -> Self {
        let config = config(policy(hash, group), mutual);
        Self::new(config.clone(), config)
    }

    /// The host begins another transaction.
    pub(crate) fn again(&mut self) {
        self.transaction += 1;
        let host = SharedConfig::clone(&self.host);
        (self.prover, self.negotiate) = HostAuthenticator::start(host, self.transaction);
    }

    /// What the controller says to a message.
    pub(crate) fn ask(&mut self, message: &[u8]) -> Vec<u8> {
        if let Some(work) = self.send(message) {
            self.responder.on_computed(work.run());
        }
        self.responder.on_receive(ROOM).expect("room")
    }

    /// Has the controller take a message.
    pub(crate) fn send(&mut self, message: &[u8]) -> Option<DhComputation> {
        let config = SharedConfig::clone(&self.controller);
        self.responder.on_send(message, || (config, of_controller()))
    }

    /// What the host does about a message.
    pub(crate) fn tell(&mut self, message: &[u8]) -> HostStep {
        match self.prover.receive(message, of_host) {
            HostStep::Compute(work) => self.prover.on_computed(work.run()).expect("wanted"),
            next => next,
        }
    }

    /// Goes on to where the controller has the Challenge; gives it and the host's Reply.
    pub(crate) fn challenged(&mut self) -> (Vec<u8>, Vec<u8>) {
        let negotiate = self.negotiate.clone();
        let challenge = self.ask(&negotiate);
        match self.tell(&challenge) {
            HostStep::Send(reply) => (challenge, reply),
            other => panic!("no reply but {other:?}"),
        }
    }

    /// All of it; the last messages of both.
    pub(crate) fn complete(&mut self) -> (Vec<u8>, Option<Vec<u8>>) {
        let (_, reply) = self.challenged();
        let success1 = self.ask(&reply);
        match self.tell(&success1) {
            HostStep::Authenticated(Some(success2)) => {
                assert!(!self.responder.is_authenticated(), "before Success2");
                assert!(self.send(&success2).is_none());
                (success1, Some(success2))
            }
            HostStep::Authenticated(None) => (success1, None),
            other => panic!("not proved but {other:?}"),
        }
    }
}

/// That the controller refuses with this message, and that is its end.
#[track_caller]
pub(crate) fn refused(
    responder: &ControllerAuthenticator,
    answer: &[u8],
    explanation: FailureExplanation,
) {
    assert_eq!(answer.len(), 8);
    assert_eq!((answer[0], answer[1]), (0x00, 0xf1), "AUTH_Failure1");
    assert_eq!((answer[6], FailureExplanation(answer[7])), (1, explanation));
    assert_eq!(responder.failure(), Some(AuthFailure::Refused(explanation)));
    assert!(!responder.is_authenticated());
}

/// That the host refuses, and with this message.
#[track_caller]
pub(crate) fn host_refuses(
    prover: &HostAuthenticator,
    next: HostStep,
    explanation: FailureExplanation,
) -> Vec<u8> {
    let HostStep::Failed(end, Some(message)) = next else { panic!("{next:?}") };
    assert_eq!(end, AuthFailure::Refused(explanation));
    assert_eq!(message.len(), 8);
    assert_eq!((message[0], message[1]), (0x00, 0xf0), "AUTH_Failure2");
    assert_eq!((message[6], FailureExplanation(message[7])), (1, explanation));
    assert!(!prover.is_authenticated());
    message
}

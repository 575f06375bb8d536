//! The security stage of a login (RFC 7143 12.1): no proof, or CHAP.

use subtle::ConstantTimeEq;

use super::action::{Auth, ChapPolicy};
use crate::chap::Algorithm;
use crate::pdu::LoginStatus;
use crate::text;
use crate::value::{Hex, binary, choose, number};

/// State of the security stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AuthState {
    /// No method has been chosen.
    #[default]
    Open,
    /// CHAP was chosen;
    Algorithm,
    /// The challenge was sent.
    Response(Algorithm),
    /// The initiator is authenticated, or need not be.
    Done,
}

/// The security keys of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SecurityKeys<'a> {
    pub(super) method: Option<&'a str>,
    pub(super) algorithms: Option<&'a str>,
    pub(super) id: Option<&'a str>,
    pub(super) challenge: Option<&'a str>,
    pub(super) name: Option<&'a str>,
    pub(super) response: Option<&'a str>,
}

impl AuthState {
    /// Handles the keys of a request and appends the answer. `transits`: the initiator asks to
    /// leave the stage.
    pub(super) fn step(
        self,
        given: &SecurityKeys<'_>,
        auth: &Auth,
        transits: bool,
        reply: &mut Vec<u8>,
    ) -> Result<Self, LoginStatus> {
        match (self, auth) {
            (Self::Algorithm, Auth::Chap(policy)) => send_challenge(given, policy, reply),
            (Self::Response(algorithm), Auth::Chap(policy)) => {
                check_initiator_proof(given, policy, algorithm, reply)
            }
            (Self::Open, _) => negotiate_method(given, auth, transits, reply),
            (Self::Done, _) if *given == SecurityKeys::default() => Ok(Self::Done),
            _ => Err(LoginStatus::InitiatorError),
        }
    }
}

/// RFC 7143 12.1 and 6.3.2: agree on a method.
fn negotiate_method(
    given: &SecurityKeys<'_>,
    auth: &Auth,
    transits: bool,
    reply: &mut Vec<u8>,
) -> Result<AuthState, LoginStatus> {
    if *given != (SecurityKeys { method: given.method, ..SecurityKeys::default() }) {
        return Err(LoginStatus::InitiatorError);
    }
    let (wanted, then) = match auth {
        Auth::None => ("None", AuthState::Done),
        Auth::Chap(_) => ("CHAP", AuthState::Algorithm),
    };
    match given.method {
        Some(methods) => {
            choose(methods, |m| (m == wanted).then_some(()))
                .ok_or(LoginStatus::AuthenticationFailure)?;
            text::push(reply, "AuthMethod", wanted);
            Ok(then)
        }
        None if !transits => Ok(AuthState::Open),
        None if then == AuthState::Done => Ok(AuthState::Done),
        None => Err(LoginStatus::AuthenticationFailure),
    }
}

/// `CHAP_A` → `CHAP_A`, `CHAP_I`, `CHAP_C`.
fn send_challenge(
    given: &SecurityKeys<'_>,
    policy: &ChapPolicy,
    reply: &mut Vec<u8>,
) -> Result<AuthState, LoginStatus> {
    let offered = given.algorithms.ok_or(LoginStatus::MissingParameter)?;
    if *given != (SecurityKeys { algorithms: given.algorithms, ..SecurityKeys::default() }) {
        return Err(LoginStatus::InitiatorError);
    }
    let algorithm = choose(offered, |a| number(a).and_then(Algorithm::from_number))
        .ok_or(LoginStatus::AuthenticationFailure)?;
    text::push(reply, "CHAP_A", algorithm.number());
    text::push(reply, "CHAP_I", policy.id);
    text::push(reply, "CHAP_C", Hex(&policy.challenge));
    Ok(AuthState::Response(algorithm))
}

/// `CHAP_N`, `CHAP_R`, perhaps `CHAP_I` and `CHAP_C` → perhaps `CHAP_N` and `CHAP_R`.
fn check_initiator_proof(
    given: &SecurityKeys<'_>,
    policy: &ChapPolicy,
    algorithm: Algorithm,
    reply: &mut Vec<u8>,
) -> Result<AuthState, LoginStatus> {
    let failed = LoginStatus::AuthenticationFailure;
    if given.method.is_some() || given.algorithms.is_some() {
        return Err(LoginStatus::InitiatorError);
    }
    let (Some(name), Some(response)) = (given.name, given.response) else {
        return Err(LoginStatus::MissingParameter);
    };
    let response = binary(response).ok_or(failed)?;
    let expected = algorithm.response(policy.id, &policy.secret, &policy.challenge);
    let known = name.as_bytes().ct_eq(policy.user.as_bytes());
    let proved = expected.matches(&response);
    if !(bool::from(known) & proved) {
        return Err(failed);
    }
    match (given.id, given.challenge) {
        (None, None) => Ok(AuthState::Done),
        (Some(id), Some(challenge)) => prove_target(id, challenge, policy, algorithm, reply),
        _ => Err(LoginStatus::MissingParameter),
    }
}

/// Authenticates the target. RFC 7143 9.2.1: not with the initiator's own secret, and not for its
/// own challenge, as the response could be replayed.
fn prove_target(
    id: &str,
    challenge: &str,
    policy: &ChapPolicy,
    algorithm: Algorithm,
    reply: &mut Vec<u8>,
) -> Result<AuthState, LoginStatus> {
    let failed = LoginStatus::AuthenticationFailure;
    let (name, secret) = policy.mutual.as_ref().ok_or(failed)?;
    let id = number(id).and_then(|n| u8::try_from(n).ok()).ok_or(failed)?;
    let challenge = binary(challenge).ok_or(failed)?;
    if challenge == policy.challenge || secret.matches(&policy.secret) {
        return Err(failed);
    }
    text::push(reply, "CHAP_N", name);
    text::push(reply, "CHAP_R", Hex(algorithm.response(id, secret, &challenge).as_bytes()));
    Ok(AuthState::Done)
}

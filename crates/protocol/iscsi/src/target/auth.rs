//! The security stage of a login (RFC 7143 12.1): no proof, or CHAP.

use subtle::ConstantTimeEq;

use super::action::{Auth, ChapPolicy};
use crate::chap::Algorithm;
use crate::pdu::LoginStatus;
use crate::text;
use crate::value::{Hex, binary, choose, number};

/// How far the security stage has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Progress {
    /// No method has been agreed on.
    #[default]
    Open,
    /// CHAP was agreed on; the initiator proposes algorithms.
    Algorithm,
    /// The challenge was sent.
    Response(Algorithm),
    /// The initiator has proved who it is, or needs not.
    Done,
}

/// The security keys of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Given<'a> {
    pub(super) method: Option<&'a str>,
    pub(super) algorithms: Option<&'a str>,
    pub(super) id: Option<&'a str>,
    pub(super) challenge: Option<&'a str>,
    pub(super) name: Option<&'a str>,
    pub(super) response: Option<&'a str>,
}

impl Progress {
    /// Takes the keys of a request and appends the answer. `transits`: the initiator wants to
    /// leave the stage.
    pub(super) fn step(
        self,
        given: &Given<'_>,
        auth: &Auth,
        transits: bool,
        reply: &mut Vec<u8>,
    ) -> Result<Self, LoginStatus> {
        match (self, auth) {
            (Self::Algorithm, Auth::Chap(policy)) => challenge(given, policy, reply),
            (Self::Response(algorithm), Auth::Chap(policy)) => {
                prove(given, policy, algorithm, reply)
            }
            (Self::Open, _) => open(given, auth, transits, reply),
            (Self::Done, _) if *given == Given::default() => Ok(Self::Done),
            _ => Err(LoginStatus::InitiatorError),
        }
    }
}

/// RFC 7143 12.1 and 6.3.2: agree on a method.
fn open(
    given: &Given<'_>,
    auth: &Auth,
    transits: bool,
    reply: &mut Vec<u8>,
) -> Result<Progress, LoginStatus> {
    if *given != (Given { method: given.method, ..Given::default() }) {
        return Err(LoginStatus::InitiatorError);
    }
    let (wanted, then) = match auth {
        Auth::None => ("None", Progress::Done),
        Auth::Chap(_) => ("CHAP", Progress::Algorithm),
    };
    match given.method {
        Some(methods) => {
            choose(methods, |m| (m == wanted).then_some(()))
                .ok_or(LoginStatus::AuthenticationFailure)?;
            text::push(reply, "AuthMethod", wanted);
            Ok(then)
        }
        None if !transits => Ok(Progress::Open),
        None if then == Progress::Done => Ok(Progress::Done),
        None => Err(LoginStatus::AuthenticationFailure),
    }
}

/// `CHAP_A` → `CHAP_A`, `CHAP_I`, `CHAP_C`.
fn challenge(
    given: &Given<'_>,
    policy: &ChapPolicy,
    reply: &mut Vec<u8>,
) -> Result<Progress, LoginStatus> {
    let offered = given.algorithms.ok_or(LoginStatus::MissingParameter)?;
    if *given != (Given { algorithms: given.algorithms, ..Given::default() }) {
        return Err(LoginStatus::InitiatorError);
    }
    let algorithm = choose(offered, |a| number(a).and_then(Algorithm::of))
        .ok_or(LoginStatus::AuthenticationFailure)?;
    text::push(reply, "CHAP_A", algorithm.number());
    text::push(reply, "CHAP_I", policy.id);
    text::push(reply, "CHAP_C", Hex(&policy.challenge));
    Ok(Progress::Response(algorithm))
}

/// `CHAP_N`, `CHAP_R`, perhaps `CHAP_I` and `CHAP_C` → perhaps `CHAP_N` and `CHAP_R`.
fn prove(
    given: &Given<'_>,
    policy: &ChapPolicy,
    algorithm: Algorithm,
    reply: &mut Vec<u8>,
) -> Result<Progress, LoginStatus> {
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
    let proved = expected.is(&response);
    if !(bool::from(known) & proved) {
        return Err(failed);
    }
    match (given.id, given.challenge) {
        (None, None) => Ok(Progress::Done),
        (Some(id), Some(challenge)) => answer(id, challenge, policy, algorithm, reply),
        _ => Err(LoginStatus::MissingParameter),
    }
}

/// The target proves who it is. RFC 7143 9.2.1: not with the initiator's own secret, and not to
/// its own challenge, lest its answer can be used against itself or another.
fn answer(
    id: &str,
    challenge: &str,
    policy: &ChapPolicy,
    algorithm: Algorithm,
    reply: &mut Vec<u8>,
) -> Result<Progress, LoginStatus> {
    let failed = LoginStatus::AuthenticationFailure;
    let (name, secret) = policy.mutual.as_ref().ok_or(failed)?;
    let id = number(id).and_then(|n| u8::try_from(n).ok()).ok_or(failed)?;
    let challenge = binary(challenge).ok_or(failed)?;
    if challenge == policy.challenge || secret.is(&policy.secret) {
        return Err(failed);
    }
    text::push(reply, "CHAP_N", name);
    text::push(reply, "CHAP_R", Hex(algorithm.response(id, secret, &challenge).as_bytes()));
    Ok(Progress::Done)
}

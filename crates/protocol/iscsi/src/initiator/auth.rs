//! The security stage of a login (RFC 7143 12.1): no proof, or CHAP, one-way or mutual.

use super::config::{Credentials, LoginNonce};
use super::request::CloseReason;
use crate::chap::{Algorithm, Response};
use crate::text;
use crate::value::{Hex, binary, number};

/// State of the security stage.
#[derive(Clone, Debug, Default)]
pub(super) enum AuthState {
    /// Methods were offered.
    #[default]
    Offered,
    /// CHAP was chosen; algorithms were proposed.
    Proposed,
    /// The challenge was answered; the expected proof of the target, if required.
    Answered(Option<ExpectedProof>),
    /// Authentication is complete.
    Done,
}

/// The response expected from the target.
#[derive(Clone, Debug)]
pub(super) struct ExpectedProof {
    name: String,
    response: Response,
}

/// The security keys of one response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SecurityKeys<'a> {
    pub(super) method: Option<&'a str>,
    pub(super) algorithm: Option<&'a str>,
    pub(super) id: Option<&'a str>,
    pub(super) challenge: Option<&'a str>,
    pub(super) name: Option<&'a str>,
    pub(super) response: Option<&'a str>,
}

const UNEXPECTED: CloseReason = CloseReason::Violation("a security key that was not asked for");

/// RFC 7143 12.1: offers authentication methods. With a secret of the target, only its proof is
/// accepted.
pub(super) fn offer(credentials: Option<&Credentials>, reply: &mut Vec<u8>) {
    let methods = match credentials {
        None => "None",
        Some(c) if c.mutual.is_some() => "CHAP",
        Some(_) => "CHAP,None",
    };
    text::push(reply, "AuthMethod", methods);
}

impl AuthState {
    /// Whether the stage may be left.
    pub(super) fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// Whether this side has nothing left to send.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self, Self::Done | Self::Answered(_))
    }

    /// Handles the keys of a response and appends the next keys to send. `transits`: the target
    /// leaves the stage.
    pub(super) fn step(
        self,
        given: &SecurityKeys<'_>,
        (credentials, fresh): (Option<&Credentials>, &LoginNonce),
        transits: bool,
        reply: &mut Vec<u8>,
    ) -> Result<Self, CloseReason> {
        match (self, credentials) {
            // It has sent no keys yet.
            (Self::Offered, _) if !transits && *given == SecurityKeys::default() => {
                Ok(Self::Offered)
            }
            (Self::Offered, _) => method(given, credentials, reply),
            (Self::Proposed, Some(credentials)) => {
                answer_challenge(given, credentials, fresh, reply)
            }
            (Self::Answered(Some(expected)), _) => check_target_proof(given, &expected),
            (Self::Answered(None) | Self::Done, _) if *given == SecurityKeys::default() => {
                Ok(Self::Done)
            }
            _ => Err(UNEXPECTED),
        }
    }
}

fn method(
    given: &SecurityKeys<'_>,
    credentials: Option<&Credentials>,
    reply: &mut Vec<u8>,
) -> Result<AuthState, CloseReason> {
    if *given != (SecurityKeys { method: given.method, ..SecurityKeys::default() }) {
        return Err(UNEXPECTED);
    }
    match (given.method, credentials) {
        (Some("CHAP"), Some(_)) => {
            // SHA-256, and MD5, which every target supports.
            text::push(reply, "CHAP_A", "7,5");
            Ok(AuthState::Proposed)
        }
        (Some("CHAP"), None) => Err(CloseReason::SecretMissing),
        (Some("None") | None, Some(c)) if c.mutual.is_some() => {
            Err(CloseReason::TargetNotAuthenticated)
        }
        (Some("None") | None, _) => Ok(AuthState::Done),
        _ => Err(CloseReason::Violation("an authentication method that was not offered")),
    }
}

/// `CHAP_A`, `CHAP_I`, `CHAP_C` → `CHAP_N`, `CHAP_R`, perhaps `CHAP_I` and `CHAP_C`.
fn answer_challenge(
    given: &SecurityKeys<'_>,
    credentials: &Credentials,
    fresh: &LoginNonce,
    reply: &mut Vec<u8>,
) -> Result<AuthState, CloseReason> {
    let (Some(algorithm), Some(id), Some(challenge)) = (given.algorithm, given.id, given.challenge)
    else {
        return Err(CloseReason::Violation("a challenge without all of its parts"));
    };
    if given.method.is_some() || given.name.is_some() || given.response.is_some() {
        return Err(UNEXPECTED);
    }
    let algorithm = number(algorithm).and_then(Algorithm::from_number);
    let algorithm =
        algorithm.ok_or(CloseReason::Violation("a CHAP algorithm that was not offered"))?;
    let id = number(id).and_then(|n| u8::try_from(n).ok());
    let (Some(id), Some(challenge)) = (id, binary(challenge)) else {
        return Err(CloseReason::Violation("an invalid challenge"));
    };
    // RFC 7143 9.2.1: never answer our own challenge.
    if challenge == fresh.challenge {
        return Err(CloseReason::TargetAuthenticationFailed);
    }
    let response = algorithm.response(id, &credentials.secret, &challenge);
    text::push(reply, "CHAP_N", &credentials.user);
    text::push(reply, "CHAP_R", Hex(response.as_bytes()));
    let Some((name, secret)) = &credentials.mutual else { return Ok(AuthState::Answered(None)) };
    text::push(reply, "CHAP_I", fresh.id);
    text::push(reply, "CHAP_C", Hex(&fresh.challenge));
    // RFC 7143 9.2.1: one secret for both ways proves nothing.
    if secret.matches(&credentials.secret) {
        return Err(CloseReason::TargetAuthenticationFailed);
    }
    let response = algorithm.response(fresh.id, secret, &fresh.challenge);
    Ok(AuthState::Answered(Some(ExpectedProof { name: name.clone(), response })))
}

/// `CHAP_N` and `CHAP_R` of the target.
fn check_target_proof(
    given: &SecurityKeys<'_>,
    expected: &ExpectedProof,
) -> Result<AuthState, CloseReason> {
    let (Some(name), Some(response)) = (given.name, given.response) else {
        return Err(CloseReason::TargetNotAuthenticated);
    };
    if *given
        != (SecurityKeys { name: given.name, response: given.response, ..SecurityKeys::default() })
    {
        return Err(UNEXPECTED);
    }
    let response = binary(response).ok_or(CloseReason::TargetAuthenticationFailed)?;
    let proved = expected.response.matches(&response) && name == expected.name;
    if proved { Ok(AuthState::Done) } else { Err(CloseReason::TargetAuthenticationFailed) }
}

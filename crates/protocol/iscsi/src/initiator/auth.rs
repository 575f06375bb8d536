//! The security stage of a login (RFC 7143 12.1): no proof, or CHAP, one-way or mutual.

use super::config::{Credentials, Fresh};
use super::request::End;
use crate::chap::{Algorithm, Response};
use crate::text;
use crate::value::{Hex, binary, number};

/// How far the security stage has come.
#[derive(Clone, Debug, Default)]
pub(super) enum Progress {
    /// Methods were offered.
    #[default]
    Offered,
    /// CHAP was agreed on; algorithms were proposed.
    Proposed,
    /// The challenge was answered, with this where the target has to prove something in turn.
    Answered(Option<Expected>),
    /// Nothing is left to be proved.
    Done,
}

/// What the target has to answer.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    name: String,
    response: Response,
}

/// The security keys of one response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Given<'a> {
    pub(super) method: Option<&'a str>,
    pub(super) algorithm: Option<&'a str>,
    pub(super) id: Option<&'a str>,
    pub(super) challenge: Option<&'a str>,
    pub(super) name: Option<&'a str>,
    pub(super) response: Option<&'a str>,
}

const UNEXPECTED: End = End::Violation("a security key that was not asked for");

/// RFC 7143 12.1: what may be agreed on. Who has a secret of the target takes nothing but its proof.
pub(super) fn offer(credentials: Option<&Credentials>, reply: &mut Vec<u8>) {
    let methods = match credentials {
        None => "None",
        Some(c) if c.mutual.is_some() => "CHAP",
        Some(_) => "CHAP,None",
    };
    text::push(reply, "AuthMethod", methods);
}

impl Progress {
    /// Whether the stage may be left.
    pub(super) fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// Whether this side has said all that it has to.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self, Self::Done | Self::Answered(_))
    }

    /// Takes the keys of a response and appends what is to be said next. `transits`: the target leaves the stage.
    pub(super) fn step(
        self,
        given: &Given<'_>,
        (credentials, fresh): (Option<&Credentials>, &Fresh),
        transits: bool,
        reply: &mut Vec<u8>,
    ) -> Result<Self, End> {
        match (self, credentials) {
            // It has not said anything yet.
            (Self::Offered, _) if !transits && *given == Given::default() => Ok(Self::Offered),
            (Self::Offered, _) => method(given, credentials, reply),
            (Self::Proposed, Some(credentials)) => answer(given, credentials, fresh, reply),
            (Self::Answered(Some(expected)), _) => check(given, &expected),
            (Self::Answered(None) | Self::Done, _) if *given == Given::default() => Ok(Self::Done),
            _ => Err(UNEXPECTED),
        }
    }
}

fn method(
    given: &Given<'_>,
    credentials: Option<&Credentials>,
    reply: &mut Vec<u8>,
) -> Result<Progress, End> {
    if *given != (Given { method: given.method, ..Given::default() }) {
        return Err(UNEXPECTED);
    }
    match (given.method, credentials) {
        (Some("CHAP"), Some(_)) => {
            // SHA-256, and MD5 that everybody has.
            text::push(reply, "CHAP_A", "7,5");
            Ok(Progress::Proposed)
        }
        (Some("CHAP"), None) => Err(End::SecretMissing),
        (Some("None") | None, Some(c)) if c.mutual.is_some() => Err(End::TargetUnproved),
        (Some("None") | None, _) => Ok(Progress::Done),
        _ => Err(End::Violation("an authentication method that was not offered")),
    }
}

/// `CHAP_A`, `CHAP_I`, `CHAP_C` → `CHAP_N`, `CHAP_R`, perhaps `CHAP_I` and `CHAP_C`.
fn answer(
    given: &Given<'_>,
    credentials: &Credentials,
    fresh: &Fresh,
    reply: &mut Vec<u8>,
) -> Result<Progress, End> {
    let (Some(algorithm), Some(id), Some(challenge)) = (given.algorithm, given.id, given.challenge)
    else {
        return Err(End::Violation("a challenge without all of its parts"));
    };
    if given.method.is_some() || given.name.is_some() || given.response.is_some() {
        return Err(UNEXPECTED);
    }
    let algorithm = number(algorithm).and_then(Algorithm::of);
    let algorithm = algorithm.ok_or(End::Violation("a CHAP algorithm that was not offered"))?;
    let id = number(id).and_then(|n| u8::try_from(n).ok());
    let (Some(id), Some(challenge)) = (id, binary(challenge)) else {
        return Err(End::Violation("a challenge that makes no sense"));
    };
    // RFC 7143 9.2.1: what we ask must not be answered by ourselves.
    if challenge == fresh.challenge {
        return Err(End::WrongProof);
    }
    let response = algorithm.response(id, &credentials.secret, &challenge);
    text::push(reply, "CHAP_N", &credentials.user);
    text::push(reply, "CHAP_R", Hex(response.as_bytes()));
    let Some((name, secret)) = &credentials.mutual else { return Ok(Progress::Answered(None)) };
    text::push(reply, "CHAP_I", fresh.id);
    text::push(reply, "CHAP_C", Hex(&fresh.challenge));
    // RFC 7143 9.2.1: one secret for both ways proves nothing.
    if secret.is(&credentials.secret) {
        return Err(End::WrongProof);
    }
    let response = algorithm.response(fresh.id, secret, &fresh.challenge);
    Ok(Progress::Answered(Some(Expected { name: name.clone(), response })))
}

/// `CHAP_N` and `CHAP_R` of the target.
fn check(given: &Given<'_>, expected: &Expected) -> Result<Progress, End> {
    let (Some(name), Some(response)) = (given.name, given.response) else {
        return Err(End::TargetUnproved);
    };
    if *given != (Given { name: given.name, response: given.response, ..Given::default() }) {
        return Err(UNEXPECTED);
    }
    let response = binary(response).ok_or(End::WrongProof)?;
    let proved = expected.response.is(&response) && name == expected.name;
    if proved { Ok(Progress::Done) } else { Err(End::WrongProof) }
}

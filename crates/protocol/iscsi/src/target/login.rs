//! The login phase (RFC 7143 6.3): who comes, whether it may, and what is agreed on.
//!
//! Pure: a request and its text in, a [`Step`] out.

use super::action::{LoginAttempt, LoginGrant, LoginReject, Session};
use super::auth::{Given, Progress};
use super::text::MAX_TEXT;
use crate::name::Name;
use crate::params::{DEFAULT_SEGMENT, Key, Limits, Params, Use};
use crate::pdu::{CONTINUE, FINAL, LoginRequest, LoginStatus, Stage};
use crate::text::{self, Pairs};
use crate::value::{NOT_UNDERSTOOD, REJECT};

/// Most keys that a login may use which we do not know.
const MAX_UNKNOWN: u32 = 128;

/// Most requests of a login.
const MAX_REQUESTS: u32 = 128;

/// A login in progress.
#[derive(Debug)]
pub(super) struct Login {
    requests: u32,
    /// The request being answered.
    request: LoginRequest,
    stage: Stage,
    /// Text of the request so far.
    text: Vec<u8>,
    /// Answers that have not been sent.
    reply: Vec<u8>,
    /// Whether the last response was a part of a longer one.
    sending: bool,
    /// Known keys that were used.
    seen: u64,
    unknown: u32,
    who: Option<LoginAttempt>,
    grant: Option<LoginGrant>,
    security: Progress,
    params: Params,
    /// Whether no text has been taken yet.
    first: bool,
    /// Whether our own longest data segment has been declared.
    declared: bool,
}

/// What a login wants next.
#[derive(Debug)]
pub(super) enum Step {
    /// The driver's decision, for [`Login::decided`].
    Ask(Box<LoginAttempt>),
    /// A response with these flags and text.
    Respond { flags: u8, text: Vec<u8> },
    /// The driver's word that the session is there, then [`Login::last_response`].
    Establish(Box<Session>),
    /// The end.
    Refuse(LoginReject),
}

impl From<LoginStatus> for Step {
    fn from(status: LoginStatus) -> Self {
        Self::Refuse(status.into())
    }
}

impl Login {
    pub(super) fn new() -> Self {
        Self {
            requests: 0,
            request: LoginRequest::zeroed(),
            stage: Stage::Security,
            text: Vec::new(),
            reply: Vec::new(),
            sending: false,
            seen: 0,
            unknown: 0,
            who: None,
            grant: None,
            security: Progress::default(),
            params: Params::default(),
            first: true,
            declared: false,
        }
    }

    /// Whether any request has come.
    pub(super) fn has_begun(&self) -> bool {
        self.requests > 0
    }

    /// The request that is being answered.
    pub(super) fn request(&self) -> &LoginRequest {
        &self.request
    }

    /// A request has come.
    pub(super) fn on_request(
        &mut self,
        request: &LoginRequest,
        text: &[u8],
        limits: &Limits,
    ) -> Step {
        let checked = self.check(request);
        self.requests += 1;
        self.request = *request;
        if let Err(status) = checked {
            return status.into();
        }
        if self.sending {
            // RFC 7143 6.2: while a response goes on, requests are empty.
            let empty = text.is_empty() && !request.continues();
            return if empty { self.respond() } else { LoginStatus::InitiatorError.into() };
        }
        if self.text.len() + text.len() > MAX_TEXT {
            return LoginStatus::InitiatorError.into();
        }
        self.text.extend_from_slice(text);
        if request.continues() {
            return Step::Respond { flags: self.flags(false), text: Vec::new() };
        }
        if self.grant.is_some() {
            return self.negotiate(limits);
        }
        match self.identify() {
            Ok(who) => {
                self.who = Some(who.clone());
                Step::Ask(Box::new(who))
            }
            Err(status) => status.into(),
        }
    }

    /// The driver lets the initiator try.
    pub(super) fn decided(&mut self, grant: LoginGrant, limits: &Limits) -> Step {
        if let Some(session) = &grant.session {
            self.params = session.of_session();
        }
        self.grant = Some(grant);
        self.negotiate(limits)
    }

    /// RFC 7143 11.12: what a request's header may say, and what may change between requests.
    fn check(&mut self, request: &LoginRequest) -> Result<(), LoginStatus> {
        if request.version_min > 0 {
            return Err(LoginStatus::UnsupportedVersion);
        }
        let last = &self.request;
        if self.requests == 0 {
            self.stage = request.current();
        } else if (request.isid, request.tsih, request.cid) != (last.isid, last.tsih, last.cid) {
            return Err(LoginStatus::InitiatorError);
        }
        let current = request.current();
        let known = [Stage::Security, Stage::Operational].contains(&current);
        let forward = match request.next() {
            Stage::Operational | Stage::FullFeature => request.next() > current,
            _ => false,
        };
        let proper = known
            && current == self.stage
            && (forward || !request.transits())
            && !(request.transits() && request.continues())
            && self.requests < MAX_REQUESTS;
        if proper { Ok(()) } else { Err(LoginStatus::InitiatorError) }
    }

    /// RFC 7143 6.3.1: the first request says who wants what.
    fn identify(&self) -> Result<LoginAttempt, LoginStatus> {
        let (mut initiator, mut target, mut kind) = (None, None, "Normal");
        for pair in Pairs::of(&self.text) {
            match pair.map_err(|_| LoginStatus::InitiatorError)? {
                ("InitiatorName", name) => initiator = Some(name),
                ("TargetName", name) => target = Some(name),
                ("SessionType", value) => kind = value,
                _ => {}
            }
        }
        let initiator = initiator.ok_or(LoginStatus::MissingParameter)?;
        let initiator = initiator.parse().map_err(|_| LoginStatus::InitiatorError)?;
        let target = match (kind, target) {
            ("Discovery", _) => None,
            ("Normal", None) => return Err(LoginStatus::MissingParameter),
            ("Normal", Some(n)) => Some(n.parse::<Name>().map_err(|_| LoginStatus::NotFound)?),
            _ => return Err(LoginStatus::SessionTypeUnsupported),
        };
        let LoginRequest { isid, tsih, cid, .. } = self.request;
        Ok(LoginAttempt { initiator, target, isid, tsih: tsih.get(), cid: cid.get() })
    }

    fn negotiate(&mut self, limits: &Limits) -> Step {
        let text = std::mem::take(&mut self.text);
        match self.take_keys(&text, limits) {
            Ok(()) => self.respond(),
            Err(status) => status.into(),
        }
    }

    fn take_keys(&mut self, text: &[u8], limits: &Limits) -> Result<(), LoginStatus> {
        let mut given = Given::default();
        if self.first {
            self.introduce();
        }
        for pair in Pairs::of(text) {
            let (name, value) = pair.map_err(|_| LoginStatus::InitiatorError)?;
            match Key::of(name) {
                Some(key) => self.take_key(key, name, value, &mut given, limits)?,
                None => {
                    self.unknown += 1;
                    if self.unknown > MAX_UNKNOWN {
                        return Err(LoginStatus::InitiatorError);
                    }
                    text::push(&mut self.reply, name, NOT_UNDERSTOOD);
                }
            }
        }
        self.secure(&given)?;
        self.first = false;
        if self.stage == Stage::Operational && !self.declared {
            self.declared = true;
            self.params.target_max_segment = limits.max_segment;
            text::push(&mut self.reply, "MaxRecvDataSegmentLength", limits.max_segment);
        }
        Ok(())
    }

    /// RFC 7143 13.9: the first response names the portal group.
    fn introduce(&mut self) {
        let normal = self.who.as_ref().is_some_and(|w| w.target.is_some());
        if let Some(grant) = self.grant.as_ref().filter(|_| normal) {
            text::push(&mut self.reply, "TargetPortalGroupTag", grant.portal_group);
            if let Some(alias) = &grant.target_alias {
                text::push(&mut self.reply, "TargetAlias", alias);
            }
        }
    }

    fn take_key<'a>(
        &mut self,
        key: Key,
        name: &str,
        value: &'a str,
        given: &mut Given<'a>,
        limits: &Limits,
    ) -> Result<(), LoginStatus> {
        // RFC 7143 6.2: a key is negotiated once.
        if self.seen & key.bit() != 0 {
            return Err(LoginStatus::InitiatorError);
        }
        self.seen |= key.bit();
        let used = match key.used() {
            Use::Identity => self.first,
            Use::Security => self.stage == Stage::Security,
            Use::Operational => self.stage == Stage::Operational,
            Use::Any => true,
            Use::FullFeature => false,
            Use::Target => {
                text::push(&mut self.reply, name, REJECT);
                return Ok(());
            }
        };
        if !used {
            return Err(LoginStatus::InitiatorError);
        }
        match key {
            Key::AuthMethod => given.method = Some(value),
            Key::ChapA => given.algorithms = Some(value),
            Key::ChapI => given.id = Some(value),
            Key::ChapC => given.challenge = Some(value),
            Key::ChapN => given.name = Some(value),
            Key::ChapR => given.response = Some(value),
            // Who it is was read by `identify`; the alias is for people who look at initiators.
            Key::InitiatorName | Key::TargetName | Key::SessionType | Key::InitiatorAlias => {}
            _ => {
                let answer = self.params.answer(key, value, limits);
                if let Some(answer) = answer.map_err(|_| LoginStatus::InitiatorError)? {
                    text::push(&mut self.reply, name, answer);
                }
            }
        }
        Ok(())
    }

    fn secure(&mut self, given: &Given<'_>) -> Result<(), LoginStatus> {
        let auth = &self.grant.as_ref().ok_or(LoginStatus::TargetError)?.auth;
        if self.stage == Stage::Security {
            let transits = self.request.transits();
            self.security = self.security.step(given, auth, transits, &mut self.reply)?;
        } else if self.security == Progress::Open {
            // The initiator began with the operational stage: as if it had offered nothing.
            self.security = self.security.step(&Given::default(), auth, true, &mut self.reply)?;
        }
        Ok(())
    }

    /// Sends what there is to say, in parts where it is long.
    fn respond(&mut self) -> Step {
        if self.reply.len() > DEFAULT_SEGMENT as usize {
            let rest = self.reply.split_off(DEFAULT_SEGMENT as usize);
            let text = std::mem::replace(&mut self.reply, rest);
            self.sending = true;
            return Step::Respond { flags: self.flags(false) | CONTINUE, text };
        }
        self.sending = false;
        let ready = self.stage == Stage::Operational || self.security == Progress::Done;
        let transits = self.request.transits() && ready;
        if transits && self.request.next() == Stage::FullFeature {
            return match self.who.clone() {
                Some(who) => {
                    self.params.settle();
                    Step::Establish(Box::new(Session { who, params: self.params.clone() }))
                }
                None => LoginStatus::TargetError.into(),
            };
        }
        let flags = self.flags(transits);
        if transits {
            self.stage = self.request.next();
        }
        Step::Respond { flags, text: std::mem::take(&mut self.reply) }
    }

    /// The session is there: flags and text of the last response.
    pub(super) fn last_response(&mut self) -> (u8, Vec<u8>) {
        (self.flags(true), std::mem::take(&mut self.reply))
    }

    /// What was agreed on, and whether the session is for discovery.
    pub(super) fn result(&self) -> (Params, bool) {
        (self.params.clone(), self.who.as_ref().is_some_and(|w| w.target.is_none()))
    }

    fn flags(&self, transits: bool) -> u8 {
        let stages = self.stage.0 << 2;
        if transits { FINAL | stages | self.request.next().0 } else { stages }
    }
}

//! The target's login phase (RFC 7143 6.3): identification, authentication, negotiation.
//!
//! Pure: takes a request and its text, returns a [`LoginStep`].

use super::action::{LoginAttempt, LoginGrant, LoginReject, NegotiatedSession};
use super::auth::{AuthState, SecurityKeys};
use super::text::MAX_TEXT;
use crate::name::Name;
use crate::params::{DEFAULT_SEGMENT, Key, KeyUse, Limits, Params};
use crate::pdu::{CONTINUE, FINAL, LoginRequest, LoginStage, LoginStatus};
use crate::text::{self, Pairs};
use crate::value::{NOT_UNDERSTOOD, REJECT};

/// Most unknown keys in a login.
const MAX_UNKNOWN: u32 = 128;

/// Most requests of a login.
const MAX_REQUESTS: u32 = 128;

/// A login in progress.
#[derive(Debug)]
pub(super) struct Login {
    requests: u32,
    /// The request being answered.
    request: LoginRequest,
    stage: LoginStage,
    /// Text of the request so far.
    text: Vec<u8>,
    /// Unsent answers.
    reply: Vec<u8>,
    /// Whether the last response was a part of a longer one.
    response_continues: bool,
    /// Known keys that were used.
    seen_keys: u64,
    unknown_keys: u32,
    attempt: Option<LoginAttempt>,
    grant: Option<LoginGrant>,
    auth: AuthState,
    params: Params,
    /// Whether no text has been handled yet.
    is_first: bool,
    /// Whether our own maximum segment length has been declared.
    segment_declared: bool,
}

/// Next step of a login.
#[derive(Debug)]
pub(super) enum LoginStep {
    /// Get the driver's decision for [`Login::on_decision`].
    Decide(Box<LoginAttempt>),
    /// Send a response with these flags and text.
    Respond { flags: u8, text: Vec<u8> },
    /// Have the driver establish the session, then call [`Login::last_response`].
    Establish(Box<NegotiatedSession>),
    /// Refuse the login.
    Refuse(LoginReject),
}

impl From<LoginStatus> for LoginStep {
    fn from(status: LoginStatus) -> Self {
        Self::Refuse(status.into())
    }
}

impl Login {
    pub(super) fn new() -> Self {
        Self {
            requests: 0,
            request: LoginRequest::zeroed(),
            stage: LoginStage::Security,
            text: Vec::new(),
            reply: Vec::new(),
            response_continues: false,
            seen_keys: 0,
            unknown_keys: 0,
            attempt: None,
            grant: None,
            auth: AuthState::default(),
            params: Params::default(),
            is_first: true,
            segment_declared: false,
        }
    }

    /// Whether any request has arrived.
    pub(super) fn has_begun(&self) -> bool {
        self.requests > 0
    }

    /// The request that is being answered.
    pub(super) fn request(&self) -> &LoginRequest {
        &self.request
    }

    /// Handles a request.
    pub(super) fn on_request(
        &mut self,
        request: &LoginRequest,
        text: &[u8],
        limits: &Limits,
    ) -> LoginStep {
        let checked = self.check(request);
        self.requests += 1;
        self.request = *request;
        if let Err(status) = checked {
            return status.into();
        }
        if self.response_continues {
            // RFC 7143 6.2: while a response continues, requests are empty.
            let empty = text.is_empty() && !request.continues();
            return if empty { self.respond() } else { LoginStatus::InitiatorError.into() };
        }
        if self.text.len() + text.len() > MAX_TEXT {
            return LoginStatus::InitiatorError.into();
        }
        self.text.extend_from_slice(text);
        if request.continues() {
            return LoginStep::Respond { flags: self.flags(false), text: Vec::new() };
        }
        if self.grant.is_some() {
            return self.negotiate(limits);
        }
        match self.identify() {
            Ok(who) => {
                self.attempt = Some(who.clone());
                LoginStep::Decide(Box::new(who))
            }
            Err(status) => status.into(),
        }
    }

    /// Handles the driver's permission to proceed.
    pub(super) fn on_decision(&mut self, grant: LoginGrant, limits: &Limits) -> LoginStep {
        if let Some(session) = &grant.session {
            self.params = session.for_further_connection();
        }
        self.grant = Some(grant);
        self.negotiate(limits)
    }

    /// RFC 7143 11.12: checks a request's header, and what may change between requests.
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
        let known = [LoginStage::Security, LoginStage::Operational].contains(&current);
        let forward = match request.next() {
            LoginStage::Operational | LoginStage::FullFeature => request.next() > current,
            _ => false,
        };
        let proper = known
            && current == self.stage
            && (forward || !request.transits())
            && !(request.transits() && request.continues())
            && self.requests < MAX_REQUESTS;
        if proper { Ok(()) } else { Err(LoginStatus::InitiatorError) }
    }

    /// RFC 7143 6.3.1: the first request identifies initiator, target and session type.
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

    fn negotiate(&mut self, limits: &Limits) -> LoginStep {
        let text = std::mem::take(&mut self.text);
        match self.take_keys(&text, limits) {
            Ok(()) => self.respond(),
            Err(status) => status.into(),
        }
    }

    fn take_keys(&mut self, text: &[u8], limits: &Limits) -> Result<(), LoginStatus> {
        let mut given = SecurityKeys::default();
        if self.is_first {
            self.declare_portal_group();
        }
        for pair in Pairs::of(text) {
            let (name, value) = pair.map_err(|_| LoginStatus::InitiatorError)?;
            match Key::from_name(name) {
                Some(key) => self.take_key(key, name, value, &mut given, limits)?,
                None => {
                    self.unknown_keys += 1;
                    if self.unknown_keys > MAX_UNKNOWN {
                        return Err(LoginStatus::InitiatorError);
                    }
                    text::push(&mut self.reply, name, NOT_UNDERSTOOD);
                }
            }
        }
        self.run_security_stage(&given)?;
        self.is_first = false;
        if self.stage == LoginStage::Operational && !self.segment_declared {
            self.segment_declared = true;
            self.params.target_max_segment = limits.max_segment;
            text::push(&mut self.reply, "MaxRecvDataSegmentLength", limits.max_segment);
        }
        Ok(())
    }

    /// RFC 7143 13.9: the first response names the portal group.
    fn declare_portal_group(&mut self) {
        let normal = self.attempt.as_ref().is_some_and(|w| w.target.is_some());
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
        given: &mut SecurityKeys<'a>,
        limits: &Limits,
    ) -> Result<(), LoginStatus> {
        // RFC 7143 6.2: a key is negotiated once.
        if self.seen_keys & key.bit() != 0 {
            return Err(LoginStatus::InitiatorError);
        }
        self.seen_keys |= key.bit();
        let used = match key.key_use() {
            KeyUse::Identity => self.is_first,
            KeyUse::Security => self.stage == LoginStage::Security,
            KeyUse::Operational => self.stage == LoginStage::Operational,
            KeyUse::Any => true,
            KeyUse::FullFeature => false,
            KeyUse::Target => {
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
            // `identify` has read the names; the alias is only informative.
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

    fn run_security_stage(&mut self, given: &SecurityKeys<'_>) -> Result<(), LoginStatus> {
        let auth = &self.grant.as_ref().ok_or(LoginStatus::TargetError)?.auth;
        if self.stage == LoginStage::Security {
            let transits = self.request.transits();
            self.auth = self.auth.step(given, auth, transits, &mut self.reply)?;
        } else if self.auth == AuthState::Open {
            // The initiator began with the operational stage: as if it had offered nothing.
            self.auth = self.auth.step(&SecurityKeys::default(), auth, true, &mut self.reply)?;
        }
        Ok(())
    }

    /// Sends pending text, in parts if it is long.
    fn respond(&mut self) -> LoginStep {
        if self.reply.len() > DEFAULT_SEGMENT as usize {
            let rest = self.reply.split_off(DEFAULT_SEGMENT as usize);
            let text = std::mem::replace(&mut self.reply, rest);
            self.response_continues = true;
            return LoginStep::Respond { flags: self.flags(false) | CONTINUE, text };
        }
        self.response_continues = false;
        let ready = self.stage == LoginStage::Operational || self.auth == AuthState::Done;
        let transits = self.request.transits() && ready;
        if transits && self.request.next() == LoginStage::FullFeature {
            return match self.attempt.clone() {
                Some(who) => {
                    self.params.clamp_first_burst();
                    LoginStep::Establish(Box::new(NegotiatedSession {
                        login: who,
                        params: self.params.clone(),
                    }))
                }
                None => LoginStatus::TargetError.into(),
            };
        }
        let flags = self.flags(transits);
        if transits {
            self.stage = self.request.next();
        }
        LoginStep::Respond { flags, text: std::mem::take(&mut self.reply) }
    }

    /// The session exists: flags and text of the last response.
    pub(super) fn last_response(&mut self) -> (u8, Vec<u8>) {
        (self.flags(true), std::mem::take(&mut self.reply))
    }

    /// The negotiated parameters, and whether this is a discovery session.
    pub(super) fn result(&self) -> (Params, bool) {
        (self.params.clone(), self.attempt.as_ref().is_some_and(|w| w.target.is_none()))
    }

    fn flags(&self, transits: bool) -> u8 {
        let stages = self.stage.0 << 2;
        if transits { FINAL | stages | self.request.next().0 } else { stages }
    }
}

//! The initiator's login phase (RFC 7143 6.3). Pure: takes a response and its text, returns the
//! next request.

use super::auth::{self, AuthState, SecurityKeys};
use super::config::{Config, LoginNonce};
use super::negotiate;
use super::request::CloseReason;
use crate::params::{Key, KeyUse, Params};
use crate::pdu::{CONTINUE, FINAL, LoginResponse, LoginStage, LoginStatus};
use crate::text::{self, MAX_KEY, Pairs};
use crate::value::NOT_UNDERSTOOD;

/// Most responses of a login.
const MAX_RESPONSES: u32 = 64;

/// Most text of one response, in bytes, over all its PDUs.
const MAX_TEXT: usize = 64 * 1024;

/// Most unknown keys that a target may use in a login: the answers fit one request.
const MAX_UNKNOWN: usize = 64;
const _: () = assert!(MAX_UNKNOWN * (MAX_KEY + 1 + NOT_UNDERSTOOD.len() + 1) < 8192);

/// A login in progress.
#[derive(Debug)]
pub(super) struct Login {
    nonce: LoginNonce,
    stage: LoginStage,
    responses: u32,
    /// Text of the response so far.
    text: Vec<u8>,
    /// Text to send next.
    reply: Vec<u8>,
    /// Whether the last request asked to leave the stage.
    transits: bool,
    /// Known keys that the target has used.
    seen_keys: u64,
    unknown_keys: usize,
    auth: AuthState,
    params: Params,
    /// Address from the target's redirection.
    redirect_address: Option<String>,
}

/// Next step after a response.
#[derive(Debug)]
pub(super) enum LoginStep {
    /// Send another request: flags and text.
    Send { flags: u8, text: Vec<u8> },
    /// The full feature phase.
    Done(Params),
}

impl Login {
    pub(super) fn new(config: &Config, fresh: LoginNonce) -> Self {
        Self {
            nonce: fresh,
            stage: LoginStage::Security,
            responses: 0,
            text: Vec::new(),
            reply: Vec::new(),
            transits: false,
            seen_keys: 0,
            unknown_keys: 0,
            auth: AuthState::default(),
            params: negotiate::initial_params(config),
            redirect_address: None,
        }
    }

    /// The first request: flags and text.
    pub(super) fn first_request(&mut self, config: &Config) -> (u8, Vec<u8>) {
        let mut text = Vec::new();
        text::push(&mut text, "InitiatorName", &config.initiator);
        match &config.target {
            Some(target) => {
                text::push(&mut text, "SessionType", "Normal");
                text::push(&mut text, "TargetName", target);
            }
            None => text::push(&mut text, "SessionType", "Discovery"),
        }
        auth::offer(config.credentials.as_ref(), &mut text);
        // An offer of `None` alone can leave the stage at once.
        self.transits = config.credentials.is_none();
        (self.flags(), text)
    }

    /// The target's redirection address, after a login has ended with [`CloseReason::Redirected`].
    pub(super) fn redirect_address(&mut self) -> Option<String> {
        self.redirect_address.take()
    }

    fn flags(&self) -> u8 {
        let next = if self.stage == LoginStage::Security {
            LoginStage::Operational
        } else {
            LoginStage::FullFeature
        };
        let transit = if self.transits { FINAL | next.0 } else { 0 };
        self.stage.0 << 2 | transit
    }

    /// Handles a response.
    pub(super) fn on_response(
        &mut self,
        response: &LoginResponse,
        text: &[u8],
        config: &Config,
    ) -> Result<LoginStep, CloseReason> {
        self.check(response, text, config)?;
        self.text.extend_from_slice(text);
        if response.flags & CONTINUE != 0 {
            // RFC 7143 6.2: an empty request asks it to continue.
            return Ok(LoginStep::Send { flags: self.stage.0 << 2, text: Vec::new() });
        }
        let text = std::mem::take(&mut self.text);
        let transits = response.flags & FINAL != 0;
        self.take_keys(&text, transits, config)?;
        if transits {
            return self.next_stage(config);
        }
        self.transits = self.stage == LoginStage::Operational
            || self.auth.is_ready()
            || config.credentials.is_none();
        Ok(LoginStep::Send { flags: self.flags(), text: std::mem::take(&mut self.reply) })
    }

    /// RFC 7143 11.13: checks a response's header.
    fn check(
        &mut self,
        response: &LoginResponse,
        text: &[u8],
        config: &Config,
    ) -> Result<(), CloseReason> {
        let violation = |what| Err(CloseReason::Violation(what));
        match response.status.get() >> 8 {
            0 => {}
            1 => return Err(self.on_redirect(LoginStatus(response.status.get()), text)),
            _ => return Err(CloseReason::LoginRefused(LoginStatus(response.status.get()))),
        }
        self.responses += 1;
        if self.responses > MAX_RESPONSES {
            return violation("too many login steps");
        }
        if response.version_active != 0 {
            return violation("another version");
        }
        if response.isid != config.isid {
            return violation("a login of another session");
        }
        let (transits, continues) = (response.flags & FINAL != 0, response.flags & CONTINUE != 0);
        if LoginStage(response.flags >> 2 & 3) != self.stage || transits && continues {
            return violation("a login stage other than the current one");
        }
        if transits && (!self.transits || response.flags & 3 != self.flags() & 3) {
            return violation("a login stage that was not requested");
        }
        if self.text.len() + text.len() > MAX_TEXT {
            return violation("login text too long");
        }
        Ok(())
    }

    /// RFC 7143 11.13.5: handles a redirection.
    fn on_redirect(&mut self, status: LoginStatus, text: &[u8]) -> CloseReason {
        let mut pairs = Pairs::of(text).map_while(Result::ok);
        let Some((_, address)) = pairs.find(|(key, _)| *key == "TargetAddress") else {
            return CloseReason::Violation("a redirection without an address");
        };
        self.redirect_address = Some(address.to_owned());
        CloseReason::Redirected { permanent: status == LoginStatus::MovedPermanently }
    }

    fn take_keys(
        &mut self,
        text: &[u8],
        transits: bool,
        config: &Config,
    ) -> Result<(), CloseReason> {
        let mut given = SecurityKeys::default();
        for pair in Pairs::of(text) {
            let (name, value) = pair.map_err(|_| CloseReason::Violation("malformed text"))?;
            match Key::from_name(name) {
                Some(key) => self.take_key(key, value, &mut given, config)?,
                // An answer to a key that we do not use.
                None if value == NOT_UNDERSTOOD => {}
                None => {
                    self.unknown_keys += 1;
                    if self.unknown_keys > MAX_UNKNOWN {
                        return Err(CloseReason::Violation("too many keys"));
                    }
                    text::push(&mut self.reply, name, NOT_UNDERSTOOD);
                }
            }
        }
        if self.stage == LoginStage::Security {
            let security = std::mem::take(&mut self.auth);
            let who = (config.credentials.as_ref(), &self.nonce);
            self.auth = security.step(&given, who, transits, &mut self.reply)?;
        }
        Ok(())
    }

    fn take_key<'a>(
        &mut self,
        key: Key,
        value: &'a str,
        given: &mut SecurityKeys<'a>,
        config: &Config,
    ) -> Result<(), CloseReason> {
        // RFC 7143 6.2: a key is negotiated once.
        if self.seen_keys & key.bit() != 0 {
            return Err(CloseReason::Violation("a key twice"));
        }
        self.seen_keys |= key.bit();
        let in_time = match key.key_use() {
            KeyUse::Security => self.stage == LoginStage::Security,
            KeyUse::Operational => self.stage == LoginStage::Operational,
            KeyUse::Any | KeyUse::Target => true,
            KeyUse::Identity | KeyUse::FullFeature => false,
        };
        if !in_time {
            return Err(CloseReason::Violation("a key in the wrong login stage"));
        }
        match key {
            Key::AuthMethod => given.method = Some(value),
            Key::ChapA => given.algorithm = Some(value),
            Key::ChapI => given.id = Some(value),
            Key::ChapC => given.challenge = Some(value),
            Key::ChapN => given.name = Some(value),
            Key::ChapR => given.response = Some(value),
            Key::TargetAlias | Key::TargetAddress | Key::TargetPortalGroupTag => {}
            // Keys that were not offered cannot be negotiated.
            key if !negotiate::is_answer(key) => {
                return Err(CloseReason::Violation("a key that was not offered"));
            }
            key => negotiate::apply_answer(&mut self.params, key, value, config)
                .ok_or(CloseReason::Violation("an answer outside the offer"))?,
        }
        Ok(())
    }

    /// Moves to the stage that was requested.
    fn next_stage(&mut self, config: &Config) -> Result<LoginStep, CloseReason> {
        if self.stage == LoginStage::Operational {
            self.params.clamp_first_burst();
            return Ok(LoginStep::Done(self.params.clone()));
        }
        if !self.auth.is_done() {
            return Err(CloseReason::TargetNotAuthenticated);
        }
        (self.stage, self.transits) = (LoginStage::Operational, true);
        let mut text = std::mem::take(&mut self.reply);
        negotiate::offer(config, &mut text);
        Ok(LoginStep::Send { flags: self.flags(), text })
    }
}

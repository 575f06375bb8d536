//! The login phase (RFC 7143 6.3), from the initiator's side. Pure: a response and its text in, what is to be
//! said next out.

use super::auth::{self, Given, Progress};
use super::config::{Config, Fresh};
use super::negotiate;
use super::request::End;
use crate::params::{Key, Params, Use};
use crate::pdu::{CONTINUE, FINAL, LoginResponse, LoginStatus, Stage};
use crate::text::{self, MAX_KEY, Pairs};
use crate::value::NOT_UNDERSTOOD;

/// Most responses of a login.
const MAX_RESPONSES: u32 = 64;

/// Most text of one response, in bytes, however many PDUs it comes in.
const MAX_TEXT: usize = 64 * 1024;

/// Most keys that a target may use in a login which we do not know: their answers fit one request.
const MAX_UNKNOWN: usize = 64;
const _: () = assert!(MAX_UNKNOWN * (MAX_KEY + 1 + NOT_UNDERSTOOD.len() + 1) < 8192);

/// A login in progress.
#[derive(Debug)]
pub(super) struct Login {
    fresh: Fresh,
    stage: Stage,
    responses: u32,
    /// Text of the response so far.
    text: Vec<u8>,
    /// What is to be said next.
    reply: Vec<u8>,
    /// Whether the last request wanted to leave the stage.
    transits: bool,
    /// Known keys that the target has used.
    seen: u64,
    unknown: usize,
    security: Progress,
    params: Params,
    /// Where the target says that it is.
    moved_to: Option<String>,
}

/// What a response leads to.
#[derive(Debug)]
pub(super) enum Step {
    /// Another request: flags and text.
    Say { flags: u8, text: Vec<u8> },
    /// The full feature phase.
    Done(Params),
}

impl Login {
    pub(super) fn new(config: &Config, fresh: Fresh) -> Self {
        Self {
            fresh,
            stage: Stage::Security,
            responses: 0,
            text: Vec::new(),
            reply: Vec::new(),
            transits: false,
            seen: 0,
            unknown: 0,
            security: Progress::default(),
            params: negotiate::begin(config),
            moved_to: None,
        }
    }

    /// The first request: flags and text.
    pub(super) fn first(&mut self, config: &Config) -> (u8, Vec<u8>) {
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
        // Who offers nothing but `None` is ready to go on.
        self.transits = config.credentials.is_none();
        (self.flags(), text)
    }

    /// Where the target says that it is, once a login has ended with [`End::Moved`].
    pub(super) fn moved_to(&mut self) -> Option<String> {
        self.moved_to.take()
    }

    fn flags(&self) -> u8 {
        let next =
            if self.stage == Stage::Security { Stage::Operational } else { Stage::FullFeature };
        let transit = if self.transits { FINAL | next.0 } else { 0 };
        self.stage.0 << 2 | transit
    }

    /// A response has come.
    pub(super) fn on_response(
        &mut self,
        response: &LoginResponse,
        text: &[u8],
        config: &Config,
    ) -> Result<Step, End> {
        self.check(response, text, config)?;
        self.text.extend_from_slice(text);
        if response.flags & CONTINUE != 0 {
            // RFC 7143 6.2: it is told to go on by a request without text.
            return Ok(Step::Say { flags: self.stage.0 << 2, text: Vec::new() });
        }
        let text = std::mem::take(&mut self.text);
        let transits = response.flags & FINAL != 0;
        self.take_keys(&text, transits, config)?;
        if transits {
            return self.next_stage(config);
        }
        self.transits = self.stage == Stage::Operational
            || self.security.is_ready()
            || config.credentials.is_none();
        Ok(Step::Say { flags: self.flags(), text: std::mem::take(&mut self.reply) })
    }

    /// RFC 7143 11.13: what a response's header may say.
    fn check(&mut self, response: &LoginResponse, text: &[u8], config: &Config) -> Result<(), End> {
        let violation = |what| Err(End::Violation(what));
        match response.status.get() >> 8 {
            0 => {}
            1 => return Err(self.moved(LoginStatus(response.status.get()), text)),
            _ => return Err(End::Refused(LoginStatus(response.status.get()))),
        }
        self.responses += 1;
        if self.responses > MAX_RESPONSES {
            return violation("a login without end");
        }
        if response.version_active != 0 {
            return violation("another version");
        }
        if response.isid != config.isid {
            return violation("a login of another session");
        }
        let (transits, continues) = (response.flags & FINAL != 0, response.flags & CONTINUE != 0);
        if Stage(response.flags >> 2 & 3) != self.stage || transits && continues {
            return violation("a stage of the login that it is not in");
        }
        if transits && (!self.transits || response.flags & 3 != self.flags() & 3) {
            return violation("a stage of the login that was not asked for");
        }
        if self.text.len() + text.len() > MAX_TEXT {
            return violation("login text without end");
        }
        Ok(())
    }

    /// RFC 7143 11.13.5: the target is elsewhere.
    fn moved(&mut self, status: LoginStatus, text: &[u8]) -> End {
        let mut pairs = Pairs::of(text).map_while(Result::ok);
        let Some((_, address)) = pairs.find(|(key, _)| *key == "TargetAddress") else {
            return End::Violation("a redirection to nowhere");
        };
        self.moved_to = Some(address.to_owned());
        End::Moved { for_good: status == LoginStatus::MovedPermanently }
    }

    fn take_keys(&mut self, text: &[u8], transits: bool, config: &Config) -> Result<(), End> {
        let mut given = Given::default();
        for pair in Pairs::of(text) {
            let (name, value) = pair.map_err(|_| End::Violation("malformed text"))?;
            match Key::of(name) {
                Some(key) => self.take_key(key, value, &mut given, config)?,
                // An answer to something that we say nowhere.
                None if value == NOT_UNDERSTOOD => {}
                None => {
                    self.unknown += 1;
                    if self.unknown > MAX_UNKNOWN {
                        return Err(End::Violation("keys without end"));
                    }
                    text::push(&mut self.reply, name, NOT_UNDERSTOOD);
                }
            }
        }
        if self.stage == Stage::Security {
            let security = std::mem::take(&mut self.security);
            let who = (config.credentials.as_ref(), &self.fresh);
            self.security = security.step(&given, who, transits, &mut self.reply)?;
        }
        Ok(())
    }

    fn take_key<'a>(
        &mut self,
        key: Key,
        value: &'a str,
        given: &mut Given<'a>,
        config: &Config,
    ) -> Result<(), End> {
        // RFC 7143 6.2: a key is negotiated once.
        if self.seen & key.bit() != 0 {
            return Err(End::Violation("a key twice"));
        }
        self.seen |= key.bit();
        let in_time = match key.used() {
            Use::Security => self.stage == Stage::Security,
            Use::Operational => self.stage == Stage::Operational,
            Use::Any | Use::Target => true,
            Use::Identity | Use::FullFeature => false,
        };
        if !in_time {
            return Err(End::Violation("a key where it does not belong"));
        }
        match key {
            Key::AuthMethod => given.method = Some(value),
            Key::ChapA => given.algorithm = Some(value),
            Key::ChapI => given.id = Some(value),
            Key::ChapC => given.challenge = Some(value),
            Key::ChapN => given.name = Some(value),
            Key::ChapR => given.response = Some(value),
            Key::TargetAlias | Key::TargetAddress | Key::TargetPortalGroupTag => {}
            // What nobody has offered is not agreed on.
            key if !negotiate::is_answer(key) => {
                return Err(End::Violation("a key that was not offered"));
            }
            key => negotiate::take(&mut self.params, key, value, config)
                .ok_or(End::Violation("an answer beyond what was offered"))?,
        }
        Ok(())
    }

    /// The target goes on to the stage that was asked for.
    fn next_stage(&mut self, config: &Config) -> Result<Step, End> {
        if self.stage == Stage::Operational {
            self.params.settle();
            return Ok(Step::Done(self.params.clone()));
        }
        if !self.security.is_done() {
            return Err(End::TargetUnproved);
        }
        (self.stage, self.transits) = (Stage::Operational, true);
        let mut text = std::mem::take(&mut self.reply);
        negotiate::offer(config, &mut text);
        Ok(Step::Say { flags: self.flags(), text })
    }
}

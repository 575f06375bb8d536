//! Dispatches PDUs: which may arrive now, and what handles them.

use zerocopy::big_endian::U16;

use super::action::{Action, CloseReason, LoginGrant, LoginReject};
use super::login::{Login, LoginStep};
use super::send::StatSnUse;
use super::text::MAX_TEXT;
use super::window::{CmdSnCheck, CommandWindow};
use super::{Connection, Phase};
use crate::params::DEFAULT_SEGMENT;
use crate::pdu::{
    Header, LoginRequest, LoginResponse, LoginStatus, LogoutRequest, NopOut, Opcode, RejectReason,
    TaskRequest, TextRequest,
};
use crate::sequence_number::SequenceNumber;
use crate::stream::{Event, Sink, Tag};
use crate::text;

/// Subject of the current PDU, handled once it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// Nothing.
    Ignored,
    /// Determined by its opcode.
    Request,
    /// The command that has just arrived.
    Command(Tag),
    /// Data for a command, with its target transfer tag.
    Data(Tag, u32),
}

impl Connection {
    /// Handles a received header and decides where the data goes.
    pub(super) fn on_header(&mut self) {
        let header = *Header::of(self.receiver.basic());
        let longest = match self.phase {
            Phase::FullFeature { .. } => self.params.target_max_segment,
            _ => DEFAULT_SEGMENT,
        };
        if self.receiver.segment_len() > longest as usize {
            if self.is_full_feature() {
                self.reject(RejectReason::ProtocolError);
            }
            return self.end(CloseReason::Protocol("a data segment longer than declared"));
        }
        let taken = match &self.phase {
            Phase::Login(login) => {
                let begun = login.has_begun();
                self.login_header(header.opcode(), begun)
            }
            Phase::FullFeature { discovery } => {
                let discovery = *discovery;
                self.request_header(&header, discovery)
            }
            Phase::Deciding(_) | Phase::Establishing(_) | Phase::Closed => None,
        };
        let Some((sink, subject)) = taken else { return };
        self.subject = subject;
        if let Sink::Task(tag, offset) = sink {
            let end =
                offset.saturating_add(u32::try_from(self.receiver.segment_len()).unwrap_or(0));
            if self.receiver.segment_len() > 0
                && self.tasks.get(tag).is_some_and(|t| !t.can_receive_to(end))
            {
                return self.receiver.block_on(sink);
            }
        }
        if let Event::Complete { intact } = self.receiver.accept(sink) {
            self.on_complete(intact);
        }
    }

    /// RFC 7143 6.3: before the login only login requests may arrive.
    fn login_header(&mut self, opcode: Opcode, begun: bool) -> Option<(Sink, Subject)> {
        if opcode == Opcode::LoginRequest {
            return Some((Sink::Control(DEFAULT_SEGMENT as usize), Subject::Request));
        }
        if begun {
            self.refuse_login(&LoginStatus::InvalidDuringLogin.into());
        } else {
            self.end(CloseReason::NotALogin);
        }
        None
    }

    /// A PDU of the full feature phase; `None` when it ended the connection.
    fn request_header(&mut self, header: &Header, discovery: bool) -> Option<(Sink, Subject)> {
        const IGNORE: Option<(Sink, Subject)> = Some((Sink::Discard, Subject::Ignored));
        let opcode = header.opcode();
        match opcode {
            Opcode::NopOut
            | Opcode::ScsiCommand
            | Opcode::TaskRequest
            | Opcode::TextRequest
            | Opcode::LogoutRequest => {}
            Opcode::DataOut => return Some(self.on_data_header()),
            _ => {
                self.reject(match opcode {
                    // Nothing is kept for retransmission at error recovery level 0.
                    Opcode::Snack => RejectReason::Snack,
                    Opcode::LoginRequest => RejectReason::ProtocolError,
                    _ => RejectReason::Unsupported,
                });
                return IGNORE;
            }
        }
        if !header.is_immediate() {
            match self.window.on_command(SequenceNumber(header.cmd_sn())) {
                CmdSnCheck::Next => {}
                CmdSnCheck::Outside => return IGNORE,
                CmdSnCheck::Gap => {
                    self.end(CloseReason::Protocol("commands out of order"));
                    return None;
                }
            }
        }
        if opcode == Opcode::ScsiCommand && !discovery {
            return Some(self.on_command());
        }
        // All other requests are answered quickly and hold no slot.
        if !header.is_immediate() {
            self.window.release();
        }
        let segment = self.receiver.segment_len();
        let keep = match opcode {
            _ if header.ahs_words > 0 => Err(RejectReason::InvalidField),
            Opcode::NopOut => Ok(self.ping_len()),
            Opcode::TextRequest if segment <= MAX_TEXT => Ok(segment),
            Opcode::TextRequest => Err(RejectReason::ProtocolError),
            Opcode::LogoutRequest => Ok(0),
            Opcode::TaskRequest if !discovery => Ok(0),
            // RFC 7143 4.3: a discovery session is for discovery.
            _ => Err(RejectReason::Unsupported),
        };
        match keep {
            Ok(keep) => Some((Sink::Control(keep), Subject::Request)),
            Err(reason) => {
                self.reject(reason);
                IGNORE
            }
        }
    }

    /// Handles a complete PDU.
    pub(super) fn on_complete(&mut self, intact: bool) {
        match std::mem::replace(&mut self.subject, Subject::Ignored) {
            Subject::Ignored => {}
            Subject::Command(tag) => self.on_immediate_data(tag, intact),
            Subject::Data(tag, ttt) => self.on_data(tag, ttt, intact),
            Subject::Request if !intact => self.reject(RejectReason::DataDigest),
            Subject::Request => {
                let data = self.receiver.control();
                self.on_request(&data);
                self.receiver.reuse(data);
            }
        }
    }

    fn on_request(&mut self, data: &[u8]) {
        let header = *self.receiver.basic();
        match Header::of(&header).opcode() {
            Opcode::LoginRequest => self.on_login(LoginRequest::of(&header), data),
            Opcode::NopOut => self.on_nop(NopOut::of(&header), data),
            Opcode::TextRequest => self.on_text(TextRequest::of(&header), data),
            Opcode::TaskRequest => self.on_management(TaskRequest::of(&header)),
            Opcode::LogoutRequest => self.on_logout(LogoutRequest::of(&header)),
            _ => {}
        }
    }

    fn on_login(&mut self, request: &LoginRequest, text: &[u8]) {
        let Phase::Login(login) = &mut self.phase else { return };
        if !login.has_begun() {
            self.stat_sn = SequenceNumber(request.exp_stat_sn.get());
            self.window =
                CommandWindow::new(SequenceNumber(request.cmd_sn.get()), self.config.window);
            self.cid = request.cid.get();
        }
        let step = login.on_request(request, text, &self.config.limits);
        self.login_step(step);
    }

    fn login_step(&mut self, step: LoginStep) {
        match step {
            LoginStep::Respond { flags, text } => self.respond_login(flags, 0, &text),
            LoginStep::Refuse(why) => self.refuse_login(&why),
            LoginStep::Decide(who) => {
                self.wait_for_driver(Phase::Deciding);
                self.actions.push_back(Action::Login(who));
            }
            LoginStep::Establish(session) => {
                self.wait_for_driver(Phase::Establishing);
                self.actions.push_back(Action::Establish(session));
            }
        }
    }

    fn wait_for_driver(&mut self, then: fn(Box<Login>) -> Phase) {
        self.phase = match std::mem::replace(&mut self.phase, Phase::Closed) {
            Phase::Login(login) => then(login),
            other => other,
        };
    }

    /// Answers [`Action::Login`]: the login may proceed, or not. Ignored if no answer is due.
    pub fn login_decision(&mut self, decision: Result<LoginGrant, LoginReject>) {
        let mut login = match std::mem::replace(&mut self.phase, Phase::Closed) {
            Phase::Deciding(login) => login,
            other => {
                self.phase = other;
                return;
            }
        };
        let step = match decision {
            Ok(grant) => login.on_decision(grant, &self.config.limits),
            Err(why) => LoginStep::Refuse(why),
        };
        self.phase = Phase::Login(login);
        self.login_step(step);
    }

    /// Answers [`Action::Establish`]: the session exists with this handle (TSIH, not 0), or is
    /// refused. Ignored if no answer is due.
    pub fn session_established(&mut self, session: Result<u16, LoginReject>) {
        let mut login = match std::mem::replace(&mut self.phase, Phase::Closed) {
            Phase::Establishing(login) => login,
            other => {
                self.phase = other;
                return;
            }
        };
        match session {
            Ok(tsih) => {
                let (flags, text) = login.last_response();
                let (params, discovery) = login.result();
                self.params = params;
                self.phase = Phase::Login(login);
                self.respond_login(flags, tsih, &text);
                self.phase = Phase::FullFeature { discovery };
                self.receiver.set_digests(self.params.header_digest, self.params.data_digest);
                self.timers.record_received();
            }
            Err(why) => {
                self.phase = Phase::Login(login);
                self.refuse_login(&why);
            }
        }
    }

    fn respond_login(&mut self, flags: u8, tsih: u16, text: &[u8]) {
        let Some(mut pdu) = self.login_response() else { return };
        pdu.flags = flags;
        if tsih != 0 {
            pdu.tsih = U16::new(tsih);
        }
        self.send_bytes(pdu, StatSnUse::Advance, text);
    }

    /// RFC 7143 11.13.5: a login that is refused ends the connection.
    fn refuse_login(&mut self, why: &LoginReject) {
        let Some(mut pdu) = self.login_response() else { return };
        pdu.status = U16::new(why.status.0);
        let mut text = Vec::new();
        if let Some(address) = &why.redirect_address {
            text::push(&mut text, "TargetAddress", address);
        }
        self.send_bytes(pdu, StatSnUse::Advance, &text);
        self.end(CloseReason::LoginRefused(why.status));
    }

    fn login_response(&self) -> Option<LoginResponse> {
        let Phase::Login(login) = &self.phase else { return None };
        let request = login.request();
        let mut pdu = LoginResponse::zeroed();
        (pdu.isid, pdu.tsih, pdu.itt) = (request.isid, request.tsih, request.itt);
        pdu.flags = request.current().0 << 2;
        Some(pdu)
    }
}

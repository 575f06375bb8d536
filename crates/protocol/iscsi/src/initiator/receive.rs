//! Dispatches the target's PDUs: which may arrive now, and what handles them.

use zerocopy::FromBytes;

use super::login::LoginStep;
use super::request::{Answer, CloseReason};
use super::send::LOGIN_ITT;
use super::tasks::TaskKind;
use super::{Connection, Phase};
use crate::params::DEFAULT_SEGMENT;
use crate::pdu::{
    AsyncMessage, BHS_LEN, Header, LoginResponse, LogoutResponse, NO_TAG, NopIn, Opcode, Reject,
    ScsiResponse, SequenceNumbers, TaskResponse, TextResponse,
};
use crate::sequence_number::SequenceNumber;
use crate::stream::{Event, Sink, Tag};

/// Most response data that is read, in bytes: more than sense data and its length.
const MAX_RESPONSE_DATA: usize = 4096;

/// Subject of the current PDU, handled once it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// Nothing.
    Ignored,
    /// Determined by its opcode.
    Response,
    /// Data for a command.
    Data(Tag),
}

impl Connection {
    fn close_on_violation(&mut self, what: &'static str) {
        self.finish(CloseReason::Violation(what));
    }

    /// Handles a received header and decides where the data goes.
    pub(super) fn on_header(&mut self) {
        let header = *Header::of(self.receiver.basic());
        let login = matches!(self.phase, Phase::Login(_));
        let longest = if login { DEFAULT_SEGMENT } else { self.params.initiator_max_segment };
        if self.receiver.segment_len() > longest as usize {
            return self.close_on_violation("a data segment longer than declared");
        }
        if header.ahs_words > 0 {
            return self.close_on_violation("additional header segments");
        }
        let taken = if login { login_header(&header) } else { self.response_header(&header) };
        match taken {
            Ok((sink, subject)) => {
                self.subject = subject;
                if let Event::Complete { intact } = self.receiver.accept(sink) {
                    self.on_complete(intact);
                }
            }
            Err(what) => self.close_on_violation(what),
        }
    }

    /// A PDU of the full feature phase.
    fn response_header(&mut self, header: &Header) -> Result<(Sink, Subject), &'static str> {
        let segment = self.receiver.segment_len();
        let keep = match header.opcode() {
            Opcode::DataIn => return self.on_data_header(),
            Opcode::ScsiResponse | Opcode::AsyncMessage => segment.min(MAX_RESPONSE_DATA),
            Opcode::TextResponse => segment,
            Opcode::Reject if segment >= BHS_LEN => BHS_LEN,
            Opcode::Reject => return Err("a Reject of no known PDU"),
            Opcode::NopIn => 0,
            Opcode::R2t | Opcode::TaskResponse | Opcode::LogoutResponse if segment == 0 => 0,
            Opcode::R2t | Opcode::TaskResponse | Opcode::LogoutResponse => {
                return Err("unexpected data segment");
            }
            _ => return Err("an unexpected PDU"),
        };
        Ok((Sink::Control(keep), Subject::Response))
    }

    /// Handles a complete PDU.
    pub(super) fn on_complete(&mut self, intact: bool) {
        let subject = std::mem::replace(&mut self.subject, Subject::Ignored);
        if !intact {
            return self.finish(CloseReason::DataDigest);
        }
        let header = *self.receiver.basic();
        let data = self.receiver.control();
        let took = match subject {
            Subject::Ignored => Ok(()),
            Subject::Data(tag) => self.on_data(tag, &header),
            Subject::Response => self.on_response(&header, &data),
        };
        self.receiver.reuse(data);
        match took {
            Ok(()) => self.send_pending(),
            Err(what) => self.close_on_violation(what),
        }
    }

    fn on_response(&mut self, header: &[u8; BHS_LEN], data: &[u8]) -> Result<(), &'static str> {
        let opcode = Header::of(header).opcode();
        let itt = Header::of(header).itt.get();
        if opcode == Opcode::LoginResponse {
            return self.on_login(LoginResponse::of(header), data);
        }
        let counts = opcode != Opcode::R2t && !(opcode == Opcode::NopIn && itt == NO_TAG);
        self.check_counters(header, counts)?;
        match opcode {
            Opcode::ScsiResponse => self.on_status(ScsiResponse::of(header), data),
            Opcode::R2t => self.on_r2t(crate::pdu::R2t::of(header)),
            Opcode::NopIn => self.on_nop(NopIn::of(header)),
            Opcode::TextResponse => self.on_text(TextResponse::of(header), data),
            Opcode::TaskResponse => self.on_task_response(TaskResponse::of(header)),
            Opcode::LogoutResponse => self.on_logout_response(LogoutResponse::of(header)),
            Opcode::AsyncMessage => self.on_async(AsyncMessage::of(header), data),
            Opcode::Reject => self.on_reject(Reject::of(header), data),
            _ => Err("an unexpected PDU"),
        }
    }

    /// Checks the counters of a PDU. A numbered status has the next number: a single connection
    /// loses nothing, so a skipped number is an error (RFC 7143 4.2.2.2).
    pub(super) fn check_counters(
        &mut self,
        header: &[u8; BHS_LEN],
        status: bool,
    ) -> Result<(), &'static str> {
        let numbers = SequenceNumbers::read_from_prefix(&header[24..]);
        let (numbers, _) = numbers.map_err(|_| "a header without counters")?;
        if status {
            let number = SequenceNumber(numbers.stat_sn.get());
            if self.exp_stat_sn.is_some_and(|expected| expected != number) {
                return Err("a status out of order");
            }
            self.exp_stat_sn = Some(number.plus(1));
        }
        // RFC 7143 4.2.2.1: a negative window is ignored; windows do not shrink.
        let (exp, max) =
            (SequenceNumber(numbers.exp_cmd_sn.get()), SequenceNumber(numbers.max_cmd_sn.get()));
        if !max.is_before(exp.plus(u32::MAX)) && self.max_cmd_sn.is_before(max) {
            self.max_cmd_sn = max;
        }
        Ok(())
    }

    /// Finds the request, of one of these kinds, that is answered.
    pub(super) fn find_request(
        &mut self,
        itt: u32,
        is: impl Fn(TaskKind) -> bool,
    ) -> Result<Tag, &'static str> {
        let tag = self.tasks.find(itt).ok_or("a response to no command")?;
        match self.tasks.get(tag) {
            Some(task) if is(task.kind) && task.queued_at.is_some() => Ok(tag),
            _ => Err("a response of another type"),
        }
    }

    fn on_login(&mut self, response: &LoginResponse, text: &[u8]) -> Result<(), &'static str> {
        if response.itt.get() != LOGIN_ITT {
            return Err("a response to another login");
        }
        let header = *self.receiver.basic();
        self.check_counters(&header, true)?;
        let config = std::sync::Arc::clone(&self.config);
        let Phase::Login(login) = &mut self.phase else { return Err("a second login") };
        match login.on_response(response, text, &config) {
            Ok(LoginStep::Send { flags, text }) => self.send_login(flags, &text),
            Ok(LoginStep::Done(_)) if response.tsih.get() == 0 => {
                return Err("a session without a handle");
            }
            Ok(LoginStep::Done(params)) => {
                self.receiver.set_digests(params.header_digest, params.data_digest);
                self.params = params;
                self.phase = Phase::Running;
            }
            Err(end) => {
                self.redirect_address = login.redirect_address();
                self.finish(end);
            }
        }
        Ok(())
    }

    /// Completes a request with its answer.
    pub(super) fn answer(&mut self, tag: Tag, answer: Answer) {
        self.complete(tag, Ok(answer));
        self.logout_if_idle();
    }
}

/// RFC 7143 6.3: during the login only its responses may arrive.
fn login_header(header: &Header) -> Result<(Sink, Subject), &'static str> {
    match header.opcode() {
        Opcode::LoginResponse => Ok((Sink::Control(DEFAULT_SEGMENT as usize), Subject::Response)),
        _ => Err("a PDU other than a Login Response"),
    }
}

//! What the target sends: which PDU may come now, and who takes it.

use zerocopy::FromBytes;

use super::login::Step;
use super::request::{Answer, End};
use super::send::LOGIN_ITT;
use super::tasks::Kind;
use super::{Connection, Phase};
use crate::params::DEFAULT_SEGMENT;
use crate::pdu::{
    AsyncMessage, BHS, Header, LoginResponse, LogoutResponse, NO_TAG, NopIn, Numbers, Opcode,
    Reject, ScsiResponse, TaskResponse, TextResponse,
};
use crate::serial::Serial;
use crate::stream::{Event, Sink, Tag};

/// Most of a response's data that is looked at, in bytes: sense data and its length, and more than that.
const KEPT: usize = 4096;

/// What the current PDU is about, once it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// Nothing.
    Ignored,
    /// Something that its opcode tells.
    Response,
    /// Data for a command.
    Data(Tag),
}

impl Connection {
    fn violated(&mut self, what: &'static str) {
        self.finish(End::Violation(what));
    }

    /// The header of a PDU is there: says where its data goes.
    pub(super) fn on_header(&mut self) {
        let header = *Header::of(self.receiver.basic());
        let login = matches!(self.phase, Phase::Login(_));
        let longest = if login { DEFAULT_SEGMENT } else { self.params.initiator_max_segment };
        if self.receiver.segment() > longest as usize {
            return self.violated("a data segment longer than declared");
        }
        if header.ahs_words > 0 {
            return self.violated("additional header segments");
        }
        let taken = if login { login_header(&header) } else { self.response_header(&header) };
        match taken {
            Ok((sink, subject)) => {
                self.subject = subject;
                if let Event::Complete { intact } = self.receiver.take(sink) {
                    self.on_complete(intact);
                }
            }
            Err(what) => self.violated(what),
        }
    }

    /// A PDU of the full feature phase.
    fn response_header(&mut self, header: &Header) -> Result<(Sink, Subject), &'static str> {
        let segment = self.receiver.segment();
        let keep = match header.opcode() {
            Opcode::DataIn => return self.on_data_header(),
            Opcode::ScsiResponse | Opcode::AsyncMessage => segment.min(KEPT),
            Opcode::TextResponse => segment,
            Opcode::Reject if segment >= BHS => BHS,
            Opcode::Reject => return Err("a rejection of nothing"),
            Opcode::NopIn => 0,
            Opcode::R2t | Opcode::TaskResponse | Opcode::LogoutResponse if segment == 0 => 0,
            Opcode::R2t | Opcode::TaskResponse | Opcode::LogoutResponse => {
                return Err("data where none belongs");
            }
            _ => return Err("a PDU that does not belong here"),
        };
        Ok((Sink::Control(keep), Subject::Response))
    }

    /// A PDU is there.
    pub(super) fn on_complete(&mut self, intact: bool) {
        let subject = std::mem::replace(&mut self.subject, Subject::Ignored);
        if !intact {
            return self.finish(End::DataDigest);
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
            Err(what) => self.violated(what),
        }
    }

    fn on_response(&mut self, header: &[u8; BHS], data: &[u8]) -> Result<(), &'static str> {
        let opcode = Header::of(header).opcode();
        let itt = Header::of(header).itt.get();
        if opcode == Opcode::LoginResponse {
            return self.on_login(LoginResponse::of(header), data);
        }
        let counts = opcode != Opcode::R2t && !(opcode == Opcode::NopIn && itt == NO_TAG);
        self.count(header, counts)?;
        match opcode {
            Opcode::ScsiResponse => self.on_status(ScsiResponse::of(header), data),
            Opcode::R2t => self.on_r2t(crate::pdu::R2t::of(header)),
            Opcode::NopIn => self.on_nop(NopIn::of(header)),
            Opcode::TextResponse => self.on_text(TextResponse::of(header), data),
            Opcode::TaskResponse => self.on_managed(TaskResponse::of(header)),
            Opcode::LogoutResponse => self.on_logged_out(LogoutResponse::of(header)),
            Opcode::AsyncMessage => self.on_async(AsyncMessage::of(header), data),
            Opcode::Reject => self.on_reject(Reject::of(header), data),
            _ => Err("a PDU that does not belong here"),
        }
    }

    /// Takes the counters of a PDU. A status that has a number of its own has the next one: on one connection
    /// nothing is lost, so a number that is left out is an error (RFC 7143 4.2.2.2).
    pub(super) fn count(&mut self, header: &[u8; BHS], status: bool) -> Result<(), &'static str> {
        let numbers = Numbers::read_from_prefix(&header[24..]);
        let (numbers, _) = numbers.map_err(|_| "a header without counters")?;
        if status {
            let number = Serial(numbers.stat_sn.get());
            if self.exp_stat_sn.is_some_and(|expected| expected != number) {
                return Err("a status out of order");
            }
            self.exp_stat_sn = Some(number.plus(1));
        }
        // RFC 7143 4.2.2.1: a window of less than nothing says nothing; windows do not shrink.
        let (exp, max) = (Serial(numbers.exp_cmd_sn.get()), Serial(numbers.max_cmd_sn.get()));
        if !max.is_before(exp.plus(u32::MAX)) && self.max_cmd_sn.is_before(max) {
            self.max_cmd_sn = max;
        }
        Ok(())
    }

    /// The answer to a request of one of these kinds.
    pub(super) fn expect(
        &mut self,
        itt: u32,
        is: impl Fn(Kind) -> bool,
    ) -> Result<Tag, &'static str> {
        let tag = self.tasks.find(itt).ok_or("an answer to nothing")?;
        match self.tasks.get(tag) {
            Some(task) if is(task.kind) && task.at.is_some() => Ok(tag),
            _ => Err("an answer to something else"),
        }
    }

    fn on_login(&mut self, response: &LoginResponse, text: &[u8]) -> Result<(), &'static str> {
        if response.itt.get() != LOGIN_ITT {
            return Err("an answer to another login");
        }
        let header = *self.receiver.basic();
        self.count(&header, true)?;
        let config = std::sync::Arc::clone(&self.config);
        let Phase::Login(login) = &mut self.phase else { return Err("a login twice") };
        match login.on_response(response, text, &config) {
            Ok(Step::Say { flags, text }) => self.send_login(flags, &text),
            Ok(Step::Done(_)) if response.tsih.get() == 0 => {
                return Err("a session without a handle");
            }
            Ok(Step::Done(params)) => {
                self.receiver.set_digests(params.header_digest, params.data_digest);
                self.params = params;
                self.phase = Phase::Running;
            }
            Err(end) => {
                self.moved_to = login.moved_to();
                self.finish(end);
            }
        }
        Ok(())
    }

    /// A request has been answered.
    pub(super) fn answer(&mut self, tag: Tag, answer: Answer) {
        self.complete(tag, Ok(answer));
        self.leave_if_over();
    }
}

/// RFC 7143 6.3: during the login nothing but its responses may come.
fn login_header(header: &Header) -> Result<(Sink, Subject), &'static str> {
    match header.opcode() {
        Opcode::LoginResponse => Ok((Sink::Control(DEFAULT_SEGMENT as usize), Subject::Response)),
        _ => Err("something else than the answer to a login"),
    }
}

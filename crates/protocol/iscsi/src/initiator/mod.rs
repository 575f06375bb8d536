//! The initiator role: one connection, which at error recovery level 0 is one session (RFC 7143).
//!
//! The counterpart of [`crate::target::Connection`]: it logs in, knows PDUs, digests, numbers and transfers,
//! and what a command means is its caller's affair.
//!
//! ```text
//!  submit ──► command (with immediate data) ──► unsolicited data ──► R2T ──► Data-Out ──┐
//!      waits for MaxCmdSN                                        └─► Data-In ───────────┴─► status ──► Done
//! ```
//!
//! * Each request that [`Connection::submit`] has taken ends in exactly one [`Done`], whatever becomes of the
//!   connection.
//! * Data is not copied: it goes out of the caller's buffers, and comes into them.
//! * What a target can make this side hold is bounded by the requests in flight. Data that it asks for is put
//!   together as the socket takes it.
//!
//! | module | subject |
//! |---|---|
//! | `login`, `auth`, `negotiate` | login phase, pure |
//! | `tasks` | requests in flight |
//! | `receive`, `data`, `control` | what the target sends |
//! | `send` | what is sent to it |
//! | `timers` | what may not take for ever |

mod auth;
mod config;
mod control;
mod data;
mod login;
mod negotiate;
mod receive;
mod request;
mod send;
mod tasks;
mod timers;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use frame::{Machine, SendQueue};

pub use config::{Config, Credentials, Fresh, MAX_IN_FLIGHT};
pub use request::{
    Answer, Command, Completion, Done, End, Lost, Notice, Payload, Request, Residual,
};

use login::Login;
use receive::Subject;
use tasks::{Kind, Task, Tasks, Transfer};
use timers::Clock;

use crate::params::Params;
use crate::serial::Serial;
use crate::stream::{Event, Receiver, Tag};

/// Data is put together until this many bytes wait to be sent.
const AHEAD_BYTES: usize = 256 * 1024;

/// Requests beside SCSI commands that may be in flight.
const MAX_OTHERS: usize = 8;

/// Longest text of one request in bytes: what every target takes.
const MAX_TEXT: usize = 8192;

/// Pings of the target that wait for their answers at most; it has no reason to send so many.
const MAX_PINGS: usize = 64;

/// Notices that wait to be taken at most; later ones say nothing new: look again.
const MAX_NOTICES: usize = 16;

/// One connection in the initiator role.
#[derive(Debug)]
pub struct Connection {
    config: Arc<Config>,
    phase: Phase,
    receiver: Receiver,
    subject: Subject,
    out: SendQueue,
    /// Bytes ever put into `out`.
    pushed: u64,
    params: Params,
    tasks: Tasks,
    /// Commands that wait for the target's window.
    pending: VecDeque<Tag>,
    /// Data that has not all been put into the output, in the order in which it is to be sent.
    transfers: VecDeque<Transfer>,
    /// Pings of the target that have not been answered: unit and transfer tag.
    pings: VecDeque<([u8; 8], u32)>,
    /// Text of the answer to the text request in flight.
    text: Option<Vec<u8>>,
    done: VecDeque<Done>,
    notices: VecDeque<Notice>,
    /// Number of the next command, and the last one that the target takes.
    cmd_sn: Serial,
    max_cmd_sn: Serial,
    /// Next status number; none has come yet where `None`.
    exp_stat_sn: Option<Serial>,
    clock: Clock,
    moved_to: Option<String>,
    end: Option<End>,
}

#[derive(Debug)]
enum Phase {
    Login(Box<Login>),
    /// Takes requests.
    Running,
    /// Takes none: the session is to end by this time.
    Leaving(Duration),
    /// To be closed.
    Closed,
}

impl Connection {
    /// A connection that has just been made: the first login request waits to be sent.
    #[must_use]
    pub fn new(config: Arc<Config>, fresh: Fresh) -> Self {
        let mut login = Login::new(&config, fresh);
        let (flags, text) = login.first(&config);
        let mut new = Self {
            phase: Phase::Login(Box::new(login)),
            receiver: Receiver::new(),
            subject: Subject::Ignored,
            out: SendQueue::default(),
            pushed: 0,
            params: Params::default(),
            tasks: Tasks::default(),
            pending: VecDeque::new(),
            transfers: VecDeque::new(),
            pings: VecDeque::new(),
            text: None,
            done: VecDeque::new(),
            notices: VecDeque::new(),
            cmd_sn: Serial(1),
            max_cmd_sn: Serial(0),
            exp_stat_sn: None,
            clock: Clock::default(),
            moved_to: None,
            end: None,
            config,
        };
        new.send_login(flags, &text);
        new
    }

    /// What was agreed on; `None` before the login is done.
    #[must_use]
    pub fn params(&self) -> Option<&Params> {
        match self.phase {
            Phase::Running | Phase::Leaving(_) => Some(&self.params),
            Phase::Login(_) | Phase::Closed => None,
        }
    }

    /// Why the connection ends; `None` while it does not.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Where the target says that it is, after [`End::Moved`]: `host:port`, perhaps without the port.
    #[must_use]
    pub fn moved_to(&self) -> Option<&str> {
        self.moved_to.as_deref()
    }

    /// Whether it takes requests, or will once the login is done.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Login(_) | Phase::Running)
    }

    /// Requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.tasks.select(|t| t.kind.is_asked()).len()
    }

    /// How many SCSI commands [`Self::submit`] takes now. What goes beyond the target's own window waits.
    #[must_use]
    pub fn room(&self) -> usize {
        let most = usize::from(self.config.in_flight.clamp(1, MAX_IN_FLIGHT));
        match self.phase {
            Phase::Running if self.config.target.is_some() => most - self.tasks.commands(),
            _ => 0,
        }
    }

    /// Sends a request, whose time begins at the `now` that was told last.
    ///
    /// `None`, and it is dropped, where there is no room for it: no [`Self::room`], for a SCSI command; eight
    /// in flight, for others; a text that is too long, or another one in flight; no session.
    ///
    /// # Panics
    /// If the payload is 4 GiB or longer.
    pub fn submit(&mut self, command: Command) -> Option<Tag> {
        let deadline = command.timeout.map(|timeout| self.clock.now() + timeout);
        let tag = match command.request {
            Request::Scsi { lun, cdb, payload } => {
                if self.room() == 0 {
                    return None;
                }
                let task = Task { lun, cdb, deadline, ..Task::default() };
                let tag = self.tasks.insert(with_payload(task, payload));
                self.pending.push_back(tag);
                self.send_pending();
                tag
            }
            other => self.submit_other(other, deadline)?,
        };
        self.clock.expect(deadline);
        Some(tag)
    }

    fn submit_other(&mut self, request: Request, deadline: Option<Duration>) -> Option<Tag> {
        let running = matches!(self.phase, Phase::Running);
        if !running || self.tasks.others() >= MAX_OTHERS {
            return None;
        }
        let (kind, text) = match request {
            Request::Text(text) if self.text.is_none() && text.len() <= MAX_TEXT => {
                self.text = Some(Vec::new());
                (Kind::Text, text)
            }
            Request::Text(_) | Request::Scsi { .. } => return None,
            Request::Abort(tag) => (Kind::Abort(tag), Vec::new()),
            Request::ResetUnit(lun) => (Kind::ResetUnit(lun), Vec::new()),
            Request::Ping => (Kind::Ping, Vec::new()),
            Request::Logout => (Kind::Logout, Vec::new()),
        };
        Some(self.send_other(kind, deadline, &text))
    }

    /// The next request that has ended, if any.
    pub fn poll_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// What the target has said without having been asked, if anything.
    pub fn poll_notice(&mut self) -> Option<Notice> {
        self.notices.pop_front()
    }

    /// Whether [`Self::poll_notice`] has something to tell.
    #[must_use]
    pub fn has_notice(&self) -> bool {
        !self.notices.is_empty()
    }

    /// Ends the connection. What has not been sent is not sent any more: the target may see half a PDU.
    pub fn close(&mut self) {
        self.finish(End::Closed);
    }

    /// Ends the connection at once: at error recovery level 0 that is what an error comes to (RFC 7143 7.1.1).
    fn finish(&mut self, end: End) {
        if matches!(self.phase, Phase::Closed) {
            return;
        }
        let sent = self.sent();
        self.end = Some(end);
        self.phase = Phase::Closed;
        self.out = SendQueue::default();
        self.receiver.stop();
        self.subject = Subject::Ignored;
        self.transfers.clear();
        self.pending.clear();
        self.pings.clear();
        self.text = None;
        for tag in self.tasks.select(|_| true) {
            let Some(task) = self.tasks.get(tag) else { continue };
            let unsent = task.at.is_none_or(|at| at >= sent);
            self.complete(tag, Err(if unsent { Lost::Unsent } else { Lost::InDoubt }));
        }
    }

    /// A request has ended.
    fn complete(&mut self, tag: Tag, outcome: Result<Answer, Lost>) {
        let Some(mut task) = self.tasks.remove(tag) else { return };
        if task.open_r2ts > 0 || task.asked > 0 {
            // What the target has asked for and does not want any more.
            let first = self.transfers.iter().find(|t| t.tag == tag).map(|t| t.at);
            self.transfers.retain(|t| t.tag != tag);
            task.withhold(first, self.sent());
        }
        if task.kind == Kind::Text {
            self.text = None;
        }
        if !task.kind.is_asked() {
            return;
        }
        let (moved, buffers) = (task.moved(), std::mem::take(&mut task.incoming));
        let is_command = task.kind == Kind::Scsi;
        self.done.push_back(Done { tag, is_command, outcome, moved, buffers });
    }

    /// Bytes that have been sent.
    fn sent(&self) -> u64 {
        self.pushed - self.out.len() as u64
    }
}

fn with_payload(task: Task, payload: Payload) -> Task {
    let length = u32::try_from(payload.len()).expect("shorter than 4 GiB");
    match payload {
        Payload::None => task,
        Payload::ToTarget(outgoing) => Task { outgoing, ..task },
        Payload::ToHost(incoming) => Task { incoming, room: length, ..task },
    }
}

impl Machine for Connection {
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        match self.phase {
            Phase::Closed => None,
            _ => self.receiver.space(&mut self.tasks),
        }
    }

    fn received(&mut self, n: usize) {
        if matches!(self.phase, Phase::Closed) {
            return;
        }
        self.clock.heard();
        match self.receiver.filled(n, &mut self.tasks) {
            Event::More => {}
            Event::Header => self.on_header(),
            Event::Complete { intact } => self.on_complete(intact),
            Event::HeaderDigest => self.finish(End::HeaderDigest),
        }
    }

    fn output(&mut self) -> &mut SendQueue {
        self.refill();
        &mut self.out
    }

    fn next_timer(&self) -> Option<Duration> {
        self.next_deadline()
    }

    fn on_timer(&mut self, now: Duration) {
        self.at(now);
    }

    fn is_closing(&self) -> bool {
        matches!(self.phase, Phase::Closed)
    }
}

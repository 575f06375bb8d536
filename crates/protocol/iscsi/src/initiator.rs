//! The initiator role: one connection, which at error recovery level 0 is one session (RFC 7143).
//!
//! The counterpart of [`crate::target::Connection`]: it logs in and handles PDUs, digests, sequence
//! numbers and transfers; the caller handles the meaning of commands.
//!
//! ```text
//!  submit ──► command (with immediate data) ──► unsolicited data ──► R2T ──► Data-Out ──┐
//!      waits for MaxCmdSN                                        └─► Data-In ───────────┴─► status ──► Done
//! ```
//!
//! * Each request that [`Connection::submit`] accepts ends in exactly one [`CompletedRequest`],
//!   whatever happens to the connection.
//! * Data is not copied: it is sent from, and received into, the caller's buffers.
//! * Memory that a target can make this side hold is limited by the requests in flight. Requested
//!   data is generated as the socket accepts it.
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

pub use config::{Config, Credentials, LoginNonce, MAX_IN_FLIGHT};
pub use request::{
    Answer, AsyncNotification, CloseReason, Command, CompletedRequest, Completion, LostRequest,
    Payload, Request, Residual,
};

use login::Login;
use receive::Subject;
use tasks::{DataOutSequence, Task, TaskKind, Tasks};
use timers::Timers;

use crate::params::Params;
use crate::sequence_number::SequenceNumber;
use crate::stream::{Event, Receiver, Tag};

/// Data is generated until this many bytes wait to be sent.
const SEND_AHEAD_BYTES: usize = 256 * 1024;

/// Most non-SCSI requests in flight.
const MAX_NON_SCSI_REQUESTS: usize = 8;

/// Longest text of one request in bytes: what every target accepts.
const MAX_TEXT: usize = 8192;

/// Most unanswered pings of the target; it has no reason to send so many.
const MAX_PINGS: usize = 64;

/// Most waiting notifications; later ones are dropped, as they add nothing new.
const MAX_NOTIFICATIONS: usize = 16;

/// One connection in the initiator role.
#[derive(Debug)]
pub struct Connection {
    config: Arc<Config>,
    phase: Phase,
    receiver: Receiver,
    subject: Subject,
    out: SendQueue,
    /// Bytes ever queued in `out`.
    queued_total: u64,
    params: Params,
    tasks: Tasks,
    /// Commands that wait for the target's window.
    pending: VecDeque<Tag>,
    /// Data not fully queued yet, in sending order.
    data_out_sequences: VecDeque<DataOutSequence>,
    /// Pings of the target that have not been answered: unit and transfer tag.
    unanswered_pings: VecDeque<([u8; 8], u32)>,
    /// Text of the answer to the text request in flight.
    text: Option<Vec<u8>>,
    done: VecDeque<CompletedRequest>,
    notifications: VecDeque<AsyncNotification>,
    /// Number of the next command, and the last one that the target accepts.
    cmd_sn: SequenceNumber,
    max_cmd_sn: SequenceNumber,
    /// Next status number; `None` before the first status.
    exp_stat_sn: Option<SequenceNumber>,
    timers: Timers,
    redirect_address: Option<String>,
    close_reason: Option<CloseReason>,
}

#[derive(Debug)]
enum Phase {
    Login(Box<Login>),
    /// Accepts requests.
    Running,
    /// Accepts none: the session has to end by this time.
    LogoutRequested(Duration),
    /// To be closed.
    Closed,
}

impl Connection {
    /// A new connection: the first login request is queued.
    #[must_use]
    pub fn new(config: Arc<Config>, fresh: LoginNonce) -> Self {
        let mut login = Login::new(&config, fresh);
        let (flags, text) = login.first_request(&config);
        let mut new = Self {
            phase: Phase::Login(Box::new(login)),
            receiver: Receiver::new(),
            subject: Subject::Ignored,
            out: SendQueue::default(),
            queued_total: 0,
            params: Params::default(),
            tasks: Tasks::default(),
            pending: VecDeque::new(),
            data_out_sequences: VecDeque::new(),
            unanswered_pings: VecDeque::new(),
            text: None,
            done: VecDeque::new(),
            notifications: VecDeque::new(),
            cmd_sn: SequenceNumber(1),
            max_cmd_sn: SequenceNumber(0),
            exp_stat_sn: None,
            timers: Timers::default(),
            redirect_address: None,
            close_reason: None,
            config,
        };
        new.send_login(flags, &text);
        new
    }

    /// Negotiated parameters; `None` before the login is done.
    #[must_use]
    pub fn params(&self) -> Option<&Params> {
        match self.phase {
            Phase::Running | Phase::LogoutRequested(_) => Some(&self.params),
            Phase::Login(_) | Phase::Closed => None,
        }
    }

    /// Why the connection ended; `None` while it is open.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.close_reason
    }

    /// The target's redirection address after [`CloseReason::Redirected`]: `host:port`, perhaps
    /// without the port.
    #[must_use]
    pub fn redirect_address(&self) -> Option<&str> {
        self.redirect_address.as_deref()
    }

    /// Whether it accepts requests, or will once the login is done.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Login(_) | Phase::Running)
    }

    /// Requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.tasks.select(|t| t.kind.is_from_caller()).len()
    }

    /// How many SCSI commands [`Self::submit`] accepts now. Commands beyond the target's own window
    /// wait.
    #[must_use]
    pub fn free_command_slots(&self) -> usize {
        let most = usize::from(self.config.max_in_flight.clamp(1, MAX_IN_FLIGHT));
        match self.phase {
            Phase::Running if self.config.target.is_some() => most - self.tasks.commands(),
            _ => 0,
        }
    }

    /// Sends a request; its timeout starts at the last `now`.
    ///
    /// Returns `None` and drops the request if there is no slot for it: no
    /// [`Self::free_command_slots`], for a SCSI command; eight in flight, for others; a text that
    /// is too long, or another one in flight; no session.
    ///
    /// # Panics
    /// If the payload is 4 GiB or longer.
    pub fn submit(&mut self, command: Command) -> Option<Tag> {
        let deadline = command.timeout.map(|timeout| self.timers.now() + timeout);
        let tag = match command.request {
            Request::Scsi { lun, cdb, payload } => {
                if self.free_command_slots() == 0 {
                    return None;
                }
                let task = Task { lun, cdb, deadline, ..Task::default() };
                let tag = self.tasks.insert(with_payload(task, payload));
                self.pending.push_back(tag);
                self.send_pending();
                tag
            }
            other => self.submit_non_scsi(other, deadline)?,
        };
        self.timers.add_deadline(deadline);
        Some(tag)
    }

    fn submit_non_scsi(&mut self, request: Request, deadline: Option<Duration>) -> Option<Tag> {
        let running = matches!(self.phase, Phase::Running);
        if !running || self.tasks.non_scsi() >= MAX_NON_SCSI_REQUESTS {
            return None;
        }
        let (kind, text) = match request {
            Request::Text(text) if self.text.is_none() && text.len() <= MAX_TEXT => {
                self.text = Some(Vec::new());
                (TaskKind::Text, text)
            }
            Request::Text(_) | Request::Scsi { .. } => return None,
            Request::Abort(tag) => (TaskKind::Abort(tag), Vec::new()),
            Request::ResetUnit(lun) => (TaskKind::ResetUnit(lun), Vec::new()),
            Request::Ping => (TaskKind::Ping, Vec::new()),
            Request::Logout => (TaskKind::Logout, Vec::new()),
        };
        Some(self.send_non_scsi(kind, deadline, &text))
    }

    /// The next completed request, if any.
    pub fn poll_done(&mut self) -> Option<CompletedRequest> {
        self.done.pop_front()
    }

    /// The target's next asynchronous notification, if any.
    pub fn poll_notification(&mut self) -> Option<AsyncNotification> {
        self.notifications.pop_front()
    }

    /// Whether [`Self::poll_notification`] would return one.
    #[must_use]
    pub fn has_notification(&self) -> bool {
        !self.notifications.is_empty()
    }

    /// Closes the connection without sending the rest of the output: the target may see half a PDU.
    pub fn close(&mut self) {
        self.finish(CloseReason::Closed);
    }

    /// Closes the connection at once: the only error recovery at level 0 (RFC 7143 7.1.1).
    fn finish(&mut self, end: CloseReason) {
        if matches!(self.phase, Phase::Closed) {
            return;
        }
        let sent = self.sent_total();
        self.close_reason = Some(end);
        self.phase = Phase::Closed;
        self.out = SendQueue::default();
        self.receiver.stop();
        self.subject = Subject::Ignored;
        self.data_out_sequences.clear();
        self.pending.clear();
        self.unanswered_pings.clear();
        self.text = None;
        for tag in self.tasks.select(|_| true) {
            let Some(task) = self.tasks.get(tag) else { continue };
            let unsent = task.queued_at.is_none_or(|at| at >= sent);
            self.complete(
                tag,
                Err(if unsent { LostRequest::Unsent } else { LostRequest::InDoubt }),
            );
        }
    }

    /// Completes a request.
    fn complete(&mut self, tag: Tag, outcome: Result<Answer, LostRequest>) {
        let Some(mut task) = self.tasks.remove(tag) else { return };
        if task.open_r2ts > 0 || task.solicited_bytes > 0 {
            // Drop solicited data that the target no longer needs.
            let first = self.data_out_sequences.iter().find(|t| t.tag == tag).map(|t| t.at);
            self.data_out_sequences.retain(|t| t.tag != tag);
            task.retract_unsent(first, self.sent_total());
        }
        if task.kind == TaskKind::Text {
            self.text = None;
        }
        if !task.kind.is_from_caller() {
            return;
        }
        let (moved, buffers) = (task.transferred(), std::mem::take(&mut task.incoming));
        let is_command = task.kind == TaskKind::Scsi;
        self.done.push_back(CompletedRequest {
            tag,
            is_command,
            outcome,
            transferred: moved,
            buffers,
        });
    }

    /// Bytes that have been sent.
    fn sent_total(&self) -> u64 {
        self.queued_total - self.out.len() as u64
    }
}

fn with_payload(task: Task, payload: Payload) -> Task {
    let length = u32::try_from(payload.len()).expect("shorter than 4 GiB");
    match payload {
        Payload::None => task,
        Payload::ToTarget(outgoing) => Task { outgoing, ..task },
        Payload::ToHost(incoming) => Task { incoming, capacity: length, ..task },
    }
}

impl Machine for Connection {
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        match self.phase {
            Phase::Closed => None,
            _ => self.receiver.space(&mut self.tasks),
        }
    }

    fn on_received(&mut self, n: usize) {
        if matches!(self.phase, Phase::Closed) {
            return;
        }
        self.timers.record_received();
        match self.receiver.filled(n, &mut self.tasks) {
            Event::More => {}
            Event::Header => self.on_header(),
            Event::Complete { intact } => self.on_complete(intact),
            Event::HeaderDigest => self.finish(CloseReason::HeaderDigest),
        }
    }

    fn output(&mut self) -> &mut SendQueue {
        self.fill_output();
        &mut self.out
    }

    fn next_timer(&self) -> Option<Duration> {
        self.next_deadline()
    }

    fn on_timer(&mut self, now: Duration) {
        self.advance_to(now);
    }

    fn is_closing(&self) -> bool {
        matches!(self.phase, Phase::Closed)
    }
}

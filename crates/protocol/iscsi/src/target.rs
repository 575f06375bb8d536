//! The target role: one connection, which at error recovery level 0 is one session.
//!
//! [`Connection`] takes bytes and decisions and returns bytes and [`Action`]s; see
//! [`frame::Machine`] for the plumbing. It holds all state of the session; the driver handles what
//! sessions share (the list of sessions, access control, reservations, other sessions' tasks).
//!
//! | module | subject |
//! |---|---|
//! | `dispatch` | which PDU may come now, and who takes it |
//! | `login`, `auth` | login phase, pure |
//! | `window` | command numbers |
//! | `task`, `command`, `data_out`, `response` | a SCSI command from its arrival to its status |
//! | `read_transfer` | a read whose data is being sent |
//! | `task_management`, `logout`, `text`, `nop` | the other requests |
//! | `send` | the counters in what is sent |
//! | `timers` | what may not take for ever |

mod action;
mod auth;
mod command;
mod config;
mod data_out;
mod dispatch;
mod login;
mod logout;
mod nop;
mod read_transfer;
mod response;
mod send;
mod task;
mod task_management;
mod text;
mod timers;
mod window;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use frame::{Machine, SendQueue};

pub use action::{
    Action, ArrivedCommand, AsyncNotification, Auth, ChapPolicy, CloseReason, CommandOutcome,
    Direction, LoginAttempt, LoginGrant, LoginReject, NegotiatedSession, RequestId,
    SendTargetsScope, TargetRecord,
};
pub use config::Config;

pub use crate::stream::Tag;

use dispatch::Subject;
use login::Login;
use logout::Logout;
use task::Tasks;
use task_management::TaskManagementRequests;
use text::TextExchange;
use timers::Timers;
use window::CommandWindow;

use crate::params::Params;
use crate::sequence_number::SequenceNumber;
use crate::stream::{Event, Receiver};

/// With more than this waiting to be sent, no further PDU is received.
const OUTPUT_LIMIT: usize = 1024 * 1024;

/// With this many actions pending, no further PDU is received.
const ACTION_LIMIT: usize = 64;

/// One connection in the target role.
#[derive(Debug)]
pub struct Connection {
    config: Arc<Config>,
    phase: Phase,
    receiver: Receiver,
    subject: Subject,
    output: SendQueue,
    actions: VecDeque<Action>,
    /// Next status number.
    stat_sn: SequenceNumber,
    window: CommandWindow,
    params: Params,
    tasks: Tasks,
    /// Completed reads whose data does not fit into the output yet.
    blocked_reads: VecDeque<Tag>,
    task_management: TaskManagementRequests,
    text_exchange: Option<TextExchange>,
    logout: Option<Logout>,
    /// Last target transfer tag that was used.
    last_ttt: u32,
    /// Identifier of this connection within its session.
    cid: u16,
    timers: Timers,
}

#[derive(Debug)]
enum Phase {
    Login(Box<Login>),
    /// The driver decides about the login.
    Deciding(Box<Login>),
    /// The driver establishes the session.
    Establishing(Box<Login>),
    FullFeature {
        discovery: bool,
    },
    Closed,
}

impl Connection {
    /// A newly accepted connection.
    #[must_use]
    pub fn new(config: Arc<Config>) -> Self {
        Self {
            phase: Phase::Login(Box::new(Login::new())),
            receiver: Receiver::new(),
            subject: Subject::Ignored,
            output: SendQueue::default(),
            actions: VecDeque::new(),
            stat_sn: SequenceNumber(0),
            window: CommandWindow::new(SequenceNumber(0), config.window),
            params: Params::default(),
            tasks: Tasks::default(),
            blocked_reads: VecDeque::new(),
            task_management: TaskManagementRequests::default(),
            text_exchange: None,
            logout: None,
            last_ttt: 0,
            cid: 0,
            timers: Timers::default(),
            config,
        }
    }

    /// The next action. Take all actions after every other call.
    pub fn poll_action(&mut self) -> Option<Action> {
        let action = self.actions.pop_front()?;
        if let Some(task) = action.tag().and_then(|tag| self.tasks.get(tag)) {
            task.queued -= 1;
        }
        Some(action)
    }

    /// Number of pending actions.
    #[must_use]
    pub fn pending_actions(&self) -> usize {
        self.actions.len()
    }

    /// What was negotiated.
    #[must_use]
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Commands that have arrived and have not been answered.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.tasks.len()
    }

    /// Changes the command window. What was announced stays valid: a smaller window takes effect as
    /// commands are answered.
    pub fn set_window(&mut self, commands: u32) {
        if self.window.resize(commands) && self.is_full_feature() {
            self.announce_window();
        }
    }

    /// Closes the connection once its output has been sent.
    pub fn close(&mut self) {
        self.end(CloseReason::Requested);
    }

    fn is_full_feature(&self) -> bool {
        matches!(self.phase, Phase::FullFeature { .. })
    }

    /// Closes the connection; nothing more is received, and no more command responses are sent.
    fn end(&mut self, reason: CloseReason) {
        if matches!(self.phase, Phase::Closed) {
            return;
        }
        self.phase = Phase::Closed;
        self.receiver.stop();
        self.subject = Subject::Ignored;
        self.tasks = Tasks::default();
        self.blocked_reads.clear();
        self.task_management = TaskManagementRequests::default();
        self.text_exchange = None;
        self.logout = None;
        self.actions.clear();
        self.actions.push_back(Action::Close(reason));
    }

    /// Whether a further PDU may be received now.
    fn can_receive_pdu(&self) -> bool {
        let decided = matches!(self.phase, Phase::Login(_) | Phase::FullFeature { .. });
        decided
            && self.logout.is_none()
            && !self.text_exchange.as_ref().is_some_and(TextExchange::waits_for_driver)
            && self.actions.len() < ACTION_LIMIT
            && self.output.len() <= OUTPUT_LIMIT
    }

    /// Whether bytes are received now.
    fn is_receiving(&self) -> bool {
        match self.phase {
            Phase::Closed => false,
            _ if self.receiver.is_between_pdus() => self.can_receive_pdu(),
            _ => !self.receiver.is_blocked(),
        }
    }
}

impl Machine for Connection {
    /// `None` may turn into `Some` after any decision of the driver, after actions were taken,
    /// and after output was sent.
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        if self.is_receiving() { self.receiver.space(&mut self.tasks) } else { None }
    }

    fn on_received(&mut self, n: usize) {
        self.timers.record_received();
        match self.receiver.filled(n, &mut self.tasks) {
            Event::More => {}
            Event::Header => self.on_header(),
            Event::Complete { intact } => self.on_complete(intact),
            Event::HeaderDigest => self.end(CloseReason::HeaderDigest),
        }
    }

    /// Read data is added as the queue drains: call this again after everything was sent.
    fn output(&mut self) -> &mut SendQueue {
        self.resume_reads();
        &mut self.output
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

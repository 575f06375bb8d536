//! The target role: one connection, which at error recovery level 0 is one session.
//!
//! [`Connection`] is fed bytes and decisions and gives bytes and [`Action`]s; see
//! [`frame::Machine`] for the plumbing. All state of the session is in it; what several sessions
//! share (which sessions there are, who may log in, reservations, other sessions' tasks) is its
//! driver's.
//!
//! | module | subject |
//! |---|---|
//! | `dispatch` | which PDU may come now, and who takes it |
//! | `login`, `auth` | login phase, pure |
//! | `window` | command numbers |
//! | `task`, `command`, `data_out`, `answer` | a SCSI command from its arrival to its status |
//! | `management`, `logout`, `text`, `nop` | the other requests |
//! | `send` | the counters in what is sent |
//! | `timers` | what may not take for ever |

mod action;
mod answer;
mod auth;
mod command;
mod config;
mod data_out;
mod dispatch;
mod login;
mod logout;
mod management;
mod nop;
mod send;
mod task;
mod text;
mod timers;
mod window;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use frame::{Machine, SendQueue};

pub use action::{
    Action, Arrived, Auth, ChapPolicy, CloseReason, Direction, LoginAttempt, LoginGrant,
    LoginReject, Notice, Outcome, RequestId, Scope, Session, TargetRecord,
};
pub use config::Config;

pub use crate::stream::Tag;

use dispatch::Subject;
use login::Login;
use logout::Logout;
use management::Functions;
use task::Tasks;
use text::Exchange;
use timers::Clock;
use window::Window;

use crate::params::Params;
use crate::serial::Serial;
use crate::stream::{Event, Receiver};

/// With more than this waiting to be sent, no further PDU is received.
const OUTPUT_LIMIT: usize = 1024 * 1024;

/// With so many actions waiting to be taken, no further PDU is received.
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
    stat_sn: Serial,
    window: Window,
    params: Params,
    tasks: Tasks,
    /// Reads that have ended and whose data the output has no room for.
    backlog: VecDeque<Tag>,
    functions: Functions,
    exchange: Option<Exchange>,
    logout: Option<Logout>,
    /// Last target transfer tag that was used.
    last_ttt: u32,
    /// Identifier of this connection within its session.
    cid: u16,
    clock: Clock,
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
    /// A connection that has just been accepted.
    #[must_use]
    pub fn new(config: Arc<Config>) -> Self {
        Self {
            phase: Phase::Login(Box::new(Login::new())),
            receiver: Receiver::new(),
            subject: Subject::Ignored,
            output: SendQueue::default(),
            actions: VecDeque::new(),
            stat_sn: Serial(0),
            window: Window::new(Serial(0), config.window),
            params: Params::default(),
            tasks: Tasks::default(),
            backlog: VecDeque::new(),
            functions: Functions::default(),
            exchange: None,
            logout: None,
            last_ttt: 0,
            cid: 0,
            clock: Clock::default(),
            config,
        }
    }

    /// The next thing to do. Take actions until there are none after every other call.
    pub fn poll_action(&mut self) -> Option<Action> {
        let action = self.actions.pop_front()?;
        if let Some(task) = action.tag().and_then(|tag| self.tasks.get(tag)) {
            task.queued -= 1;
        }
        Some(action)
    }

    /// Actions that wait to be taken.
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

    /// Changes how many commands the initiator may have outstanding. What it was told already
    /// stays true: a smaller window takes effect as commands are answered.
    pub fn set_window(&mut self, commands: u32) {
        if self.window.resize(commands) && self.is_full_feature() {
            self.announce_window();
        }
    }

    /// Ends the connection once what waits to be sent has been sent.
    pub fn close(&mut self) {
        self.end(CloseReason::Requested);
    }

    fn is_full_feature(&self) -> bool {
        matches!(self.phase, Phase::FullFeature { .. })
    }

    /// Ends the connection; nothing more is received, and nothing about commands sent.
    fn end(&mut self, reason: CloseReason) {
        if matches!(self.phase, Phase::Closed) {
            return;
        }
        self.phase = Phase::Closed;
        self.receiver.stop();
        self.subject = Subject::Ignored;
        self.tasks = Tasks::default();
        self.backlog.clear();
        self.functions = Functions::default();
        self.exchange = None;
        self.logout = None;
        self.actions.clear();
        self.actions.push_back(Action::Close(reason));
    }

    /// Whether a further PDU may be received now.
    fn takes_pdus(&self) -> bool {
        let decided = matches!(self.phase, Phase::Login(_) | Phase::FullFeature { .. });
        decided
            && self.logout.is_none()
            && !self.exchange.as_ref().is_some_and(Exchange::waits_for_driver)
            && self.actions.len() < ACTION_LIMIT
            && self.output.len() <= OUTPUT_LIMIT
    }

    /// Whether bytes are received now.
    fn listens(&self) -> bool {
        match self.phase {
            Phase::Closed => false,
            _ if self.receiver.is_between() => self.takes_pdus(),
            _ => !self.receiver.is_blocked(),
        }
    }
}

impl Machine for Connection {
    /// `None` may turn into `Some` after any decision of the driver, after actions were taken,
    /// and after output was sent.
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        if self.listens() { self.receiver.space(&mut self.tasks) } else { None }
    }

    fn received(&mut self, n: usize) {
        self.clock.heard();
        match self.receiver.filled(n, &mut self.tasks) {
            Event::More => {}
            Event::Header => self.on_header(),
            Event::Complete { intact } => self.on_complete(intact),
            Event::HeaderDigest => self.end(CloseReason::HeaderDigest),
        }
    }

    /// Data of reads is added as the queue gets shorter: ask again after everything was sent.
    fn output(&mut self) -> &mut SendQueue {
        self.refill();
        &mut self.output
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

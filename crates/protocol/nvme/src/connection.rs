//! The machine of one TCP connection: one queue of one controller (NVMe/TCP Transport 1.0).
//!
//! It knows PDUs, digests, capsules, transfers and queue slots. What a command means is decided
//! elsewhere ([`crate::Controller`]); the driver carries [`Action`]s there and answers back:
//!
//! ```text
//!  Arrived ──admit──► Grant ──grant──► (data arrives) ──► Run ──complete──► response
//!     └───────────────────────────── complete ─────────────────────────────────┘
//! ```
//!
//! * Data in a capsule stands in front of everything behind it, so reception waits for the
//!   command's memory ([`Class::Arriving`]); data by R2T does not ([`Class::Solicited`]).
//! * Each [`Action::Arrived`] is ended by exactly one [`Connection::complete`].
//! * A slot of the queue is taken from the arrival of the capsule until its response has been
//!   handed to the socket; a host that sends more than the queue holds is cut off. So nothing
//!   here grows beyond the queue, whatever the host does.
//!
//! [`Class::Arriving`]: block::Class::Arriving
//! [`Class::Solicited`]: block::Class::Solicited

mod commands;
mod fatal;
mod receive;
mod send;

use std::collections::VecDeque;
use std::time::Duration;

use block::{Bufs, BufsMut, Class};
use frame::{Machine, SendQueue};

use crate::entry::{Completion, Fuse, Sqe};
use crate::pdu::MIN_MAX_H2C_DATA;
use crate::status::Status;
use crate::stream::{Incoming, Receiver, Sender, Tag};
use commands::{Commands, Stage};
pub use fatal::End;

/// Most data in a command capsule, in bytes, on every queue (NVMe/TCP 3.3: at least 8 KiB on the
/// admin queue; IOCCSZ says so for I/O queues). What comes so costs no R2T: no round trip, and two PDUs less.
pub const IN_CAPSULE_BYTES: u32 = 128 * 1024;

/// Limits and times of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most data in one H2CData PDU (MAXH2CDATA), in bytes; raised to 4096 and cut to a multiple
    /// of 4.
    pub max_h2c_data: u32,
    /// Most data in one C2HData PDU, in bytes.
    pub max_c2h_data: u32,
    /// How long a host may take from the start to a Connect command that succeeds.
    pub establish_timeout: Duration,
    /// How long a host may take to finish a PDU, or to send what an R2T asked for.
    pub receive_timeout: Duration,
    /// How long to wait, after C2HTermReq, for the host to close.
    pub linger: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_h2c_data: 1 << 20,
            max_c2h_data: 1 << 20,
            establish_timeout: Duration::from_secs(10),
            receive_timeout: Duration::from_secs(60),
            linger: Duration::from_secs(5),
        }
    }
}

/// The queue that a connection serves once Connect has succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Queue identifier; 0 is the admin queue.
    pub id: u16,
    /// Entries (SQSIZE + 1): commands that may be in flight.
    pub entries: u16,
    /// Whether the host uses SQHD. If it does not, reads end with the SUCCESS flag.
    pub flow_control: bool,
}

/// What the machine wants of its driver.
#[derive(Debug)]
pub enum Action {
    /// A command has arrived: [`Connection::admit`] it, or [`Connection::complete`] it at once.
    /// Before the queue is connected only Connect commands arrive.
    Arrived {
        /// The command's handle.
        tag: Tag,
        /// The command.
        sqe: Sqe,
    },
    /// An admitted command needs memory for its data: [`Connection::grant`] it, now or later.
    Grant {
        /// The command.
        tag: Tag,
        /// How many bytes.
        bytes: u32,
        /// For which use.
        class: Class,
    },
    /// The command and all its data are here: carry it out.
    Run {
        /// The command.
        tag: Tag,
        /// Data from the host.
        data: Bufs,
    },
    /// The machine has refused a command that has not arrived, for it breaks the transport's rules.
    /// Others may have been waiting for it.
    Refused {
        /// Which half of a fused operation it would have been.
        fuse: Fuse,
        /// What the host was told.
        status: Status,
    },
    /// The machine has answered the command itself; complete it with anything.
    Abort {
        /// The command.
        tag: Tag,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Waits for ICReq.
    Initializing,
    /// Waits for a Connect that succeeds.
    Connecting,
    /// Serves a queue.
    Running,
    /// C2HTermReq is out; what comes is thrown away.
    Lingering { until: Duration },
    /// To be closed.
    Closed,
}

/// One connection of an NVMe/TCP controller.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    phase: Phase,
    queue: Queue,
    /// Head of the submission queue, as SQHD reports it.
    sq_head: u16,
    receiver: Receiver,
    sender: Sender,
    commands: Commands,
    actions: VecDeque<Action>,
    /// Where in what was sent the responses end that have not been sent yet.
    unsent: VecDeque<u64>,
    now: Duration,
    /// When to look for R2Ts that the host has left unanswered.
    data_deadline: Option<Duration>,
    end: Option<End>,
}

impl Connection {
    /// A connection that has just been accepted: it waits for ICReq.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let max_h2c_data = config.max_h2c_data.max(MIN_MAX_H2C_DATA) & !3;
        let max_c2h_data = config.max_c2h_data.max(4096) & !3;
        Self {
            config: Config { max_h2c_data, max_c2h_data, ..config },
            phase: Phase::Initializing,
            queue: Queue { id: 0, entries: 1, flow_control: true },
            sq_head: 0,
            receiver: Receiver::default(),
            sender: Sender::default(),
            commands: Commands::default(),
            actions: VecDeque::new(),
            unsent: VecDeque::new(),
            now: Duration::ZERO,
            data_deadline: None,
            end: None,
        }
    }

    /// The next action, if any.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The queue this connection serves; `None` before Connect has succeeded.
    #[must_use]
    pub fn queue(&self) -> Option<Queue> {
        (self.phase == Phase::Running).then_some(self.queue)
    }

    /// Header and data digests agreed on.
    #[must_use]
    pub fn digests(&self) -> (bool, bool) {
        (self.sender.digests.header, self.sender.digests.data)
    }

    /// Why the connection ends; `None` while it does not.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// The command in flight that the host knows as `cid`.
    #[must_use]
    pub fn find(&self, cid: u16) -> Option<Tag> {
        self.commands.find(cid)
    }

    /// Commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.commands.in_flight()
    }

    /// Accepts a command that has arrived, with `data_out` bytes of data from the host: none, or
    /// all that it describes. What else is in its capsule is thrown away.
    pub fn admit(&mut self, tag: Tag, data_out: u32) {
        let Some(c) = self.commands.get_mut(tag).filter(|c| c.stage == Stage::Arrived) else {
            return;
        };
        if data_out == 0 {
            self.run(tag);
            self.actions.push_back(Action::Run { tag, data: Bufs::new() });
            return;
        }
        if data_out != c.host_bytes {
            c.stage = Stage::Told;
            let cid = c.cid;
            self.receiver.drop_waiting(tag, self.now);
            let failed = Completion::failed(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
            self.respond(cid, failed);
            self.actions.push_back(Action::Abort { tag });
            return;
        }
        c.stage = Stage::Granting;
        let class = if c.in_capsule { Class::Arriving } else { Class::Solicited };
        self.actions.push_back(Action::Grant { tag, bytes: data_out, class });
    }

    /// Accepts a command that has arrived and wants no data from the host: the driver carries it out now, and no
    /// [`Action::Run`] comes of it. What else is in its capsule is thrown away.
    pub fn run(&mut self, tag: Tag) {
        if let Some(c) = self.commands.get_mut(tag).filter(|c| c.stage == Stage::Arrived) {
            c.stage = Stage::Running;
            self.receiver.drop_waiting(tag, self.now);
        }
    }

    /// Gives a command the memory it asked for; for one that has been completed meanwhile,
    /// nothing happens.
    ///
    /// # Panics
    /// If the buffers are not exactly as long as was asked.
    pub fn grant(&mut self, tag: Tag, buffers: BufsMut) {
        let Some(c) = self.commands.get_mut(tag).filter(|c| c.stage == Stage::Granting) else {
            return;
        };
        let bytes: usize = buffers.iter().map(|b| b.len()).sum();
        assert_eq!(bytes, c.host_bytes as usize, "memory granted for command {:#x}", c.cid);
        c.stage = Stage::Receiving;
        c.data = Incoming::new(buffers);
        if c.in_capsule {
            self.receiver.resume(tag, self.now);
            return;
        }
        c.since = self.now;
        let (cid, length) = (c.cid, c.host_bytes);
        self.data_deadline.get_or_insert(self.now + self.config.receive_timeout);
        self.send_r2t(cid, tag, length);
    }

    /// Ends a command: sends `data` (only with success, and no more than the host described),
    /// then the response. If the host still owes data that was asked for, the response waits
    /// for it.
    pub fn complete(&mut self, tag: Tag, completion: Completion, data: &Bufs) {
        let open = self.is_open();
        let Some(c) = self.commands.get_mut(tag) else { return };
        let owes_data = c.stage == Stage::Receiving && !c.in_capsule;
        if owes_data && open {
            c.data.discard();
            c.outcome.get_or_insert(completion);
            return;
        }
        self.receiver.drop_waiting(tag, self.now);
        let c = self.commands.remove(tag);
        if c.stage == Stage::Told || !open {
            return;
        }
        if !completion.status.is_success() || data.is_empty() {
            self.respond(c.cid, completion);
        } else if !c.to_host || data.len() > c.host_bytes as usize {
            // More than the host has room for: a defect on this side; never send it.
            let status = Status::INTERNAL_ERROR.do_not_retry();
            self.respond(c.cid, Completion::failed(status));
        } else {
            self.send_data_and_respond(c.cid, completion, data);
        }
    }

    /// Ends a command without a response: a controller reset has discarded it.
    pub fn forget(&mut self, tag: Tag) {
        if self.commands.get_mut(tag).is_some_and(|c| c.stage == Stage::Running) {
            self.commands.remove(tag);
            self.actions.retain(|a| !matches!(a, Action::Run { tag: t, .. } if *t == tag));
        }
    }

    /// Ends a Connect command with success: from here on this connection is that queue.
    /// Identifies the controller to the host by `result` (NVMe Base 2.0, 6.3).
    pub fn connected(&mut self, tag: Tag, queue: Queue, result: u64) {
        if self.phase != Phase::Connecting {
            return self.complete(tag, Completion::ok(result), &Bufs::new());
        }
        self.phase = Phase::Running;
        self.queue = Queue { entries: queue.entries.max(2), ..queue };
        self.complete(tag, Completion::ok(result), &Bufs::new());
    }

    /// Ends the connection once what waits to be sent has been sent.
    pub fn close(&mut self) {
        if self.is_open() {
            self.finish(End::Closed);
        }
    }

    fn is_open(&self) -> bool {
        !matches!(self.phase, Phase::Lingering { .. } | Phase::Closed)
    }

    /// Stops reception; commands in flight are for the driver to complete, unheard.
    fn finish(&mut self, end: End) {
        self.end.get_or_insert(end);
        self.phase = Phase::Closed;
        self.actions.clear();
        self.commands.forget_ended();
    }

    /// Capsules whose slot is taken: in flight, or answered and the answer not sent yet.
    fn slots_taken(&mut self) -> usize {
        let sent = self.sender.sent();
        while self.unsent.front().is_some_and(|&end| end <= sent) {
            self.unsent.pop_front();
        }
        self.commands.in_flight() + self.unsent.len()
    }

    /// All data of a command has come.
    fn data_complete(&mut self, tag: Tag) {
        let Some(c) = self.commands.get_mut(tag) else { return };
        if let Some(outcome) = c.outcome {
            let cid = self.commands.remove(tag).cid;
            return self.respond(cid, outcome);
        }
        if c.data.corrupt {
            // NVMe/TCP 3.6.1.3.2: not fatal, the command fails and may be tried again.
            let cid = c.cid;
            c.stage = Stage::Told;
            c.data = Incoming::default();
            self.respond(cid, Completion::failed(Status::TRANSIENT_TRANSPORT));
            self.actions.push_back(Action::Abort { tag });
            return;
        }
        c.stage = Stage::Running;
        let data = c.data.finish();
        self.actions.push_back(Action::Run { tag, data });
    }
}

impl Machine for Connection {
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        match self.phase {
            Phase::Closed => None,
            Phase::Lingering { .. } => Some(self.receiver.sink()),
            _ => self.receiver.space(&mut self.commands),
        }
    }

    fn received(&mut self, n: usize) {
        if self.is_open() {
            self.advance(n);
        }
    }

    fn output(&mut self) -> &mut SendQueue {
        &mut self.sender.out
    }

    fn next_timer(&self) -> Option<Duration> {
        match self.phase {
            Phase::Closed => None,
            Phase::Lingering { until } => Some(until),
            Phase::Initializing | Phase::Connecting => Some(self.config.establish_timeout),
            Phase::Running => {
                let pdu = self.receiver.since().map(|s| s + self.config.receive_timeout);
                [pdu, self.data_deadline].into_iter().flatten().min()
            }
        }
    }

    fn on_timer(&mut self, now: Duration) {
        self.now = now;
        if self.next_timer().is_none_or(|at| now < at) {
            return;
        }
        match self.phase {
            Phase::Closed => {}
            Phase::Lingering { .. } => self.phase = Phase::Closed,
            Phase::Initializing | Phase::Connecting => self.finish(End::EstablishTimeout),
            Phase::Running => {
                let timeout = self.config.receive_timeout;
                let oldest = self.commands.oldest_transfer();
                let late = |since: Option<Duration>| since.is_some_and(|s| now >= s + timeout);
                if late(self.receiver.since()) || late(oldest) {
                    self.finish(End::ReceiveTimeout);
                }
                self.data_deadline = oldest.map(|s| s + timeout);
            }
        }
    }

    fn is_closing(&self) -> bool {
        self.phase == Phase::Closed
    }
}

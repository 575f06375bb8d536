//! The machine of one TCP connection: one queue of one controller (NVMe/TCP Transport 1.0).
//!
//! It handles PDUs, digests, capsules, transfers and queue slots. [`crate::Controller`] decides
//! what commands mean; the driver passes [`Action`]s on and returns the answers:
//!
//! ```text
//!  Arrived ──admit──► Grant ──grant──► (data arrives) ──► Run ──complete──► response
//!     └───────────────────────────── complete ─────────────────────────────────┘
//! ```
//!
//! * Data in a capsule blocks everything after it in the stream, so reception waits for the
//!   command's memory ([`MemoryClass::UnsolicitedData`]); data by R2T does not
//!   ([`MemoryClass::SolicitedData`]).
//! * Each [`Action::CommandArrived`] is ended by exactly one [`Connection::complete`].
//! * A slot of the queue is occupied from the arrival of the capsule until its response has been
//!   passed to the socket; a host that exceeds the queue is disconnected. So memory is limited by
//!   the queue size, whatever the host does.

mod close_reason;
mod commands;
mod receive;
mod send;

use std::collections::VecDeque;
use std::time::Duration;

use block::{Bufs, BufsMut, MemoryClass};
use frame::{Machine, SendQueue};

use crate::entry::{Completion, Fuse, Sqe};
use crate::pdu::MIN_MAX_H2C_DATA;
use crate::status::Status;
use crate::stream::{IncomingData, Receiver, Sender, Tag};
pub use close_reason::CloseReason;
use commands::{CommandStage, Commands};

/// Most data in a command capsule, in bytes, on every queue (NVMe/TCP 3.3: at least 8 KiB on the
/// admin queue; IOCCSZ says so for I/O queues). Such data needs no R2T: it saves a round trip and
/// two PDUs.
pub const IN_CAPSULE_BYTES: u32 = 128 * 1024;

/// Limits and timeouts of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most data in one H2CData PDU (MAXH2CDATA), in bytes; raised to 4096 and cut to a multiple
    /// of 4.
    pub max_h2c_data: u32,
    /// Most data in one C2HData PDU, in bytes.
    pub max_c2h_data: u32,
    /// Time limit from the start to a successful Connect command.
    pub establish_timeout: Duration,
    /// Time limit of receiving a PDU, and the data of an R2T.
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

/// A request to the driver.
#[derive(Debug)]
pub enum Action {
    /// A command has arrived: [`Connection::admit`] it, or [`Connection::complete`] it at once.
    /// Before the queue is connected only Connect commands arrive.
    CommandArrived {
        /// The command's handle.
        tag: Tag,
        /// The command.
        sqe: Sqe,
    },
    /// An admitted command needs memory for its data: [`Connection::grant`] it, now or later.
    Grant {
        /// The command.
        tag: Tag,
        /// Size in bytes.
        bytes: u32,
        /// Its memory class.
        class: MemoryClass,
    },
    /// The command and all its data have arrived: execute it.
    Run {
        /// The command.
        tag: Tag,
        /// Data from the host.
        data: Bufs,
    },
    /// The machine refused a command before its arrival was reported, because it breaks a transport
    /// rule. The other half of a fused operation may wait for it.
    CommandRefused {
        /// Which half of a fused operation it would have been.
        fuse: Fuse,
        /// The status sent to the host.
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
    /// Waits for a successful Connect.
    Connecting,
    /// Serves a queue.
    Running,
    /// C2HTermReq was sent; input is discarded.
    Terminating { until: Duration },
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
    /// Positions in the output stream at which unsent responses end.
    unsent_responses: VecDeque<u64>,
    now: Duration,
    /// When to check for R2Ts that the host has not answered.
    data_deadline: Option<Duration>,
    close_reason: Option<CloseReason>,
}

impl Connection {
    /// A new connection, waiting for ICReq.
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
            unsent_responses: VecDeque::new(),
            now: Duration::ZERO,
            data_deadline: None,
            close_reason: None,
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

    /// Negotiated header and data digests.
    #[must_use]
    pub fn digests(&self) -> (bool, bool) {
        (self.sender.digests.header, self.sender.digests.data)
    }

    /// Why the connection ended; `None` while it is open.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.close_reason
    }

    /// The command in flight with identifier `cid`.
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
    /// all that it describes. Other data in its capsule is discarded.
    pub fn admit(&mut self, tag: Tag, data_out: u32) {
        let Some(c) = self.commands.get_mut(tag).filter(|c| c.stage == CommandStage::Arrived)
        else {
            return;
        };
        if data_out == 0 {
            self.run(tag);
            self.actions.push_back(Action::Run { tag, data: Bufs::new() });
            return;
        }
        if data_out != c.host_bytes {
            c.stage = CommandStage::Answered;
            let cid = c.cid;
            self.receiver.discard_blocked(tag, self.now);
            let failed = Completion::failed(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
            self.respond(cid, failed);
            self.actions.push_back(Action::Abort { tag });
            return;
        }
        c.stage = CommandStage::Granting;
        let class =
            if c.in_capsule { MemoryClass::UnsolicitedData } else { MemoryClass::SolicitedData };
        self.actions.push_back(Action::Grant { tag, bytes: data_out, class });
    }

    /// Accepts a command that has arrived and takes no data from the host: the driver executes it
    /// now, without an [`Action::Run`]. Data in its capsule is discarded.
    pub fn run(&mut self, tag: Tag) {
        if let Some(c) = self.commands.get_mut(tag).filter(|c| c.stage == CommandStage::Arrived) {
            c.stage = CommandStage::Running;
            self.receiver.discard_blocked(tag, self.now);
        }
    }

    /// Gives a command the requested memory; ignored if it has been completed meanwhile.
    ///
    /// # Panics
    /// If the size of the buffers differs from the requested one.
    pub fn grant(&mut self, tag: Tag, buffers: BufsMut) {
        let Some(c) = self.commands.get_mut(tag).filter(|c| c.stage == CommandStage::Granting)
        else {
            return;
        };
        let bytes: usize = buffers.iter().map(|b| b.len()).sum();
        assert_eq!(bytes, c.host_bytes as usize, "memory granted for command {:#x}", c.cid);
        c.stage = CommandStage::Receiving;
        c.incoming = IncomingData::new(buffers);
        if c.in_capsule {
            self.receiver.resume(tag, self.now);
            return;
        }
        c.r2t_sent_at = self.now;
        let (cid, length) = (c.cid, c.host_bytes);
        self.data_deadline.get_or_insert(self.now + self.config.receive_timeout);
        self.send_r2t(cid, tag, length);
    }

    /// Completes a command: sends `data` (only on success, and no more than the host described),
    /// then the response. If the host still owes solicited data, the response waits for it.
    pub fn complete(&mut self, tag: Tag, completion: Completion, data: &Bufs) {
        let open = self.is_open();
        let Some(c) = self.commands.get_mut(tag) else { return };
        let owes_data = c.stage == CommandStage::Receiving && !c.in_capsule;
        if owes_data && open {
            c.incoming.discard();
            c.early_completion.get_or_insert(completion);
            return;
        }
        self.receiver.discard_blocked(tag, self.now);
        let c = self.commands.remove(tag);
        if c.stage == CommandStage::Answered || !open {
            return;
        }
        if !completion.status.is_success() || data.is_empty() {
            self.respond(c.cid, completion);
        } else if !c.to_host || data.len() > c.host_bytes as usize {
            // More than the host's buffer holds: a bug on this side; never send it.
            let status = Status::INTERNAL_ERROR.do_not_retry();
            self.respond(c.cid, Completion::failed(status));
        } else {
            self.send_data_and_respond(c.cid, completion, data);
        }
    }

    /// Drops a command without a response: a controller reset has discarded it.
    pub fn discard(&mut self, tag: Tag) {
        if self.commands.get_mut(tag).is_some_and(|c| c.stage == CommandStage::Running) {
            self.commands.remove(tag);
            self.actions.retain(|a| !matches!(a, Action::Run { tag: t, .. } if *t == tag));
        }
    }

    /// Completes a Connect command with success: from now on this connection is that queue.
    /// `result` identifies the controller to the host (NVMe Base 2.0, 6.3).
    pub fn queue_connected(&mut self, tag: Tag, queue: Queue, result: u64) {
        if self.phase != Phase::Connecting {
            return self.complete(tag, Completion::ok(result), &Bufs::new());
        }
        self.phase = Phase::Running;
        self.queue = Queue { entries: queue.entries.max(2), ..queue };
        self.complete(tag, Completion::ok(result), &Bufs::new());
    }

    /// Closes the connection once its output has been sent.
    pub fn close(&mut self) {
        if self.is_open() {
            self.finish(CloseReason::Closed);
        }
    }

    fn is_open(&self) -> bool {
        !matches!(self.phase, Phase::Terminating { .. } | Phase::Closed)
    }

    /// Stops reception; the driver completes the commands in flight, which are not answered.
    fn finish(&mut self, end: CloseReason) {
        self.close_reason.get_or_insert(end);
        self.phase = Phase::Closed;
        self.actions.clear();
        self.commands.forget_ended();
    }

    /// Occupied slots: commands in flight, or answered with the answer not sent yet.
    fn slots_taken(&mut self) -> usize {
        let sent = self.sender.sent_total();
        while self.unsent_responses.front().is_some_and(|&end| end <= sent) {
            self.unsent_responses.pop_front();
        }
        self.commands.in_flight() + self.unsent_responses.len()
    }

    /// All data of a command has arrived.
    fn data_complete(&mut self, tag: Tag) {
        let Some(c) = self.commands.get_mut(tag) else { return };
        if let Some(outcome) = c.early_completion {
            let cid = self.commands.remove(tag).cid;
            return self.respond(cid, outcome);
        }
        if c.incoming.corrupt {
            // NVMe/TCP 3.6.1.3.2: not fatal; the command fails and may be retried.
            let cid = c.cid;
            c.stage = CommandStage::Answered;
            c.incoming = IncomingData::default();
            self.respond(cid, Completion::failed(Status::TRANSIENT_TRANSPORT));
            self.actions.push_back(Action::Abort { tag });
            return;
        }
        c.stage = CommandStage::Running;
        let data = c.incoming.finish();
        self.actions.push_back(Action::Run { tag, data });
    }
}

impl Machine for Connection {
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        match self.phase {
            Phase::Closed => None,
            Phase::Terminating { .. } => Some(self.receiver.discard_space()),
            _ => self.receiver.space(&mut self.commands),
        }
    }

    fn on_received(&mut self, n: usize) {
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
            Phase::Terminating { until } => Some(until),
            Phase::Initializing | Phase::Connecting => Some(self.config.establish_timeout),
            Phase::Running => {
                let pdu = self.receiver.pdu_started_at().map(|s| s + self.config.receive_timeout);
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
            Phase::Terminating { .. } => self.phase = Phase::Closed,
            Phase::Initializing | Phase::Connecting => self.finish(CloseReason::EstablishTimeout),
            Phase::Running => {
                let timeout = self.config.receive_timeout;
                let oldest = self.commands.oldest_transfer();
                let late = |since: Option<Duration>| since.is_some_and(|s| now >= s + timeout);
                if late(self.receiver.pdu_started_at()) || late(oldest) {
                    self.finish(CloseReason::ReceiveTimeout);
                }
                self.data_deadline = oldest.map(|s| s + timeout);
            }
        }
    }

    fn is_closing(&self) -> bool {
        self.phase == Phase::Closed
    }
}

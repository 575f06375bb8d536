//! The host side of a TCP connection: one queue of one controller (NVMe/TCP Transport 1.0).
//!
//! The counterpart of [`crate::Connection`]: it handles PDUs, digests, capsules and transfers; the
//! caller handles the meaning of commands, including Connect.
//!
//! ```text
//!  submit ──► capsule (with its data, if that fits) ──► R2T ──► H2CData ──┐
//!                                                   └─► C2HData ──────────┴─► response ──► Done
//! ```
//!
//! * Each command that [`Connection::submit`] accepts ends in exactly one [`CompletedCommand`],
//!   whatever happens to the connection.
//! * Payload is not copied: it is sent from, and received into, the caller's buffers.
//! * Memory that a controller can make this side hold is limited by the commands in flight. Answers
//!   to R2Ts are generated as the socket accepts them.

mod commands;
mod receive;

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use block::{Bufs, BufsMut};
use frame::{Machine, SendQueue};
use zerocopy::IntoBytes;

use crate::entry::{Completion, FLAG_SGL, Sgl, Sqe};
use crate::pdu::{CapsuleCmd, DataPdu, FLAG_LAST, FatalError, IcReq, MAX_HPDA, PduType};
use crate::status::Status;
use crate::stream::{Digests, Receiver, Sender, Tag, Violation, u32_len};
use commands::{Commands, PendingR2t};

/// In-capsule data that every admin queue takes, in bytes (NVMe/TCP 3.3).
pub const ADMIN_IN_CAPSULE_BYTES: u32 = 8192;

/// Most commands in flight on one queue: their identifiers have 12 bits for the slot, and FFFFh
/// means none (NVMe Base 2.0, 3.3.3.1).
pub const MAX_IN_FLIGHT: u16 = 4095;

/// FUSE, in the flags of an entry.
const FLAGS_FUSE: u8 = 0b11;

/// Answers to R2Ts are generated until this many bytes wait to be sent.
const SEND_AHEAD_BYTES: usize = 256 * 1024;

/// Limits and timeouts of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Maximum number of commands in flight: SQSIZE, the entries of the queue less one; clamped to
    /// [`MAX_IN_FLIGHT`].
    pub max_in_flight: u16,
    /// Digests to request.
    pub digests: Digests,
    /// Requested alignment of received data (HPDA): dwords, 0's based, at most 31.
    pub alignment: u8,
    /// R2Ts that may be outstanding for one command (MAXR2T + 1); at least 1.
    pub max_r2ts: u32,
    /// Most data in a capsule, in bytes: [`ADMIN_IN_CAPSULE_BYTES`], or what IOCCSZ says.
    pub in_capsule_bytes: u32,
    /// Time limit for the answer to ICReq.
    pub establish_timeout: Duration,
    /// Time limit of receiving a PDU.
    pub receive_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_in_flight: 31,
            digests: Digests::default(),
            alignment: 0,
            max_r2ts: 4,
            in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            establish_timeout: Duration::from_secs(10),
            receive_timeout: Duration::from_secs(60),
        }
    }
}

/// The data of a command.
#[derive(Debug)]
pub enum Payload {
    /// No data.
    None,
    /// Data to the controller; not empty.
    ToController(Bufs),
    /// Buffers for data from the controller; not empty.
    ToHost(BufsMut),
}

impl Payload {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::ToController(data) => data.len(),
            Self::ToHost(buffers) => buffers.iter().map(|b| b.len()).sum(),
        }
    }

    /// Whether there is no data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A command to submit.
#[derive(Debug)]
pub struct Command {
    /// The entry. [`Connection::submit`] sets command identifier, PSDT and SGL.
    pub sqe: Sqe,
    /// Its data, in the direction of the opcode. Shorter than 4 GiB.
    pub payload: Payload,
    /// Time limit of the answer; `None`: unlimited.
    pub timeout: Option<Duration>,
}

/// Why a command has no completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostCommand {
    /// Not sent: the controller does not know of it.
    Unsent,
    /// Sent, at least in part: the controller may have executed it, or may still do so.
    InDoubt,
}

/// A completed command.
#[derive(Debug)]
pub struct CompletedCommand {
    /// Tag of the command, which may be in use again by now.
    pub tag: Tag,
    /// The controller's answer, or why there is none.
    pub outcome: Result<Completion, LostCommand>,
    /// Bytes of its data transferred; fewer than a successful command's length if the controller
    /// did not request or send all.
    pub transferred: u32,
    /// The buffers of [`Payload::ToHost`]; undefined beyond the first `transferred` bytes.
    pub buffers: BufsMut,
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// This side closed it.
    Closed,
    /// The controller violated the protocol; H2CTermReq told it so.
    Violation {
        /// What was wrong (FES).
        error: FatalError,
        /// More about it (FEI).
        information: u32,
    },
    /// The controller reported an error of this side by C2HTermReq.
    ControllerTerminated {
        /// What was wrong (FES).
        error: FatalError,
        /// More about it (FEI).
        information: u32,
    },
    /// ICReq was not answered in time.
    EstablishTimeout,
    /// The controller did not finish a PDU in time.
    ReceiveTimeout,
    /// The controller did not answer a command in time.
    CommandTimeout,
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::Violation { error, information } => {
                write!(f, "the controller broke the protocol: {error:?}, {information:#x}")
            }
            Self::ControllerTerminated { error, information } => {
                write!(
                    f,
                    "the controller reported an error of this host: {error:?}, {information:#x}"
                )
            }
            Self::EstablishTimeout => f.write_str("the controller did not answer ICReq in time"),
            Self::ReceiveTimeout => f.write_str("the controller left a PDU unfinished"),
            Self::CommandTimeout => f.write_str("the controller did not answer a command in time"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Waits for ICResp.
    Initializing,
    /// Takes commands.
    Running,
    /// To be closed.
    Closed,
}

/// One connection of a host to an NVMe/TCP controller.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    phase: Phase,
    /// Most data in one H2CData PDU (MAXH2CDATA), in bytes; 0 before ICResp.
    max_h2c_data: u32,
    receiver: Receiver,
    sender: Sender,
    commands: Commands,
    /// R2Ts not fully answered yet, in order of arrival.
    pending_r2ts: VecDeque<PendingR2t>,
    completed: VecDeque<CompletedCommand>,
    now: Duration,
    /// When to check for expired commands; never later than the first deadline.
    deadline: Option<Duration>,
    close_reason: Option<CloseReason>,
}

impl Connection {
    /// A new connection: ICReq is queued.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let config = Config {
            max_in_flight: config.max_in_flight.clamp(1, MAX_IN_FLIGHT),
            alignment: config.alignment.min(MAX_HPDA),
            max_r2ts: config.max_r2ts.max(1),
            ..config
        };
        let mut sender = Sender::default();
        let mut req = IcReq::new(config.digests.bits(), config.alignment);
        req.max_r2t = (config.max_r2ts - 1).into();
        sender.push(req.as_bytes());
        Self {
            config,
            phase: Phase::Initializing,
            max_h2c_data: 0,
            receiver: Receiver::default(),
            sender,
            commands: Commands::default(),
            pending_r2ts: VecDeque::new(),
            completed: VecDeque::new(),
            now: Duration::ZERO,
            deadline: None,
            close_reason: None,
        }
    }

    /// Negotiated digests; `None` before ICResp.
    #[must_use]
    pub fn digests(&self) -> Option<Digests> {
        (self.max_h2c_data > 0).then_some(self.sender.digests)
    }

    /// Why the connection ended; `None` while it is open.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.close_reason
    }

    /// Commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.commands.in_flight()
    }

    /// How many commands [`Self::submit`] accepts now.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        match self.phase {
            Phase::Running => usize::from(self.config.max_in_flight) - self.commands.in_flight(),
            Phase::Initializing | Phase::Closed => 0,
        }
    }

    /// Sends a command; its timeout starts at the last `now`.
    ///
    /// Returns `None` and drops the command if there is no free slot ([`Self::free_slots`]).
    ///
    /// # Panics
    /// If the payload is 4 GiB or longer.
    pub fn submit(&mut self, command: Command) -> Option<Tag> {
        if self.free_slots() == 0 {
            return None;
        }
        let Command { mut sqe, payload, timeout } = command;
        let deadline = timeout.map(|t| self.now.saturating_add(t));
        let length = u32_len(payload.len());
        let in_capsule = matches!(payload, Payload::ToController(_))
            && (1..=self.config.in_capsule_bytes).contains(&length);
        sqe.flags = sqe.flags & FLAGS_FUSE | FLAG_SGL;
        sqe.sgl = if in_capsule { Sgl::in_capsule(length) } else { Sgl::transport(length) };
        let data = match &payload {
            Payload::ToController(data) if in_capsule => data.clone(),
            _ => Bufs::new(),
        };
        let (tag, cid) =
            self.commands.insert(payload, in_capsule, self.sender.queued_total(), deadline);
        sqe.cid = cid.into();
        self.sender.pdu(CapsuleCmd::new(sqe).as_bytes(), 0, &data);
        self.commands.set_queued_end(tag, self.sender.queued_total());
        self.deadline = [self.deadline, deadline].into_iter().flatten().min();
        Some(tag)
    }

    /// The next completed command, if any.
    pub fn poll_done(&mut self) -> Option<CompletedCommand> {
        self.completed.pop_front()
    }

    /// Closes the connection without sending the rest of the output: the peer may see half a PDU.
    pub fn close(&mut self) {
        self.finish(CloseReason::Closed);
    }

    /// Closes the connection at once.
    fn finish(&mut self, end: CloseReason) {
        if self.phase != Phase::Closed {
            let sent = self.sender.sent_total();
            self.sender.out = SendQueue::default();
            self.fail_in_flight(end, sent);
        }
    }

    /// Reports the violation to the controller (NVMe/TCP 3.6.1.3.1) and closes the connection once
    /// that has been sent: after the commands queued before it, which the controller may therefore
    /// see.
    fn terminate(&mut self, violation: Violation) {
        self.sender.terminate(PduType::H2CTermReq, violation, self.receiver.header());
        let Violation { error, information } = violation;
        self.fail_in_flight(
            CloseReason::Violation { error, information },
            self.sender.queued_total(),
        );
    }

    /// Fails all commands in flight; those that begin before byte `sent` are in doubt.
    fn fail_in_flight(&mut self, end: CloseReason, sent: u64) {
        self.close_reason.get_or_insert(end);
        self.phase = Phase::Closed;
        self.pending_r2ts.clear();
        self.deadline = None;
        for (tag, mut command) in self.commands.drain() {
            let lost =
                if command.queued_at < sent { LostCommand::InDoubt } else { LostCommand::Unsent };
            let (moved, buffers) = (command.transferred(), command.incoming.take());
            self.completed.push_back(CompletedCommand {
                tag,
                outcome: Err(lost),
                transferred: moved,
                buffers,
            });
        }
    }

    /// The command in flight with this identifier, if it has been sent.
    fn find_sent(&self, cid: u16) -> Option<Tag> {
        self.commands.find(cid, self.sender.sent_total())
    }

    /// Completes a command.
    fn complete(&mut self, tag: Tag, completion: Completion) {
        let mut command = self.commands.remove(tag);
        if command.r2ts > 0 {
            // Drop solicited data that the controller no longer needs.
            let first = self.pending_r2ts.iter().find(|t| t.tag == tag).map_or(0, |t| t.at);
            command.solicited_bytes = command.solicited_bytes.min(first);
            self.pending_r2ts.retain(|t| t.tag != tag);
        }
        // Unsent data has not arrived, whatever the controller says.
        command.solicited_bytes =
            command.solicited_bytes.saturating_sub(command.unsent(self.sender.sent_total()));
        let corrupt = command.incoming.corrupt && completion.status.is_success();
        // NVMe/TCP 3.6.1.3.2: a wrong data digest fails the command alone.
        let transient = Completion::failed(Status::TRANSIENT_TRANSPORT);
        let completion = if corrupt { transient } else { completion };
        let (moved, buffers) = (command.transferred(), command.incoming.take());
        self.completed.push_back(CompletedCommand {
            tag,
            outcome: Ok(completion),
            transferred: moved,
            buffers,
        });
    }

    /// Generates answers to R2Ts, up to the send-ahead limit.
    fn answer_r2ts(&mut self) {
        while self.sender.out.len() < SEND_AHEAD_BYTES
            && let Some(transfer) = self.pending_r2ts.front_mut()
        {
            let Some(command) = self.commands.get_mut(transfer.tag) else {
                self.pending_r2ts.pop_front();
                continue;
            };
            let (at, tag) = (transfer.at, transfer.tag);
            let end = transfer.end.min(at.saturating_add(self.max_h2c_data));
            let data = command.outgoing.slice(at as usize..end as usize);
            let mut flags = 0;
            transfer.at = end;
            let header =
                DataPdu::new(PduType::H2CData, self.commands.cid(tag), transfer.ttag, at, end - at);
            if end == transfer.end {
                flags = FLAG_LAST;
                self.pending_r2ts.pop_front();
                self.commands.r2t_answered(tag);
            }
            self.sender.pdu(header.as_bytes(), flags, &data);
            self.commands.set_queued_end(tag, self.sender.queued_total());
        }
    }
}

impl Machine for Connection {
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        match self.phase {
            Phase::Closed => None,
            Phase::Initializing | Phase::Running => self.receiver.space(&mut self.commands),
        }
    }

    fn on_received(&mut self, n: usize) {
        if self.phase != Phase::Closed {
            self.advance(n);
        }
    }

    fn output(&mut self) -> &mut SendQueue {
        if !self.pending_r2ts.is_empty() {
            self.answer_r2ts();
        }
        &mut self.sender.out
    }

    fn next_timer(&self) -> Option<Duration> {
        match self.phase {
            Phase::Closed => None,
            Phase::Initializing => Some(self.config.establish_timeout),
            Phase::Running => {
                let pdu = self.receiver.pdu_started_at().map(|s| s + self.config.receive_timeout);
                [pdu, self.deadline].into_iter().flatten().min()
            }
        }
    }

    fn on_timer(&mut self, now: Duration) {
        self.now = now;
        if self.next_timer().is_none_or(|at| now < at) {
            return;
        }
        if self.phase == Phase::Initializing {
            return self.finish(CloseReason::EstablishTimeout);
        }
        let timeout = self.config.receive_timeout;
        if self.receiver.pdu_started_at().is_some_and(|s| now >= s + timeout) {
            return self.finish(CloseReason::ReceiveTimeout);
        }
        // Usually the command with this deadline has completed long ago.
        self.deadline = self.commands.first_deadline();
        if self.deadline.is_some_and(|d| now >= d) {
            self.finish(CloseReason::CommandTimeout);
        }
    }

    fn is_closing(&self) -> bool {
        self.phase == Phase::Closed
    }
}

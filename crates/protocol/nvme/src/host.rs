//! The host's end of one TCP connection: one queue of one controller (NVMe/TCP Transport 1.0).
//!
//! The counterpart of [`crate::Connection`]: it knows PDUs, digests, capsules and transfers, and what
//! a command means is its caller's affair, from Connect on.
//!
//! ```text
//!  submit ──► capsule (with its data, if that fits) ──► R2T ──► H2CData ──┐
//!                                                   └─► C2HData ──────────┴─► response ──► Done
//! ```
//!
//! * Each command that [`Connection::submit`] has taken ends in exactly one [`Done`], whatever becomes of
//!   the connection.
//! * Payload is not copied: data goes out of the caller's buffers, and comes into them.
//! * What a controller can make this side hold is bounded by the commands in flight. Answers to R2Ts are
//!   put together as the socket takes them.

mod commands;
mod receive;

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use block::{Bufs, BufsMut};
use frame::{Machine, SendQueue};
use zerocopy::IntoBytes;

use crate::entry::{Completion, FLAG_SGL, Sgl, Sqe};
use crate::pdu::{CapsuleCmd, Data, FLAG_LAST, FatalError, IcReq, MAX_HPDA, PduType};
use crate::status::Status;
use crate::stream::{Digests, Receiver, Sender, Tag, Violation, small};
use commands::{Commands, Transfer};

/// In-capsule data that every admin queue takes, in bytes (NVMe/TCP 3.3).
pub const ADMIN_IN_CAPSULE_BYTES: u32 = 8192;

/// Most commands in flight on one queue: their identifiers have 12 bits for the slot, and FFFFh means
/// none (NVMe Base 2.0, 3.3.3.1).
pub const MAX_IN_FLIGHT: u16 = 4095;

/// FUSE, in the flags of an entry.
const FLAGS_FUSE: u8 = 0b11;

/// Answers to R2Ts are put together until this many bytes wait to be sent.
const AHEAD_BYTES: usize = 256 * 1024;

/// Limits and times of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Commands that may be in flight: SQSIZE, the entries of the queue less one; cut to
    /// [`MAX_IN_FLIGHT`].
    pub in_flight: u16,
    /// Digests to ask for.
    pub digests: Digests,
    /// Alignment wanted of the data that comes (HPDA): dwords, 0's based, at most 31.
    pub alignment: u8,
    /// R2Ts that may be outstanding for one command (MAXR2T + 1); at least 1.
    pub r2ts: u32,
    /// Most data in a capsule, in bytes: [`ADMIN_IN_CAPSULE_BYTES`], or what IOCCSZ says.
    pub in_capsule_bytes: u32,
    /// How long the controller may take to answer ICReq.
    pub establish_timeout: Duration,
    /// How long it may take to finish a PDU.
    pub receive_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            in_flight: 31,
            digests: Digests::default(),
            alignment: 0,
            r2ts: 4,
            in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            establish_timeout: Duration::from_secs(10),
            receive_timeout: Duration::from_secs(60),
        }
    }
}

/// The data of a command.
#[derive(Debug)]
pub enum Payload {
    /// There is none.
    None,
    /// It goes to the controller; not empty.
    ToController(Bufs),
    /// It comes from the controller, into these; not empty.
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

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A command, as its caller makes it.
#[derive(Debug)]
pub struct Command {
    /// The entry. Command identifier, PSDT and SGL are put in by [`Connection::submit`].
    pub sqe: Sqe,
    /// Its data, which goes the way that the opcode says. Shorter than 4 GiB.
    pub payload: Payload,
    /// How long the controller may take to answer; `None` where it may take for ever.
    pub timeout: Option<Duration>,
}

/// Why a command has no completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Nothing of it has been sent: the controller does not know of it.
    Unsent,
    /// It was sent, at least in part: the controller has done it, or not, or will do it yet.
    InDoubt,
}

/// The end of a command.
#[derive(Debug)]
pub struct Done {
    /// The command; its tag may be used again by now.
    pub tag: Tag,
    /// What the controller has answered, or that there will be no answer.
    pub outcome: Result<Completion, Lost>,
    /// Bytes of its data that have been moved. What is less than all, of a command that succeeded, is
    /// what the controller did not want, or did not give.
    pub moved: u32,
    /// The buffers of [`Payload::ToHost`]; behind the first `moved` bytes they hold anything.
    pub buffers: BufsMut,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This side closed it.
    Closed,
    /// The controller broke the protocol; it was told so by H2CTermReq.
    Violation {
        /// What was wrong (FES).
        error: FatalError,
        /// More about it (FEI).
        information: u32,
    },
    /// The controller found this side in error, by C2HTermReq.
    ControllerTerminated {
        /// What was wrong (FES).
        error: FatalError,
        /// More about it (FEI).
        information: u32,
    },
    /// ICReq was not answered in time.
    EstablishTimeout,
    /// The controller left a PDU unfinished.
    ReceiveTimeout,
    /// The controller did not answer a command in time.
    CommandTimeout,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::Violation { error, information } => {
                write!(f, "the controller broke the protocol: {error:?}, {information:#x}")
            }
            Self::ControllerTerminated { error, information } => {
                write!(f, "the controller found this side in error: {error:?}, {information:#x}")
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
    /// R2Ts whose data has not all been put into the output, in the order in which they came.
    transfers: VecDeque<Transfer>,
    done: VecDeque<Done>,
    now: Duration,
    /// When to look for commands that have run out of time; never later than the first does.
    deadline: Option<Duration>,
    end: Option<End>,
}

impl Connection {
    /// A connection that has just been made: ICReq waits to be sent.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let config = Config {
            in_flight: config.in_flight.clamp(1, MAX_IN_FLIGHT),
            alignment: config.alignment.min(MAX_HPDA),
            r2ts: config.r2ts.max(1),
            ..config
        };
        let mut sender = Sender::default();
        let mut req = IcReq::new(config.digests.bits(), config.alignment);
        req.max_r2t = (config.r2ts - 1).into();
        sender.push(req.as_bytes());
        Self {
            config,
            phase: Phase::Initializing,
            max_h2c_data: 0,
            receiver: Receiver::default(),
            sender,
            commands: Commands::default(),
            transfers: VecDeque::new(),
            done: VecDeque::new(),
            now: Duration::ZERO,
            deadline: None,
            end: None,
        }
    }

    /// Digests agreed on; `None` before the controller has answered ICReq.
    #[must_use]
    pub fn agreed(&self) -> Option<Digests> {
        (self.max_h2c_data > 0).then_some(self.sender.digests)
    }

    /// Why the connection ends; `None` while it does not.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.commands.in_flight()
    }

    /// How many commands [`Self::submit`] takes now.
    #[must_use]
    pub fn room(&self) -> usize {
        match self.phase {
            Phase::Running => usize::from(self.config.in_flight) - self.commands.in_flight(),
            Phase::Initializing | Phase::Closed => 0,
        }
    }

    /// Sends a command, whose time begins at the `now` that was told last.
    ///
    /// `None`, and the command is dropped, where there is no [`Self::room`] for it.
    ///
    /// # Panics
    /// If the payload is 4 GiB or longer.
    pub fn submit(&mut self, command: Command) -> Option<Tag> {
        if self.room() == 0 {
            return None;
        }
        let Command { mut sqe, payload, timeout } = command;
        let deadline = timeout.map(|t| self.now.saturating_add(t));
        let length = small(payload.len());
        let in_capsule = matches!(payload, Payload::ToController(_))
            && (1..=self.config.in_capsule_bytes).contains(&length);
        sqe.flags = sqe.flags & FLAGS_FUSE | FLAG_SGL;
        sqe.sgl = if in_capsule { Sgl::in_capsule(length) } else { Sgl::transport(length) };
        let data = match &payload {
            Payload::ToController(data) if in_capsule => data.clone(),
            _ => Bufs::new(),
        };
        let (tag, cid) = self.commands.insert(payload, in_capsule, self.sender.pushed(), deadline);
        sqe.cid = cid.into();
        self.sender.pdu(CapsuleCmd::new(sqe).as_bytes(), 0, &data);
        self.commands.ends(tag, self.sender.pushed());
        self.deadline = [self.deadline, deadline].into_iter().flatten().min();
        Some(tag)
    }

    /// The next command that has ended, if any.
    pub fn poll_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// Ends the connection. What has not been sent is not sent any more: the peer may see half a PDU.
    pub fn close(&mut self) {
        self.finish(End::Closed);
    }

    /// Ends the connection at once.
    fn finish(&mut self, end: End) {
        if self.phase != Phase::Closed {
            let sent = self.sender.sent();
            self.sender.out = SendQueue::default();
            self.lose(end, sent);
        }
    }

    /// Tells the controller what it did (NVMe/TCP 3.6.1.3.1), and ends the connection once that has
    /// been sent: behind the commands that waited, which the controller may therefore see.
    fn violated(&mut self, violation: Violation) {
        self.sender.terminate(PduType::H2CTermReq, violation, self.receiver.header());
        let Violation { error, information } = violation;
        self.lose(End::Violation { error, information }, self.sender.pushed());
    }

    /// What is in flight is lost; the controller may know of what begins before byte `sent`.
    fn lose(&mut self, end: End, sent: u64) {
        self.end.get_or_insert(end);
        self.phase = Phase::Closed;
        self.transfers.clear();
        self.deadline = None;
        for (tag, mut command) in self.commands.drain() {
            let lost = if command.at < sent { Lost::InDoubt } else { Lost::Unsent };
            let (moved, buffers) = (command.moved(), command.incoming.take());
            self.done.push_back(Done { tag, outcome: Err(lost), moved, buffers });
        }
    }

    /// The command in flight that has this identifier, if the controller can know of it: it has been sent.
    fn known(&self, cid: u16) -> Option<Tag> {
        self.commands.find(cid, self.sender.sent())
    }

    /// A command has its completion.
    fn complete(&mut self, tag: Tag, completion: Completion) {
        let mut command = self.commands.remove(tag);
        if command.r2ts > 0 {
            // What the controller has asked for and does not want any more.
            let first = self.transfers.iter().find(|t| t.tag == tag).map_or(0, |t| t.at);
            command.asked = command.asked.min(first);
            self.transfers.retain(|t| t.tag != tag);
        }
        // It does not have what has not been sent, whatever it says.
        command.asked = command.asked.saturating_sub(command.unsent(self.sender.sent()));
        let corrupt = command.incoming.corrupt && completion.status.is_success();
        // NVMe/TCP 3.6.1.3.2: a wrong data digest fails the command alone.
        let transient = Completion::failed(Status::TRANSIENT_TRANSPORT);
        let completion = if corrupt { transient } else { completion };
        let (moved, buffers) = (command.moved(), command.incoming.take());
        self.done.push_back(Done { tag, outcome: Ok(completion), moved, buffers });
    }

    /// Puts answers to R2Ts together, as far ahead as is good.
    fn answer(&mut self) {
        while self.sender.out.len() < AHEAD_BYTES
            && let Some(transfer) = self.transfers.front_mut()
        {
            let Some(command) = self.commands.get_mut(transfer.tag) else {
                self.transfers.pop_front();
                continue;
            };
            let (at, tag) = (transfer.at, transfer.tag);
            let end = transfer.end.min(at.saturating_add(self.max_h2c_data));
            let data = command.outgoing.slice(at as usize..end as usize);
            let mut flags = 0;
            transfer.at = end;
            let header =
                Data::new(PduType::H2CData, self.commands.cid(tag), transfer.ttag, at, end - at);
            if end == transfer.end {
                flags = FLAG_LAST;
                self.transfers.pop_front();
                self.commands.answered(tag);
            }
            self.sender.pdu(header.as_bytes(), flags, &data);
            self.commands.ends(tag, self.sender.pushed());
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

    fn received(&mut self, n: usize) {
        if self.phase != Phase::Closed {
            self.advance(n);
        }
    }

    fn output(&mut self) -> &mut SendQueue {
        if !self.transfers.is_empty() {
            self.answer();
        }
        &mut self.sender.out
    }

    fn next_timer(&self) -> Option<Duration> {
        match self.phase {
            Phase::Closed => None,
            Phase::Initializing => Some(self.config.establish_timeout),
            Phase::Running => {
                let pdu = self.receiver.since().map(|s| s + self.config.receive_timeout);
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
            return self.finish(End::EstablishTimeout);
        }
        let timeout = self.config.receive_timeout;
        if self.receiver.since().is_some_and(|s| now >= s + timeout) {
            return self.finish(End::ReceiveTimeout);
        }
        // Most commands that the deadline was set for have ended long ago.
        self.deadline = self.commands.first_deadline();
        if self.deadline.is_some_and(|d| now >= d) {
            self.finish(End::CommandTimeout);
        }
    }

    fn is_closing(&self) -> bool {
        self.phase == Phase::Closed
    }
}

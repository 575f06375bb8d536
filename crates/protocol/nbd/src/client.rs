//! The client side of a connection.
//!
//! ```text
//!  greeting ──► structured replies? ──► base:allocation? ──► GO ──► agreed
//!                                                              └─ unknown: EXPORT_NAME
//!  submit ──► request (with its data) ──► simple reply, or chunks ──► Done
//! ```
//!
//! * Each command that [`Connection::submit`] accepts ends in exactly one [`CompletedCommand`],
//!   whatever happens to the connection.
//! * Payload is not copied: it is sent from, and received into, the caller's buffers.
//! * The server's messages are validated: data lies within its read, no byte comes twice, and a
//!   read succeeds only when all of it has arrived.
//! * Memory that a server can make this side hold is limited by the commands in flight and one
//!   small message.

mod commands;
mod handshake;
mod receive;

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use block::{Bufs, BufsMut};
use frame::{Machine, SendQueue};
use zerocopy::IntoBytes;

use crate::message::{Cmd, Errno, REQUEST_MAGIC, Rep, Request, command_flag, flag};
use crate::{BlockStatusExtent, SizeConstraints, Tag, TransmissionFlags};
use commands::{Command, Commands};
use handshake::HandshakeStep;
use receive::Expecting;

/// Most commands in flight: their tags have 16 bits.
pub const MAX_IN_FLIGHT: u16 = 4096;

/// Options, limits and timeouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of the export, at most 4096 bytes; empty for the server's default.
    pub export: String,
    /// Maximum number of commands in flight; clamped to [`MAX_IN_FLIGHT`].
    pub max_in_flight: u16,
    /// Whether to request structured replies, and `base:allocation` with them.
    pub structured: bool,
    /// Time limit of the handshake.
    pub handshake_timeout: Duration,
    /// Time limit of receiving a message that has begun.
    pub receive_timeout: Duration,
}

impl Config {
    /// Default options.
    #[must_use]
    pub fn new(export: &str) -> Self {
        Self {
            export: export.to_owned(),
            max_in_flight: 64,
            structured: true,
            handshake_timeout: Duration::from_secs(10),
            receive_timeout: Duration::from_secs(60),
        }
    }
}

/// Result of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NegotiatedExport {
    /// Size of the export in bytes.
    pub bytes: u64,
    /// Its capabilities.
    pub transmission_flags: TransmissionFlags,
    /// Size constraints; the protocol's defaults if the server has sent none.
    pub size_constraints: SizeConstraints,
    /// Whether replies are structured.
    pub structured: bool,
    /// Whether [`Op::BlockStatus`] is supported.
    pub block_status: bool,
}

/// A command. Ranges are in bytes and respect the negotiated limits; data is not empty.
#[derive(Debug)]
pub enum Op {
    /// Read into the buffers.
    Read {
        /// First byte.
        at: u64,
        /// As long as the read; less than 4 GiB.
        buffers: BufsMut,
    },
    /// Write.
    Write {
        /// First byte.
        at: u64,
        /// The data, less than 4 GiB.
        data: Bufs,
        /// Whether it must be durable when answered.
        fua: bool,
    },
    /// Make completed writes durable.
    Flush,
    /// The contents are no longer needed.
    Trim {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Zero the range.
    WriteZeroes {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u32,
        /// Whether the space may be freed.
        hole: bool,
        /// Whether it must be durable when answered.
        fua: bool,
    },
    /// Query the first extent of the range: [`Reply::Extent`].
    BlockStatus {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u32,
    },
}

/// Result of a successful command.
#[derive(Debug)]
pub enum Reply {
    /// Done, without data.
    Done,
    /// The data of [`Op::Read`].
    Data(BufsMut),
    /// The first extent of the range of [`Op::BlockStatus`]; not beyond its end.
    Extent(BlockStatusExtent),
}

/// Why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// The server reported an error.
    Error(Errno),
    /// The connection has ended: whether the command was executed is unknown.
    ConnectionLost,
}

/// A completed command.
#[derive(Debug)]
pub struct CompletedCommand {
    /// Tag of the command, which may be in use again by now.
    pub tag: Tag,
    /// Its outcome.
    pub outcome: Result<Reply, CommandError>,
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// This side closed it.
    Closed,
    /// The server refused the export.
    Refused(Rep),
    /// The server uses an unsupported protocol variant.
    Unsupported(&'static str),
    /// The server broke the protocol.
    Violation(&'static str),
    /// The server announced its shutdown.
    ServerShutDown,
    /// The handshake timed out.
    HandshakeTimeout,
    /// The server did not finish a message in time.
    ReceiveTimeout,
    /// The server did not answer a command in time.
    CommandTimeout,
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::Refused(Rep::ErrUnknown) => f.write_str("the server has no such export"),
            Self::Refused(Rep::ErrTlsReqd) => f.write_str("the server insists on TLS"),
            Self::Refused(why) => write!(f, "the server refused the export: {why:?}"),
            Self::Unsupported(what) => write!(f, "the server cannot be used: {what}"),
            Self::Violation(what) => write!(f, "the server broke the protocol: {what}"),
            Self::ServerShutDown => f.write_str("the server is being shut down"),
            Self::HandshakeTimeout => f.write_str("the server offered no export in time"),
            Self::ReceiveTimeout => f.write_str("the server left a message unfinished"),
            Self::CommandTimeout => f.write_str("the server did not answer a command in time"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Handshake(HandshakeStep),
    Transmission,
    Closed,
}

/// A connection to a server.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    phase: Phase,
    receive: Expecting,
    /// Received part of a fixed-length header.
    header: [u8; receive::LONGEST_HEADER],
    filled: usize,
    /// Since when a message of the server is incomplete.
    unfinished_since: Option<Duration>,
    handshake: handshake::ServerInfo,
    negotiated: Option<NegotiatedExport>,
    commands: Commands,
    completed: VecDeque<CompletedCommand>,
    out: SendQueue,
    now: Duration,
    /// When to look for expired commands; never later than the first deadline.
    deadline: Option<Duration>,
    close_reason: Option<CloseReason>,
}

impl Connection {
    /// A new connection: the server sends first.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let in_flight = config.max_in_flight.clamp(1, MAX_IN_FLIGHT);
        Self {
            config: Config { max_in_flight: in_flight, ..config },
            phase: Phase::Handshake(HandshakeStep::Greeting),
            receive: Expecting::Greeting,
            header: [0; receive::LONGEST_HEADER],
            filled: 0,
            unfinished_since: None,
            handshake: handshake::ServerInfo::default(),
            negotiated: None,
            commands: Commands::default(),
            completed: VecDeque::new(),
            out: SendQueue::default(),
            now: Duration::ZERO,
            deadline: None,
            close_reason: None,
        }
    }

    /// Result of the handshake; `None` before.
    #[must_use]
    pub fn negotiated(&self) -> Option<&NegotiatedExport> {
        self.negotiated.as_ref()
    }

    /// Why the connection ended; `None` while it is open.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.close_reason
    }

    /// Commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.commands.len()
    }

    /// How many commands [`Self::submit`] accepts now.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        match self.phase {
            Phase::Transmission => usize::from(self.config.max_in_flight) - self.commands.len(),
            Phase::Handshake(_) | Phase::Closed => 0,
        }
    }

    /// The next completed command, if any.
    pub fn poll_done(&mut self) -> Option<CompletedCommand> {
        self.completed.pop_front()
    }

    /// Sends a command; its `timeout` starts at the last `now`.
    ///
    /// Returns `None` and drops the command if there is no free slot ([`Self::free_slots`]).
    ///
    /// # Panics
    /// If the export lacks the capability that the command needs: clients must not send it
    /// ("Transmission flags"). If its data is 4 GiB or longer.
    pub fn submit(&mut self, op: Op, timeout: Option<Duration>) -> Option<Tag> {
        if self.free_slots() == 0 {
            return None;
        }
        let agreed = self.negotiated?;
        let (kind, at, len, flags) = encode(&op);
        let needed = required_transmission_flags(kind, flags);
        assert!(
            agreed.transmission_flags.has(needed),
            "{kind:?} is beyond {:?}",
            agreed.transmission_flags
        );
        assert!(
            kind != Cmd::BlockStatus || agreed.block_status,
            "no metadata context was negotiated"
        );
        let deadline = timeout.map(|t| self.now.saturating_add(t));
        self.deadline = [self.deadline, deadline].into_iter().flatten().min();
        let mut command = Command { kind, at, len, deadline, ..Command::default() };
        let data = match op {
            Op::Read { buffers, .. } => {
                command.buffers = buffers;
                Bufs::new()
            }
            Op::Write { data, .. } => data,
            _ => Bufs::new(),
        };
        let (tag, cookie) = self.commands.insert(command);
        self.send(kind, flags, cookie, at, len);
        self.out.push_data(&data);
        Some(tag)
    }

    fn send(&mut self, kind: Cmd, flags: u16, cookie: u64, at: u64, len: u32) {
        let request = Request {
            magic: REQUEST_MAGIC.into(),
            flags: flags.into(),
            kind: kind.0.into(),
            cookie: cookie.into(),
            offset: at.into(),
            length: len.into(),
        };
        self.out.push_bytes(request.as_bytes());
    }

    /// Ends the connection with `NBD_CMD_DISC`. Commands in flight are lost.
    pub fn close(&mut self) {
        self.soft_disconnect(CloseReason::Closed);
    }

    /// "Soft disconnect" from the transmission phase.
    fn soft_disconnect(&mut self, end: CloseReason) {
        if self.phase == Phase::Transmission {
            self.send(Cmd::Disc, 0, 0, 0, 0);
        }
        self.fail_in_flight(end);
    }

    /// "Hard disconnect": nothing more is sent.
    fn hard_disconnect(&mut self, end: CloseReason) {
        if self.phase != Phase::Closed {
            self.out = SendQueue::default();
            self.fail_in_flight(end);
        }
    }

    fn violation(&mut self, what: &'static str) {
        self.hard_disconnect(CloseReason::Violation(what));
    }

    /// Fails all commands in flight.
    fn fail_in_flight(&mut self, end: CloseReason) {
        self.close_reason.get_or_insert(end);
        self.phase = Phase::Closed;
        self.receive = Expecting::Greeting;
        self.unfinished_since = None;
        self.deadline = None;
        let lost = self.commands.drain();
        self.completed.extend(
            lost.map(|tag| CompletedCommand { tag, outcome: Err(CommandError::ConnectionLost) }),
        );
    }
}

/// Type, first byte, length and flags of a command.
fn encode(op: &Op) -> (Cmd, u64, u32, u16) {
    use command_flag::{FUA, NO_HOLE, REQ_ONE};
    let small = |n: usize| u32::try_from(n).expect("shorter than 4 GiB");
    let fua_flag = |fua: bool| if fua { FUA } else { 0 };
    match *op {
        Op::Read { at, ref buffers } => {
            (Cmd::Read, at, small(buffers.iter().map(|b| b.len()).sum()), 0)
        }
        Op::Write { at, ref data, fua } => (Cmd::Write, at, small(data.len()), fua_flag(fua)),
        Op::Flush => (Cmd::Flush, 0, 0, 0),
        Op::Trim { at, len } => (Cmd::Trim, at, len, 0),
        Op::WriteZeroes { at, len, hole, fua } => {
            (Cmd::WriteZeroes, at, len, fua_flag(fua) | if hole { 0 } else { NO_HOLE })
        }
        Op::BlockStatus { at, len } => (Cmd::BlockStatus, at, len, REQ_ONE),
    }
}

/// Transmission flags that a command requires.
fn required_transmission_flags(kind: Cmd, flags: u16) -> u16 {
    let command = match kind {
        Cmd::Flush => flag::SEND_FLUSH,
        Cmd::Trim => flag::SEND_TRIM,
        Cmd::WriteZeroes => flag::SEND_WRITE_ZEROES,
        _ => 0,
    };
    command | if flags & command_flag::FUA != 0 { flag::SEND_FUA } else { 0 }
}

impl Machine for Connection {
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        if self.phase == Phase::Closed {
            return None;
        }
        let wanted = self.receive.header_bytes(&self.header, self.filled);
        match &mut self.receive {
            Expecting::Small { data, .. } => Some(&mut data[self.filled..]),
            Expecting::Padding { remaining: left } => {
                Some(&mut self.header[..receive::LONGEST_HEADER.min(*left)])
            }
            Expecting::Data { tag, position: place, remaining: left, .. } => {
                self.commands.space(*tag, *place, *left)
            }
            _ => Some(&mut self.header[self.filled..wanted]),
        }
    }

    fn on_received(&mut self, n: usize) {
        if self.phase == Phase::Closed {
            return;
        }
        self.unfinished_since.get_or_insert(self.now);
        let complete = match &mut self.receive {
            Expecting::Padding { remaining: left } => {
                *left = left.saturating_sub(n);
                *left == 0
            }
            Expecting::Data { tag, position: place, remaining: left, .. } => {
                *left = left.saturating_sub(u32::try_from(n).unwrap_or(u32::MAX));
                *place = self.commands.advance(*tag, *place, n);
                *left == 0
            }
            Expecting::Small { data, .. } => {
                self.filled += n;
                self.filled >= data.len()
            }
            _ => {
                self.filled += n;
                self.filled >= self.receive.header_bytes(&self.header, self.filled)
            }
        };
        if complete {
            self.filled = 0;
            self.unfinished_since = None;
            self.advance();
        }
    }

    fn output(&mut self) -> &mut SendQueue {
        &mut self.out
    }

    fn next_timer(&self) -> Option<Duration> {
        match self.phase {
            Phase::Closed => None,
            Phase::Handshake(_) => Some(self.config.handshake_timeout),
            Phase::Transmission => {
                let message = self.unfinished_since.map(|s| s + self.config.receive_timeout);
                [message, self.deadline].into_iter().flatten().min()
            }
        }
    }

    fn on_timer(&mut self, now: Duration) {
        self.now = now;
        if self.next_timer().is_none_or(|at| now < at) {
            return;
        }
        if matches!(self.phase, Phase::Handshake(_)) {
            return self.hard_disconnect(CloseReason::HandshakeTimeout);
        }
        let timeout = self.config.receive_timeout;
        if self.unfinished_since.is_some_and(|s| now >= s + timeout) {
            return self.hard_disconnect(CloseReason::ReceiveTimeout);
        }
        self.deadline = self.commands.first_deadline();
        if self.deadline.is_some_and(|at| now >= at) {
            self.hard_disconnect(CloseReason::CommandTimeout);
        }
    }

    fn is_closing(&self) -> bool {
        self.phase == Phase::Closed
    }
}

//! The client's end of one connection.
//!
//! ```text
//!  greeting ──► structured replies? ──► base:allocation? ──► GO ──► agreed
//!                                                              └─ unknown: EXPORT_NAME
//!  submit ──► request (with its data) ──► simple reply, or chunks ──► Done
//! ```
//!
//! * Each command that [`Connection::submit`] has taken ends in exactly one [`Done`], whatever becomes of
//!   the connection.
//! * Payload is not copied: data goes out of the caller's buffers, and comes into them.
//! * Nothing of what a server says is believed that would harm: data lies within the read that it answers,
//!   no byte of it comes twice, and a read succeeds when all of it has come.
//! * What a server can make this side hold is bounded by the commands in flight and one small message.

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
use crate::{Abilities, Extent, Sizes, Tag};
use commands::{Command, Commands};
use handshake::Step;
use receive::Receive;

/// Most commands in flight: their tags have 16 bits.
pub const MAX_IN_FLIGHT: u16 = 4096;

/// What is asked for, limits and times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of the export, of 4096 bytes at most; the server's default one where it is empty.
    pub export: String,
    /// Commands that may be in flight; cut to [`MAX_IN_FLIGHT`].
    pub in_flight: u16,
    /// Whether to ask for structured replies, and for `base:allocation` with them.
    pub structured: bool,
    /// How long the server may take until the export is agreed on.
    pub handshake_timeout: Duration,
    /// How long it may take to finish a message that it has begun.
    pub receive_timeout: Duration,
}

impl Config {
    /// The usual limits.
    #[must_use]
    pub fn new(export: &str) -> Self {
        Self {
            export: export.to_owned(),
            in_flight: 64,
            structured: true,
            handshake_timeout: Duration::from_secs(10),
            receive_timeout: Duration::from_secs(60),
        }
    }
}

/// What was agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Size of the export in bytes.
    pub bytes: u64,
    /// What it can do.
    pub abilities: Abilities,
    /// Size constraints; what holds where nothing was said, if the server has not told any.
    pub sizes: Sizes,
    /// Whether replies are structured.
    pub structured: bool,
    /// Whether [`Op::BlockStatus`] is answered.
    pub maps: bool,
}

/// What a command does. Ranges are in bytes and obey what was agreed on; data is not empty.
#[derive(Debug)]
pub enum Op {
    /// Fills the buffers.
    Read {
        /// First byte.
        at: u64,
        /// As long as the read; of less than 4 GiB.
        buffers: BufsMut,
    },
    /// Replaces contents.
    Write {
        /// First byte.
        at: u64,
        /// The new contents, of less than 4 GiB.
        data: Bufs,
        /// Durable when it is answered.
        fua: bool,
    },
    /// Makes durable what was completed before.
    Flush,
    /// Nobody needs the contents any more.
    Trim {
        /// First byte.
        at: u64,
        /// How many.
        len: u32,
    },
    /// Makes the contents zeroes.
    WriteZeroes {
        /// First byte.
        at: u64,
        /// How many.
        len: u32,
        /// Whether the space may be freed.
        hole: bool,
        /// Durable when it is answered.
        fua: bool,
    },
    /// Asks how the range begins: [`Reply::Extent`].
    BlockStatus {
        /// First byte.
        at: u64,
        /// How many.
        len: u32,
    },
}

/// What has come of a command that succeeded.
#[derive(Debug)]
pub enum Reply {
    /// It is done.
    Done,
    /// All that [`Op::Read`] has asked for.
    Data(BufsMut),
    /// How the range of [`Op::BlockStatus`] begins; not beyond its end.
    Extent(Extent),
}

/// Why a command has not succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// The server says so.
    Error(Errno),
    /// The connection has ended: nobody knows whether it was done.
    Lost,
}

/// The end of a command.
#[derive(Debug)]
pub struct Done {
    /// The command; its tag may be used again by now.
    pub tag: Tag,
    /// What has become of it.
    pub outcome: Result<Reply, Failed>,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This side closed it.
    Closed,
    /// The server refused the export.
    Refused(Rep),
    /// The server speaks a dialect that is not spoken here.
    Unsupported(&'static str),
    /// The server broke the protocol.
    Violation(&'static str),
    /// The server is being shut down, and said so.
    ServerShutDown,
    /// Nothing was agreed on in time.
    HandshakeTimeout,
    /// The server left a message unfinished.
    ReceiveTimeout,
    /// The server did not answer a command in time.
    CommandTimeout,
}

impl fmt::Display for End {
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
    Handshake(Step),
    Transmission,
    Closed,
}

/// One connection to a server.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    phase: Phase,
    receive: Receive,
    /// Of what has a fixed length.
    header: [u8; receive::LONGEST_HEADER],
    filled: usize,
    /// Since when the server has left something unfinished.
    since: Option<Duration>,
    handshake: handshake::Known,
    agreed: Option<Agreed>,
    commands: Commands,
    done: VecDeque<Done>,
    out: SendQueue,
    now: Duration,
    /// When to look for commands that have run out of time; never later than the first does.
    deadline: Option<Duration>,
    end: Option<End>,
}

impl Connection {
    /// A connection that has just been made: the server speaks first.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let in_flight = config.in_flight.clamp(1, MAX_IN_FLIGHT);
        Self {
            config: Config { in_flight, ..config },
            phase: Phase::Handshake(Step::Greeting),
            receive: Receive::Greeting,
            header: [0; receive::LONGEST_HEADER],
            filled: 0,
            since: None,
            handshake: handshake::Known::default(),
            agreed: None,
            commands: Commands::default(),
            done: VecDeque::new(),
            out: SendQueue::default(),
            now: Duration::ZERO,
            deadline: None,
            end: None,
        }
    }

    /// What was agreed on; `None` before that.
    #[must_use]
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// Why the connection ends; `None` while it does not.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.commands.len()
    }

    /// How many commands [`Self::submit`] takes now.
    #[must_use]
    pub fn room(&self) -> usize {
        match self.phase {
            Phase::Transmission => usize::from(self.config.in_flight) - self.commands.len(),
            Phase::Handshake(_) | Phase::Closed => 0,
        }
    }

    /// The next command that has ended, if any.
    pub fn poll_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// Sends a command, whose time begins at the `now` that was told last and ends after `timeout`.
    ///
    /// `None`, and the command is dropped, where there is no [`Self::room`] for it.
    ///
    /// # Panics
    /// If the export does not have the ability that it needs: clients must not ask ("Transmission flags"). If
    /// its data is 4 GiB or longer.
    pub fn submit(&mut self, op: Op, timeout: Option<Duration>) -> Option<Tag> {
        if self.room() == 0 {
            return None;
        }
        let agreed = self.agreed?;
        let (kind, at, len, flags) = encode(&op);
        let needed = needed(kind, flags);
        assert!(agreed.abilities.has(needed), "{kind:?} is beyond {:?}", agreed.abilities);
        assert!(kind != Cmd::BlockStatus || agreed.maps, "no metadata was agreed on");
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

    /// Ends the connection, with the server being told (`NBD_CMD_DISC`). What is in flight is lost.
    pub fn close(&mut self) {
        self.leave(End::Closed);
    }

    /// "Soft disconnect" from the transmission phase.
    fn leave(&mut self, end: End) {
        if self.phase == Phase::Transmission {
            self.send(Cmd::Disc, 0, 0, 0, 0);
        }
        self.lose(end);
    }

    /// "Hard disconnect": nothing is sent any more.
    fn finish(&mut self, end: End) {
        if self.phase != Phase::Closed {
            self.out = SendQueue::default();
            self.lose(end);
        }
    }

    fn violation(&mut self, what: &'static str) {
        self.finish(End::Violation(what));
    }

    /// What is in flight is lost.
    fn lose(&mut self, end: End) {
        self.end.get_or_insert(end);
        self.phase = Phase::Closed;
        self.receive = Receive::Greeting;
        self.since = None;
        self.deadline = None;
        let lost = self.commands.drain();
        self.done.extend(lost.map(|tag| Done { tag, outcome: Err(Failed::Lost) }));
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

/// The transmission flags without which a client must not send such a command.
fn needed(kind: Cmd, flags: u16) -> u16 {
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
            Receive::Small { data, .. } => Some(&mut data[self.filled..]),
            Receive::Padding { left } => {
                Some(&mut self.header[..receive::LONGEST_HEADER.min(*left)])
            }
            Receive::Data { tag, place, left, .. } => self.commands.space(*tag, *place, *left),
            _ => Some(&mut self.header[self.filled..wanted]),
        }
    }

    fn received(&mut self, n: usize) {
        if self.phase == Phase::Closed {
            return;
        }
        self.since.get_or_insert(self.now);
        let complete = match &mut self.receive {
            Receive::Padding { left } => {
                *left = left.saturating_sub(n);
                *left == 0
            }
            Receive::Data { tag, place, left, .. } => {
                *left = left.saturating_sub(u32::try_from(n).unwrap_or(u32::MAX));
                *place = self.commands.moved(*tag, *place, n);
                *left == 0
            }
            Receive::Small { data, .. } => {
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
            self.since = None;
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
                let message = self.since.map(|s| s + self.config.receive_timeout);
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
            return self.finish(End::HandshakeTimeout);
        }
        let timeout = self.config.receive_timeout;
        if self.since.is_some_and(|s| now >= s + timeout) {
            return self.finish(End::ReceiveTimeout);
        }
        self.deadline = self.commands.first_deadline();
        if self.deadline.is_some_and(|at| now >= at) {
            self.finish(End::CommandTimeout);
        }
    }

    fn is_closing(&self) -> bool {
        self.phase == Phase::Closed
    }
}

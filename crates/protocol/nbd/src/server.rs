//! The server side of a connection.
//!
//! ```text
//!  client's flags ──► options ──► request ──► Grant ──► data ──► Run ──► answer
//!                        │           └── nothing to be written ──► Run ──┘
//!                        └─ no, or not like this: an error reply, and the next option
//! ```
//!
//! * The driver answers each [`Action::Run`] and each [`Action::Grant`] once; each request of the
//!   client is answered once, except those in flight when the connection ends.
//! * Payload is not copied: it is received into the granted memory and sent from the answer's
//!   memory.
//! * Refused requests do not desynchronize the stream: their data is read and discarded, without
//!   allocating memory.
//! * Memory that a client can make this side hold is limited by the requests in flight, one option
//!   of [`MAX_OPTION_BYTES`], and one answer beyond [`OUTPUT_HIGH_BYTES`] of unsent output.

mod handshake;
mod requests;
mod transmission;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use block::{Bufs, BufsMut};
use frame::{Machine, SendQueue};
use zerocopy::IntoBytes;

use crate::message::{
    Errno, FIXED_NEWSTYLE, Greeting, MAGIC, NO_ZEROES, OPTION_MAGIC, Opt, Request,
};
use crate::{BlockStatusExtent, Export, Tag};
use requests::Requests;

/// Longest accepted option data, in bytes: more than any valid one.
pub const MAX_OPTION_BYTES: u32 = 64 << 10;

/// With more than this waiting to be sent, in bytes, no new request is received.
pub const OUTPUT_HIGH_BYTES: usize = 1 << 20;

/// Size of the buffer for discarded data, in bytes.
const DISCARD_BYTES: usize = 16 << 10;

/// Exports and limits.
#[derive(Clone, Debug)]
pub struct Config {
    /// The exports. Clients that name none get the first.
    pub exports: Arc<[Export]>,
    /// Maximum number of requests in flight, including those whose data is arriving; at least 1.
    pub max_in_flight: u16,
    /// Time limit for choosing an export.
    pub handshake_timeout: Duration,
    /// Time limit of receiving a request that has begun.
    pub receive_timeout: Duration,
}

impl Config {
    /// Default options.
    #[must_use]
    pub fn new(exports: Arc<[Export]>) -> Self {
        Self {
            exports,
            max_in_flight: 128,
            handshake_timeout: Duration::from_secs(10),
            receive_timeout: Duration::from_secs(60),
        }
    }
}

/// A client's request. Ranges are within the export, in bytes, aligned to its minimum block and not
/// empty; data is no longer than its constraints allow.
#[derive(Clone, Debug)]
pub enum Command {
    /// Return the contents: [`Answer::Data`].
    Read {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Replace the contents.
    Write {
        /// First byte.
        at: u64,
        /// The new contents.
        data: Bufs,
        /// Whether it must be durable when answered.
        fua: bool,
    },
    /// Make answered writes durable.
    Flush,
    /// The contents are no longer needed.
    Trim {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u32,
        /// Whether its changes must be durable when answered.
        fua: bool,
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
    /// Report allocation: [`Answer::Extents`].
    BlockStatus {
        /// First byte.
        at: u64,
        /// Length in bytes.
        len: u32,
        /// Whether one extent suffices.
        one: bool,
    },
}

/// A request to the driver.
#[derive(Debug)]
pub enum Action {
    /// Provide memory for the data of a write: [`Connection::grant`] or [`Connection::refuse`].
    /// Nothing is received meanwhile.
    Grant {
        /// Tag of the request.
        tag: Tag,
        /// Size in bytes.
        bytes: u32,
    },
    /// Execute a command: [`Connection::answer`].
    Run {
        /// Tag of the request.
        tag: Tag,
        /// Index of its export in [`Config::exports`].
        export: usize,
        /// The command.
        command: Command,
    },
}

/// Result of a command.
#[derive(Debug)]
pub enum Answer {
    /// Done, without data.
    Done,
    /// The complete data of [`Command::Read`].
    Data(Bufs),
    /// The first extents of the range of [`Command::BlockStatus`], in order from its first byte on.
    /// Parts beyond the range are ignored.
    Extents(Vec<BlockStatusExtent>),
    /// Failure.
    Failed(Errno),
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// This side closed it.
    Closed,
    /// The client aborted the handshake (`NBD_OPT_ABORT`).
    Aborted,
    /// The client disconnected (`NBD_CMD_DISC`).
    Disconnected,
    /// The client requested an unavailable export with `NBD_OPT_EXPORT_NAME`, which allows no other
    /// answer.
    Refused,
    /// The client broke the protocol.
    Violation(&'static str),
    /// The client chose no export in time.
    HandshakeTimeout,
    /// The client did not finish a request in time.
    ReceiveTimeout,
    /// The server shuts down, and nothing is in flight any more.
    ShutDown,
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::Aborted => f.write_str("the client aborted the handshake"),
            Self::Disconnected => f.write_str("the client disconnected"),
            Self::Refused => f.write_str("the client's request was refused"),
            Self::Violation(what) => write!(f, "the client broke the protocol: {what}"),
            Self::HandshakeTimeout => f.write_str("the client chose no export in time"),
            Self::ReceiveTimeout => f.write_str("the client left a request unfinished"),
            Self::ShutDown => f.write_str("the server is being shut down"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Handshake,
    /// Receives requests for the export with this index.
    Transmission(usize),
    /// Answers what is in flight and receives nothing more.
    Draining,
    Closed,
}

/// What the next bytes are.
#[derive(Debug)]
enum Expecting {
    ClientFlags,
    OptionHeader,
    /// Data of an option.
    Option {
        option: Opt,
        data: Vec<u8>,
    },
    /// Data of a refused option.
    OptionSkip {
        option: Opt,
        remaining: u32,
    },
    Request,
    /// Nothing, until memory is granted.
    Memory {
        tag: Tag,
    },
    /// Data of a write: from this byte of this buffer on.
    Payload {
        tag: Tag,
        buffers: BufsMut,
        position: (usize, usize),
    },
    /// Data of a failed write.
    Skip {
        tag: Tag,
        remaining: u32,
        error: Errno,
    },
}

/// A client's connection.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    phase: Phase,
    receive: Expecting,
    /// Received part of a fixed-length header; `filled` counts option data as well.
    header: [u8; size_of::<Request>()],
    filled: usize,
    /// Since when the client has left a message incomplete.
    unfinished_since: Option<Duration>,
    discard: Vec<u8>,
    no_zeroes: bool,
    structured: bool,
    /// The export for which `base:allocation` was selected.
    context: Option<usize>,
    shutting_down: bool,
    requests: Requests,
    actions: VecDeque<Action>,
    out: SendQueue,
    now: Duration,
    close_reason: Option<CloseReason>,
}

impl Connection {
    /// A new connection: its greeting is queued.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let config = Config { max_in_flight: config.max_in_flight.max(1), ..config };
        let mut out = SendQueue::default();
        let greeting = Greeting {
            magic: MAGIC.into(),
            version: OPTION_MAGIC.into(),
            flags: (FIXED_NEWSTYLE | NO_ZEROES).into(),
        };
        out.push_bytes(greeting.as_bytes());
        Self {
            config,
            phase: Phase::Handshake,
            receive: Expecting::ClientFlags,
            header: [0; size_of::<Request>()],
            filled: 0,
            unfinished_since: None,
            discard: Vec::new(),
            no_zeroes: false,
            structured: false,
            context: None,
            shutting_down: false,
            requests: Requests::default(),
            actions: VecDeque::new(),
            out,
            now: Duration::ZERO,
            close_reason: None,
        }
    }

    /// The next action, if any.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Index of the chosen export in [`Config::exports`].
    #[must_use]
    pub fn export(&self) -> Option<usize> {
        match self.phase {
            Phase::Transmission(export) => Some(export),
            _ => None,
        }
    }

    /// Whether structured replies were negotiated.
    #[must_use]
    pub fn is_structured(&self) -> bool {
        self.structured
    }

    /// Number of requests received and not answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// Why the connection ended; `None` while it is open.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.close_reason
    }

    /// Ends the connection now.
    pub fn close(&mut self) {
        self.finish(CloseReason::Closed);
    }

    /// Starts the shutdown: refuses every option (`NBD_REP_ERR_SHUTDOWN`) and request
    /// (`NBD_ESHUTDOWN`), and closes the connection once nothing is in flight ("Terminating the
    /// transmission phase").
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
        self.close_if_shut_down();
    }

    /// Grants memory for the data of a write.
    ///
    /// # Panics
    /// If its size differs from the requested one.
    pub fn grant(&mut self, tag: Tag, buffers: BufsMut) {
        let len: usize = buffers.iter().map(|b| b.len()).sum();
        let waits = matches!(self.receive, Expecting::Memory { tag: t } if t == tag);
        if self.phase == Phase::Closed || !waits {
            return;
        }
        assert_eq!(Some(len), self.requests.len_of(tag), "memory for a write");
        self.unfinished_since = Some(self.now);
        self.receive = Expecting::Payload { tag, buffers, position: (0, 0) };
    }

    /// Refuses memory for the data of a write, which is discarded; the write fails.
    pub fn refuse(&mut self, tag: Tag, error: Errno) {
        let waits = matches!(self.receive, Expecting::Memory { tag: t } if t == tag);
        if self.phase == Phase::Closed || !waits {
            return;
        }
        let left = self.requests.get(tag).map_or(0, |r| r.len);
        self.unfinished_since = Some(self.now);
        self.receive = Expecting::Skip { tag, remaining: left, error };
    }

    fn finish(&mut self, end: CloseReason) {
        self.close_reason.get_or_insert(end);
        self.phase = Phase::Closed;
        self.actions.clear();
        self.receive = Expecting::Request;
        self.unfinished_since = None;
    }

    fn close_if_shut_down(&mut self) {
        let between = matches!(self.receive, Expecting::Request) && self.filled == 0;
        if self.shutting_down
            && self.requests.is_empty()
            && between
            && matches!(self.phase, Phase::Transmission(_))
        {
            self.finish(CloseReason::ShutDown);
        }
    }

    /// Length of the expected header, if fixed.
    fn header_bytes(&self) -> usize {
        match self.receive {
            Expecting::ClientFlags => 4,
            Expecting::OptionHeader => size_of::<crate::message::OptionHeader>(),
            _ => size_of::<Request>(),
        }
    }

    /// Whether a new message may be received.
    fn is_ready(&self) -> bool {
        let room = match self.phase {
            Phase::Handshake => true,
            Phase::Transmission(_) => self.requests.len() < usize::from(self.config.max_in_flight),
            Phase::Draining | Phase::Closed => false,
        };
        room && self.out.len() <= OUTPUT_HIGH_BYTES
    }
}

impl Machine for Connection {
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        if matches!(self.phase, Phase::Draining | Phase::Closed) {
            return None;
        }
        let (ready, length) = (self.is_ready(), self.header_bytes());
        match &mut self.receive {
            Expecting::ClientFlags | Expecting::OptionHeader | Expecting::Request => {
                if self.filled == 0 && !ready {
                    return None;
                }
                Some(&mut self.header[self.filled..length])
            }
            Expecting::Option { data, .. } => Some(&mut data[self.filled..]),
            Expecting::Memory { .. } => None,
            Expecting::Payload { buffers, position: (index, offset), .. } => {
                buffers.get_mut(*index).map(|b| &mut b[*offset..])
            }
            Expecting::OptionSkip { remaining: left, .. }
            | Expecting::Skip { remaining: left, .. } => {
                if self.discard.is_empty() {
                    self.discard = vec![0; DISCARD_BYTES];
                }
                let n = DISCARD_BYTES.min(*left as usize);
                Some(&mut self.discard[..n])
            }
        }
    }

    fn on_received(&mut self, n: usize) {
        if matches!(self.phase, Phase::Draining | Phase::Closed) {
            return;
        }
        self.unfinished_since.get_or_insert(self.now);
        let length = self.header_bytes();
        let small = u32::try_from(n).unwrap_or(u32::MAX);
        let complete = match &mut self.receive {
            Expecting::ClientFlags | Expecting::OptionHeader | Expecting::Request => {
                self.filled += n;
                self.filled >= length
            }
            Expecting::Option { data, .. } => {
                self.filled += n;
                self.filled >= data.len()
            }
            Expecting::Memory { .. } => false,
            Expecting::Payload { buffers, position: at, .. } => {
                at.1 += n;
                if buffers.get(at.0).is_some_and(|b| at.1 >= b.len()) {
                    *at = (at.0 + 1, 0);
                }
                at.0 >= buffers.len()
            }
            Expecting::OptionSkip { remaining: left, .. }
            | Expecting::Skip { remaining: left, .. } => {
                *left = left.saturating_sub(small);
                *left == 0
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
            Phase::Handshake => Some(self.config.handshake_timeout),
            Phase::Transmission(_) => {
                self.unfinished_since.map(|s| s + self.config.receive_timeout)
            }
            Phase::Draining | Phase::Closed => None,
        }
    }

    fn on_timer(&mut self, now: Duration) {
        self.now = now;
        if self.next_timer().is_none_or(|at| now < at) {
            return;
        }
        let handshake = self.phase == Phase::Handshake;
        self.finish(if handshake {
            CloseReason::HandshakeTimeout
        } else {
            CloseReason::ReceiveTimeout
        });
    }

    fn is_closing(&self) -> bool {
        self.phase == Phase::Closed || (self.phase == Phase::Draining && self.requests.is_empty())
    }
}

impl Connection {
    /// Handles the expected bytes, now complete.
    fn advance(&mut self) {
        match std::mem::replace(&mut self.receive, Expecting::Request) {
            Expecting::ClientFlags => self.client_flags(),
            Expecting::OptionHeader => self.option_header(),
            Expecting::Option { option, data } => self.option(option, &data),
            Expecting::OptionSkip { option, .. } => self.option_too_big(option),
            Expecting::Request => self.request(),
            Expecting::Memory { tag } => self.receive = Expecting::Memory { tag },
            Expecting::Payload { tag, buffers, .. } => self.payload(tag, buffers.into()),
            Expecting::Skip { tag, error, .. } => self.answer(tag, Answer::Failed(error)),
        }
    }
}

//! The server's end of one connection.
//!
//! ```text
//!  client's flags ──► options ──► request ──► Grant ──► data ──► Run ──► answer
//!                        │           └── nothing to be written ──► Run ──┘
//!                        └─ no, or not like this: an error reply, and the next option
//! ```
//!
//! * Each [`Action::Run`] and each [`Action::Grant`] is answered once by its driver; each request of the
//!   client is answered once, but for what is in flight when the connection ends.
//! * Payload is not copied: it goes into the memory that was granted and out of the memory of the answer.
//! * What is refused is refused without losing the place in the stream: data that nobody wants is read and
//!   thrown away, and takes no memory.
//! * What a client can make this side hold is bounded by the requests in flight, one option of
//!   [`MAX_OPTION_BYTES`], and one answer of [`OUTPUT_HIGH_BYTES`] more than what it did not read.

mod handshake;
mod requests;
mod transmit;

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
use crate::{Export, Extent, Tag};
use requests::Requests;

/// Longest data of an option that is looked at, in bytes: more than anything that makes sense.
pub const MAX_OPTION_BYTES: u32 = 64 << 10;

/// With more than this waiting to be sent, nothing further is received but what has begun, in bytes.
pub const OUTPUT_HIGH_BYTES: usize = 1 << 20;

/// Where goes what nobody wants: so much at once, in bytes.
const SINK_BYTES: usize = 16 << 10;

/// What is offered, and limits.
#[derive(Clone, Debug)]
pub struct Config {
    /// What there is. The first is what a client gets that names none.
    pub exports: Arc<[Export]>,
    /// Requests in flight, those whose data is on its way among them; at least 1.
    pub in_flight: u16,
    /// How long a client may take to choose an export.
    pub handshake_timeout: Duration,
    /// How long it may take to finish a request that it has begun to send.
    pub receive_timeout: Duration,
}

impl Config {
    /// The usual limits.
    #[must_use]
    pub fn new(exports: Arc<[Export]>) -> Self {
        Self {
            exports,
            in_flight: 128,
            handshake_timeout: Duration::from_secs(10),
            receive_timeout: Duration::from_secs(60),
        }
    }
}

/// What a client wants of its export. Ranges are within the export, in bytes, aligned to its minimum block
/// and not empty; data is no longer than its sizes allow.
#[derive(Clone, Debug)]
pub enum Command {
    /// Return the contents: [`Answer::Data`].
    Read {
        /// First byte.
        at: u64,
        /// How many.
        len: u32,
    },
    /// Replace the contents.
    Write {
        /// First byte.
        at: u64,
        /// The new contents.
        data: Bufs,
        /// Durable when it is answered.
        fua: bool,
    },
    /// Make durable what was answered before.
    Flush,
    /// Nobody needs the contents any more.
    Trim {
        /// First byte.
        at: u64,
        /// How many.
        len: u32,
        /// What was changed is durable when it is answered.
        fua: bool,
    },
    /// Make the contents zeroes.
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
    /// Tell what has space behind it: [`Answer::Extents`].
    BlockStatus {
        /// First byte.
        at: u64,
        /// How many.
        len: u32,
        /// One extent is enough.
        one: bool,
    },
}

/// What is asked of the driver.
#[derive(Debug)]
pub enum Action {
    /// Memory for the data of a write: [`Connection::grant`] or [`Connection::refuse`]. Nothing is received
    /// meanwhile.
    Grant {
        /// Whose.
        tag: Tag,
        /// How much, in bytes.
        bytes: u32,
    },
    /// Carry it out: [`Connection::answer`].
    Run {
        /// Whose.
        tag: Tag,
        /// Of which export: its place among [`Config::exports`].
        export: usize,
        /// What.
        command: Command,
    },
}

/// What has become of a command.
#[derive(Debug)]
pub enum Answer {
    /// It is done.
    Done,
    /// What [`Command::Read`] has read, all of it.
    Data(Bufs),
    /// How the range of [`Command::BlockStatus`] begins: extents in order, from its first byte on. What goes
    /// beyond the range is left out.
    Extents(Vec<Extent>),
    /// It has failed.
    Failed(Errno),
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This side closed it.
    Closed,
    /// The client gave up the handshake, as it may (`NBD_OPT_ABORT`).
    Aborted,
    /// The client has taken its leave (`NBD_CMD_DISC`).
    Disconnected,
    /// The client asked, by `NBD_OPT_EXPORT_NAME`, for what it cannot have: the specification knows no
    /// other answer.
    Refused,
    /// The client broke the protocol.
    Violation(&'static str),
    /// The client has not chosen an export in time.
    HandshakeTimeout,
    /// The client left a request unfinished.
    ReceiveTimeout,
    /// The server is being shut down, and nothing is in flight any more.
    ShutDown,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::Aborted => f.write_str("the client gave up"),
            Self::Disconnected => f.write_str("the client took its leave"),
            Self::Refused => f.write_str("the client asked for what it cannot have"),
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
    /// Takes requests for the export of this number.
    Transmission(usize),
    /// Answers what is in flight, and takes nothing any more.
    Leaving,
    Closed,
}

/// What the next bytes are.
#[derive(Debug)]
enum Receive {
    ClientFlags,
    OptionHeader,
    /// Data of an option.
    Option {
        option: Opt,
        data: Vec<u8>,
    },
    /// Data of an option that is not looked at.
    OptionSkip {
        option: Opt,
        left: u32,
    },
    Request,
    /// Nothing, until there is memory.
    Memory {
        tag: Tag,
    },
    /// Data of a write: from this byte of this buffer on.
    Payload {
        tag: Tag,
        buffers: BufsMut,
        at: (usize, usize),
    },
    /// Data of a write that has failed.
    Skip {
        tag: Tag,
        left: u32,
        error: Errno,
    },
}

/// One connection of a client.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    phase: Phase,
    receive: Receive,
    /// Of what has a fixed length; `filled` counts data of options as well.
    header: [u8; size_of::<Request>()],
    filled: usize,
    /// Since when something is unfinished that the client could finish.
    since: Option<Duration>,
    sink: Vec<u8>,
    no_zeroes: bool,
    structured: bool,
    /// The export whose `base:allocation` was chosen.
    context: Option<usize>,
    shutting_down: bool,
    requests: Requests,
    actions: VecDeque<Action>,
    out: SendQueue,
    now: Duration,
    end: Option<End>,
}

impl Connection {
    /// A connection that has just been made: the greeting waits to be sent.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let config = Config { in_flight: config.in_flight.max(1), ..config };
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
            receive: Receive::ClientFlags,
            header: [0; size_of::<Request>()],
            filled: 0,
            since: None,
            sink: Vec::new(),
            no_zeroes: false,
            structured: false,
            context: None,
            shutting_down: false,
            requests: Requests::default(),
            actions: VecDeque::new(),
            out,
            now: Duration::ZERO,
            end: None,
        }
    }

    /// The next thing to do, if any.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The export that the client has chosen: its place among [`Config::exports`].
    #[must_use]
    pub fn export(&self) -> Option<usize> {
        match self.phase {
            Phase::Transmission(export) => Some(export),
            _ => None,
        }
    }

    /// Whether the client has agreed on structured replies.
    #[must_use]
    pub fn is_structured(&self) -> bool {
        self.structured
    }

    /// Requests that were taken and are not answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// Why the connection ends; `None` while it does not.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Ends the connection now.
    pub fn close(&mut self) {
        self.finish(End::Closed);
    }

    /// From now on every option is refused (`NBD_REP_ERR_SHUTDOWN`) and every request (`NBD_ESHUTDOWN`); the
    /// connection is closed once nothing is in flight ("Terminating the transmission phase").
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
        self.close_if_shut_down();
    }

    /// Memory for the data of a write.
    ///
    /// # Panics
    /// If it is not as much as was asked for.
    pub fn grant(&mut self, tag: Tag, buffers: BufsMut) {
        let len: usize = buffers.iter().map(|b| b.len()).sum();
        let waits = matches!(self.receive, Receive::Memory { tag: t } if t == tag);
        if self.phase == Phase::Closed || !waits {
            return;
        }
        assert_eq!(Some(len), self.requests.len_of(tag), "memory for a write");
        self.since = Some(self.now);
        self.receive = Receive::Payload { tag, buffers, at: (0, 0) };
    }

    /// There is no memory for the data of a write: it is thrown away, and the write fails.
    pub fn refuse(&mut self, tag: Tag, error: Errno) {
        let waits = matches!(self.receive, Receive::Memory { tag: t } if t == tag);
        if self.phase == Phase::Closed || !waits {
            return;
        }
        let left = self.requests.get(tag).map_or(0, |r| r.len);
        self.since = Some(self.now);
        self.receive = Receive::Skip { tag, left, error };
    }

    fn finish(&mut self, end: End) {
        self.end.get_or_insert(end);
        self.phase = Phase::Closed;
        self.actions.clear();
        self.receive = Receive::Request;
        self.since = None;
    }

    fn close_if_shut_down(&mut self) {
        let between = matches!(self.receive, Receive::Request) && self.filled == 0;
        if self.shutting_down
            && self.requests.is_empty()
            && between
            && matches!(self.phase, Phase::Transmission(_))
        {
            self.finish(End::ShutDown);
        }
    }

    /// How long what is expected is, where that is fixed.
    fn header_bytes(&self) -> usize {
        match self.receive {
            Receive::ClientFlags => 4,
            Receive::OptionHeader => size_of::<crate::message::OptionHeader>(),
            _ => size_of::<Request>(),
        }
    }

    /// Whether something new may begin.
    fn is_ready(&self) -> bool {
        let room = match self.phase {
            Phase::Handshake => true,
            Phase::Transmission(_) => self.requests.len() < usize::from(self.config.in_flight),
            Phase::Leaving | Phase::Closed => false,
        };
        room && self.out.len() <= OUTPUT_HIGH_BYTES
    }
}

impl Machine for Connection {
    fn receive_space(&mut self) -> Option<&mut [u8]> {
        if matches!(self.phase, Phase::Leaving | Phase::Closed) {
            return None;
        }
        let (ready, length) = (self.is_ready(), self.header_bytes());
        match &mut self.receive {
            Receive::ClientFlags | Receive::OptionHeader | Receive::Request => {
                if self.filled == 0 && !ready {
                    return None;
                }
                Some(&mut self.header[self.filled..length])
            }
            Receive::Option { data, .. } => Some(&mut data[self.filled..]),
            Receive::Memory { .. } => None,
            Receive::Payload { buffers, at: (index, offset), .. } => {
                buffers.get_mut(*index).map(|b| &mut b[*offset..])
            }
            Receive::OptionSkip { left, .. } | Receive::Skip { left, .. } => {
                if self.sink.is_empty() {
                    self.sink = vec![0; SINK_BYTES];
                }
                let n = SINK_BYTES.min(*left as usize);
                Some(&mut self.sink[..n])
            }
        }
    }

    fn received(&mut self, n: usize) {
        if matches!(self.phase, Phase::Leaving | Phase::Closed) {
            return;
        }
        self.since.get_or_insert(self.now);
        let length = self.header_bytes();
        let small = u32::try_from(n).unwrap_or(u32::MAX);
        let complete = match &mut self.receive {
            Receive::ClientFlags | Receive::OptionHeader | Receive::Request => {
                self.filled += n;
                self.filled >= length
            }
            Receive::Option { data, .. } => {
                self.filled += n;
                self.filled >= data.len()
            }
            Receive::Memory { .. } => false,
            Receive::Payload { buffers, at, .. } => {
                at.1 += n;
                if buffers.get(at.0).is_some_and(|b| at.1 >= b.len()) {
                    *at = (at.0 + 1, 0);
                }
                at.0 >= buffers.len()
            }
            Receive::OptionSkip { left, .. } | Receive::Skip { left, .. } => {
                *left = left.saturating_sub(small);
                *left == 0
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
            Phase::Handshake => Some(self.config.handshake_timeout),
            Phase::Transmission(_) => self.since.map(|s| s + self.config.receive_timeout),
            Phase::Leaving | Phase::Closed => None,
        }
    }

    fn on_timer(&mut self, now: Duration) {
        self.now = now;
        if self.next_timer().is_none_or(|at| now < at) {
            return;
        }
        let handshake = self.phase == Phase::Handshake;
        self.finish(if handshake { End::HandshakeTimeout } else { End::ReceiveTimeout });
    }

    fn is_closing(&self) -> bool {
        self.phase == Phase::Closed || (self.phase == Phase::Leaving && self.requests.is_empty())
    }
}

impl Connection {
    /// What was expected has come.
    fn advance(&mut self) {
        match std::mem::replace(&mut self.receive, Receive::Request) {
            Receive::ClientFlags => self.client_flags(),
            Receive::OptionHeader => self.option_header(),
            Receive::Option { option, data } => self.option(option, &data),
            Receive::OptionSkip { option, .. } => self.option_too_big(option),
            Receive::Request => self.request(),
            Receive::Memory { tag } => self.receive = Receive::Memory { tag },
            Receive::Payload { tag, buffers, .. } => self.payload(tag, buffers.into()),
            Receive::Skip { tag, error, .. } => self.answer(tag, Answer::Failed(error)),
        }
    }
}

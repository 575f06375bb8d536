//! What callers ask for, and what becomes of it.

use std::fmt;
use std::time::Duration;

use rt::buf::{Bufs, BufsMut};

use crate::pdu::{LoginStatus, LogoutOutcome, RejectReason, TaskOutcome};
use crate::stream::Tag;

/// The data of a command.
#[derive(Debug)]
pub enum Payload {
    /// There is none.
    None,
    /// It goes to the target; not empty.
    ToTarget(Bufs),
    /// It comes from the target, into these; not empty.
    ToHost(BufsMut),
}

impl Payload {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::ToTarget(data) => data.len(),
            Self::ToHost(buffers) => buffers.iter().map(|b| b.len()).sum(),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What is asked.
#[derive(Debug)]
pub enum Request {
    /// A SCSI command (RFC 7143 11.3), with the attribute *simple*.
    Scsi {
        /// Logical unit.
        lun: [u8; 8],
        /// Command descriptor block.
        cdb: [u8; 16],
        /// Its data. Shorter than 4 GiB.
        payload: Payload,
    },
    /// ABORT TASK, for a command that was taken (RFC 7143 11.5).
    Abort(Tag),
    /// LOGICAL UNIT RESET.
    ResetUnit([u8; 8]),
    /// A NOP-Out that wants an answer (RFC 7143 11.18).
    Ping,
    /// Text of `key=value` pairs, no longer than 8 KiB (RFC 7143 11.10); one at a time.
    Text(Vec<u8>),
    /// The end of the session (RFC 7143 11.14): what is in flight is lost, and the connection ends.
    Logout,
}

/// A request, as its caller makes it.
#[derive(Debug)]
pub struct Command {
    /// What is asked.
    pub request: Request,
    /// How long the target may take to answer; `None` where it may take for ever.
    pub timeout: Option<Duration>,
}

/// By how much a transfer missed what was expected (RFC 7143 11.4.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residual {
    /// It did not.
    #[default]
    None,
    /// So many bytes of the data were not moved.
    Under(u32),
    /// So many bytes more were there.
    Over(u32),
}

/// The end of a SCSI command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// iSCSI service response: 0 where the target completed the command, else the rest says nothing.
    pub response: u8,
    /// SCSI status.
    pub status: u8,
    /// Sense data.
    pub sense: Box<[u8]>,
    /// What was not transferred.
    pub residual: Residual,
}

/// What a target has answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To a SCSI command.
    Scsi(Completion),
    /// To [`Request::Abort`] and [`Request::ResetUnit`].
    Managed(TaskOutcome),
    /// To [`Request::Ping`].
    Pong,
    /// To [`Request::Text`].
    Text(Vec<u8>),
    /// To [`Request::Logout`].
    LoggedOut(LogoutOutcome),
    /// It has rejected what is no SCSI command.
    Rejected(RejectReason),
}

/// Why a request has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Nothing of it has been sent: the target does not know of it.
    Unsent,
    /// It was sent, at least in part: the target has done it, or not, or will do it yet.
    InDoubt,
    /// Task management has ended it: the target has done it, or not, and does nothing more about it.
    Aborted,
}

/// The end of a request.
#[derive(Debug)]
pub struct Done {
    /// The request; its tag may be used again by now.
    pub tag: Tag,
    /// Whether it was a SCSI command, so that there is room for another one.
    pub is_command: bool,
    /// What the target has answered, or that there will be no answer.
    pub outcome: Result<Answer, Lost>,
    /// Bytes of its data that have been moved, as far as this side has seen.
    pub moved: u32,
    /// The buffers of [`Payload::ToHost`]; behind the first `moved` bytes they hold anything.
    pub buffers: BufsMut,
}

/// What a target says that nobody asked (RFC 7143 11.9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A SCSI asynchronous event.
    Scsi {
        /// The logical unit.
        lun: [u8; 8],
        /// Sense data.
        sense: Box<[u8]>,
    },
    /// It wants the session to end within so many seconds. This side takes no commands any more, and logs
    /// out when those in flight are over.
    LogoutRequest {
        /// Seconds.
        within_s: u16,
    },
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This side closed it.
    Closed,
    /// This side has logged out.
    LoggedOut,
    /// The target dropped it, and says how many seconds to wait before coming again.
    Dropped {
        /// Seconds.
        wait_s: u16,
    },
    /// The target wanted the session to end, and it did not in time.
    Overstayed,
    /// The target refused the login.
    Refused(LoginStatus),
    /// The target is elsewhere: [`super::Connection::moved_to`].
    Moved {
        /// Whether for good.
        for_good: bool,
    },
    /// The target asks for a proof, and there is no secret.
    SecretMissing,
    /// There is a secret of the target, and it does not prove that it has it.
    TargetUnproved,
    /// The target's proof is wrong.
    WrongProof,
    /// The target broke the protocol.
    Violation(&'static str),
    /// A header was not what its digest says.
    HeaderDigest,
    /// Data was not what its digest says.
    DataDigest,
    /// The target rejected a PDU.
    Rejected(RejectReason),
    /// The login took too long.
    LoginTimeout,
    /// The target left a PDU unfinished.
    ReceiveTimeout,
    /// The target did not answer a command in time.
    CommandTimeout,
    /// The target did not answer a ping in time.
    PingTimeout,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::LoggedOut => f.write_str("logged out"),
            Self::Dropped { wait_s } => {
                write!(f, "the target dropped the connection for {wait_s} s")
            }
            Self::Overstayed => f.write_str("the target wanted the session to end"),
            Self::Refused(status) => write!(f, "the target refused the login: {status:?}"),
            Self::Moved { .. } => f.write_str("the target is elsewhere"),
            Self::SecretMissing => f.write_str("the target asks for a secret, and there is none"),
            Self::TargetUnproved => f.write_str("the target does not prove who it is"),
            Self::WrongProof => f.write_str("the target's proof of who it is is wrong"),
            Self::Violation(what) => write!(f, "the target broke the protocol: {what}"),
            Self::HeaderDigest => f.write_str("a header was damaged on its way"),
            Self::DataDigest => f.write_str("data was damaged on its way"),
            Self::Rejected(reason) => write!(f, "the target rejected a PDU: {reason:?}"),
            Self::LoginTimeout => f.write_str("the login took too long"),
            Self::ReceiveTimeout => f.write_str("the target left a PDU unfinished"),
            Self::CommandTimeout => f.write_str("the target did not answer a command in time"),
            Self::PingTimeout => f.write_str("the target did not answer a ping in time"),
        }
    }
}

//! Requests of callers, and their outcomes.

use std::fmt;
use std::time::Duration;

use rt::buf::{Bufs, BufsMut};

use crate::pdu::{LoginStatus, LogoutOutcome, RejectReason, TaskOutcome};
use crate::stream::Tag;

/// The data of a command.
#[derive(Debug)]
pub enum Payload {
    /// No data.
    None,
    /// Data to the target; not empty.
    ToTarget(Bufs),
    /// Buffers for data from the target; not empty.
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

    /// Whether there is no data.
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
    /// A NOP-Out that requests an answer (RFC 7143 11.18).
    Ping,
    /// Text of `key=value` pairs, no longer than 8 KiB (RFC 7143 11.10); one at a time.
    Text(Vec<u8>),
    /// Ends the session (RFC 7143 11.14): what is in flight is lost, and the connection ends.
    Logout,
}

/// A request to submit.
#[derive(Debug)]
pub struct Command {
    /// What is asked.
    pub request: Request,
    /// Time limit of the answer; `None`: unlimited.
    pub timeout: Option<Duration>,
}

/// By how much a transfer missed what was expected (RFC 7143 11.4.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residual {
    /// No residual.
    #[default]
    None,
    /// This many bytes of the data were not transferred.
    Under(u32),
    /// This many more bytes were available.
    Over(u32),
}

/// Completion of a SCSI command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// iSCSI service response: 0 if the target completed the command; otherwise the other fields
    /// are meaningless.
    pub response: u8,
    /// SCSI status.
    pub status: u8,
    /// Sense data.
    pub sense: Box<[u8]>,
    /// The residual.
    pub residual: Residual,
}

/// A target's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To a SCSI command.
    Scsi(Completion),
    /// To [`Request::Abort`] and [`Request::ResetUnit`].
    TaskManagement(TaskOutcome),
    /// To [`Request::Ping`].
    Pong,
    /// To [`Request::Text`].
    Text(Vec<u8>),
    /// To [`Request::Logout`].
    Logout(LogoutOutcome),
    /// A rejected non-SCSI request.
    Rejected(RejectReason),
}

/// Why a request has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostRequest {
    /// Not sent: the target does not know of it.
    Unsent,
    /// Sent, at least in part: the target may have executed it, or may still do so.
    InDoubt,
    /// Ended by task management: the target may have executed it, but will do nothing more.
    Aborted,
}

/// A completed request.
#[derive(Debug)]
pub struct CompletedRequest {
    /// Tag of the request, which may be in use again by now.
    pub tag: Tag,
    /// Whether it was a SCSI command, whose slot is free again.
    pub is_command: bool,
    /// The target's answer, or why there is none.
    pub outcome: Result<Answer, LostRequest>,
    /// Bytes of its data transferred, as far as this side has seen.
    pub transferred: u32,
    /// The buffers of [`Payload::ToHost`]; undefined beyond the first `transferred` bytes.
    pub buffers: BufsMut,
}

/// Asynchronous notification of a target (RFC 7143 11.9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AsyncNotification {
    /// A SCSI asynchronous event.
    Scsi {
        /// The logical unit.
        lun: [u8; 8],
        /// Sense data.
        sense: Box<[u8]>,
    },
    /// The target requests the end of the session within this time. This side accepts no more
    /// commands, and logs out when those in flight have completed.
    LogoutRequest {
        /// Seconds.
        within_s: u16,
    },
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// This side closed it.
    Closed,
    /// This side has logged out.
    LoggedOut,
    /// The target dropped it and says how many seconds to wait before reconnecting.
    DroppedByTarget {
        /// Seconds.
        wait_s: u16,
    },
    /// The target requested the end of the session, which did not end in time.
    LogoutTimeout,
    /// The target refused the login.
    LoginRefused(LoginStatus),
    /// Redirected: [`super::Connection::redirect_address`].
    Redirected {
        /// Whether permanently.
        permanent: bool,
    },
    /// The target requires authentication, and no secret is configured.
    SecretMissing,
    /// A secret of the target is configured, but it does not authenticate.
    TargetNotAuthenticated,
    /// The target's proof is wrong.
    TargetAuthenticationFailed,
    /// The target violated the protocol.
    Violation(&'static str),
    /// Wrong header digest.
    HeaderDigest,
    /// Wrong data digest.
    DataDigest,
    /// The target rejected a PDU.
    Rejected(RejectReason),
    /// The login took too long.
    LoginTimeout,
    /// The target did not finish a PDU in time.
    ReceiveTimeout,
    /// The target did not answer a command in time.
    CommandTimeout,
    /// The target did not answer a ping in time.
    PingTimeout,
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::LoggedOut => f.write_str("logged out"),
            Self::DroppedByTarget { wait_s } => {
                write!(f, "the target dropped the connection for {wait_s} s")
            }
            Self::LogoutTimeout => f.write_str("the target requested logout"),
            Self::LoginRefused(status) => write!(f, "the target refused the login: {status:?}"),
            Self::Redirected { .. } => f.write_str("the target was redirected"),
            Self::SecretMissing => {
                f.write_str("the target requires a secret, but none is configured")
            }
            Self::TargetNotAuthenticated => f.write_str("the target does not authenticate itself"),
            Self::TargetAuthenticationFailed => f.write_str("the target's CHAP response is wrong"),
            Self::Violation(what) => write!(f, "the target broke the protocol: {what}"),
            Self::HeaderDigest => f.write_str("a header digest is wrong"),
            Self::DataDigest => f.write_str("a data digest is wrong"),
            Self::Rejected(reason) => write!(f, "the target rejected a PDU: {reason:?}"),
            Self::LoginTimeout => f.write_str("the login took too long"),
            Self::ReceiveTimeout => f.write_str("the target left a PDU unfinished"),
            Self::CommandTimeout => f.write_str("the target did not answer a command in time"),
            Self::PingTimeout => f.write_str("the target did not answer a ping in time"),
        }
    }
}

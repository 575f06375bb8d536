//! Actions of the machine, and the driver's answers.

use rt::buf::{Bufs, MemoryClass};

use crate::chap::{CHALLENGE_LEN, Secret};
use crate::name::Name;
use crate::params::Params;
use crate::pdu::{LoginStatus, TaskFunction};
use crate::stream::Tag;

/// A task management request that awaits its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u8);

/// A request to the driver. A command goes through [`Action::CommandArrived`], [`Action::Grant`]
/// (if it writes), [`Action::Run`], and ends with [`super::Connection::complete`]; the driver may
/// end it at any time after its arrival, and no further action concerns it then.
#[derive(Debug)]
pub enum Action {
    /// A login attempt: answer with [`super::Connection::login_decision`]. No PDU is received
    /// before that.
    Login(Box<LoginAttempt>),
    /// The initiator is authenticated and everything is negotiated: end an older session that this
    /// one replaces, then answer with [`super::Connection::session_established`].
    Establish(Box<NegotiatedSession>),
    /// Report targets: answer with [`super::Connection::targets`].
    SendTargets(SendTargetsScope),
    /// A command has arrived: answer with [`super::Connection::admit`], or end it.
    CommandArrived(ArrivedCommand),
    /// Data is to be received: answer with [`super::Connection::grant`].
    Grant {
        /// For which command.
        tag: Tag,
        /// Size in bytes.
        bytes: usize,
        /// The memory class: [`MemoryClass::UnsolicitedData`] for data that is already arriving and
        /// blocks reception; [`MemoryClass::SolicitedData`] for data still to be requested.
        class: MemoryClass,
    },
    /// All data has arrived: execute the command.
    Run {
        /// Which command.
        tag: Tag,
        /// Its data: as much as was admitted, or as the initiator has, if less.
        data: Bufs,
    },
    /// Abort the command as soon as possible; it is completed as usual. Sent once, and only after
    /// [`Action::CommandArrived`].
    Abort {
        /// Which command.
        tag: Tag,
    },
    /// Execute the part outside this connection, then answer with
    /// [`super::Connection::task_management_done`]. The affected tasks of this session get an
    /// [`Action::Abort`] each.
    TaskManagement {
        /// Identifier for the answer.
        id: RequestId,
        /// The function.
        function: TaskFunction,
        /// Logical unit, for the functions of that scope.
        lun: [u8; 8],
    },
    /// The connection ends as soon as its output has been sent. The last action; commands that
    /// have not been completed need no answer.
    Close(CloseReason),
}

impl Action {
    pub(super) fn tag(&self) -> Option<Tag> {
        match self {
            Self::CommandArrived(a) => Some(a.tag),
            Self::Grant { tag, .. } | Self::Run { tag, .. } | Self::Abort { tag } => Some(*tag),
            _ => None,
        }
    }
}

/// A login attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginAttempt {
    /// The initiator. Not yet authenticated.
    pub initiator: Name,
    /// The target; `None` for a discovery session.
    pub target: Option<Name>,
    /// The initiator's part of the session identifier.
    pub isid: [u8; 6],
    /// The session the connection is for; 0 for a new one.
    pub tsih: u16,
    /// Identifier of the connection within its session.
    pub cid: u16,
}

/// Permission to authenticate.
#[derive(Clone, Debug)]
pub struct LoginGrant {
    /// Required authentication.
    pub auth: Auth,
    /// Tag of the connection's portal group.
    pub portal_group: u16,
    /// Alias of the target for humans.
    pub target_alias: Option<String>,
    /// Parameters of the session that the connection continues (RFC 7143 6.3.4).
    pub session: Option<Params>,
}

/// Authentication required of an initiator.
#[derive(Clone, Debug)]
pub enum Auth {
    /// None; the name suffices.
    None,
    /// CHAP.
    Chap(Box<ChapPolicy>),
}

/// What CHAP needs.
#[derive(Clone, Debug)]
pub struct ChapPolicy {
    /// User name.
    pub user: String,
    /// Its secret.
    pub secret: Secret,
    /// Name and secret with which the target answers, if the initiator asks it to.
    pub mutual: Option<(String, Secret)>,
    /// Fresh random bytes.
    pub challenge: [u8; CHALLENGE_LEN],
    /// A fresh random byte.
    pub id: u8,
}

/// Refusal of a login.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginReject {
    /// Why.
    pub status: LoginStatus,
    /// For [`LoginStatus::MovedTemporarily`] and [`LoginStatus::MovedPermanently`]: where the
    /// target is, as `host:port`.
    pub redirect_address: Option<String>,
}

impl From<LoginStatus> for LoginReject {
    fn from(status: LoginStatus) -> Self {
        Self { status, redirect_address: None }
    }
}

/// A session to be established.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NegotiatedSession {
    /// The login.
    pub login: LoginAttempt,
    /// What was negotiated.
    pub params: Params,
}

/// Which targets to report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendTargetsScope {
    /// All that the initiator may use.
    All,
    /// This one.
    Named(Name),
    /// The target of the session.
    Session,
}

/// A target to report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetRecord {
    /// Its name.
    pub name: String,
    /// Its addresses: `host:port` (IPv6 hosts in brackets) and portal group tag.
    pub addresses: Vec<(String, u16)>,
}

/// Direction of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Nothing.
    None,
    /// Data to the initiator.
    Read,
    /// Data from the initiator.
    Write,
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrivedCommand {
    /// Its tag.
    pub tag: Tag,
    /// Logical unit.
    pub lun: [u8; 8],
    /// The first 16 bytes of the command descriptor block.
    pub cdb: [u8; 16],
    /// The rest of a longer one.
    pub extended_cdb: Box<[u8]>,
    /// Task attribute: 0 untagged, 1 simple, 2 ordered, 3 head of queue, 4 ACA.
    pub attribute: u8,
    /// Expected direction.
    pub direction: Direction,
    /// Expected transfer length in bytes.
    pub expected_len: u32,
}

/// Outcome of a command.
#[derive(Clone, Debug, Default)]
pub struct CommandOutcome<'a> {
    /// SCSI status.
    pub status: u8,
    /// Sense data, at most 252 bytes.
    pub sense: &'a [u8],
    /// Data for the initiator; may be cut off at the expected length.
    pub data: Bufs,
    /// Total bytes that the command had for the initiator, where `data` may hold only the expected
    /// part.
    pub available: u64,
}

impl<'a> CommandOutcome<'a> {
    /// Success, with data for the initiator.
    #[must_use]
    pub fn good(data: Bufs) -> Self {
        Self { data, ..Self::default() }
    }

    /// A status and its sense data.
    #[must_use]
    pub fn status(status: u8, sense: &'a [u8]) -> Self {
        Self { status, sense, ..Self::default() }
    }
}

/// An unsolicited notification to the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncNotification<'a> {
    /// A SCSI asynchronous event on a logical unit.
    Scsi {
        /// The logical unit.
        lun: [u8; 8],
        /// Sense data, at most 252 bytes.
        sense: &'a [u8],
    },
    /// Request a logout.
    LogoutRequest {
        /// Seconds until then.
        within_s: u16,
    },
    /// The connection and its session will be dropped.
    Drop {
        /// Seconds to wait before connecting again.
        time2wait_s: u16,
    },
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// The initiator logged out.
    #[error("logged out")]
    Logout,
    /// The login took too long.
    #[error("the login took too long")]
    LoginTimeout,
    /// The login was refused.
    #[error("the login was refused: {0:?}")]
    LoginRefused(LoginStatus),
    /// The first PDU was not a login request.
    #[error("not an iSCSI login")]
    NotALogin,
    /// Wrong header digest.
    #[error("a header digest is wrong")]
    HeaderDigest,
    /// The rest of a PDU did not arrive in time.
    #[error("a PDU was left unfinished")]
    ReceiveTimeout,
    /// A ping was not answered.
    #[error("no answer to a ping")]
    PingTimeout,
    /// The initiator violated the protocol irrecoverably.
    #[error("protocol error: {0}")]
    Protocol(&'static str),
    /// The target was reset.
    #[error("target reset")]
    Reset,
    /// The driver closed it.
    #[error("closed by the target")]
    Requested,
}

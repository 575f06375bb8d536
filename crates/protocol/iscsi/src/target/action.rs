//! What the machine asks of its driver, and the answers.

use rt::buf::{Bufs, Class};

use crate::chap::{CHALLENGE, Secret};
use crate::name::Name;
use crate::params::Params;
use crate::pdu::{LoginStatus, TaskFunction};
use crate::stream::Tag;

/// A task management request that awaits its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u8);

/// What the machine asks for. A command goes through [`Action::Arrived`], [`Action::Grant`]
/// (where it writes), [`Action::Run`], and ends with [`super::Connection::complete`]; the driver
/// may end it at any time after it arrived, and nothing more comes about it then.
#[derive(Debug)]
pub enum Action {
    /// Somebody wants in: answer with [`super::Connection::login_decision`]. No PDU is received
    /// before that.
    Login(Box<LoginAttempt>),
    /// The initiator is who it says it is, and everything is negotiated: end an older session
    /// that this one replaces, then answer with [`super::Connection::established`].
    Establish(Box<Session>),
    /// Report targets: answer with [`super::Connection::targets`].
    SendTargets(Scope),
    /// A command has arrived: answer with [`super::Connection::admit`], or end it.
    Arrived(Arrived),
    /// Data is to be received: answer with [`super::Connection::grant`].
    Grant {
        /// For which command.
        tag: Tag,
        /// How many bytes.
        bytes: usize,
        /// Which memory: [`Class::Arriving`] for data that is already on its way, and behind
        /// which nothing else can be received; [`Class::Solicited`] for data that will be asked
        /// for.
        class: Class,
    },
    /// All data is there: start the command.
    Run {
        /// Which command.
        tag: Tag,
        /// Its data: as much as was admitted, or as the initiator has where that is less.
        data: Bufs,
    },
    /// End the command as soon as possible; it is completed as usual. Comes once, and only
    /// after [`Action::Arrived`].
    Abort {
        /// Which command.
        tag: Tag,
    },
    /// Do what is not the machine's own business, then answer with
    /// [`super::Connection::task_management_done`]. The tasks of this session that it affects
    /// get an [`Action::Abort`] each.
    TaskManagement {
        /// What the answer refers to.
        id: RequestId,
        /// What is asked.
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
            Self::Arrived(a) => Some(a.tag),
            Self::Grant { tag, .. } | Self::Run { tag, .. } | Self::Abort { tag } => Some(*tag),
            _ => None,
        }
    }
}

/// Who wants in, and where.
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

/// The initiator may try.
#[derive(Clone, Debug)]
pub struct LoginGrant {
    /// How it has to prove who it is.
    pub auth: Auth,
    /// Tag of the portal group that the connection came to.
    pub portal_group: u16,
    /// A name for people.
    pub target_alias: Option<String>,
    /// What the session has agreed on that the connection goes on with (RFC 7143 6.3.4).
    pub session: Option<Params>,
}

/// How an initiator has to prove who it is.
#[derive(Clone, Debug)]
pub enum Auth {
    /// Its name is enough.
    None,
    /// CHAP.
    Chap(Box<ChapPolicy>),
}

/// What CHAP needs.
#[derive(Clone, Debug)]
pub struct ChapPolicy {
    /// The name the initiator gives.
    pub user: String,
    /// Its secret.
    pub secret: Secret,
    /// Name and secret with which the target answers, if the initiator asks it to.
    pub mutual: Option<(String, Secret)>,
    /// Fresh random bytes.
    pub challenge: [u8; CHALLENGE],
    /// A fresh random byte.
    pub id: u8,
}

/// The initiator may not log in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginReject {
    /// Why.
    pub status: LoginStatus,
    /// For [`LoginStatus::MovedTemporarily`] and [`LoginStatus::MovedPermanently`]: where the
    /// target is, as `host:port`.
    pub moved_to: Option<String>,
}

impl From<LoginStatus> for LoginReject {
    fn from(status: LoginStatus) -> Self {
        Self { status, moved_to: None }
    }
}

/// A session to be established.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Who is in, and where.
    pub who: LoginAttempt,
    /// What was negotiated.
    pub params: Params,
}

/// Which targets are to be reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All that the initiator may use.
    All,
    /// This one.
    Named(Name),
    /// The one that the session is with.
    Session,
}

/// A target to be reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetRecord {
    /// Its name.
    pub name: String,
    /// Where it is: `host:port` (IPv6 hosts in brackets) and portal group tag.
    pub addresses: Vec<(String, u16)>,
}

/// What a command transfers.
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
pub struct Arrived {
    /// What to call it.
    pub tag: Tag,
    /// Logical unit.
    pub lun: [u8; 8],
    /// The first 16 bytes of the command descriptor block.
    pub cdb: [u8; 16],
    /// The rest of a longer one.
    pub extended_cdb: Box<[u8]>,
    /// Task attribute: 0 untagged, 1 simple, 2 ordered, 3 head of queue, 4 ACA.
    pub attribute: u8,
    /// What the initiator expects to be transferred.
    pub direction: Direction,
    /// How many bytes the initiator expects to be transferred.
    pub expected_len: u32,
}

/// How a command ended.
#[derive(Clone, Debug, Default)]
pub struct Outcome<'a> {
    /// SCSI status.
    pub status: u8,
    /// Sense data, at most 252 bytes.
    pub sense: &'a [u8],
    /// Data for the initiator. May end where the initiator's expectation does.
    pub data: Bufs,
    /// Bytes that the command had for the initiator in all, where `data` holds only those that
    /// the initiator expects.
    pub available: u64,
}

impl<'a> Outcome<'a> {
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

/// Something that the initiator should know without having asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice<'a> {
    /// A SCSI asynchronous event on a logical unit.
    Scsi {
        /// The logical unit.
        lun: [u8; 8],
        /// Sense data, at most 252 bytes.
        sense: &'a [u8],
    },
    /// Please log out.
    LogoutRequest {
        /// Within so many seconds.
        within_s: u16,
    },
    /// The connection, and with it the session, will be dropped.
    Drop {
        /// Seconds to wait before connecting again.
        time2wait_s: u16,
    },
}

/// Why a connection ends.
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
    /// A header was not what its digest says.
    #[error("a header was garbled on the way")]
    HeaderDigest,
    /// The rest of a PDU stayed away.
    #[error("half a PDU, then silence")]
    ReceiveTimeout,
    /// A ping was not answered.
    #[error("no answer to a ping")]
    PingTimeout,
    /// The initiator broke the protocol in a way that cannot be mended.
    #[error("protocol error: {0}")]
    Protocol(&'static str),
    /// The target was reset.
    #[error("target reset")]
    Reset,
    /// The driver wanted it.
    #[error("closed by the target")]
    Requested,
}

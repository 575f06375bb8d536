//! How a session comes to be: dialling, login, and going where a target leads.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ::iscsi::initiator::{self, Config, Connection, Fresh};
use ::iscsi::pdu::LoginStatus;
use block::Account;
use rt::Core;
use tokio::time::timeout;

use super::link::{End, Link};
use super::live::{Failed, Live};
use super::options::Options;
use crate::drive::Staging;

/// Most redirections that are followed from one target to the next.
const MOST_MOVES: usize = 4;

/// TCP port of targets that name none (RFC 7143 13.8).
const PORT: u16 = 3260;

/// Why a target is not reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// There is no connection.
    #[error("no connection: {0}")]
    Dial(io::ErrorKind),
    /// It took too long.
    #[error("it takes too long")]
    TimedOut,
    /// The connection ended.
    #[error("{0}")]
    Ended(End),
    /// The target leads elsewhere, and so does who is there, and so on.
    #[error("the target leads from one place to the next")]
    MovesOn,
    /// A request failed on the way.
    #[error("{0}")]
    Failed(Failed),
    /// What was asked for cannot be, or the target leads to where nobody can go.
    #[error("not a target that can be used: {0}")]
    Unusable(&'static str),
}

impl ConnectError {
    /// Whether trying again makes no sense before somebody has changed something.
    #[must_use]
    pub fn is_final(&self) -> bool {
        use initiator::End as Why;
        match self {
            Self::Ended(End::Machine(Why::Refused(status))) => is_final(*status),
            Self::Ended(End::Machine(
                Why::SecretMissing | Why::TargetUnproved | Why::WrongProof,
            ))
            | Self::Unusable(_) => true,
            Self::Dial(_) | Self::TimedOut | Self::Ended(_) | Self::MovesOn | Self::Failed(_) => {
                false
            }
        }
    }
}

/// RFC 7143 11.13.5: the initiator is at fault. What depends on other sessions passes.
fn is_final(status: LoginStatus) -> bool {
    let passes =
        [LoginStatus::TooManyConnections, LoginStatus::CannotInclude, LoginStatus::NoSession];
    status.0 >> 8 == 2 && !passes.contains(&status)
}

impl From<Failed> for ConnectError {
    fn from(failed: Failed) -> Self {
        Self::Failed(failed)
    }
}

/// What all logins of a session have in common.
#[derive(Debug)]
pub(super) struct Connector {
    pub(super) core: Core,
    pub(super) options: Options,
    pub(super) staging: Staging,
    pub(super) account: Account,
    config: Arc<Config>,
}

impl Connector {
    /// For a session with [`Options::target`], or for discovery.
    pub(super) fn new(
        core: &Core,
        options: Options,
        staging: Staging,
        is_discovery: bool,
    ) -> Result<Self, ConnectError> {
        let name = |text: &str| text.parse().map_err(|_| ConnectError::Unusable("not a name"));
        let target = if is_discovery { None } else { Some(name(&options.target)?) };
        let isid = options.isid.unwrap_or_else(|| random_isid(core));
        let silence = options.keep_alive / 2;
        let config = Config {
            credentials: options.credentials.as_deref().cloned(),
            digests: options.digests,
            limits: options.limits.clone(),
            in_flight: options.in_flight,
            login_timeout: options.connect_timeout,
            ping_after: silence,
            ping_timeout: silence,
            receive_timeout: options.command_timeout,
            ..Config::new(name(&options.initiator)?, target, isid)
        };
        let account = core.pool().account();
        Ok(Self { core: core.clone(), options, staging, account, config: Arc::new(config) })
    }

    /// Logs in, wherever the target leads. Who comes again with the same identifier takes the place of its
    /// older session, whose commands the target ends first (RFC 7143 6.3.5).
    pub(super) async fn bring_up(&self) -> Result<Rc<Live>, ConnectError> {
        let mut address = self.options.address;
        for _ in 0..=MOST_MOVES {
            let limit = self.options.connect_timeout;
            let logged_in = timeout(limit, self.log_in(address)).await;
            match logged_in.unwrap_or(Err(ConnectError::TimedOut))? {
                Login::Done(link) => return Ok(Rc::new(Live::new(link, self, address))),
                Login::Moved(to) => address = to,
            }
        }
        Err(ConnectError::MovesOn)
    }

    async fn log_in(&self, address: SocketAddr) -> Result<Login, ConnectError> {
        let stream = self.core.dial(address).await;
        let stream = stream.map_err(|e| ConnectError::Dial(e.kind()))?;
        let machine = Connection::new(Arc::clone(&self.config), self.fresh());
        let send_timeout = self.options.command_timeout;
        let link = Link::start(stream, machine, self.staging.clone(), send_timeout);
        match link.opened().await {
            Ok(()) => Ok(Login::Done(link)),
            Err(End::Machine(initiator::End::Moved { .. })) => {
                let to = link.with(|machine| machine.moved_to().and_then(portal));
                to.map(Login::Moved).ok_or(ConnectError::Unusable("it leads to what is no address"))
            }
            Err(end) => Err(ConnectError::Ended(end)),
        }
    }

    /// How long a target that ended so wants to be left alone; no longer than the longest pause.
    pub(super) fn rest(&self, end: End) -> Duration {
        match end {
            End::Machine(initiator::End::Dropped { wait_s }) => {
                Duration::from_secs(wait_s.into()).min(self.options.backoff.longest)
            }
            _ => Duration::ZERO,
        }
    }

    fn fresh(&self) -> Fresh {
        let (mut challenge, mut id) = ([0; _], [0]);
        self.core.fill_random(&mut challenge);
        self.core.fill_random(&mut id);
        Fresh { challenge, id: id[0] }
    }
}

enum Login {
    Done(Link),
    Moved(SocketAddr),
}

/// RFC 7143 11.12.5: of the random type.
fn random_isid(core: &Core) -> [u8; 6] {
    const RANDOM: u8 = 0x80;
    let [a, b, c, d, e, ..] = core.random_u64().to_le_bytes();
    [RANDOM, a, b, c, d, e]
}

/// The address in `host:port,group`, of which the port and the group may be missing. Hosts are numbers here: a
/// core resolves no names.
pub(super) fn portal(text: &str) -> Option<SocketAddr> {
    let address = text.split(',').next()?;
    let bare = || {
        let host = address.strip_prefix('[').and_then(|a| a.strip_suffix(']')).unwrap_or(address);
        Some(SocketAddr::new(host.parse().ok()?, PORT))
    };
    address.parse().ok().or_else(bare)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7143 13.8.
    #[test]
    fn portals_are_read() {
        for (text, expected) in [
            ("192.0.2.1:860,1", Some("192.0.2.1:860")),
            ("192.0.2.1", Some("192.0.2.1:3260")),
            ("[2001:db8::1]:3261,65535", Some("[2001:db8::1]:3261")),
            ("[2001:db8::1],2", Some("[2001:db8::1]:3260")),
            ("target.example:3260,1", None),
            ("192.0.2.1:65536", None),
            ("", None),
        ] {
            assert_eq!(portal(text), expected.map(|e| e.parse().unwrap()), "{text}");
        }
    }

    /// RFC 7143 11.13.5.
    #[test]
    fn what_does_not_help_is_final() {
        for (status, expected) in [
            (LoginStatus::AuthenticationFailure, true),
            (LoginStatus::NotFound, true),
            (LoginStatus::TooManyConnections, false),
            (LoginStatus::ServiceUnavailable, false),
            (LoginStatus::TargetError, false),
        ] {
            let refused = End::Machine(initiator::End::Refused(status));
            assert_eq!(ConnectError::Ended(refused).is_final(), expected, "{status:?}");
        }
        assert!(!ConnectError::Ended(End::PeerClosed).is_final());
        assert!(ConnectError::Ended(End::Machine(initiator::End::WrongProof)).is_final());
    }
}

//! Establishing a session: dial, log in, follow redirections.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ::iscsi::initiator::{self, Config, Connection, LoginNonce};
use ::iscsi::pdu::LoginStatus;
use block::Account;
use rt::Core;
use tokio::time::timeout;

use super::active_session::{ActiveSession, SessionError};
use super::link::{Link, SessionEnd};
use super::options::Options;
use crate::connection::Staging;

/// Most redirections that are followed in a row.
const MAX_REDIRECTS: usize = 4;

/// Default TCP port (RFC 7143 13.8).
const PORT: u16 = 3260;

/// Why connecting to a target failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// Dialling failed.
    #[error("no connection: {0}")]
    Dial(io::ErrorKind),
    /// It took too long.
    #[error("timed out")]
    TimedOut,
    /// The connection ended.
    #[error("{0}")]
    Ended(SessionEnd),
    /// Too many redirections in a row.
    #[error("too many redirections")]
    TooManyRedirects,
    /// A request during the connection attempt failed.
    #[error("{0}")]
    Request(SessionError),
    /// The options are invalid, or the target redirects to an unusable address.
    #[error("unusable target: {0}")]
    Unusable(&'static str),
}

impl ConnectError {
    /// Whether retrying is useless until the configuration changes.
    #[must_use]
    pub fn is_final(&self) -> bool {
        use initiator::CloseReason as Why;
        match self {
            Self::Ended(SessionEnd::Machine(Why::LoginRefused(status))) => is_final(*status),
            Self::Ended(SessionEnd::Machine(
                Why::SecretMissing | Why::TargetNotAuthenticated | Why::TargetAuthenticationFailed,
            ))
            | Self::Unusable(_) => true,
            Self::Dial(_)
            | Self::TimedOut
            | Self::Ended(_)
            | Self::TooManyRedirects
            | Self::Request(_) => false,
        }
    }
}

/// RFC 7143 11.13.5: initiator errors. Those that depend on other sessions are temporary.
fn is_final(status: LoginStatus) -> bool {
    let passes =
        [LoginStatus::TooManyConnections, LoginStatus::CannotInclude, LoginStatus::NoSession];
    status.0 >> 8 == 2 && !passes.contains(&status)
}

impl From<SessionError> for ConnectError {
    fn from(failed: SessionError) -> Self {
        Self::Request(failed)
    }
}

/// What all logins of a session have in common.
#[derive(Debug)]
pub(super) struct Connector {
    pub(super) core: Core,
    pub(super) options: Options,
    pub(super) staging: Staging,
    account: Account,
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
            max_in_flight: options.max_in_flight,
            login_timeout: options.connect_timeout,
            ping_after: silence,
            ping_timeout: silence,
            receive_timeout: options.command_timeout,
            ..Config::new(name(&options.initiator)?, target, isid)
        };
        let account = core.buffer_pool().account();
        Ok(Self { core: core.clone(), options, staging, account, config: Arc::new(config) })
    }

    /// Logs in and follows redirections. A login with the same identifiers replaces the older
    /// session, whose commands the target ends first (RFC 7143 6.3.5).
    pub(super) async fn establish(&self) -> Result<Rc<ActiveSession>, ConnectError> {
        let mut address = self.options.address;
        for _ in 0..=MAX_REDIRECTS {
            let limit = self.options.connect_timeout;
            let logged_in = timeout(limit, self.log_in(address)).await;
            match logged_in.unwrap_or(Err(ConnectError::TimedOut))? {
                LoginResult::Done(link) => {
                    let (account, within) = (self.account.clone(), self.options.command_timeout);
                    return Ok(Rc::new(ActiveSession::new(link, address, account, within)));
                }
                LoginResult::Redirected(to) => address = to,
            }
        }
        Err(ConnectError::TooManyRedirects)
    }

    async fn log_in(&self, address: SocketAddr) -> Result<LoginResult, ConnectError> {
        let stream = self.core.dial(address).await;
        let stream = stream.map_err(|e| ConnectError::Dial(e.kind()))?;
        let machine = Connection::new(Arc::clone(&self.config), self.login_nonce());
        let send_timeout = self.options.command_timeout;
        let link = Link::start(stream, machine, self.staging.clone(), send_timeout);
        match link.wait_open().await {
            Ok(()) => Ok(LoginResult::Done(link)),
            Err(SessionEnd::Machine(initiator::CloseReason::Redirected { .. })) => {
                let to = link.with(|machine| machine.redirect_address().and_then(parse_portal));
                to.map(LoginResult::Redirected)
                    .ok_or(ConnectError::Unusable("it redirects to an invalid address"))
            }
            Err(end) => Err(ConnectError::Ended(end)),
        }
    }

    /// How long to wait before reconnecting after this end, at most the longest delay.
    pub(super) fn reconnect_delay(&self, end: SessionEnd) -> Duration {
        match end {
            SessionEnd::Machine(initiator::CloseReason::DroppedByTarget { wait_s }) => {
                Duration::from_secs(wait_s.into()).min(self.options.backoff.max)
            }
            _ => Duration::ZERO,
        }
    }

    fn login_nonce(&self) -> LoginNonce {
        let (mut challenge, mut id) = ([0; _], [0]);
        self.core.fill_random(&mut challenge);
        self.core.fill_random(&mut id);
        LoginNonce { challenge, id: id[0] }
    }
}

enum LoginResult {
    Done(Link),
    Redirected(SocketAddr),
}

/// RFC 7143 11.12.5: of the random type.
fn random_isid(core: &Core) -> [u8; 6] {
    const RANDOM: u8 = 0x80;
    let [a, b, c, d, e, ..] = core.random_u64().to_le_bytes();
    [RANDOM, a, b, c, d, e]
}

/// Parses `host:port,group`, where port and group may be missing. The host must be an address: a
/// core resolves no names.
pub(super) fn parse_portal(text: &str) -> Option<SocketAddr> {
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
            assert_eq!(parse_portal(text), expected.map(|e| e.parse().unwrap()), "{text}");
        }
    }

    /// RFC 7143 11.13.5.
    #[test]
    fn permanent_errors_are_final() {
        for (status, expected) in [
            (LoginStatus::AuthenticationFailure, true),
            (LoginStatus::NotFound, true),
            (LoginStatus::TooManyConnections, false),
            (LoginStatus::ServiceUnavailable, false),
            (LoginStatus::TargetError, false),
        ] {
            let refused = SessionEnd::Machine(initiator::CloseReason::LoginRefused(status));
            assert_eq!(ConnectError::Ended(refused).is_final(), expected, "{status:?}");
        }
        assert!(!ConnectError::Ended(SessionEnd::PeerClosed).is_final());
        assert!(
            ConnectError::Ended(SessionEnd::Machine(
                initiator::CloseReason::TargetAuthenticationFailed
            ))
            .is_final()
        );
    }
}

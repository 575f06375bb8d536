//! Establishing a queue: dial, Connect, authenticate.

use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::sync::Arc;

use ::nvme::auth::{
    self, AuthCommand, HostAuthenticator, HostStep, SequenceCounter, SharedConfig,
    TransactionRandomness,
};
use ::nvme::fabrics::{CNTLID_DYNAMIC, CONNECT_AUTHENTICATE};
use ::nvme::host::{ADMIN_IN_CAPSULE_BYTES, Config};
use ::nvme::tls::{CipherSuite, TlsKey};
use ::nvme::{Connect, Status};
use block::Account;
use rt::Core;
use rt::net::Stream;
use tokio::time::timeout;
use zerocopy::IntoBytes;

use super::admin::{AdminError, AdminQueue};
use super::options::Options;
use super::queue::{Queue, QueueEnd, Staging};
use crate::tls_stream::TlsStream;

/// Entries of an admin queue (NVMe Base 2.0, 3.3.1: 32 at least over fabrics).
const ADMIN_ENTRIES: u16 = 32;

/// Result of Connect when authentication is required: by a secure channel (ASCR).
const CONNECT_SECURE_CHANNEL: u64 = 1 << 16;

/// Buffer for an authentication message, in bytes.
const AUTH_BUFFER_BYTES: usize = auth::MAX_MESSAGE_BYTES;

/// Most messages in one authentication.
const MAX_AUTH_MESSAGES: usize = 8;

/// Why connecting to a controller failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// Dialling failed.
    #[error("no connection: {0}")]
    Dial(io::ErrorKind),
    /// TLS failed. This may be temporary: a starting node may be unable to read the key yet.
    #[error("no TLS: {0}")]
    Tls(tls::TlsError),
    /// It took too long.
    #[error("timed out")]
    TimedOut,
    /// The connection ended.
    #[error("{0}")]
    Ended(QueueEnd),
    /// The controller refused Connect.
    #[error("refused to connect: {0:?}")]
    Refused(Status),
    /// The controller refused Connect of an I/O queue. Never final: it may have lost the
    /// association meanwhile, whatever status it returns.
    #[error("refused to connect an I/O queue: {0:?}")]
    RefusedQueue(Status),
    /// Authentication failed.
    #[error("authentication failed: {0:?}")]
    Authentication(auth::AuthFailure),
    /// The controller requires authentication, and no secret is configured.
    #[error("the controller requires a secret, but none is configured")]
    SecretMissing,
    /// A controller secret is configured, but the controller offers no authentication.
    #[error("the controller does not authenticate itself")]
    ControllerNotAuthenticated,
    /// An admin command failed.
    #[error("{0}")]
    Admin(AdminError),
    /// Not a usable controller of this subsystem.
    #[error("unusable controller: {0}")]
    Unusable(&'static str),
}

impl ConnectError {
    /// Whether retrying is useless until the configuration changes.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Refused(status) => status.is_do_not_retry(),
            Self::Authentication(_)
            | Self::SecretMissing
            | Self::ControllerNotAuthenticated
            | Self::Unusable(_) => true,
            Self::Dial(_)
            | Self::Tls(_)
            | Self::TimedOut
            | Self::Ended(_)
            | Self::RefusedQueue(_)
            | Self::Admin(_) => false,
        }
    }
}

impl From<tls::StreamError> for ConnectError {
    fn from(fault: tls::StreamError) -> Self {
        match fault {
            tls::StreamError::Tls(why) => Self::Tls(why),
            tls::StreamError::Io(why) => Self::Ended(QueueEnd::Io(why.kind())),
        }
    }
}

impl From<AdminError> for ConnectError {
    fn from(failed: AdminError) -> Self {
        Self::Admin(failed)
    }
}

/// What all queues of an association have in common.
#[derive(Debug)]
pub(super) struct Connector {
    pub(super) core: Core,
    pub(super) options: Options,
    pub(super) staging: Staging,
    pub(super) account: Account,
    /// Whether the controller was on this machine when it was last dialled.
    pub(super) is_local: Cell<bool>,
    auth_config: Option<SharedConfig>,
    sequence: RefCell<SequenceCounter>,
    /// Buffer for received ciphertext, once used.
    ciphertext: OnceCell<Staging>,
}

/// Parameters of a queue to open.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueSpec {
    /// Queue identifier; 0 is the admin queue.
    pub(super) id: u16,
    /// Controller identifier; any for the admin queue.
    pub(super) controller: u16,
    /// Entries.
    pub(super) entries: u16,
    /// Most data in a capsule, in bytes.
    pub(super) in_capsule_bytes: u32,
}

impl QueueSpec {
    pub(super) const ADMIN: Self = Self {
        id: 0,
        controller: CNTLID_DYNAMIC,
        entries: ADMIN_ENTRIES,
        in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
    };
}

impl Connector {
    pub(super) fn new(core: &Core, options: Options, staging: Staging) -> Self {
        let proof = options.secrets.as_ref().map(|secrets| {
            Arc::new(auth::Config {
                host_nqn: options.hostnqn.clone(),
                subsystem_nqn: options.subnqn.clone(),
                host_secret: secrets.host.clone(),
                controller_secret: secrets.controller.clone(),
                policy: secrets.policy.clone(),
            })
        });
        let [a, b, c, d, ..] = core.random_u64().to_le_bytes();
        let sequence = RefCell::new(SequenceCounter::new(u32::from_le_bytes([a, b, c, d])));
        let account = core.buffer_pool().account();
        let is_local = Cell::new(false);
        let ciphertext = OnceCell::new();
        Self {
            core: core.clone(),
            options,
            staging,
            account,
            is_local,
            auth_config: proof,
            sequence,
            ciphertext,
        }
    }

    /// Opens a queue and returns the identifier of its controller.
    pub(super) async fn open(&self, wanted: QueueSpec) -> Result<(Queue, u16), ConnectError> {
        let limit = self.options.connect_timeout;
        let connected = timeout(limit, self.connect(wanted)).await;
        connected.unwrap_or(Err(ConnectError::TimedOut))
    }

    async fn connect(&self, wanted: QueueSpec) -> Result<(Queue, u16), ConnectError> {
        let options = &self.options;
        let stream = self.core.dial(options.address).await;
        let stream = stream.map_err(|e| ConnectError::Dial(e.kind()))?;
        // A connection to the own machine has the same source address, or both are loopback
        // addresses.
        let (own, peer) = (stream.local_addr(), stream.peer_addr());
        let is_local = own.ok().zip(peer.ok()).is_some_and(|(own, peer)| own.ip() == peer.ip());
        self.is_local.set(is_local);
        let config = Config {
            max_in_flight: wanted.entries - 1,
            digests: options.digests,
            in_capsule_bytes: wanted.in_capsule_bytes,
            establish_timeout: options.connect_timeout,
            receive_timeout: options.command_timeout,
            ..Config::default()
        };
        let (staging, timeout) = (self.staging.clone(), options.command_timeout);
        let queue = match &options.tls_key {
            None => Queue::start(stream, config, staging, timeout),
            Some(key) => Queue::start(self.protect(stream, key).await?, config, staging, timeout),
        };
        let admin = self.admin(&queue);
        let result = self.send_connect(&admin, wanted).await?;
        let [a, b, ..] = result.to_le_bytes();
        self.authenticate(&admin, wanted.id, result).await?;
        Ok((queue, u16::from_le_bytes([a, b])))
    }

    /// Starts TLS with the key that the specification derives first. Controllers that expect the
    /// derivation of older libraries (RFD 0022, 2) refuse it.
    async fn protect(&self, stream: Stream, key: &TlsKey) -> Result<TlsStream, ConnectError> {
        let Options { hostnqn, subnqn, .. } = &self.options;
        let psk = key.psks(hostnqn, subnqn).next();
        let psk = psk.ok_or(ConnectError::Unusable("names that are too long for a key"))?;
        let suite = match psk.suite() {
            CipherSuite::Aes128Sha256 => tls::CipherSuite::Aes128Sha256,
            CipherSuite::Aes256Sha384 => tls::CipherSuite::Aes256Sha384,
        };
        let psk = tls::Psk::new(psk.identity().as_bytes(), psk.key(), suite);
        let ciphertext = self.ciphertext.get_or_init(Staging::default).clone();
        Ok(TlsStream::new(stream, &psk, ciphertext).await?)
    }

    pub(super) fn admin(&self, queue: &Queue) -> AdminQueue {
        let (queue, account) = (queue.clone(), self.account.clone());
        AdminQueue { queue, account, timeout: self.options.command_timeout }
    }

    /// Sends Connect (NVMe Base 2.0, 6.3) and returns its result.
    async fn send_connect(
        &self,
        admin: &AdminQueue,
        wanted: QueueSpec,
    ) -> Result<u64, ConnectError> {
        let options = &self.options;
        let kato_ms = u32::try_from(options.keep_alive.as_millis()).unwrap_or(u32::MAX);
        let connect = Connect {
            qid: wanted.id,
            sqsize: wanted.entries - 1,
            flow_control: false,
            kato_ms: if wanted.id == 0 { kato_ms } else { 0 },
            host_id: options.host_id,
            hostnqn: options.hostnqn.clone(),
            subnqn: options.subnqn.clone(),
            cntlid: wanted.controller,
        };
        let (sqe, data) = connect.encode(0);
        match admin.send(sqe, data.as_bytes()).await {
            Ok(result) => Ok(result),
            Err(AdminError::Refused(status)) if wanted.id == 0 => {
                Err(ConnectError::Refused(status))
            }
            Err(AdminError::Refused(status)) => Err(ConnectError::RefusedQueue(status)),
            Err(AdminError::Lost(_)) => Err(ConnectError::Ended(admin.queue.wait_end().await)),
            Err(failed) => Err(failed.into()),
        }
    }

    /// Authenticates if the result `connected` requires it.
    async fn authenticate(
        &self,
        admin: &AdminQueue,
        qid: u16,
        connected: u64,
    ) -> Result<(), ConnectError> {
        if connected & CONNECT_SECURE_CHANNEL != 0 {
            return Err(ConnectError::Unusable("it requires a secure channel"));
        }
        let asked = connected & CONNECT_AUTHENTICATE != 0;
        let config = match (&self.auth_config, asked) {
            (None, false) => return Ok(()),
            (None, true) => return Err(ConnectError::SecretMissing),
            (Some(c), false) if c.controller_secret.is_some() => {
                return Err(ConnectError::ControllerNotAuthenticated);
            }
            (Some(_), false) => return Ok(()),
            (Some(config), true) => config,
        };
        let (mut prover, message) = HostAuthenticator::start(SharedConfig::clone(config), qid);
        let mut next = HostStep::Send(message);
        for _ in 0..MAX_AUTH_MESSAGES {
            next = match next {
                HostStep::Send(message) => {
                    self.send_auth_message(admin, &message).await?;
                    let bytes = u32::try_from(AUTH_BUFFER_BYTES).unwrap_or(u32::MAX);
                    let sqe = AuthCommand::Receive { bytes }.encode(0);
                    let answer = admin.fetch(sqe, AUTH_BUFFER_BYTES).await?;
                    prover.receive(&answer, || self.randomness())
                }
                HostStep::Compute(work) => {
                    let done = self.core.run_blocking(move || work.run()).await;
                    let next = done.and_then(|done| prover.on_computed(done));
                    next.ok_or(ConnectError::Unusable("a response that cannot be computed"))?
                }
                HostStep::Authenticated(None) => return Ok(()),
                HostStep::Authenticated(Some(message)) => {
                    return self.send_auth_message(admin, &message).await;
                }
                HostStep::Failed(end, last) => {
                    if let Some(message) = last {
                        // The connection ends either way.
                        let _ = self.send_auth_message(admin, &message).await;
                    }
                    return Err(ConnectError::Authentication(end));
                }
            };
        }
        Err(ConnectError::Unusable("too many authentication messages"))
    }

    async fn send_auth_message(
        &self,
        admin: &AdminQueue,
        message: &[u8],
    ) -> Result<(), ConnectError> {
        let bytes = u32::try_from(message.len()).unwrap_or(u32::MAX);
        let sent = admin.send(AuthCommand::Send { bytes }.encode(0), message).await;
        sent.map(drop).map_err(ConnectError::from)
    }

    fn randomness(&self) -> TransactionRandomness {
        let mut random = [0; TransactionRandomness::LEN];
        self.core.fill_random(&mut random);
        TransactionRandomness::new(self.sequence.borrow_mut().take(), &random)
    }
}

//! How a queue comes to be: dialling, Connect, proof.

use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::sync::Arc;

use ::nvme::auth::{self, AuthCommand, Fresh, Next, Prover, Sequence, SharedConfig};
use ::nvme::fabrics::{CNTLID_DYNAMIC, CONNECT_AUTHENTICATE};
use ::nvme::host::{ADMIN_IN_CAPSULE_BYTES, Config};
use ::nvme::tls::{Suite, TlsKey};
use ::nvme::{Connect, Status};
use block::Account;
use rt::Core;
use rt::net::Stream;
use tokio::time::timeout;
use zerocopy::IntoBytes;

use super::admin::{Admin, Failed};
use super::options::Options;
use super::queue::{End, Queue, Staging};
use crate::protected::Protected;

/// Entries of an admin queue (NVMe Base 2.0, 3.3.1: 32 at least over fabrics).
const ADMIN_ENTRIES: u16 = 32;

/// What Connect returns where the host has to prove who it is: by a secure channel (ASCR).
const CONNECT_SECURE_CHANNEL: u64 = 1 << 16;

/// Room for a message of an authentication, in bytes.
const ROOM: usize = auth::MAX_MESSAGE_BYTES;

/// Most messages that a controller may make of one authentication.
const MOST_MESSAGES: usize = 8;

/// Why a controller is not reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// There is no connection.
    #[error("no connection: {0}")]
    Dial(io::ErrorKind),
    /// The connection cannot be protected. That may pass: a node that has just begun may not be able to read the key.
    #[error("no TLS: {0}")]
    Tls(tls::Error),
    /// It took too long.
    #[error("it takes too long")]
    TimedOut,
    /// The connection ended.
    #[error("{0}")]
    Ended(End),
    /// The controller refused Connect.
    #[error("refused to connect: {0:?}")]
    Refused(Status),
    /// The controller refused Connect of an I/O queue. It may have lost the association meanwhile, whatever
    /// it says, so this is never final.
    #[error("refused to connect an I/O queue: {0:?}")]
    RefusedQueue(Status),
    /// A proof has failed.
    #[error("the proof of who is who has failed: {0:?}")]
    Proof(auth::End),
    /// The controller asks for a proof, and there is no secret.
    #[error("the controller asks for a secret, and there is none")]
    SecretMissing,
    /// There is a secret of the controller, and it does not offer to prove that it has it.
    #[error("the controller does not prove who it is")]
    ControllerUnproved,
    /// A command failed on the way.
    #[error("{0}")]
    Failed(Failed),
    /// It is no controller of this subsystem that can be used.
    #[error("not a controller that can be used: {0}")]
    Unusable(&'static str),
}

impl ConnectError {
    /// Whether trying again makes no sense before somebody has changed something.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Refused(status) => status.is_final(),
            Self::Proof(_) | Self::SecretMissing | Self::ControllerUnproved | Self::Unusable(_) => {
                true
            }
            Self::Dial(_)
            | Self::Tls(_)
            | Self::TimedOut
            | Self::Ended(_)
            | Self::RefusedQueue(_)
            | Self::Failed(_) => false,
        }
    }
}

impl From<tls::Fault> for ConnectError {
    fn from(fault: tls::Fault) -> Self {
        match fault {
            tls::Fault::Tls(why) => Self::Tls(why),
            tls::Fault::Stream(why) => Self::Ended(End::Broken(why.kind())),
        }
    }
}

impl From<Failed> for ConnectError {
    fn from(failed: Failed) -> Self {
        Self::Failed(failed)
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
    proof: Option<SharedConfig>,
    sequence: RefCell<Sequence>,
    /// Where ciphertext is read to, once there is any.
    ciphertext: OnceCell<Staging>,
}

/// A queue that is to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Queue identifier; 0 is the admin queue.
    pub(super) id: u16,
    /// Controller identifier; of the admin queue any.
    pub(super) controller: u16,
    /// Entries.
    pub(super) entries: u16,
    /// Most data in a capsule, in bytes.
    pub(super) in_capsule_bytes: u32,
}

impl Wanted {
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
        let sequence = RefCell::new(Sequence::new(u32::from_le_bytes([a, b, c, d])));
        let account = core.pool().account();
        let is_local = Cell::new(false);
        let ciphertext = OnceCell::new();
        Self {
            core: core.clone(),
            options,
            staging,
            account,
            is_local,
            proof,
            sequence,
            ciphertext,
        }
    }

    /// Opens a queue, and gives the identifier of its controller.
    pub(super) async fn open(&self, wanted: Wanted) -> Result<(Queue, u16), ConnectError> {
        let limit = self.options.connect_timeout;
        let connected = timeout(limit, self.connect(wanted)).await;
        connected.unwrap_or(Err(ConnectError::TimedOut))
    }

    async fn connect(&self, wanted: Wanted) -> Result<(Queue, u16), ConnectError> {
        let options = &self.options;
        let stream = self.core.dial(options.address).await;
        let stream = stream.map_err(|e| ConnectError::Dial(e.kind()))?;
        // Who dials an address of its own machine comes from the very same one, or both are loopback's.
        let (own, peer) = (stream.local_addr(), stream.peer_addr());
        let is_local = own.ok().zip(peer.ok()).is_some_and(|(own, peer)| own.ip() == peer.ip());
        self.is_local.set(is_local);
        let config = Config {
            in_flight: wanted.entries - 1,
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
        let result = self.say_who(&admin, wanted).await?;
        let [a, b, ..] = result.to_le_bytes();
        self.prove(&admin, wanted.id, result).await?;
        Ok((queue, u16::from_le_bytes([a, b])))
    }

    /// Protects a connection by the key that the specification derives first. Controllers that look for what older
    /// libraries derive from it (RFD 0022, 2) do not know it.
    async fn protect(&self, stream: Stream, key: &TlsKey) -> Result<Protected, ConnectError> {
        let Options { hostnqn, subnqn, .. } = &self.options;
        let psk = key.psks(hostnqn, subnqn).next();
        let psk = psk.ok_or(ConnectError::Unusable("names that are too long for a key"))?;
        let suite = match psk.suite() {
            Suite::Aes128Sha256 => tls::Suite::Aes128Sha256,
            Suite::Aes256Sha384 => tls::Suite::Aes256Sha384,
        };
        let psk = tls::Psk::new(psk.identity().as_bytes(), psk.key(), suite);
        let ciphertext = self.ciphertext.get_or_init(Staging::default).clone();
        Ok(Protected::new(stream, &psk, ciphertext).await?)
    }

    pub(super) fn admin(&self, queue: &Queue) -> Admin {
        let (queue, account) = (queue.clone(), self.account.clone());
        Admin { queue, account, timeout: self.options.command_timeout }
    }

    /// Connect (NVMe Base 2.0, 6.3); what it returns.
    async fn say_who(&self, admin: &Admin, wanted: Wanted) -> Result<u64, ConnectError> {
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
            Err(Failed::Refused(status)) if wanted.id == 0 => Err(ConnectError::Refused(status)),
            Err(Failed::Refused(status)) => Err(ConnectError::RefusedQueue(status)),
            Err(Failed::Lost(_)) => Err(ConnectError::Ended(admin.queue.ended().await)),
            Err(failed) => Err(failed.into()),
        }
    }

    /// Proves who this is, where `connected` asks for it.
    async fn prove(&self, admin: &Admin, qid: u16, connected: u64) -> Result<(), ConnectError> {
        if connected & CONNECT_SECURE_CHANNEL != 0 {
            return Err(ConnectError::Unusable("it asks for a secure channel"));
        }
        let asked = connected & CONNECT_AUTHENTICATE != 0;
        let config = match (&self.proof, asked) {
            (None, false) => return Ok(()),
            (None, true) => return Err(ConnectError::SecretMissing),
            (Some(c), false) if c.controller_secret.is_some() => {
                return Err(ConnectError::ControllerUnproved);
            }
            (Some(_), false) => return Ok(()),
            (Some(config), true) => config,
        };
        let (mut prover, message) = Prover::start(SharedConfig::clone(config), qid);
        let mut next = Next::Send(message);
        for _ in 0..MOST_MESSAGES {
            next = match next {
                Next::Send(message) => {
                    self.tell(admin, &message).await?;
                    let bytes = u32::try_from(ROOM).unwrap_or(u32::MAX);
                    let sqe = AuthCommand::Receive { bytes }.encode(0);
                    let answer = admin.fetch(sqe, ROOM).await?;
                    prover.receive(&answer, || self.fresh())
                }
                Next::Compute(work) => {
                    let done = self.core.offload(move || work.run()).await;
                    let next = done.and_then(|done| prover.done(done));
                    next.ok_or(ConnectError::Unusable("a proof that cannot be computed"))?
                }
                Next::Proved(None) => return Ok(()),
                Next::Proved(Some(message)) => return self.tell(admin, &message).await,
                Next::Failed(end, last) => {
                    if let Some(message) = last {
                        // It is over either way.
                        let _ = self.tell(admin, &message).await;
                    }
                    return Err(ConnectError::Proof(end));
                }
            };
        }
        Err(ConnectError::Unusable("an authentication without end"))
    }

    async fn tell(&self, admin: &Admin, message: &[u8]) -> Result<(), ConnectError> {
        let bytes = u32::try_from(message.len()).unwrap_or(u32::MAX);
        let told = admin.send(AuthCommand::Send { bytes }.encode(0), message).await;
        told.map(drop).map_err(ConnectError::from)
    }

    fn fresh(&self) -> Fresh {
        let mut random = [0; Fresh::BYTES];
        self.core.fill_random(&mut random);
        Fresh::new(self.sequence.borrow_mut().take(), &random)
    }
}

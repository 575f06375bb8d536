//! A node's life: start, serve, stop.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use ::cluster::identity::{Identity, IdentityError, Role};

use crate::access::{AccessError, Trusted};
use crate::anchor::{self, Anchor, AnchorError, Records as Kind};
use crate::config::{ApiTcp, Config};
use crate::control::{Control, Settings};
use crate::data_dir::{DataDir, DataDirError};
use crate::engine::{Engine, EngineError, Owner, Portals, Scope};
use crate::http::listen::{self, ListenError, UnixSocket};
use crate::http::{self, Capacity, Door, Server, TlsAcceptorDebug, TlsError, Token, TokenError};
use crate::meta::MetaError;
use crate::meta::embedded::Embedded;
use crate::part::{Part, PartError};

/// Why a node did not start. Says what is wrong with which setting, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data directory cannot be used.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// Others can change what the node trusts.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The data directory is not what it was.
    #[error(transparent)]
    Anchor(#[from] AnchorError),
    /// The store cannot be used.
    #[error("{0}{advice}", advice = advice(.0))]
    Store(#[from] MetaError),
    /// What the node is in a cluster cannot be read.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Its part in a cluster cannot be begun.
    #[error(transparent)]
    Part(#[from] PartError),
    /// The cores did not start, or an address of initiators cannot be listened at.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An address of the API cannot be listened at.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The API's certificate or key was refused.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The API's token was refused.
    #[error(transparent)]
    Token(#[from] TokenError),
}

/// What to do about a store that cannot be used.
fn advice(error: &MetaError) -> String {
    match error {
        MetaError::Damaged { path, .. } => format!(
            "\nRestore it from a backup: cp -p BACKUP/store.redb {path}; windrose node accept-data-dir; systemctl start \
             windrose (docs/guides/administration.md, section \"When the store is damaged\")"
        ),
        _ => String::new(),
    }
}

impl StartError {
    /// Whether trying again cannot help: what the node knows is missing or damaged, and somebody has to restore it.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        match self {
            Self::Anchor(e) => !matches!(e, AnchorError::Refused { .. }),
            Self::Store(e) => matches!(e, MetaError::Damaged { .. } | MetaError::Format { .. }),
            Self::Identity(e) => matches!(e, IdentityError::Bad { .. }),
            _ => false,
        }
    }
}

/// A running node.
pub struct Node {
    control: Control,
    http: Server,
    portals: Portals,
    shutdown_timeout: Duration,
    /// Held to the last.
    _data_dir: Arc<DataDir>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("portals", &self.portals).finish_non_exhaustive()
    }
}

/// Where a node's records are.
enum Records {
    /// In a store of its own.
    Alone(Embedded),
    /// In its cluster's.
    Cluster(Box<Identity>),
}

/// The API's listeners, before anything is served.
struct ApiSockets {
    unix: UnixSocket,
    tls: Option<(TcpListener, TlsAcceptor, Token)>,
    metrics: Option<TcpListener>,
}

/// What the API over TCP shows and wants to be shown, from their files.
fn credentials(tcp: &ApiTcp) -> Result<(TlsAcceptor, Token), StartError> {
    Ok((http::acceptor(&tcp.tls_cert, &tcp.tls_key)?, Token::read(&tcp.token_file)?))
}

impl ApiSockets {
    fn open(config: &Config) -> Result<Self, StartError> {
        let tls = match &config.api.tcp {
            None => None,
            Some(tcp) => {
                let (acceptor, token) = credentials(tcp)?;
                Some((listen::tcp("api.tcp", tcp.listen)?, acceptor, token))
            }
        };
        let metrics = config.metrics.map(|at| listen::tcp("metrics.listen", at)).transpose()?;
        Ok(Self { unix: listen::unix(&config.api.socket)?, tls, metrics })
    }

    fn serve(self, control: &Control, connections: usize) -> Server {
        let mut server = Server::default();
        let connections = Capacity::of(connections);
        let router: Router = http::router(control);
        server.open(Door::Unix(self.unix), router.clone(), connections);
        if let Some((listener, acceptor, token)) = self.tls {
            log_address("the API is served over TLS", &listener);
            let door = Door::Tls(listener, TlsAcceptorDebug(acceptor));
            server.open(door, token.guard(router, control.guesses()), connections);
        }
        if let Some(listener) = self.metrics {
            log_address("metrics are served", &listener);
            server.open(Door::Plain(listener), http::metrics_router(control), connections);
        }
        server
    }
}

fn log_address(what: &str, listener: &TcpListener) {
    if let Ok(at) = listener.local_addr() {
        tracing::info!(%at, "{what}");
    }
}

/// Whom the disks of this node know as their owner.
fn owner_of(data_dir: &DataDir, records: &Records) -> Owner {
    let cluster = match records {
        Records::Alone(_) => None,
        Records::Cluster(identity) => Some((identity.cluster, identity.node)),
    };
    let (device, inode) = data_dir.lock_id();
    let directory = u128::from(device) << 64 | u128::from(inode);
    Owner { node: data_dir.node(), directory, cluster }
}

/// Refuses files that others than root and the node's user can change.
fn check_access(config: &Config) -> Result<(), StartError> {
    if let Some(file) = &config.file {
        Trusted::Configuration(file.clone()).check()?;
    }
    DataDir::check_access(&config.data_dir)?;
    let anchor = anchor::path(&config.data_dir, config.anchor_dir.as_deref());
    if let Some(directory) = anchor.parent() {
        Trusted::AnchorDir(directory.to_owned()).check()?;
    }
    Ok(())
}

impl Node {
    /// Looks at the files that `config` names, as a start would, and changes nothing.
    ///
    /// # Errors
    /// [`StartError`]: what a start would stumble over.
    pub fn check(config: &Config) -> Result<(), StartError> {
        check_access(config)?;
        config.api.tcp.as_ref().map_or(Ok(()), |tcp| credentials(tcp).map(drop))
    }

    /// Starts a node. When this returns and it is alone, its volumes are open (those that can be)
    /// and initiators are accepted; in a cluster that comes when the store answers.
    ///
    /// # Errors
    /// [`StartError`]; nothing runs then.
    pub async fn start(config: &Config) -> Result<Self, StartError> {
        let (data_dir, records, unanchored) = Self::own(config)?;
        let sockets = ApiSockets::open(config)?;
        let owner = owner_of(&data_dir, &records);
        let engine = Engine::start(config, owner).await?;
        let portals = match &records {
            // A witness serves nobody.
            Records::Cluster(identity) if identity.role == Role::Witness => Portals::default(),
            Records::Cluster(_) | Records::Alone(_) => engine.listen(config).await?,
        };
        let mut settings = Settings::new(config, portals.clone());
        settings.data_dir = data_dir.path().to_owned();
        settings.directory = data_dir.node();
        settings.unanchored = unanchored;
        let control = match records {
            Records::Cluster(identity) => {
                let part = Part::new(config, Arc::clone(&data_dir), *identity, portals.clone())?;
                Control::of_cluster(settings, engine, part)
            }
            Records::Alone(store) => Control::new(settings, Arc::new(store), engine),
        };
        let http = sockets.serve(&control, config.limits.api_connections);
        tracing::info!(api = %config.api.socket.display(), "the API is served");
        control.start().await?;
        let shutdown_timeout = config.shutdown_timeout;
        Ok(Self { control, http, portals, shutdown_timeout, _data_dir: data_dir })
    }

    /// What the node has of its own: its directory, where its records are, and why that is not anchored, if it is not.
    fn own(config: &Config) -> Result<(Arc<DataDir>, Records, Option<String>), StartError> {
        let anchored = || Anchor::check(&config.data_dir, config.anchor_dir.as_deref());
        check_access(config)?;
        // Before anything is made in it, and again once nobody else can.
        anchored()?;
        let data_dir = Arc::new(DataDir::hold(&config.data_dir)?);
        let anchor = anchored()?;
        let (records, kind, revision) = match Identity::read(&data_dir.identity())? {
            None => {
                data_dir.clear_member()?;
                let path = data_dir.store();
                let open =
                    if anchor.has_store() { Embedded::open_existing } else { Embedded::open };
                let store = open(&path)?;
                let revision = store.revision().0;
                anchor.check_revision(revision)?;
                (Records::Alone(store), Kind::Store, revision)
            }
            Some(identity) => (Records::Cluster(Box::new(identity)), Kind::Cluster, 0),
        };
        let unanchored = anchor.begin(kind, revision)?;
        if let Some(why) = &unanchored {
            tracing::warn!(
                why,
                "the data directory has no anchor: if it is not mounted one day, nobody will know"
            );
        }
        Ok((data_dir, records, unanchored))
    }

    /// The control plane.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Where initiators are served.
    #[must_use]
    pub fn portals(&self) -> &Portals {
        &self.portals
    }

    /// Waits until the node is to be stopped and started again, because it is to be something else
    /// in a cluster.
    pub async fn wants_restart(&self) {
        self.control.wants_restart().await;
    }

    /// Waits until another process is this node in the cluster: this one has to end at once, and leaves nothing. Gives
    /// the other one and this, for people.
    pub async fn replaced(&self) -> (String, String) {
        self.control.replaced().await
    }

    /// Whether every core still answers.
    pub async fn is_alive(&self) -> bool {
        self.control.engine().report(Scope::None).await.len() == self.control.engine().cores()
    }

    /// Takes leave of initiators, finishes what is in flight, makes every volume durable and
    /// closes it, in at most the configured time. Says whether all of that was done.
    pub async fn stop(self) -> Stopped {
        let deadline = Instant::now() + self.shutdown_timeout;
        let quiet = async {
            self.control.stop().await;
            self.http.close().await;
        };
        // Changes that wait for something do not take the time that volumes need to be left and closed.
        let quiet = tokio::time::timeout(self.shutdown_timeout / 3, quiet).await.is_ok();
        let stopped = self.control.engine().stop(deadline).await;
        let ended = tokio::time::timeout_at(deadline, self.control.end()).await.is_ok();
        Stopped {
            clean: quiet && stopped && ended,
            _control: self.control,
            _data_dir: self._data_dir,
        }
    }
}

/// A node that has stopped, or has run out of time. Then its cores may still run: end the process
/// while this is alive.
#[derive(Debug)]
pub struct Stopped {
    /// Whether everything was done that a shutdown does.
    pub clean: bool,
    _control: Control,
    _data_dir: Arc<DataDir>,
}

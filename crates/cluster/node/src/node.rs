//! Starting, running and stopping a node.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use ::cluster::identity::{ClusterIdentity, IdentityError, Role};

use crate::rest;
use ::cluster::store::StoreError;
use ::cluster::store::embedded::EmbeddedStore;
use config::data_dir::{DataDir, DataDirError};
use config::file_permissions::{PermissionError, TrustedPath};
use config::{ApiTcp, Config};
use control::{Control, ControlSettings};
use engine::{Engine, EngineError, NodeDiskOwner, Portals, ReportScope};
use http_server::listen::{self, ListenError, UnixSocket};
use http_server::{
    ApiListener, ConnectionLimits, Server, TlsAcceptorDebug, TlsError, Token, TokenError,
};
use membership::anchor::{self, Anchor, AnchorError, RecordsLocation as Kind};
use membership::{ClusterMembership, MembershipError};

/// Why a node did not start; names the setting and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data directory cannot be used.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// Other users can change files that the node trusts.
    #[error(transparent)]
    Permissions(#[from] PermissionError),
    /// The data directory is not the one used before.
    #[error(transparent)]
    Anchor(#[from] AnchorError),
    /// The store cannot be used.
    #[error("{0}{advice}", advice = store_advice(.0))]
    Store(#[from] StoreError),
    /// The node's identity in a cluster cannot be read.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The node cannot take part in its cluster.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The cores did not start, or listening for initiators failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Listening for the API failed.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The API's certificate or key was refused.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The API's token was refused.
    #[error(transparent)]
    Token(#[from] TokenError),
}

/// The remedy for a store that cannot be used.
fn store_advice(error: &StoreError) -> String {
    match error {
        StoreError::Damaged { path, .. } => format!(
            "\nRestore it from a backup: cp -p BACKUP/store.redb {path}; windrose node accept-data-dir; systemctl start \
             windrose (docs/guides/administration.md, section \"When the store is damaged\")"
        ),
        _ => String::new(),
    }
}

impl StartError {
    /// Whether retrying cannot help, because data of the node is missing or damaged and must be
    /// restored.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Anchor(e) => !matches!(e, AnchorError::Io { .. }),
            Self::Store(e) => {
                matches!(e, StoreError::Damaged { .. } | StoreError::UnsupportedFormat { .. })
            }
            Self::Identity(e) => matches!(e, IdentityError::Invalid { .. }),
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
    /// Released last.
    _data_dir: Arc<DataDir>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("portals", &self.portals).finish_non_exhaustive()
    }
}

/// The store of a node's records.
enum RecordStore {
    /// Its own.
    Standalone(EmbeddedStore),
    /// Its cluster's.
    Cluster(Box<ClusterIdentity>),
}

/// The API's sockets, before they serve.
struct ApiListeners {
    unix: UnixSocket,
    tls: Option<(TcpListener, TlsAcceptor, Token)>,
    metrics: Option<TcpListener>,
}

/// Reads the certificate and the token of the API over TCP.
fn load_api_credentials(tcp: &ApiTcp) -> Result<(TlsAcceptor, Token), StartError> {
    Ok((http_server::acceptor(&tcp.tls_cert, &tcp.tls_key)?, Token::read(&tcp.token_file)?))
}

impl ApiListeners {
    fn open(config: &Config) -> Result<Self, StartError> {
        let tls = match &config.api.tcp {
            None => None,
            Some(tcp) => {
                let (acceptor, token) = load_api_credentials(tcp)?;
                Some((listen::tcp("api.tcp", tcp.listen)?, acceptor, token))
            }
        };
        let metrics = config.metrics.map(|at| listen::tcp("metrics.listen", at)).transpose()?;
        Ok(Self { unix: listen::unix(&config.api.socket)?, tls, metrics })
    }

    fn serve(self, control: &Control, connections: usize) -> Server {
        let mut server = Server::default();
        let connections = ConnectionLimits::total(connections);
        let router: Router = rest::router(control);
        server.serve_on(ApiListener::Unix(self.unix), router.clone(), connections);
        if let Some((listener, acceptor, token)) = self.tls {
            log_address("listening for API requests over TLS", &listener);
            let listener = ApiListener::Tls(listener, TlsAcceptorDebug(acceptor));
            server.serve_on(
                listener,
                token.require_token(router, control.cluster().api_auth_failures()),
                connections,
            );
        }
        if let Some(listener) = self.metrics {
            log_address("listening for requests of metrics", &listener);
            server.serve_on(
                ApiListener::Plain(listener),
                rest::metrics_router(control),
                connections,
            );
        }
        server
    }
}

fn log_address(what: &str, listener: &TcpListener) {
    if let Ok(at) = listener.local_addr() {
        tracing::info!(%at, "{what}");
    }
}

/// The owner that the node writes on disks that it claims.
fn disk_owner(data_dir: &DataDir, records: &RecordStore) -> NodeDiskOwner {
    let cluster = match records {
        RecordStore::Standalone(_) => None,
        RecordStore::Cluster(identity) => Some((identity.cluster, identity.node)),
    };
    let (device, inode) = data_dir.lock_id();
    let directory = u128::from(device) << 64 | u128::from(inode);
    NodeDiskOwner { node: data_dir.node_id(), directory, cluster }
}

/// Refuses files that users other than root and the node's user can change.
fn check_permissions(config: &Config) -> Result<(), StartError> {
    if let Some(file) = &config.file {
        TrustedPath::Configuration(file.clone()).check()?;
    }
    DataDir::check_access(&config.data_dir)?;
    let anchor = anchor::anchor_path(&config.data_dir, config.anchor_dir.as_deref());
    if let Some(directory) = anchor.parent() {
        TrustedPath::AnchorDir(directory.to_owned()).check()?;
    }
    Ok(())
}

impl Node {
    /// Checks the files that `config` names as a start would, and changes nothing.
    ///
    /// # Errors
    /// [`StartError`]: why a start would fail.
    pub fn check(config: &Config) -> Result<(), StartError> {
        check_permissions(config)?;
        config.api.tcp.as_ref().map_or(Ok(()), |tcp| load_api_credentials(tcp).map(drop))
    }

    /// Starts a node. On return, the volumes of a standalone node are open (those that can be) and
    /// initiators can connect; in a cluster, once the store answers.
    ///
    /// # Errors
    /// [`StartError`]; nothing keeps running.
    pub async fn start(config: &Config) -> Result<Self, StartError> {
        let (data_dir, records, anchor_error) = Self::open_data_dir(config)?;
        let sockets = ApiListeners::open(config)?;
        let owner = disk_owner(&data_dir, &records);
        let engine = Engine::start(config, owner).await?;
        let portals = match &records {
            // A witness serves no initiators.
            RecordStore::Cluster(identity) if identity.role == Role::Witness => Portals::default(),
            RecordStore::Cluster(_) | RecordStore::Standalone(_) => engine.listen(config).await?,
        };
        let mut settings = ControlSettings::new(config, portals.clone());
        settings.data_dir = data_dir.path().to_owned();
        settings.data_dir_id = data_dir.node_id();
        settings.anchor_error = anchor_error;
        let control = match records {
            RecordStore::Cluster(identity) => {
                let membership = ClusterMembership::new(
                    config,
                    Arc::clone(&data_dir),
                    *identity,
                    portals.clone(),
                )?;
                Control::in_cluster(settings, engine, membership)
            }
            RecordStore::Standalone(store) => Control::new(settings, Arc::new(store), engine),
        };
        let http = sockets.serve(&control, config.limits.api_connections);
        tracing::info!(api = %config.api.socket.display(), "listening for API requests");
        control.start().await?;
        let shutdown_timeout = config.shutdown_timeout;
        Ok(Self { control, http, portals, shutdown_timeout, _data_dir: data_dir })
    }

    /// Opens the data directory and its store; also returns why the directory has no anchor, if so.
    fn open_data_dir(
        config: &Config,
    ) -> Result<(Arc<DataDir>, RecordStore, Option<String>), StartError> {
        let anchored = || Anchor::check(&config.data_dir, config.anchor_dir.as_deref());
        check_permissions(config)?;
        // Before anything is created in it, and again once this process has locked it.
        anchored()?;
        let data_dir = Arc::new(DataDir::acquire(&config.data_dir)?);
        let anchor = anchored()?;
        let (records, kind, revision) = match ClusterIdentity::read(&data_dir.identity_path())? {
            None => {
                data_dir.remove_store_member()?;
                let path = data_dir.store_path();
                let open = if anchor.requires_own_store() {
                    EmbeddedStore::open_existing
                } else {
                    EmbeddedStore::open
                };
                let store = open(&path)?;
                let revision = store.revision().0;
                anchor.check_revision(revision)?;
                (RecordStore::Standalone(store), Kind::OwnStore, revision)
            }
            Some(identity) => (RecordStore::Cluster(Box::new(identity)), Kind::ClusterStore, 0),
        };
        let anchor_error = anchor.record_start(kind, revision)?;
        if let Some(why) = &anchor_error {
            tracing::warn!(
                why,
                "data directory has no anchor: if it is ever not mounted, this will not be \
                 detected"
            );
        }
        Ok((data_dir, records, anchor_error))
    }

    /// The control plane.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// The addresses where initiators are served.
    #[must_use]
    pub fn portals(&self) -> &Portals {
        &self.portals
    }

    /// Waits for a request to restart the node, because its membership in a cluster changes.
    pub async fn wait_restart_request(&self) {
        self.control.wait_restart_request().await;
    }

    /// Waits until another process holds this node in the cluster; this one must then exit at once,
    /// without leaving any mirror. Returns descriptions of the other process and this one.
    pub async fn wait_replaced(&self) -> (String, String) {
        self.control.wait_replaced().await
    }

    /// Whether all cores answer.
    pub async fn is_alive(&self) -> bool {
        self.control.engine().report(ReportScope::None).await.len() == self.control.engine().cores()
    }

    /// Logs initiators out, finishes I/O in flight, makes all volumes durable and closes them,
    /// within the configured time. The result says whether all of that succeeded.
    pub async fn stop(self) -> StoppedNode {
        let deadline = Instant::now() + self.shutdown_timeout;
        let control_stopped = async {
            self.control.stop().await;
            self.http.close().await;
        };
        // API requests in progress must not use up the time for leaving and closing volumes.
        let control_stopped =
            tokio::time::timeout(self.shutdown_timeout / 3, control_stopped).await.is_ok();
        let stopped = self.control.engine().stop(deadline).await;
        let ended =
            tokio::time::timeout_at(deadline, self.control.stop_store_member()).await.is_ok();
        StoppedNode {
            clean: control_stopped && stopped && ended,
            _control: self.control,
            _data_dir: self._data_dir,
        }
    }
}

/// A node that stopped, or ran out of time. In the latter case its cores may still run: exit the
/// process while this value exists.
#[derive(Debug)]
pub struct StoppedNode {
    /// Whether all steps of the shutdown succeeded.
    pub clean: bool,
    _control: Control,
    _data_dir: Arc<DataDir>,
}

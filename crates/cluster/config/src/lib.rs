//! The configuration of a node: one TOML file, every setting optional.
//!
//! The module `settings` defines each setting once: its default, its allowed values, how it is
//! read, and its documentation. The defaults below are the texts in that table, parsed.

pub mod data_dir;
mod error;
pub mod file_permissions;
mod render;
mod settings;
mod value;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use error::ConfigError;
pub use render::{example, guide, manual};

/// The path of the configuration file, unless another one is given.
pub const DEFAULT_PATH: &str = "/etc/windrose/windrose.toml";

/// Largest configuration file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The configuration of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file that it was read from; `None` without a file.
    pub file: Option<PathBuf>,
    /// Name of the node.
    pub name: String,
    /// Directory of the store and of volumes without a path of their own.
    pub data_dir: PathBuf,
    /// Directory of the anchor file, which names the node that `data_dir` belongs to; `None` for
    /// the one beside it.
    pub anchor_dir: Option<PathBuf>,
    /// Longest time a shutdown may take.
    pub shutdown_timeout: Duration,
    /// The threads that serve volumes.
    pub cores: Cores,
    /// Disk I/O.
    pub disks: Disks,
    /// Volumes over iSCSI.
    pub iscsi: Iscsi,
    /// Volumes over NVMe/TCP.
    pub nvme: Nvme,
    /// Volumes for virtual machines on this machine.
    pub vhost_user: VhostUser,
    /// The REST API.
    pub api: Api,
    /// Address of a listener for metrics, besides the API's.
    pub metrics: Option<SocketAddr>,
    /// The node's part in a cluster.
    pub cluster: Cluster,
    /// Logging.
    pub log: Log,
    /// Bounds on what clients may do.
    pub limits: Limits,
}

/// The threads that serve volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores {
    /// How many; `None` to choose by the machine.
    pub count: Option<usize>,
    /// Processors that they are pinned to, one each; empty for the first ones.
    pub cpus: Vec<usize>,
    /// Buffer memory of each, in bytes.
    pub memory_bytes: u64,
    /// How long a core that has been active looks for more work before it sleeps.
    pub poll_window: Duration,
}

/// Disk I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disks {
    /// The interface to the kernel.
    pub engine: DiskEngine,
    /// Whether file systems without direct I/O may be used, through the page cache.
    pub buffered: bool,
    /// Free space of a file system below which the status warns of thin volumes in it, in percent
    /// of its size; 0 for never.
    pub low_space_percent: u64,
}

/// The interface for disk I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskEngine {
    /// io_uring if the system allows it, else threads.
    Auto,
    /// io_uring only.
    IoUring,
    /// Threads only.
    Threads,
}

/// iSCSI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Iscsi {
    /// Addresses to listen at; empty for none.
    pub portals: Vec<SocketAddr>,
    /// Prefix of target names (RFC 7143 4.2.7.4).
    pub authority: String,
    /// Whether logins to a volume that is not served here are redirected to a node that serves it
    /// (RFC 7143 11.13.5).
    pub redirect: bool,
    /// The iSNS server to register with, as `host:port`; `None` for none.
    pub isns: Option<String>,
}

/// NVMe/TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvme {
    /// Addresses to listen at for I/O controllers; empty for none.
    pub portals: Vec<SocketAddr>,
    /// Addresses to listen at for discovery; empty for none.
    pub discovery: Vec<SocketAddr>,
    /// Prefix of subsystem names (NVMe Base 2.0 4.5).
    pub authority: String,
}

/// Virtual machines on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUser {
    /// Directory of their sockets; `None` to serve none.
    pub directory: Option<PathBuf>,
}

/// The REST API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Api {
    /// Path of its Unix socket.
    pub socket: PathBuf,
    /// The API over TCP; only ever with TLS and a token.
    pub tcp: Option<ApiTcp>,
}

/// The API over TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiTcp {
    /// Address to listen at.
    pub listen: SocketAddr,
    /// PEM file of the certificate chain.
    pub tls_cert: PathBuf,
    /// PEM file of the private key.
    pub tls_key: PathBuf,
    /// File that holds the token.
    pub token_file: PathBuf,
}

/// The node's part in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Addresses where other nodes reach this one, one for each network; without any, the node
    /// cannot be in a cluster.
    pub listen: Vec<SocketAddr>,
    /// Additional addresses for leases, never for data.
    pub heartbeat: Vec<SocketAddr>,
    /// Address where joining nodes are admitted; `None` only without [`Self::listen`].
    pub join: Option<SocketAddr>,
    /// Duration of a lease; the same on all nodes.
    pub lease: Duration,
    /// Grace time after which a lease has certainly expired; the same on all nodes.
    pub grace: Duration,
    /// The group of nodes that fail together with this one; `None` for none.
    pub failure_domain: Option<String>,
    /// Volumes that are resynced at once from this node.
    pub resyncs: usize,
    /// How long a node must be down before its replicas are recreated on other nodes; `None` for
    /// never.
    pub repair_after: Option<Duration>,
    /// The cluster's store.
    pub store: ClusterStore,
    /// TLS between nodes and to the store.
    pub tls: Option<ClusterTls>,
}

/// The store of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterStore {
    /// Address where the node's own store member listens to clients; `None` for the first of
    /// [`Cluster::listen`], port 2379.
    pub client: Option<SocketAddr>,
    /// The same for other members, port 2380.
    pub peer: Option<SocketAddr>,
    /// The program of a store member.
    pub program: PathBuf,
    /// URLs of an existing etcd, instead of store members on the nodes; empty for none.
    pub endpoints: Vec<String>,
}

/// TLS between the nodes of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterTls {
    /// PEM file of the cluster's authority.
    pub ca: PathBuf,
    /// PEM file of the certificate chain.
    pub cert: PathBuf,
    /// PEM file of the private key.
    pub key: PathBuf,
}

/// Logging, to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
    /// The format.
    pub format: LogFormat,
    /// The least severe level.
    pub level: LogLevel,
}

/// The form of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Readable text.
    Human,
    /// One JSON object a line.
    Json,
}

/// The least severe level that is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// A human must act.
    Error,
    /// A human should look.
    Warn,
    /// What the node does.
    Info,
    /// Why it does it.
    Debug,
    /// Everything.
    Trace,
}

/// Bounds on what clients may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections of initiators per core.
    pub connections: usize,
    /// Connections per core that have not logged in yet.
    pub logins: usize,
    /// Discovery sessions and controllers per core.
    pub discoveries: usize,
    /// Time limit for a login.
    pub login_timeout: Duration,
    /// Time limit for a client to receive part of what is sent to it.
    pub send_timeout: Duration,
    /// Time limit for a client to send the rest of a message.
    pub receive_timeout: Duration,
    /// How long a half-received command may wait for buffer memory.
    pub admission_timeout: Duration,
    /// How long any other command may wait for buffer memory.
    pub memory_timeout: Duration,
    /// Idle time after which a client is pinged.
    pub keep_alive: Duration,
    /// Commands in flight per iSCSI session.
    pub commands: u32,
    /// Volumes of the node.
    pub volumes: usize,
    /// Connections to each listener of the API.
    pub api_connections: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self::parse(Path::new("defaults"), "").expect("a test parses every default")
    }
}

impl Config {
    /// Reads the configuration at `path`.
    ///
    /// # Errors
    /// [`ConfigError`] names the file, the line, the setting and what is allowed.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        use std::io::Read;
        let unread = |e: std::io::Error| ConfigError::file(path, format!("cannot be read: {e}"));
        let file = std::fs::File::open(path).map_err(unread)?;
        let mut bytes = Vec::new();
        file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(unread)?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(ConfigError::file(path, format!("is longer than {MAX_FILE_BYTES} bytes")));
        }
        let text = String::from_utf8(bytes)
            .map_err(|e| ConfigError::file(path, format!("is not UTF-8: {e}")))?;
        // The node's working directory may differ from that of the command that starts it.
        let file = std::path::absolute(path).map_err(unread)?;
        Ok(Self { file: Some(file), ..Self::parse(path, &text)? })
    }

    /// Reads the configuration at [`DEFAULT_PATH`], or uses the defaults if there is none.
    ///
    /// # Errors
    /// [`ConfigError`], as [`Self::load`].
    pub fn load_default() -> Result<Self, ConfigError> {
        let path = Path::new(DEFAULT_PATH);
        match path.try_exists() {
            Ok(false) => Ok(Self::default()),
            // A path that cannot be checked may exist; `load` then reports why it cannot be read.
            Ok(true) | Err(_) => Self::load(path),
        }
    }

    /// Parses `text`; errors name the file `path`.
    ///
    /// # Errors
    /// [`ConfigError`], as [`Self::load`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        settings::parse(text).map_err(|flaw| flaw.with_location(path, text))
    }
}

#[cfg(test)]
mod tests;

//! The configuration of a node: one TOML file, every setting optional.
//!
//! [`settings`] is the one definition of each setting: its default, what is allowed, how it is
//! taken over, what the documentation says. The defaults below are that table's texts, parsed.

mod error;
mod render;
mod settings;
mod value;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use error::ConfigError;
pub use render::{example, guide, manual};

/// Where the configuration is looked for when nobody says otherwise.
pub const DEFAULT_PATH: &str = "/etc/windrose/windrose.toml";

/// Largest configuration file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// How a node is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file that it was read from, if it was.
    pub file: Option<PathBuf>,
    /// Name of the node.
    pub name: String,
    /// Directory of the store and of volumes without a path of their own.
    pub data_dir: PathBuf,
    /// Directory of the file that says which node that one belongs to; `None` for the one beside it.
    pub anchor_dir: Option<PathBuf>,
    /// Longest time a shutdown may take.
    pub shutdown_timeout: Duration,
    /// Threads that serve.
    pub cores: Cores,
    /// How disks are reached.
    pub disks: Disks,
    /// Where and as what volumes are served over iSCSI.
    pub iscsi: Iscsi,
    /// Where and as what volumes are served over NVMe/TCP.
    pub nvme: Nvme,
    /// Where volumes are served to virtual machines beside the node.
    pub vhost_user: VhostUser,
    /// Where the API is served.
    pub api: Api,
    /// Where metrics are served beside the API.
    pub metrics: Option<SocketAddr>,
    /// How it takes part in a cluster.
    pub cluster: Cluster,
    /// What is logged.
    pub log: Log,
    /// Bounds on what clients may do.
    pub limits: Limits,
}

/// The threads that serve volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores {
    /// How many; `None` for a number that suits the machine.
    pub count: Option<usize>,
    /// Processors they are bound to, one core each; empty for the first ones there are.
    pub cpus: Vec<usize>,
    /// Buffer memory of each, in bytes.
    pub pool_bytes: u64,
    /// How long a core that has been active looks for more work before it sleeps.
    pub poll_window: Duration,
}

/// How disks are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disks {
    /// By which means.
    pub engine: DiskEngine,
    /// Whether file systems without direct I/O may be used, through the page cache.
    pub buffered: bool,
    /// Free space of a file system below which the status warns of thin volumes in it, in percent of its
    /// size; 0 for never.
    pub low_space_percent: u64,
}

/// By which means disks are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskEngine {
    /// io_uring where the system allows it, else threads.
    Auto,
    /// io_uring or nothing.
    IoUring,
    /// Threads.
    Threads,
}

/// iSCSI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Iscsi {
    /// Where to listen; nowhere if empty.
    pub portals: Vec<SocketAddr>,
    /// What target names begin with (RFC 7143 4.2.7.4).
    pub authority: String,
    /// Whether logins at a node that is out of a volume are sent to one that serves it (RFC 7143 11.13.5).
    pub redirect: bool,
    /// The iSNS server to register with, as `host:port`; `None` for none.
    pub isns: Option<String>,
}

/// NVMe/TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvme {
    /// Where to listen for I/O controllers; nowhere if empty.
    pub portals: Vec<SocketAddr>,
    /// Where to listen for discovery; nowhere if empty.
    pub discovery: Vec<SocketAddr>,
    /// What subsystem names begin with (NVMe Base 2.0 4.5).
    pub authority: String,
}

/// Virtual machines beside the node.
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
    /// Where to listen.
    pub listen: SocketAddr,
    /// PEM file of the certificate chain.
    pub tls_cert: PathBuf,
    /// PEM file of the private key.
    pub tls_key: PathBuf,
    /// File that holds the token.
    pub token_file: PathBuf,
}

/// Taking part in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Where other nodes reach this one, one address for each network; it can be in no cluster if
    /// empty.
    pub listen: Vec<SocketAddr>,
    /// Addresses that carry leases and never data.
    pub heartbeat: Vec<SocketAddr>,
    /// Where nodes that join are let in; `None` only without [`Self::listen`].
    pub join: Option<SocketAddr>,
    /// How long a lease runs; the same at all nodes.
    pub lease: Duration,
    /// How long a lease is waited out; the same at all nodes.
    pub grace: Duration,
    /// What the node fails together with; `None` for nothing but itself.
    pub failure_domain: Option<String>,
    /// Replicas that are brought up to date at once from one source.
    pub resyncs: usize,
    /// How long a node has to be gone until its copies are made on others; `None` for never.
    pub repair_after: Option<Duration>,
    /// The cluster's store.
    pub store: ClusterStore,
    /// TLS between nodes and to the store.
    pub tls: Option<ClusterTls>,
}

/// The store of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterStore {
    /// Where the node's own member listens to clients; `None` for the first of
    /// [`Cluster::listen`], port 2379.
    pub client: Option<SocketAddr>,
    /// The same to other members, port 2380.
    pub peer: Option<SocketAddr>,
    /// The program of a member.
    pub program: PathBuf,
    /// An etcd that is there already, instead of members of the nodes' own; empty for none.
    pub endpoints: Vec<String>,
}

/// Whom the nodes of a cluster believe, and what this one shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterTls {
    /// PEM file of the cluster's authority.
    pub ca: PathBuf,
    /// PEM file of the certificate chain.
    pub cert: PathBuf,
    /// PEM file of the private key.
    pub key: PathBuf,
}

/// What is logged, to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
    /// In which form.
    pub format: LogFormat,
    /// From which level on.
    pub level: LogLevel,
}

/// The form of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
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
    /// Connections per core that only discover.
    pub discoveries: usize,
    /// Time for a login.
    pub login_timeout: Duration,
    /// Time in which a client must take something of what is sent to it.
    pub send_timeout: Duration,
    /// Time in which a client must send the rest of what it has begun.
    pub receive_timeout: Duration,
    /// Time that a half-received command may wait for buffer memory.
    pub admission_timeout: Duration,
    /// Time that any other command may wait for memory.
    pub memory_timeout: Duration,
    /// Silence after which a client is asked whether it lives.
    pub keep_alive: Duration,
    /// Commands in flight per iSCSI session.
    pub commands: u32,
    /// Volumes of the node.
    pub volumes: usize,
    /// Connections to the API, of each listener.
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
        file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(unread)?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(ConfigError::file(path, format!("is longer than {MAX_FILE} bytes")));
        }
        let text = String::from_utf8(bytes)
            .map_err(|e| ConfigError::file(path, format!("is not UTF-8: {e}")))?;
        // The node may work in another directory than the one who starts it.
        let file = std::path::absolute(path).map_err(unread)?;
        Ok(Self { file: Some(file), ..Self::parse(path, &text)? })
    }

    /// Reads the configuration at [`DEFAULT_PATH`], or takes the defaults where there is none.
    ///
    /// # Errors
    /// [`ConfigError`], as [`Self::load`].
    pub fn load_default() -> Result<Self, ConfigError> {
        let path = Path::new(DEFAULT_PATH);
        match path.try_exists() {
            Ok(false) => Ok(Self::default()),
            // What cannot be looked at may be there, and `load` says why it cannot be read.
            Ok(true) | Err(_) => Self::load(path),
        }
    }

    /// The configuration that `text` is; `path` is what errors call it.
    ///
    /// # Errors
    /// [`ConfigError`], as [`Self::load`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        settings::parse(text).map_err(|flaw| flaw.locate(path, text))
    }
}

#[cfg(test)]
mod tests;

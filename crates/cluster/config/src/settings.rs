//! The table of settings.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use toml::de::{DeTable, DeValue};

use super::error::SettingError;
use super::value::{
    address, addresses, authority, boolean, choice, core_memory, count, cpus, domain, endpoints,
    host_and_port, integer, is_host_name, millis, node_name, own_address, own_addresses, path,
    program, seconds, seconds_or_off, socket_directory,
};
use super::{
    Api, ApiTcp, Cluster, ClusterStore, ClusterTls, Config, Cores, DiskEngine, Disks, Iscsi,
    Limits, Log, LogFormat, LogLevel, Nvme, VhostUser,
};

/// One setting.
pub(super) struct Setting {
    /// Its name: section and key.
    pub(super) key: &'static str,
    /// Its default.
    pub(super) default: DefaultValue,
    /// The allowed values, for messages and documentation.
    pub(super) allowed: &'static str,
    /// Its effect, for documentation.
    pub(super) about: &'static str,
    /// Checks a value and stores it in the draft.
    set: fn(&mut ConfigDraft, &DeValue<'_>) -> Result<(), String>,
}

/// The default of a setting.
pub(super) enum DefaultValue {
    /// A value, as TOML.
    Value(&'static str),
    /// No value; the text describes what applies.
    Unset(&'static str),
}

/// A configuration being read. It contains the defaults before anything is read.
#[derive(Default)]
pub(super) struct ConfigDraft {
    name: Option<String>,
    data_dir: PathBuf,
    anchor_dir: Option<PathBuf>,
    shutdown_timeout: Duration,
    count: Option<usize>,
    cpus: Vec<usize>,
    memory_bytes: u64,
    poll_window: Duration,
    engine: Option<DiskEngine>,
    buffered: bool,
    low_space_percent: u64,
    iscsi_portals: Vec<SocketAddr>,
    iscsi_authority: String,
    redirect: bool,
    isns: Option<String>,
    nvme_portals: Vec<SocketAddr>,
    nvme_discovery: Vec<SocketAddr>,
    nvme_authority: String,
    vhost_user: Option<PathBuf>,
    socket: PathBuf,
    tcp: Option<SocketAddr>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    token_file: Option<PathBuf>,
    metrics: Option<SocketAddr>,
    cluster_listen: Vec<SocketAddr>,
    cluster_heartbeat: Vec<SocketAddr>,
    cluster_join: Option<SocketAddr>,
    lease: Duration,
    grace: Duration,
    failure_domain: Option<String>,
    resyncs: usize,
    repair_after: Option<Duration>,
    store_client: Option<SocketAddr>,
    store_peer: Option<SocketAddr>,
    store_program: PathBuf,
    store_endpoints: Vec<String>,
    cluster_ca: Option<PathBuf>,
    cluster_cert: Option<PathBuf>,
    cluster_key: Option<PathBuf>,
    format: Option<LogFormat>,
    level: Option<LogLevel>,
    connections: usize,
    logins: usize,
    discoveries: usize,
    login_timeout: Duration,
    send_timeout: Duration,
    receive_timeout: Duration,
    admission_timeout: Duration,
    memory_timeout: Duration,
    keep_alive: Duration,
    commands: u32,
    volumes: usize,
    api_connections: usize,
}

const MIB: u64 = 1 << 20;

/// Default port where joining nodes are admitted.
const JOIN_PORT: u16 = 7481;

const ADDRESS: &str = "an IP address and a port, such as \"192.0.2.1:3260\" or \"[::]:3260\"";
const ADDRESSES: &str =
    "a list of IP addresses and ports, such as [\"192.0.2.1:3260\"]; [] to listen nowhere";
const OWN_ADDRESSES: &str = "a list of IP addresses of this machine and ports, such as \
    [\"192.0.2.1:7480\"]; no wildcards";
const OWN_ADDRESS: &str = "an IP address of this machine and a port, such as \"192.0.2.1:2379\"";
const FILE: &str = "an absolute path";
const TIMEOUT: &str = "whole seconds, 1 to 3600";

/// Declares the table: key, default, allowed values, setter, documentation.
macro_rules! settings {
    ($($key:literal = $default:expr, $allowed:expr, |$draft:ident, $value:ident| $set:expr, $about:literal;)*) => {
        pub(super) const SETTINGS: &[Setting] = &[$(Setting {
            key: $key,
            default: $default,
            allowed: $allowed,
            about: $about,
            set: |$draft, $value| { $set; Ok(()) },
        }),*];
    };
}

use DefaultValue::{Unset, Value};

settings! {
    "name" = Unset("the machine's host name"), "a host name",
        |d, v| d.name = Some(node_name(v)?),
        "Name of the node.";
    "data_dir" = Value("\"/var/lib/windrose\""), FILE,
        |d, v| d.data_dir = path(v)?,
        "Directory of the node's store, and of volumes that are created without a path. Only one \
         node can use it at a time.";
    "anchor_dir" = Unset("the directory beside data_dir whose name ends with .anchor"), FILE,
        |d, v| d.anchor_dir = Some(path(v)?),
        "Directory of a small file that records which node `data_dir` belongs to, so that an \
         unmounted `data_dir` is not mistaken for an empty node. It should be on another file \
         system than `data_dir`.";
    "shutdown_timeout_s" = Value("30"), "whole seconds, 1 to 600",
        |d, v| d.shutdown_timeout = seconds(v, 1..=600)?,
        "Longest time that a shutdown may take: for initiators to log out, commands to finish and \
         volumes to be flushed.";

    "cores.count" = Unset("one per processor, at most 4"), "a whole number, 1 to 256",
        |d, v| d.count = Some(count(v, 1..=256)?),
        "How many threads serve volumes, each bound to a processor.";
    "cores.cpus" = Unset("the first available ones"), "a list of processor numbers, such as [2, 3]",
        |d, v| d.cpus = cpus(v)?,
        "The processors that serve volumes, one thread each. Not together with `cores.count`.";
    "cores.memory" = Value("\"256MiB\""), "a size, 16MiB to 64GiB",
        |d, v| d.memory_bytes = core_memory(v, 65_536 * MIB)?,
        "Buffer memory of each core. Limits the memory of all its clients together. It must hold \
         at least 8 requests of the largest size: 2 MiB each, for 1 MiB of data and up to as much \
         again for the volume's layers.";
    "cores.poll_window_us" = Value("100"), "whole microseconds, 0 to 10000",
        |d, v| d.poll_window = Duration::from_micros(integer(v, 0..=10_000)?),
        "How long a core polls for more work before it sleeps: a longer time lowers latency and \
         uses more processor time. A core whose recent polls mostly found nothing sleeps at once, \
         and an idle node always sleeps.";

    "disks.engine" = Value("\"auto\""), "\"auto\", \"io_uring\" or \"threads\"",
        |d, v| d.engine = Some(choice(v, ENGINES)?),
        "How disks are accessed: through io_uring where the system allows it and otherwise through \
         threads (`auto`), or through one of them only.";
    "disks.buffered" = Value("false"), "true or false",
        |d, v| d.buffered = boolean(v)?,
        "Whether volumes may be on file systems without direct I/O. Their I/O then uses the page \
         cache; flushed data is still durable.";
    "disks.low_space_percent" = Value("10"), "whole percent, 0 to 90",
        |d, v| d.low_space_percent = integer(v, 0..=90)?,
        "The status warns when the free space of a file system with growing thin volumes falls \
         below this part of its size. `0` disables the warning.";

    "iscsi.portals" = Value("[\"[::]:3260\"]"), ADDRESSES,
        |d, v| d.iscsi_portals = addresses(v)?,
        "Where iSCSI initiators are served. `[::]` means every address, IPv4 included.";
    "iscsi.authority" = Value("\"iqn.2026-01.io.windrose\""),
        "iqn., a year and month, and a domain in reverse, such as \"iqn.2026-01.com.example\"",
        |d, v| d.iscsi_authority = authority(v, "iqn.")?,
        "Prefix of the names of new iSCSI targets; the volume's name follows. Existing volumes \
         keep their names.";
    "iscsi.redirect" = Value("false"), "true or false",
        |d, v| d.redirect = boolean(v)?,
        "Whether an initiator that logs in here to a volume that this node does not serve (it is \
         drained, or its replica is not in sync) is redirected to a node that serves it. For \
         initiators with a single path. Leave it off with multipathing, which needs a session with \
         every node and would get two with one. Use the same value on all nodes.";
    "iscsi.isns" = Unset("none"), "a host name or IP address and a port, such as \"isns.example.com:3205\"",
        |d, v| d.isns = Some(host_and_port(v)?),
        "The iSNS server with which the node registers its portals and targets.";

    "nvme.portals" = Value("[\"[::]:4420\"]"), ADDRESSES,
        |d, v| d.nvme_portals = addresses(v)?,
        "Where NVMe/TCP hosts are served.";
    "nvme.discovery" = Value("[\"[::]:8009\"]"), ADDRESSES,
        |d, v| d.nvme_discovery = addresses(v)?,
        "Where NVMe/TCP hosts discover subsystems.";
    "nvme.authority" = Value("\"nqn.2026-01.io.windrose\""),
        "nqn., a year and month, and a domain in reverse, such as \"nqn.2026-01.com.example\"",
        |d, v| d.nvme_authority = authority(v, "nqn.")?,
        "Prefix of the names of new NVMe subsystems; the volume's name follows. Existing volumes \
         keep their names.";

    "vhost_user.directory" = Value("\"/run/windrose/vhost\""),
        "an absolute path of at most 80 bytes; \"\" to serve no virtual machines",
        |d, v| d.vhost_user = socket_directory(v)?,
        "Directory of the Unix sockets for virtual machines on this machine (vhost-user): \
         `VOLUME.sock` for each volume that is exported this way and has a replica on the node. A \
         socket's path has at most 98 bytes. The directory is created when first needed, for the \
         node's own user and group.";

    "api.socket" = Value("\"/run/windrose/api.sock\""), FILE,
        |d, v| d.socket = path(v)?,
        "The Unix socket of the API. Its owner and group may use it.";
    "api.tcp" = Unset("not over TCP"), ADDRESS,
        |d, v| d.tcp = Some(address(v)?),
        "Where the API is also served over TCP. Needs `api.tls_cert`, `api.tls_key` and \
         `api.token_file`.";
    "api.tls_cert" = Unset("none"), FILE,
        |d, v| d.tls_cert = Some(path(v)?),
        "PEM file of the API's certificate, followed by those of its issuers.";
    "api.tls_key" = Unset("none"), FILE,
        |d, v| d.tls_key = Some(path(v)?),
        "PEM file of the certificate's private key.";
    "api.token_file" = Unset("none"), FILE,
        |d, v| d.token_file = Some(path(v)?),
        "File with the token that clients of the API over TCP must send: at least 16 printable \
         characters in one line. Only its owner may have access to it.";

    "metrics.listen" = Unset("only on the API"), ADDRESS,
        |d, v| d.metrics = Some(address(v)?),
        "Where `/metrics` is served to Prometheus over plain HTTP, without authentication.";

    "cluster.listen" = Value("[]"), OWN_ADDRESSES,
        |d, v| d.cluster_listen = own_addresses(v)?,
        "Where other nodes reach this one, one address for each network. Required for a node in a \
         cluster.";
    "cluster.heartbeat" = Value("[]"), OWN_ADDRESSES,
        |d, v| d.cluster_heartbeat = own_addresses(v)?,
        "Additional addresses where other nodes reach this one, used only for leases, never for \
         data.";
    "cluster.join" = Unset("the first of `listen`, port 7481"), OWN_ADDRESS,
        |d, v| d.cluster_join = Some(own_address(v)?),
        "Where this node accepts join requests, which need a token. Served once it is in a \
         cluster.";
    "cluster.lease_ms" = Value("2000"), "whole milliseconds, 500 to 60000",
        |d, v| d.lease = millis(v, 500..=60_000)?,
        "How long a node may continue to serve a volume without hearing from the others. Use the \
         same value on all nodes.";
    "cluster.grace_ms" = Value("3000"), "whole milliseconds, 600 to 120000",
        |d, v| d.grace = millis(v, 600..=120_000)?,
        "How long the others wait before they exclude a node that does not respond: at least a \
         quarter more than `lease_ms`. Use the same value on all nodes.";
    "cluster.failure_domain" = Unset("the node's name"), "1 to 64 printable characters",
        |d, v| d.failure_domain = Some(domain(v)?),
        "The failure domain of the node, such as a rack. Replicas of a volume are placed in \
         different domains where possible.";
    "cluster.resyncs" = Value("2"), "a whole number, 1 to 64",
        |d, v| d.resyncs = count(v, 1..=64)?,
        "How many volumes this node resyncs to other nodes at once; others wait.";
    "cluster.repair_after_s" = Value("1800"), "whole seconds, 1 to 2592000, or \"off\"",
        |d, v| d.repair_after = seconds_or_off(v, 1..=2_592_000)?,
        "How long a node must be down before its replicas are recreated on other nodes, for \
         volumes whose primary is this node; `\"off\"` disables this. A drained node is not down. \
         Use the same value on all nodes.";
    "cluster.store_client" = Unset("the first of `listen`, port 2379"), OWN_ADDRESS,
        |d, v| d.store_client = Some(own_address(v)?),
        "Where the store's member on this node listens for clients.";
    "cluster.store_peer" = Unset("the first of `listen`, port 2380"), OWN_ADDRESS,
        |d, v| d.store_peer = Some(own_address(v)?),
        "Where the store's member on this node listens for other members.";
    "cluster.store_program" = Value("\"etcd\""), "a program's name or absolute path",
        |d, v| d.store_program = program(v)?,
        "The program of the store's member on this node.";
    "cluster.store_endpoints" = Value("[]"),
        "a list of URLs, such as [\"https://192.0.2.1:2379\"]; [] for members of the nodes' own",
        |d, v| d.store_endpoints = endpoints(v)?,
        "An existing etcd, which `windrose cluster init` then uses as the cluster's store.";
    "cluster.tls_ca" = Unset("none"), FILE,
        |d, v| d.cluster_ca = Some(path(v)?),
        "PEM file of the authority of all nodes and of the store, with `tls_cert` and `tls_key`, \
         if you supply the certificates. Without it, `windrose cluster init` creates an authority, \
         and the nodes sign their own certificates.";
    "cluster.tls_cert" = Unset("none"), FILE,
        |d, v| d.cluster_cert = Some(path(v)?),
        "PEM file of this node's certificate, followed by those of its issuers: for servers and \
         clients alike, with all addresses in `listen`, `heartbeat`, `join`, `store_client` and \
         `store_peer`.";
    "cluster.tls_key" = Unset("none"), FILE,
        |d, v| d.cluster_key = Some(path(v)?),
        "PEM file of the certificate's private key.";

    "log.format" = Value("\"human\""), "\"human\" or \"json\"",
        |d, v| d.format = Some(choice(v, FORMATS)?),
        "The format of log lines on standard error.";
    "log.level" = Value("\"info\""), "\"error\", \"warn\", \"info\", \"debug\" or \"trace\"",
        |d, v| d.level = Some(choice(v, LEVELS)?),
        "The least severe level that is logged.";

    "limits.connections" = Value("4096"), "a whole number, 1 to 1000000",
        |d, v| d.connections = count(v, 1..=1_000_000)?,
        "Connections of initiators per core. When there is one too many, the oldest that has not \
         logged in is closed, else the oldest discovery session, else the new one. Each initiator \
         name, each address and each IPv6 network (64 bits) may have at most three quarters of \
         them; an allowed name always has a sixteenth within its address or network.";
    "limits.logins" = Value("512"), "a whole number, 1 to 1000000",
        |d, v| d.logins = count(v, 1..=1_000_000)?,
        "Connections per core that have not logged in yet. When there is one too many, the oldest \
         of the address with the most of them is closed.";
    "limits.discoveries" = Value("256"), "a whole number, 1 to 512",
        |d, v| d.discoveries = count(v, 1..=512)?,
        "Discovery sessions and discovery controllers per core, which need no authentication. When \
         there is one too many, the oldest of the address with the most of them is closed.";
    "limits.login_timeout_s" = Value("15"), TIMEOUT,
        |d, v| d.login_timeout = seconds(v, 1..=3600)?,
        "Time for a login.";
    "limits.send_timeout_s" = Value("30"), TIMEOUT,
        |d, v| d.send_timeout = seconds(v, 1..=3600)?,
        "Time within which a client must receive some of the data that is sent to it.";
    "limits.receive_timeout_s" = Value("30"), TIMEOUT,
        |d, v| d.receive_timeout = seconds(v, 1..=3600)?,
        "Time within which a client must complete a message that it has begun to send.";
    "limits.admission_timeout_ms" = Value("1000"), "whole milliseconds, 1 to 60000",
        |d, v| d.admission_timeout = Duration::from_millis(integer(v, 1..=60_000)?),
        "How long a partly received command may wait for buffer memory before it is rejected with \
         a retry status.";
    "limits.memory_timeout_ms" = Value("5000"), "whole milliseconds, 500 to 60000",
        |d, v| d.memory_timeout = Duration::from_millis(integer(v, 500..=60_000)?),
        "How long any other command may wait for buffer memory before it is rejected with a retry \
         status.";
    "limits.keep_alive_s" = Value("15"), TIMEOUT,
        |d, v| d.keep_alive = seconds(v, 1..=3600)?,
        "Time without traffic after which an iSCSI initiator is pinged (NOP-In).";
    "limits.commands" = Value("128"), "a whole number, 1 to 4096",
        |d, v| d.commands = u32::try_from(integer(v, 1..=4096)?).unwrap_or(u32::MAX),
        "Commands in flight per iSCSI session.";
    "limits.volumes" = Value("4096"), "a whole number, 1 to 65536",
        |d, v| d.volumes = count(v, 1..=65_536)?,
        "Limit of the number of volumes of the node.";
    "limits.api_connections" = Value("64"), "a whole number, 1 to 4096",
        |d, v| d.api_connections = count(v, 1..=4096)?,
        "Connections to each listener of the API. When there is one too many over TCP, one without \
         a valid token is closed, of the address with the most of those; if all have sent it, new \
         ones wait.";
}

const ENGINES: &[(&str, DiskEngine)] = &[
    ("auto", DiskEngine::Auto),
    ("io_uring", DiskEngine::IoUring),
    ("threads", DiskEngine::Threads),
];
const FORMATS: &[(&str, LogFormat)] = &[("human", LogFormat::Human), ("json", LogFormat::Json)];
const LEVELS: &[(&str, LogLevel)] = &[
    ("error", LogLevel::Error),
    ("warn", LogLevel::Warn),
    ("info", LogLevel::Info),
    ("debug", LogLevel::Debug),
    ("trace", LogLevel::Trace),
];

/// Parses `text`.
pub(super) fn parse(text: &str) -> Result<Config, SettingError> {
    let table =
        DeTable::parse(text).map_err(|e| SettingError { span: e.span(), message: one_line(&e) })?;
    let mut draft = defaults()?;
    for (key, value) in table.get_ref() {
        let section = key.get_ref().as_ref();
        match value.get_ref() {
            DeValue::Table(inner) if is_section(section) => {
                for (key, value) in inner {
                    let full = format!("{section}.{}", key.get_ref());
                    apply_setting(&mut draft, &full, key.span(), value.span(), value.get_ref())?;
                }
            }
            DeValue::Table(_) if setting(section).is_none() => {
                return Err(SettingError::at(key.span(), unknown("section", section, sections())));
            }
            other => apply_setting(&mut draft, section, key.span(), value.span(), other)?,
        }
    }
    draft.finish()
}

fn one_line(e: &toml::de::Error) -> String {
    e.message().lines().collect::<Vec<_>>().join(", ")
}

/// A draft with all defaults.
fn defaults() -> Result<ConfigDraft, SettingError> {
    let mut draft = ConfigDraft::default();
    for setting in SETTINGS {
        if let Value(toml) = setting.default {
            let value =
                DeValue::parse(toml).map_err(|e| SettingError::without_location(one_line(&e)))?;
            (setting.set)(&mut draft, value.get_ref()).map_err(SettingError::without_location)?;
        }
    }
    Ok(draft)
}

fn setting(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|s| s.key == key)
}

fn sections() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().filter_map(|s| s.key.split_once('.')).map(|(section, _)| section)
}

fn is_section(name: &str) -> bool {
    sections().any(|s| s == name)
}

fn apply_setting(
    draft: &mut ConfigDraft,
    key: &str,
    key_at: Range<usize>,
    value_at: Range<usize>,
    value: &DeValue<'_>,
) -> Result<(), SettingError> {
    let Some(setting) = setting(key) else {
        return Err(SettingError::at(
            key_at,
            unknown("setting", key, SETTINGS.iter().map(|s| s.key)),
        ));
    };
    (setting.set)(draft, value)
        .map_err(|why| SettingError::at(value_at, format!("{key}: {why}; use {}", setting.allowed)))
}

/// "unknown …" with the most similar name, or all names of the same section.
fn unknown(what: &str, given: &str, known: impl Iterator<Item = &'static str>) -> String {
    // A quoted key may hold anything; a message is one line.
    let shown = |c: char| match c.is_control() {
        true => c.escape_default().collect(),
        false => String::from(c),
    };
    let given: String = given.chars().take(60).map(shown).collect();
    let mut known: Vec<_> = known.collect();
    known.dedup();
    let nearest = known.iter().map(|k| (distance(&given, k), k)).min();
    match nearest {
        Some((d, name)) if d <= 3 => format!("unknown {what} {given}; did you mean {name}?"),
        _ => {
            let section = given.split_once('.').map(|(section, _)| format!("{section}."));
            let same = |k: &&&str| section.as_ref().is_none_or(|s| k.starts_with(s.as_str()));
            let list: Vec<_> = known.iter().filter(same).copied().collect();
            format!("unknown {what} {given}; there are: {}", list.join(", "))
        }
    }
}

/// The Levenshtein distance of two short texts.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.chars().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.chars().count()]
}

impl ConfigDraft {
    /// The configuration, after checks across settings.
    fn finish(self) -> Result<Config, SettingError> {
        let (tcp, cluster) = (self.api_tcp()?, self.cluster()?);
        if self.count.is_some() && !self.cpus.is_empty() {
            return Err(SettingError::without_location(
                "cores.count and cores.cpus exclude each other; set one",
            ));
        }
        self.check_listeners()?;
        if self.logins > self.connections {
            return Err(SettingError::without_location(
                "limits.logins exceeds limits.connections; lower it",
            ));
        }
        let (Some(engine), Some(format), Some(level)) = (self.engine, self.format, self.level)
        else {
            return Err(SettingError::without_location("a setting has no default"));
        };
        Ok(Config {
            file: None,
            name: self.name.unwrap_or_else(host_name),
            data_dir: self.data_dir,
            anchor_dir: self.anchor_dir,
            shutdown_timeout: self.shutdown_timeout,
            cores: Cores {
                count: self.count,
                cpus: self.cpus,
                memory_bytes: self.memory_bytes,
                poll_window: self.poll_window,
            },
            disks: Disks {
                engine,
                buffered: self.buffered,
                low_space_percent: self.low_space_percent,
            },
            iscsi: Iscsi {
                portals: self.iscsi_portals,
                authority: self.iscsi_authority,
                redirect: self.redirect,
                isns: self.isns,
            },
            nvme: Nvme {
                portals: self.nvme_portals,
                discovery: self.nvme_discovery,
                authority: self.nvme_authority,
            },
            vhost_user: VhostUser { directory: self.vhost_user },
            api: Api { socket: self.socket, tcp },
            metrics: self.metrics,
            cluster,
            log: Log { format, level },
            limits: Limits {
                connections: self.connections,
                logins: self.logins,
                discoveries: self.discoveries,
                login_timeout: self.login_timeout,
                send_timeout: self.send_timeout,
                receive_timeout: self.receive_timeout,
                admission_timeout: self.admission_timeout,
                memory_timeout: self.memory_timeout,
                keep_alive: self.keep_alive,
                commands: self.commands,
                volumes: self.volumes,
                api_connections: self.api_connections,
            },
        })
    }

    /// The API over TCP: all of its settings or none must be set.
    fn api_tcp(&self) -> Result<Option<ApiTcp>, SettingError> {
        let Some(listen) = self.tcp else {
            let idle = [
                ("api.tls_cert", &self.tls_cert),
                ("api.tls_key", &self.tls_key),
                ("api.token_file", &self.token_file),
            ];
            return match idle.into_iter().find(|(_, set)| set.is_some()) {
                Some((key, _)) => Err(SettingError::without_location(format!(
                    "{key} has no effect without api.tcp; set both or none"
                ))),
                None => Ok(None),
            };
        };
        let need = |key: &str, path: &Option<PathBuf>| {
            path.clone().ok_or_else(|| {
                SettingError::without_location(format!(
                    "api.tcp needs {key}: over TCP the API is only served with TLS and a token"
                ))
            })
        };
        Ok(Some(ApiTcp {
            listen,
            tls_cert: need("api.tls_cert", &self.tls_cert)?,
            tls_key: need("api.tls_key", &self.tls_key)?,
            token_file: need("api.token_file", &self.token_file)?,
        }))
    }

    /// The cluster's settings, after checks across them.
    fn cluster(&self) -> Result<Cluster, SettingError> {
        if mirror::membership::LeaseSettings::new(self.lease, self.grace).is_err() {
            return Err(SettingError::without_location(
                "cluster.grace_ms is too short for cluster.lease_ms; raise it to a quarter more, \
                 or lower cluster.lease_ms",
            ));
        }
        let tls = match (&self.cluster_ca, &self.cluster_cert, &self.cluster_key) {
            (None, None, None) => None,
            (Some(ca), Some(cert), Some(key)) => {
                Some(ClusterTls { ca: ca.clone(), cert: cert.clone(), key: key.clone() })
            }
            _ => {
                return Err(SettingError::without_location(
                    "cluster.tls_ca, cluster.tls_cert and cluster.tls_key belong together; set all \
                     three or none",
                ));
            }
        };
        Ok(Cluster {
            listen: self.cluster_listen.clone(),
            heartbeat: self.cluster_heartbeat.clone(),
            join: self.join(),
            lease: self.lease,
            grace: self.grace,
            failure_domain: self.failure_domain.clone(),
            resyncs: self.resyncs,
            repair_after: self.repair_after,
            store: ClusterStore {
                client: self.store_client,
                peer: self.store_peer,
                program: self.store_program.clone(),
                endpoints: self.store_endpoints.clone(),
            },
            tls,
        })
    }

    /// The address where joining nodes are admitted.
    fn join(&self) -> Option<SocketAddr> {
        let first = self.cluster_listen.first()?;
        Some(self.cluster_join.unwrap_or_else(|| SocketAddr::new(first.ip(), JOIN_PORT)))
    }

    /// Checks that no two services listen at the same address.
    fn check_listeners(&self) -> Result<(), SettingError> {
        let join = self.join();
        let lists = [
            ("iscsi.portals", &self.iscsi_portals[..]),
            ("nvme.portals", &self.nvme_portals),
            ("nvme.discovery", &self.nvme_discovery),
            ("api.tcp", self.tcp.as_slice()),
            ("metrics.listen", self.metrics.as_slice()),
            ("cluster.listen", &self.cluster_listen),
            ("cluster.heartbeat", &self.cluster_heartbeat),
            ("cluster.join", join.as_slice()),
            ("cluster.store_client", self.store_client.as_slice()),
            ("cluster.store_peer", self.store_peer.as_slice()),
        ];
        let all: Vec<_> =
            lists.iter().flat_map(|(key, list)| list.iter().map(move |a| (*key, *a))).collect();
        for (i, (key, a)) in all.iter().enumerate() {
            if let Some((other, b)) = all[..i].iter().find(|(_, b)| addresses_clash(a, b)) {
                return Err(SettingError::without_location(format!(
                    "{key} ({a}) and {other} ({b}) need the same port; give each its own"
                )));
            }
        }
        Ok(())
    }
}

/// Whether the two sockets cannot be bound at the same time. Port 0 is any free port.
fn addresses_clash(a: &SocketAddr, b: &SocketAddr) -> bool {
    let wildcard = |x: &SocketAddr| x.ip().is_unspecified();
    let covers = |x: &SocketAddr, y: &SocketAddr| wildcard(x) && (x.is_ipv6() || y.is_ipv4());
    a.port() != 0 && a.port() == b.port() && (a.ip() == b.ip() || covers(a, b) || covers(b, a))
}

fn host_name() -> String {
    let uname = rustix::system::uname();
    let name = uname.nodename().to_str().unwrap_or_default();
    if is_host_name(name) { name.to_owned() } else { "windrose".to_owned() }
}

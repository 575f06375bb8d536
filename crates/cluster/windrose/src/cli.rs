//! The command line: every command and option, and what its help says.

use std::path::PathBuf;

use api::client::ApiAddress;
use api::{BlockSize, Initiator, PoolName, RaidLevel, Size, VolumeName};
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use uuid::Uuid;

use crate::bench_args::BenchArgs;
use crate::files::{ChapUserFile, HostKeyArgs};

const EXIT_CODES: &str = "\
Exit codes:
  0  done; for `status`: the data is safe
  1  the node refused or failed; the message says why
  2  the command line is wrong
  3  no node responds
  4  there is no such volume, pool or node
  5  for `status`: the data is at risk
  6  for `status` and `attach`: data cannot be reached";

/// Help section for options of all commands: after each command's own.
const GLOBAL_HEADING: &str = "Global options";

/// Block storage over iSCSI and NVMe/TCP.
#[derive(Debug, Parser)]
#[command(name = "windrose", version, after_help = EXIT_CODES, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) remote: ConnectionArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Which node to talk to, and how to show what it says.
#[derive(Args, Debug)]
pub(crate) struct ConnectionArgs {
    /// Address of the node's API: unix:/path/to/socket or https://host:port.
    #[arg(
        long,
        global = true,
        help_heading = GLOBAL_HEADING,
        env = "WINDROSE_API",
        value_name = "ADDRESS",
        default_value = "unix:/run/windrose/api.sock"
    )]
    pub(crate) api: ApiAddress,
    /// File with the token that the API requires over TCP.
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, env = "WINDROSE_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// PEM file with the certificates to trust instead of those of the system.
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, env = "WINDROSE_CA_CERT", value_name = "FILE")]
    pub(crate) ca_cert: Option<PathBuf>,
    /// Print JSON, for programs.
    #[arg(long, global = true, help_heading = GLOBAL_HEADING)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a node, or drain and resume one.
    Node(NodeArgs),
    /// Manage the cluster: several nodes that mirror volumes.
    #[command(arg_required_else_help = true)]
    Cluster {
        #[command(subcommand)]
        command: ClusterCommand,
    },
    /// Manage volumes.
    #[command(arg_required_else_help = true)]
    Volume {
        #[command(subcommand)]
        command: VolumeCommand,
    },
    /// Manage the disk pools of this node, in which volumes can be stored.
    #[command(arg_required_else_help = true)]
    Pool {
        #[command(subcommand)]
        command: PoolCommand,
    },
    /// Serve a volume as a device of this machine, until the command is stopped.
    Attach(Box<AttachArgs>),
    /// Measure a volume, a file or a device, in fio's terms.
    Bench(BenchArgs),
    /// Say whether the data is safe, and why.
    Status,
    /// List the sessions of initiators.
    Sessions,
    /// Print a completion script for a shell.
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Write the manual pages.
    Man {
        /// Directory to write them to.
        dir: PathBuf,
    },
}

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct NodeArgs {
    /// Configuration file (default: /etc/windrose/windrose.toml if it exists, else the defaults).
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Only check the configuration, and the certificate, key and token that it names.
    #[arg(long)]
    pub(crate) check: bool,
    #[command(subcommand)]
    pub(crate) command: Option<NodeCommand>,
}

#[derive(Args, Debug)]
#[command(group = clap::ArgGroup::new("as").required(true).multiple(true))]
pub(crate) struct AttachArgs {
    /// Name of the volume.
    pub(crate) name: VolumeName,
    /// Socket to listen on: a vhost-user disk for a virtual machine of QEMU or another monitor.
    #[arg(long, value_name = "PATH", group = "as")]
    pub(crate) vhost_user: Option<PathBuf>,
    /// Socket to listen on for NBD clients, such as QEMU, qemu-img, nbdcopy and nbd-client.
    #[arg(long, value_name = "PATH", group = "as")]
    pub(crate) nbd: Option<PathBuf>,
    /// Create a block device on this machine, /dev/ublkbN, with a link at /run/windrose/disks/NAME.
    #[arg(long, group = "as")]
    pub(crate) ublk: bool,
    /// Number of the block device (default: the first free one).
    #[arg(long, value_name = "NUMBER", requires = "ublk", value_parser = clap::value_parser!(u32).range(..=1_048_575))]
    pub(crate) device_id: Option<u32>,
    /// Empty directory in which to show the volume as a file with its name, for example for loop
    /// devices and backup programs.
    #[arg(long, value_name = "DIRECTORY", group = "as")]
    pub(crate) fuse: Option<PathBuf>,
    /// Permissions of that file, in octal. Its owner is that of the directory.
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode, requires = "fuse")]
    pub(crate) fuse_mode: u32,
    /// Refuse writes.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Number of queues of the virtual disk or block device, usually the number of processors.
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) queues: u16,
    /// How long requests wait, in seconds, while no node that serves the volume responds. The
    /// process then exits; restarting it resumes the waiting requests.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub(crate) no_path_timeout: u32,
    /// NQN of this host (default: that in /etc/nvme/hostnqn, or one derived from the machine's
    /// identity).
    #[arg(long, value_name = "NQN")]
    pub(crate) host_nqn: Option<Initiator>,
    /// Identifier of this host (default: that in /etc/nvme/hostid, or the one in its NQN, or one
    /// derived from the machine's identity).
    #[arg(long, value_name = "UUID")]
    pub(crate) host_id: Option<Uuid>,
    #[command(flatten)]
    pub(crate) keys: HostKeyArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// Drain a node of the cluster: it stops serving volumes.
    Drain {
        /// Its number or name (default: the node that handles the request).
        node: Option<String>,
    },
    /// Resume a drained node: it serves volumes again.
    Resume {
        /// Its number or name (default: the node that handles the request).
        node: Option<String>,
    },
    /// Accept the data directory of this node as it is, for its next start: after a restore, or to
    /// start over with no volumes. The node must not run.
    AcceptDataDir {
        /// Configuration file of the node (default: /etc/windrose/windrose.toml if it exists, else
        /// the defaults).
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The name of the node: accepts without a prompt.
        #[arg(long, value_name = "NAME")]
        confirm: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Make this node the first of a new cluster. Its volumes are kept; initiators see a restart.
    Init {
        /// Without certificates: nodes and their store communicate in plain text, and anyone who
        /// can reach them has full access.
        #[arg(long)]
        insecure: bool,
    },
    /// Create a token with which another node joins, and print it. It admits one node within an
    /// hour, whichever presents it.
    Token {
        #[command(subcommand)]
        command: Option<TokenCommand>,
    },
    /// List the nodes that have asked to join, and those that wait for approval.
    Joins,
    /// Admit a node that waits for approval.
    Approve {
        /// Identifier of its request, as `windrose cluster joins` shows it.
        id: String,
    },
    /// Reject a node that waits for approval.
    Refuse {
        /// Identifier of its request, as `windrose cluster joins` shows it.
        id: String,
    },
    /// Join this node to a cluster, to store replicas of volumes. It must have no volumes.
    Join(TokenArgs),
    /// Join this node to a cluster as its witness: it has a vote, and stores no data.
    Witness(TokenArgs),
    /// Replace the cluster's secret and authority with new ones, while the nodes serve. Use it
    /// after a node was stolen, or removed by force while others may have access to its disks.
    /// Earlier tokens are revoked. Waits until the rotation is complete.
    Rotate,
    /// List the nodes and the members of the store.
    Nodes,
    /// Recover from the loss of the cluster's store, or of records: creates a new store if the old
    /// one is lost for good, and recovers volumes from their images. Shows what it would do, and
    /// asks.
    Recover {
        /// Proceed without the replicas of this node, which may be newer: data that only they have
        /// is lost. May be repeated.
        #[arg(long, value_name = "NODE")]
        without: Vec<String>,
        /// Show what would be done, and change nothing.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Remove this node from its cluster.
    Leave {
        /// Remove this node instead, which is lost for good: its number or name. Or remove a member
        /// of the store whose node never joined: its name or address.
        #[arg(long)]
        node: Option<String>,
        /// Remove the node without the agreement of the others, or of the node that is removed.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a token and print it. It cannot be shown again.
    Create {
        /// Number of nodes that may join with it.
        #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
        uses: u32,
        /// Any number of nodes may join with it.
        #[arg(long, conflicts_with = "uses")]
        unlimited: bool,
        /// How long it is valid, such as 30m, 1h or 7d.
        #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_duration)]
        expires: u64,
        /// For witnesses only.
        #[arg(long)]
        witness: bool,
        /// Each node must wait until an administrator admits it with `windrose cluster approve`.
        #[arg(long)]
        require_approval: bool,
    },
    /// List the tokens: which are valid, for how many more nodes, and until when.
    List,
    /// Revoke a token: no node can join with it any more.
    Revoke {
        /// Its identifier, as `windrose cluster token list` shows it.
        id: String,
    },
}

/// How a command that cannot be undone is confirmed, other than by typing the name when asked.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ConfirmArgs {
    /// Do not ask.
    #[arg(long)]
    pub(crate) yes: bool,
    /// The name to be confirmed, instead of typing it at the prompt.
    #[arg(long, value_name = "NAME", conflicts_with = "yes")]
    pub(crate) confirm: Option<String>,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
pub(crate) struct TokenArgs {
    /// The token that `windrose cluster token` prints.
    #[arg(long)]
    pub(crate) token: Option<String>,
    /// File that holds the token; `-` reads it from standard input.
    #[arg(long = "cluster-token-file", value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Create a volume. A new volume is inaccessible until you allow an initiator.
    Create(Box<CreateVolumeArgs>),
    /// List the volumes.
    List,
    /// Show a volume and how to connect to it.
    Show {
        /// Name of the volume.
        name: VolumeName,
    },
    /// Make a volume larger, while it is in use.
    Grow {
        /// Name of the volume.
        name: VolumeName,
        /// Its new size, such as 20G.
        #[arg(long)]
        size: Size,
    },
    /// Manage the replicas of a volume on the nodes of a cluster.
    #[command(arg_required_else_help = true)]
    Mirror {
        #[command(subcommand)]
        command: ReplicaCommand,
    },
    /// Choose the primary of a volume.
    SwitchPrimary {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the node. It must have a replica that is in sync.
        #[arg(long, value_name = "NODE")]
        to: String,
    },
    /// Make the replica of this node the primary, even if other replicas are newer. Acknowledged
    /// writes may be lost.
    ForcePrimary {
        /// Name of the volume.
        name: VolumeName,
        /// The name of the volume, instead of typing it at the prompt.
        #[arg(long, value_name = "NAME")]
        confirm: Option<VolumeName>,
    },
    /// Take over the image of a volume from the node that used it last and will never use it again.
    /// Refused while that node uses it.
    TakeOver {
        /// Name of the volume.
        name: VolumeName,
        /// The name of the volume, instead of typing it at the prompt.
        #[arg(long, value_name = "NAME")]
        confirm: Option<VolumeName>,
    },
    /// Show which hosts have reserved a volume (SCSI), or remove the reservations of hosts that no
    /// longer exist.
    Reservations {
        /// Name of the volume.
        name: VolumeName,
        /// Remove all registrations and reservations. Hosts that rely on them for fencing are no
        /// longer fenced off.
        #[arg(long)]
        clear: bool,
        /// Do not ask.
        #[arg(long, requires = "clear")]
        yes: bool,
    },
    /// List the images on this node that no record references as the replica of a volume.
    Orphans,
    /// Adopt an image that no record references as a volume, with its old name and targets.
    Adopt {
        /// The image: the path of a file or device, or POOL/VOLUME, as `windrose volume orphans`
        /// shows it.
        image: String,
        /// Name of the volume (default: its old name).
        #[arg(long)]
        name: Option<VolumeName>,
        /// Proceed without the replica of this node, which may be newer: data that only it has is
        /// lost. May be repeated.
        #[arg(long, value_name = "NODE")]
        without: Vec<String>,
        /// Adopt it even if other replicas may be newer, or its state is unknown.
        #[arg(long)]
        force: bool,
        /// Show what would be done, and change nothing.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Erase an image that no record references. Its data is lost.
    Discard {
        /// The image: the path of a file or device, or POOL/VOLUME, as `windrose volume orphans`
        /// shows it.
        image: String,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Delete a volume and its data.
    Delete {
        /// Name of the volume.
        name: VolumeName,
        #[command(flatten)]
        confirm: ConfirmArgs,
        /// Delete it even while initiators are logged in to it.
        #[arg(long)]
        force: bool,
        /// Delete it even while no replica serves it: its data is lost unchecked.
        #[arg(long)]
        discard: bool,
    },
    /// Choose the protocols that export a volume.
    Export {
        /// Name of the volume.
        name: VolumeName,
        /// All protocols that shall export it, such as `iscsi,nvme,vhost-user`.
        #[arg(long, value_name = "PROTOCOL", value_delimiter = ',', required = true)]
        protocols: Vec<ExportProtocol>,
    },
    /// Choose the target that exports a volume, and its number there: the LUN of the iSCSI target,
    /// and one less than the namespace identifier in the NVMe subsystem.
    #[command(group(clap::ArgGroup::new("choice").args(["join", "own", "lun"]).required(true).multiple(true)))]
    Target {
        /// Name of the volume.
        name: VolumeName,
        /// Use the target and subsystem of this volume (its name, or the target's), with its
        /// secrets.
        #[arg(long, value_name = "VOLUME", conflicts_with = "own")]
        join: Option<String>,
        /// Use its own target and subsystem again.
        #[arg(long)]
        own: bool,
        /// Logical unit number (default: the lowest free one).
        #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(0..=255))]
        lun: Option<u16>,
        /// Do it even while initiators are logged in to the volume: they lose access at the old
        /// target.
        #[arg(long)]
        force: bool,
    },
    /// Allow initiators to access a volume.
    Allow {
        /// Name of the volume.
        name: VolumeName,
        /// Names of initiators (IQN or NQN), or `any` for all.
        #[arg(required = true)]
        initiators: Vec<Initiator>,
    },
    /// End the access of initiators to a volume, and their sessions.
    Deny {
        /// Name of the volume.
        name: VolumeName,
        /// Names of initiators, as they were allowed.
        #[arg(required = true)]
        initiators: Vec<Initiator>,
    },
    /// Require CHAP from the iSCSI initiators of a volume, or no longer.
    Chap {
        /// Name of the volume.
        name: VolumeName,
        /// User of the initiator and the file with its secret; `-` reads it from standard input.
        #[arg(value_name = "USER:SECRET-FILE", required_unless_present = "off")]
        user: Option<ChapUserFile>,
        /// User of the volume and the file with its secret, for mutual CHAP.
        #[arg(long, value_name = "USER:SECRET-FILE", conflicts_with = "off")]
        mutual: Option<ChapUserFile>,
        /// Require CHAP no longer; with --initiator, that initiator uses the volume's user and
        /// secret again.
        #[arg(long, conflicts_with = "user")]
        off: bool,
        /// Set a user and secret for this initiator (IQN) only. Initiators without a secret of
        /// their own use the volume's.
        #[arg(long, value_name = "INITIATOR")]
        initiator: Option<Initiator>,
    },
    /// Require an NVMe host of a volume to authenticate with a secret (DH-HMAC-CHAP), or no longer.
    Dhchap {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the host (NQN).
        #[arg(long, value_name = "NQN")]
        host: Initiator,
        /// File with its secret, as `nvme gen-dhchap-key` prints it; `-` reads it from standard
        /// input.
        #[arg(long, value_name = "FILE", required_unless_present = "off")]
        secret: Option<PathBuf>,
        /// File with the secret with which the volume authenticates, if the host requires that; it
        /// differs from the host's.
        #[arg(long, value_name = "FILE", conflicts_with = "off")]
        ctrl_secret: Option<PathBuf>,
        /// Require no authentication from that host any more.
        #[arg(long, conflicts_with = "secret")]
        off: bool,
    },
    /// Require an NVMe host of a volume to use TLS with a pre-shared key, or no longer.
    Tls {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the host (NQN).
        #[arg(long, value_name = "NQN")]
        host: Initiator,
        /// File with its key, as `nvme gen-tls-key` prints it; `-` reads it from standard input.
        #[arg(long, value_name = "FILE", required_unless_present = "off")]
        key: Option<PathBuf>,
        /// Also accept it without TLS.
        #[arg(long, conflicts_with = "off")]
        optional: bool,
        /// Remove its key: it connects without TLS from then on.
        #[arg(long, conflicts_with = "key")]
        off: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Create a pool. The data on its disks is lost; disks that contain data are refused unless
    /// --overwrite names them.
    Create(Box<CreatePoolArgs>),
    /// List the pools.
    List,
    /// Show a pool, its disks, and what to do about failed ones.
    Show {
        /// Name of the pool.
        name: PoolName,
    },
    /// Import a pool on disks of this machine that the node does not know, with its volumes;
    /// without a name, list such pools.
    Import {
        /// Name of the pool, or its identity.
        pool: Option<String>,
        /// Search this block device or file for its disks (default: every block device). May be
        /// repeated.
        #[arg(long, value_name = "PATH")]
        disk: Vec<PathBuf>,
        /// Name of the pool on this node (default: its old name).
        #[arg(long = "as", value_name = "NAME", requires = "pool")]
        name: Option<PoolName>,
    },
    /// Add disks to a pool, while it is in use.
    Add {
        /// Name of the pool.
        name: PoolName,
        /// The disks: block devices, or files of the intended size.
        #[arg(required = true, value_name = "DISK")]
        disks: Vec<PathBuf>,
        /// Add them as spares, which replace failed disks and are unused until then.
        #[arg(long)]
        spare: bool,
        #[command(flatten)]
        overwrite: OverwriteArgs,
    },
    /// Remove a disk from a pool, while it is in use. Its data is first moved to the other disks:
    /// refused if they have no room.
    Remove {
        /// Name of the pool.
        name: PoolName,
        /// The disk: its serial number, a path to it, or its number in the pool. If that is
        /// ambiguous, prefix it with serial:, path: or number:.
        disk: String,
        /// Cancel a removal in progress: the disk stays in the pool.
        #[arg(long)]
        cancel: bool,
    },
    /// Replace a disk of a pool, while it is in use.
    Replace {
        /// Name of the pool.
        name: PoolName,
        /// The old disk: its serial number, a path to it, or its number in the pool (prefixed with
        /// serial:, path: or number: if ambiguous).
        disk: String,
        /// The new disk: a block device, or a file of the intended size.
        #[arg(long, value_name = "DISK")]
        with: PathBuf,
        #[command(flatten)]
        overwrite: OverwriteArgs,
    },
    /// Reset the error counters of a pool's disks, for example after a cable was replaced; without
    /// a disk, also clear the list of blocks that scrubs could not repair.
    Clear {
        /// Name of the pool.
        name: PoolName,
        /// The disk: its serial number, a path to it, or its number in the pool (prefixed with
        /// serial:, path: or number: if ambiguous). Default: all disks.
        disk: Option<String>,
    },
    /// Scrub a pool, while it is in use: read all of it, and repair damaged blocks.
    Scrub {
        /// Name of the pool.
        name: PoolName,
    },
    /// Open a pool without disks that are lost for good, or take it over from a node that is lost.
    /// Data that only the missing disks have is lost, and they can never return to the pool.
    Open {
        /// Name of the pool.
        name: PoolName,
        /// The disks: their serial numbers, paths, or numbers in the pool (prefixed with serial:,
        /// path: or number: if ambiguous).
        #[arg(long, required_unless_present = "take_over", num_args = 1.., value_name = "DISK")]
        without: Vec<String>,
        /// Take over its disks from the node that used them last and will never use them again.
        /// Refused while that node uses them.
        #[arg(long)]
        take_over: bool,
        /// The pool's name, instead of typing it at the prompt.
        #[arg(long, value_name = "NAME")]
        confirm: Option<PoolName>,
    },
    /// Delete a pool without volumes. Its disks can be reused.
    Delete {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        confirm: ConfirmArgs,
        /// Remove its record even if it cannot be opened. The data on its disks is kept.
        #[arg(long)]
        force: bool,
    },
}

/// Disks that may be overwritten.
#[derive(Args, Debug)]
pub(crate) struct OverwriteArgs {
    /// Overwrite this disk although it contains data: its serial number, or its path if it has
    /// none. May be repeated.
    #[arg(long, value_name = "DISK")]
    pub(crate) overwrite: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct CreatePoolArgs {
    /// Name of the pool: a-z, 0-9 and '-'.
    pub(crate) name: PoolName,
    /// RAID level: 0 (no disk may fail), 1 and 10 (copies), 5 (one may fail) or 6 (two may).
    #[arg(long, value_name = "LEVEL")]
    pub(crate) raid: RaidLevel,
    /// Number of copies of all data, with RAID 1 and 10 (default: 2).
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(2..=4))]
    pub(crate) copies: Option<u8>,
    /// Number of disks in a stripe (default: all).
    #[arg(long, value_name = "COUNT")]
    pub(crate) columns: Option<u16>,
    /// Chunk size, the part of a stripe on one disk: 16K, 32K, 64K or 128K.
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = parse_chunk_size)]
    pub(crate) chunk_size: u32,
    /// Keep a checksum of each 4 KiB. Detects and repairs silent corruption (at RAID 0, detects
    /// only). Cannot be changed later; costs some extra writes.
    #[arg(long)]
    pub(crate) checksums: bool,
    /// Spare disk, which replaces a failed one. May be repeated.
    #[arg(long, value_name = "DISK")]
    pub(crate) spare: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) overwrite: OverwriteArgs,
    /// The disks: block devices, preferably by /dev/disk/by-id, or files of the intended size.
    #[arg(required = true, value_name = "DISK")]
    pub(crate) disks: Vec<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ReplicaCommand {
    /// Add a replica on another node, and resync it.
    Add {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the node for it (default: the cluster chooses).
        #[arg(long, value_name = "NODE")]
        on: Option<String>,
        #[command(flatten)]
        backing: BackingArgs,
    },
    /// Remove a replica, unless it is the last one in sync. This lowers the wanted number of
    /// replicas by one.
    Remove {
        /// Name of the volume.
        name: VolumeName,
        /// Name of its node.
        #[arg(long, value_name = "NODE")]
        on: String,
    },
    /// Replace a replica: with one on another node, which is resynced first, or a lost one with a
    /// new one in its place.
    Replace {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the replica's node.
        #[arg(long, value_name = "NODE")]
        on: String,
        /// Name of the node for the new one (default: the same).
        #[arg(long, value_name = "NODE")]
        with: Option<String>,
        #[command(flatten)]
        backing: BackingArgs,
    },
    /// Set the wanted number of replicas of a volume. Missing replicas are created automatically
    /// after `cluster.repair_after_s`, or with `windrose volume mirror add`.
    Set {
        /// Name of the volume.
        name: VolumeName,
        /// The number: 1 to 3, and not fewer than it has.
        #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=3))]
        replicas: u8,
    },
    /// Compare the replicas. Run it at the primary's node. Differences remain a finding of the
    /// status until the replicas are equal again.
    Verify {
        /// Name of the volume.
        name: VolumeName,
        /// Make the replicas equal where they differ. Windrose cannot tell which one is right: use
        /// --source.
        #[arg(long)]
        repair: bool,
        /// Name of the node whose data to keep where the replicas differ.
        #[arg(long, value_name = "NODE", requires = "repair")]
        source: Option<String>,
    },
}

/// Where a replica of a volume lies on its node.
#[derive(Args, Debug)]
pub(crate) struct BackingArgs {
    /// File for the data, new or empty (default: one in the node's data directory).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["device", "pool"])]
    pub(crate) path: Option<PathBuf>,
    /// Block device for the data; all of it is used.
    #[arg(long, value_name = "DEVICE", conflicts_with = "pool")]
    pub(crate) device: Option<PathBuf>,
    /// Disk pool for the data; each node with a replica must have one of this name.
    #[arg(long, value_name = "POOL")]
    pub(crate) pool: Option<PoolName>,
    /// Overwrite the contents of the file or device.
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args, Debug)]
pub(crate) struct CreateVolumeArgs {
    /// Name of the volume: a-z, 0-9 and '-'. Several names create as many volumes, all alike.
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<VolumeName>,
    /// Its size, such as 10G (default on a device: all of the device).
    #[arg(long, required_unless_present = "device")]
    pub(crate) size: Option<Size>,
    /// Allocate all of its space now instead of when it is written.
    #[arg(long)]
    pub(crate) thick: bool,
    /// Size of a logical block in bytes: 512 or 4096.
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = parse_block_size)]
    pub(crate) block_size: BlockSize,
    #[command(flatten)]
    pub(crate) backing: BackingArgs,
    /// Number of replicas, each on another node of the cluster: 1 to 3.
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u8).range(1..=3))]
    pub(crate) replicas: u8,
    /// Name of a node for a replica; the cluster chooses the others. May be repeated.
    #[arg(long, value_name = "NODE")]
    pub(crate) on: Vec<String>,
    /// Protocols that export it, such as `iscsi,nvme,vhost-user`.
    #[arg(long, value_name = "PROTOCOL", value_delimiter = ',', default_value = "iscsi,nvme")]
    pub(crate) protocols: Vec<ExportProtocol>,
    /// Initiator that may access it (IQN or NQN), or `any`. May be repeated.
    #[arg(long, value_name = "INITIATOR")]
    pub(crate) allow: Vec<Initiator>,
    /// User of the initiator and the file with its CHAP secret; `-` reads it from standard input.
    #[arg(long, value_name = "USER:SECRET-FILE")]
    pub(crate) chap: Option<ChapUserFile>,
    /// User of the volume and the file with its secret, for mutual CHAP.
    #[arg(long, value_name = "USER:SECRET-FILE", requires = "chap")]
    pub(crate) chap_mutual: Option<ChapUserFile>,
}

/// Protocols, as the command line knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportProtocol {
    /// iSCSI.
    Iscsi,
    /// NVMe/TCP.
    Nvme,
    /// vhost-user: virtual machines on its nodes, at each node's own socket.
    VhostUser,
    /// Not exported: inaccessible.
    None,
}

/// Converts export options to the API's protocols.
pub(crate) fn to_protocols(protocols: &[ExportProtocol]) -> api::Protocols {
    let names = |one: ExportProtocol| protocols.contains(&one);
    api::Protocols {
        iscsi: names(ExportProtocol::Iscsi),
        nvme: names(ExportProtocol::Nvme),
        vhost_user: names(ExportProtocol::VhostUser),
    }
}

/// Parses a duration; the result is in seconds.
fn parse_duration(s: &str) -> Result<u64, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];
    let parsed = units.into_iter().find_map(|(unit, seconds)| {
        let number =
            s.strip_suffix(unit).filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))?;
        number.parse::<u64>().ok()?.checked_mul(seconds)
    });
    let fits = parsed.filter(|s| (1..=366 * 86_400).contains(s));
    fits.ok_or_else(|| {
        "use a number and s, m, h or d, such as 30m, 1h or 7d; at most 366d".to_owned()
    })
}

fn parse_chunk_size(s: &str) -> Result<u32, String> {
    let Size(bytes) = s.parse().map_err(|e: api::InvalidValue| e.to_string())?;
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    api::check_chunk_size(bytes).map(|()| bytes).map_err(|e| e.to_string())
}

fn parse_mode(s: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(s, 8).ok().filter(|mode| mode & !0o666 == 0);
    mode.ok_or_else(|| "use digits of 0, 2, 4 and 6, such as 660".to_owned())
}

fn parse_block_size(s: &str) -> Result<BlockSize, String> {
    let bytes: u32 = s.parse().map_err(|_| "use 512 or 4096".to_owned())?;
    BlockSize::try_from(bytes).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_of_all_commands_stand_behind_those_of_each() {
        let mut root = Cli::command();
        root.build();
        let volume = root.find_subcommand("volume").unwrap();
        for name in ["create", "delete", "target", "chap"] {
            let help = volume.find_subcommand(name).unwrap().clone().render_help().to_string();
            let (own, global) = help.split_once("Global options:").expect(name);
            for option in ["--api", "--token-file", "--ca-cert", "--json"] {
                assert!(!own.contains(option) && global.contains(option), "{option}: {help}");
            }
            assert!(own.contains("Options:") || own.contains("Arguments:"), "{help}");
        }
    }

    #[test]
    fn a_token_is_made_for_one_node_and_an_hour_unless_said_otherwise() {
        let token = |args: &str| {
            let words = format!("windrose cluster token{args}");
            Cli::try_parse_from(words.split(' ')).map(|cli| match cli.command {
                Command::Cluster { command: ClusterCommand::Token { command } } => command,
                other => panic!("{other:?}"),
            })
        };
        assert!(matches!(token(""), Ok(None)));
        let made = token(" create");
        let Ok(Some(TokenCommand::Create { uses: 1, unlimited: false, expires: 3600, .. })) = made
        else {
            panic!("{made:?}")
        };
        let made = token(" create --unlimited --expires 7d --witness --require-approval");
        let Ok(Some(TokenCommand::Create {
            unlimited: true,
            expires,
            witness: true,
            require_approval: true,
            ..
        })) = made
        else {
            panic!("{made:?}")
        };
        assert_eq!(expires, 7 * 86_400);
        for bad in [
            "--uses 0",
            "--uses 2 --unlimited",
            "--expires 1",
            "--expires 0h",
            "--expires 400d",
            "--expires +1h",
        ] {
            assert!(token(&format!(" create {bad}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn protocols_are_named_together() {
        let of = |protocols: &str| {
            let words = ["windrose", "volume", "export", "web", "--protocols", protocols];
            let Ok(Cli { command: Command::Volume { command }, .. }) = Cli::try_parse_from(words)
            else {
                panic!("it is good")
            };
            let VolumeCommand::Export { protocols, .. } = command else { panic!() };
            let api::Protocols { iscsi, nvme, vhost_user } = to_protocols(&protocols);
            [iscsi, nvme, vhost_user]
        };
        assert_eq!(of("iscsi,nvme"), [true, true, false]);
        assert_eq!(of("iscsi,nvme,vhost-user"), [true; 3]);
        assert_eq!(of("vhost-user,nvme"), [false, true, true]);
        assert_eq!(of("none"), [false; 3]);
        assert!(Cli::try_parse_from(["windrose", "volume", "export", "web"]).is_err());
    }

    #[test]
    fn a_host_has_secrets_or_none() {
        let parse =
            |args: &str| Cli::try_parse_from(format!("windrose volume dhchap {args}").split(' '));
        let host = "web --host nqn.2014-08.org.nvmexpress:h";
        let Ok(Cli { command: Command::Volume { command }, .. }) =
            parse(&format!("{host} --secret - --ctrl-secret b"))
        else {
            panic!("it is good")
        };
        let VolumeCommand::Dhchap { secret, ctrl_secret, off, .. } = command else { panic!() };
        assert_eq!((secret, ctrl_secret, off), (Some("-".into()), Some("b".into()), false));
        assert!(parse(&format!("{host} --off")).is_ok());
        for bad in
            ["", " --off --secret a", " --off --ctrl-secret b", " --ctrl-secret b", " --secret"]
        {
            assert!(parse(&format!("{host}{bad}")).is_err(), "{bad}");
        }
        assert!(parse("web --secret a").is_err() && parse("web --host h --off").is_err());
    }

    #[test]
    fn a_host_has_a_key_or_none() {
        let parse =
            |args: &str| Cli::try_parse_from(format!("windrose volume tls {args}").split(' '));
        let host = "web --host nqn.2014-08.org.nvmexpress:h";
        let of = |args: &str| {
            let parsed = parse(&format!("{host}{args}"));
            let Ok(Cli { command: Command::Volume { command }, .. }) = parsed else {
                panic!("it is good")
            };
            let VolumeCommand::Tls { key, optional, off, .. } = command else { panic!() };
            (key, optional, off)
        };
        assert_eq!(of(" --key -"), (Some("-".into()), false, false));
        assert_eq!(of(" --key a --optional"), (Some("a".into()), true, false));
        assert_eq!(of(" --off"), (None, false, true));
        for bad in ["", " --optional", " --off --key a", " --off --optional", " --key"] {
            assert!(parse(&format!("{host}{bad}")).is_err(), "{bad}");
        }
        assert!(parse("web --key a").is_err() && parse("web --host h --off").is_err());
    }

    fn pool(args: &str) -> Result<PoolCommand, clap::Error> {
        let words = format!("windrose pool {args}");
        Cli::try_parse_from(words.split(' ')).map(|cli| match cli.command {
            Command::Pool { command } => command,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn a_pool_is_made_of_disks_and_spares() {
        let made = pool("create tank --raid 5 --spare /dev/s --spare /dev/t /dev/a /dev/b /dev/c");
        let Ok(PoolCommand::Create(args)) = made else { panic!("it is good") };
        assert_eq!((args.disks.len(), args.spare.len(), args.chunk_size), (3, 2, 65536));
        assert_eq!((args.raid, args.copies, args.columns), (RaidLevel::Raid5, None, None));
        let made = pool(
            "create tank --raid 10 --copies 3 --columns 6 --chunk-size 128K --checksums --overwrite S1 --overwrite /f a b",
        );
        let Ok(PoolCommand::Create(args)) = made else { panic!("it is good") };
        assert_eq!(args.overwrite.overwrite, ["S1", "/f"]);
        assert_eq!((args.copies, args.columns, args.chunk_size), (Some(3), Some(6), 131_072));
        assert!(args.checksums);
        for bad in [
            "create tank /dev/a",
            "create tank --raid 5",
            "create tank --raid 4 /dev/a",
            "create Tank --raid 5 /dev/a",
            "create tank --raid 5 --chunk-size 8K /dev/a",
            "create tank --raid 1 --copies 5 /dev/a",
            "replace tank S1",
            "add tank",
            "open tank",
        ] {
            assert!(pool(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn disks_that_are_gone_are_named_together_or_one_by_one() {
        for args in ["--without S1 S2 --confirm tank", "--without S1 --without S2 --confirm tank"] {
            let Ok(PoolCommand::Open { without, confirm, .. }) = pool(&format!("open tank {args}"))
            else {
                panic!("it is good")
            };
            assert_eq!(
                (without, confirm.unwrap().as_str()),
                (vec!["S1".into(), "S2".into()], "tank")
            );
        }
    }

    #[test]
    fn a_pool_is_taken_over_by_name() {
        let Ok(PoolCommand::Open { without, take_over, .. }) = pool("open tank --take-over") else {
            panic!("it is good")
        };
        assert!(take_over && without.is_empty());
    }

    #[test]
    fn a_volume_lies_in_one_place() {
        let create = |args: &str| {
            let words = format!("windrose volume create web --size 1G {args}");
            Cli::try_parse_from(words.split(' ')).is_ok()
        };
        assert!(create("--pool tank --thick --replicas 2"));
        assert!(!create("--pool tank --device /dev/a") && !create("--pool tank --path /a"));
    }
}

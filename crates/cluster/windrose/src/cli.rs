//! The command line: every command and option, and what its help says.

use std::path::PathBuf;

use api::client::ApiAddress;
use api::{BlockSize, Initiator, PoolName, RaidLevel, Size, VolumeName};
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use uuid::Uuid;

const EXIT_CODES: &str = "\
Exit codes:
  0  done; for `status`: the data is safe
  1  the node refused or failed; the message says why
  2  the command line is wrong
  3  no node answers
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
    /// Where the node's API is: unix:/path/to/socket or https://host:port.
    #[arg(
        long,
        global = true,
        help_heading = GLOBAL_HEADING,
        env = "WINDROSE_API",
        value_name = "ADDRESS",
        default_value = "unix:/run/windrose/api.sock"
    )]
    pub(crate) api: ApiAddress,
    /// File with the token that the API asks for over TCP.
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, env = "WINDROSE_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// PEM file with the certificates to trust instead of the system's.
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, env = "WINDROSE_CA_CERT", value_name = "FILE")]
    pub(crate) ca_cert: Option<PathBuf>,
    /// Print JSON, for programs.
    #[arg(long, global = true, help_heading = GLOBAL_HEADING)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a node, or keep one out of service for a while.
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
    /// Manage pools of disks of this node, for volumes to lie in.
    #[command(arg_required_else_help = true)]
    Pool {
        #[command(subcommand)]
        command: PoolCommand,
    },
    /// Serve a volume as a device of this machine, until told to stop.
    Attach(Box<AttachArgs>),
    /// Measure a volume, a file or a device, in fio's terms.
    Bench(crate::bench::BenchArgs),
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
    /// Configuration file; without it /etc/windrose/windrose.toml, or the defaults.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Check the configuration, and the certificate, key and token that it names, and do nothing
    /// else.
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
    /// Socket to listen at, where QEMU or another monitor finds a vhost-user disk for its virtual
    /// machine.
    #[arg(long, value_name = "PATH", group = "as")]
    pub(crate) vhost_user: Option<PathBuf>,
    /// Socket to listen at for NBD: QEMU, qemu-img, nbdcopy, nbd-client and their like.
    #[arg(long, value_name = "PATH", group = "as")]
    pub(crate) nbd: Option<PathBuf>,
    /// Make a block device of this machine, /dev/ublkbN, also to be found as
    /// /run/windrose/disks/NAME.
    #[arg(long, group = "as")]
    pub(crate) ublk: bool,
    /// Number of the block device (default: the first that is free).
    #[arg(long, value_name = "NUMBER", requires = "ublk", value_parser = clap::value_parser!(u32).range(..=1_048_575))]
    pub(crate) device_id: Option<u32>,
    /// Empty directory to show the volume in, as a file of its name: for loop devices, backup
    /// programs and their like.
    #[arg(long, value_name = "DIRECTORY", group = "as")]
    pub(crate) fuse: Option<PathBuf>,
    /// Permissions of that file, in octal. It belongs to whom the directory belongs to.
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode, requires = "fuse")]
    pub(crate) fuse_mode: u32,
    /// Refuse writes.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// How many queues the virtual machine may use, or the block device has: as many as there are
    /// processors, say.
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) queues: u16,
    /// How long requests wait in seconds while no node that serves the volume answers. Then this
    /// process ends, and who starts it anew lets its users go on.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub(crate) patience: u32,
    /// Name of this host (default: what /etc/nvme/hostnqn says, or one made of the machine's
    /// identity).
    #[arg(long, value_name = "NQN")]
    pub(crate) host_nqn: Option<Initiator>,
    /// Identifier of this host (default: what /etc/nvme/hostid says, or the one in its name, or one
    /// made of the machine's identity).
    #[arg(long, value_name = "UUID")]
    pub(crate) host_id: Option<Uuid>,
    #[command(flatten)]
    pub(crate) keys: HostKeyArgs,
}

/// What an NVMe host shares with a volume.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct HostKeyArgs {
    /// File with this host's secret, by which it proves who it is (DH-HMAC-CHAP), as
    /// `nvme gen-dhchap-key` makes it; `-` reads it from standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) dhchap_secret: Option<PathBuf>,
    /// File with the secret that the volume is to prove itself with; not the host's.
    #[arg(long, value_name = "FILE", requires = "dhchap_secret")]
    pub(crate) dhchap_ctrl_secret: Option<PathBuf>,
    /// File with the key by which connections are protected (TLS), as `nvme gen-tls-key` makes it;
    /// `-` reads it from standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// Keep a node of the cluster out of service.
    Drain {
        /// Its number or name; the node that is asked, if none is given.
        node: Option<String>,
    },
    /// Let a drained node serve again.
    Resume {
        /// Its number or name; the node that is asked, if none is given.
        node: Option<String>,
    },
    /// Have the next start of this node, which must not run, use its data directory as it is now:
    /// after a restore, or to begin anew with no volumes.
    AcceptDataDir {
        /// Configuration file of the node; without it /etc/windrose/windrose.toml, or the defaults.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The name of the node: accepts without asking.
        #[arg(long, value_name = "NAME")]
        confirm: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Make this node the first of a new cluster. Its volumes stay; initiators see a restart.
    Init {
        /// Without certificates: nodes and their store speak in plain text, and are open to
        /// everybody who reaches them.
        #[arg(long)]
        insecure: bool,
    },
    /// Make a token with which another node joins, and print it. Whoever has it can join: one node,
    /// within an hour.
    Token {
        #[command(subcommand)]
        command: Option<TokenCommand>,
    },
    /// List the nodes that have asked to join, and those that wait for approval.
    Joins,
    /// Let a node in that waits for approval.
    Approve {
        /// Identifier of its request, as `windrose cluster joins` shows it.
        id: String,
    },
    /// Keep a node out that waits for approval.
    Refuse {
        /// Identifier of its request, as `windrose cluster joins` shows it.
        id: String,
    },
    /// Make this node one of a cluster, to keep copies of volumes. It must have no volumes.
    Join(TokenArgs),
    /// Make this node the witness of a cluster: it has a vote, and keeps no data.
    Witness(TokenArgs),
    /// Have all nodes replace the cluster's secret and authority by new ones, while they serve:
    /// after a node was stolen or removed by force, whose disks somebody else may have. Tokens made
    /// before are revoked. Waits until it is done.
    Rotate,
    /// List the nodes and the members of the store.
    Nodes,
    /// Recover from the loss of the cluster's store, or of records: a new store if the old one is
    /// lost for good, volumes from what images tell. Shows what it would do, and asks.
    Recover {
        /// Do without the copies of this node, which may be newer: what only they hold is lost. May
        /// be repeated.
        #[arg(long, value_name = "NODE")]
        without: Vec<String>,
        /// Only show what would be done.
        #[arg(long)]
        plan: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Take this node out of its cluster.
    Leave {
        /// Take out this one, which does not come back: its number or name. Or a member of the
        /// store whose node never came: its name or address.
        #[arg(long)]
        node: Option<String>,
        /// Do not ask the others, or the one that is taken out.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make a token and print it. It is shown this once.
    Create {
        /// How many nodes may join with it.
        #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
        uses: u32,
        /// Any number of nodes may join with it.
        #[arg(long, conflicts_with = "uses")]
        unlimited: bool,
        /// How long it is valid, such as 30m, 1h or 7d.
        #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
        expires: u64,
        /// For witnesses only.
        #[arg(long)]
        witness: bool,
        /// Have each node wait until somebody lets it in by `windrose cluster approve`.
        #[arg(long)]
        approve: bool,
    },
    /// List the tokens: which let nodes in, how many yet, and until when.
    List,
    /// Take a token back: it lets nobody in any more.
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
    /// The name that would have to be typed when asked.
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
    /// Create a volume. Nobody can reach it until an initiator is allowed.
    Create(Box<CreateVolumeArgs>),
    /// List the volumes.
    List,
    /// Show a volume and how to connect to it.
    Show {
        /// Name of the volume.
        name: VolumeName,
    },
    /// Make a volume larger, while it serves.
    Grow {
        /// Name of the volume.
        name: VolumeName,
        /// Its new size, such as 20G.
        #[arg(long)]
        size: Size,
    },
    /// Manage the copies of a volume on the nodes of a cluster.
    #[command(arg_required_else_help = true)]
    Mirror {
        #[command(subcommand)]
        command: ReplicaCommand,
    },
    /// Choose the node that puts the writes of a volume in order.
    Switch {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the node. It keeps a copy, and takes over while that is in sync.
        #[arg(long, value_name = "NODE")]
        to: String,
    },
    /// Go on with the copy of the node that is asked, whatever the others hold. Acknowledged writes
    /// may be lost.
    Force {
        /// Name of the volume.
        name: VolumeName,
        /// The name once more, instead of typing it when asked.
        #[arg(long, value_name = "NAME")]
        confirm: Option<VolumeName>,
    },
    /// Take the image of a volume from the node that had it last and will never use it again.
    /// Refused while that node uses it.
    TakeOver {
        /// Name of the volume.
        name: VolumeName,
        /// The name once more, instead of typing it when asked.
        #[arg(long, value_name = "NAME")]
        confirm: Option<VolumeName>,
    },
    /// Show who has reserved a volume (SCSI), or take the reservations of hosts away that are no
    /// more.
    Reservations {
        /// Name of the volume.
        name: VolumeName,
        /// Take all registrations and reservations away. Hosts that keep each other out by them no
        /// longer do.
        #[arg(long)]
        clear: bool,
        /// Do not ask.
        #[arg(long, requires = "clear")]
        yes: bool,
    },
    /// List the images on this node that no record names as the copy of a volume.
    Orphans,
    /// Take an image that no record names as a volume, under its old name and targets.
    Adopt {
        /// The image: the path of a file or device, or POOL/VOLUME, as `windrose volume orphans`
        /// shows it.
        image: String,
        /// What the volume shall be called (default: what it was called).
        #[arg(long)]
        name: Option<VolumeName>,
        /// Do without the copy of this node, which may be newer: what only it holds is lost. May be
        /// repeated.
        #[arg(long, value_name = "NODE")]
        without: Vec<String>,
        /// Take it whatever other copies may hold that it lacks, and whatever is not known of it.
        #[arg(long)]
        force: bool,
        /// Only show what would be done.
        #[arg(long)]
        plan: bool,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Erase an image that no record names. What it holds is lost.
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
        /// Delete it even while no copy of it serves: what its copies hold is lost unseen.
        #[arg(long)]
        discard: bool,
    },
    /// Choose the protocols that export a volume.
    Export {
        /// Name of the volume.
        name: VolumeName,
        /// The protocols, all that there shall be: `both,vhost-user`.
        #[arg(long, value_delimiter = ',', required = true)]
        via: Vec<ExportProtocol>,
    },
    /// Choose the target that a volume stands behind, and its number there: LUN of the iSCSI
    /// target, and one less than the namespace identifier in the NVMe subsystem.
    #[command(group(clap::ArgGroup::new("choice").args(["join", "own", "lun"]).required(true).multiple(true)))]
    Target {
        /// Name of the volume.
        name: VolumeName,
        /// Stand behind the target and subsystem of this volume (its name, or the target's), with
        /// its secrets.
        #[arg(long, value_name = "VOLUME", conflicts_with = "own")]
        join: Option<String>,
        /// Stand behind its own target and subsystem again.
        #[arg(long)]
        own: bool,
        /// Logical unit number (default: the lowest that is free).
        #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(0..=255))]
        lun: Option<u16>,
        /// Do it even while initiators are logged in to the volume: they lose it where it was.
        #[arg(long)]
        force: bool,
    },
    /// Let initiators reach a volume.
    Allow {
        /// Name of the volume.
        name: VolumeName,
        /// Names of initiators (IQN or NQN), or `any` for whoever asks.
        #[arg(required = true)]
        initiators: Vec<Initiator>,
    },
    /// Stop initiators from reaching a volume, those that are logged in too.
    Deny {
        /// Name of the volume.
        name: VolumeName,
        /// Names of initiators as they were allowed.
        #[arg(required = true)]
        initiators: Vec<Initiator>,
    },
    /// Ask iSCSI initiators of a volume for CHAP, or no longer.
    Chap {
        /// Name of the volume.
        name: VolumeName,
        /// User of the initiator and the file with its secret; `-` reads it from standard input.
        #[arg(value_name = "USER:SECRET-FILE", required_unless_present = "off")]
        user: Option<ChapUserFile>,
        /// User of the volume and the file with its secret, for mutual CHAP.
        #[arg(long, value_name = "USER:SECRET-FILE", conflicts_with = "off")]
        mutual: Option<ChapUserFile>,
        /// Ask for CHAP no longer; with --initiator, ask that one for what all are asked for.
        #[arg(long, conflicts_with = "user")]
        off: bool,
        /// Only this initiator (IQN), which has a user and secret of its own then.
        #[arg(long, value_name = "INITIATOR")]
        initiator: Option<Initiator>,
    },
    /// Ask an NVMe host of a volume to prove that it has a secret (DH-HMAC-CHAP), or for its name
    /// alone.
    Dhchap {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the host (NQN).
        #[arg(long, value_name = "NQN")]
        host: Initiator,
        /// File with its secret, as `nvme gen-dhchap-key` makes it; `-` reads it from standard
        /// input.
        #[arg(long, value_name = "FILE", required_unless_present = "off")]
        secret: Option<PathBuf>,
        /// File with the secret that the volume proves itself with, if the host wants that; not the
        /// host's.
        #[arg(long, value_name = "FILE", conflicts_with = "off")]
        ctrl_secret: Option<PathBuf>,
        /// Ask that host for a proof no longer.
        #[arg(long, conflicts_with = "secret")]
        off: bool,
    },
    /// Have an NVMe host come to a volume by TLS, with a key that both have, or without.
    Tls {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the host (NQN).
        #[arg(long, value_name = "NQN")]
        host: Initiator,
        /// File with its key, as `nvme gen-tls-key` makes it; `-` reads it from standard input.
        #[arg(long, value_name = "FILE", required_unless_present = "off")]
        key: Option<PathBuf>,
        /// Let it come without TLS as well.
        #[arg(long, conflicts_with = "off")]
        optional: bool,
        /// Take its key away: it comes without TLS from now on.
        #[arg(long, conflicts_with = "key")]
        off: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Create a pool. What the disks hold is lost: one that holds something is refused by name.
    Create(Box<CreatePoolArgs>),
    /// List the pools.
    List,
    /// Show a pool, its disks, and what to do about those that have failed.
    Show {
        /// Name of the pool.
        name: PoolName,
    },
    /// Take a pool that disks of this machine hold and that the node does not know, with its
    /// volumes; without a name, list those that there are.
    Import {
        /// Name of the pool, or its identity.
        pool: Option<String>,
        /// Look for its disks at this block device or file (default: at every block device). May be
        /// repeated.
        #[arg(long, value_name = "PATH")]
        disk: Vec<PathBuf>,
        /// What it shall be called at this node (default: as it is).
        #[arg(long = "as", value_name = "NAME", requires = "pool")]
        name: Option<PoolName>,
    },
    /// Add disks to a pool, while it serves.
    Add {
        /// Name of the pool.
        name: PoolName,
        /// The disks: block devices, or files that have their size.
        #[arg(required = true, value_name = "DISK")]
        disks: Vec<PathBuf>,
        /// They take the place of disks that fail, and hold nothing until then.
        #[arg(long)]
        spare: bool,
        #[command(flatten)]
        overwrite: OverwriteArgs,
    },
    /// Take a disk out of a pool, while it serves. What lies on it is moved to the others first:
    /// refused without room for it.
    Remove {
        /// Name of the pool.
        name: PoolName,
        /// The disk: its serial number, a path to it, or its number in the pool. What means two
        /// disks is told apart by serial:, path: or number: before it.
        disk: String,
        /// Cancel a removal that is under way: the disk stays.
        #[arg(long)]
        cancel: bool,
    },
    /// Put a disk in the place of one that has failed or is to go, while the pool serves.
    Replace {
        /// Name of the pool.
        name: PoolName,
        /// The old disk: its serial number, a path to it, or its number in the pool (serial:, path:
        /// or number: before it, if that means two).
        disk: String,
        /// The new one: a block device, or a file that has its size.
        #[arg(long, value_name = "DISK")]
        with: PathBuf,
        #[command(flatten)]
        overwrite: OverwriteArgs,
    },
    /// Count the errors of a pool's disks anew, as when a cable was replaced; without a disk also
    /// forget which blocks scrubs could not repair.
    Clear {
        /// Name of the pool.
        name: PoolName,
        /// The disk: its serial number, a path to it, or its number in the pool (serial:, path: or
        /// number: before it, if that means two). All disks if none is named.
        disk: Option<String>,
    },
    /// Read and compare all of a pool, and repair what is wrong, while it serves.
    Scrub {
        /// Name of the pool.
        name: PoolName,
    },
    /// Open a pool without disks that are gone for good, or take it over from a node that is gone.
    /// What only disks hold that are gone is lost, and they never come back into it.
    Open {
        /// Name of the pool.
        name: PoolName,
        /// The disks: their serial numbers, paths, or numbers in the pool (serial:, path: or
        /// number: before them, if that means two).
        #[arg(long, required_unless_present = "take_over", num_args = 1.., value_name = "DISK")]
        without: Vec<String>,
        /// Take its disks from the node that had them last and will never use them again. Refused
        /// while that node uses them.
        #[arg(long)]
        take_over: bool,
        /// The pool's name once more, instead of typing it when asked.
        #[arg(long, value_name = "NAME")]
        confirm: Option<PoolName>,
    },
    /// Delete a pool without volumes: its disks are free again.
    Delete {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        confirm: ConfirmArgs,
        /// Forget it even if it cannot be opened. What its disks hold stays on them.
        #[arg(long)]
        force: bool,
    },
}

/// Disks that may be overwritten.
#[derive(Args, Debug)]
pub(crate) struct OverwriteArgs {
    /// Overwrite this disk although it holds something: its serial number, or its path if it has
    /// none. May be repeated.
    #[arg(long, value_name = "IDENTITY")]
    pub(crate) overwrite: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct CreatePoolArgs {
    /// Name of the pool: a-z, 0-9 and '-'.
    pub(crate) name: PoolName,
    /// RAID level: 0 (no disk may fail), 1 and 10 (copies), 5 (one may fail) or 6 (two may).
    #[arg(long, value_name = "LEVEL")]
    pub(crate) raid: RaidLevel,
    /// How many copies there shall be of everything, with RAID 1 and 10 (default: 2).
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(2..=4))]
    pub(crate) copies: Option<u8>,
    /// Over how many disks a stripe goes (default: over all).
    #[arg(long, value_name = "COUNT")]
    pub(crate) columns: Option<u16>,
    /// How much of a stripe lies on one disk: 16K, 32K, 64K or 128K.
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = parse_chunk_size)]
    pub(crate) strip: u32,
    /// Keep a checksum of each 4 KiB: a disk that gives back what was not written is found out, and
    /// set right at every level but 0. Cannot be changed later; costs some writes.
    #[arg(long)]
    pub(crate) checksums: bool,
    /// Disk that takes the place of one that fails. May be repeated.
    #[arg(long, value_name = "DISK")]
    pub(crate) spare: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) overwrite: OverwriteArgs,
    /// The disks: block devices, best by /dev/disk/by-id, or files that have their size.
    #[arg(required = true, value_name = "DISK")]
    pub(crate) disks: Vec<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ReplicaCommand {
    /// Add a copy on another node, and bring it in sync.
    Add {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the node that shall keep it (default: the cluster chooses).
        #[arg(long, value_name = "NODE")]
        on: Option<String>,
        #[command(flatten)]
        backing: BackingArgs,
    },
    /// Remove a copy, unless it is the last one in sync. The volume is to have one less from then
    /// on.
    Remove {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the node that keeps it.
        #[arg(long, value_name = "NODE")]
        on: String,
    },
    /// Replace a copy: by one on another node, which is brought in sync first, or a lost one by a
    /// new one in its place.
    Replace {
        /// Name of the volume.
        name: VolumeName,
        /// Name of the node that keeps the copy.
        #[arg(long, value_name = "NODE")]
        on: String,
        /// Name of the node that shall keep the new one (default: the same).
        #[arg(long, value_name = "NODE")]
        with: Option<String>,
        #[command(flatten)]
        backing: BackingArgs,
    },
    /// Set how many copies a volume is to have. What it lacks then is made by itself, after
    /// `cluster.repair_after_s`, or by `windrose volume mirror add`.
    Set {
        /// Name of the volume.
        name: VolumeName,
        /// How many: 1 to 3, and not fewer than it has.
        #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=3))]
        replicas: u8,
    },
    /// Compare the copies. To be asked at the node that puts writes in order. What differs stays a
    /// finding of the status until copies are equal again.
    Verify {
        /// Name of the volume.
        name: VolumeName,
        /// Make the copies equal where they differ. Which of them is right is not known: --keep
        /// says it.
        #[arg(long)]
        repair: bool,
        /// Name of the node whose contents all copies get where they differ.
        #[arg(long, value_name = "NODE", requires = "repair")]
        keep: Option<String>,
    },
}

/// Where a copy of a volume shall live on its node.
#[derive(Args, Debug)]
pub(crate) struct BackingArgs {
    /// File to hold the data, new or empty (default: one in the node's data directory).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["device", "pool"])]
    pub(crate) path: Option<PathBuf>,
    /// Block device to hold the data, all of it.
    #[arg(long, value_name = "DEVICE", conflicts_with = "pool")]
    pub(crate) device: Option<PathBuf>,
    /// Pool of disks to hold the data; each node that keeps a copy has one of this name.
    #[arg(long, value_name = "POOL")]
    pub(crate) pool: Option<PoolName>,
    /// Overwrite what the file or device holds.
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args, Debug)]
pub(crate) struct CreateVolumeArgs {
    /// Name of the volume: a-z, 0-9 and '-'. Several names create as many volumes, all alike.
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<VolumeName>,
    /// Its size, such as 10G. A volume on a device can do without: all of the device.
    #[arg(long, required_unless_present = "device")]
    pub(crate) size: Option<Size>,
    /// Take all of its space now instead of when it is written.
    #[arg(long)]
    pub(crate) thick: bool,
    /// Size of a logical block in bytes: 512 or 4096.
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = parse_block_size)]
    pub(crate) block_size: BlockSize,
    #[command(flatten)]
    pub(crate) backing: BackingArgs,
    /// How many copies there shall be, on as many nodes of the cluster: 1 to 3.
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u8).range(1..=3))]
    pub(crate) replicas: u8,
    /// Name of a node that shall keep a copy; the cluster chooses the rest. May be repeated.
    #[arg(long, value_name = "NODE")]
    pub(crate) on: Vec<String>,
    /// Protocols that export it, such as `both,vhost-user`.
    #[arg(long, value_delimiter = ',', default_value = "both")]
    pub(crate) via: Vec<ExportProtocol>,
    /// Initiator that may reach it (IQN or NQN), or `any`. May be repeated.
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
    /// iSCSI only.
    Iscsi,
    /// NVMe/TCP only.
    Nvme,
    /// iSCSI and NVMe/TCP.
    Both,
    /// Virtual machines beside its nodes, each at the node's own socket.
    VhostUser,
    /// Nobody can reach the volume.
    None,
}

/// Converts export options to the API's protocols.
pub(crate) fn to_protocols(via: &[ExportProtocol]) -> api::Protocols {
    let names = |one: ExportProtocol| via.contains(&one);
    api::Protocols {
        iscsi: names(ExportProtocol::Iscsi) || names(ExportProtocol::Both),
        nvme: names(ExportProtocol::Nvme) || names(ExportProtocol::Both),
        vhost_user: names(ExportProtocol::VhostUser),
    }
}

/// A user name and the file with its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChapUserFile {
    pub(crate) user: String,
    pub(crate) file: PathBuf,
}

impl std::str::FromStr for ChapUserFile {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.split_once(':') {
            Some((user, file)) if !user.is_empty() && !file.is_empty() => {
                Ok(Self { user: user.to_owned(), file: file.into() })
            }
            _ => {
                Err("use USER:SECRET-FILE; the secret itself has no place on a command line".into())
            }
        }
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
        let made = token(" create --unlimited --expires 7d --witness --approve");
        let Ok(Some(TokenCommand::Create {
            unlimited: true,
            expires,
            witness: true,
            approve: true,
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
        let of = |via: &str| {
            let words = ["windrose", "volume", "export", "web", "--via", via];
            let Ok(Cli { command: Command::Volume { command }, .. }) = Cli::try_parse_from(words)
            else {
                panic!("it is good")
            };
            let VolumeCommand::Export { via, .. } = command else { panic!() };
            let api::Protocols { iscsi, nvme, vhost_user } = to_protocols(&via);
            [iscsi, nvme, vhost_user]
        };
        assert_eq!(of("both"), [true, true, false]);
        assert_eq!(of("both,vhost-user"), [true; 3]);
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
        assert_eq!((args.disks.len(), args.spare.len(), args.strip), (3, 2, 65536));
        assert_eq!((args.raid, args.copies, args.columns), (RaidLevel::Raid5, None, None));
        let made = pool(
            "create tank --raid 10 --copies 3 --columns 6 --strip 128K --checksums --overwrite S1 --overwrite /f a b",
        );
        let Ok(PoolCommand::Create(args)) = made else { panic!("it is good") };
        assert_eq!(args.overwrite.overwrite, ["S1", "/f"]);
        assert_eq!((args.copies, args.columns, args.strip), (Some(3), Some(6), 131_072));
        assert!(args.checksums);
        for bad in [
            "create tank /dev/a",
            "create tank --raid 5",
            "create tank --raid 4 /dev/a",
            "create Tank --raid 5 /dev/a",
            "create tank --raid 5 --strip 8K /dev/a",
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

    #[test]
    fn secrets_are_named_by_file() {
        let parsed: ChapUserFile = "u:/etc/a:b".parse().unwrap();
        assert_eq!((parsed.user.as_str(), parsed.file), ("u", "/etc/a:b".into()));
        for bad in ["u", "u:", ":f", ""] {
            assert!(bad.parse::<ChapUserFile>().unwrap_err().contains("USER:SECRET-FILE"));
        }
    }
}

//! Volumes: requests and responses.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

use crate::{Access, ApiError, Chap, Initiator, InvalidValue, PoolName, VolumeName, VolumeReplica};

/// Size of a logical block.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "u32", into = "u32")]
pub enum BlockSize {
    /// 512 bytes (512e over media of 4 KiB).
    #[default]
    B512,
    /// 4096 bytes (4Kn).
    B4096,
}

impl BlockSize {
    /// The block size in bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            Self::B512 => 512,
            Self::B4096 => 4096,
        }
    }
}

impl PartialSchema for BlockSize {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::Integer)
            .description(Some("Size of a logical block in bytes."))
            .enum_values(Some([512, 4096]))
            .into()
    }
}

impl ToSchema for BlockSize {}

impl TryFrom<u32> for BlockSize {
    type Error = InvalidValue;

    fn try_from(bytes: u32) -> Result<Self, InvalidValue> {
        match bytes {
            512 => Ok(Self::B512),
            4096 => Ok(Self::B4096),
            other => Err(InvalidValue::new("block size", &other.to_string(), "use 512 or 4096")),
        }
    }
}

impl From<BlockSize> for u32 {
    fn from(size: BlockSize) -> Self {
        size.bytes()
    }
}

/// The protocols a volume is exported by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Protocols {
    /// Over iSCSI.
    pub iscsi: bool,
    /// Over NVMe/TCP.
    pub nvme: bool,
    /// To virtual machines beside its nodes, by vhost-user (default: not): to any process that
    /// may open the socket.
    #[serde(default, skip_serializing_if = "is_false")]
    pub vhost_user: bool,
}

// For serde: omit unset flags, which older nodes do not know.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(flag: &bool) -> bool {
    !*flag
}

impl Default for Protocols {
    fn default() -> Self {
        Self { iscsi: true, nvme: true, vhost_user: false }
    }
}

/// Where a new volume's data shall live.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum NewBacking {
    /// A file, new or empty. Without a path, a new one in the node's data directory.
    File {
        /// Absolute path.
        #[schema(value_type = Option<String>)]
        #[serde(default)]
        path: Option<PathBuf>,
    },
    /// A whole block device.
    Device {
        /// Absolute path, such as one under `/dev/disk/by-id`.
        #[schema(value_type = String)]
        path: PathBuf,
    },
    /// A part of a pool of the node's disks.
    Pool {
        /// Its name.
        pool: PoolName,
    },
}

impl Default for NewBacking {
    fn default() -> Self {
        Self::File { path: None }
    }
}

/// Where a volume's data lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Backing {
    /// A file.
    File {
        /// Absolute path.
        #[schema(value_type = String)]
        path: PathBuf,
    },
    /// A block device.
    Device {
        /// Absolute path.
        #[schema(value_type = String)]
        path: PathBuf,
    },
    /// A part of a pool of the node's disks.
    Pool {
        /// Its name.
        pool: PoolName,
    },
}

impl Backing {
    /// Path of the file or device, if it is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File { path } | Self::Device { path } => Some(path),
            Self::Pool { .. } => None,
        }
    }

    /// The pool that holds it, if any.
    #[must_use]
    pub fn pool(&self) -> Option<&PoolName> {
        match self {
            Self::File { .. } | Self::Device { .. } => None,
            Self::Pool { pool } => Some(pool),
        }
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path } | Self::Device { path } => path.display().fmt(f),
            Self::Pool { pool } => write!(f, "pool {pool}"),
        }
    }
}

/// A volume to be created. Asking twice for the same is answered as if it was created then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVolumeRequest {
    /// Its name.
    pub name: VolumeName,
    /// Its size in bytes: 1 MiB to 256 TiB, a multiple of the block size. A device may leave it
    /// out: all of the device.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Size of a logical block: 512 (default) or 4096.
    #[serde(default)]
    pub block_size: BlockSize,
    /// Whether space is taken when it is written (default) or all of it now.
    #[serde(default = "default_thin")]
    pub thin: bool,
    /// Where the data lives; with several replicas, on each of their nodes.
    #[serde(default)]
    pub backing: NewBacking,
    /// Number of replicas, on as many nodes: 1 (default) to 3.
    #[serde(default = "default_replicas")]
    pub replicas: u8,
    /// Names of nodes that get replicas; the cluster chooses the others.
    #[serde(default)]
    #[schema(max_items = 3)]
    pub nodes: Vec<String>,
    /// The protocols that export it (default: all).
    #[serde(default)]
    pub protocols: Protocols,
    /// Who may reach it (default: no initiator).
    #[serde(default)]
    #[schema(max_items = 1024)]
    pub allow: Vec<Initiator>,
    /// What iSCSI initiators must prove.
    #[serde(default)]
    pub chap: Option<Chap>,
    /// Whether to overwrite what the file or device holds. Otherwise it must hold nothing.
    #[serde(default)]
    pub force: bool,
}

/// Volumes to be created, in one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVolumesRequest {
    /// The volumes, 256 at most.
    #[schema(min_items = 1, max_items = 256)]
    pub volumes: Vec<CreateVolumeRequest>,
}

/// Most volumes that one request creates.
pub const MAX_VOLUMES_PER_REQUEST: usize = 256;

/// What became of volumes that were to be created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateVolumeResults {
    /// Each of them, in the order in which they were asked for.
    pub volumes: Vec<CreateVolumeResult>,
}

/// What became of a volume that was to be created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateVolumeResult {
    /// Its name.
    pub name: VolumeName,
    /// The volume, if it is there.
    pub volume: Option<Volume>,
    /// Why it is not.
    pub error: Option<ApiError>,
}

fn default_replicas() -> u8 {
    1
}

fn default_thin() -> bool {
    true
}

/// A new size for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GrowVolumeRequest {
    /// The size in bytes, at least the present one.
    pub size_bytes: u64,
}

/// Initiators to allow or to deny.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InitiatorList {
    /// Their names.
    #[schema(max_items = 1024)]
    pub initiators: Vec<Initiator>,
}

/// What state a volume is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum VolumeState {
    /// It serves.
    Online,
    /// Other nodes serve it, this node does not.
    Remote {
        /// Why this node does not.
        reason: String,
    },
    /// It does not serve.
    Offline {
        /// Why not.
        reason: String,
    },
    /// It is being created.
    Creating,
    /// It is being opened: the node is starting.
    Opening,
    /// It is being deleted.
    Deleting,
}

/// Another volume of a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TargetLun {
    /// Logical unit number.
    pub lun: u16,
    /// Its name.
    pub volume: VolumeName,
}

/// Which target and subsystem a volume shall stand behind, and as what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MapVolume {
    /// The name of the target, or of the volume that it belongs to: the volume's own name for its
    /// own target. Without one it stays where it is.
    #[serde(default)]
    #[schema(max_length = 223)]
    pub target: Option<String>,
    /// Logical unit number, 0 to 255, one less than the namespace identifier. Without one it stays,
    /// or is the lowest that is free at another target.
    #[serde(default)]
    #[schema(maximum = 255)]
    pub lun: Option<u16>,
}

/// How iSCSI initiators reach a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IscsiExport {
    /// Name of the target.
    pub target: String,
    /// Logical unit number.
    pub lun: u16,
    /// The volume whose target that is: this one, unless it was put behind another's.
    pub owner: VolumeName,
    /// The other logical units of the target.
    pub other_luns: Vec<TargetLun>,
    /// Addresses the node listens at, `ip:port`.
    pub portals: Vec<String>,
}

/// How NVMe hosts reach a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NvmeExport {
    /// Qualified name of the subsystem.
    pub subsystem: String,
    /// Namespace identifier.
    pub namespace: u32,
    /// Addresses the node listens at, `ip:port`.
    pub portals: Vec<String>,
}

/// How virtual machines beside a node reach a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostUserExport {
    /// The Unix socket on this node, where it keeps a replica and has a directory for sockets.
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
}

/// What has been done with a volume since the node opened it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeIo {
    /// Reads completed.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes completed.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Commands that failed.
    pub errors: u64,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Its name.
    pub name: VolumeName,
    /// Its identity, the same for as long as it exists.
    pub id: Uuid,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Size of a logical block.
    pub block_size: BlockSize,
    /// Whether space is taken when it is written.
    pub thin: bool,
    /// Its replicas, by node.
    pub replicas: Vec<VolumeReplica>,
    /// How many replicas it should have. If one is missing, that is a finding of the status.
    pub replicas_wanted: u8,
    /// Space that this node's replica takes, in bytes, if that is known.
    pub allocated_bytes: Option<u64>,
    /// State it is in.
    pub state: VolumeState,
    /// Who may reach it.
    pub access: Access,
    /// How iSCSI initiators reach it, where it is exported by iSCSI.
    pub iscsi: Option<IscsiExport>,
    /// How NVMe hosts reach it, where it is exported by NVMe/TCP.
    pub nvme: Option<NvmeExport>,
    /// How virtual machines beside the node reach it, where it is exported by vhost-user.
    #[serde(default)]
    pub vhost_user: Option<VhostUserExport>,
    /// Sessions that are logged in to it.
    pub sessions: u32,
    /// When it was created, in seconds since the Unix epoch.
    pub created_s: u64,
    /// What has been done with it, while it is online.
    pub io: Option<VolumeIo>,
}

/// All volumes, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeList {
    /// The volumes.
    pub volumes: Vec<Volume>,
    /// Why the list may be incomplete or out of date: the node has not read its store yet, or does
    /// not reach it.
    #[serde(default)]
    pub stale_reason: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_a_size_are_enough() {
        let v: CreateVolumeRequest =
            serde_json::from_str(r#"{"name":"a","size_bytes":1048576}"#).unwrap();
        assert!(v.thin && v.allow.is_empty() && v.chap.is_none());
        assert_eq!(v.backing, NewBacking::File { path: None });
        assert_eq!(v.protocols, Protocols { iscsi: true, nvme: true, vhost_user: false });
        assert_eq!(v.block_size, BlockSize::B512);
        assert_eq!((v.replicas, v.nodes.len()), (1, 0));
    }

    #[test]
    fn what_a_client_sends_comes_back_the_same() {
        let json = r#"{"name":"a","size_bytes":1048576,"block_size":4096,"thin":false,
            "backing":{"kind":"device","path":"/dev/x"},"protocols":{"iscsi":true,"nvme":false,"vhost_user":true},
            "allow":["any"],"chap":{"user":"u","secret":"0123456789ab",
            "mutual":{"user":"m","secret":"ba9876543210"}},"force":true,"replicas":2,"nodes":["b"]}"#;
        let v: CreateVolumeRequest = serde_json::from_str(json).unwrap();
        let again = serde_json::from_str(&serde_json::to_string(&v).unwrap()).unwrap();
        assert_eq!(v, again);
    }

    #[test]
    fn older_nodes_hear_of_vhost_user_where_it_is_asked_for() {
        let text = |vhost_user| {
            serde_json::to_string(&Protocols { vhost_user, ..Protocols::default() }).unwrap()
        };
        assert_eq!(text(false), r#"{"iscsi":true,"nvme":true}"#);
        assert_eq!(text(true), r#"{"iscsi":true,"nvme":true,"vhost_user":true}"#);
    }

    #[test]
    fn a_backing_is_known_by_its_path_or_its_pool() {
        let of = |json: &str| serde_json::from_str::<Backing>(json).unwrap();
        let pool = of(r#"{"kind":"pool","pool":"tank"}"#);
        assert_eq!((pool.to_string().as_str(), pool.path()), ("pool tank", None));
        assert_eq!(pool.pool().unwrap().as_str(), "tank");
        let device = of(r#"{"kind":"device","path":"/dev/x"}"#);
        assert_eq!((device.to_string().as_str(), device.pool()), ("/dev/x", None));
    }

    #[test]
    fn misspelt_fields_are_refused() {
        for json in [
            r#"{"name":"a","size":1048576}"#,
            r#"{"name":"a","block_size":1024}"#,
            r#"{"name":"a","backing":{"kind":"file","pfad":"/x"}}"#,
            r#"{"name":"a","backing":{"kind":"tape"}}"#,
            r#"{"name":"a","backing":{"kind":"pool"}}"#,
            r#"{"name":"a","backing":{"kind":"pool","pool":"No"}}"#,
            r#"{"name":"a","protocols":{"iscsi":true}}"#,
            r#"{"name":"a","allow":["everyone"]}"#,
        ] {
            assert!(serde_json::from_str::<CreateVolumeRequest>(json).is_err(), "{json}");
        }
    }
}

//! Orphaned images, and how they become volumes again.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{Pool, PoolName, Volume, VolumeName};

/// An image on a node that no record names as a replica of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OrphanedImage {
    /// Where it is, as commands name it: the path of a file or device, or POOL/VOLUME.
    pub image: String,
    /// The volume whose data it holds.
    pub volume: Uuid,
    /// What the volume was called, if the image tells.
    pub name: Option<VolumeName>,
    /// Size of the volume, in bytes.
    pub size_bytes: u64,
    /// The volume that exists under the image's volume identity, if there is one: its record does
    /// not name this image.
    pub existing_volume: Option<VolumeName>,
    /// The epoch of the mirror that it was last a replica of, if it was.
    pub epoch: Option<u64>,
    /// What is wrong with it.
    pub problem: Option<String>,
    /// The next step, with the command.
    pub hint: String,
}

/// Images that no record names, by where they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OrphanedImages {
    /// The images.
    pub images: Vec<OrphanedImage>,
}

/// Take an image that no record names as a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptImageRequest {
    /// Where it is: the absolute path of a file or device, or POOL/VOLUME.
    pub image: String,
    /// What the volume shall be called (default: what it was called).
    #[serde(default)]
    pub name: Option<VolumeName>,
    /// Names of nodes whose replicas may be newer and are left out.
    #[serde(default)]
    pub without: Vec<String>,
    /// Whether to take it although other replicas may be newer, or how new it is is unknown.
    #[serde(default)]
    pub force: bool,
    /// Whether only to show the plan and change nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// What was done with an image, or would be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdoptedImage {
    /// What becomes of it.
    pub plan: PlannedVolume,
    /// The volume, unless it was a dry run.
    pub volume: Option<Volume>,
}

/// Erase an image that no record names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiscardImageRequest {
    /// Where it is: the absolute path of a file or device, or POOL/VOLUME.
    pub image: String,
    /// The volume whose data it holds: what it holds is lost.
    pub confirm: Uuid,
}

/// A replica in a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedReplica {
    /// Name of the node.
    pub node: String,
    /// Where the image is there.
    pub image: String,
    /// The epoch of the mirror that it was last a replica of, if it was.
    pub epoch: Option<u64>,
    /// Whether it was in sync then.
    pub in_sync: bool,
}

/// What is to become of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedVolume {
    /// Its identity.
    pub volume: Uuid,
    /// What it is called, or will be.
    pub name: Option<VolumeName>,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// The replica that it continues from.
    pub source: Option<PlannedReplica>,
    /// Replicas that are resynced from that one.
    pub resync_replicas: Vec<PlannedReplica>,
    /// What there is to know, or to do afterwards.
    pub notes: Vec<String>,
    /// Why the replica to continue from cannot be chosen, and what would help.
    pub ambiguity: Option<String>,
}

/// Recover the cluster: a new store, if the old one is lost, and volumes from what images tell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RecoverClusterRequest {
    /// Name of the node that is asked: with it the plan is carried out, without it only shown.
    #[serde(default)]
    pub confirm: Option<String>,
    /// Names of nodes whose replicas may be newer and are left out.
    #[serde(default)]
    pub without: Vec<String>,
}

/// A new store in the place of one that is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplacementStore {
    /// The cluster that it replaces.
    pub replaced_cluster: Uuid,
    /// Addresses of the lost members of its store.
    pub lost_members: Vec<String>,
    /// Why they count as lost: what asking them returned.
    pub reason: String,
}

/// What recovery has done, or would do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RecoveryPlan {
    /// Name of the node that is asked, which confirms the plan.
    pub node: String,
    /// The new store, if the cluster's is lost. Volumes come when it is there.
    pub store: Option<ReplacementStore>,
    /// Volumes.
    pub volumes: Vec<PlannedVolume>,
    /// Names of the nodes that did not report which images they have.
    #[serde(default)]
    pub unresponsive_nodes: Vec<String>,
    /// Whether the plan was carried out.
    pub applied: bool,
}

/// A pool that disks of this node hold and that the node does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImportablePool {
    /// Its identity.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// Paths of its disks.
    #[schema(value_type = Vec<String>)]
    pub disks: Vec<std::path::PathBuf>,
    /// What is wrong with it.
    pub problem: Option<String>,
}

/// Pools that could be imported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImportablePools {
    /// The pools.
    pub pools: Vec<ImportablePool>,
}

/// Look for pools that the node does not know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FindPools {
    /// Where to look (default: at every block device).
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub disks: Vec<std::path::PathBuf>,
}

/// Take a pool that the node does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportPoolRequest {
    /// Its name or its identity.
    pub pool: String,
    /// What it shall be called at this node (default: as it is).
    #[serde(default)]
    pub name: Option<PoolName>,
    /// Where to look for its disks (default: at every block device).
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub disks: Vec<std::path::PathBuf>,
}

/// A pool that was imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImportedPool {
    /// The pool.
    pub pool: Pool,
    /// What has become of its volumes that no record named.
    pub volumes: Vec<PlannedVolume>,
}

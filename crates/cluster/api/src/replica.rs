//! The replicas of a volume, and the operations on them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Backing, NewBacking, VolumeName};

/// State of a replica of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum ReplicaState {
    /// It holds every acknowledged write.
    InSync,
    /// It lacks writes, or everything, and is being resynced.
    Resyncing {
        /// Bytes copied.
        done_bytes: u64,
        /// Bytes to copy in all.
        total_bytes: u64,
        /// Seconds until it is in sync, where that can be told.
        eta_s: Option<u64>,
        /// The first ranges that no replica can read: it is in sync once they have been rewritten.
        #[serde(default)]
        unreadable: Vec<ByteRange>,
    },
    /// It lacks writes, and is not being resynced.
    OutOfSync,
    /// It is being created.
    Creating,
    /// It is being removed.
    Removing,
    /// It could not be created.
    Failed {
        /// Why not.
        reason: String,
    },
    /// The metadata store has not said.
    Unknown,
}

/// Bytes of a volume that no replica can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ByteRange {
    /// Byte at which they begin.
    pub start_bytes: u64,
    /// How many there are.
    pub bytes: u64,
}

/// One replica of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeReplica {
    /// Name of the node that keeps it.
    pub node: String,
    /// Where it lives there.
    pub backing: Backing,
    /// How good it is.
    pub state: ReplicaState,
    /// Why it is not in sync, or what else is the matter with it.
    #[serde(default)]
    pub reason: Option<String>,
    /// The next step then.
    #[serde(default)]
    pub hint: Option<String>,
    /// Whether its node puts writes in order.
    pub primary: bool,
}

/// A replica to be added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddReplicaRequest {
    /// Name of the node that shall keep it; the cluster chooses one if there is none.
    #[serde(default)]
    pub node: Option<String>,
    /// Where it shall live there.
    #[serde(default)]
    pub backing: NewBacking,
    /// Whether to overwrite what the file or device holds. Otherwise it must hold nothing.
    #[serde(default)]
    pub force: bool,
}

/// A replica to be removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveReplicaRequest {
    /// Name of the node that keeps it.
    pub node: String,
}

/// How many replicas a volume should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetReplicaCountRequest {
    /// The number, 1 to 3, and not less than it has.
    #[schema(minimum = 1, maximum = 3)]
    pub replicas: u8,
}

/// A replica to be replaced: by one on another node, which is resynced first, or by a new one on
/// the same node, whose image is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaceReplicaRequest {
    /// Name of the node that keeps it.
    pub node: String,
    /// Name of the node that shall keep the new one (default: the same).
    #[serde(default)]
    pub with: Option<String>,
    /// Where the new one shall live.
    #[serde(default)]
    pub backing: NewBacking,
    /// Whether to overwrite what the file or device holds. Otherwise it must hold nothing.
    #[serde(default)]
    pub force: bool,
}

/// Who shall put writes in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SwitchPrimaryRequest {
    /// Name of the node.
    pub node: String,
}

/// Continue with the replica of this node alone, although others may be newer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForcePrimaryRequest {
    /// The volume's name once more: acknowledged writes may be lost.
    pub confirm: VolumeName,
}

/// Take the image of a volume from the node that had it last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeOver {
    /// The volume's name once more: that node must not use the image any more.
    pub confirm: VolumeName,
}

/// How to compare the replicas of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Verify {
    /// Name of the node whose data is copied to the other replicas where they differ. The cluster
    /// does not know which replica is right: without a name nothing is written.
    #[serde(default)]
    pub source: Option<String>,
}

/// A range in which replicas differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MismatchRange {
    /// Where it begins, in bytes.
    pub start_bytes: u64,
    /// How long it is, in bytes.
    pub bytes: u64,
    /// Name of the node whose contents are not the primary's.
    pub node: String,
}

/// Result of a comparison of the replicas of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Verification {
    /// Names of the nodes whose replicas were compared: those in sync.
    #[serde(default)]
    pub replicas: Vec<String>,
    /// Names of the nodes whose replicas were not compared, because they are not in sync.
    #[serde(default)]
    pub skipped: Vec<String>,
    /// Bytes that were compared.
    pub compared_bytes: u64,
    /// Ranges that could not be read from every replica.
    pub unreadable_ranges: u64,
    /// Bytes of all ranges in which replicas differ.
    pub mismatched_bytes: u64,
    /// The ranges in which replicas differ; the first thousand.
    pub mismatches: Vec<MismatchRange>,
    /// Bytes that were written to replicas because they differed.
    pub repaired_bytes: u64,
}

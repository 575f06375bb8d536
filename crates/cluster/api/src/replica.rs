//! The replicas of a volume, and the operations on them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Backing, NewBacking, VolumeName};

/// How good a copy of a volume is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum ReplicaState {
    /// It holds everything that was acknowledged.
    InSync,
    /// It lacks what was written while it was away, or everything, and is being brought in sync.
    Resyncing {
        /// Bytes copied.
        done_bytes: u64,
        /// Bytes to copy in all.
        total_bytes: u64,
        /// Seconds until it is in sync, where that can be told.
        eta_s: Option<u64>,
        /// The first ranges that no copy can read: it is in sync when they have been written.
        #[serde(default)]
        unreadable: Vec<ByteRange>,
    },
    /// It lacks what was written while it was away, and nobody brings it in sync now.
    Outdated,
    /// It is being made.
    BeingMade,
    /// It is being removed.
    Leaving,
    /// It could not be made.
    Failed {
        /// Why not.
        reason: String,
    },
    /// The metadata store has not said.
    Unknown,
}

/// Bytes of a volume that no copy can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ByteRange {
    /// Byte at which they begin.
    pub start_bytes: u64,
    /// How many there are.
    pub bytes: u64,
}

/// One copy of a volume.
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

/// A copy to be added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddReplica {
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

/// A copy to be removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveReplica {
    /// Name of the node that keeps it.
    pub node: String,
}

/// How many copies a volume is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetReplicaCount {
    /// The number, 1 to 3, and not less than it has.
    #[schema(minimum = 1, maximum = 3)]
    pub replicas: u8,
}

/// A copy to be replaced: by one on another node, which is brought in sync first, or by a new one
/// on the same node, whose image is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaceReplica {
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
pub struct SwitchPrimary {
    /// Name of the node.
    pub node: String,
}

/// Go on with the copy of this node alone, whatever the others may hold that it lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForcePrimary {
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

/// How to compare the copies of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Verify {
    /// Name of the node whose contents all copies get where they differ. Which copy is right is not
    /// known to the cluster: without a name nothing is written.
    #[serde(default)]
    pub keep: Option<String>,
}

/// A range in which copies differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MismatchRange {
    /// Where it begins, in bytes.
    pub at_bytes: u64,
    /// How long it is, in bytes.
    pub len_bytes: u64,
    /// Name of the node whose contents are not the primary's.
    pub node: String,
}

/// What comparing the copies of a volume has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Verification {
    /// Names of the nodes whose copies were compared: those in sync.
    #[serde(default)]
    pub copies: Vec<String>,
    /// Names of the nodes whose copies were not, as they are not in sync.
    #[serde(default)]
    pub left_out: Vec<String>,
    /// Bytes that were compared.
    pub compared_bytes: u64,
    /// Ranges that some copy could not be read in.
    pub unreadable: u64,
    /// Bytes of all ranges in which copies differ.
    pub differing_bytes: u64,
    /// Where copies differ; the first thousand ranges.
    pub differing: Vec<MismatchRange>,
    /// Bytes that were written to all copies because some differed.
    pub repaired_bytes: u64,
}

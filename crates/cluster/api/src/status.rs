//! The status: whether the data is safe, and why.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The answer in a word. Ordered: the worst finding decides.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every volume serves, and nothing is about to go wrong.
    Safe,
    /// Every volume serves; a finding needs attention before service is lost.
    AtRisk,
    /// At least one volume does not serve.
    Unavailable,
}

impl Verdict {
    /// The exit code of `windrose status`.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Safe => 0,
            Self::AtRisk => 5,
            Self::Unavailable => 6,
        }
    }
}

/// How much a finding matters.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Information; no action needed.
    Note,
    /// Act soon.
    Warning,
    /// Data is unavailable now.
    Critical,
}

/// One thing that the status is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// What it is about, such as "volume web".
    pub subject: String,
    /// What is the matter.
    pub message: String,
    /// The next step, where there is one.
    pub hint: Option<String>,
}

/// The node that answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeInfo {
    /// Its name.
    pub name: String,
    /// Version of the program.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Its data directory.
    #[schema(value_type = String)]
    pub data_dir: PathBuf,
    /// Cores that serve.
    pub cores: u32,
    /// How disks are reached: `io_uring`, or `threads` where that is forbidden.
    pub disk_backend: String,
}

/// How many volumes are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeCounts {
    /// All of them.
    pub total: u32,
    /// Those that serve.
    pub online: u32,
    /// Those that do not.
    pub offline: u32,
}

/// Space in the node's data directory and promised to volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Capacity {
    /// Sum of the sizes of all volumes, in bytes.
    pub provisioned_bytes: u64,
    /// Size of the file system of the data directory, in bytes.
    pub data_dir_bytes: u64,
    /// Free space in it, in bytes.
    pub data_dir_free_bytes: u64,
}

/// Buffer memory of all cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Memory {
    /// Its size, in bytes.
    pub total_bytes: u64,
    /// What is neither in use nor reserved, in bytes.
    pub free_bytes: u64,
    /// Commands that wait for memory.
    pub waiting_commands: u64,
}

/// State of the node: the verdict and what it is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Is my data safe?
    pub verdict: Verdict,
    /// Whether the node reaches no other node: then it does not know the state of volumes that
    /// other nodes serve, and counts them as unavailable.
    #[serde(default)]
    pub isolated: bool,
    /// Why the verdict is what it is, worst first.
    pub findings: Vec<Finding>,
    /// The node.
    pub node: NodeInfo,
    /// Its volumes.
    pub volumes: VolumeCounts,
    /// Sessions of initiators.
    pub sessions: u32,
    /// Space.
    pub capacity: Capacity,
    /// Memory.
    pub memory: Memory,
}

/// Whether the node answers and serves. For load balancers and probes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// Version of the program.
    pub version: String,
    /// Whether it has opened its volumes and accepts initiators.
    pub serving: bool,
}

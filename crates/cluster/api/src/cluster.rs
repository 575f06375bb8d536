//! The node's cluster, if it is in one.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// How far a node has come on its way into a cluster or out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClusterStage {
    /// In no cluster.
    Standalone,
    /// Creating a cluster, and moving its volumes' records there.
    Creating,
    /// Joining a cluster.
    Joining,
    /// A member of the cluster.
    Member,
    /// Leaving the cluster.
    Leaving,
}

/// What a node is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeRole {
    /// Keeps replicas of volumes, and serves them.
    Data,
    /// Runs a member of the cluster's store, and keeps no data.
    Witness,
}

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterNode {
    /// Its number.
    pub node: u16,
    /// Its name.
    pub name: String,
    /// What it is for.
    pub role: NodeRole,
    /// Whether it runs, as far as the store knows.
    pub alive: bool,
    /// Whether it is kept out of service.
    pub drained: bool,
    /// Where other nodes reach it.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<SocketAddr>,
    /// What it fails together with.
    pub failure_domain: String,
    /// Its version of the program.
    pub version: String,
}

/// A member of the cluster's store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreMember {
    /// Its name; where the others would reach it, if it has never started.
    pub name: String,
    /// Where clients reach it.
    pub urls: Vec<String>,
    /// Whether it is a voter; otherwise it is a learner.
    pub voter: bool,
    /// What is the matter with it, if anything, as it was seen a few seconds ago.
    pub problem: Option<String>,
}

/// The cluster as a node sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cluster {
    /// How far this node has come.
    pub stage: ClusterStage,
    /// The cluster's identity; nothing for a node that is alone.
    pub id: Option<Uuid>,
    /// This node's number.
    pub node: Option<u16>,
    /// What this node is for.
    pub role: Option<NodeRole>,
    /// What this node waits for, if it does not get on.
    pub waits_for: Option<String>,
    /// All nodes.
    pub nodes: Vec<ClusterNode>,
    /// Why what is shown of other nodes may be out of date: it was so when the store answered last.
    #[serde(default)]
    pub stale_reason: Option<String>,
    /// The members of the store, where they can be asked.
    pub store: Vec<StoreMember>,
    /// How far its secret and authority are replaced by new ones, while they are.
    #[serde(default)]
    pub rotation: Option<Rotation>,
}

/// What all nodes do while the secret and the authority of their cluster are replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RotationStage {
    /// Each node receives the new credentials, and accepts them beside the old ones.
    Distribute,
    /// Each node presents the new ones, and accepts the old ones as well.
    Activate,
    /// Each node drops the old ones.
    DropOld,
}

/// The secret and the authority of a cluster are being replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rotation {
    /// How far all nodes are.
    pub stage: RotationStage,
    /// When it began, in seconds since 1970.
    pub started_s: u64,
    /// Names of the nodes that the others wait for.
    pub waits_for: Vec<String>,
    /// Why the node that was asked does not get on, if so.
    pub problem: Option<String>,
}

/// What lets another node into the cluster, as often and as long as it says. Any machine that has
/// it can join.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct CreatedToken {
    /// One word. It is shown this once: nothing keeps it.
    pub token: String,
    /// What the cluster knows of it.
    pub info: TokenInfo,
}

impl std::fmt::Debug for CreatedToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterToken(..)")
    }
}

/// A token is to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CreateTokenRequest {
    /// How many nodes it lets in: 1 unless said otherwise; `null` for any number.
    pub uses: Option<u32>,
    /// How long it is valid, in seconds: one hour by default, at most 366 days.
    pub lifetime_s: u64,
    /// What it lets a node be; whatever the node wants, if that is not said.
    pub role: Option<NodeRole>,
    /// Whether an administrator must approve each node.
    pub requires_approval: bool,
}

impl Default for CreateTokenRequest {
    fn default() -> Self {
        Self { uses: Some(1), lifetime_s: 3600, role: None, requires_approval: false }
    }
}

/// Whether a node can join with a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenState {
    /// It admits nodes.
    Valid,
    /// All its uses are consumed.
    UsedUp,
    /// It has expired.
    Expired,
    /// It was revoked.
    Revoked,
}

/// A token, without its secret part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenInfo {
    /// Its identifier, eight hex digits.
    pub id: String,
    /// Whether a node can join with it.
    pub state: TokenState,
    /// How many more nodes can join with it; `null` for any number.
    pub remaining_uses: Option<u32>,
    /// Until when, in seconds since 1970.
    pub expires_s: u64,
    /// What it lets a node be; `null` for whatever that wants.
    pub role: Option<NodeRole>,
    /// Whether an administrator must approve each node.
    pub requires_approval: bool,
    /// The node at which it was created.
    pub created_by: String,
    /// When, in seconds since 1970.
    pub created_s: u64,
}

/// The tokens of a cluster; those that are over are shown for a week.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenList {
    /// The newest first.
    pub tokens: Vec<TokenInfo>,
}

/// How far a request to join has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JoinState {
    /// It waits for approval.
    Waiting,
    /// Approved; the node has not fetched its grant yet.
    Approved,
    /// Refused by an administrator.
    Refused,
    /// Its token ended before the node was admitted.
    Ended,
    /// Admitted; the node is on its way into the cluster.
    Admitted,
    /// The node is a member of the cluster.
    Joined,
}

/// A request to join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JoinInfo {
    /// Its identifier, eight hex digits.
    pub id: String,
    /// The name of the node.
    pub name: String,
    /// What it wants to be.
    pub role: NodeRole,
    /// Where other nodes reach it, as it says.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<SocketAddr>,
    /// The address that the request came from.
    #[schema(value_type = String)]
    pub requested_from: std::net::IpAddr,
    /// Its version of the program.
    pub version: String,
    /// The token that it showed.
    pub token: String,
    /// When the request was made, in seconds since 1970.
    pub requested_s: u64,
    /// How far it has come.
    pub state: JoinState,
    /// The number that it was given.
    pub node: Option<u16>,
    /// The node at which it was approved or refused.
    pub decided_by: Option<String>,
}

/// The requests to join a cluster; those that are over are shown for a week.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JoinList {
    /// The newest first.
    pub joins: Vec<JoinInfo>,
}

/// Names a token or a request to join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EntryId {
    /// Its identifier, eight hex digits.
    pub id: String,
}

/// A node is to begin a cluster.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InitClusterRequest {
    /// Whether its nodes and their store speak in plain text: without certificates, and open to
    /// any client that reaches them.
    pub insecure: bool,
}

/// A node is to join a cluster.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JoinClusterRequest {
    /// The cluster's token.
    pub token: String,
    /// What the node is to be.
    pub role: NodeRole,
}

impl std::fmt::Debug for JoinClusterRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinClusterRequest").field("role", &self.role).finish_non_exhaustive()
    }
}

/// A node is to leave the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeaveClusterRequest {
    /// Number or name of another node than the one that is asked, which does not come back; or name
    /// or peer address of a member of the store whose node never became one of the cluster.
    #[serde(default)]
    pub node: Option<String>,
    /// Without the agreement of the node that is to leave and of those that it leaves.
    #[serde(default)]
    pub force: bool,
}

/// Names a node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeSelector {
    /// Its number or name; the node that is asked, if none is given.
    #[serde(default)]
    pub node: Option<String>,
}

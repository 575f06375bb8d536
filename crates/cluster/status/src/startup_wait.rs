//! What a node waits for while it enters its cluster, and the next step.

use cluster::store::StoreError;

use crate::UNTRUSTED_STORE_HINT;

/// Hint for a node whose cluster goes on without it.
pub const REJOIN_HINT: &str = "if the cluster has removed this node: run `windrose cluster \
    leave --force` here, then `windrose cluster join` with a new token (`windrose cluster token` \
    at a node of the cluster). Images are kept";

/// Hint for a node that waits for its cluster.
pub const RETRIES_HINT: &str =
    "the node retries automatically; `windrose cluster nodes` shows the progress";

/// Hint for a running node whose store has lost most of its members for good.
pub const LOST_QUORUM_HINT: &str = "if a majority of its members is lost for good, and no \
    other node has recovered the cluster: restart windrose on this node (systemctl restart \
    windrose; it then stops serving), then run `windrose cluster recover --dry-run` here \
    (docs/guides/recovery.md)";

/// What a node waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartupWait {
    /// The reason.
    pub reason: String,
    /// The next step.
    pub next_step: String,
    /// Whether the cluster is known to go on without this node, which was removed.
    pub is_removed_from_cluster: bool,
}

impl StartupWait {
    /// A wait that ends by itself.
    pub fn transient(what: impl Into<String>) -> Self {
        Self {
            reason: what.into(),
            next_step: RETRIES_HINT.to_owned(),
            is_removed_from_cluster: false,
        }
    }

    /// A member cannot read its volumes from the store.
    pub fn for_store(error: &StoreError) -> Self {
        let wait = Self::transient(error.to_string());
        match error {
            StoreError::Unreachable { .. } => {
                Self { next_step: format!("{RETRIES_HINT}; {LOST_QUORUM_HINT}"), ..wait }
            }
            StoreError::TlsRejected { .. } => {
                Self { next_step: UNTRUSTED_STORE_HINT.to_owned(), ..wait }
            }
            _ => wait,
        }
    }
}

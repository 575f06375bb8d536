//! What a node concludes from facts, without I/O: its status for people, and decisions about
//! replicas. Facts go in as plain data, and findings, texts and decisions come out.
//!
//! * [`node_facts`], [`verdict`]: the facts of a node, the findings about them and the verdict;
//! * [`cluster_view`], [`store_view`], [`nodes`]: the cluster, its store and its nodes as one node
//!   sees them;
//! * [`report`], [`resync_progress`]: what nodes report about themselves;
//! * [`volume_status`], [`replica_state`], [`pool_status`], [`space`]: volumes, replicas, pools and
//!   space as the API shows them, with reasons and hints;
//! * [`not_serving`], [`startup_wait`], [`old_images`], [`orphan_images`]: reasons and hints;
//! * [`placement`], [`repair`], [`recovery_choice`]: which nodes get replicas, when a missing one
//!   is replaced, and from which replica a volume without a usable record goes on;
//! * [`metrics`]: the facts as metrics.

mod client_findings;
pub mod clock_findings;
mod cluster_findings;
pub mod cluster_view;
pub mod memory;
pub mod metrics;
pub mod node_facts;
pub mod nodes;
pub mod not_serving;
pub mod old_images;
pub mod orphan_images;
pub mod placement;
pub mod pool_status;
pub mod recovery_choice;
pub mod repair;
pub mod replica_state;
pub mod report;
pub mod resync_progress;
#[cfg(any(test, feature = "testing"))]
pub mod samples;
pub mod space;
pub mod startup_wait;
pub mod store_view;
mod unserved_volumes;
pub mod verdict;
mod volume_findings;
pub mod volume_status;

use api::{Finding, Severity};

pub use cluster_view::ClusterView;
pub use node_facts::NodeFacts;
pub use verdict::assess;

/// Hint for a store whose certificates this node does not trust, or the reverse.
pub const UNTRUSTED_STORE_HINT: &str = "the members of the store use certificates of another authority \
    than this node's. If the cluster now uses a new store, or has removed this node: run `windrose \
    cluster leave --force` here, then `windrose cluster join` with a new token (`windrose cluster \
    token` at a node of the cluster); images are kept. If you supply the certificates: \
    cluster.tls_cert and those of the store's members must be issued by the authority in \
    cluster.tls_ca, be valid today, and name the addresses of their machines";

/// Hint for damaged records.
pub const RESTORE_HINT: &str = "restore the store from a backup: docs/guides/administration.md, section \
    \"When the store is damaged\"";

/// Hint for conditions that end by themselves.
pub(crate) const WAIT_HINT: &str = "wait: this resolves itself";

/// A finding about `subject`, with the next step as its hint.
pub fn finding(
    severity: Severity,
    subject: impl Into<String>,
    message: impl Into<String>,
    hint: Option<&str>,
) -> Finding {
    let (subject, message, hint) = (subject.into(), message.into(), hint.map(Into::into));
    Finding { severity, subject, message, hint }
}

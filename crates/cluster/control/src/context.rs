//! What all parts of the control plane share: settings, store, data plane, the volumes known here,
//! and the node's place in its cluster.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use api::{ApiError, ErrorCode, VolumeName};
use cluster::identity::Role;
use cluster::store::{MetadataStore, Revision, StoreError};
use engine::Engine;
use engine::joined_cluster::JoinedCluster;
use membership::ClusterMembership;
use peer::NodeId;
use records::reconcile::ThisProcess;
use records::record::{self, FIRST_NODE, StoredVolumeRecord};
use status::report::{self, NodeReport};
use status::startup_wait::StartupWait;
use tokio::sync::{RwLock, watch};
use tokio::time::Instant;
use uuid::Uuid;

use crate::errors::conflict;
use crate::node_probe::NodeProbe;
use crate::settings::ControlSettings;
use crate::volume_table::VolumeTable;

/// What all parts of the control plane share.
pub(crate) struct Context {
    pub(crate) settings: ControlSettings,
    pub(crate) meta: Arc<dyn MetadataStore>,
    pub(crate) engine: Engine,
    pub(crate) volumes: VolumeTable,
    /// The node's cluster membership; `None` for a standalone node.
    pub(crate) cluster_membership: Option<Arc<ClusterMembership>>,
    /// The cluster that the node belongs to, once it is a member.
    pub(crate) joined_cluster: OnceLock<JoinedCluster>,
    /// What the start waits for, if anything.
    startup_wait: Mutex<Option<StartupWait>>,
    /// Whether the node is to restart its services.
    pub(crate) restart: watch::Sender<bool>,
    /// Held for reading while a volume is created, for writing while the node enters a cluster.
    pub(crate) creation_lock: Arc<RwLock<()>>,
    /// Held for reading by every change, for writing once no more changes are accepted.
    pub(crate) change_lock: Arc<RwLock<()>>,
    /// The last report request that this node has received, see
    /// [`report_requests`](crate::report_requests).
    pub(crate) last_report_request: watch::Sender<u64>,
    /// The reports of other nodes as last read, with the revisions that wrote them.
    reports: Mutex<BTreeMap<NodeId, (Revision, NodeReport)>>,
    /// Which nodes respond.
    pub(crate) node_probe: NodeProbe,
    pub(crate) started: Instant,
    /// Identifies this run of the node's process.
    process_id: Uuid,
}

impl Context {
    /// The context of a node that has opened nothing yet.
    pub(crate) fn new(
        settings: ControlSettings,
        meta: Arc<dyn MetadataStore>,
        engine: Engine,
        membership: Option<Arc<ClusterMembership>>,
    ) -> Self {
        Self {
            settings,
            meta,
            engine,
            volumes: VolumeTable::default(),
            cluster_membership: membership,
            joined_cluster: OnceLock::new(),
            startup_wait: Mutex::default(),
            restart: watch::Sender::new(false),
            creation_lock: Arc::default(),
            change_lock: Arc::default(),
            last_report_request: watch::Sender::new(0),
            reports: Mutex::default(),
            node_probe: NodeProbe::default(),
            started: Instant::now(),
            process_id: Uuid::new_v4(),
        }
    }

    /// The cluster that the node belongs to; `None` for a standalone node, or one that is not a
    /// member yet. Set before any volume is opened.
    pub(crate) fn joined_cluster(&self) -> Option<&JoinedCluster> {
        self.joined_cluster.get()
    }

    pub(crate) fn this_node(&self) -> NodeId {
        self.joined_cluster().map_or(FIRST_NODE, |m| m.node)
    }

    /// This run of this node's process.
    pub(crate) fn this_process(&self) -> ThisProcess {
        ThisProcess { node: self.this_node(), process: self.process_id }
    }

    /// Whether this node keeps replicas.
    pub(crate) fn is_data_node(&self) -> bool {
        self.joined_cluster().is_none_or(|m| m.role == Role::Data)
    }

    /// Whether this node is drained.
    pub(crate) fn is_drained(&self) -> bool {
        self.joined_cluster().is_some_and(|m| {
            m.nodes.borrow().get(&m.node).is_some_and(|node| node.record.is_drained)
        })
    }

    /// Fails on a node that keeps no data.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] for a witness.
    pub(crate) fn check_data_node(&self) -> Result<(), ApiError> {
        match self.cluster_membership.as_ref().map(|membership| membership.identity().role) {
            Some(Role::Witness) => Err(conflict(
                format!("node {} is a witness and keeps no data", self.settings.name),
                "ask a node that keeps data; `windrose cluster nodes` shows them",
            )),
            Some(Role::Data) | None => Ok(()),
        }
    }

    /// The name of a node.
    pub(crate) fn node_name(&self, node: NodeId) -> String {
        let nodes = self.joined_cluster().map(|m| m.nodes.borrow());
        let known = nodes.as_ref().and_then(|nodes| Some(nodes.get(&node)?.record.name.clone()));
        known.unwrap_or_else(|| {
            if node == self.this_node() {
                self.settings.name.clone()
            } else {
                format!("number {node}")
            }
        })
    }

    /// The name of a volume.
    pub(crate) fn volume_name(&self, id: Uuid) -> String {
        let known = self.volumes.get(id);
        known.map_or_else(|| id.to_string(), |(stored, _)| stored.record.name.to_string())
    }

    /// The identity of the volume called `name`.
    pub(crate) fn volume_id(&self, name: &VolumeName) -> Result<Uuid, ApiError> {
        self.volumes.id_by_name(name).ok_or_else(|| {
            if !self.volumes.has_read_store() {
                let message = format!("cannot tell yet whether volume {name} exists");
                let why = self.startup_wait().map_or_else(
                    || "the node is starting: try again in a moment".to_owned(),
                    |StartupWait { reason: what, next_step: next, .. }| {
                        format!("this node waits for its cluster: {what}. Next step: {next}")
                    },
                );
                return ApiError::new(ErrorCode::Unavailable, message).with_hint(why);
            }
            ApiError::new(ErrorCode::NotFound, format!("there is no volume {name}"))
                .with_hint("`windrose volume list` shows the volumes")
        })
    }

    /// Whether volumes are open and initiators accepted.
    pub(crate) fn is_serving(&self) -> bool {
        self.volumes.is_serving()
    }

    /// Records what the start waits for; logs changes.
    pub(crate) fn set_startup_wait(&self, new: Option<StartupWait>) {
        let mut wait = self.startup_wait.lock().unwrap_or_else(PoisonError::into_inner);
        if *wait != new {
            if let Some(StartupWait { reason: what, next_step: next, .. }) = &new {
                tracing::info!(what, next, "waiting to join the cluster");
            }
            *wait = new;
        }
    }

    pub(crate) fn startup_wait(&self) -> Option<StartupWait> {
        self.startup_wait.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn startup_wait_reason(&self) -> Option<String> {
        self.startup_wait().map(|wait| wait.reason)
    }

    /// The error for changes while this node does not serve.
    pub(crate) fn not_serving(&self) -> ApiError {
        match self.startup_wait() {
            Some(wait) => {
                let message = format!("this node waits for its cluster: {}", wait.reason);
                ApiError::new(ErrorCode::Unavailable, message).with_hint(wait.next_step)
            }
            None => ApiError::new(ErrorCode::Unavailable, "the node is starting or stopping")
                .with_hint("try again in a moment"),
        }
    }

    /// Runs a change to its end, even if the client disconnects.
    pub(crate) async fn run_to_completion<T, F>(&self, change: F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>> + Send + 'static,
        T: Send + 'static,
    {
        let permit = Arc::clone(&self.change_lock).try_read_owned();
        let Some(permit) = permit.ok().filter(|_| self.is_serving()) else {
            return Err(self.not_serving());
        };
        let change = async move {
            let answer = change.await;
            drop(permit);
            answer
        };
        tokio::spawn(change).await.unwrap_or_else(|e| {
            tracing::error!(error = %e, "a change panicked");
            Err(ApiError::new(ErrorCode::Internal, "the node failed; see its log"))
        })
    }

    /// Reads the current record of a volume from the store.
    pub(crate) async fn read_volume_record(
        &self,
        id: Uuid,
    ) -> Result<Option<StoredVolumeRecord>, StoreError> {
        let entry = self.meta.get(&record::volume_key(id)).await?;
        entry.as_ref().map(record::decode).transpose()
    }

    /// The last reports of the nodes.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(crate) async fn reports(&self) -> Result<BTreeMap<NodeId, NodeReport>, StoreError> {
        let (entries, _) = self.meta.list(report::REPORTS).await?;
        let node = |key: &str| key.strip_prefix(report::REPORTS)?.parse().ok().map(NodeId);
        let mut read = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = BTreeMap::new();
        for (node, entry) in entries.iter().filter_map(|e| Some((node(&e.key)?, e))) {
            // Parsing is slow, and reports are read more often than they change.
            let report = match read.remove(&node).filter(|(at, _)| *at == entry.revision) {
                Some((_, report)) => report,
                None => match serde_json::from_slice(&entry.value) {
                    Ok(report) => report,
                    Err(_) => continue,
                },
            };
            all.insert(node, (entry.revision, report));
        }
        read.clone_from(&all);
        Ok(all.into_iter().map(|(node, (_, report))| (node, report)).collect())
    }
}

/// The time, in seconds since 1970.
#[expect(clippy::disallowed_methods, reason = "the control plane is no core")]
pub(crate) fn now_s() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map(|d| d.as_secs()).unwrap_or_default()
}

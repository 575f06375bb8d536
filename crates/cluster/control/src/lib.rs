//! The control plane of a node: carries out API requests and reconciles the node with the store.
//!
//! # Invariants
//! * The store decides. A change is durable in the store before it is acknowledged and before it
//!   takes effect; [`records::reconcile`] derives from there what the node does.
//! * Steps for one volume happen one at a time, under its lock; volumes do not wait for each other.
//! * A change that a client asked for completes even if the client disconnects.

pub mod cluster_control;
mod cluster_view;
mod context;
mod data_loss_guard;
mod device_stack;
mod errors;
mod facts;
mod isns;
mod node_probe;
mod node_removal;
mod old_images;
mod orphan_images;
mod peers;
mod periodic_tasks;
mod pool_volumes;
pub mod pools;
mod reconciler;
mod recovery;
mod repair;
mod replicas;
mod report_requests;
mod reservations;
mod reserved_paths;
mod secrets;
mod settings;
mod space;
mod startup_wait;
mod store_audit;
mod target_mapping;
mod volume_edit;
mod volume_lifecycle;
mod volume_status;
mod volume_table;
mod volume_usage;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use api::{ApiError, VolumeName};
use cluster::identity::Role;
use cluster::mirror_records;
use futures_util::StreamExt;
use peer::NodeId;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use uuid::Uuid;

use cluster::store::{MetadataStore, Revision, StoreError};
use cluster_control::ClusterControl;
use context::Context;
use engine::joined_cluster::JoinedCluster;
use engine::{ClusterContext, Engine, PeerAddresses};
use membership::secret_keys::SecretKeys;
use membership::{ClusterMembership, MembershipOutcome};
use pool_volumes::VolumesOfPools;
use pools::PoolControl;
use records::catalog;
use records::record::image_description::{DescriptionSource, ImageDescription};
use records::record::{self, StoredVolumeRecord, VOLUMES, VolumeRecord};
use secrets::SecretControl;
pub use settings::ControlSettings;
use startup_wait::wait_after_error;
use status::report::NodeReport;
use status::startup_wait::StartupWait;
use volume_table::VolumeRecords;

/// How often volumes that failed to open are retried.
const FAILED_VOLUME_RETRY: Duration = Duration::from_secs(30);

/// How many volumes are reconciled at a time when all of them are.
const RECONCILE_CONCURRENCY: usize = 64;

/// Pause between attempts while the node starts.
const STARTUP_RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Most steps that one reconciliation of a volume takes; more means that it makes no progress.
const MAX_RECONCILE_STEPS: usize = 32;

/// The control plane. Cheap to clone.
#[derive(Clone)]
pub struct Control(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    /// The secrets of volumes.
    secrets: SecretControl,
    /// The pools of disks of this node.
    pools: PoolControl,
    /// The cluster of this node.
    cluster: ClusterControl,
    /// What is registered for this node at the iSNS server.
    isns_registration: std::sync::Mutex<Option<isns::IsnsRegistration>>,
    /// Held while the catalog is built and handed to the cores; counts the catalogs.
    catalog_generation: Mutex<u64>,
    /// Images on this node that are not served.
    unserved_images: std::sync::Mutex<orphan_images::UnservedImages>,
    /// Background tasks.
    tasks: std::sync::Mutex<JoinSet<()>>,
    /// Tasks that keep the node's cluster state current; they outlive the engine.
    cluster_tasks: std::sync::Mutex<JoinSet<()>>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control")
            .field("settings", &self.0.context.settings)
            .finish_non_exhaustive()
    }
}

impl Control {
    /// Creates the control plane over a store and a data plane. It does nothing until
    /// [`Self::start`].
    #[must_use]
    pub fn new(settings: ControlSettings, meta: Arc<dyn MetadataStore>, engine: Engine) -> Self {
        Self::with_store(settings, meta, engine, None)
    }

    /// Creates the control plane of a node that is, or becomes, a member of a cluster.
    #[must_use]
    pub fn in_cluster(
        settings: ControlSettings,
        engine: Engine,
        membership: ClusterMembership,
    ) -> Self {
        let store = Arc::new(membership.store().clone());
        Self::with_store(settings, store, engine, Some(Arc::new(membership)))
    }

    fn with_store(
        settings: ControlSettings,
        meta: Arc<dyn MetadataStore>,
        engine: Engine,
        membership: Option<Arc<ClusterMembership>>,
    ) -> Self {
        let identity = membership.as_ref().map(|membership| membership.watch_identity());
        let keys = SecretKeys::new(&settings.data_dir, identity);
        let secrets = SecretControl::new(keys, Arc::clone(&meta));
        let context = Arc::new(Context::new(settings, meta, engine, membership));
        Self(Arc::new_cyclic(|inner: &Weak<Inner>| Inner {
            cluster: ClusterControl::new(Arc::clone(&context)),
            pools: PoolControl::new(
                Arc::clone(&context),
                Box::new(VolumesOfPools(Weak::clone(inner))),
            ),
            context,
            secrets,
            isns_registration: std::sync::Mutex::default(),
            catalog_generation: Mutex::new(0),
            unserved_images: std::sync::Mutex::default(),
            tasks: std::sync::Mutex::default(),
            cluster_tasks: std::sync::Mutex::default(),
        }))
    }

    /// The data plane.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.0.context.engine
    }

    /// The cluster that the node belongs to; `None` for a standalone node, or one that is not a
    /// member yet. Set before any volume is opened.
    #[must_use]
    pub fn joined_cluster(&self) -> Option<&JoinedCluster> {
        self.0.context.joined_cluster()
    }

    /// Whether volumes are open and initiators accepted.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.0.context.is_serving()
    }

    /// Fails on a node that keeps no data.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] for a witness.
    pub fn check_data_node(&self) -> Result<(), ApiError> {
        self.0.context.check_data_node()
    }

    /// The pools of disks of this node.
    #[must_use]
    pub fn pools(&self) -> &PoolControl {
        &self.0.pools
    }

    /// The cluster of this node.
    #[must_use]
    pub fn cluster(&self) -> &ClusterControl {
        &self.0.cluster
    }

    /// Waits until the node is to restart its services because its cluster membership changes.
    pub async fn wait_restart_request(&self) {
        // This node owns the sender: an error cannot occur.
        let _ = self.0.context.restart.subscribe().wait_for(|wanted| *wanted).await;
    }

    /// Opens and exports the volumes in the store, finishes or rolls back what a crash interrupted,
    /// and accepts initiators. Volumes that cannot be opened stay offline; [`Self::status`] says
    /// so. In a cluster all of this happens in the background, as soon as the store answers.
    ///
    /// # Errors
    /// [`StoreError`] when the embedded store cannot be read.
    pub async fn start(&self) -> Result<(), StoreError> {
        match self.0.context.cluster_membership.clone() {
            None => {
                self.0.pools.open_pools().await;
                self.spawn(self.0.pools.clone().maintain_pools());
                self.open_and_serve().await
            }
            Some(membership) => {
                self.spawn(self.clone().join_and_serve(membership));
                Ok(())
            }
        }
    }

    /// Waits until another process takes over this node's identity; returns the locations of that
    /// process and of this one, for people.
    pub async fn wait_replaced(&self) -> (String, String) {
        match &self.0.context.cluster_membership {
            Some(membership) => {
                let (other, own) = membership.wait_replaced().await;
                (other.describe_location(), own.describe_location())
            }
            None => std::future::pending().await,
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(task);
    }

    /// Connects the data plane to the other nodes. A witness needs no such connections.
    async fn connect_data_plane(&self, joined: &JoinedCluster) -> Result<(), String> {
        if joined.role == Role::Witness {
            return Ok(());
        }
        let config::Cluster { listen, heartbeat, resyncs, .. } = &self.0.context.settings.cluster;
        let at = PeerAddresses { data: listen.clone(), heartbeat: heartbeat.clone() };
        let context = ClusterContext::new(joined, at, *resyncs).map_err(|e| e.to_string())?;
        self.0.context.engine.join_cluster(context).await.map(drop).map_err(|e| e.to_string())
    }

    async fn open_and_serve(&self) -> Result<(), StoreError> {
        let revision = self.reconcile_all().await?;
        self.0.context.volumes.set_serving(true);
        self.0.context.engine.accept_clients().await;
        self.0.context.set_startup_wait(None);
        let ControlSettings { name, portals, .. } = &self.0.context.settings;
        let (cores, disks) = (self.0.context.engine.cores(), self.0.context.engine.disk_backend());
        let took_ms =
            u64::try_from(self.0.context.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(
            name, cores, disks, took_ms,
            iscsi = ?portals.iscsi, nvme = ?portals.nvme, discovery = ?portals.discovery,
            "serving"
        );
        self.spawn(self.clone().watch_records(VOLUMES, record::volume_of_key, revision));
        if let Some(joined) = self.joined_cluster() {
            let nodes = joined.nodes.clone();
            self.spawn(self.clone().watch_records(
                mirror_records::KEY_PREFIX,
                mirror_records::volume_of_key,
                revision,
            ));
            self.spawn(self.clone().watch_nodes(nodes));
            self.spawn(Arc::clone(&self.0.context).watch_report_requests());
            self.spawn(self.clone().run_periodic_tasks());
            self.spawn(self.0.cluster.clone().serve_joins());
            self.spawn(self.0.cluster.clone().clean_up_admission());
        }
        self.spawn(self.clone().watch_images());
        self.spawn(self.clone().retry_failed_volumes());
        self.spawn(self.clone().reseal_periodically());
        if let Some(server) = self.0.context.settings.isns.clone() {
            self.spawn(self.clone().maintain_isns_registration(server));
        }
        self.spawn(self.clone().publish_space_periodically());
        Ok(())
    }

    /// Joins the cluster, or resumes membership, and serves.
    async fn join_and_serve(self, membership: Arc<ClusterMembership>) {
        self.0.context.engine.reserve_peer_memory().await;
        self.0.pools.open_pools().await;
        self.spawn(self.0.pools.clone().maintain_pools());
        let became = loop {
            match membership.advance_stage().await {
                Ok(became) => break became,
                Err(error) => {
                    let (what, identity) =
                        (membership.explain_error(&error), membership.identity());
                    let name = &self.0.context.settings.name;
                    self.0
                        .context
                        .set_startup_wait(Some(wait_after_error(&error, what, &identity, name)));
                }
            }
            tokio::time::sleep(STARTUP_RETRY_PAUSE).await;
        };
        let mut tasks = match became {
            MembershipOutcome::Member(joined, tasks) => {
                while let Err(why) = self.connect_data_plane(&joined).await {
                    self.0.context.set_startup_wait(Some(StartupWait::transient(why)));
                    tokio::time::sleep(STARTUP_RETRY_PAUSE).await;
                }
                let _ = self.0.context.joined_cluster.set(*joined);
                tasks
            }
            MembershipOutcome::Standalone => {
                self.0.context.restart.send_replace(true);
                return;
            }
        };
        tasks.spawn(Arc::clone(&membership).poll_store_health());
        tasks.spawn(Arc::clone(&membership).drive_rotation());
        if membership.runs_own_store() {
            tasks.spawn(Arc::clone(&membership).maintain_store_members());
        }
        *self.0.cluster_tasks.lock().unwrap_or_else(PoisonError::into_inner) = tasks;
        while let Err(error) = self.open_and_serve().await {
            self.0.context.set_startup_wait(Some(StartupWait::for_store(&error)));
            tokio::time::sleep(STARTUP_RETRY_PAUSE).await;
        }
    }

    /// Refuses further changes, and waits for those in progress.
    pub async fn stop(&self) {
        self.0.context.volumes.set_serving(false);
        let _none = self.0.context.change_lock.write().await;
        let mut tasks = {
            let mut tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *tasks)
        };
        tasks.shutdown().await;
        self.deregister_isns().await;
    }

    /// Stops the store member, once the engine needs the store no more: the engine updates mirror
    /// records when it leaves mirrors.
    pub async fn stop_store_member(&self) {
        let mut tasks = std::mem::take(
            &mut *self.0.cluster_tasks.lock().unwrap_or_else(PoisonError::into_inner),
        );
        tasks.shutdown().await;
        if let Some(membership) = &self.0.context.cluster_membership {
            membership.stop().await;
        }
    }

    /// Reconciles every volume that the store or the node knows; returns the revision of the list
    /// that it began with.
    async fn reconcile_all(&self) -> Result<Revision, StoreError> {
        let (entries, revision) = self.0.context.meta.list("").await?;
        let store_audit::StoreAudit {
            volumes,
            mut mirrors,
            unreadable_mirrors: lost_mirrors,
            damaged,
        } = store_audit::audit(&entries);
        let mut listed = BTreeMap::new();
        volumes.iter().for_each(|stored| self.0.context.volumes.update_if_newer(stored.clone()));
        self.0.context.volumes.set_has_read_store();
        for stored in volumes {
            let id = stored.record.id;
            // A list may be outdated: volumes that are to be created or erased are read again.
            if stored.record.is_ready_on(self.this_node()) && !lost_mirrors.contains(&id) {
                let mirror = mirrors.remove(&id).filter(|_| self.joined_cluster().is_some());
                listed.insert(id, VolumeRecords { stored: Some(stored), mirror });
            }
        }
        let before = self.0.context.volumes.damaged_records();
        for damage in damaged.iter().filter(|damage| !before.contains(damage)) {
            tracing::error!(damage, "damaged record in the store; its object is not touched");
        }
        self.0.context.volumes.set_damaged_records(damaged);
        let known = self.0.context.volumes.ids().into_iter().map(|id| (id, listed.remove(&id)));
        let known: Vec<_> = known.collect();
        futures_util::stream::iter(known)
            .for_each_concurrent(RECONCILE_CONCURRENCY, |(id, records)| async move {
                match records {
                    Some(records) => self.reconcile_with(id, records).await,
                    None => self.reconcile_volume(id).await,
                }
            })
            .await;
        Ok(revision)
    }

    /// Follows changes of the records under `prefix`.
    async fn watch_records(self, prefix: &str, of: fn(&str) -> Option<Uuid>, mut from: Revision) {
        loop {
            let mut watch = self.0.context.meta.watch(prefix, from);
            loop {
                match watch.next_event().await {
                    Ok(event) => {
                        from = event.revision;
                        if let Some(id) = of(&event.key) {
                            self.0.context.volumes.notify_changed(id);
                            self.reconcile_in_background(id);
                        }
                    }
                    Err(StoreError::Compacted { .. }) => break,
                    Err(error) => {
                        tracing::debug!(%error, "store watch ended");
                        return;
                    }
                }
            }
            match self.reconcile_all().await {
                Ok(revision) => from = revision,
                Err(error) => {
                    tracing::error!(%error, "cannot list the store; retrying");
                    tokio::time::sleep(FAILED_VOLUME_RETRY).await;
                }
            }
        }
    }

    /// Reconciles a volume in a task of its own.
    fn reconcile_in_background(&self, id: Uuid) {
        if let Ok(change) = Arc::clone(&self.0.context.change_lock).try_read_owned() {
            // Changes that arrive while a task waits for the lock are handled by that task.
            if !self.0.context.volumes.enqueue(id) {
                return;
            }
            let control = self.clone();
            tokio::spawn(async move {
                let lock = control.0.context.volumes.lock_of(id);
                let guard = lock.lock().await;
                control.0.context.volumes.dequeue(id);
                control.reconcile_locked(id).await;
                drop(guard);
                drop(change);
            });
        }
    }

    /// Retries volumes that failed to open, for as long as the node serves.
    async fn retry_failed_volumes(self) {
        loop {
            tokio::time::sleep(FAILED_VOLUME_RETRY).await;
            if !self.is_serving() {
                return;
            }
            if self.joined_cluster().is_some()
                && let Err(error) = self.reconcile_all().await
            {
                tracing::debug!(%error, "cannot list the store; retrying");
            }
            for id in self.0.context.volumes.failed_to_open() {
                let lock = self.0.context.volumes.lock_of(id);
                let _held = lock.lock().await;
                self.0.context.volumes.clear_failure(id);
                self.reconcile_locked(id).await;
            }
        }
    }

    /// Exports a volume by its current records. One catalog serves all volumes that wait for one.
    async fn publish_volume(&self, stored: Option<&StoredVolumeRecord>) {
        let Some(StoredVolumeRecord { record, revision }) = stored else { return };
        self.update_peers(record).await;
        if record.preferred_primary.is_some_and(|node| node != self.this_node()) {
            self.rebalance_primaries().await;
        }
        // Before initiators log in: otherwise the reported capacity changes under them.
        self.publish_space_of(record.id).await;
        self.write_description(record).await;
        self.0.context.volumes.mark_peers_set(record.id, *revision);
        let mut generation = self.0.catalog_generation.lock().await;
        if !self.0.context.volumes.is_published(record.id) {
            *generation += 1;
            self.publish_catalog(*generation).await;
        }
    }

    /// Writes the description of the volume to the image here.
    async fn write_description(&self, record: &VolumeRecord) {
        let text = {
            let cluster = self.joined_cluster().map(|m| m.cluster);
            let source = DescriptionSource {
                node: self.this_node(),
                cluster,
                node_name: &|node| self.node_name(node),
            };
            ImageDescription::of(record, source).to_text()
        };
        if let Err(error) = self.0.context.engine.write_description(record.id, text).await {
            tracing::debug!(volume = %record.name, %error, "cannot update the description in the \
                image");
        }
    }

    async fn republish_catalog(&self) {
        let mut generation = self.0.catalog_generation.lock().await;
        *generation += 1;
        self.publish_catalog(*generation).await;
    }

    /// Tells initiators the state of a volume that is not open.
    async fn publish_unavailable(&self, id: Uuid) {
        if !self.0.context.volumes.is_announced(id, self.this_node()) {
            let mut generation = self.0.catalog_generation.lock().await;
            if !self.0.context.volumes.is_announced(id, self.this_node()) {
                *generation += 1;
                self.publish_catalog(*generation).await;
            }
        }
    }

    async fn publish_catalog(&self, generation: u64) {
        let all = self.0.context.volumes.ready_volumes(self.this_node());
        let portals = &self.0.context.settings.portals;
        let listed = all.iter().map(|l| (&l.stored.record, l.local_state));
        let keyring = self.0.secrets.keys_to_open(all.iter().map(|l| &l.stored.record)).await;
        let mut catalog =
            catalog::build_catalog(listed, &keyring, &portals.iscsi, &portals.nvme, generation);
        catalog.redirect = self.0.context.settings.redirect;
        catalog.is_incomplete = !self.0.context.volumes.damaged_records().is_empty();
        if let Some(joined) = self.joined_cluster() {
            // The sender refuses requests that are older than a lease (RFD 0010, 4.6).
            let lease_ms = self.0.context.settings.cluster.lease.as_millis();
            catalog.quiesce_ms = u16::try_from(lease_ms).unwrap_or(u16::MAX);
            let mirrors = all.iter().map(|l| (&l.stored.record, l.mirror.as_ref().map(|m| &m.0)));
            let nodes = joined.nodes.borrow();
            catalog::add_cluster_paths(&mut catalog, joined.node, &nodes, mirrors);
        }
        let exported = all.iter().map(|l| &l.stored.record).filter(|r| r.protocols.vhost_user);
        let exported = exported.map(|r| (r.id, r.name.clone())).collect();
        self.0.context.engine.publish(catalog, exported).await;
        self.0.context.volumes.mark_published(&all);
    }
}

/// Short cuts to the context.
impl Control {
    fn this_node(&self) -> NodeId {
        self.0.context.this_node()
    }

    fn is_data_node(&self) -> bool {
        self.0.context.is_data_node()
    }

    fn node_name(&self, node: NodeId) -> String {
        self.0.context.node_name(node)
    }

    fn volume_name(&self, id: Uuid) -> String {
        self.0.context.volume_name(id)
    }

    fn volume_id(&self, name: &VolumeName) -> Result<Uuid, ApiError> {
        self.0.context.volume_id(name)
    }

    async fn read_volume_record(&self, id: Uuid) -> Result<Option<StoredVolumeRecord>, StoreError> {
        self.0.context.read_volume_record(id).await
    }

    async fn reports(&self) -> Result<BTreeMap<NodeId, NodeReport>, StoreError> {
        self.0.context.reports().await
    }

    async fn run_to_completion<T, F>(&self, change: F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>> + Send + 'static,
        T: Send + 'static,
    {
        self.0.context.run_to_completion(change).await
    }
}

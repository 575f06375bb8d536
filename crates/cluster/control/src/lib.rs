//! The control plane of a node: carries out API requests and reconciles the node with the store.
//!
//! Each resource has a type of its own: [`VolumeControl`], [`PoolControl`], [`ClusterControl`] and
//! `SecretControl`; `Context` is what they share. [`Control`] starts and stops them, and has what
//! concerns several of them. Imports go one way: from [`Control`] to the volumes, from there to
//! pools and secrets, and from all to the context.
//!
//! # Invariants
//! * The store decides. A change is durable in the store before it is acknowledged and before it
//!   takes effect; [`records::reconcile`] derives from there what the node does.
//! * Steps for one volume happen one at a time, under its lock; volumes do not wait for each other.
//! * A change that a client asked for completes even if the client disconnects.

pub mod cluster_control;
mod cluster_view;
mod context;
mod device_stack;
mod drain;
mod errors;
mod facts;
mod isns;
mod node_probe;
mod node_removal;
mod periodic_tasks;
pub mod pools;
mod recovery;
mod report_requests;
mod reserved_paths;
mod secrets;
mod settings;
mod startup_wait;
mod store_audit;
mod store_watch;
mod volume_table;
pub mod volumes;

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use api::ApiError;
use cluster::identity::Role;
use cluster::mirror_records;
use tokio::task::JoinSet;

use cluster::store::{MetadataStore, StoreError};
use cluster_control::ClusterControl;
use context::Context;
use engine::joined_cluster::JoinedCluster;
use engine::{ClusterContext, Engine, PeerAddresses};
use membership::secret_keys::SecretKeys;
use membership::{ClusterMembership, MembershipOutcome};
use pools::PoolControl;
use records::record::{self, VOLUMES};
use secrets::SecretControl;
pub use settings::ControlSettings;
use startup_wait::wait_after_error;
use status::startup_wait::StartupWait;
use volumes::VolumeControl;

/// Pause between attempts while the node starts.
const STARTUP_RETRY_PAUSE: Duration = Duration::from_millis(500);

/// The control plane. Cheap to clone.
#[derive(Clone)]
pub struct Control(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    /// The secrets of volumes.
    secrets: Arc<SecretControl>,
    /// The pools of disks of this node.
    pools: PoolControl,
    /// The volumes of this node.
    volumes: VolumeControl,
    /// The cluster of this node.
    cluster: ClusterControl,
    /// What is registered for this node at the iSNS server.
    isns_registration: std::sync::Mutex<Option<isns::IsnsRegistration>>,
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
        let secrets = Arc::new(SecretControl::new(keys, Arc::clone(&meta)));
        let context = Arc::new(Context::new(settings, meta, engine, membership));
        let volumes = VolumeControl::new(Arc::clone(&context), Arc::clone(&secrets));
        Self(Arc::new(Inner {
            cluster: ClusterControl::new(Arc::clone(&context)),
            pools: volumes.pools().clone(),
            volumes,
            context,
            secrets,
            isns_registration: std::sync::Mutex::default(),
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
    /// [`api::ErrorCode::Conflict`] for a witness.
    pub fn check_data_node(&self) -> Result<(), ApiError> {
        self.0.context.check_data_node()
    }

    /// The pools of disks of this node.
    #[must_use]
    pub fn pools(&self) -> &PoolControl {
        &self.0.pools
    }

    /// The volumes of this node and their replicas.
    #[must_use]
    pub fn volumes(&self) -> &VolumeControl {
        &self.0.volumes
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
    /// and accepts initiators. Volumes that cannot be opened stay offline; [`Self::get_status`]
    /// says so. In a cluster all of this happens in the background, as soon as the store answers.
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
        self.spawn(self.0.volumes.clone().watch_images());
        self.spawn(self.clone().retry_failed_volumes());
        self.spawn(self.0.volumes.clone().reseal_periodically());
        if let Some(server) = self.0.context.settings.isns.clone() {
            self.spawn(self.clone().maintain_isns_registration(server));
        }
        self.spawn(self.0.volumes.clone().publish_space_periodically());
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
}

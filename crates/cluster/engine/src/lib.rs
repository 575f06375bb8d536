//! The data plane as the control plane uses it: opens volumes, places them on cores and exports
//! them.
//!
//! Each core has a `CoreEngine`, which owns the core's server and volumes. The control plane
//! sends it work through a queue; cores share nothing.

mod access_state;
mod backing;
mod backing_error;
mod cluster_context;
mod core_engine;
mod guests;
mod image_log;
mod image_scan;
pub mod joined_cluster;
pub mod limits;
mod mirrored_volume;
mod pools;
mod report;
mod suspect_images;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use api::PoolName;
use disk::{ClaimRequest, NodeIdentity};
use futures_util::future::join_all;
use mirror::VerifyReport;
use peer::NodeId;
use reservation::Table;
use rt::{Cores, CoresConfig};
use target::catalog::Catalog;
use target::{Limits, Service, VolumeSpace};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use uuid::Uuid;
use wire::ShortText;

pub use backing_error::BackingError;
pub use cluster_context::ClusterContext;
use cluster_context::{CoreAssignment, CoreAssignments, PeerRouter};
use config::{Config, DiskEngine};
use core_engine::CoreEngine;
pub use disk::LABEL_AREA_BYTES;
pub use geometry::Redundancy;
use guests::Guests;
pub use guests::{ExportedVolumes, GuestReport, socket_path};
pub use image_scan::{ImageLocation, ScannedImage, ScannedIntentLog};
pub use peer::PeerAddresses;
pub use pool::{
    DamagedRange, DiskInspection as PoolDiskSeen, NewDisk, PoolDiskReport, PoolDiskState,
    PoolReport, PoolScrubReport, PoolVolumeReport,
};
pub use pools::NewPool;
use pools::PoolEntry;
use records::record::{FIRST_NODE, ImageInfo, VolumeRecord};
pub use report::{
    CommandKindReport, CoreReport, LATENCY_BOUNDS_US, LatencyHistogram, MirrorReport, ReportScope,
    VolumeReport,
};
use suspect_images::SuspectImages;

/// Work for a core's engine; runs as a task of that core.
type EngineTask = Box<dyn FnOnce(&Rc<CoreEngine>) + Send>;

/// Capacity of a core's queue of work; the control plane waits while it is full.
const CORE_QUEUE_DEPTH: usize = 256;

/// Why the data plane did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The cores did not start.
    #[error("the cores cannot start: {why}; {hint}")]
    Cores {
        /// The system's error.
        why: String,
        /// The next step.
        hint: &'static str,
    },
    /// Listening at an address failed.
    #[error("{setting}: cannot listen at {at}: {why}")]
    Listen {
        /// The setting that contains the address.
        setting: &'static str,
        /// The address.
        at: SocketAddr,
        /// The system's error.
        why: String,
    },
    /// A core has stopped.
    #[error("core {core} has stopped")]
    Stopped {
        /// Which one.
        core: usize,
    },
}

/// The addresses listened at, with the ports that the system chose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Portals {
    /// iSCSI.
    pub iscsi: Vec<SocketAddr>,
    /// NVMe/TCP I/O controllers.
    pub nvme: Vec<SocketAddr>,
    /// NVMe/TCP discovery.
    pub discovery: Vec<SocketAddr>,
}

/// The result of opening a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenResult {
    /// The core that serves it.
    pub core: usize,
    /// Its image.
    pub image: ImageInfo,
}

/// The data plane. Stop it with [`Self::stop`].
pub struct Engine {
    core_queues: Vec<mpsc::Sender<EngineTask>>,
    core_assignments: CoreAssignments,
    /// The pools that are open.
    pools: Mutex<BTreeMap<PoolName, PoolEntry>>,
    /// This node's number in its cluster.
    node: OnceLock<NodeId>,
    /// Volumes whose images are taken over from their last owners at the next open.
    takeovers: Mutex<BTreeSet<Uuid>>,
    cores: Mutex<Option<Cores>>,
    disk_backend: &'static str,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("cores", &self.core_queues.len()).finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts the cores. No volume is open and no address is listened at yet.
    ///
    /// # Errors
    /// [`EngineError::Cores`].
    pub async fn start(config: &Config, owner: NodeDiskOwner) -> Result<Self, EngineError> {
        let cores = start_cores(config)?;
        let name = config.name.clone();
        let limits = limits(config);
        let buffered = config.disks.buffered;
        let suspect_images = SuspectImages::in_data_dir(&config.data_dir);
        let directory = &config.vhost_user.directory;
        let mut core_queues = Vec::new();
        let mut disk_backend = "threads";
        let links = target::core_links(cores.handles().len());
        for (handle, link) in cores.handles().iter().zip(links) {
            let (sender, work) = mpsc::channel(CORE_QUEUE_DEPTH);
            let (suspect_images, directory) = (suspect_images.clone(), directory.clone());
            let name = name.clone();
            let started = handle.run(move |core| async move {
                let engine = core.disk_engine();
                let guests = Guests::new(core.clone(), directory);
                let claim = ClaimRequest::for_node(owner.identity_on(&core, &name));
                let disks = (buffered, suspect_images, claim);
                let core_engine = CoreEngine::new(core, (limits, link), disks, guests);
                tokio::task::spawn_local(run_engine_tasks(core_engine, work));
                engine
            });
            let engine = started.await.map_err(|_| EngineError::Stopped { core: handle.id() })?;
            if engine == rt::disk::Engine::Uring {
                disk_backend = "io_uring";
            }
            core_queues.push(sender);
        }
        let (core_assignments, cores) = (CoreAssignments::default(), Mutex::new(Some(cores)));
        let (pools, node, takeovers) = (Mutex::default(), OnceLock::new(), Mutex::default());
        Ok(Self { core_queues, core_assignments, pools, node, takeovers, cores, disk_backend })
    }

    /// How many cores there are.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.core_queues.len()
    }

    /// This node.
    fn this_node(&self) -> NodeId {
        self.node.get().copied().unwrap_or(FIRST_NODE)
    }

    /// How disks are accessed: `io_uring` or `threads`.
    #[must_use]
    pub fn disk_backend(&self) -> &'static str {
        self.disk_backend
    }

    /// Listens at every configured address. Clients wait until [`Self::accept_clients`].
    ///
    /// # Errors
    /// [`EngineError::Listen`] names the setting and the address.
    pub async fn listen(&self, config: &Config) -> Result<Portals, EngineError> {
        let listen = |setting, service, at| async move {
            self.listen_on_all_cores(setting, service, at).await
        };
        let mut portals = Portals::default();
        for &at in &config.iscsi.portals {
            portals.iscsi.push(listen("iscsi.portals", Service::Iscsi, at).await?);
        }
        for &at in &config.nvme.portals {
            portals.nvme.push(listen("nvme.portals", Service::Nvme, at).await?);
        }
        for &at in &config.nvme.discovery {
            portals.discovery.push(listen("nvme.discovery", Service::Nvme, at).await?);
        }
        Ok(portals)
    }

    /// Reserves a part of each core's buffer memory for data from other nodes, before pools of
    /// disks take memory permanently: in a cluster every volume is mirrored.
    pub async fn reserve_peer_memory(&self) {
        for reserved in
            self.on_all_cores(|k| async move { k.core().buffer_pool().reserve_peer_shares() }).await
        {
            if let Err(error) = reserved {
                tracing::error!(%error, "disk pools occupy buffer memory that mirrored volumes need");
            }
        }
    }

    /// Makes this node a member of a cluster, before any volume is opened: every volume opened from
    /// now on is a mirror, and other nodes can connect. Returns the addresses, with the ports that
    /// the system chose.
    ///
    /// # Errors
    /// [`EngineError::Listen`] names the setting and the address.
    pub async fn join_cluster(
        &self,
        context: ClusterContext,
    ) -> Result<PeerAddresses, EngineError> {
        let (listen, heartbeat) = (context.listen.clone(), context.heartbeat.clone());
        let _ = self.node.set(context.node);
        self.on_all_cores(move |k| async move { k.join_cluster(context) }).await;
        let data = self.listen_to_peers("cluster.listen", &listen).await?;
        let heartbeat = self.listen_to_peers("cluster.heartbeat", &heartbeat).await?;
        Ok(PeerAddresses { data, heartbeat })
    }

    /// Listens to other nodes, on one core; connections then move to the cores of their volumes.
    async fn listen_to_peers(
        &self,
        setting: &'static str,
        all: &[SocketAddr],
    ) -> Result<Vec<SocketAddr>, EngineError> {
        let mut bound = Vec::new();
        for &at in all {
            let (assignments, queues) = (self.core_assignments.clone(), self.core_queues.clone());
            let listening = self.on_core(0, move |k| async move {
                k.listen_to_peers(at, PeerRouter::new(assignments, queues)).await
            });
            let listening = listening.await.map_err(|_| EngineError::Stopped { core: 0 })?;
            let refused =
                |e: std::io::Error| EngineError::Listen { setting, at, why: e.to_string() };
            bound.push(listening.map_err(refused)?);
        }
        Ok(bound)
    }

    /// Listens at one address on every core; the system spreads connections over the cores.
    async fn listen_on_all_cores(
        &self,
        setting: &'static str,
        service: Service,
        at: SocketAddr,
    ) -> Result<SocketAddr, EngineError> {
        let mut bound = at;
        for core in 0..self.cores() {
            let (first, here) = (core == 0, bound);
            let listening =
                self.on_core(core, move |k| async move { k.listen(here, service, first).await });
            let refused = |why: String| EngineError::Listen { setting, at, why };
            bound = listening
                .await
                .map_err(|_| EngineError::Stopped { core })?
                .map_err(|e| refused(e.to_string()))?;
        }
        Ok(bound)
    }

    /// Starts to accept clients.
    pub async fn accept_clients(&self) {
        self.on_all_cores(|k| async move { k.accept_clients() }).await;
    }

    /// Creates the image of a new volume; with `force`, overwrites what is there.
    ///
    /// # Errors
    /// [`BackingError`]; a partly created image is removed.
    pub async fn create_image(
        &self,
        record: &VolumeRecord,
        force: bool,
    ) -> Result<ImageInfo, BackingError> {
        if let Some(pool) = self.pool_of(record)? {
            return self.create_image_in_pool(record, &pool).await;
        }
        let record = record.clone();
        let core = self.least_loaded();
        self.on_core(core, move |k| async move { k.create_image(&record, force, None).await })
            .await?
    }

    /// Erases the image of a volume that is not open. Succeeds if there is none.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn erase_image_of(&self, record: &VolumeRecord) -> Result<(), BackingError> {
        if let Some(pool) = self.pool_of(record)? {
            self.delete_in_pool(pool.name(), record.id).await?;
        }
        let record = record.clone();
        let core = self.least_loaded();
        self.on_core(core, |k| async move { k.erase(&record).await }).await?
    }

    /// Reads what the image of a closed volume is.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn inspect_image(&self, record: &VolumeRecord) -> Result<ImageInfo, BackingError> {
        let pool = self.pool_of(record)?;
        let core =
            pool.as_ref().map_or_else(|| self.least_loaded(), |h| self.least_loaded_for_pool(h));
        let (access, record) = (pool.map(|pool| pool.access), record.clone());
        self.on_core(core, |k| async move { k.inspect(&record, access).await }).await?
    }

    /// Opens a volume on the least loaded core. In a cluster this does not wait until the volume is
    /// served, and the volume knows no other node before [`Self::set_peers`].
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn open(&self, record: &VolumeRecord) -> Result<OpenResult, BackingError> {
        let access = self.pool_of(record)?.map(|pool| pool.access);
        let (id, record) = (record.id, record.clone());
        let cores = access.as_ref().map_or(usize::MAX, |access| access.max_cores.into());
        let core = self.assign_core(id, record.target_owner(), cores);
        let takes_over = self.takeovers.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let opened = self
            .on_core(core, move |k| async move { k.open(&record, access, takes_over).await })
            .await;
        match opened.map_err(BackingError::from).flatten() {
            Ok(image) => Ok(OpenResult { core, image }),
            Err(e) => {
                self.release_core(id);
                Err(e)
            }
        }
    }

    /// At its next open the volume takes its image over from the node that had it last, unless that
    /// node still uses it. An operator asked for this.
    pub fn take_over_at_next_open(&self, id: Uuid) {
        self.takeovers.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    }

    /// Finishes a volume's commands, makes its data durable and closes it. Data of a volume that is
    /// to be `erased` need not be durable.
    ///
    /// # Errors
    /// [`BackingError`]; the volume is closed all the same.
    pub async fn close(&self, id: Uuid, erased: bool) -> Result<(), BackingError> {
        let Some(core) = self.release_core(id) else { return Ok(()) };
        self.on_core(core, move |k| async move { k.close(id, erased).await }).await?
    }

    /// Grows an open volume and informs its initiators.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn grow(
        &self,
        record: &VolumeRecord,
        size_bytes: u64,
    ) -> Result<ImageInfo, BackingError> {
        let id = record.id;
        if let Some(pool) = self.pool_of(record)? {
            self.grow_in_pool(&pool, id, size_bytes).await?;
        }
        self.on_core(self.core_of(id)?, move |k| async move { k.grow(id, size_bytes).await })
            .await?
    }

    /// Sets the nodes that hold the other replicas of an open volume: connects to those that are
    /// new or have moved, disconnects from the others.
    ///
    /// # Errors
    /// [`BackingError`]: the volume is not open, or this node is in no cluster.
    pub async fn set_peers(
        &self,
        id: Uuid,
        peers: BTreeMap<NodeId, PeerAddresses>,
    ) -> Result<(), BackingError> {
        self.on_core(self.core_of(id)?, move |k| async move { k.set_peers(id, peers).await })
            .await?
    }

    /// Hands an open volume over to the other nodes at once, and stays out of the mirror until
    /// [`Self::rejoin_mirror`]. Returns false if no other node is in sync and reachable, or the
    /// store does not answer.
    ///
    /// # Errors
    /// As [`Self::set_peers`].
    pub async fn leave_mirror(&self, id: Uuid) -> Result<bool, BackingError> {
        self.on_core(self.core_of(id)?, move |k| async move { k.leave_mirror(id).await }).await?
    }

    /// Lets an open volume be brought in sync here again, after [`Self::leave_mirror`].
    ///
    /// # Errors
    /// As [`Self::set_peers`].
    pub async fn rejoin_mirror(&self, id: Uuid) -> Result<(), BackingError> {
        self.on_core(self.core_of(id)?, move |k| async move { k.rejoin_mirror(id) }).await?
    }

    /// Makes the replica on `node` the primary. Call it on the current primary.
    ///
    /// # Errors
    /// As [`Self::set_peers`]; also if this node is not the primary, or `node` did not take over.
    pub async fn switch_primary(&self, id: Uuid, node: NodeId) -> Result<(), BackingError> {
        self.on_core(self.core_of(id)?, move |k| async move { k.switch_primary(id, node).await })
            .await?
    }

    /// Lets the replica here continue alone, even if the others hold writes that it lacks. The
    /// volume's [`MirrorReport`] shows the outcome.
    ///
    /// # Errors
    /// As [`Self::set_peers`].
    pub async fn force_primary(&self, id: Uuid) -> Result<(), BackingError> {
        self.on_core(self.core_of(id)?, move |k| async move { k.force_primary(id) }).await?
    }

    /// Compares all replicas; if `keep` names a node, overwrites those that differ from its
    /// replica. Call it on the primary.
    ///
    /// # Errors
    /// As [`Self::set_peers`]; also if this node is not the primary, or stops being it.
    pub async fn verify(
        &self,
        id: Uuid,
        keep: Option<NodeId>,
    ) -> Result<VerifyReport, BackingError> {
        self.on_core(self.core_of(id)?, move |k| async move { k.verify(id, keep).await }).await?
    }

    /// The reservations of a volume.
    ///
    /// # Errors
    /// As [`Self::set_peers`]; also if they cannot be read now.
    pub async fn reservations(&self, id: Uuid) -> Result<Table, BackingError> {
        self.on_core(self.core_of(id)?, move |k| async move { k.reservations(id).await }).await?
    }

    /// Clears all reservations of a volume.
    ///
    /// # Errors
    /// As [`Self::reservations`].
    pub async fn clear_reservations(&self, id: Uuid) -> Result<(), BackingError> {
        self.on_core(self.core_of(id)?, move |k| async move { k.clear_reservations(id).await })
            .await?
    }

    /// Makes every core serve by `catalog`, and export these volumes to virtual machines.
    pub async fn publish(&self, catalog: Catalog, exported: ExportedVolumes) {
        let (catalog, exported) = (Arc::new(catalog), Arc::new(exported));
        self.on_all_cores(move |k| {
            let (catalog, exported) = (Arc::clone(&catalog), Arc::clone(&exported));
            async move {
                k.server().set_catalog(catalog);
                k.serve_guests(&exported);
            }
        })
        .await;
    }

    /// Reports the free space of open volumes to their initiators.
    pub async fn publish_space(&self, spaces: HashMap<Uuid, VolumeSpace>) {
        let spaces = Arc::new(spaces);
        self.on_all_cores(move |k| async move { k.set_space(&spaces) }).await;
    }

    /// Waits up to `limit` until a volume serves here with `copies` replicas in sync. Returns
    /// whether it does; always true for a volume that is not mirrored.
    pub async fn wait_serving_with(&self, id: Uuid, copies: usize, limit: Duration) -> bool {
        let Ok(core) = self.core_of(id) else { return true };
        let serves = self
            .on_core(core, move |k| async move { k.wait_serving_with(id, copies, limit).await });
        serves.await.unwrap_or(true)
    }

    /// A report of every core.
    pub async fn report(&self, scope: ReportScope) -> Vec<CoreReport> {
        self.on_all_cores(move |k| async move { k.report(scope).await }).await
    }

    /// Disconnects virtual machines, hands mirrored volumes over to the other nodes, logs clients
    /// out, finishes I/O in flight, closes all volumes and stops the cores. Gives up at `deadline`.
    /// Returns whether every volume was made durable and closed.
    pub async fn stop(&self, deadline: Instant) -> bool {
        // Virtual machines first, while their volumes are still served here.
        let dismissed = self.on_all_cores(|k| async move { k.stop_guests().await });
        let _ = tokio::time::timeout_at(logout_deadline(Instant::now(), deadline), dismissed).await;
        // The other nodes exclude this one from volumes that it does not leave in time.
        let left = self.on_all_cores(|k| async move { k.leave_all_mirrors().await });
        let _ = tokio::time::timeout_at(logout_deadline(Instant::now(), deadline), left).await;
        // Some initiators ignore a logout request: keep part of the time for the steps below.
        let leave_by = logout_deadline(Instant::now(), deadline);
        let drained = self.on_all_cores(move |k| async move { k.drain(leave_by).await });
        if tokio::time::timeout_at(deadline, drained).await.is_err() {
            return false;
        }
        let closed = self.on_all_cores(|k| async move { k.close_all().await });
        let Ok(mut closed) = tokio::time::timeout_at(deadline, closed).await else { return false };
        // No core has a volume of a pool open any more.
        let pools = self.on_all_cores(|k| async move { k.pools().close_all().await });
        let Ok(pools) = tokio::time::timeout_at(deadline, pools).await else { return false };
        closed.retain(|clean| *clean);
        let cores = self.cores.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ended = tokio::task::spawn_blocking(move || cores.map(Cores::stop_now));
        let ended = tokio::time::timeout_at(deadline, ended).await;
        ended.is_ok() && closed.len() == self.cores() && pools.into_iter().all(|clean| clean)
    }

    /// Runs `f` on a core and returns its result.
    async fn on_core<F, Fut, T>(&self, core: usize, f: F) -> Result<T, CoreStopped>
    where
        F: FnOnce(Rc<CoreEngine>) -> Fut + Send + 'static,
        Fut: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let (answer, result) = oneshot::channel();
        let work: EngineTask = Box::new(move |engine| {
            let work = f(Rc::clone(engine));
            tokio::task::spawn_local(async move {
                // The caller may have given up; the work is done all the same.
                let _ = answer.send(work.await);
            });
        });
        let stopped = || CoreStopped { core };
        let queue = self.core_queues.get(core).ok_or_else(stopped)?;
        queue.send(work).await.map_err(|_| stopped())?;
        result.await.map_err(|_| stopped())
    }

    /// Runs `f` on all cores at once; cores that have stopped return nothing.
    async fn on_all_cores<F, Fut, T>(&self, f: F) -> Vec<T>
    where
        F: FnOnce(Rc<CoreEngine>) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let all = (0..self.cores()).map(|core| self.on_core(core, f.clone()));
        join_all(all).await.into_iter().flatten().collect()
    }

    /// The core of an open volume.
    fn core_of(&self, id: Uuid) -> Result<usize, BackingError> {
        let assignment = self.core_assignments.lock().get(&id).map(|assignment| assignment.core);
        assignment.ok_or_else(|| BackingError::refused("the volume is not open"))
    }

    fn least_loaded(&self) -> usize {
        least_loaded(
            self.cores(),
            self.core_assignments.lock().values().map(|assignment| assignment.core),
        )
    }

    /// Volumes of one target share a core, because a session has one core. Otherwise picks one of
    /// the first `cores`.
    fn assign_core(&self, id: Uuid, target: Uuid, cores: usize) -> usize {
        let mut assignments = self.core_assignments.lock();
        let together = assignments
            .values()
            .find(|assignment| assignment.target == target)
            .map(|assignment| assignment.core);
        let taken = assignments.values().map(|assignment| assignment.core);
        let core = together.unwrap_or_else(|| least_loaded(self.cores().min(cores), taken));
        assignments.insert(id, CoreAssignment { core, target });
        core
    }

    /// Whether an open volume must be closed and reopened to share a core with the other volumes of
    /// the target of volume `target`.
    pub fn must_change_core(&self, id: Uuid, target: Uuid) -> bool {
        let mut assignments = self.core_assignments.lock();
        let mut others = assignments
            .iter()
            .filter(|(other, assignment)| **other != id && assignment.target == target);
        let together = others.next().map(|(_, assignment)| assignment.core);
        let Some(assignment) = assignments.get_mut(&id) else { return false };
        let stays = together.is_none_or(|core| core == assignment.core);
        if stays {
            assignment.target = target;
        }
        !stays
    }

    fn release_core(&self, id: Uuid) -> Option<usize> {
        self.core_assignments.lock().remove(&id).map(|assignment| assignment.core)
    }
}

/// A core that does not answer.
#[derive(Clone, Copy, Debug)]
struct CoreStopped {
    core: usize,
}

impl From<CoreStopped> for BackingError {
    fn from(stopped: CoreStopped) -> Self {
        Self::refused(format!("core {} has stopped", stopped.core))
    }
}

/// The core with the fewest of the volumes placed on `taken`; the lowest on a tie.
fn least_loaded(cores: usize, taken: impl Iterator<Item = usize>) -> usize {
    let mut load = vec![0_usize; cores];
    for core in taken {
        if let Some(n) = load.get_mut(core) {
            *n += 1;
        }
    }
    load.iter().enumerate().min_by_key(|&(_, n)| n).map_or(0, |(core, _)| core)
}

async fn run_engine_tasks(engine: Rc<CoreEngine>, mut work: mpsc::Receiver<EngineTask>) {
    while let Some(work) = work.recv().await {
        work(&engine);
    }
}

fn limits(config: &Config) -> Limits {
    let l = &config.limits;
    Limits {
        connections: l.connections,
        logins: l.logins,
        discoveries: l.discoveries,
        login_timeout: l.login_timeout,
        send_timeout: l.send_timeout,
        receive_timeout: l.receive_timeout,
        admission_timeout: l.admission_timeout,
        memory_timeout: l.memory_timeout,
        keep_alive: l.keep_alive,
        commands: l.commands,
    }
}

/// Most cores to use when the configuration does not say.
const DEFAULT_CORES: usize = 4;

/// How many cores a node with this configuration uses.
pub fn core_count(config: &Config) -> usize {
    match config.cores.cpus.len() {
        0 => config.cores.count.unwrap_or_else(|| usable_cpus().len().clamp(1, DEFAULT_CORES)),
        named => named,
    }
}

/// The owner that this node writes on disks that it claims.
#[derive(Clone, Copy, Debug)]
pub struct NodeDiskOwner {
    /// The node's own identity.
    pub node: Uuid,
    /// Names its data directory on this machine.
    pub directory: u128,
    /// Its cluster, and its number there.
    pub cluster: Option<(Uuid, NodeId)>,
}

impl NodeDiskOwner {
    /// This node's identity on the machine of `core`, valid while the machine is not rebooted.
    fn identity_on(self, core: &rt::Core, name: &str) -> NodeIdentity {
        let host = rustix::system::uname();
        let number = self.cluster.map_or(0, |(_, number)| number.0);
        NodeIdentity {
            node_id: self.node,
            boot_instance: Uuid::from_u128(core.boot_id() ^ self.directory),
            cluster_id: self.cluster.map(|(cluster, _)| cluster),
            node_number: number,
            name: ShortText::new(name),
            host: ShortText::new(&host.nodename().to_string_lossy()),
        }
    }
}

fn start_cores(config: &Config) -> Result<Cores, EngineError> {
    let refused = |why: String, hint| EngineError::Cores { why, hint };
    let usable = usable_cpus();
    let cpus = if config.cores.cpus.is_empty() {
        let count = core_count(config);
        // With more cores than processors, cores are not pinned.
        (0..count).map(|i| usable.get(i).copied().filter(|_| count <= usable.len())).collect()
    } else {
        if let Some(missing) = config.cores.cpus.iter().find(|cpu| !usable.contains(cpu)) {
            let why = format!("the node may not use processor {missing} (usable: {usable:?})");
            return Err(refused(why, "correct cores.cpus"));
        }
        config.cores.cpus.iter().copied().map(Some).collect()
    };
    let pool_bytes = usize::try_from(config.cores.memory_bytes)
        .map_err(|e| refused(e.to_string(), "lower cores.memory"))?;
    let disk_engine = match config.disks.engine {
        DiskEngine::Auto => rt::DiskEngine::Auto,
        DiskEngine::IoUring => rt::DiskEngine::IoUring,
        DiskEngine::Threads => rt::DiskEngine::Threads,
    };
    let cores = CoresConfig {
        cpus,
        memory_bytes_per_core: pool_bytes,
        poll_window: config.cores.poll_window,
        disk_engine,
        ..CoresConfig::default()
    };
    let hint = "lower cores.memory or cores.count, or choose disks.engine = \"auto\"";
    Cores::start(&cores).map_err(|e| refused(e.to_string(), hint))
}

/// Processors that the process may run on, in order.
fn usable_cpus() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_default();
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// How long clients may take to log out during a shutdown.
fn logout_deadline(now: Instant, deadline: Instant) -> Instant {
    now + deadline.saturating_duration_since(now).mul_f32(0.5).min(Duration::from_secs(10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_go_to_the_core_with_the_fewest() {
        assert_eq!(least_loaded(3, [].into_iter()), 0);
        assert_eq!(least_loaded(3, [0, 1, 0].into_iter()), 2);
        assert_eq!(least_loaded(2, [0, 1, 1].into_iter()), 0);
        assert_eq!(least_loaded(2, [0, 7].into_iter()), 1, "a core that is gone counts nowhere");
    }
}

//! The data plane as the control plane sees it: the one place where volumes are put together,
//! placed on cores and exported.
//!
//! Each core has a [`keeper`], which owns the core's server and volumes. The control plane's
//! threads reach it by sending work; nothing is shared.

mod access;
mod backing;
mod distrust;
mod found;
mod guests;
mod keeper;
mod mirrored;
mod pools;
mod report;
mod seat;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use api::PoolName;
use disk::{Claim, NodeIdentity};
use futures_util::future::join_all;
use mirror::Verified;
use peer::NodeId;
use reservation::Table;
use rt::{Cores, CoresConfig};
use target::catalog::Catalog;
use target::server::{self, Service, Space};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use uuid::Uuid;
use wire::Text;

use crate::config::{Config, DiskEngine};
use crate::record::{FIRST_NODE, VolumeRecord};
pub use backing::{BackingError, Image};
pub use disk::LABEL_AREA_BYTES;
use distrust::Distrust;
pub use found::{FoundImage, FoundLog, ImagePlace};
pub use geometry::Level;
use guests::Guests;
pub use guests::{Exported, GuestReport, socket};
use keeper::Keeper;
pub use peer::PeerAddresses;
pub use pool::{
    Inspected as PoolDiskSeen, LostRange, NewDisk, PoolDisk, PoolDiskState, PoolReport,
    PoolVolumeReport, ScrubReport,
};
pub use pools::NewPool;
use pools::PoolHome;
pub use report::{
    CoreReport, Histogram, KindReport, LATENCY_BOUNDS_US, MirrorReport, Scope, VolumeReport,
};
pub use seat::Seat;
use seat::{Home, Homes, Router};

/// Work for a keeper; runs as a task of its core.
type Work = Box<dyn FnOnce(&Rc<Keeper>) + Send>;

/// Pieces of work that may wait for a keeper; the control plane waits beyond that.
const WORK: usize = 256;

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The cores did not start.
    #[error("the cores cannot start: {why}; {hint}")]
    Cores {
        /// What the system said.
        why: String,
        /// The next step.
        hint: &'static str,
    },
    /// An address cannot be listened at.
    #[error("{setting}: cannot listen at {at}: {why}")]
    Listen {
        /// The setting that names it.
        setting: &'static str,
        /// The address.
        at: SocketAddr,
        /// What the system said.
        why: String,
    },
    /// A core has stopped.
    #[error("core {core} has stopped")]
    Stopped {
        /// Which one.
        core: usize,
    },
}

/// Addresses that are listened at, with the ports the system chose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Portals {
    /// iSCSI.
    pub iscsi: Vec<SocketAddr>,
    /// NVMe/TCP I/O controllers.
    pub nvme: Vec<SocketAddr>,
    /// NVMe/TCP discovery.
    pub discovery: Vec<SocketAddr>,
}

/// A volume that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The core it lives on.
    pub core: usize,
    /// What its image is.
    pub image: Image,
}

/// The data plane. Stop it with [`Self::stop`].
pub struct Engine {
    keepers: Vec<mpsc::Sender<Work>>,
    homes: Homes,
    /// The pools that are open.
    pools: Mutex<BTreeMap<PoolName, PoolHome>>,
    /// This node's number in its cluster.
    node: OnceLock<NodeId>,
    /// Volumes whose images are taken from their last owners when they are opened next.
    takes_over: Mutex<BTreeSet<Uuid>>,
    cores: Mutex<Option<Cores>>,
    disk_backend: &'static str,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("cores", &self.keepers.len()).finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts the cores. Nothing is open and nobody listened to yet.
    ///
    /// # Errors
    /// [`EngineError::Cores`].
    pub async fn start(config: &Config, owner: Owner) -> Result<Self, EngineError> {
        let cores = start_cores(config)?;
        let name = config.name.clone();
        let limits = limits(config);
        let buffered = config.disks.buffered;
        let distrust = Distrust::of(&config.data_dir);
        let directory = &config.vhost_user.directory;
        let mut keepers = Vec::new();
        let mut disk_backend = "threads";
        let doors = server::doors(cores.handles().len());
        for (handle, door) in cores.handles().iter().zip(doors) {
            let (sender, work) = mpsc::channel(WORK);
            let (distrust, directory) = (distrust.clone(), directory.clone());
            let name = name.clone();
            let begun = handle.run(move |core| async move {
                let engine = core.disk_engine();
                let guests = Guests::new(core.clone(), directory);
                let claim = Claim::of(owner.on(&core, &name));
                let disks = (buffered, distrust, claim);
                let keeper = Keeper::new(core, (limits, door), disks, guests);
                tokio::task::spawn_local(serve(keeper, work));
                engine
            });
            let engine = begun.await.map_err(|_| EngineError::Stopped { core: handle.id() })?;
            if engine == rt::disk::Engine::Uring {
                disk_backend = "io_uring";
            }
            keepers.push(sender);
        }
        let (homes, cores) = (Homes::default(), Mutex::new(Some(cores)));
        let (pools, node, takes_over) = (Mutex::default(), OnceLock::new(), Mutex::default());
        Ok(Self { keepers, homes, pools, node, takes_over, cores, disk_backend })
    }

    /// How many cores there are.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.keepers.len()
    }

    /// This node.
    fn me(&self) -> NodeId {
        self.node.get().copied().unwrap_or(FIRST_NODE)
    }

    /// How disks are reached: `io_uring` or `threads`.
    #[must_use]
    pub fn disk_backend(&self) -> &'static str {
        self.disk_backend
    }

    /// Begins to listen at every configured address. Clients wait until [`Self::accept`].
    ///
    /// # Errors
    /// [`EngineError::Listen`] names the setting and the address.
    pub async fn listen(&self, config: &Config) -> Result<Portals, EngineError> {
        let listen = |setting, service, at| async move { self.bind(setting, service, at).await };
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

    /// Keeps a part of each core's buffer memory for what other nodes send, before any pool of disks takes
    /// some for good: in a cluster every volume is served together with others.
    pub async fn expect_peers(&self) {
        for kept in self.everywhere(|k| async move { k.core().pool().serve_peers() }).await {
            if let Err(error) = kept {
                tracing::error!(%error, "pools of disks hold memory that mirrored volumes need");
            }
        }
    }

    /// Makes this one of the nodes of a cluster, before any volume is opened: volumes are mirrors from
    /// now on, and other nodes are listened to. Gives the addresses, with the ports the system chose.
    ///
    /// # Errors
    /// [`EngineError::Listen`] names the setting and the address.
    pub async fn enter(&self, seat: Seat) -> Result<PeerAddresses, EngineError> {
        let (listen, heartbeat) = (seat.listen.clone(), seat.heartbeat.clone());
        let _ = self.node.set(seat.node);
        self.everywhere(move |k| async move { k.enter(seat) }).await;
        let data = self.bind_to_peers("cluster.listen", &listen).await?;
        let heartbeat = self.bind_to_peers("cluster.heartbeat", &heartbeat).await?;
        Ok(PeerAddresses { data, heartbeat })
    }

    /// Listens to other nodes, on one core: connections move to the cores of their volumes.
    async fn bind_to_peers(
        &self,
        setting: &'static str,
        all: &[SocketAddr],
    ) -> Result<Vec<SocketAddr>, EngineError> {
        let mut bound = Vec::new();
        for &at in all {
            let (homes, keepers) = (self.homes.clone(), self.keepers.clone());
            let listening = self.on(0, move |k| async move {
                k.listen_to_peers(at, Router::new(homes, keepers)).await
            });
            let listening = listening.await.map_err(|_| EngineError::Stopped { core: 0 })?;
            let refused =
                |e: std::io::Error| EngineError::Listen { setting, at, why: e.to_string() };
            bound.push(listening.map_err(refused)?);
        }
        Ok(bound)
    }

    /// Listens at one address, on every core: the system spreads connections over them.
    async fn bind(
        &self,
        setting: &'static str,
        service: Service,
        at: SocketAddr,
    ) -> Result<SocketAddr, EngineError> {
        let mut bound = at;
        for core in 0..self.cores() {
            let (first, here) = (core == 0, bound);
            let listening =
                self.on(core, move |k| async move { k.listen(here, service, first).await });
            let refused = |why: String| EngineError::Listen { setting, at, why };
            bound = listening
                .await
                .map_err(|_| EngineError::Stopped { core })?
                .map_err(|e| refused(e.to_string()))?;
        }
        Ok(bound)
    }

    /// Begins to accept clients.
    pub async fn accept(&self) {
        self.everywhere(|k| async move { k.accept() }).await;
    }

    /// Makes the backing of a new volume; with `force` over whatever is there.
    ///
    /// # Errors
    /// [`BackingError`]; nothing is left of what was begun.
    pub async fn make(&self, record: &VolumeRecord, force: bool) -> Result<Image, BackingError> {
        if let Some(home) = self.pool_of(record)? {
            return self.make_in_pool(record, &home).await;
        }
        let record = record.clone();
        let core = self.least_loaded();
        self.on(core, move |k| async move { k.make(&record, force, None).await }).await?
    }

    /// Erases the backing of a volume that is not open. Without a backing there is nothing to do.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn erase(&self, record: &VolumeRecord) -> Result<(), BackingError> {
        if let Some(home) = self.pool_of(record)? {
            self.delete_in_pool(home.name(), record.id).await?;
        }
        let record = record.clone();
        let core = self.least_loaded();
        self.on(core, |k| async move { k.erase(&record).await }).await?
    }

    /// Finds out what the image of a volume is that is not open.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn inspect(&self, record: &VolumeRecord) -> Result<Image, BackingError> {
        let home = self.pool_of(record)?;
        let core = home.as_ref().map_or_else(|| self.least_loaded(), |h| self.least_loaded_of(h));
        let (door, record) = (home.map(|home| home.door), record.clone());
        self.on(core, |k| async move { k.inspect(&record, door).await }).await?
    }

    /// Opens a volume on the core that has the fewest. In a cluster it is not waited for until it is
    /// served, and it knows no other node before [`Self::set_peers`].
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn open(&self, record: &VolumeRecord) -> Result<Opened, BackingError> {
        let door = self.pool_of(record)?.map(|home| home.door);
        let (id, record) = (record.id, record.clone());
        let cores = door.as_ref().map_or(usize::MAX, |door| door.rings.into());
        let core = self.place(id, record.owner(), cores);
        let takes_over = self.takes_over.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let opened =
            self.on(core, move |k| async move { k.open(&record, door, takes_over).await }).await;
        match opened.map_err(BackingError::from).flatten() {
            Ok(image) => Ok(Opened { core, image }),
            Err(e) => {
                self.displace(id);
                Err(e)
            }
        }
    }

    /// The next opening of a volume takes its image from the node that had it last, unless that one still uses it: a person says
    /// so.
    pub fn take_over_next(&self, id: Uuid) {
        self.takes_over.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    }

    /// Finishes what a volume is doing, makes it durable and closes it; what is to be `erased` next need
    /// not be durable.
    ///
    /// # Errors
    /// [`BackingError`]; the volume is closed all the same.
    pub async fn close(&self, id: Uuid, erased: bool) -> Result<(), BackingError> {
        let Some(core) = self.displace(id) else { return Ok(()) };
        self.on(core, move |k| async move { k.close(id, erased).await }).await?
    }

    /// Makes an open volume larger and tells its initiators.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn grow(
        &self,
        record: &VolumeRecord,
        size_bytes: u64,
    ) -> Result<Image, BackingError> {
        let id = record.id;
        if let Some(home) = self.pool_of(record)? {
            self.grow_in_pool(&home, id, size_bytes).await?;
        }
        self.on(self.home(id)?, move |k| async move { k.grow(id, size_bytes).await }).await?
    }

    /// The nodes that keep the other copies of an open volume, from now on: sessions with those that
    /// are new or have moved begin, those with others end.
    ///
    /// # Errors
    /// [`BackingError`]: it is not open, or this node is in no cluster.
    pub async fn set_peers(
        &self,
        id: Uuid,
        peers: BTreeMap<NodeId, PeerAddresses>,
    ) -> Result<(), BackingError> {
        self.on(self.home(id)?, move |k| async move { k.set_peers(id, peers).await }).await?
    }

    /// Leaves an open volume to the other nodes, which go on with it at once, and stays out of it until
    /// [`Self::rejoin`]. Says whether that is done: it is not if no other node is in sync and there, or
    /// the store does not answer.
    ///
    /// # Errors
    /// As [`Self::set_peers`].
    pub async fn leave(&self, id: Uuid) -> Result<bool, BackingError> {
        self.on(self.home(id)?, move |k| async move { k.leave(id).await }).await?
    }

    /// Has an open volume brought in sync here again, after [`Self::leave`].
    ///
    /// # Errors
    /// As [`Self::set_peers`].
    pub async fn rejoin(&self, id: Uuid) -> Result<(), BackingError> {
        self.on(self.home(id)?, move |k| async move { k.rejoin(id) }).await?
    }

    /// Makes the copy on `node` the primary. Done at the one that is.
    ///
    /// # Errors
    /// As [`Self::set_peers`]; and this is not the primary, or `node` has not taken over.
    pub async fn switch_to(&self, id: Uuid, node: NodeId) -> Result<(), BackingError> {
        self.on(self.home(id)?, move |k| async move { k.switch_to(id, node).await }).await?
    }

    /// Has the copy here go on alone, whatever the others may have that it lacks. What comes of it, its
    /// [`MirrorReport`] says.
    ///
    /// # Errors
    /// As [`Self::set_peers`].
    pub async fn force(&self, id: Uuid) -> Result<(), BackingError> {
        self.on(self.home(id)?, move |k| async move { k.force(id) }).await?
    }

    /// Compares all copies, and makes those that differ like the one on node `keep`, if that is named.
    /// Done at the primary.
    ///
    /// # Errors
    /// As [`Self::set_peers`]; and this is not the primary, or has stopped being it.
    pub async fn verify(&self, id: Uuid, keep: Option<NodeId>) -> Result<Verified, BackingError> {
        self.on(self.home(id)?, move |k| async move { k.verify(id, keep).await }).await?
    }

    /// The reservations of a volume.
    ///
    /// # Errors
    /// As [`Self::set_peers`]; and it cannot be read now.
    pub async fn reservations(&self, id: Uuid) -> Result<Table, BackingError> {
        self.on(self.home(id)?, move |k| async move { k.reservations(id).await }).await?
    }

    /// Takes all reservations of a volume away.
    ///
    /// # Errors
    /// As [`Self::reservations`].
    pub async fn clear_reservations(&self, id: Uuid) -> Result<(), BackingError> {
        self.on(self.home(id)?, move |k| async move { k.clear_reservations(id).await }).await?
    }

    /// Has every core serve by `catalog`, and these volumes to virtual machines.
    pub async fn publish(&self, catalog: Catalog, exported: Exported) {
        let (catalog, exported) = (Arc::new(catalog), Arc::new(exported));
        self.everywhere(move |k| {
            let (catalog, exported) = (Arc::clone(&catalog), Arc::clone(&exported));
            async move {
                k.server().set_catalog(catalog);
                k.serve_guests(&exported);
            }
        })
        .await;
    }

    /// Tells initiators of open volumes about their space.
    pub async fn tell_space(&self, spaces: HashMap<Uuid, Space>) {
        let spaces = Arc::new(spaces);
        self.everywhere(move |k| async move { k.tell_space(&spaces) }).await;
    }

    /// Waits until a volume serves here with so many copies in sync, for `limit` at most; says whether it
    /// does, or is none that others have, too.
    pub async fn serves_with(&self, id: Uuid, copies: usize, limit: Duration) -> bool {
        let Ok(core) = self.home(id) else { return true };
        let serves = self.on(core, move |k| async move { k.serves_with(id, copies, limit).await });
        serves.await.unwrap_or(true)
    }

    /// What every core does.
    pub async fn report(&self, scope: Scope) -> Vec<CoreReport> {
        self.everywhere(move |k| async move { k.report(scope).await }).await
    }

    /// Dismisses virtual machines, leaves mirrored volumes to the other nodes, takes leave of all clients, finishes what is in
    /// flight, closes all volumes and stops the cores. Gives up at `deadline`, and says whether every
    /// volume was made durable and closed.
    pub async fn stop(&self, deadline: Instant) -> bool {
        // As long as their volumes are served here.
        let dismissed = self.everywhere(|k| async move { k.dismiss_guests().await });
        let _ = tokio::time::timeout_at(leave_by(Instant::now(), deadline), dismissed).await;
        // Those that cannot be left in time are found out by the silence of this node.
        let left = self.everywhere(|k| async move { k.leave_all().await });
        let _ = tokio::time::timeout_at(leave_by(Instant::now(), deadline), left).await;
        // Not every initiator leaves when it is asked: part of the time is kept for the rest.
        let leave_by = leave_by(Instant::now(), deadline);
        let drained = self.everywhere(move |k| async move { k.drain(leave_by).await });
        if tokio::time::timeout_at(deadline, drained).await.is_err() {
            return false;
        }
        let closed = self.everywhere(|k| async move { k.close_all().await });
        let Ok(mut closed) = tokio::time::timeout_at(deadline, closed).await else { return false };
        // No core has a volume of them any more.
        let pools = self.everywhere(|k| async move { k.pools().close_all().await });
        let Ok(pools) = tokio::time::timeout_at(deadline, pools).await else { return false };
        closed.retain(|clean| *clean);
        let cores = self.cores.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ended = tokio::task::spawn_blocking(move || cores.map(Cores::stop_now));
        let ended = tokio::time::timeout_at(deadline, ended).await;
        ended.is_ok() && closed.len() == self.cores() && pools.into_iter().all(|clean| clean)
    }

    /// Runs `f` on a core and gives its answer.
    async fn on<F, Fut, T>(&self, core: usize, f: F) -> Result<T, Stopped>
    where
        F: FnOnce(Rc<Keeper>) -> Fut + Send + 'static,
        Fut: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let (answer, result) = oneshot::channel();
        let work: Work = Box::new(move |keeper| {
            let work = f(Rc::clone(keeper));
            tokio::task::spawn_local(async move {
                // Nobody waits any more: the work was done all the same.
                let _ = answer.send(work.await);
            });
        });
        let stopped = || Stopped { core };
        let keeper = self.keepers.get(core).ok_or_else(stopped)?;
        keeper.send(work).await.map_err(|_| stopped())?;
        result.await.map_err(|_| stopped())
    }

    /// Runs `f` on every core at once; cores that have stopped give no answer.
    async fn everywhere<F, Fut, T>(&self, f: F) -> Vec<T>
    where
        F: FnOnce(Rc<Keeper>) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let all = (0..self.cores()).map(|core| self.on(core, f.clone()));
        join_all(all).await.into_iter().flatten().collect()
    }

    /// The core of an open volume.
    fn home(&self, id: Uuid) -> Result<usize, BackingError> {
        let home = self.homes.lock().get(&id).map(|home| home.core);
        home.ok_or_else(|| BackingError::refused("the volume is not open"))
    }

    fn least_loaded(&self) -> usize {
        least_loaded(self.cores(), self.homes.lock().values().map(|home| home.core))
    }

    /// Volumes of one target live together: a session has one core. Else on one of the first `cores`.
    fn place(&self, id: Uuid, target: Uuid, cores: usize) -> usize {
        let mut homes = self.homes.lock();
        let together = homes.values().find(|home| home.target == target).map(|home| home.core);
        let taken = homes.values().map(|home| home.core);
        let core = together.unwrap_or_else(|| least_loaded(self.cores().min(cores), taken));
        homes.insert(id, Home { core, target });
        core
    }

    /// Whether an open volume has to be closed and opened again, to live with the others of the target of volume `target`.
    pub fn has_to_move(&self, id: Uuid, target: Uuid) -> bool {
        let mut homes = self.homes.lock();
        let mut others =
            homes.iter().filter(|(other, home)| **other != id && home.target == target);
        let together = others.next().map(|(_, home)| home.core);
        let Some(home) = homes.get_mut(&id) else { return false };
        let stays = together.is_none_or(|core| core == home.core);
        if stays {
            home.target = target;
        }
        !stays
    }

    fn displace(&self, id: Uuid) -> Option<usize> {
        self.homes.lock().remove(&id).map(|home| home.core)
    }
}

/// A core does not answer.
#[derive(Clone, Copy, Debug)]
struct Stopped {
    core: usize,
}

impl From<Stopped> for BackingError {
    fn from(stopped: Stopped) -> Self {
        Self::refused(format!("core {} has stopped", stopped.core))
    }
}

/// The core with the fewest of the volumes placed on `taken`, the first of several.
fn least_loaded(cores: usize, taken: impl Iterator<Item = usize>) -> usize {
    let mut load = vec![0_usize; cores];
    for core in taken {
        if let Some(n) = load.get_mut(core) {
            *n += 1;
        }
    }
    load.iter().enumerate().min_by_key(|&(_, n)| n).map_or(0, |(core, _)| core)
}

async fn serve(keeper: Rc<Keeper>, mut work: mpsc::Receiver<Work>) {
    while let Some(work) = work.recv().await {
        work(&keeper);
    }
}

fn limits(config: &Config) -> server::Limits {
    let l = &config.limits;
    server::Limits {
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

/// Most cores that are taken when nobody says how many.
const DEFAULT_CORES: usize = 4;

/// How many cores a node with this configuration has.
pub(crate) fn core_count(config: &Config) -> usize {
    match config.cores.cpus.len() {
        0 => config.cores.count.unwrap_or_else(|| usable_cpus().len().clamp(1, DEFAULT_CORES)),
        named => named,
    }
}

/// Whom disks know as their owner.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The node's own identity.
    pub node: Uuid,
    /// Names its data directory on this machine.
    pub directory: u128,
    /// Its cluster, and its number there.
    pub cluster: Option<(Uuid, NodeId)>,
}

impl Owner {
    /// What this is on the machine of `core`, for as long as that runs.
    fn on(self, core: &rt::Core, name: &str) -> NodeIdentity {
        let host = rustix::system::uname();
        let number = self.cluster.map_or(0, |(_, number)| number.0);
        NodeIdentity {
            node: self.node,
            place: Uuid::from_u128(core.boot_id() ^ self.directory),
            cluster: self.cluster.map(|(cluster, _)| cluster),
            number,
            name: Text::new(name),
            host: Text::new(&host.nodename().to_string_lossy()),
        }
    }
}

fn start_cores(config: &Config) -> Result<Cores, EngineError> {
    let refused = |why: String, hint| EngineError::Cores { why, hint };
    let usable = usable_cpus();
    let cpus = if config.cores.cpus.is_empty() {
        let count = core_count(config);
        // More cores than processors float.
        (0..count).map(|i| usable.get(i).copied().filter(|_| count <= usable.len())).collect()
    } else {
        if let Some(missing) = config.cores.cpus.iter().find(|cpu| !usable.contains(cpu)) {
            let why = format!("processor {missing} is not one that the node may use ({usable:?})");
            return Err(refused(why, "correct cores.cpus"));
        }
        config.cores.cpus.iter().copied().map(Some).collect()
    };
    let pool_bytes = usize::try_from(config.cores.pool_bytes)
        .map_err(|e| refused(e.to_string(), "lower cores.pool"))?;
    let disk_engine = match config.disks.engine {
        DiskEngine::Auto => rt::DiskEngine::Auto,
        DiskEngine::IoUring => rt::DiskEngine::Uring,
        DiskEngine::Threads => rt::DiskEngine::Pool,
    };
    let cores = CoresConfig {
        cpus,
        pool_bytes_per_core: pool_bytes,
        poll_window: config.cores.poll_window,
        disk_engine,
        ..CoresConfig::default()
    };
    let hint = "lower cores.pool or cores.count, or choose disks.engine = \"auto\"";
    Cores::start(&cores).map_err(|e| refused(e.to_string(), hint))
}

/// Processors that the process may run on, in order.
fn usable_cpus() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_default();
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// How long within a shutdown clients may take to leave by themselves.
fn leave_by(now: Instant, deadline: Instant) -> Instant {
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

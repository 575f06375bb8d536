//! A mirrored volume on two or three nodes, with clients on all of them, under crashes, cuts,
//! pauses, drifting clocks, failing disks, a store that comes and goes, and replicas that come and
//! go.
//!
//! The clients of all nodes share one register checker. Reads must be linearizable per block across
//! nodes, and acknowledged data must survive as long as one disk that held it keeps its contents.
//! At the end everything works, all replicas are in sync and equal, no mark is left, and all memory
//! is released.
//!
//! * `store`: the metadata store; `peer_network`: the peer link;
//! * `disks`: disk faults, and retrying nodes that could not open their image;
//! * `replicas`: the control plane, which adds, removes and replaces replicas;
//! * `image_rollback`: images rolled back to earlier copies;
//! * `process`: what runs on a node; `incarnations`: which process is the node;
//! * `cloned`: nodes whose clone runs beside the original;
//! * `store_rollback`: a store rolled back to an earlier moment;
//! * `final_checks`: what must hold once all faults are over;
//! * `initiators`: the same with initiators on other hosts as clients;
//! * `full`: the same on hosts with little space;
//! * `fencing`: the same with hosts that preempt each other by reservations.

pub(crate) mod cloned;
mod disks;
pub(crate) mod fencing;
mod final_checks;
pub(crate) mod full;
mod image_rollback;
mod incarnations;
pub(crate) mod initiators;
mod outage;
mod peer_network;
mod process;
mod replicas;
mod store;
pub(crate) mod store_rollback;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::testing::register::CrashKind;
use block::{Dev, Epoch, MetadataObserver};
use disk::{ImageError, ImageErrorReason, Provisioning};
use image::{CreateImageOptions, FlatImage, OpenImageOptions};
use intent_log::IntentLog;
use mirror::config::{ConfigReplica, CopyHistory, InSyncMember, MirrorConfig};
use mirror::{Mirror, MirrorParts, MirrorSettings, MirrorStatus, Mistake};
use peer::{Incarnation, NodeId};
use peer_network::Ports;
use rt::Core;
use rt::disk::OpenReason;
use rt::sim::{DiskControl, Host, HostFaults, HostSetup, Rng, World};
use store::Store;
use tokio::sync::{Semaphore, mpsc};
use uuid::Uuid;
use volume::{ReservationContext, ReservationGate, Volume};

use super::clients::{Client, ClientState};
use super::single_node::Paths;
use super::storage::draw_host_faults;

const VOLUME: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_8555_6666_7777_8888);
const DATA: u64 = 1 << 20;

/// Size of the volume in bytes: sixteen regions.
const BYTES: u64 = 1 << 20;

/// Mistakes made on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScenarioConfig {
    /// Number of replicas; 0: the seed decides.
    pub(crate) nodes: usize,
    pub(crate) mistake: Mistake,
    pub(crate) clone_mode: CloneMode,
}

/// Whether nodes are cloned, and whether processes of one node are told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CloneMode {
    /// The seed decides between cloning with distinct processes, and no cloning.
    #[default]
    FromSeed,
    /// Nodes are cloned, and processes are told apart.
    ClonesDetected,
    /// Nodes are cloned, and clones are mistaken for their node.
    ClonesUndetected,
    /// Nodes are not cloned.
    NoClones,
}

/// An image of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Image {
    name: Uuid,
    /// Counts the images of its node.
    number: u32,
}

impl Image {
    fn path(self) -> String {
        format!("/images/{}", self.number)
    }
}

struct Node {
    id: NodeId,
    host: Host,
    /// Whether this is a clone of a node, with the node's identity.
    is_clone: bool,
    /// The incarnation of its process.
    incarnation: Cell<Uuid>,
    /// Another process is the node: nothing starts here until an operator has decided.
    is_stopped_as_clone: Cell<bool>,
    /// Its copy of the volume; without one the node is not started.
    image: Cell<Option<Image>>,
    /// Number of images it has had.
    images: Cell<u32>,
    /// Its replica, while its process runs.
    mirror: RefCell<Option<Mirror>>,
    volume: RefCell<Option<Rc<Volume>>>,
    core: RefCell<Option<Core>>,
    /// The clients on this node.
    clients: RefCell<Vec<Rc<Client>>>,
    /// Why its process could not open the image.
    open_error: RefCell<Option<String>>,
    /// Its disk was pulled out since the machine booted.
    was_unplugged: Cell<bool>,
    /// Syncs of its disk may have failed since then, which only the process that requested them
    /// knows: the machine must be rebooted before the node is retried.
    sync_may_have_failed: Cell<bool>,
    /// Whether both copies of its label are intact.
    labels_intact: Cell<bool>,
    /// Free memory after its replica was opened.
    free_memory: Cell<u64>,
}

impl Node {
    /// Whether its disk may have lost unsynced data although the machine has not rebooted.
    fn is_tainted(&self) -> bool {
        self.was_unplugged.get() || self.sync_may_have_failed.get()
    }

    fn caller(&self) -> outage::StoreClientId {
        outage::StoreClientId { node: self.id, is_clone: self.is_clone }
    }

    fn disk(&self) -> Option<DiskControl> {
        self.host.disk(self.image.get()?.path())
    }

    fn status(&self) -> Option<MirrorStatus> {
        self.mirror.borrow().as_ref().map(Mirror::status)
    }
}

struct MirrorTestbed {
    world: World,
    nodes: Vec<Rc<Node>>,
    store: Rc<Store>,
    shared: Rc<ClientState>,
    block_size: u32,
    /// The nodes whose disks hold all acknowledged data.
    intact_nodes: Rc<RefCell<BTreeSet<NodeId>>>,
    /// Whether clients are running.
    load_enabled: Rc<Cell<bool>>,
    /// The addresses that node processes published last.
    addresses: Rc<peer_network::NodeAddresses>,
    /// Pairs of nodes between which only leases pass.
    data_partitions: peer_network::DataPartitions,
    ports: Ports,
    /// Tells processes of one node apart.
    incarnations: Option<Rc<incarnations::IncarnationStore>>,
    /// Whether nodes are cloned.
    clones_enabled: bool,
    /// Number of clones made.
    clone_count: Cell<u32>,
    /// Requests to stop processes that are not their node.
    stop_requests: mpsc::UnboundedSender<process::StopRequest>,
    stop_receiver: RefCell<Option<mpsc::UnboundedReceiver<process::StopRequest>>>,
    /// The last epoch in which an operator forced a replica to continue.
    last_forced_epoch: Cell<Epoch>,
    /// Whether the control plane is changing replicas.
    is_changing_replicas: Cell<bool>,
    mistake: Mistake,
    /// Exports the volume on a node; without it, clients on the node use the volume directly.
    export: Option<ExportVolume>,
    /// Where initiators find the volume: every machine that runs as a node, clones included.
    paths: Paths,
}

/// Exports the volume of a node to other hosts.
type ExportVolume = Rc<dyn Fn(&Core, NodeId, &Rc<Volume>)>;

/// Runs the scenario.
pub(crate) async fn run(world: World, plan: ScenarioConfig) -> Result<(), String> {
    let bench = set_up(&world, plan, None).await?;
    bench.start_all();
    for _ in 0..world.rng().between(2, 8) {
        bench.inject_random_fault().await?;
    }
    bench.inject_clone_or_store_rollback().await?;
    bench.heal_and_wait_in_sync().await?;
    bench.last_round().await
}

/// The nodes, none of them running.
async fn set_up(
    world: &World,
    plan: ScenarioConfig,
    offer: Option<ExportVolume>,
) -> Result<Rc<MirrorTestbed>, String> {
    let rng = world.rng();
    let drawn = if rng.chance(0.6) { 2 } else { 3 };
    let count = if plan.nodes == 0 { drawn } else { plan.nodes };
    let block_size = *rng.pick(&[512, 4096]);
    let nodes: Vec<_> = (1..=count).map(|n| new_node(world, n)).collect();
    // With three nodes, not all have a replica from the start.
    let first = if rng.chance(0.3) { 2 } else { count };
    for node in &nodes[..first.min(count)] {
        node.image.set(Some(create_image(node, block_size, 0).await?));
    }
    let ports = if rng.chance(0.5) { Ports::Shared } else { Ports::SeparateLeases };
    let bench = new_testbed(world, nodes, block_size, ports, plan);
    let bench = Rc::new(MirrorTestbed { export: offer, ..bench });
    bench.paths.replace(bench.nodes.iter().map(|node| initiators::portal(node)).collect());
    let network = Rng::new(world.seed(), "network");
    for (a, b) in bench.nodes.iter().flat_map(|a| bench.nodes.iter().map(move |b| (a, b))) {
        peer_network::draw_link(world, &network, &a.host, &b.host);
    }
    Ok(bench)
}

fn new_node(world: &World, number: usize) -> Rc<Node> {
    let id = NodeId(u16::try_from(number).expect("few nodes"));
    new_machine(world, id, &format!("node{number}"), false)
}

/// A machine that runs as node `id`, or a clone of it.
fn new_machine(world: &World, id: NodeId, name: &str, is_clone: bool) -> Rc<Node> {
    let setup = HostSetup { memory_bytes: 48 << 20, ..HostSetup::default() };
    Rc::new(Node {
        id,
        host: world.add_host(name, setup),
        is_clone,
        incarnation: Cell::default(),
        is_stopped_as_clone: Cell::default(),
        image: Cell::default(),
        images: Cell::default(),
        mirror: RefCell::default(),
        volume: RefCell::default(),
        core: RefCell::default(),
        clients: RefCell::default(),
        open_error: RefCell::default(),
        was_unplugged: Cell::default(),
        sync_may_have_failed: Cell::default(),
        labels_intact: Cell::new(true),
        free_memory: Cell::default(),
    })
}

/// Creates an image and its log.
async fn create_image(node: &Rc<Node>, block_size: u32, number: u32) -> Result<Image, String> {
    let how = CreateImageOptions {
        volume_id: VOLUME,
        block_size,
        size_bytes: Some(BYTES),
        provisioning: Provisioning::Thin,
        allow_page_cache: false,
        overwrite: false,
        keep_contents: false,
        claim: None,
    };
    let path = Image { name: Uuid::nil(), number }.path();
    let work = node.host.run(move |core| async move {
        let file =
            FlatImage::create(&core, Path::new(&path), &how).await.map_err(|e| e.to_string())?;
        let file = Rc::new(file);
        let area = file.log_area().await.map_err(|e| e.to_string())?;
        let log = IntentLog::create(&core, area).await.map_err(|e| e.to_string())?;
        log.close().await.map_err(|e| e.to_string())?;
        Ok::<_, String>(file.label().image_id)
    });
    let name = work.join().await.ok_or("creation crashed")??;
    node.host.kill();
    Ok(Image { name, number })
}

fn new_testbed(
    world: &World,
    nodes: Vec<Rc<Node>>,
    block_size: u32,
    ports: Ports,
    plan: ScenarioConfig,
) -> MirrorTestbed {
    let replicas: Vec<_> = nodes
        .iter()
        .filter_map(|n| {
            Some(ConfigReplica { node: n.id, image: n.image.get()?.name, is_new: false })
        })
        .collect();
    let member = |r: &ConfigReplica| InSyncMember { node: r.node, incarnation: Incarnation(0) };
    // All members are listed and none is running: this starts like the recovery from a blackout.
    let record = MirrorConfig {
        epoch: Epoch(1),
        config_id: 1,
        in_sync: replicas.iter().map(member).collect(),
        replicas,
        primary: NodeId(1),
        cold_start_epoch: Epoch::default(),
        history: CopyHistory::default(),
    };
    let intact: Rc<RefCell<BTreeSet<_>>> =
        Rc::new(RefCell::new(record.in_sync.iter().map(|m| m.node).collect()));
    let store = Store::new(world, record);
    let shared = ClientState::new(world, block_size);
    let (intact_nodes, clients) = (Rc::clone(&intact), Rc::clone(&shared));
    store.watch(move |old, new| {
        // A replica that joins the in-sync set holds everything; one that is removed may lack
        // anything.
        let mut intact_nodes = intact_nodes.borrow_mut();
        let taken_in = |m: &&InSyncMember| !old.in_sync.contains(m);
        let stays = new.in_sync.iter().filter(|m| intact_nodes.contains(&m.node) || taken_in(m));
        let stays: BTreeSet<_> = stays.map(|m| m.node).collect();
        if stays.is_empty() && !intact_nodes.is_empty() {
            // The volume went on with a replica whose disk failed before it learned of that.
            clients.crash(CrashKind::PowerLoss);
        }
        *intact_nodes = stays;
    });
    tokio::task::spawn_local(Rc::clone(&store).run());
    let drawn = Rng::new(world.seed(), "lives").chance(0.3);
    let (clones, told_apart) = match plan.clone_mode {
        CloneMode::FromSeed => (drawn, drawn),
        CloneMode::ClonesDetected => (true, true),
        CloneMode::ClonesUndetected => (true, false),
        CloneMode::NoClones => (false, false),
    };
    let (stop_requests, ends) = mpsc::unbounded_channel();
    MirrorTestbed {
        world: world.clone(),
        addresses: peer_network::NodeAddresses::new(nodes.iter().map(|n| (n.id, n.host.address()))),
        incarnations: told_apart
            .then(|| incarnations::IncarnationStore::new(world, store.outage())),
        clones_enabled: clones,
        clone_count: Cell::default(),
        stop_requests,
        stop_receiver: RefCell::new(Some(ends)),
        nodes,
        store,
        shared,
        block_size,
        intact_nodes: intact,
        load_enabled: Rc::new(Cell::new(true)),
        data_partitions: peer_network::DataPartitions::default(),
        ports,
        last_forced_epoch: Cell::default(),
        is_changing_replicas: Cell::new(false),
        mistake: plan.mistake,
        export: None,
        paths: Paths::default(),
    }
}

/// Opens the image; waits while a killed process still holds it.
async fn open(core: &Core, image: Image) -> Result<Rc<FlatImage>, ImageError> {
    let what = OpenImageOptions {
        volume_id: VOLUME,
        min_generation: 0,
        allow_page_cache: false,
        read_only: false,
        claim: None,
    };
    loop {
        match FlatImage::open(core, Path::new(&image.path()), &what).await {
            Err(e) if e.reason == ImageErrorReason::Open(OpenReason::Busy) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            opened => return opened.map(Rc::new),
        }
    }
}

impl MirrorTestbed {
    fn cut(&self, from: &Node, to: &Node, cut: bool) {
        if from.id != to.id {
            peer_network::set_cut(&self.world, &from.host, &to.host, cut);
        }
    }

    /// Cuts the data link from one node to another, or heals it.
    fn cut_data(&self, from: &Node, to: &Node, cut: bool) {
        if from.id != to.id {
            peer_network::set_port_cut(&self.world, &from.host, &to.host, cut);
        }
    }

    fn start_all(self: &Rc<Self>) {
        self.nodes.iter().for_each(|n| self.start(n));
        tokio::task::spawn_local(Rc::clone(self).restart_failed_nodes());
        if let Some(ends) = self.stop_receiver.take() {
            tokio::task::spawn_local(Rc::clone(self).stop_replaced_processes(ends));
        }
    }

    /// Ends all faults, and waits until all replicas are in sync.
    async fn heal_and_wait_in_sync(&self) -> Result<(), String> {
        self.heal();
        // Commands in flight on a failing disk finish.
        tokio::time::sleep(Duration::from_secs(15)).await;
        self.wait_in_sync().await
    }

    /// Kills the process of a node, or cuts its power.
    fn stop(&self, node: &Node, power: bool) {
        let power = power || node.sync_may_have_failed.get();
        if !node.host.is_running() {
            if power {
                // The memory of the killed process is released.
                self.record_data_loss(node, power);
                self.cut_power(node);
            }
            return;
        }
        for client in node.clients.take() {
            client.abandon_pending();
        }
        node.mirror.take();
        node.volume.take();
        node.core.take();
        node.open_error.take();
        if power {
            self.cut_power(node);
        } else {
            node.host.kill();
        }
        self.world.note(format!("node {} ends, with its power: {power}", node.id));
        self.record_data_loss(node, power);
    }

    /// If no remaining replica has all data, unflushed writes may be lost.
    fn record_data_loss(&self, node: &Node, power: bool) {
        let mut intact = self.intact_nodes.borrow_mut();
        if power && intact.remove(&node.id) && intact.is_empty() {
            self.record_unflushed_loss();
        }
    }

    fn record_unflushed_loss(&self) {
        self.world.note("what was not flushed may be gone");
        self.shared.crash(CrashKind::PowerLoss);
    }

    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        tokio::time::sleep(self.world.rng().duration_between(Duration::ZERO, most)).await;
    }

    fn any(&self) -> Rc<Node> {
        Rc::clone(self.world.rng().pick(&self.nodes))
    }

    /// Injects one fault, waits, and ends it.
    async fn inject_random_fault(self: &Rc<Self>) -> Result<(), String> {
        let rng = self.world.rng();
        let (a, b) = (self.any(), self.any());
        match rng.below(18) {
            0..3 => self.crash(&a, rng.chance(0.5)).await,
            3 => self.blackout(rng.chance(0.5)).await,
            4 => {
                if let Some(mirror) = &*a.mirror.borrow() {
                    mirror.close_session(b.id);
                }
            }
            5 => {
                self.store.set_away(true);
                self.pause(8000).await;
                if rng.chance(0.5) {
                    self.crash(&a, rng.chance(0.5)).await;
                }
                self.store.set_away(false);
            }
            6 => {
                self.store.set_cut(a.id, true);
                self.cut(&a, &b, true);
                self.pause(8000).await;
                self.cut(&a, &b, false);
                self.store.set_cut(a.id, false);
            }
            7 => self.isolate(&a).await,
            8 => {
                let worst = HostFaults {
                    max_drift_ppm: 50_000,
                    max_drift_duration: Duration::from_secs(5),
                    max_pause_interval: Duration::from_secs(8),
                    max_pause_duration: Duration::from_secs(6),
                };
                a.host.set_faults(draw_host_faults(rng, worst));
                self.pause(15_000).await;
                a.host.set_faults(HostFaults::default());
            }
            9..12 => self.inject_disk_fault(&a).await,
            // A block unreadable on several replicas can be repaired only by clients that rewrite
            // it.
            12 if self.export.is_none() => self.make_blocks_unreadable(&a),
            13 | 14 => self.change_replicas(),
            17 => self.roll_back_image(&a).await,
            15 => {
                self.cut_data(&a, &b, true);
                self.cut_data(&b, &a, rng.chance(0.7));
                self.pause(8000).await;
                self.cut_data(&a, &b, false);
                self.cut_data(&b, &a, false);
            }
            _ => {
                if let Some(mirror) = &*a.mirror.borrow() {
                    match rng.below(2) {
                        0 => mirror.switch_primary(b.id),
                        _ => mirror.leave(),
                    }
                }
            }
        }
        self.pause(if rng.chance(0.3) { 20_000 } else { 2_000 }).await;
        self.shared.expire_unknown_outcomes();
        self.shared.first_violation()
    }

    /// Clones a node or rolls back the store, in some worlds. Everything before that is as in
    /// worlds without it.
    async fn inject_clone_or_store_rollback(self: &Rc<Self>) -> Result<(), String> {
        let rng = Rng::new(self.world.seed(), "believed");
        let store = rng.chance(if self.clones_enabled { 0.3 } else { 0.4 });
        if store {
            self.inject_store_rollback().await?;
        } else if self.clones_enabled {
            self.inject_clone(&self.any()).await?;
        } else {
            return Ok(());
        }
        if rng.chance(0.5) {
            self.inject_random_fault().await?;
        }
        self.shared.expire_unknown_outcomes();
        self.shared.first_violation()
    }

    async fn blackout(&self, power: bool) {
        for node in &self.nodes {
            self.stop(node, power);
        }
        for node in &self.nodes {
            self.pause(2000).await;
            self.start(node);
        }
    }

    /// Cuts a node off from all others, in one or both directions, and perhaps from the store.
    async fn isolate(&self, node: &Node) {
        let rng = self.world.rng();
        for other in &self.nodes {
            self.cut(node, other, true);
            self.cut(other, node, rng.chance(0.7));
        }
        self.store.set_cut(node.id, rng.chance(0.5));
        self.pause(12_000).await;
        for other in &self.nodes {
            self.cut(node, other, false);
            self.cut(other, node, false);
        }
        self.store.set_cut(node.id, false);
    }

    async fn crash(&self, node: &Rc<Node>, power: bool) {
        self.stop(node, power);
        self.pause(6000).await;
        if self.world.rng().chance(0.2) {
            self.stop(node, true);
        }
        if !node.host.is_running() {
            self.inject_bit_rot(node);
        }
        self.start(node);
    }

    fn heal(&self) {
        self.world.note("all faults end");
        self.store.set_away(false);
        for node in &self.nodes {
            node.host.set_faults(HostFaults::default());
            self.start(node);
        }
    }
}

/// An open replica.
fn serve_replica(
    core: &Core,
    node: &Rc<Node>,
    mirror: Mirror,
    gate: Rc<ReservationGate>,
) -> Rc<Volume> {
    let compares = Rc::new(mirror.clone());
    let volume = Volume::new_replicated(Dev::new(mirror.clone()), compares, Epoch::default());
    let (asked, me) = (mirror.clone(), node.id);
    gate.set_context_source(Box::new(move || {
        asked.status().config.map(|r| reservation_standing(&r, me))
    }));
    volume.enable_reservations(Rc::clone(&gate), core.buffer_pool().account());
    tokio::task::spawn_local(follow_reservation_standing(mirror.clone(), node.id, gate));
    node.labels_intact.set(true);
    node.free_memory.set(core.buffer_pool().usage().free);
    node.mirror.replace(Some(mirror));
    node.volume.replace(Some(Rc::clone(&volume)));
    node.core.replace(Some(core.clone()));
    volume
}

/// Tells a gate the current reservations.
async fn follow_reservation_standing(mirror: Mirror, me: NodeId, gate: Rc<ReservationGate>) {
    loop {
        if let Some(record) = mirror.status().config {
            gate.set_context(reservation_standing(&record, me));
        }
        mirror.wait_status_change().await;
    }
}

/// The reservations according to this record.
fn reservation_standing(record: &MirrorConfig, me: NodeId) -> ReservationContext {
    let seats = record.in_sync.iter().map(|m| m.incarnation.0).collect();
    let incarnation = record.member(me).map_or(0, |m| m.incarnation.0);
    ReservationContext {
        power_epoch: record.cold_start_epoch.0,
        incarnation,
        serving_incarnations: seats,
    }
}

/// Runs clients on the node.
fn spawn_clients(
    core: &Core,
    node: &Rc<Node>,
    volume: &Rc<Volume>,
    shared: &Rc<ClientState>,
    load: &Rc<Cell<bool>>,
) {
    for n in 0..5 {
        let client = Rc::new(Client::new(core, volume, shared));
        node.clients.borrow_mut().push(Rc::clone(&client));
        let load = Rc::clone(load);
        tokio::task::spawn_local(async move {
            while load.get() {
                // One client only reads, so it does not wait behind writes.
                if n == 0 {
                    client.read_and_pause().await;
                } else {
                    client.run_random_command().await;
                }
            }
        });
    }
}

async fn open_mirror(
    core: &Core,
    node: &Node,
    image: Image,
    records: store::Client,
    mistake: Mistake,
) -> Result<(Mirror, Rc<ReservationGate>), String> {
    let file = open(core, image).await.map_err(|e| e.to_string())?;
    let area = file.log_area().await.map_err(|e| e.to_string())?;
    let boot = area.disk_session(core);
    let (log, found) = IntentLog::open(core, area, boot).await.map_err(|e| e.to_string())?;
    let gate = Rc::new(ReservationGate::default());
    let mut settings = MirrorSettings { mistake, ..MirrorSettings::default() };
    if mistake == Mistake::TrustsRestoredStore {
        settings.leases = settings.leases.trusting_store();
    }
    let parts = MirrorParts {
        node: node.id,
        core: core.clone(),
        account: core.buffer_pool().account(),
        leg: Dev::shared(file),
        log,
        log_report: found,
        metadata_observer: Rc::clone(&gate) as Rc<dyn MetadataObserver>,
        free_space: Rc::new(disks::HostSpace(node.host.clone())),
        config_store: records,
        settings,
        resync_permits: Arc::new(Semaphore::new(1)),
    };
    let mirror = Mirror::open(parts).await.map_err(|e| e.to_string())?;
    Ok((mirror, gate))
}

//! A mirrored volume on two or three nodes, with clients on all of them, under crashes, cuts, pauses,
//! drifting clocks, failing disks, a store that comes and goes, and replicas that come and go.
//!
//! The clients of all nodes share one register checker: what is read must be linearizable per block
//! across nodes, and what was acknowledged must be there as long as one of those that had it keeps its
//! disk's contents. At the end everything works, all replicas are in sync and equal, no mark is left,
//! and all memory comes back.
//!
//! * `store`: the metadata store; `wires`: the peer link;
//! * `disks`: what befalls disks, and who gives a node another try;
//! * `replicas`: the control plane, which adds, removes and replaces replicas;
//! * `past`: images that are set back to copies of earlier moments;
//! * `process`: what runs on a node; `lives`: which process is the node;
//! * `cloned`: nodes of which a copy runs beside the first;
//! * `restored`: a store that is set back to an earlier moment;
//! * `ending`: what is demanded when all faults are over;
//! * `initiators`: the same with initiators on other hosts for clients;
//! * `full`: the same on hosts with little space;
//! * `fencing`: the same with hosts that take the volume from each other by reservations.

pub(crate) mod cloned;
mod disks;
mod ending;
pub(crate) mod fencing;
pub(crate) mod full;
pub(crate) mod initiators;
mod lives;
mod past;
mod process;
mod replicas;
pub(crate) mod restored;
mod store;
mod wires;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::testing::register::Loss;
use block::{Aside, Dev, Epoch};
use disk::{FileError, Provisioning, Reason};
use image::{Create, File, Open};
use intent_log::IntentLog;
use mirror::record::{History, Member, Record, Replica};
use mirror::{Mirror, Mistake, Parts, Settings, Status};
use peer::{Incarnation, NodeId};
use rt::Core;
use rt::disk::OpenReason;
use rt::sim::{DiskControl, Host, HostFaults, HostSetup, Rng, World};
use store::Store;
use tokio::sync::{Semaphore, mpsc};
use uuid::Uuid;
use volume::{Gate, Standing, Volume};
use wires::Ports;

use super::clients::{Client, Shared};
use super::node::Paths;
use super::storage::draw_host_faults;

const VOLUME: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_8555_6666_7777_8888);
const DATA: u64 = 1 << 20;

/// Size of the volume in bytes: sixteen regions.
const BYTES: u64 = 1 << 20;

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// How many nodes have the volume; 0: the seed decides.
    pub(crate) nodes: usize,
    pub(crate) mistake: Mistake,
    pub(crate) lives: LivesPlan,
}

/// Whether nodes are cloned, and whether processes of one node are told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LivesPlan {
    /// The seed decides: they are told apart and nodes are cloned, or neither.
    #[default]
    Drawn,
    /// Nodes are cloned, and processes told apart.
    Claimed,
    /// Nodes are cloned, and their clones taken for them.
    Ignored,
    /// Nodes are not cloned.
    Single,
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
    /// Whether it is a copy of a node, with the identity of that.
    is_clone: bool,
    /// The life of its process.
    life: Cell<Uuid>,
    /// Another process is the node: nothing is started here until an operator has decided.
    told_apart: Cell<bool>,
    /// What it keeps of the volume; without it the node is not started.
    image: Cell<Option<Image>>,
    /// How many images it has had.
    images: Cell<u32>,
    /// Its replica, while its process runs.
    mirror: RefCell<Option<Mirror>>,
    volume: RefCell<Option<Rc<Volume>>>,
    core: RefCell<Option<Core>>,
    /// The clients on it.
    clients: RefCell<Vec<Rc<Client>>>,
    /// Why its process could not open the image.
    broken: RefCell<Option<String>>,
    /// Its disk was pulled out since the machine was booted.
    pulled: Cell<bool>,
    /// Syncs of its disk may have failed since then, which only the process knows that asked for them: whoever gives the
    /// node another try boots it.
    unsynced: Cell<bool>,
    /// Whether both copies of its label are whole.
    labelled: Cell<bool>,
    /// Memory that was free when its replica had been opened.
    free: Cell<u64>,
}

impl Node {
    /// Whether its disk may have lost what was not synced though the machine has not been booted.
    fn is_tainted(&self) -> bool {
        self.pulled.get() || self.unsynced.get()
    }

    fn caller(&self) -> store::Caller {
        store::Caller { node: self.id, is_clone: self.is_clone }
    }

    fn disk(&self) -> Option<DiskControl> {
        self.host.disk(self.image.get()?.path())
    }

    fn status(&self) -> Option<Status> {
        self.mirror.borrow().as_ref().map(Mirror::status)
    }
}

struct Bench {
    world: World,
    nodes: Vec<Rc<Node>>,
    store: Rc<Store>,
    shared: Rc<Shared>,
    block_size: u32,
    /// The nodes whose disks hold everything that was acknowledged.
    intact: Rc<RefCell<BTreeSet<NodeId>>>,
    /// Clients are at work.
    load: Rc<Cell<bool>>,
    /// Where nodes are, by what their processes said last.
    addresses: Rc<wires::Addresses>,
    /// Who gets no sessions with whom.
    apart: wires::Apart,
    ports: Ports,
    /// Tells processes of one node apart.
    lives: Option<Rc<lives::Lives>>,
    /// Whether nodes are cloned.
    clones: bool,
    /// How many clones there were.
    cloned: Cell<u32>,
    /// Told of processes that are not their node, and have to end.
    over: mpsc::UnboundedSender<process::Over>,
    ends: RefCell<Option<mpsc::UnboundedReceiver<process::Over>>>,
    /// The last configuration in which an operator made a replica go on alone.
    forced: Cell<Epoch>,
    /// The control plane is at work.
    changing: Cell<bool>,
    mistake: Mistake,
    /// What a node does with the volume; without it clients on the node use it.
    offer: Option<Offer>,
    /// Where initiators find the volume: every machine that runs as a node, its clone too.
    paths: Paths,
}

/// Offers the volume of a node to others.
type Offer = Rc<dyn Fn(&Core, NodeId, &Rc<Volume>)>;

/// Plays it.
pub(crate) async fn play(world: World, plan: Plan) -> Result<(), String> {
    let bench = set_up(&world, plan, None).await?;
    bench.begin();
    for _ in 0..world.rng().between(2, 8) {
        bench.mischief().await?;
    }
    bench.believe_neither().await?;
    bench.calm_down().await?;
    bench.last_round().await
}

/// The nodes, none of them running.
async fn set_up(world: &World, plan: Plan, offer: Option<Offer>) -> Result<Rc<Bench>, String> {
    let rng = world.rng();
    let drawn = if rng.chance(0.6) { 2 } else { 3 };
    let count = if plan.nodes == 0 { drawn } else { plan.nodes };
    let block_size = *rng.pick(&[512, 4096]);
    let nodes: Vec<_> = (1..=count).map(|n| node(world, n)).collect();
    // Not all of three are there from the start.
    let first = if rng.chance(0.3) { 2 } else { count };
    for node in &nodes[..first.min(count)] {
        node.image.set(Some(prepare(node, block_size, 0).await?));
    }
    let ports = if rng.chance(0.5) { Ports::Alike } else { Ports::Apart };
    let bench = assemble(world, nodes, block_size, ports, plan);
    let bench = Rc::new(Bench { offer, ..bench });
    bench.paths.replace(bench.nodes.iter().map(|node| initiators::portal(node)).collect());
    let network = Rng::new(world.seed(), "network");
    for (a, b) in bench.nodes.iter().flat_map(|a| bench.nodes.iter().map(move |b| (a, b))) {
        wires::draw(world, &network, &a.host, &b.host);
    }
    Ok(bench)
}

fn node(world: &World, number: usize) -> Rc<Node> {
    let id = NodeId(u16::try_from(number).expect("few nodes"));
    machine(world, id, &format!("node{number}"), false)
}

/// A machine that is node `id`, or a clone of it.
fn machine(world: &World, id: NodeId, name: &str, is_clone: bool) -> Rc<Node> {
    let setup = HostSetup { pool_bytes: 48 << 20, ..HostSetup::default() };
    Rc::new(Node {
        id,
        host: world.add_host(name, setup),
        is_clone,
        life: Cell::default(),
        told_apart: Cell::default(),
        image: Cell::default(),
        images: Cell::default(),
        mirror: RefCell::default(),
        volume: RefCell::default(),
        core: RefCell::default(),
        clients: RefCell::default(),
        broken: RefCell::default(),
        pulled: Cell::default(),
        unsynced: Cell::default(),
        labelled: Cell::new(true),
        free: Cell::default(),
    })
}

/// Makes an image and its log.
async fn prepare(node: &Rc<Node>, block_size: u32, number: u32) -> Result<Image, String> {
    let how = Create {
        volume: VOLUME,
        block_size,
        bytes: Some(BYTES),
        provisioning: Provisioning::Thin,
        buffered: false,
        force: false,
        keep_contents: false,
        claim: None,
    };
    let path = Image { name: Uuid::nil(), number }.path();
    let work = node.host.run(move |core| async move {
        let file = File::create(&core, Path::new(&path), &how).await.map_err(|e| e.to_string())?;
        let file = Rc::new(file);
        let area = file.log_area().await.map_err(|e| e.to_string())?;
        let log = IntentLog::create(&core, area).await.map_err(|e| e.to_string())?;
        log.close().await.map_err(|e| e.to_string())?;
        Ok::<_, String>(file.label().image)
    });
    let name = work.join().await.ok_or("creation crashed")??;
    node.host.kill();
    Ok(Image { name, number })
}

fn assemble(
    world: &World,
    nodes: Vec<Rc<Node>>,
    block_size: u32,
    ports: Ports,
    plan: Plan,
) -> Bench {
    let replicas: Vec<_> = nodes
        .iter()
        .filter_map(|n| Some(Replica { node: n.id, image: n.image.get()?.name, new: false }))
        .collect();
    let member = |r: &Replica| Member { node: r.node, incarnation: Incarnation(0) };
    // All have been here before, and nobody is there: it begins like after a blackout.
    let record = Record {
        epoch: Epoch(1),
        config: 1,
        in_sync: replicas.iter().map(member).collect(),
        replicas,
        primary: NodeId(1),
        born: Epoch::default(),
        history: History::default(),
    };
    let intact: Rc<RefCell<BTreeSet<_>>> =
        Rc::new(RefCell::new(record.in_sync.iter().map(|m| m.node).collect()));
    let store = Store::new(world, record);
    let shared = Shared::new(world, block_size);
    let (kept, clients) = (Rc::clone(&intact), Rc::clone(&shared));
    store.watch(move |old, new| {
        // Who is taken in holds everything; who is put out, nothing that is certain.
        let mut kept = kept.borrow_mut();
        let taken_in = |m: &&Member| !old.in_sync.contains(m);
        let stays = new.in_sync.iter().filter(|m| kept.contains(&m.node) || taken_in(m));
        let stays: BTreeSet<_> = stays.map(|m| m.node).collect();
        if stays.is_empty() && !kept.is_empty() {
            // The volume was left to one whose disk failed before it learned of that.
            clients.crash(Loss::Unflushed);
        }
        *kept = stays;
    });
    tokio::task::spawn_local(Rc::clone(&store).run());
    let drawn = Rng::new(world.seed(), "lives").chance(0.3);
    let (clones, told_apart) = match plan.lives {
        LivesPlan::Drawn => (drawn, drawn),
        LivesPlan::Claimed => (true, true),
        LivesPlan::Ignored => (true, false),
        LivesPlan::Single => (false, false),
    };
    let (over, ends) = mpsc::unbounded_channel();
    Bench {
        world: world.clone(),
        addresses: wires::Addresses::new(nodes.iter().map(|n| (n.id, n.host.address()))),
        lives: told_apart.then(|| lives::Lives::new(world, &store)),
        clones,
        cloned: Cell::default(),
        over,
        ends: RefCell::new(Some(ends)),
        nodes,
        store,
        shared,
        block_size,
        intact,
        load: Rc::new(Cell::new(true)),
        apart: wires::Apart::default(),
        ports,
        forced: Cell::default(),
        changing: Cell::new(false),
        mistake: plan.mistake,
        offer: None,
        paths: Paths::default(),
    }
}

/// Opens the image, waiting while a killed process still has it in use.
async fn open(core: &Core, image: Image) -> Result<Rc<File>, FileError> {
    let what =
        Open { volume: VOLUME, generation: 0, buffered: false, read_only: false, claim: None };
    loop {
        match File::open(core, Path::new(&image.path()), &what).await {
            Err(e) if e.reason == Reason::Open(OpenReason::Busy) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            opened => return opened.map(Rc::new),
        }
    }
}

impl Bench {
    fn cut(&self, from: &Node, to: &Node, cut: bool) {
        if from.id != to.id {
            wires::set_cut(&self.world, &from.host, &to.host, cut);
        }
    }

    /// Cuts the way that data take from one node to another, or heals it.
    fn cut_data(&self, from: &Node, to: &Node, cut: bool) {
        if from.id != to.id {
            wires::set_port_cut(&self.world, &from.host, &to.host, cut);
        }
    }

    fn begin(self: &Rc<Self>) {
        self.nodes.iter().for_each(|n| self.start(n));
        tokio::task::spawn_local(Rc::clone(self).mend_nodes());
        if let Some(ends) = self.ends.take() {
            tokio::task::spawn_local(Rc::clone(self).end_lives(ends));
        }
    }

    /// Faults end, and all replicas come in sync.
    async fn calm_down(&self) -> Result<(), String> {
        self.heal();
        // What was begun on a failing disk comes to its end.
        tokio::time::sleep(Duration::from_secs(15)).await;
        self.in_sync().await
    }

    /// Ends the process of a node, or its power.
    fn stop(&self, node: &Node, power: bool) {
        let power = power || node.unsynced.get();
        if !node.host.is_running() {
            if power {
                // What the killed process left in memory goes.
                self.lose(node, power);
                self.cut_power(node);
            }
            return;
        }
        for client in node.clients.take() {
            client.abandon();
        }
        node.mirror.take();
        node.volume.take();
        node.core.take();
        node.broken.take();
        if power {
            self.cut_power(node);
        } else {
            node.host.kill();
        }
        self.world.note(format!("node {} ends, with its power: {power}", node.id));
        self.lose(node, power);
    }

    /// If nobody is left who has everything, what was not flushed may be gone.
    fn lose(&self, node: &Node, power: bool) {
        let mut intact = self.intact.borrow_mut();
        if power && intact.remove(&node.id) && intact.is_empty() {
            self.lose_unflushed();
        }
    }

    fn lose_unflushed(&self) {
        self.world.note("what was not flushed may be gone");
        self.shared.crash(Loss::Unflushed);
    }

    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        tokio::time::sleep(self.world.rng().time(Duration::ZERO, most)).await;
    }

    fn any(&self) -> Rc<Node> {
        Rc::clone(self.world.rng().pick(&self.nodes))
    }

    /// One misfortune, its duration, and what follows.
    async fn mischief(self: &Rc<Self>) -> Result<(), String> {
        let rng = self.world.rng();
        let (a, b) = (self.any(), self.any());
        match rng.below(18) {
            0..3 => self.crash(&a, rng.chance(0.5)).await,
            3 => self.blackout(rng.chance(0.5)).await,
            4 => {
                if let Some(mirror) = &*a.mirror.borrow() {
                    mirror.break_link(b.id);
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
                    drift_ppm: 50_000,
                    drift_for: Duration::from_secs(5),
                    pause_every: Duration::from_secs(8),
                    pause_for: Duration::from_secs(6),
                };
                a.host.set_faults(draw_host_faults(rng, worst));
                self.pause(15_000).await;
                a.host.set_faults(HostFaults::default());
            }
            9..12 => self.ail(&a).await,
            // What is on several disks and on none is for clients that can mend it.
            12 if self.offer.is_none() => self.spoil(&a),
            13 | 14 => self.change_replicas(),
            17 => self.set_back(&a).await,
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
                        0 => mirror.switch_to(b.id),
                        _ => mirror.leave(),
                    }
                }
            }
        }
        self.pause(if rng.chance(0.3) { 20_000 } else { 2_000 }).await;
        self.shared.settle_doubts();
        self.shared.verdict()
    }

    /// A node is cloned, or the store set back, in some worlds. What came before is as in worlds
    /// without it.
    async fn believe_neither(self: &Rc<Self>) -> Result<(), String> {
        let rng = Rng::new(self.world.seed(), "believed");
        let store = rng.chance(if self.clones { 0.3 } else { 0.4 });
        if store {
            self.restore_store().await?;
        } else if self.clones {
            self.run_twice(&self.any()).await?;
        } else {
            return Ok(());
        }
        if rng.chance(0.5) {
            self.mischief().await?;
        }
        self.shared.settle_doubts();
        self.shared.verdict()
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

    /// Cuts a node from all others, one way or both, and perhaps from the store.
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
            self.rot(node);
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

/// A replica that is open.
fn serve(core: &Core, node: &Rc<Node>, mirror: Mirror, gate: Rc<Gate>) -> Rc<Volume> {
    let compares = Rc::new(mirror.clone());
    let volume = Volume::shared(Dev::new(mirror.clone()), compares, Epoch::default());
    let (asked, me) = (mirror.clone(), node.id);
    gate.set_source(Box::new(move || asked.status().record.map(|r| standing(&r, me))));
    volume.keep_reservations(Rc::clone(&gate), core.pool().account());
    tokio::task::spawn_local(stand(mirror.clone(), node.id, gate));
    node.labelled.set(true);
    node.free.set(core.pool().usage().free);
    node.mirror.replace(Some(mirror));
    node.volume.replace(Some(Rc::clone(&volume)));
    node.core.replace(Some(core.clone()));
    volume
}

/// Tells a gate what holds of the reservations.
async fn stand(mirror: Mirror, me: NodeId, gate: Rc<Gate>) {
    loop {
        if let Some(record) = mirror.status().record {
            gate.set_standing(standing(&record, me));
        }
        mirror.changed().await;
    }
}

/// What of the reservations holds, by this record.
fn standing(record: &Record, me: NodeId) -> Standing {
    let seats = record.in_sync.iter().map(|m| m.incarnation.0).collect();
    let seat = record.member(me).map_or(0, |m| m.incarnation.0);
    Standing { era: record.born.0, seat, seats }
}

/// Clients on the node use the volume.
fn load_up(
    core: &Core,
    node: &Rc<Node>,
    volume: &Rc<Volume>,
    shared: &Rc<Shared>,
    load: &Rc<Cell<bool>>,
) {
    for n in 0..5 {
        let client = Rc::new(Client::new(core, volume, shared));
        node.clients.borrow_mut().push(Rc::clone(&client));
        let load = Rc::clone(load);
        tokio::task::spawn_local(async move {
            while load.get() {
                // One that only reads is not held up by writes that wait for others.
                if n == 0 { client.look().await } else { client.command().await }
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
) -> Result<(Mirror, Rc<Gate>), String> {
    let file = open(core, image).await.map_err(|e| e.to_string())?;
    let area = file.log_area().await.map_err(|e| e.to_string())?;
    let boot = area.boot(core);
    let (log, found) = IntentLog::open(core, area, boot).await.map_err(|e| e.to_string())?;
    let gate = Rc::new(Gate::default());
    let mut settings = Settings { mistake, ..Settings::default() };
    if mistake == Mistake::BelievesOlderStore {
        settings.member = settings.member.believing_the_store();
    }
    let parts = Parts {
        node: node.id,
        core: core.clone(),
        account: core.pool().account(),
        leg: Dev::shared(file),
        log,
        found,
        keeper: Rc::clone(&gate) as Rc<dyn Aside>,
        free_space: Rc::new(disks::Space(node.host.clone())),
        records,
        settings,
        turns: Arc::new(Semaphore::new(1)),
    };
    let mirror = Mirror::open(parts).await.map_err(|e| e.to_string())?;
    Ok((mirror, gate))
}

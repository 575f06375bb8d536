//! A mirrored volume on two or three nodes, with clients on all of them, under crashes, cuts, pauses,
//! drifting clocks and a store that comes and goes.
//!
//! The clients of all nodes share one register checker: what is read must be linearizable per block
//! across nodes, and what was acknowledged must be there as long as one of those that had it keeps its
//! disk's contents. At the end everything works, all replicas are in sync and equal, no mark is left,
//! and all memory comes back.

mod store;
mod wires;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::Loss;
use block::{Dev, Epoch};
use layers::file::{Create, File, FileError, Open, Provisioning, Reason};
use layers::mirror::log::{Damage, IntentLog};
use layers::mirror::record::{Member, Record, Replica};
use layers::mirror::{Mirror, Mistake, Parts, Settings};
use peer::{Incarnation, NodeId};
use rt::Core;
use rt::disk::OpenReason;
use rt::sim::{Host, HostFaults, HostSetup, Rng, World};
use uuid::Uuid;
use volume::Volume;

use super::clients::{self, Client, Shared};
use super::storage::draw_host_faults;
use store::Store;

const IMAGE: &str = "/images/volume";
const VOLUME: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_8555_6666_7777_8888);
const DATA: u64 = 1 << 20;

/// Size of the volume in bytes: sixteen regions.
const BYTES: u64 = 1 << 20;

/// Virtual time within which all must be well again.
const PATIENCE: Duration = Duration::from_secs(300);

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// How many nodes have the volume; 0: the seed decides.
    pub(crate) nodes: usize,
    pub(crate) mistake: Mistake,
}

struct Node {
    id: NodeId,
    host: Host,
    image: Cell<Uuid>,
    /// Its replica, while its process runs.
    mirror: RefCell<Option<Mirror>>,
    volume: RefCell<Option<Rc<Volume>>>,
    core: RefCell<Option<Core>>,
    /// The clients on it.
    clients: RefCell<Vec<Rc<Client>>>,
}

struct Bench {
    world: World,
    nodes: Vec<Rc<Node>>,
    store: Rc<Store>,
    shared: Rc<Shared>,
    /// The nodes whose disks hold everything that was acknowledged.
    intact: Rc<RefCell<BTreeSet<NodeId>>>,
    /// Clients are at work.
    load: Rc<Cell<bool>>,
    mistake: Mistake,
}

/// Plays it.
pub(crate) async fn play(world: World, plan: Plan) -> Result<(), String> {
    let rng = world.rng();
    let drawn = if rng.chance(0.6) { 2 } else { 3 };
    let count = if plan.nodes == 0 { drawn } else { plan.nodes };
    let block_size = *rng.pick(&[512, 4096]);
    let nodes: Vec<_> = (1..=count).map(|n| node(&world, n)).collect();
    for node in &nodes {
        prepare(node, block_size).await?;
    }
    let bench = assemble(&world, nodes, block_size, plan.mistake).await?;
    let network = Rng::new(world.seed(), "network");
    for (a, b) in bench.nodes.iter().flat_map(|a| bench.nodes.iter().map(move |b| (a, b))) {
        wires::draw(&world, &network, &a.host, &b.host);
    }
    bench.start_all();
    for _ in 0..rng.between(2, 8) {
        bench.mischief().await?;
    }
    bench.heal();
    bench.in_sync().await?;
    bench.last_round().await
}

fn node(world: &World, number: usize) -> Rc<Node> {
    let setup = HostSetup { pool_bytes: 48 << 20, ..HostSetup::default() };
    let host = world.add_host(&format!("node{number}"), setup);
    let id = NodeId(u16::try_from(number).expect("few nodes"));
    Rc::new(Node {
        id,
        host,
        image: Cell::default(),
        mirror: RefCell::default(),
        volume: RefCell::default(),
        core: RefCell::default(),
        clients: RefCell::default(),
    })
}

/// Makes the image and its log.
async fn prepare(node: &Rc<Node>, block_size: u32) -> Result<(), String> {
    let how = Create {
        volume: VOLUME,
        block_size,
        bytes: Some(BYTES),
        provisioning: Provisioning::Thin,
        buffered: false,
        force: false,
        keep_contents: false,
    };
    let work = node.host.run(move |core| async move {
        let file = File::create(&core, Path::new(IMAGE), &how).await.map_err(|e| e.to_string())?;
        let file = Rc::new(file);
        let area = file.log_area().await.map_err(|e| e.to_string())?;
        let log = IntentLog::create(&core, area).await.map_err(|e| e.to_string())?;
        log.close().await.map_err(|e| e.to_string())?;
        Ok::<_, String>(file.label().image)
    });
    let image = work.join().await.ok_or("creation crashed")??;
    node.host.kill();
    node.image.set(image);
    Ok(())
}

async fn assemble(
    world: &World,
    nodes: Vec<Rc<Node>>,
    block: u32,
    mistake: Mistake,
) -> Result<Bench, String> {
    let replica = |n: &Rc<Node>| Replica { node: n.id, image: n.image.get(), new: false };
    let member = |n: &Rc<Node>| Member { node: n.id, incarnation: Incarnation(0) };
    // All have been here before, and nobody is there: it begins like after a blackout.
    let record = Record {
        epoch: Epoch(1),
        config: 1,
        replicas: nodes.iter().map(replica).collect(),
        in_sync: nodes.iter().map(member).collect(),
        primary: NodeId(1),
    };
    let intact: Rc<RefCell<BTreeSet<_>>> =
        Rc::new(RefCell::new(nodes.iter().map(|n| n.id).collect()));
    let store = Store::new(world, record);
    let kept = Rc::clone(&intact);
    store.watch(move |record| {
        // Who is taken in holds everything; who is put out, nothing that is certain.
        *kept.borrow_mut() = record
            .in_sync
            .iter()
            .filter(|m| kept.borrow().contains(&m.node) || m.incarnation != Incarnation(0))
            .map(|m| m.node)
            .collect();
    });
    tokio::task::spawn_local(Rc::clone(&store).run());
    let shared = Shared::new(world, block);
    Ok(Bench {
        world: world.clone(),
        nodes,
        store,
        shared,
        intact,
        load: Rc::new(Cell::new(true)),
        mistake,
    })
}

/// Opens the image, waiting while a killed process still has it in use.
async fn open(core: &Core) -> Result<Rc<File>, FileError> {
    let what = Open { volume: VOLUME, generation: 0, buffered: false, read_only: false };
    loop {
        match File::open(core, Path::new(IMAGE), &what).await {
            Err(e) if e.reason == Reason::Open(OpenReason::Busy) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            opened => return opened.map(Rc::new),
        }
    }
}

impl Bench {
    fn others_of(&self, node: &Node) -> Vec<(NodeId, SocketAddr)> {
        let others = self.nodes.iter().filter(|n| n.id != node.id);
        others.map(|n| (n.id, SocketAddr::new(n.host.address(), 0))).collect()
    }

    fn cut(&self, from: &Node, to: &Node, cut: bool) {
        if from.id != to.id {
            wires::set_cut(&self.world, &from.host, &to.host, cut);
        }
    }

    fn start_all(&self) {
        self.nodes.iter().for_each(|n| self.start(n));
    }

    fn start(&self, node: &Rc<Node>) {
        let all = self.others_of(node);
        let mistake = self.mistake;
        let (node, store) = (Rc::clone(node), Rc::clone(&self.store));
        let (shared, load) = (Rc::clone(&self.shared), Rc::clone(&self.load));
        let host = node.host.clone();
        host.start(move |core| {
            let (node, store) = (Rc::clone(&node), Rc::clone(&store));
            let (shared, load, all) = (Rc::clone(&shared), Rc::clone(&load), all.clone());
            async move {
                let mirror = open_mirror(&core, &node, store, mistake).await?;
                let compares = Rc::new(mirror.clone());
                let dev = Dev::new(mirror.clone());
                let volume = Volume::shared(dev, compares, Epoch::default());
                wires::join(&core, node.id, &mirror, &all).await?;
                node.mirror.replace(Some(mirror));
                node.volume.replace(Some(Rc::clone(&volume)));
                node.core.replace(Some(core.clone()));
                for n in 0..5 {
                    let client = Rc::new(Client::new(&core, &volume, &shared));
                    node.clients.borrow_mut().push(Rc::clone(&client));
                    let load = Rc::clone(&load);
                    tokio::task::spawn_local(async move {
                        while load.get() {
                            // One that only reads is not held up by writes that wait for others.
                            if n == 0 { client.look().await } else { client.command().await }
                        }
                    });
                }
                std::future::pending::<()>().await;
                Ok(())
            }
        });
    }

    /// Ends the process of a node, or its power.
    fn stop(&self, node: &Node, power: bool) {
        if !node.host.is_running() {
            if power {
                // What the killed process left in memory goes.
                self.lose(node, power);
                node.host.power_cut();
            }
            return;
        }
        for client in node.clients.take() {
            client.abandon();
        }
        node.mirror.take();
        node.volume.take();
        node.core.take();
        if power {
            node.host.power_cut();
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
            self.world.note("everybody has lost something");
            self.shared.crash(Loss::Unflushed);
        }
    }

    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        tokio::time::sleep(self.world.rng().time(Duration::ZERO, most)).await;
    }

    fn any(&self) -> Rc<Node> {
        Rc::clone(self.world.rng().pick(&self.nodes))
    }

    /// One misfortune, its duration, and what follows.
    async fn mischief(&self) -> Result<(), String> {
        let rng = self.world.rng();
        let (a, b) = (self.any(), self.any());
        match rng.below(10) {
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
        self.start(node);
    }

    fn heal(&self) {
        self.world.note("all faults end");
        self.store.set_away(false);
        for node in &self.nodes {
            node.host.set_faults(HostFaults::default());
            if !node.host.is_running() {
                self.start(node);
            }
        }
    }

    /// Waits until all replicas are in sync and serve.
    async fn in_sync(&self) -> Result<(), String> {
        let all = async {
            loop {
                self.pause(200).await;
                let serve = self
                    .nodes
                    .iter()
                    .all(|n| n.mirror.borrow().as_ref().is_some_and(Mirror::serves));
                if serve && self.store.record().in_sync.len() == self.nodes.len() {
                    return;
                }
            }
        };
        let ended = tokio::time::timeout(PATIENCE, all).await;
        self.shared.verdict()?;
        ended.map_err(|_| {
            let (record, states) = (self.store.record(), self.states());
            format!("not in sync within {PATIENCE:?}: {record:?}; {states}")
        })
    }

    fn states(&self) -> String {
        let state = |n: &Rc<Node>| {
            let mirror = n.mirror.borrow();
            format!("{:?}: {:#?}", mirror, mirror.as_ref().map(Mirror::status))
        };
        self.nodes.iter().map(state).collect::<Vec<_>>().join("; ")
    }

    /// No faults any more.
    async fn last_round(&self) -> Result<(), String> {
        self.load.set(false);
        // Commands that were begun end.
        tokio::time::sleep(Duration::from_secs(20)).await;
        self.shared.verdict()?;
        let node = self.any();
        let (core, volume) = (node.core.borrow().clone(), node.volume.borrow().clone());
        let (Some(core), Some(volume)) = (core, volume) else { return Err("it died".into()) };
        let shared = Rc::clone(&self.shared);
        let work =
            node.host.run(move |_| async move { clients::check(&core, &volume, &shared).await });
        let ended = tokio::time::timeout(PATIENCE, work.join()).await;
        self.shared.verdict()?;
        match ended {
            Ok(Some(result)) => result?,
            Ok(None) => return Err("the host crashed by itself".into()),
            Err(_) => return Err(format!("a command did not end: {}", self.states())),
        }
        // Marks go when nothing has been written for a while.
        tokio::time::sleep(Duration::from_secs(60)).await;
        self.equal()?;
        self.unmarked()
    }

    fn equal(&self) -> Result<(), String> {
        let len = usize::try_from(BYTES).expect("small");
        let contents: Vec<_> =
            self.nodes.iter().map(|n| n.host.disk(IMAGE).map(|d| d.peek(DATA, len))).collect();
        match contents.iter().position(|c| *c != contents[0]) {
            None => Ok(()),
            Some(i) => Err(format!("nodes 1 and {} differ at rest", i + 1)),
        }
    }

    fn unmarked(&self) -> Result<(), String> {
        for node in &self.nodes {
            if let Some(mirror) = &*node.mirror.borrow() {
                let status = mirror.status();
                if status.marked.iter().any(|(_, n)| *n > 0) {
                    return Err(format!("marks are left at rest: node {}: {status:?}", node.id));
                }
            }
        }
        Ok(())
    }
}

async fn open_mirror(
    core: &Core,
    node: &Node,
    store: Rc<Store>,
    mistake: Mistake,
) -> Result<Mirror, String> {
    let file = open(core).await.map_err(|e| e.to_string())?;
    let area = file.log_area().await.map_err(|e| e.to_string())?;
    let boot = Uuid::from_u128(core.boot_id());
    let (log, found) = IntentLog::open(core, area, boot).await.map_err(|e| e.to_string())?;
    if found.damage != Damage::None {
        return Err(format!("the log is damaged: {found:?}"));
    }
    let parts = Parts {
        node: node.id,
        core: core.clone(),
        account: core.pool().account(),
        leg: Dev::shared(file),
        log,
        found,
        records: store::Client { store, node: node.id },
        settings: Settings { mistake, ..Settings::default() },
    };
    Mirror::open(parts).await.map_err(|e| e.to_string())
}

//! Data planes of a cluster in one process, each with its own cores, over loopback: a mirrored volume
//! with iSCSI initiators at every node. There is no control plane: the test does what it would do.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::{Backing, BlockSize, Protocols};
use block::{Access, Epoch};
use cluster::identity::{NodeIndex, Role};
use cluster::meta::Meta;
use cluster::meta::model::{Fate, Model};
use cluster::mirrors::{self, Mirrors};
use cluster::nodes::{NodePortals, NodeRecord, NodeView, Nodes};
use cluster::vault::Ring;
use mirror::Settings;
use mirror::member::Why;
use mirror::record::{History, Member, Record, Records, Replica};
use node::config::Config;
use node::engine::{
    Engine, Exported, Level, MirrorReport, NewDisk, NewPool, Owner, PeerAddresses, Portals, Scope,
    Seat,
};
use node::pools::{PoolRecord, PoolStage, SeenDisk};
use node::publish;
use node::record::{Place, PlaceStage, Stage, VolumeRecord};
use peer::{Incarnation, NodeId, Secret};
use probe::Disk;
use probe::iscsi::{Refused, Session};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use uuid::Uuid;

use crate::common;
use crate::guest::{DATA as DATA_OF_GUEST, Guest, WRITE};

const VOLUME: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_8555_6666_7777_8888);
const TARGET: &str = "iqn.2026-01.io.windrose:web";
const INITIATOR: &str = "iqn.1993-08.org.debian:01:a";
const BYTES: u64 = 4 << 20;
const DATA: u64 = 1 << 20;
const STORE: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(60);

struct Node {
    id: NodeId,
    config: Config,
    engine: Engine,
    portals: Portals,
    /// Where the other nodes reach it.
    addresses: PeerAddresses,
    /// Whether the store does not answer it.
    cut_off: Arc<AtomicBool>,
}

struct Cluster {
    dir: tempfile::TempDir,
    model: Model,
    record: VolumeRecord,
    nodes: BTreeMap<NodeId, Node>,
    generation: u64,
}

fn image(dir: &Path, node: NodeId) -> PathBuf {
    dir.join(format!("web-{VOLUME}-{node}.img"))
}

/// Whom the disks of a node know as their owner.
fn owner(node: NodeId) -> Owner {
    let id = u128::from(node.0);
    Owner { node: Uuid::from_u128(id), directory: id, cluster: None }
}

/// A volume with a copy on each of these nodes, none of which has been made.
fn volume(dir: &Path, nodes: &[NodeId]) -> VolumeRecord {
    let place = |&node: &NodeId| Place {
        node,
        backing: Backing::File { path: image(dir, node) },
        image: None,
        image_generation: 0,
        stage: PlaceStage::Wanted { force: false },
    };
    VolumeRecord {
        id: VOLUME,
        name: "web".parse().unwrap(),
        stage: Stage::Ready,
        size_bytes: BYTES,
        block_size: BlockSize::B512,
        thin: true,
        places: nodes.iter().map(place).collect(),
        copies_wanted: u8::try_from(nodes.len()).unwrap(),
        repair: None,
        creator: None,
        prefer: None,
        protocols: Protocols::default(),
        iscsi_target: TARGET.to_owned(),
        mapping: node::record::Mapping::default(),
        nvme_subsystem: "nqn.2026-01.io.windrose:web".to_owned(),
        allow: ["any".parse().unwrap()].into(),
        chap: None,
        proofs: BTreeMap::new(),
        hosts: BTreeMap::new(),
        tls: BTreeMap::new(),
        created_s: 0,
    }
}

impl Node {
    async fn start(dir: &Path, model: &Model, id: NodeId) -> Self {
        let home = dir.join(format!("node{id}"));
        std::fs::create_dir_all(&home).unwrap();
        let config = common::config(&home, "");
        let cut_off = Arc::new(AtomicBool::new(false));
        let cut = Arc::clone(&cut_off);
        let fate = move |_| if cut.load(Ordering::Relaxed) { Fate::Refused } else { Fate::WELL };
        let meta: Arc<dyn Meta> = Arc::new(model.client(STORE, Box::new(fate)));
        let (mirrors, serve) = Mirrors::new(meta, STORE, None);
        tokio::spawn(serve);
        let loopback = vec!["127.0.0.1:0".parse().unwrap()];
        let seat = Seat {
            cluster: Uuid::from_u128(7),
            secret: Secret::new(&[7; 32]),
            node: id,
            tls: None,
            mirrors,
            settings: Settings::default(),
            turns: Arc::new(Semaphore::new(2)),
            listen: loopback.clone(),
            heartbeat: loopback,
        };
        let engine = Engine::start(&config, owner(id)).await.unwrap();
        let portals = engine.listen(&config).await.unwrap();
        let addresses = engine.enter(seat).await.unwrap();
        engine.accept().await;
        Self { id, config, engine, portals, addresses, cut_off }
    }

    fn view(&self) -> NodeView {
        let Portals { iscsi, nvme, discovery } = self.portals.clone();
        let PeerAddresses { data, heartbeat } = self.addresses.clone();
        let record = NodeRecord {
            data_dir: "/v".into(),
            node: self.id,
            index: NodeIndex::new(u8::try_from(self.id.0 - 1).unwrap()).unwrap(),
            name: format!("node{}", self.id),
            role: Role::Data,
            data,
            heartbeat,
            portals: NodePortals { iscsi, nvme, discovery },
            join: None,
            failure_domain: String::new(),
            version: String::new(),
            drained: false,
        };
        NodeView { record, alive: true }
    }

    async fn mirror(&self) -> MirrorReport {
        let report = self.engine.report(Scope::One(VOLUME)).await;
        report.into_iter().flat_map(|core| core.volumes).find_map(|v| v.mirror).expect("it is open")
    }

    async fn serves(&self) -> bool {
        self.mirror().await.access == Access::Optimized
    }

    /// Waits until the mirror is as it should be.
    async fn until(&self, what: &str, look: impl Fn(&MirrorReport) -> bool) {
        let began = Instant::now();
        loop {
            let mirror = self.mirror().await;
            if look(&mirror) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{what}: node {}: {mirror:?}", self.id);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn until_in_sync(&self, count: usize) {
        let in_sync = |m: &MirrorReport| {
            let members = m.status.record.as_ref().map_or(0, |r| r.in_sync.len());
            m.access == Access::Optimized && members == count
        };
        self.until(&format!("{count} in sync"), in_sync).await;
    }

    /// Where guests reach the volume.
    fn socket(&self) -> PathBuf {
        let directory = self.config.vhost_user.directory.as_ref().unwrap();
        node::engine::socket(directory, &"web".parse().unwrap())
    }

    async fn log_in(&self, isid: u32) -> Session {
        let at = self.portals.iscsi[0];
        let login = move || Session::login(at, INITIATOR, TARGET, 0, isid).unwrap();
        tokio::task::spawn_blocking(login).await.unwrap()
    }
}

impl Cluster {
    /// Nodes that serve the volume, all in sync.
    async fn start(count: u16) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (model, ids) = (Model::default(), (1..=count).map(NodeId).collect::<Vec<_>>());
        let mut record = volume(dir.path(), &ids);
        let mut nodes = BTreeMap::new();
        for id in &ids {
            let node = Node::start(dir.path(), &model, *id).await;
            let made = node.engine.make(&record, false).await.unwrap();
            record.see(*id, made);
            record.place_mut(*id).unwrap().stage = PlaceStage::Made;
            nodes.insert(*id, node);
        }
        let replica = |p: &Place| Replica { node: p.node, image: p.image.unwrap(), new: false };
        let member = |p: &Place| Member { node: p.node, incarnation: Incarnation(0) };
        let first = Record {
            epoch: Epoch(1),
            config: 1,
            replicas: record.places.iter().map(replica).collect(),
            in_sync: record.places.iter().map(member).collect(),
            primary: ids[0],
            born: Epoch::default(),
            history: History::default(),
        };
        let store = model.client(STORE, Box::new(|_| Fate::WELL));
        store.commit(vec![mirrors::create(VOLUME, &first)]).await.unwrap();
        let mut cluster = Self { dir, model, record, nodes, generation: 0 };
        for id in &ids {
            cluster.open(*id).await;
        }
        for id in &ids {
            cluster.node(*id).until_in_sync(ids.len()).await;
        }
        cluster.publish().await;
        cluster
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[&id]
    }

    /// Opens the volume at a node, and makes the nodes known to each other.
    async fn open(&mut self, id: NodeId) {
        let opened = self.node(id).engine.open(&self.record).await.unwrap();
        self.record.see(id, opened.image);
        for node in self.nodes.values() {
            self.introduce(node).await;
        }
    }

    async fn introduce(&self, node: &Node) {
        let all = self.nodes.values().map(|n| (n.id, n.addresses.clone())).collect();
        // Not everywhere it is open.
        let _ = node.engine.set_peers(VOLUME, all).await;
    }

    /// Has every node tell its initiators what there is.
    async fn publish(&mut self) {
        let (store, serve) = Mirrors::new(self.store(), STORE, None);
        let serving = tokio::spawn(serve);
        let mirror = store.of(VOLUME).read().await.unwrap();
        serving.abort();
        let nodes: Nodes = self.nodes.values().map(|n| (n.id, n.view())).collect();
        self.generation += 1;
        for node in self.nodes.values() {
            let core = self.core_of(node).await;
            let open = [(&self.record, publish::Here::Open { core })].into_iter();
            let Portals { iscsi, nvme, .. } = &node.portals;
            let mut catalog =
                publish::catalog(open, &Ring::default(), iscsi, nvme, self.generation);
            let open = [(&self.record, Some(&mirror))].into_iter();
            publish::share(&mut catalog, node.id, &nodes, open);
            node.engine.publish(catalog, Exported::from([(VOLUME, "web".parse().unwrap())])).await;
        }
    }

    async fn core_of(&self, node: &Node) -> usize {
        let report = node.engine.report(Scope::One(VOLUME)).await;
        report.iter().find(|core| !core.volumes.is_empty()).expect("it is open").core
    }

    fn store(&self) -> Arc<dyn Meta> {
        Arc::new(self.model.client(STORE, Box::new(|_| Fate::WELL)))
    }

    /// The process of a node dies.
    fn kill(&mut self, id: NodeId) {
        drop(self.nodes.remove(&id));
        // What a process leaves behind is closed by the system, which knows of none that ended: it
        // goes on with a copy of the image that nobody has open.
        let Backing::File { path } = &mut self.record.place_mut(id).unwrap().backing else {
            return;
        };
        let again = path.with_extension("again.img");
        std::fs::copy(&*path, &again).unwrap();
        *path = again;
    }

    /// A node whose process has died starts again.
    async fn restart(&mut self, id: NodeId) {
        let node = Node::start(self.dir.path(), &self.model, id).await;
        self.nodes.insert(id, node);
        self.open(id).await;
    }

    /// Stops all in order; then all images are equal.
    async fn stop(self) {
        for node in self.nodes.values() {
            let deadline = Instant::now() + Duration::from_secs(20);
            assert!(node.engine.stop(deadline).await, "node {} stops in order", node.id);
        }
        let data = |node: &Node| {
            let place = self.record.place(node.id).unwrap();
            let bytes = std::fs::read(place.backing.path().unwrap()).unwrap();
            let end = bytes.len().min(usize::try_from(DATA + BYTES).unwrap());
            let mut data = bytes[usize::try_from(DATA).unwrap()..end].to_vec();
            data.resize(usize::try_from(BYTES).unwrap(), 0);
            data
        };
        let all: Vec<_> = self.nodes.values().map(data).collect();
        assert!(all.iter().all(|other| *other == all[0]), "images differ");
    }
}

/// Runs what blocks, again while a unit attention or a change of the access state is told.
#[expect(clippy::disallowed_methods, reason = "no core is here to be blocked")]
async fn with<T: Send + 'static>(
    mut session: Session,
    mut work: impl FnMut(&mut Session) -> std::io::Result<T> + Send + 'static,
) -> (Session, T) {
    let run = move || {
        let began = std::time::Instant::now();
        loop {
            match work(&mut session) {
                Ok(done) => return (session, done),
                Err(e) if began.elapsed() > PATIENCE => panic!("{e}"),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

async fn write(session: Session, lba: u64, byte: u8) -> Session {
    with(session, move |s| s.write(lba, &[byte; 8192], false)).await.0
}

async fn read(session: Session, lba: u64) -> (Session, Vec<u8>) {
    with(session, move |s| {
        let mut into = vec![0; 8192];
        s.read(lba, &mut into).map(|()| into)
    })
    .await
}

/// What REPORT TARGET PORT GROUPS says: each group, and its state.
async fn groups(session: Session) -> (Session, Vec<(u16, u8)>) {
    let (session, page) = with(session, |s| {
        let mut cdb = [0; 16];
        (cdb[0], cdb[1], cdb[9]) = (0xa3, 0x0a, 255);
        let mut page = vec![0; 255];
        s.good(&cdb, &[], &mut page).map(|()| page)
    })
    .await;
    let len = usize::try_from(u32::from_be_bytes(page[..4].try_into().unwrap())).unwrap();
    let mut groups = Vec::new();
    let mut rest = &page[4..4 + len];
    while let [state, _, high, low, _, _, _, ports, more @ ..] = rest {
        groups.push((u16::from_be_bytes([*high, *low]), state & 0xf));
        rest = &more[usize::from(*ports) * 4..];
    }
    (session, groups)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_served_by_all_nodes_and_goes_on_without_one() {
    let mut cluster = Cluster::start(2).await;
    let [one, two] = [1, 2].map(NodeId);
    let (a, b) = (cluster.node(one).log_in(1).await, cluster.node(two).log_in(2).await);
    let a = write(a, 0, 0x11).await;
    let (b, found) = read(b, 0).await;
    assert!(found.iter().all(|byte| *byte == 0x11));
    let b = write(b, 64, 0x22).await;
    let (a, found) = read(a, 64).await;
    assert!(found.iter().all(|byte| *byte == 0x22));
    let (b, told) = groups(b).await;
    assert_eq!(told, [(1, 0), (2, 0)], "both are optimized");

    // The process of node 1 dies.
    drop(a);
    cluster.kill(one);
    let began = Instant::now();
    let b = write(b, 128, 0x33).await;
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    cluster.node(two).until_in_sync(1).await;
    cluster.restart(one).await;
    cluster.node(one).until_in_sync(2).await;
    cluster.publish().await;
    let a = cluster.node(one).log_in(3).await;
    let (a, found) = read(a, 128).await;
    assert!(found.iter().all(|byte| *byte == 0x33));
    let (a, told) = groups(a).await;
    assert_eq!(told, [(1, 0), (2, 0)]);
    drop((a, b));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_leaves_in_order_holds_up_nobody_and_stays_out() {
    let cluster = Cluster::start(3).await;
    let ids = [1, 2, 3].map(NodeId);
    let leader = cluster.node(ids[0]).mirror().await.status.record.unwrap().primary;
    let other = *ids.iter().find(|id| **id != leader).unwrap();
    let session = write(cluster.node(other).log_in(1).await, 0, 1).await;
    let began = Instant::now();
    assert!(cluster.node(leader).engine.leave(VOLUME).await.unwrap());
    assert_eq!(
        cluster.node(leader).mirror().await.status.why.map(|why| is_outside(&why)),
        Some(true)
    );
    let session = write(session, 0, 2).await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    cluster.node(leader).until("told", |m| m.access == Access::Unavailable).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!cluster.node(leader).serves().await, "it stays out");
    cluster.node(leader).engine.rejoin(VOLUME).await.unwrap();
    cluster.node(leader).until_in_sync(3).await;
    drop(session);

    let primary = cluster.node(other).mirror().await.status.record.unwrap().primary;
    let next = *ids.iter().find(|id| **id != primary).unwrap();
    let refused = cluster.node(next).engine.switch_to(VOLUME, next).await;
    assert!(refused.unwrap_err().to_string().contains("is its primary"));
    cluster.node(primary).engine.switch_to(VOLUME, next).await.unwrap();
    cluster
        .node(next)
        .until("leads", |m| {
            m.status.why.is_none() && m.status.record.as_ref().is_some_and(|r| r.primary == next)
        })
        .await;
    cluster.stop().await;
}

/// A guest at a node's own socket has that node alone: it waits as long as the node does not serve, and over its death.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_waits_for_its_node() {
    let mut cluster = Cluster::start(2).await;
    let [one, two] = [1, 2].map(NodeId);
    let socket = cluster.node(two).socket();
    let guest = tokio::task::spawn_blocking(move || {
        listened_at(&socket);
        let mut guest = Guest::boot(&socket, 1);
        let head = put(&mut guest, 1);
        assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1)]);
        guest
    });
    let mut guest = guest.await.unwrap();

    // Node 2 leaves, and stays out for longer than anything is held.
    assert!(cluster.node(two).engine.leave(VOLUME).await.unwrap());
    cluster.node(two).until("told", |m| m.access == Access::Unavailable).await;
    let head = put(&mut guest, 2);
    let a = write(cluster.node(one).log_in(1).await, 64, 9).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(guest.rings[0].take(&guest.memory), [], "it waits");
    assert_eq!(guest.get(STATUS, 1), [UNTOUCHED]);
    cluster.node(two).engine.rejoin(VOLUME).await.unwrap();
    cluster.node(two).until_in_sync(2).await;
    let answered = tokio::task::spawn_blocking(move || {
        assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1)]);
        assert_eq!(guest.get(STATUS, 1), [0]);
        guest
    });
    let mut guest = answered.await.unwrap();

    // It is stopped while a request waits: that is not answered, and done by who comes next.
    assert!(cluster.node(two).engine.leave(VOLUME).await.unwrap());
    cluster.node(two).until("told", |m| m.access == Access::Unavailable).await;
    let head = put(&mut guest, 3);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let deadline = Instant::now() + Duration::from_secs(20);
    assert!(cluster.node(two).engine.stop(deadline).await, "it stops in order");
    assert_eq!((guest.get(STATUS, 1), guest.rings[0].used(&guest.memory)), (vec![UNTOUCHED], 2));
    cluster.kill(two);
    cluster.restart(two).await;
    cluster.publish().await;
    let socket = cluster.node(two).socket();
    let answered = tokio::task::spawn_blocking(move || {
        listened_at(&socket);
        guest.reconnect(&socket);
        assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1)]);
        assert_eq!(guest.get(STATUS, 1), [0]);
        guest
    });
    drop(answered.await.unwrap());
    let (a, found) = read(a, 0).await;
    assert!(found[..4096].iter().all(|byte| *byte == 3), "the other node has it too");
    drop(a);
    cluster.stop().await;
}

/// Where a guest's request has its status.
const STATUS: u64 = DATA_OF_GUEST + 16;
const UNTOUCHED: u8 = 0xee;

/// Has a guest write 4 KiB at the start of the volume; gives the request's head.
fn put(guest: &mut Guest, byte: u8) -> u16 {
    guest.header(DATA_OF_GUEST, 1, 0);
    guest.put(DATA_OF_GUEST + 0x1000, &[byte; 4096]);
    guest.put(STATUS, &[UNTOUCHED]);
    let parts = [(DATA_OF_GUEST, 16, 0), (DATA_OF_GUEST + 0x1000, 4096, 0), (STATUS, 1, WRITE)];
    guest.rings[0].send(&guest.memory, &parts).unwrap()
}

/// Waits until somebody listens at `socket`.
#[expect(clippy::disallowed_methods, reason = "no core is here to be blocked")]
fn listened_at(socket: &Path) {
    let began = std::time::Instant::now();
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        assert!(began.elapsed() < PATIENCE, "nobody listens at {}", socket.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_outside(why: &Why) -> bool {
    matches!(why, Why::Outside(_))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_cut_off_sends_its_initiators_away() {
    let cluster = Cluster::start(2).await;
    let [one, two] = [1, 2].map(NodeId);
    let b = write(cluster.node(two).log_in(2).await, 0, 1).await;
    // Node 2 loses the way to node 1, and to the store.
    cluster.node(two).cut_off.store(true, Ordering::Relaxed);
    cluster.node(one).engine.set_peers(VOLUME, BTreeMap::new()).await.unwrap();
    cluster.node(two).until("lapsed", |m| m.access == Access::Transitioning).await;
    let held = tokio::task::spawn_blocking(move || {
        let (mut b, mut into) = (b, vec![0; 512]);
        let cdb = Session::cdb16(0x88, 0, 0, 1);
        // The change of the state is told first.
        let mut run = || match b.good(&cdb, &[], &mut into) {
            Ok(()) => 0,
            Err(e) => Refused::of(&e).unwrap().status,
        };
        let first = run();
        let status = if first == 2 { run() } else { first };
        (b, status)
    });
    cluster.node(two).until("cut off", |m| m.access == Access::Unavailable).await;
    let ended = tokio::time::timeout(Duration::from_secs(2), held).await;
    let (b, status) = ended.expect("what was held ends with the hope").unwrap();
    assert_eq!(status, 2, "CHECK CONDITION");
    cluster.node(one).until_in_sync(1).await;
    let a = write(cluster.node(one).log_in(1).await, 0, 2).await;

    // All comes back.
    cluster.node(two).cut_off.store(false, Ordering::Relaxed);
    cluster.introduce(cluster.node(one)).await;
    cluster.node(two).until_in_sync(2).await;
    let (b, found) = read(b, 0).await;
    assert!(found.iter().all(|byte| *byte == 2));
    drop((a, b));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_whose_disk_was_lost_is_noted_until_it_is_opened_again() {
    let mut cluster = Cluster::start(2).await;
    let two = NodeId(2);
    let name = cluster.record.place(two).unwrap().image.unwrap().to_string();
    let note = cluster.dir.path().join("node2/data/distrusted-images").join(name);
    cluster.kill(two);
    std::fs::create_dir_all(note.parent().unwrap()).unwrap();
    std::fs::write(&note, "").unwrap();
    cluster.restart(two).await;
    cluster.node(two).until_in_sync(2).await;
    assert!(!note.exists(), "its own log says it");
    cluster.publish().await;

    let path = cluster.record.place(two).unwrap().backing.path().unwrap();
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(DATA).unwrap();
    let mut session = cluster.node(two).log_in(1).await;
    // The other node answers, or its initiators are sent there.
    let reading = tokio::task::spawn_blocking(move || session.read(64, &mut [0; 8192]));
    cluster.node(two).until("lost", |m| m.status.why == Some(Why::LegDead)).await;
    let began = Instant::now();
    while !note.exists() {
        assert!(began.elapsed() < PATIENCE, "it is not noted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let _ = reading.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn differences_are_found_and_repaired() {
    let cluster = Cluster::start(2).await;
    let ids = [1, 2].map(NodeId);
    let primary = cluster.node(ids[0]).mirror().await.status.record.unwrap().primary;
    let other = *ids.iter().find(|id| **id != primary).unwrap();
    drop(write(cluster.node(primary).log_in(1).await, 0, 1).await);
    let engine = &cluster.node(primary).engine;
    assert!(engine.verify(VOLUME, None).await.unwrap().differences.is_empty());
    let file =
        std::fs::OpenOptions::new().write(true).open(image(cluster.dir.path(), other)).unwrap();
    file.write_all_at(&[0xee; 512], DATA).unwrap();
    file.sync_all().unwrap();
    let refused = cluster.node(other).engine.verify(VOLUME, Some(other)).await;
    assert!(refused.unwrap_err().to_string().contains("ask there"));
    let found = engine.verify(VOLUME, None).await.unwrap();
    assert_eq!((found.differences.len(), found.differences[0].node), (1, other));
    assert_eq!(found.repaired, 0);
    let stranger = engine.verify(VOLUME, Some(NodeId(9))).await;
    assert!(stranger.unwrap_err().to_string().contains("is not in sync"));
    // The other one's contents are kept, which are not the primary's.
    assert_eq!(engine.verify(VOLUME, Some(other)).await.unwrap().repaired, 512);
    assert!(engine.verify(VOLUME, None).await.unwrap().differences.is_empty());
    for node in ids {
        let image = std::fs::File::open(image(cluster.dir.path(), node)).unwrap();
        let mut found = [0; 512];
        image.read_exact_at(&mut found, DATA).unwrap();
        assert_eq!(found, [0xee; 512], "node {node}");
    }
    cluster.stop().await;
}

/// RFD 0032: a copy of a running node's image takes the image's place, after what was written since has left no
/// marks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_was_set_back_gets_a_full_copy() {
    let mut cluster = Cluster::start(2).await;
    let [one, two] = [1, 2].map(NodeId);
    let session = write(cluster.node(one).log_in(1).await, 0, 0x11).await;
    let saved = cluster.dir.path().join("saved.img");
    std::fs::copy(image(cluster.dir.path(), two), &saved).unwrap();
    let session = write(session, 0, 0x22).await;
    let unmarked = |m: &MirrorReport| m.status.marked.iter().all(|(_, regions)| *regions == 0);
    for id in [one, two] {
        cluster.node(id).until("marks are left", unmarked).await;
    }
    cluster.kill(two);
    cluster.node(one).until_in_sync(1).await;
    let Backing::File { path } = &cluster.record.place(two).unwrap().backing else {
        panic!("another backing")
    };
    std::fs::copy(&saved, path).unwrap();
    cluster.restart(two).await;
    cluster.node(two).until_in_sync(2).await;
    let record = cluster.node(one).mirror().await.status.record.unwrap();
    assert_eq!(record.history.set_back, [two]);
    drop(session);
    cluster.publish().await;
    let (session, found) = read(cluster.node(two).log_in(2).await, 0).await;
    assert!(found.iter().all(|byte| *byte == 0x22), "it reads what was before");
    drop(session);
    cluster.stop().await;
}

/// An image of the time when its node was by itself: it gets its intent log when it is opened, and a
/// volume that was closed can be erased at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_from_before_the_cluster_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let id = NodeId(1);
    let mut record = volume(dir.path(), &[id]);
    let model = Model::default();
    let node = Node::start(dir.path(), &model, id).await;
    let alone = Engine::start(&node.config, owner(node.id)).await.unwrap();
    let made = alone.make(&record, false).await.unwrap();
    record.see(id, made);
    assert!(alone.stop(Instant::now() + Duration::from_secs(10)).await);
    let first = Record {
        epoch: Epoch(1),
        config: 1,
        replicas: vec![Replica { node: id, image: made.image, new: false }],
        in_sync: vec![Member { node: id, incarnation: Incarnation(0) }],
        primary: id,
        born: Epoch::default(),
        history: History::default(),
    };
    let store = model.client(STORE, Box::new(|_| Fate::WELL));
    store.commit(vec![mirrors::create(VOLUME, &first)]).await.unwrap();
    let opened = node.engine.open(&record).await.unwrap();
    assert!(opened.image.generation > made.generation, "its label tells of the log");
    assert_eq!(opened.image.image, made.image);
    node.until_in_sync(1).await;
    assert!(!node.engine.leave(VOLUME).await.unwrap(), "there is nobody to leave it to");
    assert!(node.engine.grow(&record, 2 * BYTES).await.is_err(), "not yet");
    node.engine.close(VOLUME, false).await.unwrap();
    node.engine.erase(&record).await.unwrap();
    assert!(!image(dir.path(), id).exists());
    assert!(node.engine.stop(Instant::now() + Duration::from_secs(10)).await);
}

/// RFD 0037, attack 12: a node of a cluster keeps what other nodes send memory for before a pool of disks takes it, so that a
/// volume of the pool is refused by name, with the setting that suffices, and mirrored volumes beside it are served.
#[tokio::test]
async fn a_pool_of_disks_does_not_take_the_memory_that_mirrored_volumes_need() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), &Model::default(), NodeId(1)).await;
    node.engine.expect_peers().await;
    let disks: Vec<PathBuf> = ["x", "y"].map(|name| dir.path().join(name)).into();
    for path in &disks {
        std::fs::File::create(path).unwrap().set_len(1 << 30).unwrap();
    }
    let seen = |path: &PathBuf| SeenDisk { path: path.clone(), serial: None, out: false };
    let pool = PoolRecord {
        id: Uuid::from_u128(7),
        name: "tank".parse().unwrap(),
        stage: PoolStage::Ready,
        rings: 2,
        disks: disks.iter().map(seen).collect(),
    };
    let new = |path: &PathBuf| NewDisk { path: path.clone(), overwrite: Vec::new() };
    let new = NewPool {
        level: Level::Copies(2),
        columns: None,
        strip_bytes: 64 << 10,
        checksums: false,
        disks: disks.iter().map(new).collect(),
        spares: Vec::new(),
    };
    node.engine.create_pool(&pool, new).await.unwrap();
    let mut within = volume(dir.path(), &[NodeId(1)]);
    within.places[0].backing = Backing::Pool { pool: pool.name.clone() };
    let refused = node.engine.make(&within, false).await.unwrap_err().to_string();
    assert!(refused.contains("set cores.pool to \"18MiB\" or more"), "{refused}");
    let mut beside = volume(dir.path(), &[NodeId(1)]);
    let made = node.engine.make(&beside, false).await.unwrap();
    beside.see(NodeId(1), made);
    node.engine.open(&beside).await.unwrap();
    node.engine.stop(Instant::now() + PATIENCE).await;
}

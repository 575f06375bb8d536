//! Data planes of a cluster in one process, each with its own cores, over loopback: a mirrored
//! volume with iSCSI initiators at every node. Without a control plane: the test does its work.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::{Backing, BlockSize, Protocols};
use block::{Access, Epoch};
use cluster::identity::{NodeIndex, Role};
use cluster::mirror_records::{self, MirrorRecords};
use cluster::nodes::{NodePortals, NodeRecord, NodeView, Nodes};
use cluster::secrets::Keyring;
use cluster::store::MetadataStore;
use cluster::store::memory::{CallDelivery, MemoryStore};
use config::Config;
use engine::{
    ClusterContext, Engine, ExportedVolumes, MirrorReport, NewDisk, NewPool, NodeDiskOwner,
    PeerAddresses, Portals, Redundancy, ReportScope,
};
use mirror::MirrorSettings;
use mirror::config::{ConfigReplica, ConfigStore, CopyHistory, InSyncMember, MirrorConfig};
use mirror::membership::NotServingReason;
use peer::{Incarnation, NodeId, PeerSecret};
use probe::BlockClient;
use probe::iscsi::{ScsiFailure, Session};
use records::catalog;
use records::pool_records::{KnownDisk, PoolRecord, PoolStage};
use records::record::{PlacementStage, ReplicaPlacement, VolumeRecord, VolumeStage};
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
    /// Its addresses for the other nodes.
    addresses: PeerAddresses,
    /// Whether the store does not answer this node.
    cut_off: Arc<AtomicBool>,
}

struct Cluster {
    dir: tempfile::TempDir,
    model: MemoryStore,
    record: VolumeRecord,
    nodes: BTreeMap<NodeId, Node>,
    generation: u64,
}

fn image(dir: &Path, node: NodeId) -> PathBuf {
    dir.join(format!("web-{VOLUME}-{node}.img"))
}

/// The owner that a node writes on its disks.
fn owner(node: NodeId) -> NodeDiskOwner {
    let id = u128::from(node.0);
    NodeDiskOwner { node: Uuid::from_u128(id), directory: id, cluster: None }
}

/// A volume with a replica on each of these nodes, none of which has been created.
fn volume(dir: &Path, nodes: &[NodeId]) -> VolumeRecord {
    let placement = |&node: &NodeId| ReplicaPlacement {
        node,
        backing: Backing::File { path: image(dir, node) },
        image: None,
        image_generation: 0,
        stage: PlacementStage::Creating { force: false },
    };
    VolumeRecord {
        id: VOLUME,
        name: "web".parse().unwrap(),
        stage: VolumeStage::Ready,
        size_bytes: BYTES,
        block_size: BlockSize::B512,
        thin: true,
        placements: nodes.iter().map(placement).collect(),
        replicas_wanted: u8::try_from(nodes.len()).unwrap(),
        repair: None,
        creator: None,
        preferred_primary: None,
        protocols: Protocols::default(),
        iscsi_target: TARGET.to_owned(),
        mapping: records::record::LunMapping::default(),
        nvme_subsystem: "nqn.2026-01.io.windrose:web".to_owned(),
        allow: ["any".parse().unwrap()].into(),
        chap: None,
        chap_by_initiator: BTreeMap::new(),
        dhchap_by_host: BTreeMap::new(),
        tls_by_host: BTreeMap::new(),
        created_s: 0,
    }
}

impl Node {
    async fn start(dir: &Path, model: &MemoryStore, id: NodeId) -> Self {
        let home = dir.join(format!("node{id}"));
        std::fs::create_dir_all(&home).unwrap();
        let config = common::config(&home, "");
        let cut_off = Arc::new(AtomicBool::new(false));
        let cut = Arc::clone(&cut_off);
        let fate = move |_| {
            if cut.load(Ordering::Relaxed) {
                CallDelivery::Refused
            } else {
                CallDelivery::IMMEDIATE
            }
        };
        let meta: Arc<dyn MetadataStore> = Arc::new(model.client(STORE, Box::new(fate)));
        let (mirrors, serve) = MirrorRecords::new(meta, STORE, None);
        tokio::spawn(serve);
        let loopback = vec!["127.0.0.1:0".parse().unwrap()];
        let context = ClusterContext {
            cluster: Uuid::from_u128(7),
            secret: PeerSecret::new(&[7; 32]),
            node: id,
            tls: None,
            mirrors,
            settings: MirrorSettings::default(),
            resync_permits: Arc::new(Semaphore::new(2)),
            listen: loopback.clone(),
            heartbeat: loopback,
        };
        let engine = Engine::start(&config, owner(id)).await.unwrap();
        let portals = engine.listen(&config).await.unwrap();
        let addresses = engine.join_cluster(context).await.unwrap();
        engine.accept_clients().await;
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
            data_addresses: data,
            heartbeat_addresses: heartbeat,
            portals: NodePortals { iscsi, nvme, discovery },
            join_address: None,
            failure_domain: String::new(),
            version: String::new(),
            is_drained: false,
        };
        NodeView { record, is_alive: true }
    }

    async fn mirror(&self) -> MirrorReport {
        let report = self.engine.report(ReportScope::One(VOLUME)).await;
        report.into_iter().flat_map(|core| core.volumes).find_map(|v| v.mirror).expect("it is open")
    }

    async fn serves(&self) -> bool {
        self.mirror().await.access == Access::Optimized
    }

    /// Waits until the mirror satisfies `look`.
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
            let members = m.status.config.as_ref().map_or(0, |r| r.in_sync.len());
            m.access == Access::Optimized && members == count
        };
        self.until(&format!("{count} in sync"), in_sync).await;
    }

    /// The volume's socket for guests.
    fn socket(&self) -> PathBuf {
        let directory = self.config.vhost_user.directory.as_ref().unwrap();
        engine::socket_path(directory, &"web".parse().unwrap())
    }

    async fn log_in(&self, isid: u32) -> Session {
        let at = self.portals.iscsi[0];
        let login = move || Session::login(at, INITIATOR, TARGET, 0, isid).unwrap();
        tokio::task::spawn_blocking(login).await.unwrap()
    }
}

impl Cluster {
    /// Starts nodes that serve the volume, all in sync.
    async fn start(count: u16) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (model, ids) = (MemoryStore::default(), (1..=count).map(NodeId).collect::<Vec<_>>());
        let mut record = volume(dir.path(), &ids);
        let mut nodes = BTreeMap::new();
        for id in &ids {
            let node = Node::start(dir.path(), &model, *id).await;
            let image = node.engine.create_image(&record, false).await.unwrap();
            record.record_image(*id, image);
            record.placement_mut(*id).unwrap().stage = PlacementStage::Ready;
            nodes.insert(*id, node);
        }
        let replica = |p: &ReplicaPlacement| ConfigReplica {
            node: p.node,
            image: p.image.unwrap(),
            is_new: false,
        };
        let member =
            |p: &ReplicaPlacement| InSyncMember { node: p.node, incarnation: Incarnation(0) };
        let first = MirrorConfig {
            epoch: Epoch(1),
            config_id: 1,
            replicas: record.placements.iter().map(replica).collect(),
            in_sync: record.placements.iter().map(member).collect(),
            primary: ids[0],
            cold_start_epoch: Epoch::default(),
            history: CopyHistory::default(),
        };
        let store = model.client(STORE, Box::new(|_| CallDelivery::IMMEDIATE));
        store.commit(vec![mirror_records::creation(VOLUME, &first)]).await.unwrap();
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

    /// Opens the volume at a node, and introduces the nodes to each other.
    async fn open(&mut self, id: NodeId) {
        let opened = self.node(id).engine.open(&self.record).await.unwrap();
        self.record.record_image(id, opened.image);
        for node in self.nodes.values() {
            self.introduce(node).await;
        }
    }

    async fn introduce(&self, node: &Node) {
        let all = self.nodes.values().map(|n| (n.id, n.addresses.clone())).collect();
        // Fails where the volume is not open.
        let _ = node.engine.set_peers(VOLUME, all).await;
    }

    /// Publishes the current catalog at every node.
    async fn publish(&mut self) {
        let (store, serve) = MirrorRecords::new(self.store(), STORE, None);
        let serving = tokio::spawn(serve);
        let mirror = store.record_of(VOLUME).read().await.unwrap();
        serving.abort();
        let nodes: Nodes = self.nodes.values().map(|n| (n.id, n.view())).collect();
        self.generation += 1;
        for node in self.nodes.values() {
            let core = self.core_of(node).await;
            let open = [(&self.record, catalog::LocalState::Open { core })].into_iter();
            let Portals { iscsi, nvme, .. } = &node.portals;
            let mut catalog =
                catalog::build_catalog(open, &Keyring::default(), iscsi, nvme, self.generation);
            let open = [(&self.record, Some(&mirror))].into_iter();
            catalog::add_cluster_paths(&mut catalog, node.id, &nodes, open);
            node.engine
                .publish(catalog, ExportedVolumes::from([(VOLUME, "web".parse().unwrap())]))
                .await;
        }
    }

    async fn core_of(&self, node: &Node) -> usize {
        let report = node.engine.report(ReportScope::One(VOLUME)).await;
        report.iter().find(|core| !core.volumes.is_empty()).expect("it is open").core
    }

    fn store(&self) -> Arc<dyn MetadataStore> {
        Arc::new(self.model.client(STORE, Box::new(|_| CallDelivery::IMMEDIATE)))
    }

    /// Simulates the death of a node's process.
    fn kill(&mut self, id: NodeId) {
        drop(self.nodes.remove(&id));
        // The kernel would close what a dead process leaves open. Here the process lives on:
        // continue with a copy of the image, which is not open.
        let Backing::File { path } = &mut self.record.placement_mut(id).unwrap().backing else {
            return;
        };
        let again = path.with_extension("again.img");
        std::fs::copy(&*path, &again).unwrap();
        *path = again;
    }

    /// Restarts a node whose process died.
    async fn restart(&mut self, id: NodeId) {
        let node = Node::start(self.dir.path(), &self.model, id).await;
        self.nodes.insert(id, node);
        self.open(id).await;
    }

    /// Stops all nodes in order, and checks that all images are equal.
    async fn stop(self) {
        for node in self.nodes.values() {
            let deadline = Instant::now() + Duration::from_secs(20);
            assert!(node.engine.stop(deadline).await, "node {} stops in order", node.id);
        }
        let data = |node: &Node| {
            let placement = self.record.placement(node.id).unwrap();
            let bytes = std::fs::read(placement.backing.path().unwrap()).unwrap();
            let end = bytes.len().min(usize::try_from(DATA + BYTES).unwrap());
            let mut data = bytes[usize::try_from(DATA).unwrap()..end].to_vec();
            data.resize(usize::try_from(BYTES).unwrap(), 0);
            data
        };
        let all: Vec<_> = self.nodes.values().map(data).collect();
        assert!(all.iter().all(|other| *other == all[0]), "images differ");
    }
}

/// Runs blocking code; repeats it while a unit attention or a change of the access state is
/// reported.
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

/// The result of REPORT TARGET PORT GROUPS: each group and its state.
async fn groups(session: Session) -> (Session, Vec<(u16, u8)>) {
    let (session, page) = with(session, |s| {
        let mut cdb = [0; 16];
        (cdb[0], cdb[1], cdb[9]) = (0xa3, 0x0a, 255);
        let mut page = vec![0; 255];
        s.execute(&cdb, &[], &mut page).map(|()| page)
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
    let (b, states) = groups(b).await;
    assert_eq!(states, [(1, 0), (2, 0)], "both are optimized");

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
    let (a, states) = groups(a).await;
    assert_eq!(states, [(1, 0), (2, 0)]);
    drop((a, b));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_leaves_in_order_holds_up_nobody_and_stays_out() {
    let cluster = Cluster::start(3).await;
    let ids = [1, 2, 3].map(NodeId);
    let leader = cluster.node(ids[0]).mirror().await.status.config.unwrap().primary;
    let other = *ids.iter().find(|id| **id != leader).unwrap();
    let session = write(cluster.node(other).log_in(1).await, 0, 1).await;
    let began = Instant::now();
    assert!(cluster.node(leader).engine.leave_mirror(VOLUME).await.unwrap());
    assert_eq!(
        cluster.node(leader).mirror().await.status.not_serving.map(|why| is_outside(&why)),
        Some(true)
    );
    let session = write(session, 0, 2).await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    cluster.node(leader).until("told", |m| m.access == Access::Unavailable).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!cluster.node(leader).serves().await, "it stays out");
    cluster.node(leader).engine.rejoin_mirror(VOLUME).await.unwrap();
    cluster.node(leader).until_in_sync(3).await;
    drop(session);

    let primary = cluster.node(other).mirror().await.status.config.unwrap().primary;
    let next = *ids.iter().find(|id| **id != primary).unwrap();
    let refused = cluster.node(next).engine.switch_primary(VOLUME, next).await;
    assert!(refused.unwrap_err().to_string().contains("is its primary"));
    cluster.node(primary).engine.switch_primary(VOLUME, next).await.unwrap();
    cluster
        .node(next)
        .until("leads", |m| {
            m.status.not_serving.is_none()
                && m.status.config.as_ref().is_some_and(|r| r.primary == next)
        })
        .await;
    cluster.stop().await;
}

/// A guest at a node's own socket has only that node: it waits while the node does not serve, and
/// during its restart.
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

    // Node 2 leaves, and stays out for longer than any request is held.
    assert!(cluster.node(two).engine.leave_mirror(VOLUME).await.unwrap());
    cluster.node(two).until("told", |m| m.access == Access::Unavailable).await;
    let head = put(&mut guest, 2);
    let a = write(cluster.node(one).log_in(1).await, 64, 9).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(guest.rings[0].take(&guest.memory), [], "it waits");
    assert_eq!(guest.get(STATUS, 1), [UNTOUCHED]);
    cluster.node(two).engine.rejoin_mirror(VOLUME).await.unwrap();
    cluster.node(two).until_in_sync(2).await;
    let answered = tokio::task::spawn_blocking(move || {
        assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1)]);
        assert_eq!(guest.get(STATUS, 1), [0]);
        guest
    });
    let mut guest = answered.await.unwrap();

    // Stopped while a request waits: it is not answered, and the next process completes it.
    assert!(cluster.node(two).engine.leave_mirror(VOLUME).await.unwrap());
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

/// The address of the status of a guest's request.
const STATUS: u64 = DATA_OF_GUEST + 16;
const UNTOUCHED: u8 = 0xee;

/// Makes a guest write 4 KiB at the start of the volume; returns the request's head.
fn put(guest: &mut Guest, byte: u8) -> u16 {
    guest.header(DATA_OF_GUEST, 1, 0);
    guest.put(DATA_OF_GUEST + 0x1000, &[byte; 4096]);
    guest.put(STATUS, &[UNTOUCHED]);
    let parts = [(DATA_OF_GUEST, 16, 0), (DATA_OF_GUEST + 0x1000, 4096, 0), (STATUS, 1, WRITE)];
    guest.rings[0].send(&guest.memory, &parts).unwrap()
}

/// Waits until a process listens at `socket`.
#[expect(clippy::disallowed_methods, reason = "no core is here to be blocked")]
fn listened_at(socket: &Path) {
    let began = std::time::Instant::now();
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        assert!(began.elapsed() < PATIENCE, "no listener at {}", socket.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_outside(why: &NotServingReason) -> bool {
    matches!(why, NotServingReason::OutOfSync(_))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_cut_off_sends_its_initiators_away() {
    let cluster = Cluster::start(2).await;
    let [one, two] = [1, 2].map(NodeId);
    let b = write(cluster.node(two).log_in(2).await, 0, 1).await;
    // Node 2 loses its connections to node 1 and to the store.
    cluster.node(two).cut_off.store(true, Ordering::Relaxed);
    cluster.node(one).engine.set_peers(VOLUME, BTreeMap::new()).await.unwrap();
    cluster.node(two).until("lapsed", |m| m.access == Access::Transitioning).await;
    let held = tokio::task::spawn_blocking(move || {
        let (mut b, mut into) = (b, vec![0; 512]);
        let cdb = Session::cdb16(0x88, 0, 0, 1);
        // The change of the state is reported first.
        let mut run = || match b.execute(&cdb, &[], &mut into) {
            Ok(()) => 0,
            Err(e) => ScsiFailure::from_io_error(&e).unwrap().status,
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

    // All connections come back.
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
    let name = cluster.record.placement(two).unwrap().image.unwrap().to_string();
    let note = cluster.dir.path().join("node2/data/distrusted-images").join(name);
    cluster.kill(two);
    std::fs::create_dir_all(note.parent().unwrap()).unwrap();
    std::fs::write(&note, "").unwrap();
    cluster.restart(two).await;
    cluster.node(two).until_in_sync(2).await;
    assert!(!note.exists(), "its own log says it");
    cluster.publish().await;

    let path = cluster.record.placement(two).unwrap().backing.path().unwrap();
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(DATA).unwrap();
    let mut session = cluster.node(two).log_in(1).await;
    // The other node answers, or its initiators are redirected there.
    let reading = tokio::task::spawn_blocking(move || session.read(64, &mut [0; 8192]));
    cluster
        .node(two)
        .until("lost", |m| m.status.not_serving == Some(NotServingReason::LegLost))
        .await;
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
    let primary = cluster.node(ids[0]).mirror().await.status.config.unwrap().primary;
    let other = *ids.iter().find(|id| **id != primary).unwrap();
    drop(write(cluster.node(primary).log_in(1).await, 0, 1).await);
    let engine = &cluster.node(primary).engine;
    assert!(engine.verify(VOLUME, None).await.unwrap().mismatches.is_empty());
    let file =
        std::fs::OpenOptions::new().write(true).open(image(cluster.dir.path(), other)).unwrap();
    file.write_all_at(&[0xee; 512], DATA).unwrap();
    file.sync_all().unwrap();
    let refused = cluster.node(other).engine.verify(VOLUME, Some(other)).await;
    assert!(refused.unwrap_err().to_string().contains("run this there"));
    let found = engine.verify(VOLUME, None).await.unwrap();
    assert_eq!((found.mismatches.len(), found.mismatches[0].node), (1, other));
    assert_eq!(found.repaired_blocks, 0);
    let unknown_node = engine.verify(VOLUME, Some(NodeId(9))).await;
    assert!(unknown_node.unwrap_err().to_string().contains("is not in sync"));
    // The contents of the other replica are kept, not the primary's.
    assert_eq!(engine.verify(VOLUME, Some(other)).await.unwrap().repaired_blocks, 512);
    assert!(engine.verify(VOLUME, None).await.unwrap().mismatches.is_empty());
    for node in ids {
        let image = std::fs::File::open(image(cluster.dir.path(), node)).unwrap();
        let mut found = [0; 512];
        image.read_exact_at(&mut found, DATA).unwrap();
        assert_eq!(found, [0xee; 512], "node {node}");
    }
    cluster.stop().await;
}

/// RFD 0032: a copy of a running node's image replaces the image, after writes whose dirty marks
/// have been cleared.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_was_set_back_gets_a_full_copy() {
    let mut cluster = Cluster::start(2).await;
    let [one, two] = [1, 2].map(NodeId);
    let session = write(cluster.node(one).log_in(1).await, 0, 0x11).await;
    let saved = cluster.dir.path().join("saved.img");
    std::fs::copy(image(cluster.dir.path(), two), &saved).unwrap();
    let session = write(session, 0, 0x22).await;
    let unmarked =
        |m: &MirrorReport| m.status.dirty_regions.iter().all(|(_, regions)| *regions == 0);
    for id in [one, two] {
        cluster.node(id).until("marks are left", unmarked).await;
    }
    cluster.kill(two);
    cluster.node(one).until_in_sync(1).await;
    let Backing::File { path } = &cluster.record.placement(two).unwrap().backing else {
        panic!("another backing")
    };
    std::fs::copy(&saved, path).unwrap();
    cluster.restart(two).await;
    cluster.node(two).until_in_sync(2).await;
    let record = cluster.node(one).mirror().await.status.config.unwrap();
    assert_eq!(record.history.rolled_back, [two]);
    drop(session);
    cluster.publish().await;
    let (session, found) = read(cluster.node(two).log_in(2).await, 0).await;
    assert!(found.iter().all(|byte| *byte == 0x22), "it reads what was before");
    drop(session);
    cluster.stop().await;
}

/// An image of a formerly standalone node gets its intent log when it is opened, and a closed
/// volume can be erased at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_from_before_the_cluster_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let id = NodeId(1);
    let mut record = volume(dir.path(), &[id]);
    let model = MemoryStore::default();
    let node = Node::start(dir.path(), &model, id).await;
    let alone = Engine::start(&node.config, owner(node.id)).await.unwrap();
    let made = alone.create_image(&record, false).await.unwrap();
    record.record_image(id, made);
    assert!(alone.stop(Instant::now() + Duration::from_secs(10)).await);
    let first = MirrorConfig {
        epoch: Epoch(1),
        config_id: 1,
        replicas: vec![ConfigReplica { node: id, image: made.id, is_new: false }],
        in_sync: vec![InSyncMember { node: id, incarnation: Incarnation(0) }],
        primary: id,
        cold_start_epoch: Epoch::default(),
        history: CopyHistory::default(),
    };
    let store = model.client(STORE, Box::new(|_| CallDelivery::IMMEDIATE));
    store.commit(vec![mirror_records::creation(VOLUME, &first)]).await.unwrap();
    let opened = node.engine.open(&record).await.unwrap();
    assert!(opened.image.generation > made.generation, "its label tells of the log");
    assert_eq!(opened.image.id, made.id);
    node.until_in_sync(1).await;
    assert!(!node.engine.leave_mirror(VOLUME).await.unwrap(), "no other node has it");
    assert!(node.engine.grow(&record, 2 * BYTES).await.is_err(), "not yet");
    node.engine.close(VOLUME, false).await.unwrap();
    node.engine.erase_image_of(&record).await.unwrap();
    assert!(!image(dir.path(), id).exists());
    assert!(node.engine.stop(Instant::now() + Duration::from_secs(10)).await);
}

/// RFD 0037, attack 12: a node of a cluster reserves memory for data from other nodes before a pool
/// takes it. A volume of the pool is refused with the setting that suffices, and mirrored volumes
/// are served.
#[tokio::test]
async fn a_pool_of_disks_does_not_take_the_memory_that_mirrored_volumes_need() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), &MemoryStore::default(), NodeId(1)).await;
    node.engine.reserve_peer_memory().await;
    let disks: Vec<PathBuf> = ["x", "y"].map(|name| dir.path().join(name)).into();
    for path in &disks {
        std::fs::File::create(path).unwrap().set_len(1 << 30).unwrap();
    }
    let seen = |path: &PathBuf| KnownDisk { path: path.clone(), serial: None, is_out: false };
    let pool = PoolRecord {
        id: Uuid::from_u128(7),
        name: "tank".parse().unwrap(),
        stage: PoolStage::Ready,
        max_cores: 2,
        disks: disks.iter().map(seen).collect(),
    };
    let new = |path: &PathBuf| NewDisk { path: path.clone(), overwrite: Vec::new() };
    let new = NewPool {
        level: Redundancy::Copies(2),
        columns: None,
        strip_bytes: 64 << 10,
        checksums: false,
        disks: disks.iter().map(new).collect(),
        spares: Vec::new(),
    };
    node.engine.create_pool(&pool, new).await.unwrap();
    let mut within = volume(dir.path(), &[NodeId(1)]);
    within.placements[0].backing = Backing::Pool { pool: pool.name.clone() };
    let refused = node.engine.create_image(&within, false).await.unwrap_err().to_string();
    assert!(refused.contains("set cores.memory to \"18MiB\" or more"), "{refused}");
    let mut beside = volume(dir.path(), &[NodeId(1)]);
    let made = node.engine.create_image(&beside, false).await.unwrap();
    beside.record_image(NodeId(1), made);
    node.engine.open(&beside).await.unwrap();
    node.engine.stop(Instant::now() + PATIENCE).await;
}

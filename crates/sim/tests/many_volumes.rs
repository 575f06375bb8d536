//! A thousand mirrored volumes on the smallest pool (RFD 0037): idle ones hold none of it, and
//! when all of them are at work at once, at both nodes, every command ends.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{Blocks, Class, Dev, Epoch, Lba, Request};
use layers::file::{Create, File, Provisioning};
use layers::mirror::log::IntentLog;
use layers::mirror::record::{History, Member, Put, Record, Records, Replica, Unreachable};
use layers::mirror::{Mirror, Parts, Settings};
use peer::{Endpoint, Identity, Incarnation, NodeId, PeerAddresses, Secret, receive_greetings};
use rt::Core;
use rt::buf::copy_in;
use rt::sim::{Host, HostSetup, Setup, World, run};
use tokio::sync::{Notify, Semaphore};
use uuid::Uuid;
use volume::{Gate, Volume};

const VOLUMES: u16 = 1000;
/// The smallest that may be configured.
const POOL: usize = 16 << 20;
const BYTES: u64 = 4 << 20;
const BLOCK: usize = 4096;
const PORT: u16 = 7001;
const CLUSTER: Uuid = Uuid::from_u128(7);

fn name_of(volume: u16) -> Uuid {
    Uuid::from_u128(0x1000 + u128::from(volume))
}

/// A record that all nodes reach at once.
struct Kept {
    record: RefCell<Record>,
    changed: Notify,
}

#[derive(Clone)]
struct Store(Rc<Kept>);

impl Records for Store {
    async fn read(&self) -> Result<Record, Unreachable> {
        Ok(self.0.record.borrow().clone())
    }

    async fn put(&self, after: Epoch, config: u128, record: &Record) -> Put {
        let fits = {
            let now = self.0.record.borrow();
            now.epoch == after && now.config == config
        };
        if !fits {
            return Put::Refused;
        }
        self.0.record.replace(record.clone());
        self.0.changed.notify_waiters();
        Put::Done
    }

    async fn changed(&self) {
        let _ = tokio::time::timeout(Duration::from_secs(60), self.0.changed.notified()).await;
    }
}

/// A node as the test sees it.
struct Node {
    id: NodeId,
    host: Host,
    images: RefCell<Vec<Uuid>>,
    open: RefCell<Vec<(Mirror, Rc<Volume>)>>,
    core: RefCell<Option<Core>>,
}

fn path_of(volume: u16) -> PathBuf {
    PathBuf::from(format!("/volume-{volume}"))
}

async fn prepare(node: &Node, volumes: u16) -> Result<(), String> {
    let work = node.host.run(move |core| async move {
        let mut images = Vec::new();
        for volume in 0..volumes {
            let how = Create {
                volume: name_of(volume),
                block_size: BLOCK as u32,
                bytes: Some(BYTES),
                provisioning: Provisioning::Thin,
                buffered: false,
                force: false,
                keep_contents: false,
                claim: None,
            };
            let file = File::create(&core, &path_of(volume), &how).await;
            let file = Rc::new(file.map_err(|e| e.to_string())?);
            let area = file.log_area().await.map_err(|e| e.to_string())?;
            let log = IntentLog::create(&core, area).await.map_err(|e| e.to_string())?;
            log.close().await.map_err(|e| e.to_string())?;
            images.push(file.label().image);
        }
        Ok::<_, String>(images)
    });
    *node.images.borrow_mut() = work.join().await.ok_or("creation crashed")??;
    node.host.kill();
    Ok(())
}

/// Volumes begin at alternate nodes.
fn record(volume: u16, nodes: &[Rc<Node>]) -> Store {
    let replicas: Vec<_> = nodes
        .iter()
        .map(|n| Replica { node: n.id, image: n.images.borrow()[usize::from(volume)], new: false })
        .collect();
    let in_sync =
        replicas.iter().map(|r| Member { node: r.node, incarnation: Incarnation(0) }).collect();
    let record = Record {
        epoch: Epoch(1),
        config: 1,
        in_sync,
        replicas,
        primary: NodeId(1 + volume % 2),
        born: Epoch::default(),
        history: History::default(),
    };
    Store(Rc::new(Kept { record: RefCell::new(record), changed: Notify::new() }))
}

async fn open(core: &Core, me: NodeId, volume: u16, store: Store) -> Result<Mirror, String> {
    let what = layers::file::Open {
        volume: name_of(volume),
        generation: 0,
        buffered: false,
        read_only: false,
        claim: None,
    };
    let file = File::open(core, &path_of(volume), &what).await;
    let file = Rc::new(file.map_err(|e| e.to_string())?);
    let area = file.log_area().await.map_err(|e| e.to_string())?;
    let boot = area.boot(core);
    let (log, found) = IntentLog::open(core, area, boot).await.map_err(|e| e.to_string())?;
    let parts = Parts {
        node: me,
        core: core.clone(),
        account: core.pool().account(),
        leg: Dev::shared(file),
        log,
        found,
        keeper: Rc::new(Gate::default()),
        records: store,
        settings: Settings::default(),
        turns: Arc::new(Semaphore::new(1)),
    };
    Mirror::open(parts).await.map_err(|e| e.to_string())
}

fn start(node: &Rc<Node>, other: (NodeId, SocketAddr), stores: &Rc<Vec<Store>>) {
    let (node, stores) = (Rc::clone(node), Rc::clone(stores));
    let host = node.host.clone();
    host.start(move |core| {
        let (node, stores) = (Rc::clone(&node), Rc::clone(&stores));
        async move {
            let mut endpoints = BTreeMap::new();
            for (volume, store) in (0..).zip(stores.iter()) {
                let mirror = open(&core, node.id, volume, store.clone()).await?;
                let secret = Secret::new(&[7; 32]);
                let identity = Identity::new(CLUSTER, secret, node.id, name_of(volume));
                let endpoint = Endpoint::new(core.clone(), identity, Rc::new(mirror.clone()));
                mirror.set_paths(endpoint.paths_for_handler());
                let to = PeerAddresses { data: vec![other.1], heartbeat: Vec::new() };
                endpoint.add(other.0, to);
                endpoints.insert(name_of(volume), endpoint);
                let compares = Rc::new(mirror.clone());
                let dev = Dev::new(mirror.clone());
                let owner = Volume::shared(dev, compares, Epoch::default());
                node.open.borrow_mut().push((mirror, owner));
            }
            let at = SocketAddr::from(([0, 0, 0, 0], PORT));
            let listener = core.listen(at).await.map_err(|e| e.to_string())?;
            node.core.replace(Some(core.clone()));
            receive_greetings(&listener, |greeting| {
                endpoints[&greeting.volume()].accept(greeting);
            })
            .await;
            Ok(())
        }
    });
}

async fn until(
    what: &str,
    within: Duration,
    mut there: impl FnMut() -> bool,
) -> Result<(), String> {
    let wait = async {
        while !there() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::time::timeout(within, wait).await.map_err(|_| format!("never: {what}"))
}

/// One client of a volume at a node: writes and reads of several sizes, all at once.
fn load(node: &Node, volume: usize, left: &Rc<Cell<usize>>) {
    let core = node.core.borrow().clone().expect("the node runs");
    let owner = Rc::clone(&node.open.borrow()[volume].1);
    let account = core.pool().account();
    let sizes = [1, 1, 1, 1, 16, if volume.is_multiple_of(50) { 256 } else { 1 }];
    for (blocks, at) in sizes.into_iter().zip([0, 1, 2, 3, 16, 256]) {
        left.update(|n| n + 2);
        let (owner, account, done) = (Rc::clone(&owner), account.clone(), Rc::clone(left));
        node.host.run(move |_| async move {
            let bytes = vec![volume as u8; blocks * BLOCK];
            let credit = account.credit(bytes.len(), Class::Arriving).await.expect("it fits");
            let data = copy_in(&credit, &bytes);
            drop(credit);
            let write = Request::Write { at: Lba(at), data, fua: false };
            owner.execute(write, &account).await.expect("a write succeeds");
            done.update(|n| n - 1);
            let read = Request::Read { range: Blocks::new(Lba(at), blocks as u64) };
            let found = owner.execute(read, &account).await.expect("a read succeeds");
            assert_eq!(found.to_vec(), bytes);
            done.update(|n| n - 1);
        });
    }
}

fn is_free(nodes: &[Rc<Node>]) -> bool {
    nodes.iter().all(|node| {
        let usage = node.core.borrow().as_ref().expect("the node runs").pool().usage();
        usage.free == usage.total && usage.overdrafts == 0
    })
}

async fn play(world: World, volumes: u16) -> Result<(), String> {
    let node = |number: u16| {
        let setup = HostSetup { pool_bytes: POOL, ..HostSetup::default() };
        Rc::new(Node {
            id: NodeId(number),
            host: world.add_host(&format!("node{number}"), setup),
            images: RefCell::default(),
            open: RefCell::default(),
            core: RefCell::default(),
        })
    };
    let nodes = [node(1), node(2)];
    for node in &nodes {
        prepare(node, volumes).await?;
    }
    let stores = Rc::new((0..volumes).map(|v| record(v, &nodes)).collect::<Vec<_>>());
    for (node, other) in [(&nodes[0], &nodes[1]), (&nodes[1], &nodes[0])] {
        start(node, (other.id, SocketAddr::new(other.host.address(), PORT)), &stores);
    }
    let all = |node: &Rc<Node>| {
        let open = node.open.borrow();
        open.len() == usize::from(volumes) && open.iter().all(|(mirror, _)| mirror.serves())
    };
    until("all volumes serve", Duration::from_secs(300), || nodes.iter().all(all)).await?;
    // Everything that opening asked for comes to its end.
    until("idle volumes hold nothing", Duration::from_secs(60), || is_free(&nodes)).await?;
    let left = Rc::new(Cell::new(0));
    for volume in 0..usize::from(volumes) {
        // Of one volume only one node's clients at a time write the same blocks.
        load(&nodes[volume / 2 % 2], volume, &left);
    }
    until("all commands end", Duration::from_secs(600), || left.get() == 0).await?;
    until("all memory is back", Duration::from_secs(60), || is_free(&nodes)).await
}

#[test]
fn a_thousand_mirrored_volumes_work_on_the_smallest_pool_and_hold_none_of_it_when_idle() {
    let outcome = run(Setup::new(37), |world| play(world, VOLUMES));
    outcome.result.unwrap_or_else(|e| panic!("{e}"));
}

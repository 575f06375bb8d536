//! Mirrored volumes on two nodes without a control plane, for tests that say what befalls them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{Dev, Epoch};
use disk::Provisioning;
use image::{Create, File};
use intent_log::IntentLog;
use mirror::record::{History, Member, Put, Record, Records, Replica, Unreachable};
use mirror::{FreeBytes, FreeSpace, Mirror, Parts, Settings};
use peer::{Endpoint, Identity, Incarnation, NodeId, PeerAddresses, Secret, receive_greetings};
use rt::Core;
use rt::sim::{Host, HostSetup, World};
use tokio::sync::{Notify, Semaphore};
use uuid::Uuid;
use volume::{Gate, Volume};

/// The smallest that may be configured.
const POOL: usize = 16 << 20;
const BYTES: u64 = 4 << 20;
/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;
const PORT: u16 = 7001;
const CLUSTER: Uuid = Uuid::from_u128(7);

fn name_of(volume: u16) -> Uuid {
    Uuid::from_u128(0x1000 + u128::from(volume))
}

/// A record that all nodes reach at once.
pub(crate) struct Kept {
    pub(crate) record: RefCell<Record>,
    changed: Notify,
}

#[derive(Clone)]
pub(crate) struct Store(pub(crate) Rc<Kept>);

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
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) host: Host,
    images: RefCell<Vec<Uuid>>,
    /// Its volumes, while it runs.
    pub(crate) open: RefCell<Vec<(Mirror, Rc<Volume>)>>,
    pub(crate) core: RefCell<Option<Core>>,
}

/// Where the image of a volume is.
pub(crate) fn path_of(volume: u16) -> PathBuf {
    PathBuf::from(format!("/volume-{volume}"))
}

/// Makes the images of so many volumes.
pub(crate) async fn prepare(node: &Node, volumes: u16) -> Result<(), String> {
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

/// The first record of a volume. Volumes begin at alternate nodes.
pub(crate) fn record(volume: u16, nodes: &[Rc<Node>]) -> Store {
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

/// What a host has for files.
#[derive(Debug)]
struct Space(Host);

impl FreeSpace for Space {
    fn free_bytes(&self) -> FreeBytes<'_> {
        let left = self.0.space_limit().map(|limit| limit.saturating_sub(self.0.space_used()));
        Box::pin(std::future::ready(left))
    }
}

async fn open(core: &Core, node: &Node, volume: u16, store: Store) -> Result<Mirror, String> {
    let what = image::Open {
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
        node: node.id,
        core: core.clone(),
        account: core.pool().account(),
        leg: Dev::shared(file),
        log,
        found,
        keeper: Rc::new(Gate::default()),
        free_space: Rc::new(Space(node.host.clone())),
        records: store,
        settings: Settings::default(),
        turns: Arc::new(Semaphore::new(1)),
    };
    Mirror::open(parts).await.map_err(|e| e.to_string())
}

/// Starts a node, which serves all volumes together with the other one.
pub(crate) fn start(node: &Rc<Node>, other: &Node, stores: &Rc<Vec<Store>>) {
    let other = (other.id, SocketAddr::new(other.host.address(), PORT));
    let (node, stores) = (Rc::clone(node), Rc::clone(stores));
    let host = node.host.clone();
    host.start(move |core| {
        let (node, stores) = (Rc::clone(&node), Rc::clone(&stores));
        async move {
            let mut endpoints = BTreeMap::new();
            for (volume, store) in (0..).zip(stores.iter()) {
                let mirror = open(&core, &node, volume, store.clone()).await?;
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

/// Waits until something is so, which has a name.
pub(crate) async fn until(
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

/// A node of this number, which does not run yet.
pub(crate) fn node(world: &World, number: u16) -> Rc<Node> {
    let setup = HostSetup { pool_bytes: POOL, ..HostSetup::default() };
    Rc::new(Node {
        id: NodeId(number),
        host: world.add_host(&format!("node{number}"), setup),
        images: RefCell::default(),
        open: RefCell::default(),
        core: RefCell::default(),
    })
}

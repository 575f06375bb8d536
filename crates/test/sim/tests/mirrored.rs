//! Mirrored volumes on two nodes without a control plane, for tests that choose the faults.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{Dev, Epoch};
use disk::Provisioning;
use image::{CreateImageOptions, FlatImage};
use intent_log::IntentLog;
use mirror::config::{
    ConfigReplica, ConfigStore, CopyHistory, InSyncMember, MirrorConfig, PutOutcome,
    StoreUnavailable,
};
use mirror::{FreeBytesFuture, FreeSpace, Mirror, MirrorParts, MirrorSettings};
use peer::{
    Endpoint, Incarnation, NodeId, PeerAddresses, PeerIdentity, PeerSecret, accept_connections,
};
use rt::Core;
use rt::sim::{Host, HostSetup, World};
use tokio::sync::{Notify, Semaphore};
use uuid::Uuid;
use volume::{ReservationGate, Volume};

/// The smallest configurable size.
const POOL: usize = 16 << 20;
const BYTES: u64 = 4 << 20;
/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;
const PORT: u16 = 7001;
const CLUSTER: Uuid = Uuid::from_u128(7);

fn name_of(volume: u16) -> Uuid {
    Uuid::from_u128(0x1000 + u128::from(volume))
}

/// A record shared by all nodes without delay.
pub(crate) struct StoreState {
    pub(crate) record: RefCell<MirrorConfig>,
    changed: Notify,
}

#[derive(Clone)]
pub(crate) struct Store(pub(crate) Rc<StoreState>);

impl ConfigStore for Store {
    async fn read(&self) -> Result<MirrorConfig, StoreUnavailable> {
        Ok(self.0.record.borrow().clone())
    }

    async fn put(&self, after: Epoch, config: u128, record: &MirrorConfig) -> PutOutcome {
        let fits = {
            let now = self.0.record.borrow();
            now.epoch == after && now.config_id == config
        };
        if !fits {
            return PutOutcome::Conflict;
        }
        self.0.record.replace(record.clone());
        self.0.changed.notify_waiters();
        PutOutcome::Committed
    }

    async fn wait_changed(&self) {
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

/// Path of the image of a volume.
pub(crate) fn path_of(volume: u16) -> PathBuf {
    PathBuf::from(format!("/volume-{volume}"))
}

/// Creates the images of so many volumes.
pub(crate) async fn prepare(node: &Node, volumes: u16) -> Result<(), String> {
    let work = node.host.run(move |core| async move {
        let mut images = Vec::new();
        for volume in 0..volumes {
            let how = CreateImageOptions {
                volume_id: name_of(volume),
                block_size: BLOCK as u32,
                size_bytes: Some(BYTES),
                provisioning: Provisioning::Thin,
                allow_page_cache: false,
                overwrite: false,
                keep_contents: false,
                claim: None,
            };
            let file = FlatImage::create(&core, &path_of(volume), &how).await;
            let file = Rc::new(file.map_err(|e| e.to_string())?);
            let area = file.log_area().await.map_err(|e| e.to_string())?;
            let log = IntentLog::create(&core, area).await.map_err(|e| e.to_string())?;
            log.close().await.map_err(|e| e.to_string())?;
            images.push(file.label().image_id);
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
        .map(|n| ConfigReplica {
            node: n.id,
            image: n.images.borrow()[usize::from(volume)],
            is_new: false,
        })
        .collect();
    let in_sync = replicas
        .iter()
        .map(|r| InSyncMember { node: r.node, incarnation: Incarnation(0) })
        .collect();
    let record = MirrorConfig {
        epoch: Epoch(1),
        config_id: 1,
        in_sync,
        replicas,
        primary: NodeId(1 + volume % 2),
        cold_start_epoch: Epoch::default(),
        history: CopyHistory::default(),
    };
    Store(Rc::new(StoreState { record: RefCell::new(record), changed: Notify::new() }))
}

/// The file backend of a host.
#[derive(Debug)]
struct Space(Host);

impl FreeSpace for Space {
    fn free_bytes(&self) -> FreeBytesFuture<'_> {
        let left = self.0.space_limit().map(|limit| limit.saturating_sub(self.0.space_used()));
        Box::pin(std::future::ready(left))
    }
}

async fn open(core: &Core, node: &Node, volume: u16, store: Store) -> Result<Mirror, String> {
    let what = image::OpenImageOptions {
        volume_id: name_of(volume),
        min_generation: 0,
        allow_page_cache: false,
        read_only: false,
        claim: None,
    };
    let file = FlatImage::open(core, &path_of(volume), &what).await;
    let file = Rc::new(file.map_err(|e| e.to_string())?);
    let area = file.log_area().await.map_err(|e| e.to_string())?;
    let boot = area.disk_session(core);
    let (log, found) = IntentLog::open(core, area, boot).await.map_err(|e| e.to_string())?;
    let parts = MirrorParts {
        node: node.id,
        core: core.clone(),
        account: core.buffer_pool().account(),
        leg: Dev::shared(file),
        log,
        log_report: found,
        metadata_observer: Rc::new(ReservationGate::default()),
        free_space: Rc::new(Space(node.host.clone())),
        config_store: store,
        settings: MirrorSettings::default(),
        resync_permits: Arc::new(Semaphore::new(1)),
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
                let secret = PeerSecret::new(&[7; 32]);
                let identity = PeerIdentity::new(CLUSTER, secret, node.id, name_of(volume));
                let endpoint = Endpoint::new(core.clone(), identity, Rc::new(mirror.clone()));
                mirror.set_lease_paths(endpoint.lease_paths_for_handler());
                let to = PeerAddresses { data: vec![other.1], heartbeat: Vec::new() };
                endpoint.add(other.0, to);
                endpoints.insert(name_of(volume), endpoint);
                let compares = Rc::new(mirror.clone());
                let dev = Dev::new(mirror.clone());
                let owner = Volume::new_replicated(dev, compares, Epoch::default());
                node.open.borrow_mut().push((mirror, owner));
            }
            let at = SocketAddr::from(([0, 0, 0, 0], PORT));
            let listener = core.listen(at).await.map_err(|e| e.to_string())?;
            node.core.replace(Some(core.clone()));
            accept_connections(&listener, |greeting| {
                endpoints[&greeting.volume()].accept(greeting);
            })
            .await;
            Ok(())
        }
    });
}

/// Waits until a named condition holds.
pub(crate) async fn wait_until(
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

/// A node of this number, not yet running.
pub(crate) fn node(world: &World, number: u16) -> Rc<Node> {
    let setup = HostSetup { memory_bytes: POOL, ..HostSetup::default() };
    Rc::new(Node {
        id: NodeId(number),
        host: world.add_host(&format!("node{number}"), setup),
        images: RefCell::default(),
        open: RefCell::default(),
        core: RefCell::default(),
    })
}

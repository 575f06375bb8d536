//! Decides which process is the node, by the rule and code of the product
//! (`cluster::incarnations`). A process claims its incarnation in the store by compare-and-put;
//! others ask whether the process is still running.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use cluster::incarnations::{self, ClaimOutcome, ProcessIncarnation};
use cluster::nodes::{ALIVE_TTL, alive_key};
use cluster::store::memory::{CallDelivery, MemoryStore};
use cluster::store::{Change, MetadataStore, Precondition};
use peer::NodeId;
use rt::Core;
use rt::sim::{Rng, World};
use uuid::Uuid;

use super::Node;
use super::outage::{Outage, StoreClientId};

/// How long a process waits for an answer from the store.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);

/// How often a process renews its liveness key, and how often expired keys are removed.
const LIVENESS_RENEWAL: Duration = Duration::from_millis(2500);

/// Pause before a process retries a store that does not answer.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// The incarnations that the store holds.
pub(super) struct IncarnationStore {
    world: World,
    model: MemoryStore,
    outage: Outage,
    /// Counts the processes.
    processes_started: Cell<u64>,
    /// When each liveness key expires.
    liveness_expiries: RefCell<BTreeMap<NodeId, Duration>>,
}

/// A process that claims to be the node.
pub(super) struct ActiveIncarnation {
    store: Rc<IncarnationStore>,
    caller: StoreClientId,
    own: ProcessIncarnation,
    meta: Box<dyn MetadataStore>,
}

impl IncarnationStore {
    pub(super) fn new(world: &World, outage: Outage) -> Rc<Self> {
        let registry = Rc::new(Self {
            world: world.clone(),
            model: MemoryStore::default(),
            outage,
            processes_started: Cell::default(),
            liveness_expiries: RefCell::default(),
        });
        tokio::task::spawn_local(Rc::clone(&registry).expire_liveness_keys());
        registry
    }

    fn meta(&self, caller: StoreClientId, process: u64) -> Box<dyn MetadataStore> {
        let rng = Rng::new(self.world.seed(), &format!("incarnation {process}"));
        let outage = self.outage.clone();
        let fate = move |_| {
            let delay = || {
                let most_ms = if rng.chance(0.05) { 400 } else { 5 };
                Some(rng.duration_between(Duration::ZERO, Duration::from_millis(most_ms)))
            };
            if outage.answers(caller) {
                return CallDelivery::Sent { request_delay: delay(), response_delay: delay() };
            }
            // The request may still take effect, later.
            let late = || rng.duration_between(Duration::ZERO, Duration::from_secs(8));
            CallDelivery::Sent { request_delay: rng.chance(0.3).then(late), response_delay: None }
        };
        Box::new(self.model.client(STORE_TIMEOUT, Box::new(fate)))
    }

    /// Whether the store lists this incarnation as the node.
    pub(super) fn is_registered(&self, node: NodeId, incarnation: Uuid) -> bool {
        let entry = self.model.snapshot().get(&incarnations::incarnation_key(node));
        entry
            .and_then(|e| incarnations::decode_registered(&e).ok())
            .is_some_and(|held| held.incarnation.id == incarnation)
    }

    /// Registers the process that started on `node` as the node; `None` if another live process is
    /// the node.
    pub(super) async fn claim(
        self: Rc<Self>,
        core: &Core,
        node: &Node,
    ) -> Option<ActiveIncarnation> {
        self.processes_started.update(|n| n + 1);
        let (process, caller) = (self.processes_started.get(), node.caller());
        let incarnation = Uuid::from_u128(process.into());
        node.incarnation.set(incarnation);
        let image = node.image.get().map_or(0, |image| image.number);
        let own = ProcessIncarnation {
            id: incarnation,
            host: node.host.name().to_owned(),
            addresses: vec![(node.host.address(), 0).into()],
            // A cloned machine mistakes the first machine's process for its own.
            machine_id: format!("machine of node {}", node.id),
            boot_id: core.boot_id().to_string(),
            lock_file: (0, image.into()),
        };
        let meta = self.meta(caller, process);
        loop {
            match incarnations::claim(&*meta, node.id, &own, false).await {
                Ok(ClaimOutcome::Registered) => {
                    return Some(ActiveIncarnation { store: self, caller, own, meta });
                }
                Ok(ClaimOutcome::OtherAlive(_)) => return None,
                Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
            }
        }
    }

    /// Removes expired liveness keys.
    async fn expire_liveness_keys(self: Rc<Self>) {
        let meta = self.model.client(STORE_TIMEOUT, Box::new(|_| CallDelivery::IMMEDIATE));
        loop {
            tokio::time::sleep(LIVENESS_RENEWAL).await;
            let now = self.world.now();
            let expired: Vec<_> = {
                let mut signs = self.liveness_expiries.borrow_mut();
                let expired = signs.iter().filter(|(_, until)| **until <= now).map(|(n, _)| *n);
                let expired: Vec<_> = expired.collect();
                signs.retain(|node, _| !expired.contains(node));
                expired
            };
            for node in expired {
                set_liveness_key(&meta, node, None).await;
            }
        }
    }
}

impl ActiveIncarnation {
    /// Completes when another process has become the node.
    pub(super) async fn wait_replaced(&self) {
        let meta = self.store.meta(self.caller, self.store.processes_started.get());
        let signs = async {
            loop {
                if self.store.outage.answers(self.caller) {
                    let until = self.store.world.now() + ALIVE_TTL;
                    self.store.liveness_expiries.borrow_mut().insert(self.caller.node, until);
                    set_liveness_key(&*meta, self.caller.node, Some(b"1".to_vec())).await;
                }
                tokio::time::sleep(LIVENESS_RENEWAL).await;
            }
        };
        tokio::select! {
            biased;
            _ = incarnations::answer_challenges(&*self.meta, self.caller.node, &self.own, |_| {}) => {}
            () = signs => {}
        }
    }
}

/// Marks a node as alive or as dead in the store; retries on failure.
async fn set_liveness_key(meta: &dyn MetadataStore, node: NodeId, value: Option<Vec<u8>>) {
    let key = alive_key(node);
    if let Ok(held) = meta.get(&key).await
        && held.is_some() != value.is_some()
    {
        let expect =
            held.map_or(Precondition::Absent, |entry| Precondition::AtRevision(entry.revision));
        let _ = meta.commit(vec![Change { key, precondition: expect, value }]).await;
    }
}

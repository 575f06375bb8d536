//! Which process is a node, by the rule and the code of the product (`cluster::lives`): a life that
//! is claimed in the store by compare-and-put, and held against those who ask whether it goes on.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use cluster::lives::{self, Claim, Life};
use cluster::meta::model::{Fate, Model};
use cluster::meta::{Change, Expect, Meta};
use cluster::nodes::{ALIVE_TTL, alive_key};
use peer::NodeId;
use rt::Core;
use rt::sim::{Rng, World};
use uuid::Uuid;

use super::Node;
use super::store::{Caller, Outage, Store};

/// How long a process waits for an answer of the store.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often a process renews its sign of life, and how often is looked for those that have run
/// out.
const RENEWAL: Duration = Duration::from_millis(2500);

/// Pause before a store that does not answer is asked again.
const PAUSE: Duration = Duration::from_millis(500);

/// What the store holds of lives.
pub(super) struct Lives {
    world: World,
    model: Model,
    outage: Outage,
    /// Counts the processes.
    begun: Cell<u64>,
    /// When signs of life run out.
    signs: RefCell<BTreeMap<NodeId, Duration>>,
}

/// A process that is the node.
pub(super) struct Held {
    lives: Rc<Lives>,
    caller: Caller,
    own: Life,
    meta: Box<dyn Meta>,
}

impl Lives {
    pub(super) fn new(world: &World, store: &Store) -> Rc<Self> {
        let lives = Rc::new(Self {
            world: world.clone(),
            model: Model::default(),
            outage: store.outage(),
            begun: Cell::default(),
            signs: RefCell::default(),
        });
        tokio::task::spawn_local(Rc::clone(&lives).expire_signs());
        lives
    }

    fn meta(&self, caller: Caller, process: u64) -> Box<dyn Meta> {
        let rng = Rng::new(self.world.seed(), &format!("life {process}"));
        let outage = self.outage.clone();
        let fate = move |_| {
            let way = || {
                let most_ms = if rng.chance(0.05) { 400 } else { 5 };
                Some(rng.time(Duration::ZERO, Duration::from_millis(most_ms)))
            };
            if outage.answers(caller) {
                return Fate::Sent { there: way(), back: way() };
            }
            // What is sent may get through all the same, and take its time.
            let late = || rng.time(Duration::ZERO, Duration::from_secs(8));
            Fate::Sent { there: rng.chance(0.3).then(late), back: None }
        };
        Box::new(self.model.client(PATIENCE, Box::new(fate)))
    }

    /// Whether this life is the node, by what the store holds now.
    pub(super) fn is_registered(&self, node: NodeId, life: Uuid) -> bool {
        let entry = self.model.snapshot().get(&lives::key(node));
        entry.and_then(|e| lives::registered(&e).ok()).is_some_and(|held| held.life.life == life)
    }

    /// Makes the process that has begun on `node` the node; `None` if another one is, and goes on.
    pub(super) async fn claim(self: Rc<Self>, core: &Core, node: &Node) -> Option<Held> {
        self.begun.update(|n| n + 1);
        let (process, caller) = (self.begun.get(), node.caller());
        let life = Uuid::from_u128(process.into());
        node.life.set(life);
        let image = node.image.get().map_or(0, |image| image.number);
        let own = Life {
            life,
            host: node.host.name().to_owned(),
            addresses: vec![(node.host.address(), 0).into()],
            // A cloned machine takes its own name for that of the first.
            machine: format!("machine of node {}", node.id),
            boot: core.boot_id().to_string(),
            lock: (0, image.into()),
        };
        let meta = self.meta(caller, process);
        loop {
            match lives::claim(&*meta, node.id, &own, false).await {
                Ok(Claim::Ours) => return Some(Held { lives: self, caller, own, meta }),
                Ok(Claim::Other(_)) => return None,
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Takes away the signs of life that have run out.
    async fn expire_signs(self: Rc<Self>) {
        let meta = self.model.client(PATIENCE, Box::new(|_| Fate::WELL));
        loop {
            tokio::time::sleep(RENEWAL).await;
            let now = self.world.now();
            let over: Vec<_> = {
                let mut signs = self.signs.borrow_mut();
                let over = signs.iter().filter(|(_, until)| **until <= now).map(|(n, _)| *n);
                let over: Vec<_> = over.collect();
                signs.retain(|node, _| !over.contains(node));
                over
            };
            for node in over {
                set_sign(&meta, node, None).await;
            }
        }
    }
}

impl Held {
    /// Ends when another process is the node.
    pub(super) async fn over(&self) {
        let meta = self.lives.meta(self.caller, self.lives.begun.get());
        let signs = async {
            loop {
                if self.lives.outage.answers(self.caller) {
                    let until = self.lives.world.now() + ALIVE_TTL;
                    self.lives.signs.borrow_mut().insert(self.caller.node, until);
                    set_sign(&*meta, self.caller.node, Some(b"1".to_vec())).await;
                }
                tokio::time::sleep(RENEWAL).await;
            }
        };
        tokio::select! {
            biased;
            _ = lives::hold(&*self.meta, self.caller.node, &self.own, |_| {}) => {}
            () = signs => {}
        }
    }
}

/// Shows a node as alive, or as not. What fails is tried again soon.
async fn set_sign(meta: &dyn Meta, node: NodeId, value: Option<Vec<u8>>) {
    let key = alive_key(node);
    if let Ok(held) = meta.get(&key).await
        && held.is_some() != value.is_some()
    {
        let expect = held.map_or(Expect::Absent, |entry| Expect::At(entry.revision));
        let _ = meta.commit(vec![Change { key, expect, value }]).await;
    }
}

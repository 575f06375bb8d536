//! A metadata store that all nodes reach: slow, silent at times, and late with what it was asked.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use block::Epoch;
use mirror::record::{Put, Record, Records, Unreachable};
use peer::NodeId;
use rt::sim::{Rng, World};
use tokio::sync::Notify;
use uuid::Uuid;

use super::lives::Lives;

/// How long a node waits for an answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The store, as the world sees it.
pub(super) struct Store {
    world: World,
    rng: Rng,
    record: RefCell<Record>,
    /// How often it was restored: connections end with the store that they lead to.
    restored: Cell<u64>,
    /// The records before it.
    past: RefCell<Vec<Record>>,
    outage: Outage,
    /// It takes no more time than it must.
    prompt: Cell<bool>,
    changed: Notify,
    /// Told of each new record, and of the one before it.
    watcher: RefCell<Option<Watcher>>,
    /// What happens by and by, whatever becomes of the node that asked for it.
    due: RefCell<Vec<(Duration, Late)>>,
}

/// A process that asks: the node itself, or a clone of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) node: NodeId,
    pub(super) is_clone: bool,
}

/// Whom the store does not answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Outage(Arc<Mutex<Unanswered>>);

#[derive(Debug, Default)]
struct Unanswered {
    /// Nobody gets an answer.
    away: bool,
    /// These nodes get none; clones of them do.
    cut: Vec<NodeId>,
}

impl Outage {
    fn lock(&self) -> MutexGuard<'_, Unanswered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn answers(&self, caller: Caller) -> bool {
        let unanswered = self.lock();
        !unanswered.away && (caller.is_clone || !unanswered.cut.contains(&caller.node))
    }
}

type Watcher = Box<dyn Fn(&Record, &Record)>;
type Late = Box<dyn FnOnce()>;

impl Store {
    pub(super) fn new(world: &World, record: Record) -> Rc<Self> {
        Rc::new(Self {
            world: world.clone(),
            rng: Rng::new(world.seed(), "store"),
            record: RefCell::new(record),
            restored: Cell::new(0),
            past: RefCell::default(),
            outage: Outage::default(),
            prompt: Cell::new(false),
            changed: Notify::new(),
            watcher: RefCell::default(),
            due: RefCell::default(),
        })
    }

    pub(super) fn record(&self) -> Record {
        self.record.borrow().clone()
    }

    pub(super) fn watch(&self, watcher: impl Fn(&Record, &Record) + 'static) {
        self.watcher.replace(Some(Box::new(watcher)));
    }

    pub(super) fn set_away(&self, away: bool) {
        self.world.note(format!("the store is away: {away}"));
        self.outage.lock().away = away;
    }

    pub(super) fn set_prompt(&self, prompt: bool) {
        self.prompt.set(prompt);
    }

    pub(super) fn set_cut(&self, node: NodeId, cut: bool) {
        self.world.note(format!("node {node} is cut from the store: {cut}"));
        let all = &mut self.outage.lock().cut;
        all.retain(|n| *n != node);
        if cut {
            all.push(node);
        }
    }

    pub(super) fn outage(&self) -> Outage {
        self.outage.clone()
    }

    /// Takes effect, or not: `None` if the process that has sent it is not its node any more.
    fn commit(&self, after: Epoch, config: u128, record: &Record, sent: &Sender) -> Option<bool> {
        if !sent.is_node() {
            return None;
        }
        let fits = {
            let now = self.record.borrow();
            now.epoch == after && now.config == config
        };
        if fits {
            let members: Vec<_> = record
                .in_sync
                .iter()
                .map(|m| format!("{}:{:x}", m.node, m.incarnation.0))
                .collect();
            let (epoch, primary) = (record.epoch.0, record.primary);
            self.world.note(format!("record {epoch}: {members:?}, primary {primary}"));
            let old = self.record.replace(record.clone());
            if let Some(watcher) = &*self.watcher.borrow() {
                watcher(&old, record);
            }
            self.past.borrow_mut().push(old);
            self.changed.notify_waiters();
        }
        Some(fits)
    }

    /// The records that it has had.
    pub(super) fn past(&self) -> Vec<Record> {
        self.past.borrow().clone()
    }

    /// An operator restores the store: it holds this record now, and what was on its way does not
    /// come.
    pub(super) fn restore(&self, record: &Record) {
        self.world.note(format!("the store is restored: record {}", record.epoch.0));
        self.due.borrow_mut().clear();
        self.restored.set(self.restored.get() + 1);
        self.record.replace(record.clone());
        self.changed.notify_waiters();
    }

    /// An operator has the volume go on with a record that follows `last`, whatever the store
    /// holds.
    pub(super) fn recover(&self, last: Record, record: &Record) {
        self.restore(record);
        if let Some(watcher) = &*self.watcher.borrow() {
            watcher(&last, record);
        }
        self.past.borrow_mut().push(last);
    }

    /// Lets what is late take effect; to run beside everything else.
    pub(super) async fn run(self: Rc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = self.world.now();
            let (ripe, rest): (Vec<_>, Vec<_>) =
                self.due.take().into_iter().partition(|(at, _)| *at <= now);
            self.due.borrow_mut().extend(rest);
            ripe.into_iter().for_each(|(_, commit)| commit());
        }
    }

    async fn way(&self) {
        let slow = self.rng.chance(0.05) && !self.prompt.get();
        let most = if slow { 900 } else { 5 };
        tokio::time::sleep(self.rng.time(Duration::ZERO, Duration::from_millis(most))).await;
    }
}

/// A process that puts records.
#[derive(Clone)]
pub(super) struct Sender {
    pub(super) caller: Caller,
    pub(super) life: Uuid,
    /// Without them every process is its node.
    pub(super) lives: Option<Rc<Lives>>,
}

impl Sender {
    fn is_node(&self) -> bool {
        self.lives.as_ref().is_none_or(|lives| lives.is_registered(self.caller.node, self.life))
    }
}

/// A node's connection to it.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) store: Rc<Store>,
    pub(super) sender: Sender,
}

impl Records for Client {
    async fn read(&self) -> Result<Record, Unreachable> {
        let read = async {
            self.store.way().await;
            if !self.store.outage.answers(self.sender.caller) {
                std::future::pending::<()>().await;
            }
            let record = self.store.record();
            self.store.way().await;
            record
        };
        tokio::time::timeout(PATIENCE, read).await.map_err(|_| Unreachable)
    }

    async fn put(&self, after: Epoch, config: u128, record: &Record) -> Put {
        let store = Rc::clone(&self.store);
        let restored = store.restored.get();
        store.way().await;
        if store.restored.get() != restored {
            tokio::time::sleep(PATIENCE).await;
            return Put::Unknown;
        }
        if !store.outage.answers(self.sender.caller) {
            // It may have got through all the same, and take its time.
            if store.rng.chance(0.3) {
                let (late, record) = (Rc::clone(&store), record.clone());
                let at = store.world.now() + store.rng.time(Duration::ZERO, Duration::from_secs(8));
                let sender = self.sender.clone();
                let commit = move || {
                    late.commit(after, config, &record, &sender);
                };
                store.due.borrow_mut().push((at, Box::new(commit)));
            }
            tokio::time::sleep(PATIENCE).await;
            return Put::Unknown;
        }
        let done = store.commit(after, config, record, &self.sender);
        if done.is_none() || store.rng.chance(0.05) {
            tokio::time::sleep(PATIENCE).await;
            return Put::Unknown;
        }
        store.way().await;
        if done == Some(true) { Put::Done } else { Put::Refused }
    }

    async fn changed(&self) {
        let slow = Duration::from_secs(1);
        let _ = tokio::time::timeout(slow, self.store.changed.notified()).await;
        // Watches lag.
        tokio::time::sleep(self.store.rng.time(Duration::ZERO, Duration::from_millis(50))).await;
    }
}

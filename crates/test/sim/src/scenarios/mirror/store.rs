//! A metadata store shared by all nodes: slow, silent at times, and late to carry out requests.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::Epoch;
use mirror::config::{ConfigStore, MirrorConfig, PutOutcome, StoreUnavailable};
use peer::NodeId;
use rt::sim::{Rng, World};
use tokio::sync::Notify;
use uuid::Uuid;

use super::incarnations::IncarnationStore;
use super::outage::{Outage, StoreClientId};

/// How long a node waits for an answer.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);

/// The simulated store.
pub(super) struct Store {
    world: World,
    rng: Rng,
    record: RefCell<MirrorConfig>,
    /// How often it was restored: each restore ends the open connections.
    restore_count: Cell<u64>,
    /// The earlier records.
    previous_records: RefCell<Vec<MirrorConfig>>,
    outage: Outage,
    /// Answers without extra delay.
    without_delay: Cell<bool>,
    changed: Notify,
    /// Called with each new record and the one before it.
    on_record: RefCell<Option<RecordCallback>>,
    /// Requests that take effect later, even if the node that sent them dies.
    delayed_effects: RefCell<Vec<(Duration, DelayedEffect)>>,
}

type RecordCallback = Box<dyn Fn(&MirrorConfig, &MirrorConfig)>;
type DelayedEffect = Box<dyn FnOnce()>;

impl Store {
    pub(super) fn new(world: &World, record: MirrorConfig) -> Rc<Self> {
        Rc::new(Self {
            world: world.clone(),
            rng: Rng::new(world.seed(), "store"),
            record: RefCell::new(record),
            restore_count: Cell::new(0),
            previous_records: RefCell::default(),
            outage: Outage::default(),
            without_delay: Cell::new(false),
            changed: Notify::new(),
            on_record: RefCell::default(),
            delayed_effects: RefCell::default(),
        })
    }

    pub(super) fn record(&self) -> MirrorConfig {
        self.record.borrow().clone()
    }

    pub(super) fn watch(&self, watcher: impl Fn(&MirrorConfig, &MirrorConfig) + 'static) {
        self.on_record.replace(Some(Box::new(watcher)));
    }

    pub(super) fn set_away(&self, away: bool) {
        self.world.note(format!("the store is unavailable: {away}"));
        self.outage.lock().is_down = away;
    }

    pub(super) fn set_prompt(&self, prompt: bool) {
        self.without_delay.set(prompt);
    }

    pub(super) fn set_cut(&self, node: NodeId, cut: bool) {
        self.world.note(format!("node {node} is cut from the store: {cut}"));
        let all = &mut self.outage.lock().isolated_nodes;
        all.retain(|n| *n != node);
        if cut {
            all.push(node);
        }
    }

    pub(super) fn outage(&self) -> Outage {
        self.outage.clone()
    }

    /// Commits the put or not; `None` if the process that sent it is no longer its node.
    fn commit(
        &self,
        after: Epoch,
        config: u128,
        record: &MirrorConfig,
        sent: &RecordWriter,
    ) -> Option<bool> {
        if !sent.is_current_incarnation() {
            return None;
        }
        let fits = {
            let now = self.record.borrow();
            now.epoch == after && now.config_id == config
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
            if let Some(watcher) = &*self.on_record.borrow() {
                watcher(&old, record);
            }
            self.previous_records.borrow_mut().push(old);
            self.changed.notify_waiters();
        }
        Some(fits)
    }

    /// The earlier records.
    pub(super) fn past(&self) -> Vec<MirrorConfig> {
        self.previous_records.borrow().clone()
    }

    /// An operator restores the store: it holds this record now, and requests in flight are
    /// dropped.
    pub(super) fn restore(&self, record: &MirrorConfig) {
        self.world.note(format!("the store is restored: record {}", record.epoch.0));
        self.delayed_effects.borrow_mut().clear();
        self.restore_count.set(self.restore_count.get() + 1);
        self.record.replace(record.clone());
        self.changed.notify_waiters();
    }

    /// An operator makes the volume continue with a record that follows `last`, whatever the store
    /// holds.
    pub(super) fn recover(&self, last: MirrorConfig, record: &MirrorConfig) {
        self.restore(record);
        if let Some(watcher) = &*self.on_record.borrow() {
            watcher(&last, record);
        }
        self.previous_records.borrow_mut().push(last);
    }

    /// Applies delayed requests; runs in the background.
    pub(super) async fn run(self: Rc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = self.world.now();
            let (ripe, rest): (Vec<_>, Vec<_>) =
                self.delayed_effects.take().into_iter().partition(|(at, _)| *at <= now);
            self.delayed_effects.borrow_mut().extend(rest);
            ripe.into_iter().for_each(|(_, commit)| commit());
        }
    }

    async fn network_delay(&self) {
        let slow = self.rng.chance(0.05) && !self.without_delay.get();
        let most = if slow { 900 } else { 5 };
        tokio::time::sleep(self.rng.duration_between(Duration::ZERO, Duration::from_millis(most)))
            .await;
    }
}

/// A process that puts records.
#[derive(Clone)]
pub(super) struct RecordWriter {
    pub(super) caller: StoreClientId,
    pub(super) incarnation: Uuid,
    /// If `None`, every process counts as its node.
    pub(super) incarnations: Option<Rc<IncarnationStore>>,
}

impl RecordWriter {
    fn is_current_incarnation(&self) -> bool {
        self.incarnations
            .as_ref()
            .is_none_or(|registry| registry.is_registered(self.caller.node, self.incarnation))
    }
}

/// A node's connection to it.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) store: Rc<Store>,
    pub(super) sender: RecordWriter,
}

impl ConfigStore for Client {
    async fn read(&self) -> Result<MirrorConfig, StoreUnavailable> {
        let read = async {
            self.store.network_delay().await;
            if !self.store.outage.answers(self.sender.caller) {
                std::future::pending::<()>().await;
            }
            let record = self.store.record();
            self.store.network_delay().await;
            record
        };
        tokio::time::timeout(STORE_TIMEOUT, read).await.map_err(|_| StoreUnavailable)
    }

    async fn put(&self, after: Epoch, config: u128, record: &MirrorConfig) -> PutOutcome {
        let store = Rc::clone(&self.store);
        let restored = store.restore_count.get();
        store.network_delay().await;
        if store.restore_count.get() != restored {
            tokio::time::sleep(STORE_TIMEOUT).await;
            return PutOutcome::Unknown;
        }
        if !store.outage.answers(self.sender.caller) {
            // The request may still take effect, later.
            if store.rng.chance(0.3) {
                let (late, record) = (Rc::clone(&store), record.clone());
                let at = store.world.now()
                    + store.rng.duration_between(Duration::ZERO, Duration::from_secs(8));
                let sender = self.sender.clone();
                let commit = move || {
                    late.commit(after, config, &record, &sender);
                };
                store.delayed_effects.borrow_mut().push((at, Box::new(commit)));
            }
            tokio::time::sleep(STORE_TIMEOUT).await;
            return PutOutcome::Unknown;
        }
        let done = store.commit(after, config, record, &self.sender);
        if done.is_none() || store.rng.chance(0.05) {
            tokio::time::sleep(STORE_TIMEOUT).await;
            return PutOutcome::Unknown;
        }
        store.network_delay().await;
        if done == Some(true) { PutOutcome::Committed } else { PutOutcome::Conflict }
    }

    async fn wait_changed(&self) {
        let slow = Duration::from_secs(1);
        let _ = tokio::time::timeout(slow, self.store.changed.notified()).await;
        // Watches are delayed.
        tokio::time::sleep(
            self.store.rng.duration_between(Duration::ZERO, Duration::from_millis(50)),
        )
        .await;
    }
}

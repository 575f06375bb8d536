//! A metadata store in memory with fault injection, for simulated clusters.
//!
//! [`MemoryStore`] is the store; every node has its own [`MemoryStoreClient`]. Before each call the
//! client asks its [`FaultInjector`] what becomes of it: refused at once, delayed or lost on the
//! way there or back. A sent commit takes effect when it arrives, even if its caller has given up.
//! There are no tasks and no sockets, time is `tokio::time`, and nothing depends on the order of a
//! hash map: under virtual time the same faults give the same history.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::{
    Change, ChangeEvent, Entry, MetadataStore, Revision, StoreError, StoreFuture, StoreProblem,
    Watcher, validate_changes,
};

/// The store's name in errors.
const STORE_NAME: &str = "in memory";

/// Changes kept for watchers.
const MAX_HISTORY_EVENTS: usize = 4096;

/// How soon a failed delivery to a watcher is retried.
const WATCH_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// A get or a list.
    Read,
    /// A commit.
    Commit,
    /// The delivery of changes to a watcher. A lost one is retried.
    Watch,
}

/// The fate of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallDelivery {
    /// There is no connection; the caller knows at once.
    Refused,
    /// It is sent.
    Sent {
        /// Time until it reaches the store and takes effect; `None`: never.
        request_delay: Option<Duration>,
        /// Time from then until the caller has the answer; `None`: never.
        response_delay: Option<Duration>,
    },
}

impl CallDelivery {
    /// Delivered and answered without delay.
    pub const IMMEDIATE: Self =
        Self::Sent { request_delay: Some(Duration::ZERO), response_delay: Some(Duration::ZERO) };
}

/// Decides the fate of each call.
pub type FaultInjector = Box<dyn FnMut(CallKind) -> CallDelivery + Send>;

type CommitResult = Result<Revision, StoreError>;

/// A commit in flight.
struct InFlightCommit {
    arrives_at: Instant,
    changes: Vec<Change>,
    outcome: Arc<OnceLock<CommitResult>>,
}

/// A store's contents at one moment.
#[derive(Clone, Default)]
pub struct Snapshot {
    keys: BTreeMap<String, (Revision, Vec<u8>)>,
    revision: Revision,
}

impl Snapshot {
    /// The entry of `key` at that moment.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Entry> {
        let (revision, value) = self.keys.get(key)?;
        Some(Entry::new(key, value.clone(), *revision))
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("revision", &self.revision).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct StoreState {
    now: Snapshot,
    events: VecDeque<ChangeEvent>,
    /// `events` holds every change after this revision.
    complete_after: Revision,
    /// In the order in which they were sent.
    in_flight: Vec<InFlightCommit>,
}

impl StoreState {
    /// Applies the commits that have arrived by `now`. Returns whether there were any.
    fn apply_due_commits(&mut self, now: Instant) -> bool {
        let mut any = false;
        // In order of arrival; commits that arrive together apply in the order in which they were
        // sent.
        while let Some((_, at)) =
            self.in_flight.iter().zip(0..).map(|(p, i)| (p.arrives_at, i)).min()
            && self.in_flight[at].arrives_at <= now
        {
            let pending = self.in_flight.remove(at);
            let outcome = self.commit(&pending.changes);
            any = true;
            // Set only here.
            let _ = pending.outcome.set(outcome);
        }
        any
    }

    fn commit(&mut self, changes: &[Change]) -> CommitResult {
        for change in changes {
            if self.now.keys.get(&change.key).map(|(at, _)| *at) != change.precondition.revision() {
                return Err(StoreError::Conflict { key: change.key.clone() });
            }
        }
        let revision = Revision(self.now.revision.0 + 1);
        self.now.revision = revision;
        for change in changes.iter().filter(|c| !c.is_guard()) {
            let key = change.key.clone();
            let removed = change.value.is_none();
            self.events.push_back(ChangeEvent { key: key.clone(), is_removal: removed, revision });
            match &change.value {
                Some(value) => drop(self.now.keys.insert(key, (revision, value.clone()))),
                None => drop(self.now.keys.remove(&key)),
            }
        }
        while self.events.len() > MAX_HISTORY_EVENTS {
            if let Some(event) = self.events.pop_front() {
                self.complete_after = event.revision;
            }
        }
        Ok(revision)
    }

    fn get(&self, key: &str) -> Option<Entry> {
        self.now.keys.get(key).map(|stored| entry(key, stored))
    }

    fn list(&self, prefix: &str) -> (Vec<Entry>, Revision) {
        let from = self.now.keys.range(prefix.to_owned()..);
        let all = from.take_while(|(key, _)| key.starts_with(prefix));
        (all.map(|(key, stored)| entry(key, stored)).collect(), self.now.revision)
    }
}

fn entry(key: &str, (revision, value): &(Revision, Vec<u8>)) -> Entry {
    Entry::new(key, value.clone(), *revision)
}

#[derive(Default)]
struct SharedState {
    state: Mutex<StoreState>,
    /// Notified when a commit was sent or has taken effect.
    changed: Notify,
}

impl SharedState {
    /// The current state, after all commits that have arrived.
    fn state(&self) -> MutexGuard<'_, StoreState> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.apply_due_commits(Instant::now()) {
            self.changed.notify_waiters();
        }
        state
    }
}

/// The store. Cheap to clone.
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<SharedState>);

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("now", &self.0.state().now).finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// A node's client of the store. Its calls wait for an answer up to `timeout`.
    #[must_use]
    pub fn client(&self, timeout: Duration, faults: FaultInjector) -> MemoryStoreClient {
        MemoryStoreClient {
            store: Arc::clone(&self.0),
            timeout,
            fault_injector: Arc::new(Mutex::new(faults)),
        }
    }

    /// Discards all changes so far: watches from before fail with [`StoreError::Compacted`].
    pub fn compact(&self) {
        let mut state = self.0.state();
        state.events.clear();
        state.complete_after = state.now.revision;
    }

    /// The current contents.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.0.state().now.clone()
    }

    /// Restores earlier contents, as an operator restores a backup. Commits in flight are lost.
    pub fn restore(&self, to: Snapshot) {
        let mut state = self.0.state();
        state.in_flight.clear();
        state.events.clear();
        state.complete_after = to.revision;
        state.now = to;
        self.0.changed.notify_waiters();
    }
}

/// A node's client of a [`MemoryStore`].
#[derive(Clone)]
pub struct MemoryStoreClient {
    store: Arc<SharedState>,
    timeout: Duration,
    fault_injector: Arc<Mutex<FaultInjector>>,
}

impl fmt::Debug for MemoryStoreClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

fn unreachable(why: &str) -> StoreError {
    StoreError::Unreachable { store: STORE_NAME.into(), why: why.into() }
}

impl MemoryStoreClient {
    fn delivery(&self, call: CallKind) -> CallDelivery {
        (self.fault_injector.lock().unwrap_or_else(PoisonError::into_inner))(call)
    }

    /// Runs `look` when the request arrives, if the answer comes in time.
    async fn read_state<T>(&self, read: impl Fn(&StoreState) -> T) -> Result<T, StoreError> {
        let CallDelivery::Sent { request_delay, response_delay } = self.delivery(CallKind::Read)
        else {
            return Err(unreachable("refused"));
        };
        let (Some(request_delay), Some(response_delay)) = (request_delay, response_delay) else {
            sleep(self.timeout).await;
            return Err(unreachable("no response"));
        };
        if request_delay + response_delay > self.timeout {
            sleep(self.timeout).await;
            return Err(unreachable("no response in time"));
        }
        sleep(request_delay).await;
        let seen = read(&self.store.state());
        sleep(response_delay).await;
        Ok(seen)
    }

    async fn commit(&self, changes: Vec<Change>) -> CommitResult {
        validate_changes(STORE_NAME, &changes)?;
        let CallDelivery::Sent { request_delay, response_delay } = self.delivery(CallKind::Commit)
        else {
            return Err(unreachable("refused"));
        };
        let indeterminate =
            || StoreError::Indeterminate { store: STORE_NAME.into(), why: "no response".into() };
        let sent = Instant::now();
        let Some(request_delay) = request_delay else {
            sleep(self.timeout).await;
            return Err(indeterminate());
        };
        let outcome = Arc::new(OnceLock::new());
        let pending = InFlightCommit {
            arrives_at: sent + request_delay,
            changes,
            outcome: Arc::clone(&outcome),
        };
        self.store.state().in_flight.push(pending);
        self.store.changed.notify_waiters();
        let answered = response_delay
            .map(|response_delay| request_delay + response_delay)
            .filter(|&after| after <= self.timeout);
        let Some(answered) = answered else {
            sleep(self.timeout).await;
            return Err(indeterminate());
        };
        sleep_until(sent + request_delay).await;
        drop(self.store.state());
        sleep_until(sent + answered).await;
        outcome.get().cloned().unwrap_or_else(|| Err(indeterminate()))
    }
}

impl MetadataStore for MemoryStoreClient {
    fn get(&self, key: &str) -> StoreFuture<'_, Option<Entry>> {
        let key = key.to_owned();
        Box::pin(async move { self.read_state(|state| state.get(&key)).await })
    }

    fn list(&self, prefix: &str) -> StoreFuture<'_, (Vec<Entry>, Revision)> {
        let prefix = prefix.to_owned();
        Box::pin(async move { self.read_state(|state| state.list(&prefix)).await })
    }

    fn commit(&self, changes: Vec<Change>) -> StoreFuture<'_, Revision> {
        Box::pin(Self::commit(self, changes))
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watcher> {
        let (client, prefix) = (self.clone(), prefix.to_owned());
        Box::new(MemoryWatcher {
            client,
            prefix,
            last_seen: after,
            pending_events: VecDeque::new(),
        })
    }

    fn problem(&self) -> StoreFuture<'_, Option<StoreProblem>> {
        Box::pin(async { Ok(None) })
    }
}

/// Watches the changes under a prefix.
struct MemoryWatcher {
    client: MemoryStoreClient,
    prefix: String,
    /// Every commit up to this one was processed.
    last_seen: Revision,
    pending_events: VecDeque<ChangeEvent>,
}

impl MemoryWatcher {
    /// Waits until changes can be delivered to this watcher.
    async fn wait_delivery(&self) {
        loop {
            match self.client.delivery(CallKind::Watch) {
                CallDelivery::Sent {
                    request_delay: Some(request_delay),
                    response_delay: Some(response_delay),
                } => {
                    return sleep(request_delay + response_delay).await;
                }
                _ => sleep(WATCH_RETRY_PAUSE).await,
            }
        }
    }

    /// Collects what has taken effect since [`Self::last_seen`]; returns when the next commit in
    /// flight arrives.
    fn catch_up(&mut self) -> Result<Option<Instant>, StoreError> {
        let state = self.client.store.state();
        if self.last_seen < state.complete_after || self.last_seen > state.now.revision {
            return Err(StoreError::Compacted { after: self.last_seen });
        }
        let fresh = state.events.iter().filter(|e| e.revision > self.last_seen);
        self.pending_events.extend(fresh.filter(|e| e.key.starts_with(&self.prefix)).cloned());
        self.last_seen = state.now.revision;
        Ok(state.in_flight.iter().map(|p| p.arrives_at).min())
    }

    async fn next_event(&mut self) -> Result<ChangeEvent, StoreError> {
        loop {
            if let Some(event) = self.pending_events.pop_front() {
                return Ok(event);
            }
            let store = Arc::clone(&self.client.store);
            let mut moved = std::pin::pin!(store.changed.notified());
            // Registered before the state is read, so that no change is missed.
            moved.as_mut().enable();
            let due = self.catch_up()?;
            if !self.pending_events.is_empty() {
                self.wait_delivery().await;
                continue;
            }
            match due {
                // An arrival wakes no task: the next read of the state applies it.
                Some(due) => drop(timeout_at(due, moved).await),
                None => moved.await,
            }
        }
    }
}

impl Watcher for MemoryWatcher {
    fn next_event(&mut self) -> StoreFuture<'_, ChangeEvent> {
        Box::pin(Self::next_event(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Precondition;

    const TIMEOUT: Duration = Duration::from_secs(1);

    fn put(key: &str, expect: Precondition, value: &str) -> Vec<Change> {
        vec![Change { key: key.into(), precondition: expect, value: Some(value.into()) }]
    }

    /// A client whose every call has the delivery `fate`.
    fn meets(model: &MemoryStore, delivery: CallDelivery) -> MemoryStoreClient {
        model.client(TIMEOUT, Box::new(move |_| delivery))
    }

    fn sent(there_ms: Option<u64>, back_ms: Option<u64>) -> CallDelivery {
        let ms = |ms: Option<u64>| ms.map(Duration::from_millis);
        CallDelivery::Sent { request_delay: ms(there_ms), response_delay: ms(back_ms) }
    }

    async fn value(model: &MemoryStore) -> Option<String> {
        let held = meets(model, CallDelivery::IMMEDIATE).get("k").await.unwrap();
        held.map(|e| String::from_utf8(e.value).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_answer_leaves_the_commit() {
        let model = MemoryStore::default();
        let commit =
            meets(&model, sent(Some(10), None)).commit(put("k", Precondition::Absent, "x")).await;
        assert!(matches!(commit, Err(StoreError::Indeterminate { .. })));
        assert_eq!(value(&model).await.as_deref(), Some("x"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_commit_takes_effect_late_and_wakes_followers() {
        let model = MemoryStore::default();
        let mut watch = meets(&model, CallDelivery::IMMEDIATE).watch("", Revision(0));
        let late = meets(&model, sent(Some(5000), Some(0)));
        let begun = Instant::now();
        let commit = late.commit(put("k", Precondition::Absent, "x")).await;
        assert!(matches!(commit, Err(StoreError::Indeterminate { .. })));
        assert_eq!(begun.elapsed(), TIMEOUT);
        assert_eq!(value(&model).await, None);
        assert_eq!(watch.next_event().await.unwrap().key, "k");
        assert_eq!(begun.elapsed(), Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_commit_that_was_overtaken_does_nothing() {
        let model = MemoryStore::default();
        let late = meets(&model, sent(Some(5000), Some(0)));
        late.commit(put("k", Precondition::Absent, "late")).await.unwrap_err();
        meets(&model, CallDelivery::IMMEDIATE)
            .commit(put("k", Precondition::Absent, "first"))
            .await
            .unwrap();
        sleep(Duration::from_secs(10)).await;
        assert_eq!(value(&model).await.as_deref(), Some("first"));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_sent_is_known_not_to_be() {
        let model = MemoryStore::default();
        let begun = Instant::now();
        let client = meets(&model, CallDelivery::Refused);
        let commit = client.commit(put("k", Precondition::Absent, "x")).await;
        assert!(matches!(commit, Err(StoreError::Unreachable { .. })));
        assert!(matches!(client.get("k").await, Err(StoreError::Unreachable { .. })));
        assert_eq!(begun.elapsed(), Duration::ZERO);
        let slow = meets(&model, sent(Some(600), Some(600)));
        assert!(matches!(slow.get("k").await, Err(StoreError::Unreachable { .. })));
        assert_eq!(begun.elapsed(), TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_follows_a_store_from_the_past_is_told() {
        let model = MemoryStore::default();
        let client = meets(&model, CallDelivery::IMMEDIATE);
        let before = model.snapshot();
        let one = client.commit(put("k", Precondition::Absent, "x")).await.unwrap();
        let mut watch = client.watch("", one);
        model.restore(before);
        assert_eq!(watch.next_event().await, Err(StoreError::Compacted { after: one }));
        assert_eq!(value(&model).await, None);
    }
}

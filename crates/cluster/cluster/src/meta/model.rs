//! A store in memory, with whatever faults a test wants: the cluster's store of a simulated world.
//!
//! [`Model`] is the store; every node has a [`Client`] of its own. Before a call the client asks
//! its [`Faults`] what becomes of it: refused at once, delayed on the way there, delayed on the way
//! back, lost on either. A commit that has been sent takes effect when it arrives, whether anybody
//! still waits for it or not. There are no tasks and no sockets, time is `tokio::time`, and nothing
//! depends on the order of a hash map: under virtual time the same faults give the same history.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::{Answer, Change, Entry, Event, Meta, MetaError, Revision, Trouble, Watch, check};

/// What errors call it.
const NAME: &str = "in memory";

/// Changes kept for followers.
const HISTORY: usize = 4096;

/// How soon a follower that is cut off tries again.
const FOLLOW_AGAIN: Duration = Duration::from_millis(100);

/// What kind of call it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A get or a list.
    Read,
    /// A commit.
    Commit,
    /// The delivery of changes to a follower. One that is lost is tried again.
    Follow,
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// There is no connection, which the caller knows at once.
    Refused,
    /// It is sent.
    Sent {
        /// Time until it reaches the store and takes effect; `None`: never.
        there: Option<Duration>,
        /// Time from there until the caller has the answer; `None`: never.
        back: Option<Duration>,
    },
}

impl Fate {
    /// All goes well, and at once.
    pub const WELL: Self = Self::Sent { there: Some(Duration::ZERO), back: Some(Duration::ZERO) };
}

/// Decides what becomes of calls.
pub type Faults = Box<dyn FnMut(Call) -> Fate + Send>;

type Outcome = Result<Revision, MetaError>;

/// A commit on its way.
struct Pending {
    due: Instant,
    changes: Vec<Change>,
    outcome: Arc<OnceLock<Outcome>>,
}

/// All that a store holds at one moment.
#[derive(Clone, Default)]
pub struct Snapshot {
    keys: BTreeMap<String, (Revision, Vec<u8>)>,
    revision: Revision,
}

impl Snapshot {
    /// What `key` held at that moment.
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
struct State {
    now: Snapshot,
    events: VecDeque<Event>,
    /// Everything after this revision is in `events`.
    complete_after: Revision,
    /// In the order in which they were sent.
    pending: Vec<Pending>,
}

impl State {
    /// Lets those commits take effect that have arrived by `now`. Says whether there were any.
    fn settle(&mut self, now: Instant) -> bool {
        let mut any = false;
        // First come, first served; of those that come together the one that was sent first.
        while let Some((_, at)) = self.pending.iter().zip(0..).map(|(p, i)| (p.due, i)).min()
            && self.pending[at].due <= now
        {
            let pending = self.pending.remove(at);
            let outcome = self.commit(&pending.changes);
            any = true;
            // Set here and nowhere else.
            let _ = pending.outcome.set(outcome);
        }
        any
    }

    fn commit(&mut self, changes: &[Change]) -> Outcome {
        for change in changes {
            if self.now.keys.get(&change.key).map(|(at, _)| *at) != change.expect.revision() {
                return Err(MetaError::Changed { key: change.key.clone() });
            }
        }
        let revision = Revision(self.now.revision.0 + 1);
        self.now.revision = revision;
        for change in changes.iter().filter(|c| !c.is_condition()) {
            let key = change.key.clone();
            let removed = change.value.is_none();
            self.events.push_back(Event { key: key.clone(), removed, revision });
            match &change.value {
                Some(value) => drop(self.now.keys.insert(key, (revision, value.clone()))),
                None => drop(self.now.keys.remove(&key)),
            }
        }
        while self.events.len() > HISTORY {
            if let Some(event) = self.events.pop_front() {
                self.complete_after = event.revision;
            }
        }
        Ok(revision)
    }

    fn get(&self, key: &str) -> Option<Entry> {
        self.now.keys.get(key).map(|held| entry(key, held))
    }

    fn list(&self, prefix: &str) -> (Vec<Entry>, Revision) {
        let from = self.now.keys.range(prefix.to_owned()..);
        let all = from.take_while(|(key, _)| key.starts_with(prefix));
        (all.map(|(key, held)| entry(key, held)).collect(), self.now.revision)
    }
}

fn entry(key: &str, (revision, value): &(Revision, Vec<u8>)) -> Entry {
    Entry::new(key, value.clone(), *revision)
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Something was sent, or has taken effect.
    moved: Notify,
}

impl Shared {
    /// The state as it is now.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.settle(Instant::now()) {
            self.moved.notify_waiters();
        }
        state
    }
}

/// The store. Cheap to clone.
#[derive(Clone, Default)]
pub struct Model(Arc<Shared>);

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("now", &self.0.state().now).finish_non_exhaustive()
    }
}

impl Model {
    /// A node's access to the store. It gives a call `timeout` to be answered.
    #[must_use]
    pub fn client(&self, timeout: Duration, faults: Faults) -> Client {
        Client { store: Arc::clone(&self.0), timeout, faults: Arc::new(Mutex::new(faults)) }
    }

    /// Forgets all changes so far: whoever follows from before is told so.
    pub fn compact(&self) {
        let mut state = self.0.state();
        state.events.clear();
        state.complete_after = state.now.revision;
    }

    /// What it holds now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.0.state().now.clone()
    }

    /// Makes it what it was: an operator has restored an old copy. What was on its way does not come.
    pub fn restore(&self, to: Snapshot) {
        let mut state = self.0.state();
        state.pending.clear();
        state.events.clear();
        state.complete_after = to.revision;
        state.now = to;
        self.0.moved.notify_waiters();
    }
}

/// A node's access to a [`Model`].
#[derive(Clone)]
pub struct Client {
    store: Arc<Shared>,
    timeout: Duration,
    faults: Arc<Mutex<Faults>>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

fn unreachable(why: &str) -> MetaError {
    MetaError::Unreachable { store: NAME.into(), why: why.into() }
}

impl Client {
    fn fate(&self, call: Call) -> Fate {
        (self.faults.lock().unwrap_or_else(PoisonError::into_inner))(call)
    }

    /// What `look` sees when the question arrives, if the answer comes in time.
    async fn read<T>(&self, look: impl Fn(&State) -> T) -> Result<T, MetaError> {
        let Fate::Sent { there, back } = self.fate(Call::Read) else {
            return Err(unreachable("refused"));
        };
        let (Some(there), Some(back)) = (there, back) else {
            sleep(self.timeout).await;
            return Err(unreachable("no answer"));
        };
        if there + back > self.timeout {
            sleep(self.timeout).await;
            return Err(unreachable("no answer in time"));
        }
        sleep(there).await;
        let seen = look(&self.store.state());
        sleep(back).await;
        Ok(seen)
    }

    async fn commit(&self, changes: Vec<Change>) -> Outcome {
        check(NAME, &changes)?;
        let Fate::Sent { there, back } = self.fate(Call::Commit) else {
            return Err(unreachable("refused"));
        };
        let unknown = || MetaError::Unknown { store: NAME.into(), why: "no answer".into() };
        let sent = Instant::now();
        let Some(there) = there else {
            sleep(self.timeout).await;
            return Err(unknown());
        };
        let outcome = Arc::new(OnceLock::new());
        let pending = Pending { due: sent + there, changes, outcome: Arc::clone(&outcome) };
        self.store.state().pending.push(pending);
        self.store.moved.notify_waiters();
        let answered = back.map(|back| there + back).filter(|&after| after <= self.timeout);
        let Some(answered) = answered else {
            sleep(self.timeout).await;
            return Err(unknown());
        };
        sleep_until(sent + there).await;
        drop(self.store.state());
        sleep_until(sent + answered).await;
        outcome.get().cloned().unwrap_or_else(|| Err(unknown()))
    }
}

impl Meta for Client {
    fn get(&self, key: &str) -> Answer<'_, Option<Entry>> {
        let key = key.to_owned();
        Box::pin(async move { self.read(|state| state.get(&key)).await })
    }

    fn list(&self, prefix: &str) -> Answer<'_, (Vec<Entry>, Revision)> {
        let prefix = prefix.to_owned();
        Box::pin(async move { self.read(|state| state.list(&prefix)).await })
    }

    fn commit(&self, changes: Vec<Change>) -> Answer<'_, Revision> {
        Box::pin(Self::commit(self, changes))
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watch> {
        let (client, prefix) = (self.clone(), prefix.to_owned());
        Box::new(Follower { client, prefix, seen: after, ready: VecDeque::new() })
    }

    fn trouble(&self) -> Answer<'_, Option<Trouble>> {
        Box::pin(async { Ok(None) })
    }
}

/// Follows the changes under a prefix.
struct Follower {
    client: Client,
    prefix: String,
    /// Every commit up to this one has been looked at.
    seen: Revision,
    ready: VecDeque<Event>,
}

impl Follower {
    /// Waits until something can be told to this follower.
    async fn connected(&self) {
        loop {
            match self.client.fate(Call::Follow) {
                Fate::Sent { there: Some(there), back: Some(back) } => {
                    return sleep(there + back).await;
                }
                _ => sleep(FOLLOW_AGAIN).await,
            }
        }
    }

    /// Takes over what has taken effect since [`Self::seen`]; gives the time at which the next
    /// commit that is on its way arrives.
    fn catch_up(&mut self) -> Result<Option<Instant>, MetaError> {
        let state = self.client.store.state();
        if self.seen < state.complete_after || self.seen > state.now.revision {
            return Err(MetaError::Compacted { after: self.seen });
        }
        let fresh = state.events.iter().filter(|e| e.revision > self.seen);
        self.ready.extend(fresh.filter(|e| e.key.starts_with(&self.prefix)).cloned());
        self.seen = state.now.revision;
        Ok(state.pending.iter().map(|p| p.due).min())
    }

    async fn next(&mut self) -> Result<Event, MetaError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            let store = Arc::clone(&self.client.store);
            let mut moved = std::pin::pin!(store.moved.notified());
            // From here on nothing that moves is missed.
            moved.as_mut().enable();
            let due = self.catch_up()?;
            if !self.ready.is_empty() {
                self.connected().await;
                continue;
            }
            match due {
                // Its arrival is not told to anybody: it is seen by whoever looks.
                Some(due) => drop(timeout_at(due, moved).await),
                None => moved.await,
            }
        }
    }
}

impl Watch for Follower {
    fn next(&mut self) -> Answer<'_, Event> {
        Box::pin(Self::next(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::Expect;

    const TIMEOUT: Duration = Duration::from_secs(1);

    fn put(key: &str, expect: Expect, value: &str) -> Vec<Change> {
        vec![Change { key: key.into(), expect, value: Some(value.into()) }]
    }

    /// A client whose every call meets `fate`.
    fn meets(model: &Model, fate: Fate) -> Client {
        model.client(TIMEOUT, Box::new(move |_| fate))
    }

    fn sent(there_ms: Option<u64>, back_ms: Option<u64>) -> Fate {
        let ms = |ms: Option<u64>| ms.map(Duration::from_millis);
        Fate::Sent { there: ms(there_ms), back: ms(back_ms) }
    }

    async fn value(model: &Model) -> Option<String> {
        let held = meets(model, Fate::WELL).get("k").await.unwrap();
        held.map(|e| String::from_utf8(e.value).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_answer_leaves_the_commit() {
        let model = Model::default();
        let commit =
            meets(&model, sent(Some(10), None)).commit(put("k", Expect::Absent, "x")).await;
        assert!(matches!(commit, Err(MetaError::Unknown { .. })));
        assert_eq!(value(&model).await.as_deref(), Some("x"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_commit_takes_effect_late_and_wakes_followers() {
        let model = Model::default();
        let mut watch = meets(&model, Fate::WELL).watch("", Revision(0));
        let late = meets(&model, sent(Some(5000), Some(0)));
        let begun = Instant::now();
        let commit = late.commit(put("k", Expect::Absent, "x")).await;
        assert!(matches!(commit, Err(MetaError::Unknown { .. })));
        assert_eq!(begun.elapsed(), TIMEOUT);
        assert_eq!(value(&model).await, None);
        assert_eq!(watch.next().await.unwrap().key, "k");
        assert_eq!(begun.elapsed(), Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_commit_that_was_overtaken_does_nothing() {
        let model = Model::default();
        let late = meets(&model, sent(Some(5000), Some(0)));
        late.commit(put("k", Expect::Absent, "late")).await.unwrap_err();
        meets(&model, Fate::WELL).commit(put("k", Expect::Absent, "first")).await.unwrap();
        sleep(Duration::from_secs(10)).await;
        assert_eq!(value(&model).await.as_deref(), Some("first"));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_sent_is_known_not_to_be() {
        let model = Model::default();
        let begun = Instant::now();
        let client = meets(&model, Fate::Refused);
        let commit = client.commit(put("k", Expect::Absent, "x")).await;
        assert!(matches!(commit, Err(MetaError::Unreachable { .. })));
        assert!(matches!(client.get("k").await, Err(MetaError::Unreachable { .. })));
        assert_eq!(begun.elapsed(), Duration::ZERO);
        let slow = meets(&model, sent(Some(600), Some(600)));
        assert!(matches!(slow.get("k").await, Err(MetaError::Unreachable { .. })));
        assert_eq!(begun.elapsed(), TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_follows_a_store_from_the_past_is_told() {
        let model = Model::default();
        let client = meets(&model, Fate::WELL);
        let before = model.snapshot();
        let one = client.commit(put("k", Expect::Absent, "x")).await.unwrap();
        let mut watch = client.watch("", one);
        model.restore(before);
        assert_eq!(watch.next().await, Err(MetaError::Compacted { after: one }));
        assert_eq!(value(&model).await, None);
    }
}

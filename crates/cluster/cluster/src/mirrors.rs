//! The records of mirrored volumes in the metadata store, for those who need them elsewhere.
//!
//! A mirror lives on its volume's core, the store's connections live on the control thread.
//! [`Mirrors`] is the control thread's side as others hold it: `Send`, cheap to clone, and
//! bounded in time, whatever the control thread does. One watch serves all volumes.
//!
//! The key of a volume's record is `mirrors/ID`; the value is [`Record::to_bytes`].

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use block::Epoch;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use mirror::record::{Put, Record, Records, Unreachable};
use peer::NodeId;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::lives;
use crate::meta::{Change, Entry, Expect, Meta, MetaError, Revision};

/// What the keys begin with.
pub const PREFIX: &str = "mirrors/";

/// Questions that wait; whoever has one more waits with it.
const QUEUE: usize = 256;

/// Questions put to the store at once.
const AT_ONCE: usize = 64;

/// The pause before changes are followed again, where that has failed.
const FOLLOW_AGAIN: Duration = Duration::from_secs(1);

/// After how long a mirror that was told of no change looks for itself, between half of it and all: a
/// node may have a thousand mirrors, which should not all look at once. One that waits for a change
/// because it does not serve looks far more often by itself.
const LOOK_AGAIN: Duration = Duration::from_secs(120);

/// The key of a volume's record.
#[must_use]
pub fn key(volume: Uuid) -> String {
    format!("{PREFIX}{volume}")
}

/// The volume whose record `key` is.
#[must_use]
pub fn volume_of_key(key: &str) -> Option<Uuid> {
    key.strip_prefix(PREFIX)?.parse().ok()
}

/// The change that makes a volume's first record, to be committed with the volume's own.
#[must_use]
pub fn create(volume: Uuid, record: &Record) -> Change {
    Change { key: key(volume), expect: Expect::Absent, value: Some(record.to_bytes()) }
}

/// The change that puts `record` in place of the one that `at` wrote.
#[must_use]
pub fn replace(volume: Uuid, at: Revision, record: &Record) -> Change {
    Change { key: key(volume), expect: Expect::At(at), value: Some(record.to_bytes()) }
}

/// A volume's record, as the store has it now.
///
/// # Errors
/// [`MetaError`]; [`MetaError::Damaged`] for a damaged one.
pub async fn get(meta: &dyn Meta, volume: Uuid) -> Result<Option<(Record, Revision)>, MetaError> {
    let Some(entry) = meta.get(&key(volume)).await? else { return Ok(None) };
    let record = decode(&entry)?;
    Ok(Some((record, entry.revision)))
}

/// The record that `entry` holds.
///
/// # Errors
/// [`MetaError::Damaged`].
pub fn decode(entry: &Entry) -> Result<Record, MetaError> {
    let damaged = |why: String| MetaError::Damaged { path: entry.key.clone(), why };
    let contents = entry.contents()?;
    let record = Record::parse(contents).map_err(|why| damaged(why.to_string()))?;
    if record.to_bytes() != contents {
        return Err(damaged("a field is missing, or there twice".into()));
    }
    Ok(record)
}

/// The change that removes the record that `at` wrote.
#[must_use]
pub fn remove(volume: Uuid, at: Revision) -> Change {
    Change { key: key(volume), expect: Expect::At(at), value: None }
}

/// The process that puts records: its node, and its life.
pub type Own = (NodeId, Uuid);

/// A question to the store.
enum Ask {
    Read { volume: Uuid, answer: oneshot::Sender<Result<Record, Unreachable>> },
    Put { volume: Uuid, put: Box<NewRecord>, answer: oneshot::Sender<Put> },
}

struct NewRecord {
    after: Epoch,
    config: u128,
    value: Vec<u8>,
}

/// Who waits for changes of which volume.
#[derive(Default)]
struct Waiters(Mutex<BTreeMap<Uuid, Vec<Weak<Notify>>>>);

impl Waiters {
    fn add(&self, volume: Uuid) -> Arc<Notify> {
        let waiter = Arc::new(Notify::new());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(volume).or_default().push(Arc::downgrade(&waiter));
        waiter
    }

    /// A waiter of this volume is gone.
    fn tidy(&self, volume: Uuid) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waiters) = all.get_mut(&volume) else { return };
        waiters.retain(|w| w.strong_count() > 0);
        if waiters.is_empty() {
            all.remove(&volume);
        }
    }

    /// Wakes those of one volume, or all. One that does not wait now will not wait next time.
    fn wake(&self, volume: Option<Uuid>) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, waiters) in all.iter().filter(|(v, _)| volume.is_none_or(|volume| volume == **v)) {
            waiters.iter().filter_map(Weak::upgrade).for_each(|waiter| waiter.notify_one());
        }
    }
}

/// The records of all mirrored volumes.
#[derive(Clone)]
pub struct Mirrors {
    asks: mpsc::Sender<Ask>,
    waiters: Arc<Waiters>,
    bound: Duration,
}

impl fmt::Debug for Mirrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirrors").field("bound", &self.bound).finish_non_exhaustive()
    }
}

impl Mirrors {
    /// The records in `meta`, and what answers for them: to be run where `meta` lives, until all
    /// handles are gone. `bound` is the longest time that one call of the store takes. Records are
    /// put as long as `own` is the life of its node (RFD 0035, 5.2), if there are lives.
    pub fn new(
        meta: Arc<dyn Meta>,
        bound: Duration,
        own: Option<Own>,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (asks, asked) = mpsc::channel(QUEUE);
        let waiters = Arc::<Waiters>::default();
        let serve = serve((meta, own), asked, Arc::clone(&waiters));
        (Self { asks, waiters, bound }, serve)
    }

    /// The record of one volume.
    #[must_use]
    pub fn of(&self, volume: Uuid) -> MetaRecords {
        MetaRecords { mirrors: self.clone(), volume, changed: self.waiters.add(volume) }
    }
}

/// The record of one volume. One waits for its changes at a time.
#[derive(Debug)]
pub struct MetaRecords {
    mirrors: Mirrors,
    volume: Uuid,
    changed: Arc<Notify>,
}

impl Drop for MetaRecords {
    fn drop(&mut self) {
        // Its own is the only strong one: from here on it does not count.
        self.changed = Arc::default();
        self.mirrors.waiters.tidy(self.volume);
    }
}

impl Clone for MetaRecords {
    /// A waiter of its own.
    fn clone(&self) -> Self {
        self.mirrors.of(self.volume)
    }
}

impl MetaRecords {
    /// Puts a question that the store answers with `calls` calls; `None` if no answer comes.
    async fn ask<T>(&self, calls: u32, ask: Ask, answer: oneshot::Receiver<T>) -> Option<T> {
        let asked = async {
            self.mirrors.asks.send(ask).await.ok()?;
            answer.await.ok()
        };
        timeout(self.mirrors.bound * calls, asked).await.ok().flatten()
    }
}

impl Records for MetaRecords {
    /// A record that is missing or damaged is [`Unreachable`] as well, and the log says why.
    async fn read(&self) -> Result<Record, Unreachable> {
        let (answer, answered) = oneshot::channel();
        let ask = Ask::Read { volume: self.volume, answer };
        self.ask(1, ask, answered).await.unwrap_or(Err(Unreachable))
    }

    async fn put(&self, after: Epoch, config: u128, record: &Record) -> Put {
        let (answer, answered) = oneshot::channel();
        let put = Box::new(NewRecord { after, config, value: record.to_bytes() });
        let ask = Ask::Put { volume: self.volume, put, answer };
        self.ask(3, ask, answered).await.unwrap_or(Put::Unknown)
    }

    async fn changed(&self) {
        // Out of time is as good as a change: whoever waits looks.
        let _ = timeout(look_again(self.volume), self.changed.notified()).await;
    }
}

/// After how long the mirror of `volume` looks for itself.
fn look_again(volume: Uuid) -> Duration {
    let spread = u32::from(volume.as_bytes()[15]);
    LOOK_AGAIN / 2 + LOOK_AGAIN * spread / (2 * u32::from(u8::MAX))
}

/// Answers until all handles are gone.
async fn serve(
    (meta, own): (Arc<dyn Meta>, Option<Own>),
    mut asked: mpsc::Receiver<Ask>,
    waiters: Arc<Waiters>,
) {
    let meta = &*meta;
    let mut follow = pin!(follow(meta, &waiters));
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            Some(()) = running.next(), if !running.is_empty() => {}
            ask = asked.recv(), if running.len() < AT_ONCE => match ask {
                Some(ask) => running.push(reply(meta, own, ask)),
                None => break,
            },
            () = &mut follow => {}
        }
    }
    while running.next().await.is_some() {}
}

async fn reply(meta: &dyn Meta, own: Option<Own>, ask: Ask) {
    match ask {
        // Who does not wait any more has taken silence for an answer. A put that was not begun
        // then had better not be.
        Ask::Read { answer, .. } if answer.is_closed() => {}
        Ask::Put { answer, .. } if answer.is_closed() => {}
        Ask::Read { volume, answer } => {
            let _ = answer.send(read(meta, volume).await.map(|(record, _)| record));
        }
        Ask::Put { volume, put, answer } => {
            let _ = answer.send(self::put(meta, own, volume, *put).await);
        }
    }
}

async fn read(meta: &dyn Meta, volume: Uuid) -> Result<(Record, Revision), Unreachable> {
    match get(meta, volume).await {
        Ok(Some(found)) => Ok(found),
        Ok(None) => {
            tracing::warn!(%volume, "the store has no record of the mirror");
            Err(Unreachable)
        }
        Err(error @ (MetaError::Failed { .. } | MetaError::Damaged { .. })) => {
            tracing::error!(%volume, %error, "the record of the mirror is damaged");
            Err(Unreachable)
        }
        Err(error) => {
            tracing::debug!(%volume, %error, "the record of the mirror is not read");
            Err(Unreachable)
        }
    }
}

async fn put(meta: &dyn Meta, own: Option<Own>, volume: Uuid, new: NewRecord) -> Put {
    // Nothing is sent after a failed read. Still nobody may conclude that the record is another
    // one, which is what the other answer says.
    let Ok((held, revision)) = read(meta, volume).await else { return Put::Unknown };
    if (held.epoch, held.config) != (new.after, new.config) {
        return Put::Refused;
    }
    let expect = Expect::At(revision);
    let mut changes = vec![Change { key: key(volume), expect, value: Some(new.value) }];
    if let Some((node, life)) = own {
        match lives::condition(meta, node, life).await {
            Ok(Some(condition)) => changes.push(condition),
            Ok(None) => {
                tracing::warn!(%volume, %node, "another process is this node: no record is put");
                return Put::Unknown;
            }
            Err(error) => {
                tracing::warn!(%volume, %error, "it is not known whether this process is its node: no record is put");
                return Put::Unknown;
            }
        }
    }
    match meta.commit(changes).await {
        Ok(_) => Put::Done,
        Err(MetaError::Changed { key }) if volume_of_key(&key) == Some(volume) => Put::Refused,
        Err(error) => {
            tracing::debug!(%volume, %error, "a record of the mirror was put without an answer");
            Put::Unknown
        }
    }
}

/// Wakes those who wait, whoever changes a record. Never ends.
async fn follow(meta: &dyn Meta, waiters: &Waiters) {
    loop {
        match meta.list(PREFIX).await {
            Ok((_, revision)) => {
                waiters.wake(None);
                follow_from(meta, waiters, revision).await;
            }
            Err(error) => {
                tracing::debug!(%error, "records of mirrors are not followed now");
                sleep(FOLLOW_AGAIN).await;
            }
        }
    }
}

/// Until the store says that changes were missed.
async fn follow_from(meta: &dyn Meta, waiters: &Waiters, revision: Revision) {
    let mut watch = meta.watch(PREFIX, revision);
    loop {
        match watch.next().await {
            Ok(event) => {
                if let Some(volume) = volume_of_key(&event.key) {
                    waiters.wake(Some(volume));
                }
            }
            Err(MetaError::Compacted { .. }) => return,
            Err(error) => {
                tracing::debug!(%error, "changes of mirrors' records are not told");
                return sleep(FOLLOW_AGAIN).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use mirror::record::{History, Member, Replica};
    use peer::{Incarnation, NodeId};
    use tokio::time::Instant;

    use super::*;
    use crate::meta::model::{Call, Fate, Model};

    const BOUND: Duration = Duration::from_secs(2);
    const VOLUME: Uuid = Uuid::from_u128(7);

    fn record(epoch: u64) -> Record {
        let node = NodeId(1);
        Record {
            epoch: Epoch(epoch),
            config: u128::from(epoch) * 11,
            replicas: vec![Replica { node, image: Uuid::from_u128(1), new: false }],
            in_sync: vec![Member { node, incarnation: Incarnation(3) }],
            primary: node,
            born: Epoch::default(),
            history: History::default(),
        }
    }

    /// A model that holds the record of epoch 1, and a client whose commits meet `fate`.
    async fn setup(fate: Fate) -> (Model, Arc<dyn Meta>) {
        let model = Model::default();
        let timeout = Duration::from_secs(1);
        let well = model.client(timeout, Box::new(|_| Fate::WELL));
        well.commit(vec![create(VOLUME, &record(1))]).await.unwrap();
        let faults = move |call| if call == Call::Commit { fate } else { Fate::WELL };
        let client = model.client(timeout, Box::new(faults));
        (model, Arc::new(client))
    }

    async fn puts(fate: Fate) -> (Put, Record) {
        let (_model, meta) = setup(fate).await;
        let (mirrors, serve) = Mirrors::new(meta, BOUND, None);
        tokio::spawn(serve);
        let records = mirrors.of(VOLUME);
        let put = records.put(Epoch(1), 11, &record(2)).await;
        (put, records.read().await.unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn the_outcome_of_a_put_is_told_as_far_as_it_is_known() {
        let lost = Fate::Sent { there: Some(Duration::ZERO), back: None };
        let never = Fate::Sent { there: None, back: None };
        assert_eq!(puts(Fate::WELL).await, (Put::Done, record(2)));
        assert_eq!(puts(lost).await, (Put::Unknown, record(2)));
        assert_eq!(puts(never).await, (Put::Unknown, record(1)));
        assert_eq!(puts(Fate::Refused).await, (Put::Unknown, record(1)));
    }

    /// RFD 0035, 5.2: whoever has been replaced changes nothing any more, whether it knows that or not.
    #[tokio::test(start_paused = true)]
    async fn a_life_that_was_replaced_puts_no_record() {
        let node = NodeId(2);
        let life = |n: u128| lives::Life {
            life: Uuid::from_u128(n),
            host: String::new(),
            addresses: Vec::new(),
            machine: String::new(),
            boot: String::new(),
            lock: (0, 0),
        };
        let (_model, meta) = setup(Fate::WELL).await;
        let (mirrors, serve) =
            Mirrors::new(Arc::clone(&meta), BOUND, Some((node, Uuid::from_u128(1))));
        tokio::spawn(serve);
        let records = mirrors.of(VOLUME);
        assert_eq!(records.put(Epoch(1), 11, &record(2)).await, Put::Unknown, "nobody is the node");
        lives::claim(&*meta, node, &life(1), false).await.unwrap();
        assert_eq!(records.put(Epoch(1), 11, &record(2)).await, Put::Done);
        lives::claim(&*meta, node, &life(2), false).await.unwrap();
        let after = record(2);
        let put = records.put(Epoch(2), after.config, &record(3)).await;
        assert_eq!((put, records.read().await), (Put::Unknown, Ok(after)));
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_expected_record_is_replaced() {
        let (_model, meta) = setup(Fate::WELL).await;
        let (mirrors, serve) = Mirrors::new(meta, BOUND, None);
        tokio::spawn(serve);
        let records = mirrors.of(VOLUME);
        assert_eq!(records.put(Epoch(1), 12, &record(2)).await, Put::Refused);
        assert_eq!(records.put(Epoch(2), 11, &record(3)).await, Put::Refused);
        assert_eq!(records.put(Epoch(1), 11, &record(2)).await, Put::Done);
        assert_eq!(records.put(Epoch(1), 11, &record(2)).await, Put::Refused);
        assert_eq!(mirrors.of(Uuid::from_u128(8)).read().await, Err(Unreachable));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_woken_by_changes_of_his_volume_and_seldom_without_one() {
        let (_model, meta) = setup(Fate::WELL).await;
        let (mirrors, serve) = Mirrors::new(Arc::clone(&meta), BOUND, None);
        tokio::spawn(serve);
        let (mine, other) = (mirrors.of(VOLUME), mirrors.of(Uuid::from_u128(8)));
        // The first look of the follower wakes everybody.
        mine.changed().await;
        other.changed().await;
        let begun = Instant::now();
        let change = async {
            sleep(Duration::from_millis(300)).await;
            assert_eq!(mine.put(Epoch(1), 11, &record(2)).await, Put::Done);
        };
        let woken = async {
            mine.clone().changed().await;
            begun.elapsed()
        };
        let (woken, (), ()) = tokio::join!(woken, change, other.changed());
        assert_eq!(woken, Duration::from_millis(300));
        assert!(begun.elapsed() >= LOOK_AGAIN / 2 && begun.elapsed() <= LOOK_AGAIN);
        // The change came when nobody waited on this handle: it is told now.
        let begun = Instant::now();
        mine.changed().await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    /// A thousand mirrors that look for themselves do not do so at once.
    #[test]
    fn mirrors_that_are_told_nothing_look_at_different_times() {
        let all = (0..=u8::MAX).map(|last| look_again(Uuid::from_u128(last.into())));
        let all: std::collections::BTreeSet<_> = all.collect();
        assert_eq!(all.len(), 256);
        assert_eq!(all.first(), Some(&(LOOK_AGAIN / 2)));
        assert_eq!(all.last(), Some(&LOOK_AGAIN));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_no_more_leaves_nothing() {
        let (_model, meta) = setup(Fate::WELL).await;
        let (mirrors, _serve) = Mirrors::new(meta, BOUND, None);
        let one = mirrors.of(VOLUME);
        let two = one.clone();
        let waiters = || mirrors.waiters.0.lock().unwrap().get(&VOLUME).map(Vec::len);
        assert_eq!(waiters(), Some(2));
        drop(one);
        assert_eq!(waiters(), Some(1));
        drop(two);
        assert_eq!(waiters(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_ever_for_a_control_thread_that_hangs() {
        let (_model, meta) = setup(Fate::WELL).await;
        let (mirrors, serve) = Mirrors::new(meta, BOUND, None);
        let records = mirrors.of(VOLUME);
        let begun = Instant::now();
        assert_eq!(records.read().await, Err(Unreachable));
        assert_eq!(begun.elapsed(), BOUND);
        assert_eq!(records.put(Epoch(1), 11, &record(2)).await, Put::Unknown);
        assert_eq!(begun.elapsed(), BOUND * 4);
        // A put that was given up before it was begun is not begun.
        tokio::spawn(serve);
        assert_eq!(records.read().await, Ok(record(1)));
        drop((records, mirrors));
    }

    #[test]
    fn a_core_of_its_own_may_ask() {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime().unwrap().block_on(async {
            let (_model, meta) = setup(Fate::WELL).await;
            let (mirrors, serve) = Mirrors::new(meta, BOUND, None);
            tokio::spawn(serve);
            let records = mirrors.of(VOLUME);
            let elsewhere = move || runtime().unwrap().block_on(records.read());
            let read = tokio::task::spawn_blocking(elsewhere).await.unwrap();
            assert_eq!(read, Ok(record(1)));
        });
    }

    #[test]
    fn keys_name_volumes() {
        assert_eq!(key(VOLUME), "mirrors/00000000-0000-0000-0000-000000000007");
        assert_eq!(volume_of_key(&key(VOLUME)), Some(VOLUME));
        assert_eq!(volume_of_key("volumes/00000000-0000-0000-0000-000000000007"), None);
    }
}

//! Access to the records of mirrored volumes in the metadata store, from other threads.
//!
//! A mirror runs on its volume's core; the store's connections belong to the control thread.
//! [`MirrorRecords`] is a handle to the control thread: `Send`, cheap to clone, and every call is
//! bounded in time, whatever the control thread does. One watch serves all volumes.
//!
//! The key of a volume's record is `mirrors/ID`; the value is [`MirrorConfig::to_bytes`].

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use block::Epoch;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use mirror::config::{ConfigStore, MirrorConfig, PutOutcome, StoreUnavailable};
use peer::NodeId;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::incarnations;
use crate::store::{Change, Entry, MetadataStore, Precondition, Revision, StoreError};

/// Prefix of the keys.
pub const KEY_PREFIX: &str = "mirrors/";

/// Length of the request queue; further callers wait.
const REQUEST_QUEUE_LEN: usize = 256;

/// Most requests sent to the store at once.
const MAX_CONCURRENT_REQUESTS: usize = 64;

/// Pause before a failed watch is opened again.
const WATCH_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// A mirror without change notifications reads its record again after half of this to all of it: a
/// node may have a thousand mirrors, which must not all read at once. A mirror that does not serve
/// and waits for a change polls far more often by itself.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(120);

/// The key of a volume's record.
#[must_use]
pub fn record_key(volume: Uuid) -> String {
    format!("{KEY_PREFIX}{volume}")
}

/// The volume whose record has the key `key`.
#[must_use]
pub fn volume_of_key(key: &str) -> Option<Uuid> {
    key.strip_prefix(KEY_PREFIX)?.parse().ok()
}

/// The change that creates a volume's first record, to be committed with the volume's own.
#[must_use]
pub fn creation(volume: Uuid, record: &MirrorConfig) -> Change {
    Change {
        key: record_key(volume),
        precondition: Precondition::Absent,
        value: Some(record.to_bytes()),
    }
}

/// The change that replaces the record of revision `at` by `record`.
#[must_use]
pub fn replacement(volume: Uuid, at: Revision, record: &MirrorConfig) -> Change {
    Change {
        key: record_key(volume),
        precondition: Precondition::AtRevision(at),
        value: Some(record.to_bytes()),
    }
}

/// A volume's record, as currently stored, and its revision.
///
/// # Errors
/// [`StoreError`]; [`StoreError::Damaged`] for a damaged one.
pub async fn get_record(
    meta: &dyn MetadataStore,
    volume: Uuid,
) -> Result<Option<(MirrorConfig, Revision)>, StoreError> {
    let Some(entry) = meta.get(&record_key(volume)).await? else { return Ok(None) };
    let record = decode_record(&entry)?;
    Ok(Some((record, entry.revision)))
}

/// Decodes the record in `entry`.
///
/// # Errors
/// [`StoreError::Damaged`].
pub fn decode_record(entry: &Entry) -> Result<MirrorConfig, StoreError> {
    let damaged = |why: String| StoreError::Damaged { path: entry.key.clone(), why };
    let contents = entry.contents()?;
    let record = MirrorConfig::parse(contents).map_err(|why| damaged(why.to_string()))?;
    if record.to_bytes() != contents {
        return Err(damaged("a field is missing or duplicate".into()));
    }
    Ok(record)
}

/// The change that removes the record of revision `at`.
#[must_use]
pub fn removal(volume: Uuid, at: Revision) -> Change {
    Change { key: record_key(volume), precondition: Precondition::AtRevision(at), value: None }
}

/// The process that writes records: its node, and its incarnation.
pub type WriterIncarnation = (NodeId, Uuid);

/// A request to the store.
enum RecordRequest {
    Read { volume: Uuid, answer: oneshot::Sender<Result<MirrorConfig, StoreUnavailable>> },
    Put { volume: Uuid, put: Box<RecordUpdate>, answer: oneshot::Sender<PutOutcome> },
}

struct RecordUpdate {
    expected_epoch: Epoch,
    expected_config: u128,
    value: Vec<u8>,
}

/// The handles that wait for changes, by volume.
#[derive(Default)]
struct ChangeWaiters(Mutex<BTreeMap<Uuid, Vec<Weak<Notify>>>>);

impl ChangeWaiters {
    fn add(&self, volume: Uuid) -> Arc<Notify> {
        let waiter = Arc::new(Notify::new());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(volume).or_default().push(Arc::downgrade(&waiter));
        waiter
    }

    /// Removes dropped waiters of this volume.
    fn prune(&self, volume: Uuid) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waiters) = all.get_mut(&volume) else { return };
        waiters.retain(|w| w.strong_count() > 0);
        if waiters.is_empty() {
            all.remove(&volume);
        }
    }

    /// Wakes the waiters of one volume, or all. A waiter that is not waiting now returns at once
    /// next time.
    fn wake(&self, volume: Option<Uuid>) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, waiters) in all.iter().filter(|(v, _)| volume.is_none_or(|volume| volume == **v)) {
            waiters.iter().filter_map(Weak::upgrade).for_each(|waiter| waiter.notify_one());
        }
    }
}

/// The records of all mirrored volumes.
#[derive(Clone)]
pub struct MirrorRecords {
    requests: mpsc::Sender<RecordRequest>,
    waiters: Arc<ChangeWaiters>,
    call_timeout: Duration,
}

impl fmt::Debug for MirrorRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirrors").field("bound", &self.call_timeout).finish_non_exhaustive()
    }
}

impl MirrorRecords {
    /// Creates the handle, and the task that serves it: run the task where `meta` lives; it ends
    /// when all handles are dropped. `bound` is the longest time one store call takes. Records are
    /// written only while `own` is its node's registered incarnation (RFD 0035, 5.2), if given.
    pub fn new(
        meta: Arc<dyn MetadataStore>,
        bound: Duration,
        own: Option<WriterIncarnation>,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (sender, receiver) = mpsc::channel(REQUEST_QUEUE_LEN);
        let waiters = Arc::<ChangeWaiters>::default();
        let serve = serve_requests((meta, own), receiver, Arc::clone(&waiters));
        (Self { requests: sender, waiters, call_timeout: bound }, serve)
    }

    /// The record of one volume.
    #[must_use]
    pub fn record_of(&self, volume: Uuid) -> StoredMirrorRecord {
        StoredMirrorRecord { records: self.clone(), volume, changed: self.waiters.add(volume) }
    }
}

/// The record of one volume. Only one task at a time may wait for its changes.
#[derive(Debug)]
pub struct StoredMirrorRecord {
    records: MirrorRecords,
    volume: Uuid,
    changed: Arc<Notify>,
}

impl Drop for StoredMirrorRecord {
    fn drop(&mut self) {
        // Drop the only strong reference, so that `prune` removes this waiter.
        self.changed = Arc::default();
        self.records.waiters.prune(self.volume);
    }
}

impl Clone for StoredMirrorRecord {
    /// The clone is a waiter of its own.
    fn clone(&self) -> Self {
        self.records.record_of(self.volume)
    }
}

impl StoredMirrorRecord {
    /// Sends a request that takes `calls` store calls; `None` if no answer comes in time.
    async fn request<T>(
        &self,
        calls: u32,
        request: RecordRequest,
        answer: oneshot::Receiver<T>,
    ) -> Option<T> {
        let exchange = async {
            self.records.requests.send(request).await.ok()?;
            answer.await.ok()
        };
        timeout(self.records.call_timeout * calls, exchange).await.ok().flatten()
    }
}

impl ConfigStore for StoredMirrorRecord {
    /// A missing or damaged record is also [`StoreUnavailable`]; the log says why.
    async fn read(&self) -> Result<MirrorConfig, StoreUnavailable> {
        let (answer, receiver) = oneshot::channel();
        let request = RecordRequest::Read { volume: self.volume, answer };
        self.request(1, request, receiver).await.unwrap_or(Err(StoreUnavailable))
    }

    async fn put(
        &self,
        expected_epoch: Epoch,
        expected_config: u128,
        record: &MirrorConfig,
    ) -> PutOutcome {
        let (answer, receiver) = oneshot::channel();
        let put =
            Box::new(RecordUpdate { expected_epoch, expected_config, value: record.to_bytes() });
        let request = RecordRequest::Put { volume: self.volume, put, answer };
        self.request(3, request, receiver).await.unwrap_or(PutOutcome::Unknown)
    }

    async fn wait_changed(&self) {
        // A timeout counts as a change: the caller reads again.
        let _ = timeout(poll_interval(self.volume), self.changed.notified()).await;
    }
}

/// After how long the mirror of `volume` reads its record without a notification.
fn poll_interval(volume: Uuid) -> Duration {
    let spread = u32::from(volume.as_bytes()[15]);
    MAX_POLL_INTERVAL / 2 + MAX_POLL_INTERVAL * spread / (2 * u32::from(u8::MAX))
}

/// Serves requests until all handles are dropped.
async fn serve_requests(
    (meta, writer): (Arc<dyn MetadataStore>, Option<WriterIncarnation>),
    mut requests: mpsc::Receiver<RecordRequest>,
    waiters: Arc<ChangeWaiters>,
) {
    let meta = &*meta;
    let mut watch = pin!(watch_records(meta, &waiters));
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            Some(()) = running.next(), if !running.is_empty() => {}
            request = requests.recv(), if running.len() < MAX_CONCURRENT_REQUESTS => match request {
                Some(request) => running.push(handle_request(meta, writer, request)),
                None => break,
            },
            () = &mut watch => {}
        }
    }
    while running.next().await.is_some() {}
}

async fn handle_request(
    meta: &dyn MetadataStore,
    writer: Option<WriterIncarnation>,
    request: RecordRequest,
) {
    match request {
        // The caller has given up and treats the result as unknown. Do not start the request.
        RecordRequest::Read { answer, .. } if answer.is_closed() => {}
        RecordRequest::Put { answer, .. } if answer.is_closed() => {}
        RecordRequest::Read { volume, answer } => {
            let _ = answer.send(read_record(meta, volume).await.map(|(record, _)| record));
        }
        RecordRequest::Put { volume, put, answer } => {
            let _ = answer.send(put_record(meta, writer, volume, *put).await);
        }
    }
}

async fn read_record(
    meta: &dyn MetadataStore,
    volume: Uuid,
) -> Result<(MirrorConfig, Revision), StoreUnavailable> {
    match get_record(meta, volume).await {
        Ok(Some(found)) => Ok(found),
        Ok(None) => {
            tracing::warn!(%volume, "mirror configuration missing in the store");
            Err(StoreUnavailable)
        }
        Err(error @ (StoreError::Failed { .. } | StoreError::Damaged { .. })) => {
            tracing::error!(%volume, %error, "mirror configuration damaged");
            Err(StoreUnavailable)
        }
        Err(error) => {
            tracing::debug!(%volume, %error, "cannot read the mirror configuration");
            Err(StoreUnavailable)
        }
    }
}

async fn put_record(
    meta: &dyn MetadataStore,
    writer: Option<WriterIncarnation>,
    volume: Uuid,
    update: RecordUpdate,
) -> PutOutcome {
    // Nothing is sent after a failed read. Yet the answer is not `Conflict`: from that a caller
    // would conclude that the record has changed.
    let Ok((stored, revision)) = read_record(meta, volume).await else {
        return PutOutcome::Unknown;
    };
    if (stored.epoch, stored.config_id) != (update.expected_epoch, update.expected_config) {
        return PutOutcome::Conflict;
    }
    let expect = Precondition::AtRevision(revision);
    let mut changes =
        vec![Change { key: record_key(volume), precondition: expect, value: Some(update.value) }];
    if let Some((node, incarnation)) = writer {
        match incarnations::incarnation_condition(meta, node, incarnation).await {
            Ok(Some(condition)) => changes.push(condition),
            Ok(None) => {
                tracing::warn!(%volume, %node, "configuration not written: another process holds this node");
                return PutOutcome::Unknown;
            }
            Err(error) => {
                tracing::warn!(%volume, %error, "configuration not written: cannot check whether \
                    this process still holds its node");
                return PutOutcome::Unknown;
            }
        }
    }
    match meta.commit(changes).await {
        Ok(_) => PutOutcome::Committed,
        Err(StoreError::Conflict { key }) if volume_of_key(&key) == Some(volume) => {
            PutOutcome::Conflict
        }
        Err(error) => {
            tracing::debug!(%volume, %error, "result of a configuration write is unknown");
            PutOutcome::Unknown
        }
    }
}

/// Wakes waiters when any process changes a record. Never ends.
async fn watch_records(meta: &dyn MetadataStore, waiters: &ChangeWaiters) {
    loop {
        match meta.list(KEY_PREFIX).await {
            Ok((_, revision)) => {
                waiters.wake(None);
                watch_records_from(meta, waiters, revision).await;
            }
            Err(error) => {
                tracing::debug!(%error, "cannot watch mirror configurations");
                sleep(WATCH_RETRY_PAUSE).await;
            }
        }
    }
}

/// Forwards changes until the store reports that some were missed.
async fn watch_records_from(meta: &dyn MetadataStore, waiters: &ChangeWaiters, revision: Revision) {
    let mut watch = meta.watch(KEY_PREFIX, revision);
    loop {
        match watch.next_event().await {
            Ok(event) => {
                if let Some(volume) = volume_of_key(&event.key) {
                    waiters.wake(Some(volume));
                }
            }
            Err(StoreError::Compacted { .. }) => return,
            Err(error) => {
                tracing::debug!(%error, "watch of mirror configurations failed");
                return sleep(WATCH_RETRY_PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use mirror::config::{ConfigReplica, CopyHistory, InSyncMember};
    use peer::{Incarnation, NodeId};
    use tokio::time::Instant;

    use super::*;
    use crate::store::memory::{CallDelivery, CallKind, MemoryStore};

    const BOUND: Duration = Duration::from_secs(2);
    const VOLUME: Uuid = Uuid::from_u128(7);

    fn record(epoch: u64) -> MirrorConfig {
        let node = NodeId(1);
        MirrorConfig {
            epoch: Epoch(epoch),
            config_id: u128::from(epoch) * 11,
            replicas: vec![ConfigReplica { node, image: Uuid::from_u128(1), is_new: false }],
            in_sync: vec![InSyncMember { node, incarnation: Incarnation(3) }],
            primary: node,
            cold_start_epoch: Epoch::default(),
            history: CopyHistory::default(),
        }
    }

    /// A store that holds the record of epoch 1, and a client whose commits have the delivery
    /// `fate`.
    async fn setup(delivery: CallDelivery) -> (MemoryStore, Arc<dyn MetadataStore>) {
        let model = MemoryStore::default();
        let timeout = Duration::from_secs(1);
        let well = model.client(timeout, Box::new(|_| CallDelivery::IMMEDIATE));
        well.commit(vec![creation(VOLUME, &record(1))]).await.unwrap();
        let faults =
            move |call| if call == CallKind::Commit { delivery } else { CallDelivery::IMMEDIATE };
        let client = model.client(timeout, Box::new(faults));
        (model, Arc::new(client))
    }

    async fn puts(delivery: CallDelivery) -> (PutOutcome, MirrorConfig) {
        let (_model, meta) = setup(delivery).await;
        let (mirrors, serve) = MirrorRecords::new(meta, BOUND, None);
        tokio::spawn(serve);
        let records = mirrors.record_of(VOLUME);
        let put = records.put(Epoch(1), 11, &record(2)).await;
        (put, records.read().await.unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn the_outcome_of_a_put_is_told_as_far_as_it_is_known() {
        let lost = CallDelivery::Sent { request_delay: Some(Duration::ZERO), response_delay: None };
        let never = CallDelivery::Sent { request_delay: None, response_delay: None };
        assert_eq!(puts(CallDelivery::IMMEDIATE).await, (PutOutcome::Committed, record(2)));
        assert_eq!(puts(lost).await, (PutOutcome::Unknown, record(2)));
        assert_eq!(puts(never).await, (PutOutcome::Unknown, record(1)));
        assert_eq!(puts(CallDelivery::Refused).await, (PutOutcome::Unknown, record(1)));
    }

    /// RFD 0035, 5.2: a replaced incarnation changes nothing any more, whether it knows or not.
    #[tokio::test(start_paused = true)]
    async fn a_life_that_was_replaced_puts_no_record() {
        let node = NodeId(2);
        let incarnation = |n: u128| incarnations::ProcessIncarnation {
            id: Uuid::from_u128(n),
            host: String::new(),
            addresses: Vec::new(),
            machine_id: String::new(),
            boot_id: String::new(),
            lock_file: (0, 0),
        };
        let (_model, meta) = setup(CallDelivery::IMMEDIATE).await;
        let (mirrors, serve) =
            MirrorRecords::new(Arc::clone(&meta), BOUND, Some((node, Uuid::from_u128(1))));
        tokio::spawn(serve);
        let records = mirrors.record_of(VOLUME);
        assert_eq!(
            records.put(Epoch(1), 11, &record(2)).await,
            PutOutcome::Unknown,
            "no process is the node"
        );
        incarnations::claim(&*meta, node, &incarnation(1), false).await.unwrap();
        assert_eq!(records.put(Epoch(1), 11, &record(2)).await, PutOutcome::Committed);
        incarnations::claim(&*meta, node, &incarnation(2), false).await.unwrap();
        let after = record(2);
        let put = records.put(Epoch(2), after.config_id, &record(3)).await;
        assert_eq!((put, records.read().await), (PutOutcome::Unknown, Ok(after)));
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_expected_record_is_replaced() {
        let (_model, meta) = setup(CallDelivery::IMMEDIATE).await;
        let (mirrors, serve) = MirrorRecords::new(meta, BOUND, None);
        tokio::spawn(serve);
        let records = mirrors.record_of(VOLUME);
        assert_eq!(records.put(Epoch(1), 12, &record(2)).await, PutOutcome::Conflict);
        assert_eq!(records.put(Epoch(2), 11, &record(3)).await, PutOutcome::Conflict);
        assert_eq!(records.put(Epoch(1), 11, &record(2)).await, PutOutcome::Committed);
        assert_eq!(records.put(Epoch(1), 11, &record(2)).await, PutOutcome::Conflict);
        assert_eq!(mirrors.record_of(Uuid::from_u128(8)).read().await, Err(StoreUnavailable));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_woken_by_changes_of_his_volume_and_seldom_without_one() {
        let (_model, meta) = setup(CallDelivery::IMMEDIATE).await;
        let (mirrors, serve) = MirrorRecords::new(Arc::clone(&meta), BOUND, None);
        tokio::spawn(serve);
        let (own, other) = (mirrors.record_of(VOLUME), mirrors.record_of(Uuid::from_u128(8)));
        // The watcher's first read wakes every waiter.
        own.wait_changed().await;
        other.wait_changed().await;
        let begun = Instant::now();
        let change = async {
            sleep(Duration::from_millis(300)).await;
            assert_eq!(own.put(Epoch(1), 11, &record(2)).await, PutOutcome::Committed);
        };
        let woken = async {
            own.clone().wait_changed().await;
            begun.elapsed()
        };
        let (woken, (), ()) = tokio::join!(woken, change, other.wait_changed());
        assert_eq!(woken, Duration::from_millis(300));
        assert!(begun.elapsed() >= MAX_POLL_INTERVAL / 2 && begun.elapsed() <= MAX_POLL_INTERVAL);
        // The change came while nothing waited on this handle: it is reported now.
        let begun = Instant::now();
        own.wait_changed().await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    /// A thousand mirrors that poll do not poll at once.
    #[test]
    fn mirrors_that_are_told_nothing_look_at_different_times() {
        let all = (0..=u8::MAX).map(|last| poll_interval(Uuid::from_u128(last.into())));
        let all: std::collections::BTreeSet<_> = all.collect();
        assert_eq!(all.len(), 256);
        assert_eq!(all.first(), Some(&(MAX_POLL_INTERVAL / 2)));
        assert_eq!(all.last(), Some(&MAX_POLL_INTERVAL));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_no_more_leaves_nothing() {
        let (_model, meta) = setup(CallDelivery::IMMEDIATE).await;
        let (mirrors, _serve) = MirrorRecords::new(meta, BOUND, None);
        let one = mirrors.record_of(VOLUME);
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
        let (_model, meta) = setup(CallDelivery::IMMEDIATE).await;
        let (mirrors, serve) = MirrorRecords::new(meta, BOUND, None);
        let records = mirrors.record_of(VOLUME);
        let begun = Instant::now();
        assert_eq!(records.read().await, Err(StoreUnavailable));
        assert_eq!(begun.elapsed(), BOUND);
        assert_eq!(records.put(Epoch(1), 11, &record(2)).await, PutOutcome::Unknown);
        assert_eq!(begun.elapsed(), BOUND * 4);
        // A put whose caller gave up before it started is not started.
        tokio::spawn(serve);
        assert_eq!(records.read().await, Ok(record(1)));
        drop((records, mirrors));
    }

    #[test]
    fn a_core_of_its_own_may_ask() {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime().unwrap().block_on(async {
            let (_model, meta) = setup(CallDelivery::IMMEDIATE).await;
            let (mirrors, serve) = MirrorRecords::new(meta, BOUND, None);
            tokio::spawn(serve);
            let records = mirrors.record_of(VOLUME);
            let elsewhere = move || runtime().unwrap().block_on(records.read());
            let read = tokio::task::spawn_blocking(elsewhere).await.unwrap();
            assert_eq!(read, Ok(record(1)));
        });
    }

    #[test]
    fn keys_name_volumes() {
        assert_eq!(record_key(VOLUME), "mirrors/00000000-0000-0000-0000-000000000007");
        assert_eq!(volume_of_key(&record_key(VOLUME)), Some(VOLUME));
        assert_eq!(volume_of_key("volumes/00000000-0000-0000-0000-000000000007"), None);
    }
}

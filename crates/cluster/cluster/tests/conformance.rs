//! Every back end of the metadata store passes one suite.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::EtcdCluster;
use cluster::store::embedded::EmbeddedStore;
use cluster::store::etcd::{EtcdSettings, EtcdStore};
use cluster::store::memory::{CallDelivery, CallKind, FaultInjector, MemoryStore};
use cluster::store::{MetadataStore, Precondition};
use cluster::testing::{StoreBackend, increment_once, put, run_conformance_suite};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

struct EmbeddedBackend(tempfile::TempDir, AtomicUsize);

impl StoreBackend for EmbeddedBackend {
    async fn empty_store(&self) -> Arc<dyn MetadataStore> {
        let n = self.1.fetch_add(1, Ordering::Relaxed);
        Arc::new(EmbeddedStore::open(&self.0.path().join(format!("{n}.redb"))).unwrap())
    }

    async fn compact(&self, store: &Arc<dyn MetadataStore>) {
        // More changes than are kept.
        for half in 0..2 {
            let name = |i| format!("forget/{half}/{i}");
            let all = (0..4096).map(|i| put(&name(i), Precondition::Absent, "")).collect();
            store.commit(all).await.unwrap();
        }
    }
}

#[tokio::test]
async fn the_embedded_store_conforms() {
    run_conformance_suite(&EmbeddedBackend(tempfile::tempdir().unwrap(), AtomicUsize::new(0)))
        .await;
}

/// The store in memory, whose calls take some time; the latest is kept for
/// [`StoreBackend::compact`].
#[derive(Default)]
struct MemoryBackend {
    latest: std::sync::Mutex<MemoryStore>,
}

impl StoreBackend for MemoryBackend {
    async fn empty_store(&self) -> Arc<dyn MetadataStore> {
        let model = MemoryStore::default();
        *self.latest.lock().unwrap() = model.clone();
        let mut n = 0;
        let slow = move |call| {
            n += 1;
            let ms = |ms| Some(Duration::from_millis(ms));
            match call {
                // Deliveries fail now and then, which no watcher may notice.
                CallKind::Watch if n % 3 == 0 => CallDelivery::Refused,
                _ => CallDelivery::Sent { request_delay: ms(n % 7), response_delay: ms(n % 5) },
            }
        };
        Arc::new(model.client(Duration::from_secs(1), Box::new(slow)))
    }

    async fn compact(&self, _: &Arc<dyn MetadataStore>) {
        self.latest.lock().unwrap().compact();
    }
}

#[tokio::test(start_paused = true)]
async fn the_store_in_memory_conforms() {
    run_conformance_suite(&MemoryBackend::default()).await;
}

/// Refuses, delays and loses calls as `seed` determines; some commits arrive long after their
/// caller gave up.
fn random_faults(mut seed: u64) -> FaultInjector {
    let mut roll = move |sides: u64| {
        // Xorshift.
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % sides
    };
    Box::new(move |_| {
        let there = match roll(10) {
            0 => return CallDelivery::Refused,
            1 => None,
            2 => Some(roll(5000)),
            _ => Some(roll(20)),
        };
        let back = if roll(8) == 0 { None } else { Some(roll(20)) };
        CallDelivery::Sent {
            request_delay: there.map(Duration::from_millis),
            response_delay: back.map(Duration::from_millis),
        }
    })
}

/// Four writers, each with its own connection; returns how many commits were indeterminate and when
/// all were done.
async fn counts_exactly(seed: u64) -> (u64, Duration) {
    const EACH: u64 = 20;
    let (model, begun) = (MemoryStore::default(), Instant::now());
    let timeout = Duration::from_secs(1);
    let well = model.client(timeout, Box::new(|_| CallDelivery::IMMEDIATE));
    let begin = well.commit(vec![put("n", Precondition::Absent, "0")]).await.unwrap();
    let mut watch = model.client(timeout, random_faults(seed + 9)).watch("n", begin);
    let mut writers = JoinSet::new();
    for writer in 1..=4 {
        let store = model.client(timeout, random_faults(seed + writer));
        writers.spawn(async move {
            let mut doubts = 0;
            for round in 0..EACH {
                doubts += increment_once(&store, &format!("{writer} {round}")).await;
            }
            doubts
        });
    }
    let mut last = begin;
    for _ in 0..4 * EACH {
        let event = watch.next_event().await.unwrap();
        assert!(event.revision > last, "{event:?} after {last}");
        last = event.revision;
    }
    let doubts = writers.join_all().await.into_iter().sum();
    let took = begun.elapsed();
    // What is still in flight arrives, and changes nothing.
    sleep(Duration::from_secs(10)).await;
    let counter = well.get("n").await.unwrap().unwrap();
    assert_eq!((counter.value, counter.revision), ((4 * EACH).to_string().into_bytes(), last));
    (doubts, took)
}

#[tokio::test(start_paused = true)]
async fn what_comes_late_in_memory_counts_once_and_the_same_each_time() {
    for seed in 1..20 {
        let first = counts_exactly(seed).await;
        assert!(first.0 > 0, "nothing was in doubt");
        assert_eq!(counts_exactly(seed).await, first);
    }
}

struct EtcdBackend {
    cluster: EtcdCluster,
    used: AtomicUsize,
}

impl EtcdBackend {
    fn store(&self, prefix: String) -> EtcdStore {
        EtcdStore::new(&EtcdSettings { prefix, ..self.cluster.settings() }).unwrap()
    }
}

impl StoreBackend for EtcdBackend {
    async fn empty_store(&self) -> Arc<dyn MetadataStore> {
        let n = self.used.fetch_add(1, Ordering::Relaxed);
        Arc::new(self.store(format!("{n}/")))
    }

    async fn compact(&self, store: &Arc<dyn MetadataStore>) {
        let (_, now) = store.list("").await.unwrap();
        self.store(String::new()).compact(now).await.unwrap();
    }
}

#[tokio::test]
async fn etcd_conforms() {
    let Some(cluster) = EtcdCluster::start(1).await else { return };
    run_conformance_suite(&EtcdBackend { cluster, used: AtomicUsize::new(0) }).await;
}

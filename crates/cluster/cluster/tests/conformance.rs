//! Every back end of the metadata store passes one suite.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::Cluster;
use cluster::meta::embedded::Embedded;
use cluster::meta::etcd::{Etcd, Settings};
use cluster::meta::model::{Call, Fate, Faults, Model};
use cluster::meta::{Expect, Meta};
use cluster::testing::{Subject, conform, count_once, put};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

struct InFile(tempfile::TempDir, AtomicUsize);

impl Subject for InFile {
    async fn fresh(&self) -> Arc<dyn Meta> {
        let n = self.1.fetch_add(1, Ordering::Relaxed);
        Arc::new(Embedded::open(&self.0.path().join(format!("{n}.redb"))).unwrap())
    }

    async fn forget(&self, store: &Arc<dyn Meta>) {
        // More changes than are kept.
        for half in 0..2 {
            let name = |i| format!("forget/{half}/{i}");
            let all = (0..4096).map(|i| put(&name(i), Expect::Absent, "")).collect();
            store.commit(all).await.unwrap();
        }
    }
}

#[tokio::test]
async fn the_embedded_store_conforms() {
    conform(&InFile(tempfile::tempdir().unwrap(), AtomicUsize::new(0))).await;
}

/// The store in memory, whose calls take some time; the latest is kept for [`Subject::forget`].
#[derive(Default)]
struct InMemory {
    latest: std::sync::Mutex<Model>,
}

impl Subject for InMemory {
    async fn fresh(&self) -> Arc<dyn Meta> {
        let model = Model::default();
        *self.latest.lock().unwrap() = model.clone();
        let mut n = 0;
        let slow = move |call| {
            n += 1;
            let ms = |ms| Some(Duration::from_millis(ms));
            match call {
                // Deliveries fail now and then, which no follower may notice.
                Call::Follow if n % 3 == 0 => Fate::Refused,
                _ => Fate::Sent { there: ms(n % 7), back: ms(n % 5) },
            }
        };
        Arc::new(model.client(Duration::from_secs(1), Box::new(slow)))
    }

    async fn forget(&self, _: &Arc<dyn Meta>) {
        self.latest.lock().unwrap().compact();
    }
}

#[tokio::test(start_paused = true)]
async fn the_store_in_memory_conforms() {
    conform(&InMemory::default()).await;
}

/// Refuses, delays and loses calls as `seed` has it; some commits come long after they were given up.
fn unlucky(mut seed: u64) -> Faults {
    let mut roll = move |sides: u64| {
        // Xorshift.
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % sides
    };
    Box::new(move |_| {
        let there = match roll(10) {
            0 => return Fate::Refused,
            1 => None,
            2 => Some(roll(5000)),
            _ => Some(roll(20)),
        };
        let back = if roll(8) == 0 { None } else { Some(roll(20)) };
        Fate::Sent {
            there: there.map(Duration::from_millis),
            back: back.map(Duration::from_millis),
        }
    })
}

/// Four writers, each with a connection of its own; gives how many commits were in doubt and when
/// all were done.
async fn counts_exactly(seed: u64) -> (u64, Duration) {
    const EACH: u64 = 20;
    let (model, begun) = (Model::default(), Instant::now());
    let timeout = Duration::from_secs(1);
    let well = model.client(timeout, Box::new(|_| Fate::WELL));
    let begin = well.commit(vec![put("n", Expect::Absent, "0")]).await.unwrap();
    let mut watch = model.client(timeout, unlucky(seed + 9)).watch("n", begin);
    let mut writers = JoinSet::new();
    for writer in 1..=4 {
        let store = model.client(timeout, unlucky(seed + writer));
        writers.spawn(async move {
            let mut doubts = 0;
            for turn in 0..EACH {
                doubts += count_once(&store, &format!("{writer} {turn}")).await;
            }
            doubts
        });
    }
    let mut last = begin;
    for _ in 0..4 * EACH {
        let event = watch.next().await.unwrap();
        assert!(event.revision > last, "{event:?} after {last}");
        last = event.revision;
    }
    let doubts = writers.join_all().await.into_iter().sum();
    let took = begun.elapsed();
    // Whatever is still on its way arrives, and changes nothing.
    sleep(Duration::from_secs(10)).await;
    let held = well.get("n").await.unwrap().unwrap();
    assert_eq!((held.value, held.revision), ((4 * EACH).to_string().into_bytes(), last));
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

struct InEtcd {
    cluster: Cluster,
    used: AtomicUsize,
}

impl InEtcd {
    fn store(&self, prefix: String) -> Etcd {
        Etcd::new(&Settings { prefix, ..self.cluster.settings() }).unwrap()
    }
}

impl Subject for InEtcd {
    async fn fresh(&self) -> Arc<dyn Meta> {
        let n = self.used.fetch_add(1, Ordering::Relaxed);
        Arc::new(self.store(format!("{n}/")))
    }

    async fn forget(&self, store: &Arc<dyn Meta>) {
        let (_, now) = store.list("").await.unwrap();
        self.store(String::new()).compact(now).await.unwrap();
    }
}

#[tokio::test]
async fn etcd_conforms() {
    let Some(cluster) = Cluster::start(1).await else { return };
    conform(&InEtcd { cluster, used: AtomicUsize::new(0) }).await;
}

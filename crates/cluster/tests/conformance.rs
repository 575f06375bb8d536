//! Every back end of the metadata store passes one suite.

#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps nothing")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cluster::meta::Meta;
use cluster::meta::embedded::Embedded;
use cluster::meta::etcd::{Etcd, Settings};
use cluster::meta::model::{Call, Fate, Model};
use cluster::testing::{Subject, conform, put};
use common::Cluster;

struct InFile(tempfile::TempDir, AtomicUsize);

impl Subject for InFile {
    async fn fresh(&self) -> Arc<dyn Meta> {
        let n = self.1.fetch_add(1, Ordering::Relaxed);
        Arc::new(Embedded::open(&self.0.path().join(format!("{n}.redb"))).unwrap())
    }

    async fn forget(&self, store: &Arc<dyn Meta>) {
        use cluster::meta::Expect;
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

/// The store in memory, whose calls take some time; `stores` keeps them for [`Subject::forget`].
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

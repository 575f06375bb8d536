//! A real etcd cluster on the loopback, for as long as a test runs.
//!
//! Where no `etcd` is installed the test says so and passes; `./run test` installs it, and counts
//! such a test as skipped.
#![allow(dead_code, reason = "every test uses its part")]

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU16;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cluster::etcd_member::{EtcdMemberConfig, InitialClusterState};
use cluster::store::etcd::{EtcdSettings, EtcdStore};
use cluster::store::{MetadataStore, Precondition, Revision, StoreError};
use cluster::testing::put;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep};

/// How long a cluster may take to serve, or to complete what a test asks of it; the machine may be
/// busy, and its disk slow.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Clusters run one after the other: a member that lacks CPU time loses its leader.
static ALONE: Mutex<()> = Mutex::const_new(());

/// First port tried, below the system's ephemeral ports: a restarted member finds its own port
/// free.
static NEXT_PORT: AtomicU16 = AtomicU16::new(0);

/// The installed `etcd`, if there is one.
pub(crate) fn etcd() -> Option<PathBuf> {
    let found = testkit::find_program("etcd");
    if found.is_none() {
        testkit::skipped("etcd is not installed (Debian: etcd-server)");
    }
    found
}

/// A free address, outside the ephemeral ports.
pub(crate) fn free_address() -> String {
    // Each process starts at an offset of its own.
    let own = (std::process::id() % 100) as u16 * 100;
    loop {
        let at = format!("127.0.0.1:{}", 20_000 + (own + NEXT_PORT.fetch_add(1, Relaxed)) % 10_000);
        #[allow(clippy::disallowed_methods, reason = "a test with real processes")]
        if TcpListener::bind(&at).is_ok() {
            return at;
        }
    }
}

/// Configurations of `count` members. An election takes them a second.
pub(crate) fn members(count: usize, dir: &std::path::Path) -> Vec<EtcdMemberConfig> {
    let peers: Vec<_> =
        (0..count).map(|i| (format!("m{i}"), format!("http://{}", free_address()))).collect();
    let member = |(name, peer_url): &(String, String)| EtcdMemberConfig {
        name: name.clone(),
        data_dir: dir.join(name),
        peer_url: peer_url.clone(),
        client_url: format!("http://{}", free_address()),
        initial_cluster: peers.clone(),
        initial_cluster_token: "test".into(),
        initial_cluster_state: InitialClusterState::New,
        tls: None,
        heartbeat_interval: Duration::from_millis(100),
    };
    peers.iter().map(member).collect()
}

/// Running members. Dropping this ends them.
pub(crate) struct EtcdCluster {
    pub dir: tempfile::TempDir,
    pub members: Vec<EtcdMemberConfig>,
    program: PathBuf,
    processes: Vec<Option<Child>>,
    _alone: MutexGuard<'static, ()>,
}

impl EtcdCluster {
    /// Starts a cluster and waits until it serves; `None` without an etcd.
    pub(crate) async fn start(count: usize) -> Option<Self> {
        let program = etcd()?;
        let alone = ALONE.lock().await;
        let dir = tempfile::tempdir().unwrap();
        let members = members(count, dir.path());
        let mut cluster = Self { dir, members, program, processes: Vec::new(), _alone: alone };
        cluster.processes.resize_with(count, || None);
        (0..count).for_each(|at| cluster.revive(at));
        let store = cluster.store();
        serves(&store).await;
        Some(cluster)
    }

    pub(crate) fn settings(&self) -> EtcdSettings {
        let endpoints = self.members.iter().map(|m| m.client_url.clone()).collect();
        EtcdSettings { endpoints, ..EtcdSettings::default() }
    }

    pub(crate) fn store(&self) -> EtcdStore {
        EtcdStore::new(&self.settings()).unwrap()
    }

    /// Kills a member as a power loss would.
    pub(crate) fn kill(&mut self, at: usize) {
        if let Some(mut process) = self.processes[at].take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Starts a member that was killed.
    pub(crate) fn revive(&mut self, at: usize) {
        let process = Command::new(&self.program)
            .args(self.members[at].arguments())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.processes[at] = Some(process);
    }

    /// Which member leads now.
    pub(crate) async fn leader(&self) -> usize {
        let begun = Instant::now();
        loop {
            for (at, member) in self.members.iter().enumerate() {
                let endpoints = vec![member.client_url.clone()];
                let one =
                    EtcdStore::new(&EtcdSettings { endpoints, ..EtcdSettings::default() }).unwrap();
                if let Ok(status) = one.member_status().await
                    && status.leader == Some(status.id)
                {
                    return at;
                }
            }
            assert!(begun.elapsed() < TEST_TIMEOUT, "there is no leader");
            sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for EtcdCluster {
    fn drop(&mut self) {
        (0..self.processes.len()).for_each(|at| self.kill(at));
    }
}

/// Waits until `store` answers.
pub(crate) async fn serves(store: &EtcdStore) {
    retry_unreachable(async || store.get("nothing").await).await;
}

/// Retries until the store answers: a busy machine has elections of its own.
pub(crate) async fn retry_unreachable<T>(call: impl AsyncFn() -> Result<T, StoreError>) -> T {
    let begun = Instant::now();
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(StoreError::Unreachable { .. }) if begun.elapsed() < TEST_TIMEOUT => {}
            Err(error) => panic!("the store does not serve: {error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Puts a new key; returns its revision.
pub(crate) async fn put_key(store: &EtcdStore, key: &str, value: &str) -> Revision {
    loop {
        match store.commit(vec![put(key, Precondition::Absent, value)]).await {
            Ok(revision) => return revision,
            Err(StoreError::Unreachable { .. } | StoreError::Indeterminate { .. }) => {
                serves(store).await;
            }
            // An indeterminate attempt took effect.
            Err(StoreError::Conflict { .. }) => {
                return retry_unreachable(async || store.get(key).await).await.unwrap().revision;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

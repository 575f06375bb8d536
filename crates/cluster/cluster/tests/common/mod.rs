//! A real etcd cluster on the loopback, for as long as a test runs.
//!
//! Where no `etcd` is installed the test says so and passes; `./run test` installs it, and counts
//! a test that has said so as skipped.
#![allow(dead_code, reason = "every test uses its part")]

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU16;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cluster::member::{Member, Origin};
use cluster::meta::etcd::{Etcd, Settings};
use cluster::meta::{Expect, Meta, MetaError, Revision};
use cluster::testing::put;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep};

/// How long a cluster may take to serve, or to work off what a test asks of it; the machine may be
/// busy, and its disk slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Clusters run one after the other: members that wait for a core lose their leader to it.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Ports that are tried are from here, below those that the system gives to outgoing connections: a
/// member that was killed finds its own free when it comes back.
static NEXT_PORT: AtomicU16 = AtomicU16::new(0);

/// Says that this test could not test: in the file that `./run test` looks at, or to whoever watches.
fn skipped(why: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let Some(file) = std::env::var_os("WINDROSE_SKIPPED_TESTS") else {
        return println!("skipped: {test}: {why}");
    };
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    std::io::Write::write_all(&mut file, format!("{test}: {why}\n").as_bytes()).unwrap();
}

/// The installed `etcd`, if there is one.
pub(crate) fn etcd() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|dir| dir.join("etcd")).find(|p| p.is_file());
    if found.is_none() {
        skipped("etcd is not installed (Debian: etcd-server)");
    }
    found
}

/// An address that nobody listens at now, and that no outgoing connection takes.
pub(crate) fn free() -> String {
    // Processes begin at places of their own.
    let own = (std::process::id() % 100) as u16 * 100;
    loop {
        let at = format!("127.0.0.1:{}", 20_000 + (own + NEXT_PORT.fetch_add(1, Relaxed)) % 10_000);
        #[allow(clippy::disallowed_methods, reason = "a test with real processes")]
        if TcpListener::bind(&at).is_ok() {
            return at;
        }
    }
}

/// `count` members in the making. An election takes them a second.
pub(crate) fn members(count: usize, dir: &std::path::Path) -> Vec<Member> {
    let peers: Vec<_> =
        (0..count).map(|i| (format!("m{i}"), format!("http://{}", free()))).collect();
    let member = |(name, peer_url): &(String, String)| Member {
        name: name.clone(),
        data_dir: dir.join(name),
        peer_url: peer_url.clone(),
        client_url: format!("http://{}", free()),
        cluster: peers.clone(),
        token: "test".into(),
        origin: Origin::New,
        tls: None,
        heartbeat: Duration::from_millis(100),
    };
    peers.iter().map(member).collect()
}

/// Running members. They end with this.
pub(crate) struct Cluster {
    pub dir: tempfile::TempDir,
    pub members: Vec<Member>,
    program: PathBuf,
    processes: Vec<Option<Child>>,
    _alone: MutexGuard<'static, ()>,
}

impl Cluster {
    /// A cluster that serves; `None` without an etcd.
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

    pub(crate) fn settings(&self) -> Settings {
        let endpoints = self.members.iter().map(|m| m.client_url.clone()).collect();
        Settings { endpoints, ..Settings::default() }
    }

    pub(crate) fn store(&self) -> Etcd {
        Etcd::new(&self.settings()).unwrap()
    }

    /// Kills a member as power loss would.
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
                let one = Etcd::new(&Settings { endpoints, ..Settings::default() }).unwrap();
                if let Ok(status) = one.member_status().await
                    && status.leader == Some(status.id)
                {
                    return at;
                }
            }
            assert!(begun.elapsed() < PATIENCE, "nobody leads");
            sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        (0..self.processes.len()).for_each(|at| self.kill(at));
    }
}

/// Waits until `store` answers.
pub(crate) async fn serves(store: &Etcd) {
    answered(async || store.get("nothing").await).await;
}

/// Asks until somebody answers: a busy machine has elections of its own.
pub(crate) async fn answered<T>(ask: impl AsyncFn() -> Result<T, MetaError>) -> T {
    let begun = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(MetaError::Unreachable { .. }) if begun.elapsed() < PATIENCE => {}
            Err(error) => panic!("the store does not serve: {error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Puts what nobody has put; which revision that has.
pub(crate) async fn laid(store: &Etcd, key: &str, value: &str) -> Revision {
    loop {
        match store.commit(vec![put(key, Expect::Absent, value)]).await {
            Ok(revision) => return revision,
            Err(MetaError::Unreachable { .. } | MetaError::Unknown { .. }) => serves(store).await,
            // What was in doubt was done.
            Err(MetaError::Changed { .. }) => {
                return answered(async || store.get(key).await).await.unwrap().revision;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

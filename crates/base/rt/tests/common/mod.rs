//! Shared by the tests of real cores.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod supervise;
pub mod system;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rt::buf::{Account, Bufs, BufsMut, MemoryClass};
use rt::{Core, Cores, CoresConfig, DiskEngine};

pub const KIB: usize = 1024;
pub const MIB: usize = 1024 * KIB;

pub fn config(cores: usize) -> CoresConfig {
    CoresConfig { cpus: vec![None; cores], memory_bytes_per_core: 32 * MIB, ..Default::default() }
}

/// Waits for `future` on an ordinary thread.
pub fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Runs `f` on a core of its own, whose disks are served by `engine`.
pub fn on_core<Fut: Future<Output = ()> + 'static>(
    engine: DiskEngine,
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    let cores = Cores::start(&CoresConfig { disk_engine: engine, ..config(1) }).unwrap();
    let result = wait(cores.handles()[0].run(f));
    cores.stop_now();
    result.expect("the test's core panicked, see above");
}

/// A directory that goes with the value.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new(parent: impl AsRef<Path>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("rt-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = parent.as_ref().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// On the disk that holds the build.
    pub fn on_disk() -> Self {
        Self::new(env!("CARGO_TARGET_TMPDIR"))
    }

    /// In memory.
    pub fn in_memory() -> Self {
        Self::new("/dev/shm")
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Buffers of `bytes` bytes out of a credit of their own.
pub async fn buffers(account: &Account, bytes: usize) -> BufsMut {
    account.credit(bytes, MemoryClass::LocalIo).await.unwrap().alloc(bytes)
}

/// Bytes that differ from block to block and from `seed` to `seed`.
pub async fn pattern(account: &Account, seed: u64, bytes: usize) -> Bufs {
    let mut bufs = buffers(account, bytes).await;
    fill(&mut bufs, seed);
    bufs.into()
}

pub fn fill(bufs: &mut BufsMut, seed: u64) {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in bufs.iter_mut().flat_map(|b| b.as_chunks_mut::<8>().0) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *word = x.to_le_bytes();
    }
}

pub fn is_root() -> bool {
    std::fs::read_to_string("/proc/self/status")
        .unwrap()
        .lines()
        .any(|l| l.starts_with("Uid:") && l.split_whitespace().nth(2) == Some("0"))
}

/// Processor time that the threads of this process called `core-…` have used.
pub fn cores_cpu() -> std::time::Duration {
    let used = |text: &str| text.split_whitespace().next()?.parse().ok();
    std::time::Duration::from_nanos(of_cores("schedstat", used))
}

/// How often the threads called `core-…` have gone to sleep.
pub fn cores_sleeps() -> u64 {
    let sleeps = |text: &str| {
        text.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse().ok()
    };
    of_cores("status", sleeps)
}

/// The sum of the values in the `/proc` files of this name of the threads called `core-…`.
fn of_cores(file: &str, number: impl Fn(&str) -> Option<u64>) -> u64 {
    let of = |task: std::io::Result<std::fs::DirEntry>| {
        let task = task.ok()?.path();
        let name = std::fs::read_to_string(task.join("comm")).ok()?;
        let text = std::fs::read_to_string(task.join(file)).ok()?;
        name.starts_with("core-").then(|| number(&text))?
    };
    std::fs::read_dir("/proc/self/task").unwrap().filter_map(of).sum()
}

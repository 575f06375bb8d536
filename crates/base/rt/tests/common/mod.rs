//! Shared by the tests of real cores.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod supervise;

use rt::buf::{Account, Bufs, BufsMut, MemoryClass};
use rt::{Core, CoresConfig, DiskEngine};

pub const KIB: usize = 1024;
pub const MIB: usize = 1024 * KIB;

pub fn config(cores: usize) -> CoresConfig {
    testkit::cores_config(cores, 32 * MIB)
}

/// Runs `f` on a core of its own, whose disks are served by `engine`.
pub fn on_core<Fut: Future<Output = ()> + 'static>(
    engine: DiskEngine,
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    testkit::on_first_core(&CoresConfig { disk_engine: engine, ..config(1) }, f);
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

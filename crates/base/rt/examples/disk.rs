//! Random 4 KiB reads or writes on one core: throughput and cost of a disk.
//!
//! `disk PATH read|write DEPTH SECONDS [uring|pool|auto] [POLL_WINDOW_US] [CPU] [at_once]`
//!
//! PATH is a file or block device of at least 1 MiB; `write` overwrites it.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use rt::buf::MemoryClass;
use rt::disk::{Disk, OpenOptions};
use rt::memory::PAGE;
use rt::{Core, Cores, CoresConfig, DiskEngine, SubmissionMode};
use tokio::time::Instant;

struct Load {
    path: PathBuf,
    write: bool,
    depth: usize,
    time: Duration,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, direction, depth, seconds, rest @ ..] = &args[..] else {
        eprintln!(
            "usage: disk PATH read|write DEPTH SECONDS [uring|pool|auto] [WINDOW_US] [CPU] [at_once]"
        );
        std::process::exit(2);
    };
    let load = Load {
        path: path.into(),
        write: direction == "write",
        depth: depth.parse().unwrap(),
        time: Duration::from_secs_f64(seconds.parse().unwrap()),
    };
    let disk_engine = match rest.first().map_or("auto", String::as_str) {
        "uring" => DiskEngine::IoUring,
        "pool" => DiskEngine::Threads,
        _ => DiskEngine::Auto,
    };
    let window = rest.get(1).map_or(0, |s| s.parse().unwrap());
    let config = CoresConfig {
        cpus: vec![rest.get(2).map(|s| s.parse().unwrap())],
        poll_window: Duration::from_micros(window),
        disk_engine,
        submission: match rest.get(3).map(String::as_str) {
            Some("at_once") => SubmissionMode::Immediate,
            _ => SubmissionMode::Batched,
        },
        ..Default::default()
    };
    let cores = Cores::start(&config).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(cores.handles()[0].run(|core| measure(core, load))).unwrap();
    cores.stop_now();
}

async fn measure(core: Core, load: Load) {
    let disk = core.open_disk(&load.path, OpenOptions::new()).await.unwrap();
    let pages = disk.info().size / PAGE as u64;
    let done = Rc::new(Cell::new(0u64));
    let end = Instant::now() + load.time;
    let (begun, cpu) = (Instant::now(), cpu_time());
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..load.depth {
        let work = worker(core.clone(), disk.clone(), load.write, pages, end, Rc::clone(&done));
        tasks.spawn_local(work);
    }
    while tasks.join_next().await.is_some() {}
    let (time, cpu) = (begun.elapsed(), cpu_time() - cpu);
    let count = done.get() as f64;
    println!(
        "{:?} depth {}: {:.0} per second, {:.2} us latency, {:.2} us CPU each",
        disk.engine(),
        load.depth,
        count / time.as_secs_f64(),
        time.as_secs_f64() * 1e6 * load.depth as f64 / count,
        cpu.as_secs_f64() * 1e6 / count,
    );
}

async fn worker(
    core: Core,
    disk: Disk,
    write: bool,
    pages: u64,
    end: Instant,
    done: Rc<Cell<u64>>,
) {
    let account = core.buffer_pool().account();
    let credit = account.credit(PAGE, MemoryClass::LocalIo).await.unwrap();
    let mut buffer = credit.alloc(PAGE);
    let mut x = core.random_u64() | 1;
    while Instant::now() < end {
        for _ in 0..16 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let at = x % pages * PAGE as u64;
            if write {
                let data = buffer.pop().unwrap().freeze();
                disk.write(at, data.clone().into()).await.unwrap();
                buffer.push(data.try_into_mut().unwrap());
            } else {
                buffer = disk.read(at, buffer).await.unwrap();
            }
            done.set(done.get() + 1);
        }
    }
}

/// Processor time of the process, all its threads.
fn cpu_time() -> Duration {
    let schedstat = |task: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    };
    Duration::from_nanos(std::fs::read_dir("/proc/self/task").unwrap().filter_map(schedstat).sum())
}

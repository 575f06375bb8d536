//! The bare echo: 72 bytes asked, 4 KiB answered, or the other way round, over TCP and nothing
//! else. What this machine's network costs a storage protocol before the storage: the limit that
//! benchmarks compare with.
//!
//! ```text
//! echo [connections=1] [depth=1] [seconds=2] [window_us=100] [client_window_us=0]
//!      [server_cpu=0] [client_cpu=1] [request=72] [reply=4096] [memory_kib=0] [serve=ADDR | to=ADDR]
//! ```
//! By default all requests and replies use one buffer each, which stays in a processor's innermost
//! caches; with `memory_kib` they use random parts of so much memory per connection, and cycle
//! through it, as those of a volume do.
//!
//! `serve` and `to` run only the server or only the client, in processes of their own. The
//! server's processor time is that of its core's thread.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use rt::net::{Listener, Stream};
use rt::{Core, CoreHandle, Cores, CoresConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

/// What is asked and answered, in bytes.
#[derive(Clone, Copy)]
struct Sizes {
    /// By default, a protocol header with its extended command.
    request: usize,
    reply: usize,
    /// Of each connection of the server.
    memory: usize,
}

/// Where replies come from and requests go to.
struct Places {
    memory: Vec<u8>,
    reply: usize,
    /// How many replies lie there.
    replies: u64,
    /// Where the next request goes.
    at: usize,
    dice: u64,
}

impl Places {
    const READ: usize = 64 << 10;

    fn new(sizes: Sizes) -> Self {
        let memory = vec![7; sizes.memory.max(sizes.reply).max(Self::READ)];
        let replies = (sizes.memory / sizes.reply).max(1) as u64;
        Self { memory, reply: sizes.reply, replies, at: 0, dice: 1 }
    }

    fn for_requests(&mut self) -> &mut [u8] {
        let at = std::mem::replace(&mut self.at, 0);
        if at + 2 * Self::READ <= self.memory.len() {
            self.at = at + Self::READ;
        }
        &mut self.memory[at..at + Self::READ]
    }

    /// Where the next reply lies.
    fn roll(&mut self) -> usize {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        usize::try_from(self.dice % self.replies).unwrap() * self.reply
    }
}
/// Most replies sent with one call.
const BATCH: usize = 64;

struct Settings(HashMap<String, String>);

impl Settings {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn number(&self, name: &str, default: u64) -> u64 {
        self.get(name).map_or(default, |s| s.parse().unwrap())
    }

    fn sizes(&self) -> Sizes {
        let bytes = |name, default| usize::try_from(self.number(name, default)).unwrap();
        let memory = bytes("memory_kib", 0) << 10;
        Sizes { request: bytes("request", 72), reply: bytes("reply", 4096), memory }
    }
}

fn main() {
    let settings = Settings(
        std::env::args()
            .skip(1)
            .map(|a| a.split_once('=').map(|(k, v)| (k.into(), v.into())).expect("NAME=VALUE"))
            .collect(),
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match (settings.get("serve"), settings.get("to")) {
            (Some(at), _) => {
                let cores = one_core(&settings, "server_cpu", 0, "window_us", 100);
                let at = serve(&cores.handles()[0], at.parse().unwrap(), settings.sizes()).await;
                println!("serving at {at}");
                std::future::pending::<()>().await;
            }
            (_, Some(to)) => {
                let cores = one_core(&settings, "client_cpu", 1, "client_window_us", 0);
                report(&cores.handles()[0], to.parse().unwrap(), &settings, None).await;
            }
            (None, None) => {
                let server = one_core(&settings, "server_cpu", 0, "window_us", 100);
                let client = one_core(&settings, "client_cpu", 1, "client_window_us", 0);
                let at =
                    serve(&server.handles()[0], "127.0.0.1:0".parse().unwrap(), settings.sizes())
                        .await;
                report(&client.handles()[0], at, &settings, Some(&server.handles()[0])).await;
            }
        }
    });
}

fn one_core(settings: &Settings, cpu: &str, default: u64, window: &str, us: u64) -> Cores {
    let config = CoresConfig {
        cpus: vec![usize::try_from(settings.number(cpu, default)).ok()],
        memory_bytes_per_core: 1 << 20,
        poll_window: Duration::from_micros(settings.number(window, us)),
        ..Default::default()
    };
    Cores::start(&config).unwrap()
}

/// Starts the server on `core`; gives its address.
async fn serve(core: &CoreHandle, at: SocketAddr, sizes: Sizes) -> SocketAddr {
    let listening = core.run(move |core| async move {
        let listener = core.listen(at).await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::task::spawn_local(accept(listener, sizes));
        at
    });
    listening.await.unwrap()
}

async fn accept(listener: Listener, sizes: Sizes) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::task::spawn_local(answer(stream, sizes));
    }
}

/// Answers requests until the client goes.
async fn answer(mut stream: Stream, sizes: Sizes) -> std::io::Result<()> {
    let Sizes { request, reply, .. } = sizes;
    let mut places = Places::new(sizes);
    let mut held = 0;
    loop {
        let n = stream.read(places.for_requests()).await?;
        if n == 0 {
            return Ok(());
        }
        held += n;
        let mut left = held / request * reply;
        held %= request;
        while left > 0 {
            let first = (left - 1) % reply + 1;
            let whole = (left - first) / reply;
            let at: Vec<_> = (0..=whole.min(BATCH - 1)).map(|_| places.roll()).collect();
            let mut parts: Vec<_> =
                at.iter().map(|&at| IoSlice::new(&places.memory[at..at + reply])).collect();
            parts[0] = IoSlice::new(&places.memory[at[0] + reply - first..at[0] + reply]);
            left -= stream.write_vectored(&parts).await?;
        }
    }
}

/// Runs the client on `core` and prints its results.
async fn report(
    core: &CoreHandle,
    to: SocketAddr,
    settings: &Settings,
    server: Option<&CoreHandle>,
) {
    let connections = settings.number("connections", 1);
    let depth = settings.number("depth", 1);
    let time = Duration::from_secs(settings.number("seconds", 2));
    let cpu = async || match server {
        Some(core) => core.run(|_| async { thread_cpu() }).await.unwrap(),
        None => Duration::ZERO,
    };
    let before = cpu().await;
    let sizes = settings.sizes();
    let load = core.run(move |core| ask(core, to, sizes, (connections, depth), time));
    let mut latencies = load.await.unwrap();
    let cpu = cpu().await - before;
    latencies.sort_unstable();
    let count = latencies.len();
    let at = |share: f64| f64::from(latencies[(count as f64 * share) as usize]) / 1e3;
    println!(
        "{connections} x {depth}: {:.0} per second, p50 {:.1} us, p99 {:.1} us, server CPU {:.2} us each",
        count as f64 / time.as_secs_f64(),
        at(0.5),
        at(0.99),
        cpu.as_secs_f64() * 1e6 / count as f64,
    );
}

/// Processor time of this thread.
fn thread_cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

/// Keeps `depth` requests in flight on each connection; gives every latency in nanoseconds.
async fn ask(
    core: Core,
    to: SocketAddr,
    sizes: Sizes,
    (connections, depth): (u64, u64),
    time: Duration,
) -> Vec<u32> {
    let latencies = Rc::new(RefCell::new(Vec::with_capacity(1 << 20)));
    let end = Instant::now() + time;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let stream = core.dial(to).await.unwrap();
        tasks.spawn_local(ask_one(stream, sizes, depth, end, Rc::clone(&latencies)));
    }
    while tasks.join_next().await.is_some() {}
    latencies.take()
}

async fn ask_one(
    mut stream: Stream,
    sizes: Sizes,
    depth: u64,
    end: Instant,
    out: Rc<RefCell<Vec<u32>>>,
) {
    let Sizes { request, reply, .. } = sizes;
    let requests = vec![1u8; request * usize::try_from(depth).unwrap()];
    let mut received = vec![0; 256 << 10];
    let mut asked = VecDeque::new();
    let (mut held, mut due) = (0, requests.len() / request);
    loop {
        if due > 0 {
            let now = Instant::now();
            stream.write_all(&requests[..due * request]).await.unwrap();
            asked.extend(std::iter::repeat_n(now, due));
        }
        held += stream.read(&mut received).await.unwrap();
        let now = Instant::now();
        due = held / reply;
        held %= reply;
        let mut out = out.borrow_mut();
        for _ in 0..due {
            let asked = asked.pop_front().expect("one reply to a request");
            out.push(u32::try_from((now - asked).as_nanos()).unwrap_or(u32::MAX));
        }
        if now > end {
            return;
        }
    }
}

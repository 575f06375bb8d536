//! Round trips between two cores through their mailboxes: `mailbox [DEPTH=32] [SECONDS=1]
//! [WINDOW_US=0]`.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use rt::{Cores, CoresConfig};
use tokio::time::Instant;

fn main() {
    let args: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let arg = |i: usize, default| args.get(i).copied().unwrap_or(default);
    let (depth, time) = (arg(0, 32), Duration::from_secs(arg(1, 1)));
    let config = CoresConfig {
        cpus: vec![Some(0), Some(1)],
        memory_bytes_per_core: 1 << 20,
        poll_window: Duration::from_micros(arg(2, 0)),
        ..Default::default()
    };
    let cores = Cores::start(&config).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let count = runtime.block_on(cores.handles()[0].run(move |core| async move {
        let end = Instant::now() + time;
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..depth {
            let peer = core.peers()[1].clone();
            tasks.spawn_local(async move {
                let mut count = 0u64;
                while Instant::now() < end {
                    peer.run(|_| async {}).await.unwrap();
                    count += 1;
                }
                count
            });
        }
        tasks.join_all().await.into_iter().sum::<u64>()
    }));
    let each = time.as_secs_f64() * 1e6 / count.unwrap() as f64;
    println!("depth {depth}: {each:.2} us per round trip, {:.2} us latency", each * depth as f64);
    cores.stop_now();
}

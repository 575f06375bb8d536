//! A device that its process has left in haste.
#![allow(clippy::unwrap_used, missing_docs)]

use std::time::Duration;

use attach::WriteDelay;
use block::testing::TestClient;
use block::testing::faulty::{Effect, Faulty, Rule};
use block::{BufferPool, Dev, Error, Mem, MemOptions};
use tokio::task::LocalSet;
use tokio::time::Instant;

const S: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn only_changes_are_delayed() {
    let run = async {
        let begun = Instant::now();
        let dev =
            Dev::new(WriteDelay::new(Dev::new(Mem::new(MemOptions::new(512, 64))), begun + 8 * S));
        let client = TestClient::new(&dev, &BufferPool::new(1 << 20).unwrap());
        client.read(0, 8).await.unwrap();
        client.flush().await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO);
        client.write(0, &[1; 512], false).await.unwrap();
        assert!(begun.elapsed() >= 8 * S && begun.elapsed() < 9 * S);
        client.write(1, &[2; 512], false).await.unwrap();
        assert!(begun.elapsed() < 9 * S);
        assert_eq!(client.read(0, 2).await.unwrap().to_vec(), [[1; 512], [2; 512]].concat());
    };
    LocalSet::new().run_until(run).await;
}

/// A process that ends because the device is gone removes the trace of its predecessor, and its
/// successor waits for nothing.
#[tokio::test(start_paused = true)]
async fn completion_is_not_reported_early() {
    let run = async {
        let begun = Instant::now();
        let (gone, faults) = Faulty::wrap(Dev::new(Mem::new(MemOptions::new(512, 64))), 1);
        faults.add(Rule::new(Effect::Fail(Error::Gone)));
        let dev = Dev::new(WriteDelay::new(gone, begun + 8 * S));
        let client = TestClient::new(&dev, &BufferPool::new(1 << 20).unwrap());
        assert_eq!(client.read(0, 8).await.map(drop), Err(Error::Gone));
        assert!(begun.elapsed() >= 8 * S && begun.elapsed() < 9 * S);
    };
    LocalSet::new().run_until(run).await;
}

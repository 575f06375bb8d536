//! Keys that are there as long as somebody lives: who is up, for everybody to see.
//!
//! The key hangs on a lease of the store. While its owner renews it, it stays; when the owner is
//! silent for as long as the lease runs, the store removes it. A lease that was lost, because the
//! store was away for too long or was restored, is granted anew and the key put again.

use std::sync::Arc;
use std::time::Duration;

use http::uri::PathAndQuery;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use super::pool::{self, Asked, Failure};
use super::wire::{Empty, LeaseGrant, LeaseRequest, LeaseResponse, PutRequest, RangeRequest};
use super::{Etcd, Inner, sealed};

/// Pause before something that failed is tried again.
const PAUSE: Duration = Duration::from_millis(200);

/// A key that is kept in the store. Dropped, it goes when its lease runs out.
#[derive(Debug)]
pub struct Announced {
    task: JoinHandle<()>,
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Etcd {
    /// Keeps `key` with `value` in the store for as long as the result lives, and at most `ttl`
    /// longer. Works on it in a task of the current runtime, through any outage.
    ///
    /// # Panics
    /// Outside of a runtime.
    #[must_use]
    pub fn announce(&self, key: &str, value: &[u8], ttl: Duration) -> Announced {
        let value = sealed::seal(key, value);
        let keep = Keep { store: Arc::clone(&self.0), key: self.0.key(key), value, ttl };
        Announced { task: tokio::spawn(keep.run()) }
    }
}

struct Keep {
    store: Arc<Inner>,
    key: Vec<u8>,
    value: Vec<u8>,
    ttl: Duration,
}

impl Keep {
    async fn run(self) {
        loop {
            match self.put().await {
                Ok(lease) => self.renew(lease).await,
                Err(error) => tracing::debug!(?error, "a key cannot be announced now"),
            }
            sleep(PAUSE).await;
        }
    }

    /// A lease, and the key on it.
    async fn put(&self) -> Result<i64, Failure> {
        // Whole seconds are all that etcd knows. A lease that nobody hears of runs out by itself.
        let ttl = i64::try_from(self.ttl.as_secs().max(1)).unwrap_or(i64::MAX);
        let pool = &self.store.pool;
        let path = "/etcdserverpb.Lease/LeaseGrant";
        let granted: LeaseResponse = pool.ask(Asked::Freely, path, LeaseGrant { ttl }).await?;
        let put =
            PutRequest { key: self.key.clone(), value: self.value.clone(), lease: granted.id };
        pool.ask::<_, Empty>(Asked::Freely, "/etcdserverpb.KV/Put", put).await?;
        Ok(granted.id)
    }

    /// Whether the store says that the key is not there.
    async fn is_gone(&self) -> bool {
        let request = RangeRequest { key: self.key.clone(), keys_only: true, ..Default::default() };
        self.store.range(request).await.is_ok_and(|answer| answer.kvs.is_empty())
    }

    /// Renews the lease until the store says that there is none.
    async fn renew(&self, id: i64) {
        let mut pause = self.ttl / 3;
        loop {
            sleep(pause).await;
            let renewed = self.store.pool.try_each(Asked::Freely, |c| keep_alive(c, id)).await;
            pause = match renewed {
                // Another process of the same node may have had the key on a lease of its own that has run out.
                Ok(left_s) if left_s > 0 && self.is_gone().await => return,
                Ok(left_s) if left_s > 0 => self.ttl / 3,
                Ok(_) | Err(Failure::NotFound(_)) => return,
                Err(error) => {
                    tracing::debug!(?error, "a lease is not renewed");
                    PAUSE
                }
            };
        }
    }
}

/// A sign of life for one lease; gives the seconds it runs from now, 0 if it is over.
async fn keep_alive(channel: Channel, id: i64) -> Result<i64, Status> {
    let mut grpc = pool::grpc(channel);
    pool::ready(&mut grpc).await?;
    let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
    let codec: ProstCodec<LeaseRequest, LeaseResponse> = ProstCodec::default();
    let sign = pool::request(tokio_stream::once(LeaseRequest { id }));
    let mut answers = grpc.streaming(sign, path, codec).await?.into_inner();
    let answer = answers.message().await?;
    answer.map(|a| a.ttl).ok_or_else(|| Status::new(Code::Unavailable, "the stream ended"))
}

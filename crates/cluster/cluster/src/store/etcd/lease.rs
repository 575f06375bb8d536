//! Leased keys: present while their owner runs, for all nodes to see.
//!
//! The key is attached to an etcd lease. While its owner renews the lease the key stays; when the
//! owner is silent for the lease's duration, etcd removes the key. A lost lease (the store was away
//! for too long, or was restored) is granted anew and the key is put again.

use std::sync::Arc;
use std::time::Duration;

use http::uri::PathAndQuery;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use super::connections::{self, RetryPolicy, RpcError};
use super::rpc::{
    Empty, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseResponse, PutRequest, RangeRequest,
};
use super::{EtcdInner, EtcdStore, checksummed};

/// Pause before a failed step is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// A key kept in the store. After a drop it expires with its lease.
#[derive(Debug)]
pub struct LeasedKey {
    task: JoinHandle<()>,
}

impl Drop for LeasedKey {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl EtcdStore {
    /// Keeps `key` with `value` in the store while the result lives, and at most `ttl` longer. A
    /// task of the current runtime maintains it through any outage.
    ///
    /// # Panics
    /// Outside of a runtime.
    #[must_use]
    pub fn put_leased(&self, key: &str, value: &[u8], ttl: Duration) -> LeasedKey {
        let value = checksummed::add_checksum(key, value);
        let keep =
            LeaseKeeper { store: Arc::clone(&self.0), key: self.0.full_key(key), value, ttl };
        LeasedKey { task: tokio::spawn(keep.run()) }
    }
}

struct LeaseKeeper {
    store: Arc<EtcdInner>,
    key: Vec<u8>,
    value: Vec<u8>,
    ttl: Duration,
}

impl LeaseKeeper {
    async fn run(self) {
        loop {
            match self.grant_and_put().await {
                Ok(lease) => self.renew_until_lost(lease).await,
                Err(error) => tracing::debug!(?error, "cannot announce a key now"),
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Grants a lease, and puts the key on it; returns the lease's id.
    async fn grant_and_put(&self) -> Result<i64, RpcError> {
        // etcd counts whole seconds. A lease whose grant is not answered expires by itself.
        let ttl = i64::try_from(self.ttl.as_secs().max(1)).unwrap_or(i64::MAX);
        let pool = &self.store.connections;
        let path = "/etcdserverpb.Lease/LeaseGrant";
        let granted: LeaseResponse =
            pool.call(RetryPolicy::Idempotent, path, LeaseGrantRequest { ttl }).await?;
        let put =
            PutRequest { key: self.key.clone(), value: self.value.clone(), lease: granted.id };
        pool.call::<_, Empty>(RetryPolicy::Idempotent, "/etcdserverpb.KV/Put", put).await?;
        Ok(granted.id)
    }

    /// Whether the store certainly lacks the key.
    async fn is_gone(&self) -> bool {
        let request = RangeRequest { key: self.key.clone(), keys_only: true, ..Default::default() };
        self.store.range(request).await.is_ok_and(|answer| answer.kvs.is_empty())
    }

    /// Renews the lease until it or the key is gone.
    async fn renew_until_lost(&self, id: i64) {
        let mut pause = self.ttl / 3;
        loop {
            sleep(pause).await;
            let renewed = self
                .store
                .connections
                .try_members(RetryPolicy::Idempotent, |c| keep_alive(c, id))
                .await;
            pause = match renewed {
                // Another process of the same node may have moved the key to its own lease, which
                // has expired.
                Ok(left_s) if left_s > 0 && self.is_gone().await => return,
                Ok(left_s) if left_s > 0 => self.ttl / 3,
                Ok(_) | Err(RpcError::NotFound(_)) => return,
                Err(error) => {
                    tracing::debug!(?error, "lease not renewed");
                    RETRY_PAUSE
                }
            };
        }
    }
}

/// Sends one keep-alive; returns the seconds left, 0 if the lease has expired.
async fn keep_alive(channel: Channel, id: i64) -> Result<i64, Status> {
    let mut grpc = connections::grpc_client(channel);
    connections::ready(&mut grpc).await?;
    let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
    let codec: ProstCodec<LeaseKeepAliveRequest, LeaseResponse> = ProstCodec::default();
    let sign =
        connections::request_requiring_leader(tokio_stream::once(LeaseKeepAliveRequest { id }));
    let mut answers = grpc.streaming(sign, path, codec).await?.into_inner();
    let answer = answers.message().await?;
    answer.map(|a| a.ttl).ok_or_else(|| Status::new(Code::Unavailable, "the stream ended"))
}

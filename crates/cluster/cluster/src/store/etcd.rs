//! The metadata store of a cluster: etcd, version 3.4 or later, its own or an existing one.
//!
//! * Reads are linearizable. A list shows one revision, however long it is.
//! * A commit is one transaction and is sent once. Without an answer it is
//!   [`StoreError::Indeterminate`]; it is not retried here.
//! * A watch survives failures of connections, members and the cluster (`watch.rs`).
//! * Every attempt is bounded ([`EtcdSettings::attempt_timeout`]). A call tries each member at most
//!   once, the last responder first (`connections.rs`): a dead member costs one attempt, once.
//!
//! Keys are stored below [`EtcdSettings::prefix`], so that an etcd can be shared.

mod connections;
mod health;
mod lease;
mod members;
mod rpc;
mod watch;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use health::{MemberHealth, MemberResponse};
pub use lease::LeasedKey;
pub use members::{MemberInfo, MemberStatus};

use super::{
    Change, Entry, MetadataStore, Precondition, Revision, StoreError, StoreFuture, StoreProblem,
    Watcher, checksummed,
};
use connections::{MemberConnections, RetryPolicy, RpcError};
use rpc::{
    CompactionRequest, Compare, DeleteRangeRequest, Empty, KeyValue, PutRequest, RangeRequest,
    RangeResponse, RequestOp, RequestOpKind, TARGET_MOD, TxnRequest, TxnResponse,
};

/// Keys per list request. The longest records are a few KiB; an answer must fit in one message.
const LIST_PAGE_KEYS: i64 = 512;

/// How often a list restarts because its revision was compacted.
const LIST_ATTEMPTS: usize = 3;

/// How to reach the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSettings {
    /// Client URLs of the members, `http://HOST:PORT` or `https://HOST:PORT`.
    pub endpoints: Vec<String>,
    /// Prefix of every key.
    pub prefix: String,
    /// Certificates, for `https`.
    pub tls: Option<EtcdTls>,
    /// Longest time one member gets to answer.
    pub attempt_timeout: Duration,
    /// How long a failed member is tried last.
    pub failed_member_backoff: Duration,
}

/// TLS settings of the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// PEM file of the authority that signs the members' certificates.
    pub ca: PathBuf,
    /// PEM files of the client's certificate and key, if the members require one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl Default for EtcdSettings {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            prefix: "windrose/".into(),
            tls: None,
            attempt_timeout: Duration::from_secs(1),
            failed_member_backoff: Duration::from_secs(10),
        }
    }
}

/// The store. Cheap to clone. Its connections belong to the runtime that uses it first.
#[derive(Clone)]
pub struct EtcdStore(Arc<EtcdInner>);

struct EtcdInner {
    connections: MemberConnections,
    prefix: String,
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EtcdInner { connections: pool, prefix } = &*self.0;
        f.debug_struct("Etcd").field("endpoints", &pool.name()).field("prefix", prefix).finish()
    }
}

impl EtcdStore {
    /// Creates a client. Reads the certificate files; connects on the first call.
    ///
    /// # Errors
    /// [`StoreError::Failed`] names the invalid setting.
    pub fn new(settings: &EtcdSettings) -> Result<Self, StoreError> {
        let pool = MemberConnections::new(settings)?;
        Ok(Self(Arc::new(EtcdInner { connections: pool, prefix: settings.prefix.clone() })))
    }

    /// The store's name in errors.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.connections.name()
    }

    /// Uses the members at `endpoints` from now on; [`Self::name`] does not change.
    ///
    /// # Errors
    /// [`StoreError::Failed`] for an invalid URL; then nothing has changed.
    pub fn set_endpoints(&self, endpoints: &[String]) -> Result<(), StoreError> {
        let failed = |why| StoreError::Failed { path: self.name().to_owned(), why };
        self.0.connections.set_endpoints(endpoints).map_err(failed)
    }

    /// Uses `tls` for new connections; open watches and leases keep theirs.
    ///
    /// # Errors
    /// [`StoreError::Failed`] for files that cannot be used; then nothing has changed.
    pub fn set_tls(&self, tls: &EtcdTls) -> Result<(), StoreError> {
        let failed = |why| StoreError::Failed { path: self.name().to_owned(), why };
        self.0.connections.set_tls(tls).map_err(failed)
    }

    /// Discards all changes up to `revision`: watches from before it fail with
    /// [`StoreError::Compacted`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn compact(&self, revision: Revision) -> Result<(), StoreError> {
        let request = CompactionRequest { revision: to_etcd_revision(revision), physical: true };
        let path = "/etcdserverpb.KV/Compact";
        let done =
            self.0.connections.call::<_, Empty>(RetryPolicy::AtMostOnce, path, request).await;
        done.map(drop).map_err(|e| self.0.connections.to_store_error(e))
    }
}

fn to_etcd_revision(revision: Revision) -> i64 {
    i64::try_from(revision.0).unwrap_or(i64::MAX)
}

fn from_etcd_revision(number: i64) -> Revision {
    Revision(u64::try_from(number).unwrap_or_default())
}

/// The first key after all that start with `prefix`; a zero byte means "to the end".
fn range_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

impl EtcdInner {
    fn full_key(&self, key: &str) -> Vec<u8> {
        [&self.prefix, key].concat().into_bytes()
    }

    /// The key without the store's prefix.
    fn strip_prefix(&self, key: &[u8]) -> String {
        let key = String::from_utf8_lossy(key);
        key.strip_prefix(&self.prefix).unwrap_or(&key).to_owned()
    }

    fn entry(&self, kv: &KeyValue) -> Entry {
        Entry::from_stored(
            self.strip_prefix(&kv.key),
            &kv.value,
            from_etcd_revision(kv.mod_revision),
        )
    }

    async fn range(&self, request: RangeRequest) -> Result<RangeResponse, RpcError> {
        self.connections.call(RetryPolicy::Idempotent, "/etcdserverpb.KV/Range", request).await
    }

    /// The latest revision of the store.
    async fn store_revision(&self) -> Result<Revision, RpcError> {
        let request =
            RangeRequest { key: self.full_key(""), keys_only: true, ..Default::default() };
        let answer = self.range(request).await?;
        Ok(from_etcd_revision(answer.header.unwrap_or_default().revision))
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, RpcError> {
        let request = RangeRequest { key: self.full_key(key), ..Default::default() };
        Ok(self.range(request).await?.kvs.pop().map(|kv| self.entry(&kv)))
    }

    async fn list(&self, prefix: &str) -> Result<(Vec<Entry>, Revision), RpcError> {
        let mut tries = 1;
        loop {
            match self.list_once(prefix).await {
                // The revision being read was compacted between two pages.
                Err(RpcError::Compacted) if tries < LIST_ATTEMPTS => tries += 1,
                other => return other,
            }
        }
    }

    async fn list_once(&self, prefix: &str) -> Result<(Vec<Entry>, Revision), RpcError> {
        let mut key = self.full_key(prefix);
        let range_end = range_end(&key);
        if key.is_empty() {
            key = vec![0];
        }
        let (mut entries, mut at) = (Vec::new(), 0);
        loop {
            let request = RangeRequest {
                key,
                range_end: range_end.clone(),
                limit: LIST_PAGE_KEYS,
                revision: at,
                ..Default::default()
            };
            let page = self.range(request).await?;
            if at == 0 {
                at = page.header.unwrap_or_default().revision;
            }
            let last = page.kvs.last().map(|kv| [&kv.key[..], &[0]].concat());
            entries.extend(page.kvs.into_iter().map(|kv| self.entry(&kv)));
            match last {
                Some(next) if page.more => key = next,
                _ => return Ok((entries, from_etcd_revision(at))),
            }
        }
    }

    async fn commit(&self, changes: &[Change]) -> Result<Result<Revision, String>, RpcError> {
        let request = self.transaction(changes);
        let path = "/etcdserverpb.KV/Txn";
        let answer: TxnResponse =
            self.connections.call(RetryPolicy::AtMostOnce, path, request).await?;
        if answer.succeeded {
            return Ok(Ok(from_etcd_revision(answer.header.unwrap_or_default().revision)));
        }
        let found = answer.responses.iter().map(|r| {
            let kv = r.range.as_ref().and_then(|range| range.kvs.first());
            kv.map_or(0, |kv| kv.mod_revision)
        });
        let other = changes
            .iter()
            .zip(found)
            .find(|(c, found)| expected_mod_revision(c.precondition) != *found);
        Ok(Err(other.map_or(&changes[0], |(c, _)| c).key.clone()))
    }

    /// Applies all changes if every precondition holds; otherwise reads the keys, to find the one
    /// that failed.
    fn transaction(&self, changes: &[Change]) -> TxnRequest {
        let op = |request| RequestOp { request: Some(request) };
        let compare = |c: &Change| Compare {
            result: 0,
            target: TARGET_MOD,
            key: self.full_key(&c.key),
            mod_revision: Some(expected_mod_revision(c.precondition)),
        };
        let change = |c: &Change| {
            let key = self.full_key(&c.key);
            op(match &c.value {
                Some(value) => {
                    let value = checksummed::add_checksum(&c.key, value);
                    RequestOpKind::Put(PutRequest { key, value, lease: 0 })
                }
                None => RequestOpKind::Delete(DeleteRangeRequest { key }),
            })
        };
        let read_key = |c: &Change| {
            let key = self.full_key(&c.key);
            op(RequestOpKind::Range(RangeRequest { key, keys_only: true, ..Default::default() }))
        };
        TxnRequest {
            compare: changes.iter().map(compare).collect(),
            success: changes.iter().filter(|c| !c.is_guard()).map(change).collect(),
            failure: changes.iter().map(read_key).collect(),
        }
    }
}

fn expected_mod_revision(expect: Precondition) -> i64 {
    expect.revision().map_or(0, to_etcd_revision)
}

impl MetadataStore for EtcdStore {
    fn get(&self, key: &str) -> StoreFuture<'_, Option<Entry>> {
        let key = key.to_owned();
        Box::pin(
            async move { self.0.get(&key).await.map_err(|e| self.0.connections.to_store_error(e)) },
        )
    }

    fn list(&self, prefix: &str) -> StoreFuture<'_, (Vec<Entry>, Revision)> {
        let prefix = prefix.to_owned();
        Box::pin(async move {
            self.0.list(&prefix).await.map_err(|e| self.0.connections.to_store_error(e))
        })
    }

    fn commit(&self, changes: Vec<Change>) -> StoreFuture<'_, Revision> {
        Box::pin(async move {
            super::validate_changes(self.name(), &changes)?;
            let done =
                self.0.commit(&changes).await.map_err(|e| self.0.connections.to_store_error(e))?;
            done.map_err(|key| StoreError::Conflict { key })
        })
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watcher> {
        Box::new(watch::EtcdWatcher::new(Arc::clone(&self.0), prefix, after))
    }

    fn problem(&self) -> StoreFuture<'_, Option<StoreProblem>> {
        // etcd's members report their own problems.
        Box::pin(async { Ok(None) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_where_the_next_begins() {
        assert_eq!(range_end(b"a/"), b"a0");
        assert_eq!(range_end(&[b'a', 0xff]), b"b");
        assert_eq!(range_end(&[0xff]), [0]);
        assert_eq!(range_end(b""), [0]);
    }

    #[test]
    fn settings_that_cannot_be_are_named() {
        let at = |endpoints: &[&str]| EtcdSettings {
            endpoints: endpoints.iter().map(|&e| e.to_owned()).collect(),
            ..Default::default()
        };
        let refused = |s: &EtcdSettings| EtcdStore::new(s).unwrap_err().to_string();
        assert!(refused(&at(&[])).contains("no endpoint"));
        assert!(refused(&at(&["127.0.0.1:2379"])).contains("127.0.0.1:2379 is not"));
        assert!(refused(&at(&["https://a:1"])).contains("https needs a CA"));
        let mut secure = at(&["https://a:1"]);
        secure.tls = Some(EtcdTls { ca: "/nowhere/ca.pem".into(), identity: None });
        assert!(refused(&secure).contains("/nowhere/ca.pem"));
        let ca = tempfile::NamedTempFile::new().unwrap();
        secure.tls = Some(EtcdTls { ca: ca.path().into(), identity: None });
        secure.endpoints.push("http://b:1".into());
        assert!(refused(&secure).contains("http://b:1 is not https"));
    }
}

//! The store of a cluster: etcd, version 3.4 or later, its own or an existing one.
//!
//! * Reads are linearizable. A list is of one revision, however long it is.
//! * A commit is one transaction and is sent once. If no answer comes it is
//!   [`MetaError::Unknown`]; nothing here tries again on its own.
//! * A watch outlives connections, members and outages (`watch.rs`).
//! * Every try is bounded ([`Settings::try_timeout`]). A call tries each member at most once, those
//!   that answered last first (`pool.rs`): a dead member costs one try, once.
//!
//! Keys stand below [`Settings::prefix`], so that an etcd can be shared.

mod health;
mod lease;
mod members;
mod pool;
mod watch;
mod wire;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use health::{MemberAnswer, MemberHealth};
pub use lease::Announced;
pub use members::{MemberInfo, MemberStatus};

use super::{Answer, Change, Entry, Expect, Meta, MetaError, Revision, Trouble, Watch, sealed};
use pool::{Asked, Failure, Pool};
use wire::{
    CompactionRequest, Compare, DeleteRangeRequest, Empty, KeyValue, PutRequest, RangeRequest,
    RangeResponse, Request, RequestOp, TARGET_MOD, TxnRequest, TxnResponse,
};

/// Keys asked for at once. The longest records are some KiB; an answer has to fit in one message.
const PAGE: i64 = 512;

/// How often a list begins anew because what it was reading was compacted.
const LIST_TRIES: usize = 3;

/// How the store is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Client URLs of the members, `http://HOST:PORT` or `https://HOST:PORT`.
    pub endpoints: Vec<String>,
    /// What every key begins with.
    pub prefix: String,
    /// Certificates, for `https`.
    pub tls: Option<Tls>,
    /// Longest time that one member is given to answer.
    pub try_timeout: Duration,
    /// How long a member that did not answer is asked last.
    pub shun: Duration,
}

/// What is shown and trusted over TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// PEM file of the authority that the members' certificates are from.
    pub ca: PathBuf,
    /// PEM files of the own certificate and its key, where the members want one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            prefix: "windrose/".into(),
            tls: None,
            try_timeout: Duration::from_secs(1),
            shun: Duration::from_secs(10),
        }
    }
}

/// The store. Cheap to clone. Its connections belong to the runtime that uses it first.
#[derive(Clone)]
pub struct Etcd(Arc<Inner>);

struct Inner {
    pool: Pool,
    prefix: String,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { pool, prefix } = &*self.0;
        f.debug_struct("Etcd").field("endpoints", &pool.name()).field("prefix", prefix).finish()
    }
}

impl Etcd {
    /// The store that `settings` say. Reads the files of certificates; connects when it is asked
    /// for something.
    ///
    /// # Errors
    /// [`MetaError::Failed`] names the setting that cannot be.
    pub fn new(settings: &Settings) -> Result<Self, MetaError> {
        let pool = Pool::new(settings)?;
        Ok(Self(Arc::new(Inner { pool, prefix: settings.prefix.clone() })))
    }

    /// What errors call it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.pool.name()
    }

    /// Has the members at `endpoints` asked from now on; [`Self::name`] stays what it was.
    ///
    /// # Errors
    /// [`MetaError::Failed`] for a URL that cannot be; then nothing has changed.
    pub fn set_endpoints(&self, endpoints: &[String]) -> Result<(), MetaError> {
        let failed = |why| MetaError::Failed { path: self.name().to_owned(), why };
        self.0.pool.set_endpoints(endpoints).map_err(failed)
    }

    /// Shows and trusts what `tls` says from now on, on new connections; a watch and a sign of life go on with theirs.
    ///
    /// # Errors
    /// [`MetaError::Failed`] for files that cannot be used; then nothing has changed.
    pub fn set_tls(&self, tls: &Tls) -> Result<(), MetaError> {
        let failed = |why| MetaError::Failed { path: self.name().to_owned(), why };
        self.0.pool.set_tls(tls).map_err(failed)
    }

    /// Forgets all changes up to `revision`: whoever follows from before is told so.
    ///
    /// # Errors
    /// [`MetaError`].
    pub async fn compact(&self, revision: Revision) -> Result<(), MetaError> {
        let request = CompactionRequest { revision: number(revision), physical: true };
        let path = "/etcdserverpb.KV/Compact";
        let done = self.0.pool.ask::<_, Empty>(Asked::Once, path, request).await;
        done.map(drop).map_err(|e| self.0.pool.error(e))
    }
}

fn number(revision: Revision) -> i64 {
    i64::try_from(revision.0).unwrap_or(i64::MAX)
}

fn revision(number: i64) -> Revision {
    Revision(u64::try_from(number).unwrap_or_default())
}

/// The first key after all that start with `prefix`; a zero byte stands for "to the end".
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

impl Inner {
    fn key(&self, key: &str) -> Vec<u8> {
        [&self.prefix, key].concat().into_bytes()
    }

    /// A key as callers know it.
    fn bare(&self, key: &[u8]) -> String {
        let key = String::from_utf8_lossy(key);
        key.strip_prefix(&self.prefix).unwrap_or(&key).to_owned()
    }

    fn entry(&self, kv: &KeyValue) -> Entry {
        Entry::kept(self.bare(&kv.key), &kv.value, revision(kv.mod_revision))
    }

    async fn range(&self, request: RangeRequest) -> Result<RangeResponse, Failure> {
        self.pool.ask(Asked::Freely, "/etcdserverpb.KV/Range", request).await
    }

    /// The revision of the store as a whole.
    async fn revision(&self) -> Result<Revision, Failure> {
        let request = RangeRequest { key: self.key(""), keys_only: true, ..Default::default() };
        let answer = self.range(request).await?;
        Ok(revision(answer.header.unwrap_or_default().revision))
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, Failure> {
        let request = RangeRequest { key: self.key(key), ..Default::default() };
        Ok(self.range(request).await?.kvs.pop().map(|kv| self.entry(&kv)))
    }

    async fn list(&self, prefix: &str) -> Result<(Vec<Entry>, Revision), Failure> {
        let mut tries = 1;
        loop {
            match self.list_once(prefix).await {
                // Between two pages somebody compacted the revision that is being read.
                Err(Failure::Compacted) if tries < LIST_TRIES => tries += 1,
                other => return other,
            }
        }
    }

    async fn list_once(&self, prefix: &str) -> Result<(Vec<Entry>, Revision), Failure> {
        let mut key = self.key(prefix);
        let range_end = range_end(&key);
        if key.is_empty() {
            key = vec![0];
        }
        let (mut entries, mut at) = (Vec::new(), 0);
        loop {
            let request = RangeRequest {
                key,
                range_end: range_end.clone(),
                limit: PAGE,
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
                _ => return Ok((entries, revision(at))),
            }
        }
    }

    async fn commit(&self, changes: &[Change]) -> Result<Result<Revision, String>, Failure> {
        let request = self.transaction(changes);
        let path = "/etcdserverpb.KV/Txn";
        let answer: TxnResponse = self.pool.ask(Asked::Once, path, request).await?;
        if answer.succeeded {
            return Ok(Ok(revision(answer.header.unwrap_or_default().revision)));
        }
        let found = answer.responses.iter().map(|r| {
            let kv = r.range.as_ref().and_then(|range| range.kvs.first());
            kv.map_or(0, |kv| kv.mod_revision)
        });
        let other = changes.iter().zip(found).find(|(c, found)| expected(c.expect) != *found);
        Ok(Err(other.map_or(&changes[0], |(c, _)| c).key.clone()))
    }

    /// If every key is as expected, all changes; else a look at the keys, to say which is not.
    fn transaction(&self, changes: &[Change]) -> TxnRequest {
        let op = |request| RequestOp { request: Some(request) };
        let compare = |c: &Change| Compare {
            result: 0,
            target: TARGET_MOD,
            key: self.key(&c.key),
            mod_revision: Some(expected(c.expect)),
        };
        let change = |c: &Change| {
            let key = self.key(&c.key);
            op(match &c.value {
                Some(value) => {
                    let value = sealed::seal(&c.key, value);
                    Request::Put(PutRequest { key, value, lease: 0 })
                }
                None => Request::Delete(DeleteRangeRequest { key }),
            })
        };
        let look = |c: &Change| {
            let key = self.key(&c.key);
            op(Request::Range(RangeRequest { key, keys_only: true, ..Default::default() }))
        };
        TxnRequest {
            compare: changes.iter().map(compare).collect(),
            success: changes.iter().filter(|c| !c.is_condition()).map(change).collect(),
            failure: changes.iter().map(look).collect(),
        }
    }
}

fn expected(expect: Expect) -> i64 {
    expect.revision().map_or(0, number)
}

impl Meta for Etcd {
    fn get(&self, key: &str) -> Answer<'_, Option<Entry>> {
        let key = key.to_owned();
        Box::pin(async move { self.0.get(&key).await.map_err(|e| self.0.pool.error(e)) })
    }

    fn list(&self, prefix: &str) -> Answer<'_, (Vec<Entry>, Revision)> {
        let prefix = prefix.to_owned();
        Box::pin(async move { self.0.list(&prefix).await.map_err(|e| self.0.pool.error(e)) })
    }

    fn commit(&self, changes: Vec<Change>) -> Answer<'_, Revision> {
        Box::pin(async move {
            super::check(self.name(), &changes)?;
            let done = self.0.commit(&changes).await.map_err(|e| self.0.pool.error(e))?;
            done.map_err(|key| MetaError::Changed { key })
        })
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watch> {
        Box::new(watch::Follower::new(Arc::clone(&self.0), prefix, after))
    }

    fn trouble(&self) -> Answer<'_, Option<Trouble>> {
        // Its members tell of themselves.
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
        let at = |endpoints: &[&str]| Settings {
            endpoints: endpoints.iter().map(|&e| e.to_owned()).collect(),
            ..Default::default()
        };
        let refused = |s: &Settings| Etcd::new(s).unwrap_err().to_string();
        assert!(refused(&at(&[])).contains("no endpoint"));
        assert!(refused(&at(&["127.0.0.1:2379"])).contains("127.0.0.1:2379 is not"));
        assert!(refused(&at(&["https://a:1"])).contains("https needs a CA"));
        let mut secure = at(&["https://a:1"]);
        secure.tls = Some(Tls { ca: "/nowhere/ca.pem".into(), identity: None });
        assert!(refused(&secure).contains("/nowhere/ca.pem"));
        let ca = tempfile::NamedTempFile::new().unwrap();
        secure.tls = Some(Tls { ca: ca.path().into(), identity: None });
        secure.endpoints.push("http://b:1".into());
        assert!(refused(&secure).contains("http://b:1 is not https"));
    }
}

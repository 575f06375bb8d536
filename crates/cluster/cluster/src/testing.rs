//! The conformance suite of [`MetadataStore`]: what every back end must do.
//!
//! A back end's tests implement [`StoreBackend`] and call [`run_conformance_suite`]; a violation
//! panics.
#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps nothing")]

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::store::{
    Change, ChangeEvent, MetadataStore, Precondition, Revision, StoreError, Watcher,
};

/// How long a change may take to reach a watcher.
const EVENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Keys of the long list: more than a back end reads at once.
const LONG_LIST_KEYS: usize = 1300;

/// How soon an unreachable store is asked again.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A back end under test.
pub trait StoreBackend {
    /// An empty store, or an unused part of one.
    fn empty_store(&self) -> impl Future<Output = Arc<dyn MetadataStore>>;

    /// Makes `store` discard all changes so far, as for [`StoreError::Compacted`].
    fn compact(&self, store: &Arc<dyn MetadataStore>) -> impl Future<Output = ()>;
}

/// Runs every case.
pub async fn run_conformance_suite(backend: &impl StoreBackend) {
    holds_what_was_put(&backend.empty_store().await).await;
    commits_are_all_or_nothing(&backend.empty_store().await).await;
    a_key_that_came_back_is_another(&backend.empty_store().await).await;
    conditions_change_nothing(&backend.empty_store().await).await;
    what_cannot_be_meant_is_refused(&backend.empty_store().await).await;
    lists_end_with_their_prefix(&backend.empty_store().await).await;
    long_lists_are_whole(&backend.empty_store().await).await;
    followers_see_every_change_in_order(&backend.empty_store().await).await;
    followers_begin_where_they_are_told(&backend.empty_store().await).await;
    no_count_is_lost(&backend.empty_store().await).await;
    let store = backend.empty_store().await;
    followers_from_before_are_told(backend, &store).await;
}

/// A change that puts `value`.
#[must_use]
pub fn put(key: &str, expect: Precondition, value: &str) -> Change {
    Change { key: key.into(), precondition: expect, value: Some(value.into()) }
}

/// A change that removes the key as written by `at`.
#[must_use]
pub fn remove(key: &str, at: Revision) -> Change {
    Change { key: key.into(), precondition: Precondition::AtRevision(at), value: None }
}

type SharedStore = Arc<dyn MetadataStore>;

async fn next_event(watch: &mut Box<dyn Watcher>) -> Result<ChangeEvent, StoreError> {
    timeout(EVENT_TIMEOUT, watch.next_event()).await.expect("a follower is told soon")
}

async fn holds_what_was_put(store: &SharedStore) {
    assert_eq!(store.get("a").await, Ok(None));
    let value: Vec<u8> = (0..=u8::MAX).collect();
    let all = vec![
        Change { key: "a".into(), precondition: Precondition::Absent, value: Some(value.clone()) },
        put("names/\u{fc}\u{1f9ed}", Precondition::Absent, ""),
    ];
    let one = store.commit(all).await.unwrap();
    let entry = store.get("a").await.unwrap().unwrap();
    assert_eq!((entry.key.as_str(), entry.value, entry.revision), ("a", value, one));
    let entry = store.get("names/\u{fc}\u{1f9ed}").await.unwrap().unwrap();
    assert_eq!((entry.value.as_slice(), entry.revision), (&b""[..], one));
    let two = store.commit(vec![put("a", Precondition::AtRevision(one), "x")]).await.unwrap();
    assert!(two > one);
    assert_eq!(store.get("a").await.unwrap().unwrap().revision, two);
    store.commit(vec![remove("a", two)]).await.unwrap();
    assert_eq!(store.get("a").await, Ok(None));
}

async fn commits_are_all_or_nothing(store: &SharedStore) {
    let both = vec![put("a/1", Precondition::Absent, "x"), put("a/2", Precondition::Absent, "y")];
    let one = store.commit(both).await.unwrap();
    let refused = |key: &str| Err(StoreError::Conflict { key: key.into() });
    let second =
        vec![put("a/1", Precondition::AtRevision(one), "z"), put("a/2", Precondition::Absent, "z")];
    assert_eq!(store.commit(second).await, refused("a/2"));
    let first = vec![
        put("a/3", Precondition::AtRevision(one), "z"),
        put("a/2", Precondition::AtRevision(one), "z"),
    ];
    assert_eq!(store.commit(first).await, refused("a/3"));
    let past = Revision(one.0 - 1);
    assert_eq!(store.commit(vec![remove("a/1", past)]).await, refused("a/1"));
    let (entries, _) = store.list("a/").await.unwrap();
    let stored: Vec<_> =
        entries.iter().map(|e| (e.key.as_str(), &e.value[..], e.revision)).collect();
    assert_eq!(stored, [("a/1", &b"x"[..], one), ("a/2", b"y", one)]);
}

async fn a_key_that_came_back_is_another(store: &SharedStore) {
    let one = store.commit(vec![put("k", Precondition::Absent, "x")]).await.unwrap();
    store.commit(vec![remove("k", one)]).await.unwrap();
    let three = store.commit(vec![put("k", Precondition::Absent, "x")]).await.unwrap();
    let refused = Err(StoreError::Conflict { key: "k".into() });
    assert_eq!(store.commit(vec![put("k", Precondition::AtRevision(one), "y")]).await, refused);
    assert!(
        store.commit(vec![put("k", Precondition::AtRevision(three), "y")]).await.unwrap() > three
    );
}

async fn conditions_change_nothing(store: &SharedStore) {
    let (_, begin) = store.list("").await.unwrap();
    let mut watch = store.watch("", begin);
    let absent = || Change { key: "b".into(), precondition: Precondition::Absent, value: None };
    store.commit(vec![put("a", Precondition::Absent, ""), absent()]).await.unwrap();
    store.commit(vec![put("b", Precondition::Absent, "")]).await.unwrap();
    let refused = store.commit(vec![put("c", Precondition::Absent, ""), absent()]).await;
    assert_eq!(refused, Err(StoreError::Conflict { key: "b".into() }));
    assert_eq!(next_event(&mut watch).await.unwrap().key, "a");
    assert_eq!(next_event(&mut watch).await.unwrap().key, "b");
    // A guard leaves its key as it is, and fails the commit if the key has changed.
    let entry = store.get("a").await.unwrap().unwrap();
    let guard = || Change {
        key: "a".into(),
        precondition: Precondition::GuardAtRevision(entry.revision),
        value: None,
    };
    store.commit(vec![put("c", Precondition::Absent, ""), guard()]).await.unwrap();
    assert_eq!(store.get("a").await, Ok(Some(entry.clone())));
    store.commit(vec![put("a", Precondition::AtRevision(entry.revision), "x")]).await.unwrap();
    let refused = store.commit(vec![guard(), put("d", Precondition::Absent, "")]).await;
    assert_eq!(refused, Err(StoreError::Conflict { key: "a".into() }));
    for key in ["c", "a"] {
        assert_eq!(next_event(&mut watch).await.unwrap().key, key);
    }
}

async fn what_cannot_be_meant_is_refused(store: &SharedStore) {
    let twice = vec![put("k", Precondition::Absent, "x"), put("k", Precondition::Absent, "y")];
    for changes in [Vec::new(), twice] {
        let refused = store.commit(changes).await;
        assert!(matches!(refused, Err(StoreError::Failed { .. })), "{refused:?}");
    }
    assert_eq!(store.get("k").await, Ok(None));
}

async fn lists_end_with_their_prefix(store: &SharedStore) {
    let keys = ["a", "a/2", "a/1", "a0", "b"];
    let all = keys.iter().map(|k| put(k, Precondition::Absent, k)).collect();
    let one = store.commit(all).await.unwrap();
    let keys = |prefix: &'static str| async move {
        let (entries, revision) = store.list(prefix).await.unwrap();
        assert!(revision >= one);
        entries.into_iter().map(|e| e.key).collect::<Vec<_>>()
    };
    assert_eq!(keys("a/").await, ["a/1", "a/2"]);
    assert_eq!(keys("a").await, ["a", "a/1", "a/2", "a0"]);
    assert_eq!(keys("").await, ["a", "a/1", "a/2", "a0", "b"]);
    assert!(keys("c").await.is_empty());
}

async fn long_lists_are_whole(store: &SharedStore) {
    let name = |i: usize| format!("long/{i:05}");
    for from in (0..LONG_LIST_KEYS).step_by(100) {
        let some = from..(from + 100).min(LONG_LIST_KEYS);
        let all = some.map(|i| put(&name(i), Precondition::Absent, &"v".repeat(100))).collect();
        store.commit(all).await.unwrap();
    }
    let (entries, _) = store.list("long/").await.unwrap();
    assert_eq!(entries.len(), LONG_LIST_KEYS);
    assert!(entries.iter().enumerate().all(|(i, e)| e.key == name(i) && e.value.len() == 100));
}

async fn followers_see_every_change_in_order(store: &SharedStore) {
    let (_, begin) = store.list("").await.unwrap();
    let mut watch = store.watch("v/", begin);
    let pair = vec![put("v/2", Precondition::Absent, ""), put("v/1", Precondition::Absent, "")];
    let one = store.commit(pair).await.unwrap();
    store.commit(vec![put("other", Precondition::Absent, "")]).await.unwrap();
    let three = store.commit(vec![remove("v/1", one)]).await.unwrap();
    let seen = |key: &str, removed, revision| {
        Ok(ChangeEvent { key: key.into(), is_removal: removed, revision })
    };
    assert_eq!(next_event(&mut watch).await, seen("v/2", false, one));
    assert_eq!(next_event(&mut watch).await, seen("v/1", false, one));
    assert_eq!(next_event(&mut watch).await, seen("v/1", true, three));
    let waiting = tokio::spawn(async move { next_event(&mut watch).await });
    tokio::task::yield_now().await;
    let four = store.commit(vec![put("v/2", Precondition::AtRevision(one), "x")]).await.unwrap();
    assert_eq!(waiting.await.unwrap(), seen("v/2", false, four));
}

async fn followers_begin_where_they_are_told(store: &SharedStore) {
    let one = store.commit(vec![put("v", Precondition::Absent, "")]).await.unwrap();
    let two = store.commit(vec![put("v", Precondition::AtRevision(one), "")]).await.unwrap();
    let three = store.commit(vec![put("v", Precondition::AtRevision(two), "")]).await.unwrap();
    let before = Revision(one.0 - 1);
    for (after, expected) in [(before, one), (one, two), (two, three)] {
        let mut watch = store.watch("v", after);
        assert_eq!(next_event(&mut watch).await.unwrap().revision, expected);
    }
    let mut watch = store.watch("v", three);
    let nothing = timeout(Duration::from_millis(200), watch.next_event()).await;
    assert!(nothing.is_err(), "{nothing:?}");
    // The abandoned call has lost no change.
    let four = store.commit(vec![put("v", Precondition::AtRevision(three), "")]).await.unwrap();
    assert_eq!(next_event(&mut watch).await.unwrap().revision, four);
}

async fn no_count_is_lost(store: &SharedStore) {
    const WRITERS: u64 = 6;
    const EACH: u64 = 15;
    let begin = store.commit(vec![put("n", Precondition::Absent, "0")]).await.unwrap();
    let mut watch = store.watch("n", begin);
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        let store = Arc::clone(store);
        writers.spawn(async move {
            for _ in 0..EACH {
                while !increment(&*store).await {}
            }
        });
    }
    let mut last = begin;
    for _ in 0..WRITERS * EACH {
        let event = next_event(&mut watch).await.unwrap();
        assert!(event.revision > last, "{event:?} after {last}");
        last = event.revision;
    }
    writers.join_all().await;
    let entry = store.get("n").await.unwrap().unwrap();
    assert_eq!((entry.value, entry.revision), ((WRITERS * EACH).to_string().into_bytes(), last));
}

/// Adds one, unless a concurrent commit was faster.
async fn increment(store: &dyn MetadataStore) -> bool {
    let entry = store.get("n").await.unwrap().unwrap();
    let n: u64 = String::from_utf8(entry.value).unwrap().parse().unwrap();
    let more = put("n", Precondition::AtRevision(entry.revision), &(n + 1).to_string());
    match store.commit(vec![more]).await {
        Ok(_) => true,
        Err(StoreError::Conflict { .. }) => false,
        Err(e) => panic!("{e}"),
    }
}

async fn followers_from_before_are_told(backend: &impl StoreBackend, store: &SharedStore) {
    let one = store.commit(vec![put("v", Precondition::Absent, "")]).await.unwrap();
    let two = store.commit(vec![put("v", Precondition::AtRevision(one), "")]).await.unwrap();
    let mut late = store.watch("v", Revision(one.0 - 1));
    backend.compact(store).await;
    let refused = next_event(&mut late).await;
    assert!(matches!(refused, Err(StoreError::Compacted { .. })), "{refused:?}");
    // A watch from the revision of a list misses nothing.
    let (_, revision) = store.list("v").await.unwrap();
    let mut watch = store.watch("v", revision);
    let three = store.commit(vec![put("v", Precondition::AtRevision(two), "")]).await.unwrap();
    assert_eq!(next_event(&mut watch).await.unwrap().revision, three);
}

/// Adds one to the counter `n`, exactly once, whatever happens to calls; returns how often a commit
/// was indeterminate. `name` identifies this increment.
///
/// The same commit writes a trace, `done/NAME`. An indeterminate commit is repeated until its trace
/// exists: it cannot take effect twice, since both attempts expect that there is no trace yet.
///
/// # Panics
/// If the store reports something it must not.
pub async fn increment_once(store: &dyn MetadataStore, name: &str) -> u64 {
    let mut doubts = 0;
    let trace = format!("done/{name}");
    loop {
        let read = async {
            let done = store.get(&trace).await?.is_some();
            Ok((done, store.get("n").await?.expect("the counter is there")))
        };
        let (done, counter) = match read.await {
            Ok(seen) => seen,
            Err(StoreError::Unreachable { .. }) => {
                sleep(RETRY_PAUSE).await;
                continue;
            }
            Err(e) => panic!("{e}"),
        };
        if done {
            assert!(doubts > 0, "{name} was counted without being committed");
            return doubts;
        }
        let n: u64 = String::from_utf8(counter.value).unwrap().parse().unwrap();
        let more = put("n", Precondition::AtRevision(counter.revision), &(n + 1).to_string());
        match store.commit(vec![more, put(&trace, Precondition::Absent, "")]).await {
            Ok(_) => return doubts,
            Err(StoreError::Conflict { .. }) => {}
            Err(StoreError::Unreachable { .. }) => sleep(RETRY_PAUSE).await,
            Err(StoreError::Indeterminate { .. }) => doubts += 1,
            Err(e) => panic!("{e}"),
        }
    }
}

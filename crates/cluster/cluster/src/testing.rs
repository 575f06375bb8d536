//! The conformance suite of [`Meta`]: what every back end does, whatever it is made of.
//!
//! A back end's tests implement [`Subject`] and call [`conform`]; a breach panics.
#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps nothing")]

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::meta::{Change, Event, Expect, Meta, MetaError, Revision, Watch};

/// How long a change may take to reach a follower.
const SOON: Duration = Duration::from_secs(10);

/// Keys of the long list: more than a back end reads at once.
const MANY: usize = 1300;

/// How soon a store that could not be reached is asked again.
const AGAIN: Duration = Duration::from_millis(10);

/// A back end under test.
pub trait Subject {
    /// An empty store, or a part of one that nobody else uses.
    fn fresh(&self) -> impl Future<Output = Arc<dyn Meta>>;

    /// Has `store` forget all changes so far, as [`MetaError::Compacted`] says it.
    fn forget(&self, store: &Arc<dyn Meta>) -> impl Future<Output = ()>;
}

/// Plays every case.
pub async fn conform(subject: &impl Subject) {
    holds_what_was_put(&subject.fresh().await).await;
    commits_are_all_or_nothing(&subject.fresh().await).await;
    a_key_that_came_back_is_another(&subject.fresh().await).await;
    conditions_change_nothing(&subject.fresh().await).await;
    what_cannot_be_meant_is_refused(&subject.fresh().await).await;
    lists_end_with_their_prefix(&subject.fresh().await).await;
    long_lists_are_whole(&subject.fresh().await).await;
    followers_see_every_change_in_order(&subject.fresh().await).await;
    followers_begin_where_they_are_told(&subject.fresh().await).await;
    no_count_is_lost(&subject.fresh().await).await;
    let store = subject.fresh().await;
    followers_from_before_are_told(subject, &store).await;
}

/// A change that puts `value`.
#[must_use]
pub fn put(key: &str, expect: Expect, value: &str) -> Change {
    Change { key: key.into(), expect, value: Some(value.into()) }
}

/// A change that removes what `at` wrote.
#[must_use]
pub fn remove(key: &str, at: Revision) -> Change {
    Change { key: key.into(), expect: Expect::At(at), value: None }
}

type Store = Arc<dyn Meta>;

async fn next(watch: &mut Box<dyn Watch>) -> Result<Event, MetaError> {
    timeout(SOON, watch.next()).await.expect("a follower is told soon")
}

async fn holds_what_was_put(store: &Store) {
    assert_eq!(store.get("a").await, Ok(None));
    let value: Vec<u8> = (0..=u8::MAX).collect();
    let all = vec![
        Change { key: "a".into(), expect: Expect::Absent, value: Some(value.clone()) },
        put("names/\u{fc}\u{1f9ed}", Expect::Absent, ""),
    ];
    let one = store.commit(all).await.unwrap();
    let held = store.get("a").await.unwrap().unwrap();
    assert_eq!((held.key.as_str(), held.value, held.revision), ("a", value, one));
    let held = store.get("names/\u{fc}\u{1f9ed}").await.unwrap().unwrap();
    assert_eq!((held.value.as_slice(), held.revision), (&b""[..], one));
    let two = store.commit(vec![put("a", Expect::At(one), "x")]).await.unwrap();
    assert!(two > one);
    assert_eq!(store.get("a").await.unwrap().unwrap().revision, two);
    store.commit(vec![remove("a", two)]).await.unwrap();
    assert_eq!(store.get("a").await, Ok(None));
}

async fn commits_are_all_or_nothing(store: &Store) {
    let both = vec![put("a/1", Expect::Absent, "x"), put("a/2", Expect::Absent, "y")];
    let one = store.commit(both).await.unwrap();
    let refused = |key: &str| Err(MetaError::Changed { key: key.into() });
    let second = vec![put("a/1", Expect::At(one), "z"), put("a/2", Expect::Absent, "z")];
    assert_eq!(store.commit(second).await, refused("a/2"));
    let first = vec![put("a/3", Expect::At(one), "z"), put("a/2", Expect::At(one), "z")];
    assert_eq!(store.commit(first).await, refused("a/3"));
    let past = Revision(one.0 - 1);
    assert_eq!(store.commit(vec![remove("a/1", past)]).await, refused("a/1"));
    let (entries, _) = store.list("a/").await.unwrap();
    let held: Vec<_> = entries.iter().map(|e| (e.key.as_str(), &e.value[..], e.revision)).collect();
    assert_eq!(held, [("a/1", &b"x"[..], one), ("a/2", b"y", one)]);
}

async fn a_key_that_came_back_is_another(store: &Store) {
    let one = store.commit(vec![put("k", Expect::Absent, "x")]).await.unwrap();
    store.commit(vec![remove("k", one)]).await.unwrap();
    let three = store.commit(vec![put("k", Expect::Absent, "x")]).await.unwrap();
    let refused = Err(MetaError::Changed { key: "k".into() });
    assert_eq!(store.commit(vec![put("k", Expect::At(one), "y")]).await, refused);
    assert!(store.commit(vec![put("k", Expect::At(three), "y")]).await.unwrap() > three);
}

async fn conditions_change_nothing(store: &Store) {
    let (_, begin) = store.list("").await.unwrap();
    let mut watch = store.watch("", begin);
    let absent = || Change { key: "b".into(), expect: Expect::Absent, value: None };
    store.commit(vec![put("a", Expect::Absent, ""), absent()]).await.unwrap();
    store.commit(vec![put("b", Expect::Absent, "")]).await.unwrap();
    let refused = store.commit(vec![put("c", Expect::Absent, ""), absent()]).await;
    assert_eq!(refused, Err(MetaError::Changed { key: "b".into() }));
    assert_eq!(next(&mut watch).await.unwrap().key, "a");
    assert_eq!(next(&mut watch).await.unwrap().key, "b");
    // One that is to stay stays, and is refused when it has not.
    let held = store.get("a").await.unwrap().unwrap();
    let still = || Change { key: "a".into(), expect: Expect::Still(held.revision), value: None };
    store.commit(vec![put("c", Expect::Absent, ""), still()]).await.unwrap();
    assert_eq!(store.get("a").await, Ok(Some(held.clone())));
    store.commit(vec![put("a", Expect::At(held.revision), "x")]).await.unwrap();
    let refused = store.commit(vec![still(), put("d", Expect::Absent, "")]).await;
    assert_eq!(refused, Err(MetaError::Changed { key: "a".into() }));
    for key in ["c", "a"] {
        assert_eq!(next(&mut watch).await.unwrap().key, key);
    }
}

async fn what_cannot_be_meant_is_refused(store: &Store) {
    let twice = vec![put("k", Expect::Absent, "x"), put("k", Expect::Absent, "y")];
    for changes in [Vec::new(), twice] {
        let refused = store.commit(changes).await;
        assert!(matches!(refused, Err(MetaError::Failed { .. })), "{refused:?}");
    }
    assert_eq!(store.get("k").await, Ok(None));
}

async fn lists_end_with_their_prefix(store: &Store) {
    let keys = ["a", "a/2", "a/1", "a0", "b"];
    let all = keys.iter().map(|k| put(k, Expect::Absent, k)).collect();
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

async fn long_lists_are_whole(store: &Store) {
    let name = |i: usize| format!("long/{i:05}");
    for from in (0..MANY).step_by(100) {
        let some = from..(from + 100).min(MANY);
        let all = some.map(|i| put(&name(i), Expect::Absent, &"v".repeat(100))).collect();
        store.commit(all).await.unwrap();
    }
    let (entries, _) = store.list("long/").await.unwrap();
    assert_eq!(entries.len(), MANY);
    assert!(entries.iter().enumerate().all(|(i, e)| e.key == name(i) && e.value.len() == 100));
}

async fn followers_see_every_change_in_order(store: &Store) {
    let (_, begin) = store.list("").await.unwrap();
    let mut watch = store.watch("v/", begin);
    let pair = vec![put("v/2", Expect::Absent, ""), put("v/1", Expect::Absent, "")];
    let one = store.commit(pair).await.unwrap();
    store.commit(vec![put("other", Expect::Absent, "")]).await.unwrap();
    let three = store.commit(vec![remove("v/1", one)]).await.unwrap();
    let seen = |key: &str, removed, revision| Ok(Event { key: key.into(), removed, revision });
    assert_eq!(next(&mut watch).await, seen("v/2", false, one));
    assert_eq!(next(&mut watch).await, seen("v/1", false, one));
    assert_eq!(next(&mut watch).await, seen("v/1", true, three));
    let waiting = tokio::spawn(async move { next(&mut watch).await });
    tokio::task::yield_now().await;
    let four = store.commit(vec![put("v/2", Expect::At(one), "x")]).await.unwrap();
    assert_eq!(waiting.await.unwrap(), seen("v/2", false, four));
}

async fn followers_begin_where_they_are_told(store: &Store) {
    let one = store.commit(vec![put("v", Expect::Absent, "")]).await.unwrap();
    let two = store.commit(vec![put("v", Expect::At(one), "")]).await.unwrap();
    let three = store.commit(vec![put("v", Expect::At(two), "")]).await.unwrap();
    let before = Revision(one.0 - 1);
    for (after, expected) in [(before, one), (one, two), (two, three)] {
        let mut watch = store.watch("v", after);
        assert_eq!(next(&mut watch).await.unwrap().revision, expected);
    }
    let mut watch = store.watch("v", three);
    let nothing = timeout(Duration::from_millis(200), watch.next()).await;
    assert!(nothing.is_err(), "{nothing:?}");
    // The call that was given up has lost nothing.
    let four = store.commit(vec![put("v", Expect::At(three), "")]).await.unwrap();
    assert_eq!(next(&mut watch).await.unwrap().revision, four);
}

async fn no_count_is_lost(store: &Store) {
    const WRITERS: u64 = 6;
    const EACH: u64 = 15;
    let begin = store.commit(vec![put("n", Expect::Absent, "0")]).await.unwrap();
    let mut watch = store.watch("n", begin);
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        let store = Arc::clone(store);
        writers.spawn(async move {
            for _ in 0..EACH {
                while !count(&*store).await {}
            }
        });
    }
    let mut last = begin;
    for _ in 0..WRITERS * EACH {
        let event = next(&mut watch).await.unwrap();
        assert!(event.revision > last, "{event:?} after {last}");
        last = event.revision;
    }
    writers.join_all().await;
    let held = store.get("n").await.unwrap().unwrap();
    assert_eq!((held.value, held.revision), ((WRITERS * EACH).to_string().into_bytes(), last));
}

/// Adds one, unless somebody else was faster.
async fn count(store: &dyn Meta) -> bool {
    let held = store.get("n").await.unwrap().unwrap();
    let n: u64 = String::from_utf8(held.value).unwrap().parse().unwrap();
    let more = put("n", Expect::At(held.revision), &(n + 1).to_string());
    match store.commit(vec![more]).await {
        Ok(_) => true,
        Err(MetaError::Changed { .. }) => false,
        Err(e) => panic!("{e}"),
    }
}

async fn followers_from_before_are_told(subject: &impl Subject, store: &Store) {
    let one = store.commit(vec![put("v", Expect::Absent, "")]).await.unwrap();
    let two = store.commit(vec![put("v", Expect::At(one), "")]).await.unwrap();
    let mut late = store.watch("v", Revision(one.0 - 1));
    subject.forget(store).await;
    let refused = next(&mut late).await;
    assert!(matches!(refused, Err(MetaError::Compacted { .. })), "{refused:?}");
    // Whoever lists and follows from there misses nothing.
    let (_, revision) = store.list("v").await.unwrap();
    let mut watch = store.watch("v", revision);
    let three = store.commit(vec![put("v", Expect::At(two), "")]).await.unwrap();
    assert_eq!(next(&mut watch).await.unwrap().revision, three);
}

/// Adds one to the counter `n`, exactly once, whatever becomes of calls; gives how often a commit
/// was in doubt. `mine` is the name of this count and of no other.
///
/// A count leaves a trace in the same commit, `done/NAME`. Where a commit is in doubt it is put
/// again, until its trace is there: it cannot take effect twice, since both expect that there is
/// no trace yet.
///
/// # Panics
/// When the store says what it must not.
pub async fn count_once(store: &dyn Meta, mine: &str) -> u64 {
    let mut doubts = 0;
    let trace = format!("done/{mine}");
    loop {
        let look = async {
            let done = store.get(&trace).await?.is_some();
            Ok((done, store.get("n").await?.expect("the counter is there")))
        };
        let (done, held) = match look.await {
            Ok(seen) => seen,
            Err(MetaError::Unreachable { .. }) => {
                sleep(AGAIN).await;
                continue;
            }
            Err(e) => panic!("{e}"),
        };
        if done {
            assert!(doubts > 0, "{mine} was counted without being committed");
            return doubts;
        }
        let n: u64 = String::from_utf8(held.value).unwrap().parse().unwrap();
        let more = put("n", Expect::At(held.revision), &(n + 1).to_string());
        match store.commit(vec![more, put(&trace, Expect::Absent, "")]).await {
            Ok(_) => return doubts,
            Err(MetaError::Changed { .. }) => {}
            Err(MetaError::Unreachable { .. }) => sleep(AGAIN).await,
            Err(MetaError::Unknown { .. }) => doubts += 1,
            Err(e) => panic!("{e}"),
        }
    }
}

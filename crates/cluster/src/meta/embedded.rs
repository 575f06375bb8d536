//! The store of a single node: a file of its own, by `redb`.
//!
//! Commits are durable when they return. The file is made beside its name and renamed once it is
//! whole, so that a crash leaves a store or none. It holds secrets: only its owner may read it.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use tokio::sync::watch;

use super::{Answer, Change, Entry, Event, Expect, Meta, MetaError, Revision, Watch};

/// Format of what the store holds. A store of a higher one is refused.
pub const FORMAT: u64 = 1;

/// Keys: the commit that wrote them, and their contents.
const KEYS: TableDefinition<'_, &str, (u64, &[u8])> = TableDefinition::new("keys");

/// Facts about the store itself.
const FACTS: TableDefinition<'_, &str, u64> = TableDefinition::new("facts");

const FORMAT_FACT: &str = "format";
const REVISION_FACT: &str = "revision";

/// Memory for cached pages, in bytes.
const CACHE: usize = 4 << 20;

/// How often is looked whether a store is free, and how long is waited in between.
const BUSY_LOOKS: u32 = 20;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// Changes kept for followers.
const HISTORY: usize = 4096;

/// The store. Cheap to clone.
#[derive(Clone)]
pub struct Embedded(Arc<Inner>);

struct Inner {
    path: PathBuf,
    database: Database,
    /// One commit at a time.
    commits: Mutex<()>,
    history: Mutex<History>,
    newest: watch::Sender<Revision>,
}

/// The latest changes, oldest first.
struct History {
    events: VecDeque<Event>,
    /// Everything after this revision is in `events`.
    complete_after: Revision,
}

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedded").field("path", &self.0.path).finish_non_exhaustive()
    }
}

impl Embedded {
    /// Opens the store at `path`, or makes it. Blocks.
    ///
    /// # Errors
    /// [`MetaError::Newer`] for a store that this version does not understand,
    /// [`MetaError::Failed`] for everything else: no permission, no space, a damaged file.
    pub fn open(path: &Path) -> Result<Self, MetaError> {
        let failed = |e: redb::Error| failed(path, &e);
        match fs::symlink_metadata(path) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => create(path).map_err(failed)?,
            // Whether there is a store is not known: a fresh one in its place would lose it.
            Err(e) => return Err(failed(e.into())),
        }
        let database = database_when_free(path).map_err(failed)?;
        let (format, revision) = facts(&database).map_err(failed)?;
        if format > FORMAT {
            let path = path.display().to_string();
            return Err(MetaError::Newer { path, found: format, known: FORMAT });
        }
        let history = History { events: VecDeque::new(), complete_after: revision };
        Ok(Self(Arc::new(Inner {
            path: path.to_owned(),
            database,
            commits: Mutex::new(()),
            history: Mutex::new(history),
            newest: watch::Sender::new(revision),
        })))
    }

    /// Runs `f` where it may block.
    fn run<T, F>(&self, f: F) -> Answer<'_, T>
    where
        F: FnOnce(&Inner) -> Result<T, MetaError> + Send + 'static,
        T: Send + 'static,
    {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let path = inner.path.clone();
            let ended = tokio::task::spawn_blocking(move || f(&inner)).await;
            ended.unwrap_or_else(|e| {
                Err(MetaError::Failed { path: path.display().to_string(), why: e.to_string() })
            })
        })
    }
}

fn failed(path: &Path, e: &redb::Error) -> MetaError {
    MetaError::Failed { path: path.display().to_string(), why: e.to_string() }
}

fn database(path: &Path, fresh: bool) -> Result<Database, redb::Error> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(fresh).mode(0o600);
    let file = options.open(path)?;
    Ok(Database::builder().set_cache_size(CACHE).create_file(file)?)
}

/// Opens a store that may be held for a moment yet: a process that is just being started has a copy of every open file until
/// it runs its program.
fn database_when_free(path: &Path) -> Result<Database, redb::Error> {
    for _ in 0..BUSY_LOOKS {
        match database(path, false) {
            Err(redb::Error::DatabaseAlreadyOpen) => pause(BUSY_PAUSE),
            outcome => return outcome,
        }
    }
    database(path, false)
}

#[expect(clippy::disallowed_methods, reason = "whoever opens a store waits for its disk anyway")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn create(path: &Path) -> Result<(), redb::Error> {
    let fresh = path.with_extension("new");
    match fs::remove_file(&fresh) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
        _ => {}
    }
    let database = database(&fresh, true)?;
    let commit = database.begin_write()?;
    {
        let mut facts = commit.open_table(FACTS)?;
        facts.insert(FORMAT_FACT, FORMAT)?;
        facts.insert(REVISION_FACT, 0)?;
        commit.open_table(KEYS)?;
    }
    commit.commit()?;
    drop(database);
    fs::rename(&fresh, path)?;
    if let Some(dir) = path.parent() {
        File::open(dir)?.sync_all()?;
    }
    Ok(())
}

fn facts(database: &Database) -> Result<(u64, Revision), redb::Error> {
    let read = database.begin_read()?;
    let facts = read.open_table(FACTS)?;
    let fact = |name| {
        let missing = || redb::Error::Corrupted(format!("the fact {name} is missing"));
        facts.get(name)?.map(|v| v.value()).ok_or_else(missing)
    };
    Ok((fact(FORMAT_FACT)?, Revision(fact(REVISION_FACT)?)))
}

impl Inner {
    fn get(&self, key: &str) -> Result<Option<Entry>, redb::Error> {
        let read = self.database.begin_read()?;
        let found = read.open_table(KEYS)?.get(key)?;
        Ok(found.map(|v| entry(key, v.value())))
    }

    fn list(&self, prefix: &str) -> Result<(Vec<Entry>, Revision), redb::Error> {
        let read = self.database.begin_read()?;
        let keys = read.open_table(KEYS)?;
        let revision = read.open_table(FACTS)?.get(REVISION_FACT)?.map_or(0, |v| v.value());
        let mut entries = Vec::new();
        for item in keys.range(prefix..)? {
            let (key, value) = item?;
            if !key.value().starts_with(prefix) {
                break;
            }
            entries.push(entry(key.value(), value.value()));
        }
        Ok((entries, Revision(revision)))
    }

    fn commit(&self, changes: &[Change]) -> Result<Revision, MetaError> {
        super::check(&self.path.display().to_string(), changes)?;
        // Held from before the commit, so that followers see commits in their order. Not the history's own lock: a
        // follower, which must not block, would wait with it for the disk.
        let _turn = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        let revision = match self.write(changes) {
            Ok(Ok(revision)) => revision,
            Ok(Err(key)) => return Err(MetaError::Changed { key }),
            Err(e) => return Err(failed(&self.path, &e)),
        };
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        for change in changes.iter().filter(|c| !c.is_condition()) {
            let removed = change.value.is_none();
            history.events.push_back(Event { key: change.key.clone(), removed, revision });
        }
        while history.events.len() > HISTORY {
            if let Some(event) = history.events.pop_front() {
                history.complete_after = event.revision;
            }
        }
        drop(history);
        self.newest.send_replace(revision);
        Ok(revision)
    }

    /// `Err` of the inner result is the key that was not as expected; nothing was written then.
    fn write(&self, changes: &[Change]) -> Result<Result<Revision, String>, redb::Error> {
        let write = self.database.begin_write()?;
        let revision = {
            let mut facts = write.open_table(FACTS)?;
            let revision = facts.get(REVISION_FACT)?.map_or(0, |v| v.value()) + 1;
            facts.insert(REVISION_FACT, revision)?;
            let mut keys = write.open_table(KEYS)?;
            for change in changes {
                let key = change.key.as_str();
                let found = keys.get(key)?.map(|v| Revision(v.value().0));
                let expected = match change.expect {
                    Expect::Absent => None,
                    Expect::At(revision) => Some(revision),
                };
                if found != expected {
                    // Dropping the transaction takes everything back.
                    return Ok(Err(change.key.clone()));
                }
                match &change.value {
                    Some(value) => drop(keys.insert(key, (revision, value.as_slice()))?),
                    None => drop(keys.remove(key)?),
                }
            }
            revision
        };
        write.commit()?;
        Ok(Ok(Revision(revision)))
    }
}

fn entry(key: &str, (revision, value): (u64, &[u8])) -> Entry {
    Entry { key: key.to_owned(), value: value.to_owned(), revision: Revision(revision) }
}

impl Meta for Embedded {
    fn get(&self, key: &str) -> Answer<'_, Option<Entry>> {
        let key = key.to_owned();
        self.run(move |inner| inner.get(&key).map_err(|e| failed(&inner.path, &e)))
    }

    fn list(&self, prefix: &str) -> Answer<'_, (Vec<Entry>, Revision)> {
        let prefix = prefix.to_owned();
        self.run(move |inner| inner.list(&prefix).map_err(|e| failed(&inner.path, &e)))
    }

    fn commit(&self, changes: Vec<Change>) -> Answer<'_, Revision> {
        self.run(move |inner| inner.commit(&changes))
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watch> {
        let newest = self.0.newest.subscribe();
        let (store, prefix) = (Arc::downgrade(&self.0), prefix.to_owned());
        Box::new(Follower { store, prefix, newest, seen: after, ready: VecDeque::new() })
    }
}

/// Follows the changes under a prefix. Ends with the store.
struct Follower {
    store: std::sync::Weak<Inner>,
    prefix: String,
    newest: watch::Receiver<Revision>,
    /// Every commit up to this one has been looked at.
    seen: Revision,
    ready: VecDeque<Event>,
}

impl Follower {
    /// Takes over what has been committed since [`Self::seen`].
    fn catch_up(&mut self) -> Result<(), MetaError> {
        let ended = || MetaError::Failed { path: String::new(), why: "it was closed".into() };
        let store = self.store.upgrade().ok_or_else(ended)?;
        let history = store.history.lock().unwrap_or_else(PoisonError::into_inner);
        if self.seen < history.complete_after {
            return Err(MetaError::Compacted { after: self.seen });
        }
        let fresh = history.events.iter().filter(|e| e.revision > self.seen);
        self.ready.extend(fresh.filter(|e| e.key.starts_with(&self.prefix)).cloned());
        let last = history.events.back().map_or(self.seen, |e| e.revision);
        self.seen = self.seen.max(last);
        Ok(())
    }
}

impl Watch for Follower {
    fn next(&mut self) -> Answer<'_, Event> {
        Box::pin(async move {
            loop {
                if let Some(event) = self.ready.pop_front() {
                    return Ok(event);
                }
                self.newest.borrow_and_update();
                self.catch_up()?;
                if self.ready.is_empty() && self.newest.changed().await.is_err() {
                    self.catch_up()?;
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn put(key: &str, expect: Expect, value: &str) -> Change {
        Change { key: key.into(), expect, value: Some(value.into()) }
    }

    fn store() -> (tempfile::TempDir, Embedded) {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(&dir.path().join("store.redb")).unwrap();
        (dir, store)
    }

    #[tokio::test]
    async fn commits_are_all_or_nothing_and_survive_reopening() {
        let (dir, store) = store();
        let first = vec![put("a/1", Expect::Absent, "x"), put("a/2", Expect::Absent, "y")];
        let one = store.commit(first).await.unwrap();
        let both = vec![put("a/1", Expect::At(one), "z"), put("a/2", Expect::Absent, "z")];
        let refused = store.commit(both).await.unwrap_err();
        assert_eq!(refused, MetaError::Changed { key: "a/2".into() });
        assert_eq!(store.get("a/1").await.unwrap().unwrap().value, b"x");
        drop(store);
        let store = Embedded::open(&dir.path().join("store.redb")).unwrap();
        let (entries, revision) = store.list("a/").await.unwrap();
        assert_eq!(revision, one);
        let keys: Vec<_> = entries.iter().map(|e| e.key.as_str()).collect();
        assert_eq!(keys, ["a/1", "a/2"]);
        let gone = Change { key: "a/1".into(), expect: Expect::At(one), value: None };
        let two = store.commit(vec![gone]).await.unwrap();
        assert!(two > one);
        assert_eq!(store.get("a/1").await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_list_stops_at_the_end_of_its_prefix() {
        let (_dir, store) = store();
        let all = ["a", "a/1", "a/2", "a0", "b"];
        store.commit(all.iter().map(|k| put(k, Expect::Absent, "")).collect()).await.unwrap();
        let (entries, _) = store.list("a/").await.unwrap();
        assert_eq!(entries.len(), 2);
    }

    #[tokio::test]
    async fn followers_see_every_change_in_order() {
        let (_dir, store) = store();
        let one = store.commit(vec![put("v/1", Expect::Absent, "")]).await.unwrap();
        let mut late = store.watch("v/", one);
        let mut early = store.watch("v/", Revision(0));
        store.commit(vec![put("other", Expect::Absent, "")]).await.unwrap();
        let gone = Change { key: "v/1".into(), expect: Expect::At(one), value: None };
        let three = store.commit(vec![gone]).await.unwrap();
        assert_eq!(early.next().await.unwrap().revision, one);
        let removal = Event { key: "v/1".into(), removed: true, revision: three };
        assert_eq!(early.next().await.unwrap(), removal);
        assert_eq!(late.next().await.unwrap(), removal);
        let waiting = tokio::spawn(async move { late.next().await });
        tokio::task::yield_now().await;
        store.commit(vec![put("v/2", Expect::Absent, "")]).await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap().key, "v/2");
    }

    #[tokio::test]
    async fn a_follower_that_is_too_slow_is_told() {
        let (_dir, store) = store();
        let mut watch = store.watch("", Revision(0));
        let many =
            |from: usize| (from..from + HISTORY).map(|i| put(&i.to_string(), Expect::Absent, ""));
        store.commit(many(0).collect()).await.unwrap();
        store.commit(many(HISTORY).collect()).await.unwrap();
        let refused = watch.next().await.unwrap_err();
        assert_eq!(refused, MetaError::Compacted { after: Revision(0) });
    }

    #[test]
    fn only_the_owner_may_read_it() {
        let (dir, _store) = store();
        let meta = fs::metadata(dir.path().join("store.redb")).unwrap();
        assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_store_of_a_newer_version_is_refused() {
        let (dir, store) = store();
        let write = store.0.database.begin_write().unwrap();
        write.open_table(FACTS).unwrap().insert(FORMAT_FACT, FORMAT + 1).unwrap();
        write.commit().unwrap();
        drop(store);
        let path = dir.path().join("store.redb");
        let refused = Embedded::open(&path).unwrap_err();
        assert!(matches!(refused, MetaError::Newer { found: 2, known: 1, .. }), "{refused}");
        assert!(refused.to_string().contains("has format 2, this version knows up to 1"));
    }

    #[test]
    fn damaged_and_half_made_stores_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        fs::write(path.with_extension("new"), b"half made").unwrap();
        Embedded::open(&path).unwrap();
        fs::write(&path, b"this is no store").unwrap();
        let refused = Embedded::open(&path).unwrap_err().to_string();
        assert!(refused.contains("store.redb failed:"), "{refused}");
    }

    #[test]
    fn a_store_that_cannot_be_looked_at_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (path, away) = (dir.path().join("store.redb"), dir.path().join("not mounted/store"));
        std::os::unix::fs::symlink(&away, &path).unwrap();
        let refused = Embedded::open(&path).unwrap_err().to_string();
        assert!(refused.contains("store.redb failed:"), "{refused}");
        assert!(fs::symlink_metadata(&path).unwrap().is_symlink());
    }
}

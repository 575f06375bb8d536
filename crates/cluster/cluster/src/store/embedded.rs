//! The metadata store of a standalone node: a file of its own, using `redb`.
//!
//! * Commits are durable when they return. The file is created under a temporary name and renamed
//!   once complete, so that a crash leaves a whole store or none. It holds secrets: only its owner
//!   may read it.
//! * Every page is checked when the store is opened, and every record when it is read.
//! * Panics of the library become store errors (`database.rs`).
//! * After a disk error the next call reopens the store: it recovers by itself once the disk works.
//!   Space is reserved, so that records can be removed when the file system is full
//!   (`store_file.rs`).

mod database;
mod store_file;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use tokio::sync::watch;

use super::{
    Change, ChangeEvent, Entry, MetadataStore, Revision, StoreError, StoreFuture, StoreProblem,
    Watcher, checksummed,
};
use database::{DatabaseError, StoreDatabase, StoreHeader};

pub use database::is_catching_panics;

/// Format of the store's contents. Stores of other formats are refused.
pub const FORMAT: u64 = 3;

/// Changes kept for watchers.
const MAX_HISTORY_EVENTS: usize = 4096;

/// The store. Cheap to clone.
#[derive(Clone)]
pub struct EmbeddedStore(Arc<EmbeddedInner>);

struct EmbeddedInner {
    path: PathBuf,
    /// `None` after an error, until it is reopened.
    database: RwLock<Option<StoreDatabase>>,
    /// Serialises commits.
    commit_lock: Mutex<()>,
    history: Mutex<History>,
    latest_revision: watch::Sender<Revision>,
    /// Why no space is reserved, if so.
    space_error: Mutex<Option<String>>,
}

/// The latest changes, oldest first.
struct History {
    events: VecDeque<ChangeEvent>,
    /// `events` holds every change after this revision.
    complete_after: Revision,
}

impl std::fmt::Debug for EmbeddedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedded").field("path", &self.0.path).finish_non_exhaustive()
    }
}

impl EmbeddedStore {
    /// Opens the store at `path`, or creates it. Blocks.
    ///
    /// # Errors
    /// [`StoreError::UnsupportedFormat`] for an unknown format, [`StoreError::Damaged`] for damaged
    /// contents, [`StoreError::Failed`] for everything else: no permission, no space.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        match fs::symlink_metadata(path) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                StoreDatabase::create(path, FORMAT).map_err(|why| to_store_error(path, why))?;
            }
            // A store may exist: creating one would lose it.
            Err(e) => return Err(to_store_error(path, e.into())),
        }
        Self::open_existing(path)
    }

    /// Opens the existing store at `path`. Blocks.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_existing(path: &Path) -> Result<Self, StoreError> {
        let (database, header) = open_checked(path)?;
        let space_error = database.file().reserve_space().err().map(|e| e.to_string());
        let history = History { events: VecDeque::new(), complete_after: header.revision };
        Ok(Self(Arc::new(EmbeddedInner {
            path: path.to_owned(),
            database: RwLock::new(Some(database)),
            commit_lock: Mutex::new(()),
            history: Mutex::new(history),
            latest_revision: watch::Sender::new(header.revision),
            space_error: Mutex::new(space_error),
        })))
    }

    /// The revision of the last commit.
    #[must_use]
    pub fn revision(&self) -> Revision {
        *self.0.latest_revision.borrow()
    }

    /// Runs `f` on a thread that may block.
    fn run_blocking<T, F>(&self, f: F) -> StoreFuture<'_, T>
    where
        F: FnOnce(&EmbeddedInner) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let path = inner.path.clone();
            let ended = tokio::task::spawn_blocking(move || f(&inner)).await;
            ended.unwrap_or_else(|e| {
                Err(StoreError::Failed { path: path.display().to_string(), why: e.to_string() })
            })
        })
    }
}

fn to_store_error(path: &Path, why: DatabaseError) -> StoreError {
    let path = path.display().to_string();
    match why {
        DatabaseError::Io { why, .. } => StoreError::Failed { path, why },
        DatabaseError::Damaged(why) => StoreError::Damaged { path, why },
    }
}

/// Opens and checks a store of this format, and makes both of the library's saved states hold the
/// acknowledged revision.
fn open_checked(path: &Path) -> Result<(StoreDatabase, StoreHeader), StoreError> {
    let database = StoreDatabase::open(path).map_err(|why| to_store_error(path, why))?;
    let check = || {
        let header = database.read_header()?;
        if header.format == FORMAT {
            // Check now what a later list would read.
            database.list("")?;
            match database.confirm_revision(header.revision) {
                // A failure loses nothing, as long as nothing else breaks.
                Ok(()) | Err(DatabaseError::Io { .. }) => {}
                Err(damaged) => return Err(damaged),
            }
        }
        Ok(header)
    };
    match check() {
        Ok(header) if header.format == FORMAT => Ok((database, header)),
        Ok(StoreHeader { format, .. }) => {
            database.abandon();
            let path = path.display().to_string();
            Err(StoreError::UnsupportedFormat { path, found: format, supported: FORMAT })
        }
        Err(why) => {
            database.abandon();
            Err(to_store_error(path, why))
        }
    }
}

impl EmbeddedInner {
    /// Reopens the store if an error has closed it.
    fn reopen_if_failed(&self) -> Result<(), StoreError> {
        if self.database.read().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Ok(());
        }
        let mut slot = self.database.write().unwrap_or_else(PoisonError::into_inner);
        if slot.is_some() {
            return Ok(());
        }
        let (database, header) = open_checked(&self.path)?;
        // The system may report a failed sync once and forget it.
        if let Err(e) = database.file().rewrite_all() {
            database.abandon();
            return Err(to_store_error(&self.path, e.into()));
        }
        let known = *self.latest_revision.borrow();
        if header.revision < known {
            database.abandon();
            let why = format!(
                "it is at revision {}, and was at revision {known} before",
                header.revision
            );
            return Err(to_store_error(&self.path, DatabaseError::Damaged(why)));
        }
        tracing::info!(store = %self.path.display(), "store works again");
        *slot = Some(database);
        if header.revision > known {
            // A failed commit took effect after all: make watchers list again.
            let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
            history.events.clear();
            history.complete_after = header.revision;
            drop(history);
            self.latest_revision.send_replace(header.revision);
        }
        Ok(())
    }

    /// Runs `what` on the database. On failure closes the store; the next call reopens it.
    fn with_database<T>(
        &self,
        operation: impl FnOnce(&StoreDatabase) -> Result<T, DatabaseError>,
    ) -> Result<T, StoreError> {
        self.reopen_if_failed()?;
        let failed = |why| Err(to_store_error(&self.path, why));
        let result = {
            let guard = self.database.read().unwrap_or_else(PoisonError::into_inner);
            let Some(database) = &*guard else {
                let why = "another operation failed at the same time".to_owned();
                return failed(DatabaseError::Io { why, full: false });
            };
            operation(database)
        };
        let Err(why) = result else { return result.map_err(|why| to_store_error(&self.path, why)) };
        tracing::warn!(store = %self.path.display(), ?why, "store failed; reopening it");
        let database = self.database.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(database) = database {
            database.abandon();
        }
        failed(why)
    }

    /// Runs a read, with one retry after the store was reopened.
    fn read_with_retry<T>(
        &self,
        operation: impl Fn(&StoreDatabase) -> Result<T, DatabaseError>,
    ) -> Result<T, StoreError> {
        match self.with_database(&operation) {
            Err(StoreError::Failed { .. }) => self.with_database(&operation),
            result => result,
        }
    }

    fn commit(&self, changes: &[Change]) -> Result<Revision, StoreError> {
        super::validate_changes(&self.path.display().to_string(), changes)?;
        // Taken before the commit, so that watchers see commits in order. The history's lock would
        // not do: watchers must not block, and would wait for the disk.
        let _guard = self.commit_lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.reopen_if_failed()?;
        let before = *self.latest_revision.borrow();
        let write = |database: &StoreDatabase| database.write(changes);
        let result = match self.with_database(write) {
            Err(failed @ StoreError::Failed { .. }) => {
                // After reopening, the revision says whether the commit took effect.
                self.reopen_if_failed()?;
                let now = *self.latest_revision.borrow();
                if now > before {
                    return Ok(now);
                }
                self.with_database(write).map_err(|_| failed)?
            }
            other => other?,
        };
        let revision = result.map_err(|key| StoreError::Conflict { key })?;
        self.publish_events(changes, revision);
        // The commit is durable already. The next call finds a failure here.
        let _ = self.with_database(|database| database.confirm_revision(revision));
        self.reserve_space();
        Ok(revision)
    }

    /// Publishes a commit to watchers.
    fn publish_events(&self, changes: &[Change], revision: Revision) {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        for change in changes.iter().filter(|c| !c.is_guard()) {
            let removed = change.value.is_none();
            history.events.push_back(ChangeEvent {
                key: change.key.clone(),
                is_removal: removed,
                revision,
            });
        }
        while history.events.len() > MAX_HISTORY_EVENTS {
            if let Some(event) = history.events.pop_front() {
                history.complete_after = event.revision;
            }
        }
        drop(history);
        self.latest_revision.send_replace(revision);
    }

    /// Reserves space for the next commits, and records a failure.
    fn reserve_space(&self) {
        let guard = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let Some(database) = &*guard else { return };
        let space_error = database.file().reserve_space().err().map(|e| e.to_string());
        *self.space_error.lock().unwrap_or_else(PoisonError::into_inner) = space_error;
    }

    /// The store's problem, after an attempt to repair it.
    fn problem(&self) -> Option<StoreProblem> {
        if let Err(error) = self.reopen_if_failed() {
            return Some(match error {
                StoreError::Damaged { .. } | StoreError::UnsupportedFormat { .. } => {
                    StoreProblem::Damaged(error.to_string())
                }
                error => StoreProblem::Failing(error.to_string()),
            });
        }
        self.reserve_space();
        let space_error = self.space_error.lock().unwrap_or_else(PoisonError::into_inner);
        space_error.clone().map(StoreProblem::NoSpace)
    }
}

impl MetadataStore for EmbeddedStore {
    fn get(&self, key: &str) -> StoreFuture<'_, Option<Entry>> {
        let key = key.to_owned();
        self.run_blocking(move |inner| inner.read_with_retry(|database| database.get(&key)))
    }

    fn list(&self, prefix: &str) -> StoreFuture<'_, (Vec<Entry>, Revision)> {
        let prefix = prefix.to_owned();
        self.run_blocking(move |inner| inner.read_with_retry(|database| database.list(&prefix)))
    }

    fn commit(&self, changes: Vec<Change>) -> StoreFuture<'_, Revision> {
        self.run_blocking(move |inner| inner.commit(&changes))
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watcher> {
        let newest = self.0.latest_revision.subscribe();
        let (store, prefix) = (Arc::downgrade(&self.0), prefix.to_owned());
        Box::new(EmbeddedWatcher {
            store,
            prefix,
            latest_revision: newest,
            last_seen: after,
            pending_events: VecDeque::new(),
        })
    }

    fn problem(&self) -> StoreFuture<'_, Option<StoreProblem>> {
        self.run_blocking(|inner| Ok(inner.problem()))
    }
}

/// Watches a prefix. Ends with the store.
struct EmbeddedWatcher {
    store: std::sync::Weak<EmbeddedInner>,
    prefix: String,
    latest_revision: watch::Receiver<Revision>,
    /// Every commit up to this one was processed.
    last_seen: Revision,
    pending_events: VecDeque<ChangeEvent>,
}

impl EmbeddedWatcher {
    /// Collects what was committed since [`Self::last_seen`].
    fn catch_up(&mut self) -> Result<(), StoreError> {
        let ended = || StoreError::Failed { path: String::new(), why: "it was closed".into() };
        let store = self.store.upgrade().ok_or_else(ended)?;
        let history = store.history.lock().unwrap_or_else(PoisonError::into_inner);
        if self.last_seen < history.complete_after {
            return Err(StoreError::Compacted { after: self.last_seen });
        }
        let fresh = history.events.iter().filter(|e| e.revision > self.last_seen);
        self.pending_events.extend(fresh.filter(|e| e.key.starts_with(&self.prefix)).cloned());
        let last = history.events.back().map_or(self.last_seen, |e| e.revision);
        self.last_seen = self.last_seen.max(last);
        Ok(())
    }
}

impl Watcher for EmbeddedWatcher {
    fn next_event(&mut self) -> StoreFuture<'_, ChangeEvent> {
        Box::pin(async move {
            loop {
                if let Some(event) = self.pending_events.pop_front() {
                    return Ok(event);
                }
                self.latest_revision.borrow_and_update();
                self.catch_up()?;
                if self.pending_events.is_empty() && self.latest_revision.changed().await.is_err() {
                    self.catch_up()?;
                }
            }
        })
    }
}

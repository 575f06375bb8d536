//! The store of a single node: a file of its own, by `redb`.
//!
//! * Commits are durable when they return. The file is made beside its name and renamed once it is
//!   whole, so that a crash leaves a store or none. It holds secrets: only its owner may read it.
//! * Every page is checked when the store is opened, and every record when it is read.
//! * What the library panics with is an error of the store (`library.rs`).
//! * After an error of the disk the store is opened anew by the next call: nothing stays broken that
//!   works again. Room is taken ahead, so that records can be removed when the file system is full
//!   (`file.rs`).

mod file;
mod library;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use tokio::sync::watch;

use super::{Answer, Change, Entry, Event, Meta, MetaError, Revision, Trouble, Watch, sealed};
use library::{Facts, Failure, Library};

pub use library::is_contained;

/// Format of what the store holds. A store of another one is refused.
pub const FORMAT: u64 = 3;

/// Changes kept for followers.
const HISTORY: usize = 4096;

/// The store. Cheap to clone.
#[derive(Clone)]
pub struct Embedded(Arc<Inner>);

struct Inner {
    path: PathBuf,
    /// `None` after an error, until it is opened anew.
    library: RwLock<Option<Library>>,
    /// One commit at a time.
    commits: Mutex<()>,
    history: Mutex<History>,
    newest: watch::Sender<Revision>,
    /// Why there is no room ahead, if there is none.
    cramped: Mutex<Option<String>>,
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
    /// [`MetaError::Format`] for a store that this version does not understand,
    /// [`MetaError::Damaged`] for one that cannot be believed, [`MetaError::Failed`] for everything
    /// else: no permission, no space.
    pub fn open(path: &Path) -> Result<Self, MetaError> {
        match fs::symlink_metadata(path) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Library::create(path, FORMAT).map_err(|why| error(path, why))?;
            }
            // Whether there is a store is not known: a fresh one in its place would lose it.
            Err(e) => return Err(error(path, e.into())),
        }
        Self::open_existing(path)
    }

    /// Opens the store at `path`, which has to be there. Blocks.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_existing(path: &Path) -> Result<Self, MetaError> {
        let (library, facts) = ready(path)?;
        let cramped = library.file().reserve().err().map(|e| e.to_string());
        let history = History { events: VecDeque::new(), complete_after: facts.revision };
        Ok(Self(Arc::new(Inner {
            path: path.to_owned(),
            library: RwLock::new(Some(library)),
            commits: Mutex::new(()),
            history: Mutex::new(history),
            newest: watch::Sender::new(facts.revision),
            cramped: Mutex::new(cramped),
        })))
    }

    /// The number of the last commit.
    #[must_use]
    pub fn revision(&self) -> Revision {
        *self.0.newest.borrow()
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

fn error(path: &Path, why: Failure) -> MetaError {
    let path = path.display().to_string();
    match why {
        Failure::Io { why, .. } => MetaError::Failed { path, why },
        Failure::Damaged(why) => MetaError::Damaged { path, why },
    }
}

/// A store that is whole and of this format, with both states that the library keeps of it alike.
fn ready(path: &Path) -> Result<(Library, Facts), MetaError> {
    let library = Library::open(path).map_err(|why| error(path, why))?;
    let look = || {
        let facts = library.facts()?;
        if facts.format == FORMAT {
            // What cannot be listed now cannot be served later.
            library.list("")?;
            match library.echo(facts.revision) {
                // Nothing is lost without, as long as nothing else breaks.
                Ok(()) | Err(Failure::Io { .. }) => {}
                Err(damaged) => return Err(damaged),
            }
        }
        Ok(facts)
    };
    match look() {
        Ok(facts) if facts.format == FORMAT => Ok((library, facts)),
        Ok(Facts { format, .. }) => {
            library.give_up();
            let path = path.display().to_string();
            Err(MetaError::Format { path, found: format, known: FORMAT })
        }
        Err(why) => {
            library.give_up();
            Err(error(path, why))
        }
    }
}

impl Inner {
    /// Opens the store anew if an error has closed it.
    fn heal(&self) -> Result<(), MetaError> {
        if self.library.read().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Ok(());
        }
        let mut held = self.library.write().unwrap_or_else(PoisonError::into_inner);
        if held.is_some() {
            return Ok(());
        }
        let (library, facts) = ready(&self.path)?;
        // A failed sync may have been told once and forgotten.
        if let Err(e) = library.file().rewrite() {
            library.give_up();
            return Err(error(&self.path, e.into()));
        }
        let known = *self.newest.borrow();
        if facts.revision < known {
            library.give_up();
            let why =
                format!("it is at revision {}, and was at revision {known} before", facts.revision);
            return Err(error(&self.path, Failure::Damaged(why)));
        }
        tracing::info!(store = %self.path.display(), "the store works again");
        *held = Some(library);
        if facts.revision > known {
            // A commit that failed has happened all the same: followers list again.
            let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
            history.events.clear();
            history.complete_after = facts.revision;
            drop(history);
            self.newest.send_replace(facts.revision);
        }
        Ok(())
    }

    /// Has the library do something. A store that fails is closed, and opened anew by the next call.
    fn call<T>(&self, what: impl FnOnce(&Library) -> Result<T, Failure>) -> Result<T, MetaError> {
        self.heal()?;
        let failed = |why| Err(error(&self.path, why));
        let done = {
            let held = self.library.read().unwrap_or_else(PoisonError::into_inner);
            let Some(library) = &*held else {
                let why = "it has failed for somebody else at the same time".to_owned();
                return failed(Failure::Io { why, full: false });
            };
            what(library)
        };
        let Err(why) = done else { return done.map_err(|why| error(&self.path, why)) };
        tracing::warn!(store = %self.path.display(), ?why, "the store has failed; it is opened anew");
        let library = self.library.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(library) = library {
            library.give_up();
        }
        failed(why)
    }

    /// Reads something, with one more try where the store has been opened anew.
    fn read<T>(&self, what: impl Fn(&Library) -> Result<T, Failure>) -> Result<T, MetaError> {
        match self.call(&what) {
            Err(MetaError::Failed { .. }) => self.call(&what),
            done => done,
        }
    }

    fn commit(&self, changes: &[Change]) -> Result<Revision, MetaError> {
        super::check(&self.path.display().to_string(), changes)?;
        // Held from before the commit, so that followers see commits in their order. Not the history's own lock: a
        // follower, which must not block, would wait with it for the disk.
        let _turn = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        self.heal()?;
        let before = *self.newest.borrow();
        let write = |library: &Library| library.write(changes);
        let done = match self.call(write) {
            Err(failed @ MetaError::Failed { .. }) => {
                // What is there after opening anew says whether it has happened.
                self.heal()?;
                let now = *self.newest.borrow();
                if now > before {
                    return Ok(now);
                }
                self.call(write).map_err(|_| failed)?
            }
            other => other?,
        };
        let revision = done.map_err(|key| MetaError::Changed { key })?;
        self.tell(changes, revision);
        // It is durable already. What fails here is found by the next call.
        let _ = self.call(|library| library.echo(revision));
        self.take_room();
        Ok(revision)
    }

    /// Tells followers of a commit.
    fn tell(&self, changes: &[Change], revision: Revision) {
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
    }

    /// Sees to it that the next commits have room, and notes whether they have.
    fn take_room(&self) {
        let held = self.library.read().unwrap_or_else(PoisonError::into_inner);
        let Some(library) = &*held else { return };
        let cramped = library.file().reserve().err().map(|e| e.to_string());
        *self.cramped.lock().unwrap_or_else(PoisonError::into_inner) = cramped;
    }

    /// What is wrong with the store now, after a try to mend it.
    fn trouble(&self) -> Option<Trouble> {
        if let Err(error) = self.heal() {
            return Some(match error {
                MetaError::Damaged { .. } | MetaError::Format { .. } => {
                    Trouble::Damaged(error.to_string())
                }
                error => Trouble::Failing(error.to_string()),
            });
        }
        self.take_room();
        let cramped = self.cramped.lock().unwrap_or_else(PoisonError::into_inner);
        cramped.clone().map(Trouble::NoRoom)
    }
}

impl Meta for Embedded {
    fn get(&self, key: &str) -> Answer<'_, Option<Entry>> {
        let key = key.to_owned();
        self.run(move |inner| inner.read(|library| library.get(&key)))
    }

    fn list(&self, prefix: &str) -> Answer<'_, (Vec<Entry>, Revision)> {
        let prefix = prefix.to_owned();
        self.run(move |inner| inner.read(|library| library.list(&prefix)))
    }

    fn commit(&self, changes: Vec<Change>) -> Answer<'_, Revision> {
        self.run(move |inner| inner.commit(&changes))
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watch> {
        let newest = self.0.newest.subscribe();
        let (store, prefix) = (Arc::downgrade(&self.0), prefix.to_owned());
        Box::new(Follower { store, prefix, newest, seen: after, ready: VecDeque::new() })
    }

    fn trouble(&self) -> Answer<'_, Option<Trouble>> {
        self.run(|inner| Ok(inner.trouble()))
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

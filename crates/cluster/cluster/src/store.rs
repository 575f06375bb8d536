//! The metadata store: the durable records of a node or a cluster.
//!
//! One interface with two back ends: a store in the node's own data directory ([`embedded`]), and a
//! cluster's ([`etcd`]). It offers what both can do: keys with revisions, reads of one key or of a
//! prefix, atomic commits with preconditions, and watches. Nothing is acknowledged before it is
//! durable. A third back end in memory, with fault injection, is for simulated clusters; all three
//! pass the same conformance suite.
//!
//! Every call ends within a bounded time. What an error means to the caller:
//!
//! | error | what has happened | what to do |
//! |---|---|---|
//! | [`StoreError::Conflict`] | nothing | read, decide again |
//! | [`StoreError::Unreachable`] | nothing | try later |
//! | [`StoreError::TlsRejected`] | nothing | tell an administrator; a retry does not help |
//! | [`StoreError::Indeterminate`] | the commit takes effect now, later or never | read until known |
//! | [`StoreError::Failed`] | the store is broken or refuses | tell an administrator |
//! | [`StoreError::Damaged`] | the stored data is damaged | tell an administrator |
//!
//! The back ends that store entries outside of this process add a checksum over key and contents
//! ([`checksummed`]): an [`Entry`] whose checksum is wrong reports that, and has no contents.

pub mod checksummed;
pub mod embedded;
pub mod etcd;
#[cfg(feature = "testing")]
pub mod memory;
pub mod store_format;

use std::fmt;
use std::future::Future;
use std::pin::Pin;

/// Number of a commit. Every commit has a higher one than all before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Its value; empty if damaged.
    pub value: Vec<u8>,
    /// The commit that wrote it.
    pub revision: Revision,
    /// Why the stored value is invalid, if it is.
    pub checksum_error: Option<checksummed::ChecksumError>,
}

impl Entry {
    /// An undamaged entry.
    #[must_use]
    pub fn new(key: impl Into<String>, value: impl Into<Vec<u8>>, revision: Revision) -> Self {
        Self { key: key.into(), value: value.into(), revision, checksum_error: None }
    }

    /// Decodes the stored bytes of an entry.
    fn from_stored(key: String, stored: &[u8], revision: Revision) -> Self {
        let (value, damage) = match checksummed::verify_checksum(&key, stored) {
            Ok(value) => (value.to_vec(), None),
            Err(damage) => (Vec::new(), Some(damage)),
        };
        Self { key, value, revision, checksum_error: damage }
    }

    /// The value.
    ///
    /// # Errors
    /// [`StoreError::Damaged`].
    pub fn contents(&self) -> Result<&[u8], StoreError> {
        match self.checksum_error {
            None => Ok(&self.value),
            Some(damage) => {
                Err(StoreError::Damaged { path: self.key.clone(), why: damage.to_string() })
            }
        }
    }
}

/// A problem of the store itself, whether or not it still answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreProblem {
    /// Its file system has no reserved space left: records can still be removed, few can be added.
    NoSpace(String),
    /// It fails; every call tries again.
    Failing(String),
    /// Its contents are damaged.
    Damaged(String),
}

/// The state of a key that a change requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precondition {
    /// The key does not exist.
    Absent,
    /// The key is as written by this commit.
    AtRevision(Revision),
    /// As [`Self::AtRevision`], without a change: a guard.
    GuardAtRevision(Revision),
}

impl Precondition {
    /// The revision the key must have; `None` if it must not exist.
    fn revision(self) -> Option<Revision> {
        match self {
            Self::Absent => None,
            Self::AtRevision(revision) | Self::GuardAtRevision(revision) => Some(revision),
        }
    }
}

/// A change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: String,
    /// The required state; otherwise the whole commit is refused.
    pub precondition: Precondition,
    /// Its new value; `None` removes the key.
    pub value: Option<Vec<u8>>,
}

impl Change {
    /// Whether it is a guard: no change, only a condition on the commit.
    fn is_guard(&self) -> bool {
        match self.precondition {
            Precondition::Absent => self.value.is_none(),
            Precondition::AtRevision(_) => false,
            Precondition::GuardAtRevision(_) => true,
        }
    }
}

/// A committed change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeEvent {
    /// The key.
    pub key: String,
    /// Whether it was removed.
    pub is_removal: bool,
    /// The commit.
    pub revision: Revision,
}

/// Why a store call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// A key did not meet its precondition. Nothing was changed: read it and decide again.
    #[error("{key} has changed meanwhile")]
    Conflict {
        /// The key.
        key: String,
    },
    /// The requested changes are no longer kept: list again, then watch from there.
    #[error("the changes after revision {after} are no longer available")]
    Compacted {
        /// The revision the watch was to start after.
        after: Revision,
    },
    /// The store was written by another version of the program.
    #[error(
        "the store {path} has format {found}, this version supports format {supported}; run the \
         version that wrote it"
    )]
    UnsupportedFormat {
        /// Where the store is.
        path: String,
        /// Its format.
        found: u64,
        /// The known format.
        supported: u64,
    },
    /// The store, or the value of a key, is damaged.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// The store, or the key.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// The store does not answer. Nothing was changed.
    #[error("the store {store} cannot be reached: {why}")]
    Unreachable {
        /// The store.
        store: String,
        /// The last error.
        why: String,
    },
    /// No member of the store was reachable, and at least one connection failed for a certificate.
    /// Nothing was changed.
    #[error("the store {store} cannot be reached: {why}")]
    TlsRejected {
        /// The store.
        store: String,
        /// The TLS error.
        why: String,
    },
    /// A commit was sent and not answered: it may take effect now, later or never. Read before
    /// deciding again; a later effect may still change what was read. Only a key that no longer
    /// meets its precondition is safe from it.
    #[error("the store {store} did not confirm a change, which may have been made: {why}")]
    Indeterminate {
        /// The store.
        store: String,
        /// The last error.
        why: String,
    },
    /// The store does not work, or refuses the call.
    #[error("the store {path} failed: {why}")]
    Failed {
        /// Where the store is.
        path: String,
        /// What went wrong.
        why: String,
    },
}

/// Refuses commits that no back end accepts: without changes, or with a key named twice.
fn validate_changes(store: &str, changes: &[Change]) -> Result<(), StoreError> {
    let refused = |why: String| Err(StoreError::Failed { path: store.to_owned(), why });
    let twice = |(i, c): &(usize, &Change)| changes[..*i].iter().any(|d| d.key == c.key);
    match changes.iter().enumerate().find(twice) {
        _ if changes.is_empty() => refused("a commit changes nothing".into()),
        Some((_, change)) => refused(format!("a commit names {} twice", change.key)),
        None => Ok(()),
    }
}

/// The future of a store call.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A metadata store.
pub trait MetadataStore: Send + Sync {
    /// Reads the entry of `key`.
    fn get(&self, key: &str) -> StoreFuture<'_, Option<Entry>>;

    /// All entries whose keys start with `prefix`, in key order, and the revision of the list.
    fn list(&self, prefix: &str) -> StoreFuture<'_, (Vec<Entry>, Revision)>;

    /// Applies all of `changes` or none; returns the revision. The commit is durable when answered.
    /// There must be at least one change, and no key twice. A change that requires a key to be
    /// absent and removes it is a guard, as is [`Precondition::GuardAtRevision`].
    ///
    /// After [`StoreError::Indeterminate`], or if the future is dropped, it may take effect at any
    /// time; after [`StoreError::Failed`] it may have happened. Read before deciding again.
    fn commit(&self, changes: Vec<Change>) -> StoreFuture<'_, Revision>;

    /// Watches keys that start with `prefix`, from the first change after `after`: each change
    /// once, in order, those of one commit in its order. Outages of the store delay the watch but
    /// do not end it.
    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watcher>;

    /// The store's own problem, after an attempt to repair it; connection problems do not count.
    fn problem(&self) -> StoreFuture<'_, Option<StoreProblem>>;
}

/// A stream of changes.
pub trait Watcher: Send {
    /// Waits for the next change.
    ///
    /// Fails with [`StoreError::Compacted`] if the watcher is too slow, or started too far back.
    fn next_event(&mut self) -> StoreFuture<'_, ChangeEvent>;
}

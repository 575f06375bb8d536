//! The metadata store: what a node knows, durably.
//!
//! One interface, made for two back ends: a store in the node's own data directory
//! ([`embedded`]), and a cluster's. It has what both can do: keys with revisions, reading one or
//! all under a prefix, changing several at once if none has changed meanwhile, and following
//! changes. Nothing is acknowledged before it is durable.

pub mod embedded;

use std::fmt;
use std::future::Future;
use std::pin::Pin;

/// Number of a change of the store. Every commit has a higher one than all before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A key and what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub key: String,
    /// Its contents.
    pub value: Vec<u8>,
    /// The commit that wrote it.
    pub revision: Revision,
}

/// What a change expects to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// No such key.
    Absent,
    /// The key as this commit wrote it.
    At(Revision),
}

/// A change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which key.
    pub key: String,
    /// What it must be, or the whole commit is refused.
    pub expect: Expect,
    /// Its new contents; `None` removes it.
    pub value: Option<Vec<u8>>,
}

/// A change that was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Which key.
    pub key: String,
    /// Whether it was removed.
    pub removed: bool,
    /// The commit.
    pub revision: Revision,
}

/// Why the store did not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetaError {
    /// A key was not what the commit expected. Nothing was changed: read it and decide again.
    #[error("{key} has changed meanwhile")]
    Changed {
        /// The key.
        key: String,
    },
    /// The changes asked for are not kept any more: list again, then follow from there.
    #[error("the changes after revision {after} are not kept any more")]
    Compacted {
        /// The revision to follow from.
        after: Revision,
    },
    /// The store was written by a newer version of the program.
    #[error(
        "the store {path} has format {found}, this version knows up to {known}; \
         run the version that wrote it, or a newer one"
    )]
    Newer {
        /// Where the store is.
        path: String,
        /// Its format.
        found: u64,
        /// The newest known format.
        known: u64,
    },
    /// The store does not work.
    #[error("the store {path} failed: {why}")]
    Failed {
        /// Where the store is.
        path: String,
        /// What went wrong.
        why: String,
    },
}

/// An answer to come.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, MetaError>> + Send + 'a>>;

/// A metadata store.
pub trait Meta: Send + Sync {
    /// What `key` holds.
    fn get(&self, key: &str) -> Answer<'_, Option<Entry>>;

    /// Everything whose key starts with `prefix`, in order of keys, and the revision it is of.
    fn list(&self, prefix: &str) -> Answer<'_, (Vec<Entry>, Revision)>;

    /// Makes all of `changes` or none of them. Durable when it is answered. A commit that failed
    /// ([`MetaError::Failed`]) may have happened: read before deciding again.
    fn commit(&self, changes: Vec<Change>) -> Answer<'_, Revision>;

    /// The changes of keys that start with `prefix`, from the one after `after` on.
    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watch>;
}

/// Changes as they come.
pub trait Watch: Send {
    /// The next change; waits for it.
    ///
    /// Fails with [`MetaError::Compacted`] when the follower is too slow, or began too far back.
    fn next(&mut self) -> Answer<'_, Event>;
}

//! The metadata store: what a node knows, durably.
//!
//! One interface, made for two back ends: a store in the node's own data directory
//! ([`embedded`]), and a cluster's ([`etcd`]). It has what both can do: keys with revisions,
//! reading one or all under a prefix, changing several at once if none has changed meanwhile, and
//! following changes. Nothing is acknowledged before it is durable. A third one in memory, with
//! whatever faults a test wants, is for simulated clusters; all three pass one suite.
//!
//! Every call ends within a bounded time, and says what the caller has to reckon with:
//!
//! | error | what has happened | what to do |
//! |---|---|---|
//! | [`MetaError::Changed`] | nothing | read, decide again |
//! | [`MetaError::Unreachable`] | nothing | try later |
//! | [`MetaError::Untrusted`] | nothing | tell a human; trying again does not help |
//! | [`MetaError::Unknown`] | the commit may take effect now, later or never | read until it is known |
//! | [`MetaError::Failed`] | the store is broken or refuses | tell a human |
//! | [`MetaError::Damaged`] | what was asked for cannot be believed | tell a human |
//!
//! What a key holds is sealed with a checksum over it and its key ([`sealed`]), by the back ends that
//! keep it outside of this process: an [`Entry`] whose checksum is wrong says so, and has no contents.

pub mod embedded;
pub mod etcd;
pub mod format;
#[cfg(feature = "testing")]
pub mod model;
pub mod sealed;

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
    /// Its contents; none of a damaged one.
    pub value: Vec<u8>,
    /// The commit that wrote it.
    pub revision: Revision,
    /// Why what the store has of it cannot be believed.
    pub damage: Option<sealed::Damage>,
}

impl Entry {
    /// An entry that is whole.
    #[must_use]
    pub fn new(key: impl Into<String>, value: impl Into<Vec<u8>>, revision: Revision) -> Self {
        Self { key: key.into(), value: value.into(), revision, damage: None }
    }

    /// The entry that a store keeps in these bytes.
    fn kept(key: String, kept: &[u8], revision: Revision) -> Self {
        let (value, damage) = match sealed::open(&key, kept) {
            Ok(value) => (value.to_vec(), None),
            Err(damage) => (Vec::new(), Some(damage)),
        };
        Self { key, value, revision, damage }
    }

    /// What it holds.
    ///
    /// # Errors
    /// [`MetaError::Damaged`].
    pub fn contents(&self) -> Result<&[u8], MetaError> {
        match self.damage {
            None => Ok(&self.value),
            Some(damage) => {
                Err(MetaError::Damaged { path: self.key.clone(), why: damage.to_string() })
            }
        }
    }
}

/// What is wrong with a store that still answers, or does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Its file system has no room ahead of it: records can still be removed, few can be added.
    NoRoom(String),
    /// It fails; it is tried again by every call.
    Failing(String),
    /// What it holds cannot be believed.
    Damaged(String),
}

/// What a change expects to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// No such key.
    Absent,
    /// The key as this commit wrote it.
    At(Revision),
    /// The same, and it stays: a condition only.
    Still(Revision),
}

impl Expect {
    /// The commit that must have written the key; `None` if there must be none.
    fn revision(self) -> Option<Revision> {
        match self {
            Self::Absent => None,
            Self::At(revision) | Self::Still(revision) => Some(revision),
        }
    }
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

impl Change {
    /// Whether it changes nothing, and only has the commit refused if the key is not as expected.
    fn is_condition(&self) -> bool {
        match self.expect {
            Expect::Absent => self.value.is_none(),
            Expect::At(_) => false,
            Expect::Still(_) => true,
        }
    }
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
    /// The store was written by another version of the program.
    #[error(
        "the store {path} has format {found}, this version knows format {known}; \
             run the version that wrote it"
    )]
    Format {
        /// Where the store is.
        path: String,
        /// Its format.
        found: u64,
        /// The known format.
        known: u64,
    },
    /// What the store holds, or has under a key, cannot be believed.
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
        /// Which store.
        store: String,
        /// What was seen last.
        why: String,
    },
    /// Nobody of the store could be spoken with, and at least one connection failed for a certificate.
    /// Nothing was changed.
    #[error("the store {store} cannot be reached: {why}")]
    Untrusted {
        /// Which store.
        store: String,
        /// What was wrong.
        why: String,
    },
    /// A commit was sent and not answered: it may take effect now, later or never. Read before
    /// deciding again, and know that what is read may still change by it: only a key that has
    /// moved past its expectation is safe from it.
    #[error("the store {store} did not say whether it took a change: {why}")]
    Unknown {
        /// Which store.
        store: String,
        /// What was seen last.
        why: String,
    },
    /// The store does not work, or refuses what it is asked for.
    #[error("the store {path} failed: {why}")]
    Failed {
        /// Where the store is.
        path: String,
        /// What went wrong.
        why: String,
    },
}

/// Refuses a commit that no store takes: one that changes nothing, or names a key twice.
fn check(store: &str, changes: &[Change]) -> Result<(), MetaError> {
    let refused = |why: String| Err(MetaError::Failed { path: store.to_owned(), why });
    let twice = |(i, c): &(usize, &Change)| changes[..*i].iter().any(|d| d.key == c.key);
    match changes.iter().enumerate().find(twice) {
        _ if changes.is_empty() => refused("a commit changes nothing".into()),
        Some((_, change)) => refused(format!("a commit names {} twice", change.key)),
        None => Ok(()),
    }
}

/// An answer to come.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, MetaError>> + Send + 'a>>;

/// A metadata store.
pub trait Meta: Send + Sync {
    /// What `key` holds.
    fn get(&self, key: &str) -> Answer<'_, Option<Entry>>;

    /// Everything whose key starts with `prefix`, in order of keys, and the revision it is of.
    fn list(&self, prefix: &str) -> Answer<'_, (Vec<Entry>, Revision)>;

    /// Makes all of `changes` or none of them, and says which commit that was. Durable when it is
    /// answered. There is at least one change and no key is named twice. A change that expects no
    /// key and removes it is a condition only, and so is [`Expect::Still`].
    ///
    /// After [`MetaError::Unknown`], or if nobody waits for the answer, it may take effect at any
    /// time; after [`MetaError::Failed`] it may have happened. Read before deciding again.
    fn commit(&self, changes: Vec<Change>) -> Answer<'_, Revision>;

    /// The changes of keys that start with `prefix`, from the one after `after` on: each once, in
    /// order, those of one commit as it named them. Outages of the store interrupt it, they do not end it.
    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watch>;

    /// What is wrong with the store itself, after a try to mend it; not with the way to it.
    fn trouble(&self) -> Answer<'_, Option<Trouble>>;
}

/// Changes as they come.
pub trait Watch: Send {
    /// The next change; waits for it.
    ///
    /// Fails with [`MetaError::Compacted`] when the follower is too slow, or began too far back.
    fn next(&mut self) -> Answer<'_, Event>;
}

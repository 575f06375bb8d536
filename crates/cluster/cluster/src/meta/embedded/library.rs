//! Every call into the library that keeps the store's file. It trusts what it reads, and panics on
//! some of what it should not have believed: nothing of that gets out of here.

use std::cell::Cell;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::file::StoreFile;
use super::{Change, Entry, Revision};

/// Keys: the commit that wrote them, and their contents.
const KEYS: TableDefinition<'_, &str, (u64, &[u8])> = TableDefinition::new("keys");

/// Facts about the store itself.
const FACTS: TableDefinition<'_, &str, u64> = TableDefinition::new("facts");

const FORMAT_FACT: &str = "format";
const REVISION_FACT: &str = "revision";
/// The revision again, in a transaction of its own ([`Library::echo`]).
const ECHO_FACT: &str = "echo";

/// Memory for cached pages, in bytes.
const CACHE: usize = 4 << 20;

/// What the file of a store begins with, and its shortest length.
const MAGIC: &[u8] = b"redb\x1a\n\xa9\r\n";

/// How often is looked whether a store is free, and how long is waited in between.
const BUSY_LOOKS: u32 = 20;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in a call whose panics are contained: they are errors of the store, and
/// the program is not wrong.
#[must_use]
pub fn is_contained() -> bool {
    CONTAINED.get()
}

/// What does not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The disk, or the file system: it may work again.
    Io { why: String, full: bool },
    /// What the file holds.
    Damaged(String),
}

impl Failure {
    pub(super) fn damaged(why: impl Into<String>) -> Self {
        Self::Damaged(why.into())
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        if e.kind() == io::ErrorKind::UnexpectedEof {
            return Self::damaged("the file ends before what it should hold");
        }
        let full = matches!(
            e.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        Self::Io { why: e.to_string(), full }
    }
}

impl From<redb::Error> for Failure {
    fn from(e: redb::Error) -> Self {
        match e {
            redb::Error::Io(e) => e.into(),
            redb::Error::PreviousIo | redb::Error::DatabaseClosed => {
                Self::Io { why: e.to_string(), full: false }
            }
            other => Self::Damaged(other.to_string()),
        }
    }
}

/// Calls the library, and makes an error of what it panics with.
fn contained<T>(call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let before = CONTAINED.replace(true);
    let done = catch_unwind(AssertUnwindSafe(call));
    CONTAINED.set(before);
    done.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        // The first line says what was found; the rest is for the library's authors.
        let text = text.lines().next().unwrap_or_default();
        Err(Failure::Damaged(format!("its pages contradict each other ({text})")))
    })
}

/// An open store.
#[derive(Debug)]
pub(super) struct Library {
    file: StoreFile,
    database: Option<Database>,
}

impl Drop for Library {
    fn drop(&mut self) {
        let database = self.database.take();
        let ended = contained(|| {
            drop(database);
            Ok(())
        });
        if let Err(why) = ended {
            tracing::warn!(?why, "the store was not closed in order");
        }
    }
}

/// What a store says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) format: u64,
    pub(super) revision: Revision,
}

/// Opens the file, and locks it. It may be held for a moment yet: a process that is just being
/// started has a copy of every open file until it runs its program.
fn lock(path: &Path, fresh: bool) -> Result<File, Failure> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(fresh).mode(0o600);
    let file = options.open(path)?;
    for look in 0.. {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if look < BUSY_LOOKS => pause(BUSY_PAUSE),
            Err(TryLockError::WouldBlock) => {
                let why = "another process uses it".to_owned();
                return Err(Failure::Io { why, full: false });
            }
            Err(TryLockError::Error(e)) => return Err(e.into()),
        }
    }
    Ok(file)
}

#[expect(clippy::disallowed_methods, reason = "whoever opens a store waits for its disk anyway")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Says in words what the library would say in numbers, or not at all.
fn check_head(file: &File) -> Result<(), Failure> {
    use std::os::unix::fs::FileExt;
    let len = file.metadata()?.len();
    if len == 0 {
        return Err(Failure::damaged("the file is empty: what it held is lost"));
    }
    let mut head = [0; MAGIC.len()];
    if len < head.len() as u64 {
        return Err(Failure::Damaged(format!("the file has {len} bytes, less than any store")));
    }
    file.read_exact_at(&mut head, 0)?;
    if head == [0; MAGIC.len()] {
        return Err(Failure::damaged("the file begins with zeroes: what it held is lost"));
    }
    if head != *MAGIC {
        return Err(Failure::damaged("the file does not begin as a store does"));
    }
    Ok(())
}

impl Library {
    /// Makes a store at `path`, where nothing is yet.
    pub(super) fn create(path: &Path, format: u64) -> Result<(), Failure> {
        let fresh = path.with_extension("new");
        match fs::remove_file(&fresh) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
            _ => {}
        }
        let library = Self::over(lock(&fresh, true)?)?;
        library.transaction(|write| {
            let mut facts = write.open_table(FACTS).map_err(redb::Error::from)?;
            for (name, value) in [(FORMAT_FACT, format), (REVISION_FACT, 0), (ECHO_FACT, 0)] {
                facts.insert(name, value).map_err(redb::Error::from)?;
            }
            write.open_table(KEYS).map_err(redb::Error::from)?;
            Ok(Some(()))
        })?;
        drop(library);
        fs::rename(&fresh, path)?;
        if let Some(dir) = path.parent() {
            File::open(dir)?.sync_all()?;
        }
        Ok(())
    }

    /// Opens the store at `path`, and looks at every page of it.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let file = lock(path, false)?;
        check_head(&file)?;
        let mut library = Self::over(file)?;
        contained(|| {
            let database = library.database.as_mut();
            let database = database.ok_or_else(|| Failure::damaged("it is closed"))?;
            // Whether something had to be set right does not matter: see `echo`.
            database.check_integrity().map(drop).map_err(|e| redb::Error::from(e).into())
        })?;
        Ok(library)
    }

    fn over(file: File) -> Result<Self, Failure> {
        let file = StoreFile::new(file)?;
        let backend = file.clone();
        let opened = contained(|| {
            let opened = Database::builder().set_cache_size(CACHE).create_with_backend(backend);
            opened.map_err(|e| redb::Error::from(e).into())
        });
        match opened {
            Ok(database) => Ok(Self { file, database: Some(database) }),
            Err(why) => {
                file.give_up();
                Err(why)
            }
        }
    }

    /// Lets go of the store without another write.
    pub(super) fn give_up(self) {
        self.file.give_up();
    }

    /// The file beneath.
    pub(super) fn file(&self) -> &StoreFile {
        &self.file
    }

    fn with<T>(
        &self,
        call: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, Failure> {
        contained(|| {
            let database = self.database.as_ref();
            let database = database.ok_or_else(|| Failure::damaged("it is closed"))?;
            Ok(call(database)?)
        })
    }

    /// A transaction that takes effect if `change` gives something.
    fn transaction<T>(
        &self,
        change: impl FnOnce(&redb::WriteTransaction) -> Result<Option<T>, redb::Error>,
    ) -> Result<Option<T>, Failure> {
        self.with(|database| {
            let write = database.begin_write()?;
            let Some(done) = change(&write)? else { return Ok(None) };
            write.commit()?;
            Ok(Some(done))
        })
    }

    /// What the store says of itself.
    pub(super) fn facts(&self) -> Result<Facts, Failure> {
        let (format, revision) = self.with(|database| {
            let read = database.begin_read()?;
            let facts = read.open_table(FACTS)?;
            let fact = |name| Ok::<_, redb::Error>(facts.get(name)?.map(|v| v.value()));
            Ok((fact(FORMAT_FACT)?, fact(REVISION_FACT)?))
        })?;
        let missing = |name: &str| Failure::Damaged(format!("the fact {name} is missing"));
        Ok(Facts {
            format: format.ok_or_else(|| missing(FORMAT_FACT))?,
            revision: Revision(revision.ok_or_else(|| missing(REVISION_FACT))?),
        })
    }

    /// A key as it is kept.
    pub(super) fn get(&self, key: &str) -> Result<Option<Entry>, Failure> {
        self.with(|database| {
            let read = database.begin_read()?;
            let found = read.open_table(KEYS)?.get(key)?;
            Ok(found.map(|v| entry(key, v.value())))
        })
    }

    /// The keys that start with `prefix`, as they are kept.
    pub(super) fn list(&self, prefix: &str) -> Result<(Vec<Entry>, Revision), Failure> {
        self.with(|database| {
            let read = database.begin_read()?;
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
        })
    }

    /// `Err` of the inner result is the key that was not as expected; nothing was written then.
    pub(super) fn write(&self, changes: &[Change]) -> Result<Result<Revision, String>, Failure> {
        let mut other = None;
        let written = self.transaction(|write| {
            let mut facts = write.open_table(FACTS)?;
            let revision = facts.get(REVISION_FACT)?.map_or(0, |v| v.value()).saturating_add(1);
            facts.insert(REVISION_FACT, revision)?;
            let mut keys = write.open_table(KEYS)?;
            for change in changes {
                let key = change.key.as_str();
                let found = keys.get(key)?.map(|v| Revision(v.value().0));
                if found != change.expect.revision() {
                    // Dropping the transaction takes everything back.
                    other = Some(change.key.clone());
                    return Ok(None);
                }
                if change.is_condition() {
                    continue;
                }
                match &change.value {
                    Some(value) => {
                        let kept = super::sealed::seal(key, value);
                        drop(keys.insert(key, (revision, kept.as_slice()))?);
                    }
                    None => drop(keys.remove(key)?),
                }
            }
            Ok(Some(Revision(revision)))
        })?;
        match (written, other) {
            (Some(revision), _) => Ok(Ok(revision)),
            (None, Some(key)) => Ok(Err(key)),
            (None, None) => Err(Failure::damaged("it took no change")),
        }
    }

    /// Commits once more without changing a record. The library keeps the last two states and goes
    /// back to the older one where the newer is damaged, or where a bit in its header says so. With
    /// this, both of them hold what was acknowledged.
    pub(super) fn echo(&self, revision: Revision) -> Result<(), Failure> {
        self.transaction(|write| {
            let mut facts = write.open_table(FACTS)?;
            let before = facts.get(ECHO_FACT)?.map(|v| v.value());
            // Something has to change, or nothing is committed.
            if before == Some(revision.0) {
                facts.insert(ECHO_FACT, u64::MAX)?;
            } else {
                facts.insert(ECHO_FACT, revision.0)?;
            }
            drop(facts);
            Ok(Some(()))
        })
        .map(drop)
    }

    /// Keeps other bytes under a key.
    #[cfg(test)]
    pub(super) fn write_raw(&self, key: &str, kept: &[u8]) {
        let set = self.transaction(|write| {
            let mut keys = write.open_table(KEYS)?;
            let revision = keys.get(key)?.map_or(0, |v| v.value().0);
            keys.insert(key, (revision, kept))?;
            drop(keys);
            Ok(Some(()))
        });
        set.unwrap();
    }

    /// Panics as the library does.
    #[cfg(test)]
    pub(super) fn panic(&self) -> Result<(), Failure> {
        self.with(|_| panic!("page 7 is not a page"))
    }

    /// Makes the store one of another format.
    #[cfg(test)]
    pub(super) fn set_format(&self, format: u64) {
        let set = self.transaction(|write| {
            write.open_table(FACTS)?.insert(FORMAT_FACT, format)?;
            Ok(Some(()))
        });
        set.unwrap();
    }
}

fn entry(key: &str, (revision, kept): (u64, &[u8])) -> Entry {
    Entry::kept(key.to_owned(), kept, Revision(revision))
}

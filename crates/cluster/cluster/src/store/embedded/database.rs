//! All calls into the library that keeps the store's file. The library trusts what it reads, and
//! panics on some damage: such panics are contained here.

use std::cell::Cell;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::store_file::StoreFile;
use super::{Change, Entry, Revision};

/// Keys: the revision that wrote them, and their stored values.
const KEYS_TABLE: TableDefinition<'_, &str, (u64, &[u8])> = TableDefinition::new("keys");

/// Facts about the store itself.
const HEADER_TABLE: TableDefinition<'_, &str, u64> = TableDefinition::new("facts");

const FORMAT_FIELD: &str = "format";
const REVISION_FIELD: &str = "revision";
/// The revision again, written in a second transaction ([`StoreDatabase::confirm_revision`]).
const CONFIRMED_REVISION_FIELD: &str = "echo";

/// Memory for cached pages, in bytes.
const CACHE_LEN: usize = 4 << 20;

/// Magic bytes at the start of a store's file, and its shortest length.
const MAGIC: &[u8] = b"redb\x1a\n\xa9\r\n";

/// How often a locked store is tried, and the pause between attempts.
const LOCK_ATTEMPTS: u32 = 20;
const LOCK_RETRY_PAUSE: Duration = Duration::from_millis(50);

thread_local! {
    static CATCHING_PANICS: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in a call whose panics are caught: they become store errors, and are no
/// bug of the program.
#[must_use]
pub fn is_catching_panics() -> bool {
    CATCHING_PANICS.get()
}

/// Why a call into the library failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DatabaseError {
    /// A disk or file system error, which may be temporary.
    Io { why: String, full: bool },
    /// The file's contents are damaged.
    Damaged(String),
}

impl DatabaseError {
    pub(super) fn damaged(why: impl Into<String>) -> Self {
        Self::Damaged(why.into())
    }
}

impl From<io::Error> for DatabaseError {
    fn from(e: io::Error) -> Self {
        if e.kind() == io::ErrorKind::UnexpectedEof {
            return Self::damaged("the file is truncated");
        }
        let full = matches!(
            e.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        Self::Io { why: e.to_string(), full }
    }
}

impl From<redb::Error> for DatabaseError {
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

/// Calls the library, and turns its panics into errors.
fn catch_panic<T>(call: impl FnOnce() -> Result<T, DatabaseError>) -> Result<T, DatabaseError> {
    let before = CATCHING_PANICS.replace(true);
    let done = catch_unwind(AssertUnwindSafe(call));
    CATCHING_PANICS.set(before);
    done.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        // The first line says what was found; the rest is for the library's authors.
        let text = text.lines().next().unwrap_or_default();
        Err(DatabaseError::Damaged(format!("its pages contradict each other ({text})")))
    })
}

/// An open store.
#[derive(Debug)]
pub(super) struct StoreDatabase {
    file: StoreFile,
    database: Option<Database>,
}

impl Drop for StoreDatabase {
    fn drop(&mut self) {
        let database = self.database.take();
        let ended = catch_panic(|| {
            drop(database);
            Ok(())
        });
        if let Err(why) = ended {
            tracing::warn!(?why, "store not closed cleanly");
        }
    }
}

/// The store's facts about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StoreHeader {
    pub(super) format: u64,
    pub(super) revision: Revision,
}

/// Opens and locks the file. The lock may be held a moment longer: a child process that is just
/// starting has a copy of every open file until it executes its program.
fn lock(path: &Path, fresh: bool) -> Result<File, DatabaseError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(fresh).mode(0o600);
    let file = options.open(path)?;
    for look in 0.. {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if look < LOCK_ATTEMPTS => {
                lock_retry_pause(LOCK_RETRY_PAUSE);
            }
            Err(TryLockError::WouldBlock) => {
                let why = "another process uses it".to_owned();
                return Err(DatabaseError::Io { why, full: false });
            }
            Err(TryLockError::Error(e)) => return Err(e.into()),
        }
    }
    Ok(file)
}

#[expect(clippy::disallowed_methods, reason = "opening a store waits for its disk anyway")]
fn lock_retry_pause(time: Duration) {
    std::thread::sleep(time);
}

/// Checks the file's magic bytes, with clearer errors than the library's.
fn check_magic(file: &File) -> Result<(), DatabaseError> {
    use std::os::unix::fs::FileExt;
    let len = file.metadata()?.len();
    if len == 0 {
        return Err(DatabaseError::damaged("the file is empty: its data is lost"));
    }
    let mut head = [0; MAGIC.len()];
    if len < head.len() as u64 {
        return Err(DatabaseError::Damaged(format!(
            "the file has {len} bytes, less than any store"
        )));
    }
    file.read_exact_at(&mut head, 0)?;
    if head == [0; MAGIC.len()] {
        return Err(DatabaseError::damaged("the file begins with zeroes: its data is lost"));
    }
    if head != *MAGIC {
        return Err(DatabaseError::damaged("the file is not a store"));
    }
    Ok(())
}

impl StoreDatabase {
    /// Creates a store at `path`, where no file exists.
    pub(super) fn create(path: &Path, format: u64) -> Result<(), DatabaseError> {
        let fresh = path.with_extension("new");
        match fs::remove_file(&fresh) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
            _ => {}
        }
        let store = Self::open_file(lock(&fresh, true)?)?;
        store.transaction(|write| {
            let mut header = write.open_table(HEADER_TABLE).map_err(redb::Error::from)?;
            for (name, value) in
                [(FORMAT_FIELD, format), (REVISION_FIELD, 0), (CONFIRMED_REVISION_FIELD, 0)]
            {
                header.insert(name, value).map_err(redb::Error::from)?;
            }
            write.open_table(KEYS_TABLE).map_err(redb::Error::from)?;
            Ok(Some(()))
        })?;
        drop(store);
        fs::rename(&fresh, path)?;
        if let Some(dir) = path.parent() {
            File::open(dir)?.sync_all()?;
        }
        Ok(())
    }

    /// Opens the store at `path`, and checks every page.
    pub(super) fn open(path: &Path) -> Result<Self, DatabaseError> {
        let file = lock(path, false)?;
        check_magic(&file)?;
        let mut store = Self::open_file(file)?;
        catch_panic(|| {
            let database = store.database.as_mut();
            let database = database.ok_or_else(|| DatabaseError::damaged("it is closed"))?;
            // It does not matter whether something was repaired: see `confirm_revision`.
            database.check_integrity().map(drop).map_err(|e| redb::Error::from(e).into())
        })?;
        Ok(store)
    }

    fn open_file(file: File) -> Result<Self, DatabaseError> {
        let file = StoreFile::new(file)?;
        let backend = file.clone();
        let opened = catch_panic(|| {
            let opened = Database::builder().set_cache_size(CACHE_LEN).create_with_backend(backend);
            opened.map_err(|e| redb::Error::from(e).into())
        });
        match opened {
            Ok(database) => Ok(Self { file, database: Some(database) }),
            Err(why) => {
                file.abandon();
                Err(why)
            }
        }
    }

    /// Closes the store without another write.
    pub(super) fn abandon(self) {
        self.file.abandon();
    }

    /// The file beneath.
    pub(super) fn file(&self) -> &StoreFile {
        &self.file
    }

    fn with_database<T>(
        &self,
        call: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, DatabaseError> {
        catch_panic(|| {
            let database = self.database.as_ref();
            let database = database.ok_or_else(|| DatabaseError::damaged("it is closed"))?;
            Ok(call(database)?)
        })
    }

    /// A transaction that commits if `change` returns a value.
    fn transaction<T>(
        &self,
        change: impl FnOnce(&redb::WriteTransaction) -> Result<Option<T>, redb::Error>,
    ) -> Result<Option<T>, DatabaseError> {
        self.with_database(|database| {
            let write = database.begin_write()?;
            let Some(done) = change(&write)? else { return Ok(None) };
            write.commit()?;
            Ok(Some(done))
        })
    }

    /// Reads the store's header.
    pub(super) fn read_header(&self) -> Result<StoreHeader, DatabaseError> {
        let (format, revision) = self.with_database(|database| {
            let read = database.begin_read()?;
            let header = read.open_table(HEADER_TABLE)?;
            let field = |name| Ok::<_, redb::Error>(header.get(name)?.map(|v| v.value()));
            Ok((field(FORMAT_FIELD)?, field(REVISION_FIELD)?))
        })?;
        let missing = |name: &str| DatabaseError::Damaged(format!("the fact {name} is missing"));
        Ok(StoreHeader {
            format: format.ok_or_else(|| missing(FORMAT_FIELD))?,
            revision: Revision(revision.ok_or_else(|| missing(REVISION_FIELD))?),
        })
    }

    /// Reads a key.
    pub(super) fn get(&self, key: &str) -> Result<Option<Entry>, DatabaseError> {
        self.with_database(|database| {
            let read = database.begin_read()?;
            let found = read.open_table(KEYS_TABLE)?.get(key)?;
            Ok(found.map(|v| entry(key, v.value())))
        })
    }

    /// The keys that start with `prefix`.
    pub(super) fn list(&self, prefix: &str) -> Result<(Vec<Entry>, Revision), DatabaseError> {
        self.with_database(|database| {
            let read = database.begin_read()?;
            let keys = read.open_table(KEYS_TABLE)?;
            let revision =
                read.open_table(HEADER_TABLE)?.get(REVISION_FIELD)?.map_or(0, |v| v.value());
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

    /// Applies `changes`. The inner `Err` is the key that did not meet its precondition; then
    /// nothing was written.
    pub(super) fn write(
        &self,
        changes: &[Change],
    ) -> Result<Result<Revision, String>, DatabaseError> {
        let mut conflict = None;
        let written = self.transaction(|write| {
            let mut header = write.open_table(HEADER_TABLE)?;
            let revision = header.get(REVISION_FIELD)?.map_or(0, |v| v.value()).saturating_add(1);
            header.insert(REVISION_FIELD, revision)?;
            let mut keys = write.open_table(KEYS_TABLE)?;
            for change in changes {
                let key = change.key.as_str();
                let found = keys.get(key)?.map(|v| Revision(v.value().0));
                if found != change.precondition.revision() {
                    // Dropping the transaction aborts it.
                    conflict = Some(change.key.clone());
                    return Ok(None);
                }
                if change.is_guard() {
                    continue;
                }
                match &change.value {
                    Some(value) => {
                        let stored = super::checksummed::add_checksum(key, value);
                        drop(keys.insert(key, (revision, stored.as_slice()))?);
                    }
                    None => drop(keys.remove(key)?),
                }
            }
            Ok(Some(Revision(revision)))
        })?;
        match (written, conflict) {
            (Some(revision), _) => Ok(Ok(revision)),
            (None, Some(key)) => Ok(Err(key)),
            (None, None) => Err(DatabaseError::damaged("it applied no change")),
        }
    }

    /// Commits once more without changing a record. The library keeps the last two states and falls
    /// back to the older one if the newer is damaged, or if a bit in its header says so. After
    /// this, both hold the acknowledged state.
    pub(super) fn confirm_revision(&self, revision: Revision) -> Result<(), DatabaseError> {
        self.transaction(|write| {
            let mut header = write.open_table(HEADER_TABLE)?;
            let before = header.get(CONFIRMED_REVISION_FIELD)?.map(|v| v.value());
            // A transaction without a change is not committed.
            if before == Some(revision.0) {
                header.insert(CONFIRMED_REVISION_FIELD, u64::MAX)?;
            } else {
                header.insert(CONFIRMED_REVISION_FIELD, revision.0)?;
            }
            drop(header);
            Ok(Some(()))
        })
        .map(drop)
    }

    /// Stores arbitrary bytes under a key.
    #[cfg(test)]
    pub(super) fn write_raw(&self, key: &str, stored: &[u8]) {
        let set = self.transaction(|write| {
            let mut keys = write.open_table(KEYS_TABLE)?;
            let revision = keys.get(key)?.map_or(0, |v| v.value().0);
            keys.insert(key, (revision, stored))?;
            drop(keys);
            Ok(Some(()))
        });
        set.unwrap();
    }

    /// Panics as the library does.
    #[cfg(test)]
    pub(super) fn panic(&self) -> Result<(), DatabaseError> {
        self.with_database(|_| panic!("page 7 is not a page"))
    }

    /// Changes the store's format.
    #[cfg(test)]
    pub(super) fn set_format(&self, format: u64) {
        let set = self.transaction(|write| {
            write.open_table(HEADER_TABLE)?.insert(FORMAT_FIELD, format)?;
            Ok(Some(()))
        });
        set.unwrap();
    }
}

fn entry(key: &str, (revision, stored): (u64, &[u8])) -> Entry {
    Entry::from_stored(key.to_owned(), stored, Revision(revision))
}

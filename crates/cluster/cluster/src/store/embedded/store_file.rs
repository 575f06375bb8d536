//! The store's file, as the library reads and writes it.
//!
//! * Space is reserved in advance, so that records can be removed when the file system is full.
//! * The file never shrinks while it is open, for the same reason.
//! * Once it is abandoned nothing is written any more, whatever the library does while it closes.

use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{BackendError, StorageBackend};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

/// Space reserved beyond the file's length, in bytes: the file grows by doubling.
const PREALLOCATED_LEN: u64 = 1 << 20;

/// Bytes copied or zeroed at once.
const CHUNK_LEN: usize = 64 << 10;

/// The open file. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct StoreFile(Arc<Mutex<FileState>>);

#[derive(Debug)]
struct FileState {
    /// `None` once abandoned.
    file: Option<File>,
    /// Its length as the library sees it.
    len: u64,
    /// Its length in the file system, at least `len`.
    physical_len: u64,
    /// The error that writes fail with, in tests.
    #[cfg(test)]
    broken: Option<i32>,
}

impl FileState {
    fn file(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(|| io::Error::other("the store was closed after a failure"))
    }

    /// The file, for writing.
    fn writable(&self) -> io::Result<&File> {
        #[cfg(test)]
        if let Some(errno) = self.broken {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.file()
    }

    fn write_zeroes(&self, from: u64, to: u64) -> io::Result<()> {
        let zeroes = [0; CHUNK_LEN];
        let mut at = from;
        while at < to {
            let piece = usize::try_from(to - at).map_or(CHUNK_LEN, |left| left.min(CHUNK_LEN));
            self.writable()?.write_all_at(&zeroes[..piece], at)?;
            at += piece as u64;
        }
        Ok(())
    }

    fn set_len(&mut self, len: u64) -> io::Result<()> {
        if len > self.physical_len {
            self.writable()?.set_len(len)?;
            self.physical_len = len;
        } else if len > self.len {
            self.write_zeroes(self.len, len)?;
        }
        self.len = len;
        Ok(())
    }

    fn reserve_space(&self) -> io::Result<()> {
        let file = self.writable()?;
        let room = self.physical_len.saturating_mul(2).saturating_add(PREALLOCATED_LEN);
        match fallocate(file, FallocateFlags::KEEP_SIZE, 0, room) {
            // Not supported by every file system.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Rewrites the whole file: after a failed sync the system may consider dirty pages clean.
    fn rewrite_all(&self) -> io::Result<()> {
        let file = self.writable()?;
        let mut piece = vec![0; CHUNK_LEN];
        let mut at = 0;
        while at < self.physical_len {
            let len = usize::try_from(self.physical_len - at)
                .map_or(CHUNK_LEN, |left| left.min(CHUNK_LEN));
            file.read_exact_at(&mut piece[..len], at)?;
            // Skip holes: they hold no data, and filling them could need space.
            if piece[..len].iter().any(|byte| *byte != 0) {
                file.write_all_at(&piece[..len], at)?;
            }
            at += len as u64;
        }
        file.sync_all()
    }
}

impl StoreFile {
    /// Wraps an open file.
    pub(super) fn new(file: File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        let state = FileState {
            file: Some(file),
            len,
            physical_len: len,
            #[cfg(test)]
            broken: None,
        };
        Ok(Self(Arc::new(Mutex::new(state))))
    }

    fn state(&self) -> MutexGuard<'_, FileState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves space for later commits.
    pub(super) fn reserve_space(&self) -> io::Result<()> {
        self.state().reserve_space()
    }

    /// Makes sure that the disk has the file's contents.
    pub(super) fn rewrite_all(&self) -> io::Result<()> {
        self.state().rewrite_all()
    }

    /// Closes the file, and fails all later writes.
    pub(super) fn abandon(&self) {
        self.state().file = None;
    }

    /// Makes all writes fail with this error, or no longer.
    #[cfg(test)]
    pub(super) fn break_writes(&self, errno: Option<i32>) {
        self.state().broken = errno;
    }
}

impl StorageBackend for StoreFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state().len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.state();
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > state.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        state.file()?.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.state().set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.state().writable()?.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.state().writable()?.write_all_at(data, offset)
    }

    fn close(&self) -> io::Result<()> {
        self.abandon();
        Ok(())
    }

    // The opener has locked the file already.
    fn try_lock_range(&self, _: Bound<u64>, _: Bound<u64>) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn unlock_range(&self, _: Bound<u64>, _: Bound<u64>) -> Result<(), BackendError> {
        Ok(())
    }
}

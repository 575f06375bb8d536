//! The file of the store as the library reads and writes it.
//!
//! * Room is taken ahead of what is needed, so that records can still be removed when the file
//!   system is full.
//! * The file never becomes shorter while it is open, for the same reason.
//! * Once it is given up, nothing is written to it any more, whatever the library does as it goes.

use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{BackendError, StorageBackend};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

/// Room taken ahead beside the length of the file itself, in bytes: the file grows by doubling.
const AHEAD: u64 = 1 << 20;

/// How much is copied or zeroed at once.
const PIECE: usize = 64 << 10;

/// The open file. Clones are the same one.
#[derive(Clone, Debug)]
pub(super) struct StoreFile(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// `None` once it is given up.
    file: Option<File>,
    /// Its length for the library.
    len: u64,
    /// Its length in the file system, not below the other one.
    physical: u64,
    /// What writes fail with, in tests.
    #[cfg(test)]
    broken: Option<i32>,
}

impl State {
    fn file(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(|| io::Error::other("the store was given up"))
    }

    /// The file, to be written.
    fn writable(&self) -> io::Result<&File> {
        #[cfg(test)]
        if let Some(errno) = self.broken {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.file()
    }

    fn write_zeroes(&self, from: u64, to: u64) -> io::Result<()> {
        let zeroes = [0; PIECE];
        let mut at = from;
        while at < to {
            let piece = usize::try_from(to - at).map_or(PIECE, |left| left.min(PIECE));
            self.writable()?.write_all_at(&zeroes[..piece], at)?;
            at += piece as u64;
        }
        Ok(())
    }

    fn set_len(&mut self, len: u64) -> io::Result<()> {
        if len > self.physical {
            self.writable()?.set_len(len)?;
            self.physical = len;
        } else if len > self.len {
            self.write_zeroes(self.len, len)?;
        }
        self.len = len;
        Ok(())
    }

    fn reserve(&self) -> io::Result<()> {
        let file = self.writable()?;
        let room = self.physical.saturating_mul(2).saturating_add(AHEAD);
        match fallocate(file, FallocateFlags::KEEP_SIZE, 0, room) {
            // Not every file system can.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Writes again what the file holds: after a sync that has failed, the system may have
    /// forgotten that the disk does not have it.
    fn rewrite(&self) -> io::Result<()> {
        let file = self.writable()?;
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        while at < self.physical {
            let len = usize::try_from(self.physical - at).map_or(PIECE, |left| left.min(PIECE));
            file.read_exact_at(&mut piece[..len], at)?;
            // What was never written has nothing to lose, and may have no room.
            if piece[..len].iter().any(|byte| *byte != 0) {
                file.write_all_at(&piece[..len], at)?;
            }
            at += len as u64;
        }
        file.sync_all()
    }
}

impl StoreFile {
    /// The store in `file`.
    pub(super) fn new(file: File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        let state = State {
            file: Some(file),
            len,
            physical: len,
            #[cfg(test)]
            broken: None,
        };
        Ok(Self(Arc::new(Mutex::new(state))))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that the file has room for what may come.
    pub(super) fn reserve(&self) -> io::Result<()> {
        self.state().reserve()
    }

    /// Makes sure that the disk has what the file shows.
    pub(super) fn rewrite(&self) -> io::Result<()> {
        self.state().rewrite()
    }

    /// Has nothing written from here on, and lets go of the file.
    pub(super) fn give_up(&self) {
        self.state().file = None;
    }

    /// Has everything that is written fail with this error of the system, or no longer.
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
        self.give_up();
        Ok(())
    }

    // Whoever opens the store has locked its file already.
    fn try_lock_range(&self, _: Bound<u64>, _: Bound<u64>) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn unlock_range(&self, _: Bound<u64>, _: Bound<u64>) -> Result<(), BackendError> {
        Ok(())
    }
}

//! Disks: files and block devices, real or simulated, behind one handle.
//!
//! The rules that hold for every disk are kept here, once, whatever serves it: ranges and
//! alignment are checked, and after a failed sync nothing is written any more, because what the
//! disk holds is no longer known and a later sync would report success for data that is lost.

mod blkid;
mod error;
mod file;
mod geometry;
mod inline;
mod open;
mod options;
mod pool;
mod uring;

use std::cell::Cell;
use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::buf::{Bufs, BufsMut};

pub use blkid::Signature;
pub use error::{DiskError, DiskErrorKind};
pub use options::{OpenError, OpenOptions, OpenReason};

pub(crate) use file::{FileDisk, Vectors, ended, read_vectors, write_vectors};
pub(crate) use inline::InlineDisk;
pub(crate) use open::{open, remove_file, rename, sync_dir};
pub(crate) use pool::PoolDisk;
pub(crate) use uring::UringDisk;

/// What kind of thing a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
}

/// What a disk is, as of now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Size in bytes. A file's may end within a logical block; that end cannot be reached.
    pub size: u64,
    /// Addresses and lengths are multiples of this many bytes: 512 or 4096.
    pub logical_block: u32,
    /// What the medium writes at once, in bytes; a multiple of `logical_block`.
    pub physical_block: u32,
    /// Buffers start on multiples of this many bytes.
    pub memory_align: u32,
    /// File or block device.
    pub kind: DiskKind,
    /// Whether [`Disk::punch`] works. Found out for good by the first attempt.
    pub can_punch: bool,
    /// Whether [`Disk::zero`] works. Found out for good by the first attempt.
    pub can_zero: bool,
    /// Whether completed writes may be lost at power loss until [`Disk::sync`].
    pub volatile_cache: bool,
    /// Whether the medium turns; `None` where the system does not tell.
    pub rotational: Option<bool>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether another machine may reach it at the same time: a block device, or a file of a file system that machines may share
    /// and that is read past this machine's page cache.
    pub shared: bool,
    /// Which of the times this is that the medium has been attached since the machine was booted: two openings
    /// with different numbers have had its power cut between them. 0 where the system does not tell.
    pub attachment: u64,
}

/// How a range of a disk begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// So many bytes of it are alike, one at least.
    pub bytes: u64,
    /// Whether there is nothing behind them: they read as zeroes.
    pub hole: bool,
}

/// What serves a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// An io_uring of the core.
    Uring,
    /// Plain calls on the core: memory file systems, which never wait for a device.
    Inline,
    /// A small pool of blocking threads.
    Pool,
    /// The simulator.
    Sim,
}

/// The implementations behind a [`Disk`]. Each has the same eleven inherent methods; they are
/// called with checked arguments and need not know about earlier failures.
#[derive(Debug)]
pub(crate) enum Backend {
    Inline(InlineDisk),
    Pool(PoolDisk),
    Uring(UringDisk),
    #[cfg(feature = "sim")]
    Sim(crate::sim::disk::SimDisk),
}

/// Calls the same method on whichever backend there is.
macro_rules! dispatch {
    ($backend:expr, $b:ident => $call:expr) => {
        match $backend {
            Backend::Inline($b) => $call,
            Backend::Pool($b) => $call,
            Backend::Uring($b) => $call,
            #[cfg(feature = "sim")]
            Backend::Sim($b) => $call,
        }
    };
}

/// An open disk. Lives on one core; clones share it, the last one closes it.
///
/// Every operation owns its buffers: dropping its future loses the answer and nothing else.
/// Operations in flight at the same time are unordered.
#[derive(Clone)]
pub struct Disk(Rc<Inner>);

struct Inner {
    backend: Backend,
    info: Cell<DiskInfo>,
    sync_failed: Cell<bool>,
    path: PathBuf,
    serial: Box<str>,
}

impl Disk {
    pub(crate) fn new(path: &Path, backend: Backend, info: DiskInfo, serial: String) -> Self {
        Self(Rc::new(Inner {
            backend,
            info: Cell::new(info),
            sync_failed: Cell::new(false),
            path: path.to_owned(),
            serial: serial.into(),
        }))
    }

    /// What the disk is now.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.0.info.get()
    }

    /// The name it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// What its maker, or whoever made it, calls the disk behind a block device, and no other: at most 64 bytes. A partition has its
    /// disk's with its own number behind. Empty for files, and where the system does not tell.
    #[must_use]
    pub fn serial(&self) -> &str {
        &self.0.serial
    }

    /// What serves it.
    #[must_use]
    pub fn engine(&self) -> Engine {
        match &self.0.backend {
            Backend::Inline(_) => Engine::Inline,
            Backend::Pool(_) => Engine::Pool,
            Backend::Uring(_) => Engine::Uring,
            #[cfg(feature = "sim")]
            Backend::Sim(_) => Engine::Sim,
        }
    }

    /// Fills `into`, whole, from byte `at` on, and gives it back.
    ///
    /// # Errors
    /// [`DiskErrorKind::Misaligned`], [`DiskErrorKind::PastEnd`], and what the disk reports.
    pub async fn read(&self, at: u64, into: BufsMut) -> Result<BufsMut, DiskError> {
        let pieces = into.iter().map(|b| (b.as_ptr().addr(), b.len()));
        if self.check_buffers(at, pieces)? == 0 {
            return Ok(into);
        }
        dispatch!(&self.0.backend, b => b.read(at, into).await)
    }

    /// Writes all of `data` from byte `at` on. It is visible when this returns, and durable after
    /// the next [`Self::sync`].
    ///
    /// # Errors
    /// As [`Self::read`]; [`DiskErrorKind::NoSpace`]; [`DiskErrorKind::ReadOnly`];
    /// [`DiskErrorKind::Gone`] once a sync has failed. The range then holds old and new data.
    pub async fn write(&self, at: u64, data: Bufs) -> Result<(), DiskError> {
        self.check_writable()?;
        let pieces = data.iter().map(|b| (b.as_ptr().addr(), b.len()));
        if self.check_buffers(at, pieces)? == 0 {
            return Ok(());
        }
        dispatch!(&self.0.backend, b => b.write(at, data).await)
    }

    /// Makes durable everything that completed before.
    ///
    /// # Errors
    /// What the disk reports. From then on the disk refuses every sync and every write with
    /// [`DiskErrorKind::Gone`]: the system forgets what it could not write, so a second sync
    /// would succeed and mean nothing.
    pub async fn sync(&self) -> Result<(), DiskError> {
        self.check_alive()?;
        // A task of its own: a failure counts even when nobody waits for the answer any more.
        let disk = self.clone();
        let judged = tokio::task::spawn_local(async move { disk.sync_and_judge().await });
        judged.await.unwrap_or(Err(DiskError::new(DiskErrorKind::Gone)))
    }

    async fn sync_and_judge(&self) -> Result<(), DiskError> {
        if let Err(e) = dispatch!(&self.0.backend, b => b.sync().await) {
            self.0.sync_failed.set(true);
            let disk = self.0.path.display();
            tracing::error!(%disk, error = %e, "a sync failed; the disk is given up");
            return Err(e);
        }
        // Another sync may have failed meanwhile and taken the blame for both.
        self.check_alive()
    }

    /// Frees the space of a range, which then reads as zeroes.
    ///
    /// # Errors
    /// As [`Self::write`]; [`DiskErrorKind::Unsupported`].
    pub async fn punch(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        if self.check_range(at, bytes)? == 0 {
            return Ok(());
        }
        if !self.info().can_punch {
            return Err(DiskError::new(DiskErrorKind::Unsupported));
        }
        let result = dispatch!(&self.0.backend, b => b.punch(at, bytes).await);
        self.learn(result, |info| info.can_punch = false)
    }

    /// Makes a range read as zeroes and keeps its space: later writes there need none.
    ///
    /// # Errors
    /// As [`Self::write`]; [`DiskErrorKind::Unsupported`].
    pub async fn zero(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        if self.check_range(at, bytes)? == 0 {
            return Ok(());
        }
        if !self.info().can_zero {
            return Err(DiskError::new(DiskErrorKind::Unsupported));
        }
        let result = dispatch!(&self.0.backend, b => b.zero(at, bytes).await);
        self.learn(result, |info| info.can_zero = false)
    }

    /// Puts space behind a range without changing what it reads as. Nothing to do on block
    /// devices.
    ///
    /// # Errors
    /// As [`Self::write`]; [`DiskErrorKind::Unsupported`].
    pub async fn allocate(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        if self.check_range(at, bytes)? == 0 || self.info().kind == DiskKind::BlockDevice {
            return Ok(());
        }
        dispatch!(&self.0.backend, b => b.allocate(at, bytes).await)
    }

    /// Makes a file longer (by zeroes without space) or shorter. Durable after the next sync.
    ///
    /// # Errors
    /// As [`Self::write`]; [`DiskErrorKind::Unsupported`] on block devices.
    pub async fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        self.check_writable()?;
        if self.info().kind == DiskKind::BlockDevice {
            return Err(DiskError::new(DiskErrorKind::Unsupported));
        }
        dispatch!(&self.0.backend, b => b.set_len(bytes).await)?;
        self.update(|info| info.size = bytes);
        Ok(())
    }

    /// Bytes of space the disk takes: less than its size for sparse files.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn allocated(&self) -> Result<u64, DiskError> {
        match self.info().kind {
            DiskKind::BlockDevice => Ok(self.info().size),
            DiskKind::File => dispatch!(&self.0.backend, b => b.allocated().await),
        }
    }

    /// The formats that libblkid knows and finds on it: file systems, members of arrays, tables of partitions. None where the library is
    /// not there, or cannot read it.
    pub async fn signatures(&self) -> Option<Vec<Signature>> {
        dispatch!(&self.0.backend, b => b.signatures().await)
    }

    /// How a range that is not empty begins: with a hole, or not, and for how long. What is no hole may read as zeroes
    /// all the same; a disk that does not tell has none. What changes meanwhile counts, or not.
    ///
    /// # Errors
    /// [`DiskErrorKind::PastEnd`], and what the system reports.
    pub async fn stretch(&self, at: u64, bytes: u64) -> Result<Stretch, DiskError> {
        check_inside(at, bytes, self.info().size)?;
        match self.info().kind {
            DiskKind::BlockDevice => Ok(Stretch { bytes, hole: false }),
            DiskKind::File => dispatch!(&self.0.backend, b => b.stretch(at, bytes).await),
        }
    }

    /// Asks the system for the size in bytes again: a block device may have grown since it was
    /// opened. [`Self::info`] tells the new size from then on.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn measure(&self) -> Result<u64, DiskError> {
        let size = dispatch!(&self.0.backend, b => b.size().await)?;
        self.update(|info| info.size = size);
        Ok(size)
    }

    fn check_alive(&self) -> Result<(), DiskError> {
        if self.0.sync_failed.get() {
            return Err(DiskError::new(DiskErrorKind::Gone));
        }
        Ok(())
    }

    fn check_writable(&self) -> Result<(), DiskError> {
        if self.info().read_only {
            return Err(DiskError::new(DiskErrorKind::ReadOnly));
        }
        self.check_alive()
    }

    /// Checks a range that is to be changed; gives its length.
    fn check_range(&self, at: u64, bytes: u64) -> Result<u64, DiskError> {
        self.check_writable()?;
        let info = self.info();
        let block = u64::from(info.logical_block);
        if !at.is_multiple_of(block) || !bytes.is_multiple_of(block) {
            return Err(DiskError::new(DiskErrorKind::Misaligned));
        }
        check_inside(at, bytes, info.size)?;
        Ok(bytes)
    }

    /// Checks a transfer of `pieces` (address, length); gives its length.
    fn check_buffers(
        &self,
        at: u64,
        pieces: impl Iterator<Item = (usize, usize)>,
    ) -> Result<u64, DiskError> {
        let info = self.info();
        let block = u64::from(info.logical_block);
        let mut bytes = 0;
        let mut aligned = at.is_multiple_of(block);
        for (address, len) in pieces {
            let len = len as u64;
            bytes += len;
            aligned &= len.is_multiple_of(block);
            aligned &= (address as u64).is_multiple_of(u64::from(info.memory_align));
        }
        if !aligned {
            return Err(DiskError::new(DiskErrorKind::Misaligned));
        }
        check_inside(at, bytes, info.size)?;
        Ok(bytes)
    }

    fn update(&self, f: impl FnOnce(&mut DiskInfo)) {
        let mut info = self.0.info.get();
        f(&mut info);
        self.0.info.set(info);
    }

    /// Remembers what turned out to be unsupported.
    fn learn(
        &self,
        result: Result<(), DiskError>,
        f: impl FnOnce(&mut DiskInfo),
    ) -> Result<(), DiskError> {
        if result.is_err_and(|e| e.kind == DiskErrorKind::Unsupported) {
            self.update(f);
        }
        result
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("path", &self.0.path)
            .field("engine", &self.engine())
            .field("info", &self.info())
            .finish()
    }
}

fn check_inside(at: u64, bytes: u64, size: u64) -> Result<(), DiskError> {
    match at.checked_add(bytes) {
        Some(end) if end <= size => Ok(()),
        _ => Err(DiskError::new(DiskErrorKind::PastEnd)),
    }
}

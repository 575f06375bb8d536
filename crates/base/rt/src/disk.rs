//! Disks: files and block devices, real or simulated, behind one handle.
//!
//! The rules for every disk are implemented here, once, for all engines: ranges and alignment are
//! checked, and after a failed sync every write is refused, because the disk's contents are unknown
//! and a later sync would report success although data is lost.

mod blocking;
mod inline;
mod uring;

use std::cell::Cell;
use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::buf::{Bufs, BufsMut};
pub use crate::disk_file::{
    DiskError, DiskErrorKind, DiskInfo, DiskKind, Engine, OpenError, OpenOptions, OpenReason,
    Signature, SparseRun,
};
use crate::flow;
#[cfg(feature = "sim")]
use crate::sim::disk::SimDisk;

pub(crate) use blocking::BlockingDisk;
pub(crate) use inline::InlineDisk;
pub(crate) use uring::UringDisk;

/// The implementations of a [`Disk`]. Each has the same eleven inherent methods; they are called
/// with checked arguments and need not know about earlier failures.
#[derive(Debug)]
pub(crate) enum Backend {
    Inline(InlineDisk),
    Threads(BlockingDisk),
    Uring(UringDisk),
    #[cfg(feature = "sim")]
    Sim(SimDisk),
}

/// Calls the same method of any backend.
macro_rules! dispatch {
    ($backend:expr, $b:ident => $call:expr) => {
        match $backend {
            Backend::Inline($b) => $call,
            Backend::Threads($b) => $call,
            Backend::Uring($b) => $call,
            #[cfg(feature = "sim")]
            Backend::Sim($b) => $call,
        }
    };
}

/// An open disk. It belongs to one core; clones share it, the last one closes it.
///
/// Every operation owns its buffers: dropping its future loses only the result.
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

    #[cfg(feature = "sim")]
    pub(crate) fn sim(path: &Path, disk: SimDisk) -> Self {
        let (info, serial) = (disk.info(), disk.serial());
        Self::new(path, Backend::Sim(disk), info, serial)
    }

    /// The disk's current properties.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.0.info.get()
    }

    /// The path with which it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The serial number of the disk behind a block device, unique to it: at most 64 bytes. A
    /// partition has its disk's with its own number appended. Empty for files, and if the system
    /// does not report it.
    #[must_use]
    pub fn serial(&self) -> &str {
        &self.0.serial
    }

    /// The engine that serves it.
    #[must_use]
    pub fn engine(&self) -> Engine {
        match &self.0.backend {
            Backend::Inline(_) => Engine::Inline,
            Backend::Threads(_) => Engine::Threads,
            Backend::Uring(_) => Engine::Uring,
            #[cfg(feature = "sim")]
            Backend::Sim(_) => Engine::Sim,
        }
    }

    /// Fills all of `into`, from byte `at` on, and returns it.
    ///
    /// # Errors
    /// [`DiskErrorKind::Misaligned`], [`DiskErrorKind::PastEnd`], and what the disk reports.
    pub async fn read(&self, at: u64, into: BufsMut) -> Result<BufsMut, DiskError> {
        let pieces = into.iter().map(|b| (b.as_ptr().addr(), b.len()));
        let bytes = self.check_buffers(at, pieces)?;
        if bytes == 0 {
            return Ok(into);
        }
        flow::charge(bytes);
        dispatch!(&self.0.backend, b => b.read(at, into).await)
    }

    /// Writes all of `data` from byte `at` on. Visible when this returns, durable after the next
    /// [`Self::sync`].
    ///
    /// # Errors
    /// As [`Self::read`]; [`DiskErrorKind::NoSpace`]; [`DiskErrorKind::ReadOnly`];
    /// [`DiskErrorKind::Gone`] once a sync has failed. The range then holds old and new data.
    pub async fn write(&self, at: u64, data: Bufs) -> Result<(), DiskError> {
        self.check_writable()?;
        let pieces = data.iter().map(|b| (b.as_ptr().addr(), b.len()));
        let bytes = self.check_buffers(at, pieces)?;
        if bytes == 0 {
            return Ok(());
        }
        flow::charge(bytes);
        dispatch!(&self.0.backend, b => b.write(at, data).await)
    }

    /// Makes durable everything that has completed.
    ///
    /// # Errors
    /// What the disk reports. From then on the disk refuses every sync and every write with
    /// [`DiskErrorKind::Gone`]: the system forgets what it could not write, so a second sync would
    /// succeed although data is lost.
    pub async fn sync(&self) -> Result<(), DiskError> {
        self.check_alive()?;
        // In its own task: a failure counts even if the caller is gone.
        let disk = self.clone();
        let synced = tokio::task::spawn_local(async move { disk.sync_and_record().await });
        synced.await.unwrap_or(Err(DiskError::new(DiskErrorKind::Gone)))
    }

    async fn sync_and_record(&self) -> Result<(), DiskError> {
        if let Err(e) = dispatch!(&self.0.backend, b => b.sync().await) {
            self.0.sync_failed.set(true);
            let disk = self.0.path.display();
            tracing::error!(%disk, error = %e, "a sync failed; the disk is used no longer");
            return Err(e);
        }
        // Another sync may have failed meanwhile, for both.
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
        self.note_unsupported(result, |info| info.can_punch = false)
    }

    /// Makes a range read as zeroes and keeps its space allocated.
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
        self.note_unsupported(result, |info| info.can_zero = false)
    }

    /// Allocates space for a range without changing its contents. Does nothing on block devices.
    ///
    /// # Errors
    /// As [`Self::write`]; [`DiskErrorKind::Unsupported`].
    pub async fn allocate(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        if self.check_range(at, bytes)? == 0 || self.info().kind == DiskKind::BlockDevice {
            return Ok(());
        }
        dispatch!(&self.0.backend, b => b.allocate(at, bytes).await)
    }

    /// Extends a file (by a hole) or truncates it. Durable after the next sync.
    ///
    /// # Errors
    /// As [`Self::write`]; [`DiskErrorKind::Unsupported`] on block devices.
    pub async fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        self.check_writable()?;
        if self.info().kind == DiskKind::BlockDevice {
            return Err(DiskError::new(DiskErrorKind::Unsupported));
        }
        dispatch!(&self.0.backend, b => b.set_len(bytes).await)?;
        self.update_info(|info| info.size = bytes);
        Ok(())
    }

    /// Bytes of allocated space: less than the size for sparse files.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn allocated(&self) -> Result<u64, DiskError> {
        match self.info().kind {
            DiskKind::BlockDevice => Ok(self.info().size),
            DiskKind::File => dispatch!(&self.0.backend, b => b.allocated().await),
        }
    }

    /// The formats that libblkid finds on the disk: file systems, RAID members, partition tables.
    /// `None` if the library is missing, or cannot read the disk.
    pub async fn signatures(&self) -> Option<Vec<Signature>> {
        dispatch!(&self.0.backend, b => b.signatures().await)
    }

    /// The status of the run at the start of a non-empty range: hole or data, and its length. Data
    /// may read as zeroes all the same; a disk that cannot tell reports no holes. Concurrent
    /// changes count or not.
    ///
    /// # Errors
    /// [`DiskErrorKind::PastEnd`], and what the system reports.
    pub async fn sparse_run(&self, at: u64, bytes: u64) -> Result<SparseRun, DiskError> {
        check_within(at, bytes, self.info().size)?;
        match self.info().kind {
            DiskKind::BlockDevice => Ok(SparseRun { bytes, is_hole: false }),
            DiskKind::File => dispatch!(&self.0.backend, b => b.sparse_run(at, bytes).await),
        }
    }

    /// Asks the system for the size in bytes again: a block device may have grown since it was
    /// opened. [`Self::info`] returns the new size from then on.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn refresh_size(&self) -> Result<u64, DiskError> {
        let size = dispatch!(&self.0.backend, b => b.size().await)?;
        self.update_info(|info| info.size = size);
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

    /// Checks a range to be changed; returns its length.
    fn check_range(&self, at: u64, bytes: u64) -> Result<u64, DiskError> {
        self.check_writable()?;
        let info = self.info();
        let block = u64::from(info.logical_block);
        if !at.is_multiple_of(block) || !bytes.is_multiple_of(block) {
            return Err(DiskError::new(DiskErrorKind::Misaligned));
        }
        check_within(at, bytes, info.size)?;
        Ok(bytes)
    }

    /// Checks a transfer of `pieces` (address, length); returns its length.
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
        check_within(at, bytes, info.size)?;
        Ok(bytes)
    }

    fn update_info(&self, f: impl FnOnce(&mut DiskInfo)) {
        let mut info = self.0.info.get();
        f(&mut info);
        self.0.info.set(info);
    }

    /// Remembers that an operation is unsupported.
    fn note_unsupported(
        &self,
        result: Result<(), DiskError>,
        f: impl FnOnce(&mut DiskInfo),
    ) -> Result<(), DiskError> {
        if result.is_err_and(|e| e.kind == DiskErrorKind::Unsupported) {
            self.update_info(f);
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

fn check_within(at: u64, bytes: u64, size: u64) -> Result<(), DiskError> {
    match at.checked_add(bytes) {
        Some(end) if end <= size => Ok(()),
        _ => Err(DiskError::new(DiskErrorKind::PastEnd)),
    }
}

//! A file or block device by plain system calls, each completed: short transfers are continued,
//! interrupted calls repeated. The inline and the blocking engine use it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use smallvec::SmallVec;

use super::error::{DiskError, DiskErrorKind};
use super::info::SparseRun;
use crate::buf::{Bufs, BufsMut};
use crate::sys::{self, Direction, SeekTarget};

/// Most buffers of one system call (`UIO_MAXIOV`).
pub(crate) const MAX_VECTORS: usize = 1024;

/// `fallocate` modes (`linux/falloc.h`) for what a [`crate::disk::Disk`] offers. None changes the
/// size.
pub(crate) const PUNCH_MODE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
pub(crate) const ZERO_MODE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
pub(crate) const ALLOCATE_MODE: i32 = libc::FALLOC_FL_KEEP_SIZE;

pub(crate) type Vectors = SmallVec<[libc::iovec; 4]>;

/// An open file or block device.
#[derive(Debug)]
pub(crate) struct FileDisk(File);

impl FileDisk {
    pub(crate) fn new(file: File) -> Self {
        Self(file)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Fills `into` from byte `at` on.
    pub(crate) fn read(&self, at: u64, into: &mut BufsMut) -> Result<(), DiskError> {
        let bytes = into.iter().map(|b| b.len()).sum();
        self.transfer(Direction::Read, at, bytes, |done| read_vectors(into, done))
    }

    /// Writes `data` from byte `at` on.
    pub(crate) fn write(&self, at: u64, data: &Bufs) -> Result<(), DiskError> {
        self.transfer(Direction::Write, at, data.len(), |done| write_vectors(data, done))
    }

    fn transfer(
        &self,
        direction: Direction,
        at: u64,
        bytes: usize,
        mut vectors: impl FnMut(usize) -> Vectors,
    ) -> Result<(), DiskError> {
        let mut done = 0;
        while done < bytes {
            let rest = vectors(done);
            // SAFETY: the vectors name buffers that the caller holds: a read's by `&mut`, a write's
            // immutable.
            let n = retry_interrupted(|| unsafe {
                sys::transfer(self.fd(), direction, &rest, at + done as u64)
            })?;
            if n == 0 {
                return Err(zero_transfer_error(direction));
            }
            done += n;
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        // An interrupted sync has not reported an error and may be repeated; a failed one not.
        Ok(retry_interrupted(|| sys::datasync(self.fd()))?)
    }

    pub(crate) fn fallocate(&self, mode: i32, at: u64, bytes: u64) -> Result<(), DiskError> {
        Ok(retry_interrupted(|| sys::fallocate(self.fd(), mode, at, bytes))?)
    }

    pub(crate) fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        Ok(retry_interrupted(|| self.0.set_len(bytes))?)
    }

    pub(crate) fn allocated(&self) -> Result<u64, DiskError> {
        // `st_blocks` counts 512 bytes each, whatever the file system's blocks are (`stat(3type)`).
        Ok(self.0.metadata()?.blocks() * 512)
    }

    /// The status of the run of `bytes` that begins at `at`, at least one byte long.
    pub(crate) fn sparse_run(&self, at: u64, bytes: u64) -> Result<SparseRun, DiskError> {
        let data = match retry_interrupted(|| sys::seek(self.fd(), SeekTarget::Data, at)) {
            Ok(data) => data,
            // No data follows, unless the file was truncated meanwhile.
            Err(e) if e.raw_os_error() == Some(libc::ENXIO) => match self.size()? {
                size if at.checked_add(bytes).is_some_and(|end| end <= size) => u64::MAX,
                _ => return Err(DiskError::new(DiskErrorKind::PastEnd)),
            },
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                return Ok(SparseRun { bytes, is_hole: false });
            }
            Err(e) => return Err(e.into()),
        };
        if data > at {
            return Ok(SparseRun { bytes: bytes.min(data - at), is_hole: true });
        }
        let hole = retry_interrupted(|| sys::seek(self.fd(), SeekTarget::Hole, at))?;
        // A hole punched between the two calls counts as data.
        Ok(SparseRun { bytes: bytes.min((hole - at).max(1)), is_hole: false })
    }

    /// Size in bytes. For a block device only a seek returns it, not its metadata.
    pub(crate) fn size(&self) -> Result<u64, DiskError> {
        Ok((&self.0).seek(SeekFrom::End(0))?)
    }
}

/// The error when a call moves nothing: a read at the end, a write at a limit of the system.
pub(crate) fn zero_transfer_error(direction: Direction) -> DiskError {
    match direction {
        Direction::Read => DiskError::new(DiskErrorKind::PastEnd),
        Direction::Write => DiskError::new(DiskErrorKind::NoSpace),
    }
}

/// The memory of `bufs` after its first `skip` bytes, as much as one call takes.
pub(crate) fn read_vectors(bufs: &mut BufsMut, skip: usize) -> Vectors {
    collect_vectors(bufs.iter_mut().map(|b| (b.as_mut_ptr(), b.len())), skip)
}

/// As [`read_vectors`], for a call that only reads the memory.
pub(crate) fn write_vectors(bufs: &Bufs, skip: usize) -> Vectors {
    collect_vectors(bufs.iter().map(|b| (b.as_ptr().cast_mut(), b.len())), skip)
}

fn collect_vectors(pieces: impl Iterator<Item = (*mut u8, usize)>, mut skip: usize) -> Vectors {
    let mut out = Vectors::new();
    for (start, len) in pieces {
        let cut = skip.min(len);
        skip -= cut;
        if cut < len {
            let base = start.wrapping_add(cut).cast();
            out.push(libc::iovec { iov_base: base, iov_len: len - cut });
        }
        if out.len() == MAX_VECTORS {
            break;
        }
    }
    out
}

fn retry_interrupted<T>(mut f: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match f() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

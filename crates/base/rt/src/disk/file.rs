//! A file or block device by plain system calls, each to its end: short transfers are continued,
//! interrupted calls repeated. What the inline and the blocking engine are made of.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use smallvec::SmallVec;

use super::{DiskError, DiskErrorKind, Stretch};
use crate::buf::{Bufs, BufsMut};
use crate::sys::{self, Direction, Seeking};

/// Most pieces of memory the system takes in one call (`UIO_MAXIOV`).
pub(crate) const MAX_VECTORS: usize = 1024;

/// `fallocate` modes (`linux/falloc.h`) for what a [`super::Disk`] offers. None changes the size.
pub(crate) const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
pub(crate) const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
pub(crate) const ALLOCATE: i32 = libc::FALLOC_FL_KEEP_SIZE;

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
            // SAFETY: the vectors name buffers that the caller holds: its own for a read (it has
            // them by `&mut`), immutable ones for a write.
            let n =
                retry(|| unsafe { sys::transfer(self.fd(), direction, &rest, at + done as u64) })?;
            if n == 0 {
                return Err(ended(direction));
            }
            done += n;
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        // An interrupted sync has not reported an error and may be repeated; a failed one not.
        Ok(retry(|| sys::datasync(self.fd()))?)
    }

    pub(crate) fn fallocate(&self, mode: i32, at: u64, bytes: u64) -> Result<(), DiskError> {
        Ok(retry(|| sys::fallocate(self.fd(), mode, at, bytes))?)
    }

    pub(crate) fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        Ok(retry(|| self.0.set_len(bytes))?)
    }

    pub(crate) fn allocated(&self) -> Result<u64, DiskError> {
        // `st_blocks` counts 512 bytes each, whatever the file system's blocks are (`stat(3type)`).
        Ok(self.0.metadata()?.blocks() * 512)
    }

    /// How `bytes` from `at` on begin, at least one.
    pub(crate) fn stretch(&self, at: u64, bytes: u64) -> Result<Stretch, DiskError> {
        let data = match retry(|| sys::seek(self.fd(), Seeking::Data, at)) {
            Ok(data) => data,
            // There is none behind this, unless somebody has cut the file short.
            Err(e) if e.raw_os_error() == Some(libc::ENXIO) => match self.size()? {
                size if at.checked_add(bytes).is_some_and(|end| end <= size) => u64::MAX,
                _ => return Err(DiskError::new(DiskErrorKind::PastEnd)),
            },
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                return Ok(Stretch { bytes, hole: false });
            }
            Err(e) => return Err(e.into()),
        };
        if data > at {
            return Ok(Stretch { bytes: bytes.min(data - at), hole: true });
        }
        let hole = retry(|| sys::seek(self.fd(), Seeking::Hole, at))?;
        // One that came between the two looks is no data any more, and counts as it was.
        Ok(Stretch { bytes: bytes.min((hole - at).max(1)), hole: false })
    }

    /// Size in bytes. A block device's is known to a seek, not to its metadata.
    pub(crate) fn size(&self) -> Result<u64, DiskError> {
        Ok((&self.0).seek(SeekFrom::End(0))?)
    }
}

/// What it means that a call moved nothing: a read met the end, a write the limit of the system.
pub(crate) fn ended(direction: Direction) -> DiskError {
    match direction {
        Direction::Read => DiskError::new(DiskErrorKind::PastEnd),
        Direction::Write => DiskError::new(DiskErrorKind::NoSpace),
    }
}

/// The memory of `bufs` behind its first `skip` bytes, as much as one call takes.
pub(crate) fn read_vectors(bufs: &mut BufsMut, skip: usize) -> Vectors {
    collect(bufs.iter_mut().map(|b| (b.as_mut_ptr(), b.len())), skip)
}

/// As [`read_vectors`]; the system only reads there.
pub(crate) fn write_vectors(bufs: &Bufs, skip: usize) -> Vectors {
    collect(bufs.iter().map(|b| (b.as_ptr().cast_mut(), b.len())), skip)
}

fn collect(pieces: impl Iterator<Item = (*mut u8, usize)>, mut skip: usize) -> Vectors {
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

fn retry<T>(mut f: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match f() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

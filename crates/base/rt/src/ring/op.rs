//! Requests as the kernel reads them.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{opcode, squeue, types};

use super::flight::Flight;
use super::regions::Regions;
use crate::buf::{Bufs, BufsMut};
use crate::disk::{DiskError, FileDisk, Vectors, ended, read_vectors, write_vectors};
use crate::sys::Direction;

/// A request for one file.
pub(crate) struct Request {
    pub(crate) file: Arc<FileDisk>,
    pub(crate) what: What,
}

/// What is asked.
pub(crate) enum What {
    /// Fill `into` behind its first `done` bytes; the first byte of `into` belongs to `at`.
    Read { at: u64, into: BufsMut, done: usize },
    /// Write `data` behind its first `done` bytes; the first byte of `data` belongs to `at`.
    Write { at: u64, data: Bufs, done: usize },
    /// `fdatasync`.
    Sync,
    /// `fallocate` with this mode.
    Allocate { mode: i32, at: u64, bytes: u64 },
}

impl What {
    /// Notes that `moved` bytes were moved; says whether that was the rest.
    pub(crate) fn advance(&mut self, moved: u32) -> bool {
        match self {
            Self::Read { into, done, .. } => {
                *done += moved as usize;
                *done == into.iter().map(|b| b.len()).sum::<usize>()
            }
            Self::Write { data, done, .. } => {
                *done += moved as usize;
                *done == data.len()
            }
            Self::Sync | Self::Allocate { .. } => true,
        }
    }

    /// What it means that nothing was moved.
    pub(crate) fn stuck(&self) -> DiskError {
        match self {
            Self::Read { .. } => ended(Direction::Read),
            Self::Write { .. } | Self::Sync | Self::Allocate { .. } => ended(Direction::Write),
        }
    }
}

/// A request with all that its queue entry points to.
pub(crate) struct Prepared {
    request: Request,
    /// On the heap, so that it stays where it is when this moves.
    _vectors: Box<[libc::iovec]>,
}

impl Prepared {
    /// The request's queue entry. It may be pushed while the value returned with it lives.
    fn new(mut request: Request, regions: &Regions) -> (Self, squeue::Entry) {
        let fd = types::Fd(request.file.fd().as_raw_fd());
        let mut kept = Box::default();
        let entry = match &mut request.what {
            What::Read { at, into, done } => {
                let at = *at + *done as u64;
                match one_or_many(read_vectors(into, *done)) {
                    Ok((start, len)) => match regions.find(start, len) {
                        Some(index) => {
                            opcode::ReadFixed::new(fd, start, len, index).offset(at).build()
                        }
                        None => opcode::Read::new(fd, start, len).offset(at).build(),
                    },
                    Err((vectors, count)) => {
                        kept = vectors;
                        opcode::Readv::new(fd, kept.as_ptr(), count).offset(at).build()
                    }
                }
            }
            What::Write { at, data, done } => {
                let at = *at + *done as u64;
                match one_or_many(write_vectors(data, *done)) {
                    Ok((start, len)) => match regions.find(start, len) {
                        Some(index) => {
                            opcode::WriteFixed::new(fd, start, len, index).offset(at).build()
                        }
                        None => opcode::Write::new(fd, start, len).offset(at).build(),
                    },
                    Err((vectors, count)) => {
                        kept = vectors;
                        opcode::Writev::new(fd, kept.as_ptr(), count).offset(at).build()
                    }
                }
            }
            What::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            What::Allocate { mode, at, bytes } => {
                opcode::Fallocate::new(fd, *bytes).offset(*at).mode(*mode).build()
            }
        };
        (Self { request, _vectors: kept }, entry)
    }

    pub(crate) fn into_request(self) -> Request {
        self.request
    }
}

type Many = (Box<[libc::iovec]>, u32);

/// One piece as address and length, several as the array the kernel reads.
fn one_or_many(vectors: Vectors) -> Result<(*mut u8, u32), Many> {
    if let [one] = vectors[..]
        && let Ok(len) = u32::try_from(one.iov_len)
    {
        return Ok((one.iov_base.cast(), len));
    }
    let count = u32::try_from(vectors.len()).expect("at most 1024 pieces");
    Err((vectors.into_vec().into_boxed_slice(), count))
}

/// Queues a request: its number, and whether it has found room.
pub(super) fn start(
    flight: &mut Flight<squeue::Entry, Prepared>,
    request: Request,
    regions: &Regions,
) -> (usize, bool) {
    let (prepared, entry) = Prepared::new(request, regions);
    // SAFETY: with its `Prepared` the flight keeps the file, the vectors and the buffers that the entry names. The buffers
    // of a read are the request's own and nobody touches them meanwhile; those of a write are immutable.
    unsafe { flight.start(prepared, entry) }
}

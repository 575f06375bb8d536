//! Disk requests as io_uring entries.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{opcode, squeue, types};

use super::registered_buffers::RegisteredBuffers;
use super::request_queue::RequestQueue;
use crate::buf::{Bufs, BufsMut};
use crate::disk_file::{
    DiskError, FileDisk, Vectors, read_vectors, write_vectors, zero_transfer_error,
};
use crate::sys::Direction;

/// A request to one file.
pub(crate) struct Request {
    pub(crate) file: Arc<FileDisk>,
    pub(crate) op: RequestOp,
}

/// The operation of a request.
pub(crate) enum RequestOp {
    /// Fill `into` after its first `done` bytes; the first byte of `into` belongs to `at`.
    Read { at: u64, into: BufsMut, done: usize },
    /// Write `data` after its first `done` bytes; the first byte of `data` belongs to `at`.
    Write { at: u64, data: Bufs, done: usize },
    /// `fdatasync`.
    Sync,
    /// `fallocate` with this mode.
    Fallocate { mode: i32, at: u64, bytes: u64 },
}

impl RequestOp {
    /// Records that `moved` bytes were moved; returns whether the transfer is complete.
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
            Self::Sync | Self::Fallocate { .. } => true,
        }
    }

    /// The error if nothing was moved.
    pub(crate) fn no_progress_error(&self) -> DiskError {
        match self {
            Self::Read { .. } => zero_transfer_error(Direction::Read),
            Self::Write { .. } | Self::Sync | Self::Fallocate { .. } => {
                zero_transfer_error(Direction::Write)
            }
        }
    }
}

/// A request with everything that its queue entry points to.
pub(crate) struct PreparedRequest {
    request: Request,
    /// On the heap, so that it does not move with this.
    _vectors: Box<[libc::iovec]>,
}

impl PreparedRequest {
    /// The request's queue entry. It may be pushed while the value returned with it lives.
    fn new(mut request: Request, regions: &RegisteredBuffers) -> (Self, squeue::Entry) {
        let fd = types::Fd(request.file.fd().as_raw_fd());
        let mut kept = Box::default();
        let entry = match &mut request.op {
            RequestOp::Read { at, into, done } => {
                let at = *at + *done as u64;
                match single_or_vectors(read_vectors(into, *done)) {
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
            RequestOp::Write { at, data, done } => {
                let at = *at + *done as u64;
                match single_or_vectors(write_vectors(data, *done)) {
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
            RequestOp::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            RequestOp::Fallocate { mode, at, bytes } => {
                opcode::Fallocate::new(fd, *bytes).offset(*at).mode(*mode).build()
            }
        };
        (Self { request, _vectors: kept }, entry)
    }

    pub(crate) fn into_request(self) -> Request {
        self.request
    }
}

type VectorArray = (Box<[libc::iovec]>, u32);

/// One buffer as address and length, several as the array for the kernel.
fn single_or_vectors(vectors: Vectors) -> Result<(*mut u8, u32), VectorArray> {
    if let [one] = vectors[..]
        && let Ok(len) = u32::try_from(one.iov_len)
    {
        return Ok((one.iov_base.cast(), len));
    }
    let count = u32::try_from(vectors.len()).expect("at most 1024 pieces");
    Err((vectors.into_vec().into_boxed_slice(), count))
}

/// Queues a request: returns its number, and whether there was room.
pub(super) fn enqueue(
    queue: &mut RequestQueue<squeue::Entry, PreparedRequest>,
    request: Request,
    regions: &RegisteredBuffers,
) -> (usize, bool) {
    let (prepared, entry) = PreparedRequest::new(request, regions);
    // SAFETY: with its `PreparedRequest` the queue keeps the file, the vectors and the buffers that
    // the entry names. The buffers of a read are the request's own and untouched meanwhile; those
    // of a write are immutable.
    unsafe { queue.enqueue(prepared, entry) }
}

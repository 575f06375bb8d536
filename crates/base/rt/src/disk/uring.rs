//! Disks by the core's io_uring.

use std::rc::Rc;
use std::sync::Arc;

use super::blocking;
use crate::buf::{Bufs, BufsMut};
use crate::disk_file::{
    ALLOCATE_MODE, DiskError, FileDisk, PUNCH_MODE, Signature, SparseRun, ZERO_MODE,
};
use crate::ring::{Request, RequestOp, Ring};

/// How often the kernel may return "try again" for one request before it fails.
const MAX_RETRIES: u32 = 100;

#[derive(Debug)]
pub(crate) struct UringDisk {
    ring: Rc<Ring>,
    file: Arc<FileDisk>,
}

impl UringDisk {
    pub(crate) fn new(ring: Rc<Ring>, file: FileDisk) -> Self {
        Self { ring, file: Arc::new(file) }
    }

    pub(crate) async fn read(&self, at: u64, into: BufsMut) -> Result<BufsMut, DiskError> {
        match self.run(RequestOp::Read { at, into, done: 0 }).await? {
            RequestOp::Read { into, .. } => Ok(into),
            _ => unreachable!("a completed request has the type it was submitted with"),
        }
    }

    pub(crate) async fn write(&self, at: u64, data: Bufs) -> Result<(), DiskError> {
        self.run(RequestOp::Write { at, data, done: 0 }).await.map(drop)
    }

    pub(crate) async fn sync(&self) -> Result<(), DiskError> {
        self.run(RequestOp::Sync).await.map(drop)
    }

    pub(crate) async fn punch(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.run(RequestOp::Fallocate { mode: PUNCH_MODE, at, bytes }).await.map(drop)
    }

    pub(crate) async fn zero(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.run(RequestOp::Fallocate { mode: ZERO_MODE, at, bytes }).await.map(drop)
    }

    pub(crate) async fn allocate(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.run(RequestOp::Fallocate { mode: ALLOCATE_MODE, at, bytes }).await.map(drop)
    }

    pub(crate) async fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        blocking::run_blocking(&self.file, move |file| file.set_len(bytes)).await
    }

    pub(crate) async fn allocated(&self) -> Result<u64, DiskError> {
        blocking::run_blocking(&self.file, FileDisk::allocated).await
    }

    pub(crate) async fn signatures(&self) -> Option<Vec<Signature>> {
        blocking::run_blocking(&self.file, |file| Ok(file.signatures())).await.ok().flatten()
    }

    pub(crate) async fn sparse_run(&self, at: u64, bytes: u64) -> Result<SparseRun, DiskError> {
        blocking::run_blocking(&self.file, move |file| file.sparse_run(at, bytes)).await
    }

    pub(crate) async fn size(&self) -> Result<u64, DiskError> {
        blocking::run_blocking(&self.file, FileDisk::size).await
    }

    /// Runs a request to completion: a short transfer is continued.
    async fn run(&self, mut what: RequestOp) -> Result<RequestOp, DiskError> {
        let mut patience = MAX_RETRIES;
        loop {
            let request = Request { file: Arc::clone(&self.file), op: what };
            let (result, back) = self.ring.run(request).await;
            what = back.into_request().op;
            match next_step(&mut what, result, &mut patience) {
                NextStep::Done => return Ok(what),
                NextStep::Continue => {}
                NextStep::Retry => tokio::task::yield_now().await,
                NextStep::Fail(e) => return Err(e),
            }
        }
    }
}

/// What to do after a request came back.
#[derive(Debug, PartialEq, Eq)]
enum NextStep {
    Done,
    /// Request the rest.
    Continue,
    /// Request the same, after other ready tasks.
    Retry,
    Fail(DiskError),
}

fn next_step(what: &mut RequestOp, result: i32, patience: &mut u32) -> NextStep {
    match u32::try_from(result) {
        Ok(moved) if what.advance(moved) => NextStep::Done,
        Ok(0) => NextStep::Fail(what.no_progress_error()),
        Ok(_) => NextStep::Continue,
        Err(_) if *patience > 0 && is_transient(-result) => {
            *patience -= 1;
            NextStep::Retry
        }
        Err(_) => NextStep::Fail(DiskError::from_errno(-result)),
    }
}

/// Whether an error is no error of the disk.
fn is_transient(errno: i32) -> bool {
    matches!(errno, libc::EINTR | libc::EAGAIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk_file::DiskErrorKind;

    #[test]
    fn a_request_continues_retries_and_gives_up() {
        let mut what = RequestOp::Write { at: 0, data: Bufs::zeroes(4096), done: 0 };
        let mut patience = MAX_RETRIES;
        let mut next = |result| next_step(&mut what, result, &mut patience);
        assert_eq!(next(512), NextStep::Continue);
        for round in 0..MAX_RETRIES {
            let errno = if round % 2 == 0 { libc::EINTR } else { libc::EAGAIN };
            assert_eq!(next(-errno), NextStep::Retry);
        }
        let tired = DiskError::from_errno(libc::EAGAIN);
        assert_eq!(next(-libc::EAGAIN), NextStep::Fail(tired), "not for ever");
        let full = DiskError::new(DiskErrorKind::NoSpace);
        assert_eq!(next(0), NextStep::Fail(full), "nothing was moved");
        assert_eq!(next(-libc::EIO), NextStep::Fail(DiskError::from_errno(libc::EIO)));
        assert_eq!(next(3072), NextStep::Continue);
        assert_eq!(next(512), NextStep::Done);
    }
}

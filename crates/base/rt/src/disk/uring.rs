//! Disks by the core's io_uring.

use std::rc::Rc;
use std::sync::Arc;

use super::file::{ALLOCATE, FileDisk, PUNCH, ZERO};
use super::{DiskError, Signature, Stretch, pool};
use crate::buf::{Bufs, BufsMut};
use crate::ring::{Request, Ring, What};

/// Times that the kernel may say "try again" to one request before it counts as failed.
const PATIENCE: u32 = 100;

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
        match self.run(What::Read { at, into, done: 0 }).await? {
            What::Read { into, .. } => Ok(into),
            _ => unreachable!("a request comes back as it went"),
        }
    }

    pub(crate) async fn write(&self, at: u64, data: Bufs) -> Result<(), DiskError> {
        self.run(What::Write { at, data, done: 0 }).await.map(drop)
    }

    pub(crate) async fn sync(&self) -> Result<(), DiskError> {
        self.run(What::Sync).await.map(drop)
    }

    pub(crate) async fn punch(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.run(What::Allocate { mode: PUNCH, at, bytes }).await.map(drop)
    }

    pub(crate) async fn zero(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.run(What::Allocate { mode: ZERO, at, bytes }).await.map(drop)
    }

    pub(crate) async fn allocate(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.run(What::Allocate { mode: ALLOCATE, at, bytes }).await.map(drop)
    }

    pub(crate) async fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        pool::run(&self.file, move |file| file.set_len(bytes)).await
    }

    pub(crate) async fn allocated(&self) -> Result<u64, DiskError> {
        pool::run(&self.file, FileDisk::allocated).await
    }

    pub(crate) async fn signatures(&self) -> Option<Vec<Signature>> {
        pool::run(&self.file, |file| Ok(file.signatures())).await.ok().flatten()
    }

    pub(crate) async fn stretch(&self, at: u64, bytes: u64) -> Result<Stretch, DiskError> {
        pool::run(&self.file, move |file| file.stretch(at, bytes)).await
    }

    pub(crate) async fn size(&self) -> Result<u64, DiskError> {
        pool::run(&self.file, FileDisk::size).await
    }

    /// Runs a request to its end: a transfer that stopped short goes on where it stopped.
    async fn run(&self, mut what: What) -> Result<What, DiskError> {
        let mut patience = PATIENCE;
        loop {
            let request = Request { file: Arc::clone(&self.file), what };
            let (result, back) = self.ring.run(request).await;
            what = back.into_request().what;
            match judge(&mut what, result, &mut patience) {
                Next::Done => return Ok(what),
                Next::GoOn => {}
                Next::TryAgain => tokio::task::yield_now().await,
                Next::Fail(e) => return Err(e),
            }
        }
    }
}

/// What to do after a request came back.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Done,
    /// Ask for the rest.
    GoOn,
    /// Ask for the same, after whoever else is ready.
    TryAgain,
    Fail(DiskError),
}

fn judge(what: &mut What, result: i32, patience: &mut u32) -> Next {
    match u32::try_from(result) {
        Ok(moved) if what.advance(moved) => Next::Done,
        Ok(0) => Next::Fail(what.stuck()),
        Ok(_) => Next::GoOn,
        Err(_) if *patience > 0 && passes(-result) => {
            *patience -= 1;
            Next::TryAgain
        }
        Err(_) => Next::Fail(DiskError::from_errno(-result)),
    }
}

/// Whether an error says nothing about the disk.
fn passes(errno: i32) -> bool {
    matches!(errno, libc::EINTR | libc::EAGAIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::DiskErrorKind;

    #[test]
    fn a_request_goes_on_tries_again_and_gives_up() {
        let mut what = What::Write { at: 0, data: Bufs::zeroes(4096), done: 0 };
        let mut patience = PATIENCE;
        let mut next = |result| judge(&mut what, result, &mut patience);
        assert_eq!(next(512), Next::GoOn);
        for round in 0..PATIENCE {
            let errno = if round % 2 == 0 { libc::EINTR } else { libc::EAGAIN };
            assert_eq!(next(-errno), Next::TryAgain);
        }
        let tired = DiskError::from_errno(libc::EAGAIN);
        assert_eq!(next(-libc::EAGAIN), Next::Fail(tired), "not for ever");
        let full = DiskError::new(DiskErrorKind::NoSpace);
        assert_eq!(next(0), Next::Fail(full), "nothing was moved");
        assert_eq!(next(-libc::EIO), Next::Fail(DiskError::from_errno(libc::EIO)));
        assert_eq!(next(3072), Next::GoOn);
        assert_eq!(next(512), Next::Done);
    }
}

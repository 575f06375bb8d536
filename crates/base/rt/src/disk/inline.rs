//! Disks on memory file systems: plain calls on the core.
//!
//! Such files do not wait for a device (unless memory is swapped out), and inline calls are the
//! cheapest: these file systems do not support non-blocking submission, so io_uring would hand
//! every operation to a worker thread.

use crate::buf::{Bufs, BufsMut};
use crate::disk_file::{
    ALLOCATE_MODE, DiskError, FileDisk, PUNCH_MODE, Signature, SparseRun, ZERO_MODE,
};

/// Longest range handled before yielding to other tasks, in bytes: some milliseconds of work.
const STEP_BYTES: u64 = 16 << 20;

#[derive(Debug)]
pub(crate) struct InlineDisk(FileDisk);

impl InlineDisk {
    pub(crate) fn new(file: FileDisk) -> Self {
        Self(file)
    }

    pub(crate) async fn read(&self, at: u64, mut into: BufsMut) -> Result<BufsMut, DiskError> {
        self.0.read(at, &mut into)?;
        Ok(into)
    }

    pub(crate) async fn write(&self, at: u64, data: Bufs) -> Result<(), DiskError> {
        self.0.write(at, &data)
    }

    pub(crate) async fn sync(&self) -> Result<(), DiskError> {
        self.0.sync()
    }

    pub(crate) async fn punch(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.fallocate_in_steps(PUNCH_MODE, at, bytes).await
    }

    pub(crate) async fn zero(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.fallocate_in_steps(ZERO_MODE, at, bytes).await
    }

    pub(crate) async fn allocate(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        self.fallocate_in_steps(ALLOCATE_MODE, at, bytes).await
    }

    pub(crate) async fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        self.0.set_len(bytes)
    }

    pub(crate) async fn allocated(&self) -> Result<u64, DiskError> {
        self.0.allocated()
    }

    pub(crate) async fn signatures(&self) -> Option<Vec<Signature>> {
        self.0.signatures()
    }

    pub(crate) async fn sparse_run(&self, at: u64, bytes: u64) -> Result<SparseRun, DiskError> {
        self.0.sparse_run(at, STEP_BYTES.min(bytes))
    }

    pub(crate) async fn size(&self) -> Result<u64, DiskError> {
        self.0.size()
    }

    async fn fallocate_in_steps(&self, mode: i32, at: u64, bytes: u64) -> Result<(), DiskError> {
        let mut done = 0;
        loop {
            let step = STEP_BYTES.min(bytes - done);
            self.0.fallocate(mode, at + done, step)?;
            done += step;
            if done == bytes {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
    }
}

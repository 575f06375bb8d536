//! Disks by blocking calls on a small pool of threads: for systems without io_uring.

use std::sync::Arc;

use crate::buf::{Bufs, BufsMut};
use crate::disk_file::{
    ALLOCATE_MODE, DiskError, DiskErrorKind, FileDisk, PUNCH_MODE, Signature, SparseRun, ZERO_MODE,
};

#[derive(Debug)]
pub(crate) struct BlockingDisk(Arc<FileDisk>);

impl BlockingDisk {
    pub(crate) fn new(file: FileDisk) -> Self {
        Self(Arc::new(file))
    }

    pub(crate) async fn read(&self, at: u64, mut into: BufsMut) -> Result<BufsMut, DiskError> {
        run_blocking(&self.0, move |file| file.read(at, &mut into).map(|()| into)).await
    }

    pub(crate) async fn write(&self, at: u64, data: Bufs) -> Result<(), DiskError> {
        run_blocking(&self.0, move |file| file.write(at, &data)).await
    }

    pub(crate) async fn sync(&self) -> Result<(), DiskError> {
        run_blocking(&self.0, FileDisk::sync).await
    }

    pub(crate) async fn punch(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        run_blocking(&self.0, move |file| file.fallocate(PUNCH_MODE, at, bytes)).await
    }

    pub(crate) async fn zero(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        run_blocking(&self.0, move |file| file.fallocate(ZERO_MODE, at, bytes)).await
    }

    pub(crate) async fn allocate(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        run_blocking(&self.0, move |file| file.fallocate(ALLOCATE_MODE, at, bytes)).await
    }

    pub(crate) async fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        run_blocking(&self.0, move |file| file.set_len(bytes)).await
    }

    pub(crate) async fn allocated(&self) -> Result<u64, DiskError> {
        run_blocking(&self.0, FileDisk::allocated).await
    }

    pub(crate) async fn signatures(&self) -> Option<Vec<Signature>> {
        run_blocking(&self.0, |file| Ok(file.signatures())).await.ok().flatten()
    }

    pub(crate) async fn sparse_run(&self, at: u64, bytes: u64) -> Result<SparseRun, DiskError> {
        run_blocking(&self.0, move |file| file.sparse_run(at, bytes)).await
    }

    pub(crate) async fn size(&self) -> Result<u64, DiskError> {
        run_blocking(&self.0, FileDisk::size).await
    }
}

/// Runs `f` on the pool. It owns its buffers, so it may outlive its caller.
pub(super) async fn run_blocking<T: Send + 'static>(
    file: &Arc<FileDisk>,
    f: impl FnOnce(&FileDisk) -> Result<T, DiskError> + Send + 'static,
) -> Result<T, DiskError> {
    let file = Arc::clone(file);
    tokio::task::spawn_blocking(move || f(&file))
        .await
        .unwrap_or(Err(DiskError::new(DiskErrorKind::Gone)))
}

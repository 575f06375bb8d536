//! Disks by blocking calls on a small pool of threads: where io_uring is not to be had.

use std::sync::Arc;

use super::file::{ALLOCATE, FileDisk, PUNCH, ZERO};
use super::{DiskError, DiskErrorKind, Signature, Stretch};
use crate::buf::{Bufs, BufsMut};

#[derive(Debug)]
pub(crate) struct PoolDisk(Arc<FileDisk>);

impl PoolDisk {
    pub(crate) fn new(file: FileDisk) -> Self {
        Self(Arc::new(file))
    }

    pub(crate) async fn read(&self, at: u64, mut into: BufsMut) -> Result<BufsMut, DiskError> {
        run(&self.0, move |file| file.read(at, &mut into).map(|()| into)).await
    }

    pub(crate) async fn write(&self, at: u64, data: Bufs) -> Result<(), DiskError> {
        run(&self.0, move |file| file.write(at, &data)).await
    }

    pub(crate) async fn sync(&self) -> Result<(), DiskError> {
        run(&self.0, FileDisk::sync).await
    }

    pub(crate) async fn punch(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        run(&self.0, move |file| file.fallocate(PUNCH, at, bytes)).await
    }

    pub(crate) async fn zero(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        run(&self.0, move |file| file.fallocate(ZERO, at, bytes)).await
    }

    pub(crate) async fn allocate(&self, at: u64, bytes: u64) -> Result<(), DiskError> {
        run(&self.0, move |file| file.fallocate(ALLOCATE, at, bytes)).await
    }

    pub(crate) async fn set_len(&self, bytes: u64) -> Result<(), DiskError> {
        run(&self.0, move |file| file.set_len(bytes)).await
    }

    pub(crate) async fn allocated(&self) -> Result<u64, DiskError> {
        run(&self.0, FileDisk::allocated).await
    }

    pub(crate) async fn signatures(&self) -> Option<Vec<Signature>> {
        run(&self.0, |file| Ok(file.signatures())).await.ok().flatten()
    }

    pub(crate) async fn stretch(&self, at: u64, bytes: u64) -> Result<Stretch, DiskError> {
        run(&self.0, move |file| file.stretch(at, bytes)).await
    }

    pub(crate) async fn size(&self) -> Result<u64, DiskError> {
        run(&self.0, FileDisk::size).await
    }
}

/// Runs `f` on the pool. It owns its buffers, so it may outlive whoever waits for its answer.
pub(super) async fn run<T: Send + 'static>(
    file: &Arc<FileDisk>,
    f: impl FnOnce(&FileDisk) -> Result<T, DiskError> + Send + 'static,
) -> Result<T, DiskError> {
    let file = Arc::clone(file);
    tokio::task::spawn_blocking(move || f(&file))
        .await
        .unwrap_or(Err(DiskError::new(DiskErrorKind::Gone)))
}

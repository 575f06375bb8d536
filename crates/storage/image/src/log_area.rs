//! Access to the log area of an image.

use std::fmt;
use std::path::Path;
use std::rc::Rc;

use block::Ctx;
use disk::{ImageError, ImageErrorReason, ImageLabel, LOG_AREA, LOG_TRANSFER_MAX, LogArea};
use futures_util::future::LocalBoxFuture;
use rt::Core;
use rt::buf::copy_in;
use rt::disk::{DiskError, DiskErrorKind};
use tokio::sync::{Semaphore, SemaphorePermit};
use uuid::Uuid;

use super::{FlatImage, PAGE_BYTES};

/// The [`LogArea`] of an image. While idle it holds no memory. A command that holds memory may wait
/// for the log's: that is [`MemoryClass::LocalIo`](block::MemoryClass::LocalIo), which is freed by
/// the image's disk alone (RFD 0037). The image stays open as long as this object exists.
struct ImageLogArea {
    image: Rc<FlatImage>,
    /// Pages that its reads and writes may still use, of [`LOG_TRANSFER_MAX`] bytes in all.
    free_pages: Semaphore,
}

impl FlatImage {
    /// The area of the image's intent log, whether it has one yet or not. There must be only one
    /// user of it.
    ///
    /// # Errors
    /// [`ImageErrorReason::NoLogArea`] if the image's data begins too early.
    pub async fn log_area(self: &Rc<Self>) -> Result<Rc<dyn LogArea>, ImageError> {
        let label = self.label();
        if !label.has_log_area() {
            let reason = ImageErrorReason::NoLogArea { data_offset: label.data_offset };
            return Err(reason.at_path(self.path()));
        }
        let free_pages = Semaphore::new(LOG_TRANSFER_MAX / PAGE_BYTES as usize);
        Ok(Rc::new(ImageLogArea { image: Rc::clone(self), free_pages }))
    }
}

impl LogArea for ImageLogArea {
    fn label(&self) -> ImageLabel {
        self.image.label()
    }

    fn path(&self) -> &Path {
        self.image.path()
    }

    fn disk_session(&self, core: &Core) -> Uuid {
        let attachment = self.image.medium.info().attachment_number;
        Uuid::from_u128(core.boot_id() ^ u128::from(attachment))
    }

    fn read(&self, at: u64, len: usize) -> LocalBoxFuture<'_, Result<Vec<u8>, DiskError>> {
        Box::pin(async move {
            self.check_range(at, len)?;
            let _pages = self.acquire_pages(len).await;
            self.check_not_failed()?;
            let read = self.image.medium.read(at, len, &self.ctx(len).await).await;
            Ok(read.map_err(|e| self.note_disk_error(e.into()))?.to_vec())
        })
    }

    fn write<'a>(&'a self, at: u64, bytes: &'a [u8]) -> LocalBoxFuture<'a, Result<(), DiskError>> {
        Box::pin(async move {
            self.check_range(at, bytes.len())?;
            let _pages = self.acquire_pages(bytes.len()).await;
            self.check_not_failed()?;
            let ctx = self.ctx(bytes.len()).await;
            let data = copy_in(ctx.credit(), bytes);
            let written = self.image.medium.write(at, data, &ctx).await;
            written.map_err(|e| self.note_disk_error(e.into()))
        })
    }

    fn sync(&self) -> LocalBoxFuture<'_, Result<(), block::Error>> {
        Box::pin(async move {
            if self.image.is_failed.get() {
                return Err(block::Error::Gone);
            }
            self.image.flush(&self.ctx(0).await).await
        })
    }

    fn declare_log(&self) -> LocalBoxFuture<'_, Result<(), ImageError>> {
        Box::pin(self.image.declare_log())
    }
}

impl ImageLogArea {
    /// Memory for one operation with `len` bytes of data.
    async fn ctx(&self, len: usize) -> Ctx {
        self.image.medium.ctx(&self.image.memory, len.max(1)).await
    }

    async fn acquire_pages(&self, len: usize) -> SemaphorePermit<'_> {
        let pages =
            u32::try_from(len / PAGE_BYTES as usize).expect("at most LOG_TRANSFER_MAX bytes");
        self.free_pages.acquire_many(pages).await.expect("the semaphore is never closed")
    }

    fn check_range(&self, at: u64, len: usize) -> Result<(), DiskError> {
        let end = at.checked_add(len as u64);
        let inside = at >= LOG_AREA.start && end.is_some_and(|end| end <= LOG_AREA.end);
        let whole = at.is_multiple_of(PAGE_BYTES) && (len as u64).is_multiple_of(PAGE_BYTES);
        if !inside {
            return Err(DiskError::new(DiskErrorKind::PastEnd));
        }
        if !whole || len > LOG_TRANSFER_MAX {
            return Err(DiskError::new(DiskErrorKind::Misaligned));
        }
        Ok(())
    }

    fn check_not_failed(&self) -> Result<(), DiskError> {
        if self.image.is_failed.get() {
            return Err(DiskError::new(DiskErrorKind::Gone));
        }
        Ok(())
    }

    /// Fails the image if the disk is lost or was truncated.
    fn note_disk_error(&self, e: DiskError) -> DiskError {
        if matches!(e.kind, DiskErrorKind::Gone | DiskErrorKind::PastEnd) {
            self.image.is_failed.set(true);
        }
        e
    }
}

impl fmt::Debug for ImageLogArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageLogArea").field("image", &self.image).finish_non_exhaustive()
    }
}

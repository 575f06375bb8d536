//! The bytes of an image that are kept for its intent log.

use std::fmt;
use std::path::Path;
use std::rc::Rc;

use block::Ctx;
use disk::{Answer, FileError, LOG_AREA, LOG_TRANSFER_MAX, Label, LogArea, Reason};
use rt::Core;
use rt::buf::copy_in;
use rt::disk::{DiskError, DiskErrorKind};
use tokio::sync::{Semaphore, SemaphorePermit};
use uuid::Uuid;

use super::{File, PAGE};

/// The [`LogArea`] of an image. One that nobody uses holds no memory. A command may wait for the log's while it holds some of its
/// own: it is [`Class::Immediate`](block::Class::Immediate), which needs nothing but the image's disk to come back (RFD 0037).
/// The image stays open as long as its area lives.
struct Area {
    file: Rc<File>,
    /// Pages that its reads and writes may still hold, of [`LOG_TRANSFER_MAX`] bytes in all.
    room: Semaphore,
}

impl File {
    /// The place of the image's intent log, whether it has one yet or not. Whoever takes it is alone in
    /// using it.
    ///
    /// # Errors
    /// [`Reason::NoRoomForLog`] if the image's data begins too early.
    pub async fn log_area(self: &Rc<Self>) -> Result<Rc<dyn LogArea>, FileError> {
        let label = self.label();
        if !label.has_room_for_log() {
            let reason = Reason::NoRoomForLog { data_offset: label.data_offset };
            return Err(reason.at(self.path()));
        }
        let room = Semaphore::new(LOG_TRANSFER_MAX / PAGE as usize);
        Ok(Rc::new(Area { file: Rc::clone(self), room }))
    }
}

impl LogArea for Area {
    fn label(&self) -> Label {
        self.file.label()
    }

    fn path(&self) -> &Path {
        self.file.path()
    }

    fn boot(&self, core: &Core) -> Uuid {
        let attachment = self.file.medium.info().attachment;
        Uuid::from_u128(core.boot_id() ^ u128::from(attachment))
    }

    fn read(&self, at: u64, len: usize) -> Answer<'_, Vec<u8>, DiskError> {
        Box::pin(async move {
            self.check(at, len)?;
            let _room = self.take(len).await;
            self.check_alive()?;
            let read = self.file.medium.read(at, len, &self.memory(len).await).await;
            Ok(read.map_err(|e| self.judge(e.into()))?.to_vec())
        })
    }

    fn write<'a>(&'a self, at: u64, bytes: &'a [u8]) -> Answer<'a, (), DiskError> {
        Box::pin(async move {
            self.check(at, bytes.len())?;
            let _room = self.take(bytes.len()).await;
            self.check_alive()?;
            let ctx = self.memory(bytes.len()).await;
            let data = copy_in(ctx.credit(), bytes);
            let written = self.file.medium.write(at, data, &ctx).await;
            written.map_err(|e| self.judge(e.into()))
        })
    }

    fn sync(&self) -> Answer<'_, (), block::Error> {
        Box::pin(async move {
            if self.file.dead.get() {
                return Err(block::Error::Gone);
            }
            self.file.flush(&self.memory(0).await).await
        })
    }

    fn declare(&self) -> Answer<'_, (), FileError> {
        Box::pin(self.file.declare_log())
    }
}

impl Area {
    /// Memory for one operation with `len` bytes of data.
    async fn memory(&self, len: usize) -> Ctx {
        self.file.medium.ctx(&self.file.memory, len.max(1)).await
    }

    async fn take(&self, len: usize) -> SemaphorePermit<'_> {
        let pages = u32::try_from(len / PAGE as usize).expect("at most a window");
        self.room.acquire_many(pages).await.expect("it is never closed")
    }

    fn check(&self, at: u64, len: usize) -> Result<(), DiskError> {
        let end = at.checked_add(len as u64);
        let inside = at >= LOG_AREA.start && end.is_some_and(|end| end <= LOG_AREA.end);
        let whole = at.is_multiple_of(PAGE) && (len as u64).is_multiple_of(PAGE);
        if !inside {
            return Err(DiskError::new(DiskErrorKind::PastEnd));
        }
        if !whole || len > LOG_TRANSFER_MAX {
            return Err(DiskError::new(DiskErrorKind::Misaligned));
        }
        Ok(())
    }

    fn check_alive(&self) -> Result<(), DiskError> {
        if self.file.dead.get() {
            return Err(DiskError::new(DiskErrorKind::Gone));
        }
        Ok(())
    }

    /// Ends the image if the disk is lost, or was cut short.
    fn judge(&self, e: DiskError) -> DiskError {
        if matches!(e.kind, DiskErrorKind::Gone | DiskErrorKind::PastEnd) {
            self.file.dead.set(true);
        }
        e
    }
}

impl fmt::Debug for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Area").field("file", &self.file).finish_non_exhaustive()
    }
}

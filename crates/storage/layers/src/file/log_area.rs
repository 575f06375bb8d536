//! The bytes of an image that are kept for its intent log: reads, writes and syncs that reach nothing
//! else of it.

use std::fmt;
use std::path::Path;
use std::rc::Rc;

use block::Ctx;
use rt::Core;
use rt::buf::copy_in;
use rt::disk::{DiskError, DiskErrorKind};
use tokio::sync::{Semaphore, SemaphorePermit};
use uuid::Uuid;

use super::label::LOG_AREA;
use super::{File, FileError, Label, PAGE, Reason};

/// Memory of an area, in bytes: what its reads and writes hold together at most.
const WINDOW: usize = 32 << 10;

/// Access to the [`LOG_AREA`] of an image, through the image's own disk: a failed sync ends the image,
/// and a flush that somebody asks of the image at the same moment is shared.
///
/// An area that nobody uses holds no memory. A command may wait for the log's while it holds some of
/// its own: it is [`Class::Immediate`], which needs nothing but the image's disk to come back
/// (RFD 0037). The image stays open as long as its area lives.
pub struct LogArea {
    file: Rc<File>,
    /// Pages of the window that are free.
    room: Semaphore,
}

impl File {
    /// The place of the image's intent log, whether it has one yet or not. Whoever takes it is alone in
    /// using it.
    ///
    /// # Errors
    /// [`Reason::NoRoomForLog`] if the image's data begins too early.
    pub async fn log_area(self: &Rc<Self>) -> Result<LogArea, FileError> {
        let label = self.label();
        if !label.has_room_for_log() {
            let reason = Reason::NoRoomForLog { data_offset: label.data_offset };
            return Err(reason.at(self.path()));
        }
        Ok(LogArea { file: Rc::clone(self), room: Semaphore::new(WINDOW / PAGE as usize) })
    }
}

impl LogArea {
    /// Most bytes that one read or write takes.
    pub const MAX_TRANSFER: usize = WINDOW;

    /// What the image's label says now.
    #[must_use]
    pub fn label(&self) -> Label {
        self.file.label()
    }

    /// The image, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Reads `len` bytes, whole pages of 4096, from byte `at` of the image on.
    ///
    /// # Errors
    /// [`DiskErrorKind::PastEnd`] outside of the area, [`DiskErrorKind::Misaligned`],
    /// [`DiskErrorKind::Gone`] once the image is lost, and what the disk reports.
    pub async fn read(&self, at: u64, len: usize) -> Result<Vec<u8>, DiskError> {
        self.check(at, len)?;
        let _room = self.take(len).await;
        self.check_alive()?;
        let read = self.file.medium.read(at, len, &self.memory(len).await).await;
        Ok(read.map_err(|e| self.judge(e.into()))?.to_vec())
    }

    /// Writes `bytes`, whole pages of 4096, from byte `at` of the image on. Durable after the next
    /// [`Self::sync`].
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DiskError> {
        self.check(at, bytes.len())?;
        let _room = self.take(bytes.len()).await;
        self.check_alive()?;
        let ctx = self.memory(bytes.len()).await;
        let data = copy_in(ctx.credit(), bytes);
        let written = self.file.medium.write(at, data, &ctx).await;
        written.map_err(|e| self.judge(e.into()))
    }

    /// Makes durable whatever was written to the image before, its data included.
    ///
    /// # Errors
    /// [`block::Error::Gone`]; the image is then lost, as after a flush that failed.
    pub async fn sync(&self) -> Result<(), block::Error> {
        if self.file.dead.get() {
            return Err(block::Error::Gone);
        }
        self.file.flush(&self.memory(0).await).await
    }

    /// Names what the image's disk has been through since the machine was booted: as long as the name is the same,
    /// it has kept what it had completed, unless a sync has failed.
    #[must_use]
    pub fn boot(&self, core: &Core) -> Uuid {
        let attachment = self.file.medium.info().attachment;
        Uuid::from_u128(core.boot_id() ^ u128::from(attachment))
    }

    /// Declares in the image's label that there is a log. Durable when this returns.
    ///
    /// # Errors
    /// [`FileError`]
    pub async fn declare(&self) -> Result<(), FileError> {
        self.file.declare_log().await
    }

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
        if !whole || len > Self::MAX_TRANSFER {
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

impl fmt::Debug for LogArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogArea").field("file", &self.file).finish_non_exhaustive()
    }
}

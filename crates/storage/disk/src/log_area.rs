//! The area of an image for its write-intent log.

use std::fmt;
use std::path::Path;

use futures_util::future::LocalBoxFuture;
use rt::Core;
use rt::disk::DiskError;
use uuid::Uuid;

use crate::{ImageError, ImageLabel};

/// Most bytes of one read or write of a [`LogArea`].
pub const LOG_TRANSFER_MAX: usize = 32 << 10;

/// Access to the [`LOG_AREA`](crate::LOG_AREA) of an image, through the image's own disk, and to
/// nothing else of it. A failed sync fails the image. A sync is shared with flushes of the image at
/// the same moment.
pub trait LogArea: fmt::Debug {
    /// The image's current label.
    fn label(&self) -> ImageLabel;

    /// The image, for messages.
    fn path(&self) -> &Path;

    /// Identifies the time since the machine booted and the disk was attached: as long as it is the
    /// same, the disk has kept all completed writes, unless a sync has failed.
    fn disk_session(&self, core: &Core) -> Uuid;

    /// Reads `len` bytes, whole pages of 4096 and at most [`LOG_TRANSFER_MAX`], from byte `at` of
    /// the image on.
    ///
    /// # Errors
    /// [`DiskErrorKind::PastEnd`](rt::disk::DiskErrorKind::PastEnd) outside of the area,
    /// [`Misaligned`](rt::disk::DiskErrorKind::Misaligned), [`Gone`](rt::disk::DiskErrorKind::Gone)
    /// once the image is lost, and what the disk reports.
    fn read(&self, at: u64, len: usize) -> LocalBoxFuture<'_, Result<Vec<u8>, DiskError>>;

    /// Writes `bytes`, whole pages of 4096, from byte `at` of the image on; durable after the next
    /// [`Self::sync`].
    ///
    /// # Errors
    /// As [`Self::read`].
    fn write<'a>(&'a self, at: u64, bytes: &'a [u8]) -> LocalBoxFuture<'a, Result<(), DiskError>>;

    /// Makes all earlier writes to the image durable, its data included.
    ///
    /// # Errors
    /// [`block::Error::Gone`]; the image has failed then, as after a failed flush.
    fn sync(&self) -> LocalBoxFuture<'_, Result<(), block::Error>>;

    /// Declares in the image's label that it has a log. Durable when this returns.
    ///
    /// # Errors
    /// [`ImageError`]
    fn declare_log(&self) -> LocalBoxFuture<'_, Result<(), ImageError>>;
}

//! The part of an image that is kept for its write-intent log.

use std::fmt;
use std::path::Path;
use std::pin::Pin;

use rt::Core;
use rt::disk::DiskError;
use uuid::Uuid;

use crate::{FileError, Label};

/// Most bytes that one read or write of a [`LogArea`] takes.
pub const LOG_TRANSFER_MAX: usize = 32 << 10;

/// What an operation on a [`LogArea`] gives in the end.
pub type Answer<'a, T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + 'a>>;

/// Access to the [`LOG_AREA`](crate::LOG_AREA) of an image, through the image's own disk: reads, writes and syncs that reach
/// nothing else of it. A failed sync ends the image, and a flush that somebody asks of the image at the same moment is shared.
pub trait LogArea: fmt::Debug {
    /// What the image's label says now.
    fn label(&self) -> Label;

    /// The image, for messages.
    fn path(&self) -> &Path;

    /// Names what the image's disk has been through since the machine was booted: as long as the name is the same, it has kept
    /// what it had completed, unless a sync has failed.
    fn boot(&self, core: &Core) -> Uuid;

    /// Reads `len` bytes, whole pages of 4096 and at most [`LOG_TRANSFER_MAX`], from byte `at` of the image on.
    ///
    /// # Errors
    /// [`DiskErrorKind::PastEnd`](rt::disk::DiskErrorKind::PastEnd) outside of the area,
    /// [`Misaligned`](rt::disk::DiskErrorKind::Misaligned), [`Gone`](rt::disk::DiskErrorKind::Gone) once the image is lost, and
    /// what the disk reports.
    fn read(&self, at: u64, len: usize) -> Answer<'_, Vec<u8>, DiskError>;

    /// Writes `bytes`, whole pages of 4096, from byte `at` of the image on. Durable after the next [`Self::sync`].
    ///
    /// # Errors
    /// As [`Self::read`].
    fn write<'a>(&'a self, at: u64, bytes: &'a [u8]) -> Answer<'a, (), DiskError>;

    /// Makes durable whatever was written to the image before, its data included.
    ///
    /// # Errors
    /// [`block::Error::Gone`]; the image is then lost, as after a flush that failed.
    fn sync(&self) -> Answer<'_, (), block::Error>;

    /// Declares in the image's label that there is a log. Durable when this returns.
    ///
    /// # Errors
    /// [`FileError`]
    fn declare(&self) -> Answer<'_, (), FileError>;
}

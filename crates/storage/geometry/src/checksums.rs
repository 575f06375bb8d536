//! The checksum layer of a member, as the array above it uses it.

use std::fmt;
use std::pin::Pin;

use block::Error;

/// The future of a checksum operation.
pub type Done<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// The row checksums of one member. The array tells it which allocation units it uses.
pub trait RowChecksums: fmt::Debug {
    /// Writes back and forgets the checksums of the unit that contains `row`, because the unit
    /// leaves this owner. Waits for writes in progress there.
    ///
    /// # Errors
    /// Errors of the disk.
    fn release_unit(&self, row: u64) -> Done<'_>;

    /// As [`Self::release_unit`], for all units that have no write in progress.
    ///
    /// # Errors
    /// Errors of the disk.
    fn release_idle(&self) -> Done<'_>;

    /// Writes back the checksums of areas without writes since the last call. Corruption of their
    /// rows is then detected even after a power failure.
    ///
    /// # Errors
    /// Errors of the disk.
    fn write_back_cold(&self) -> Done<'_>;

    /// Forgets what is cached of the unit that contains `row`, because it comes from another owner.
    /// Areas on the dirty list stay; after [`Self::release_unit`] there are none.
    fn forget_unit(&self, row: u64);
}

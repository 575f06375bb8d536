//! The checksum layer of a member, as the array above it uses it.

use std::fmt;

use block::Error;
use futures_util::future::LocalBoxFuture;

/// The row checksums of one member. The array tells it which allocation units it uses.
pub trait RowChecksums: fmt::Debug {
    /// Writes back and forgets the checksums of the unit that contains `row`, because the unit
    /// leaves this owner. Waits for writes in progress there.
    ///
    /// # Errors
    /// Errors of the disk.
    fn release_unit(&self, row: u64) -> LocalBoxFuture<'_, Result<(), Error>>;

    /// As [`Self::release_unit`], for all units that have no write in progress.
    ///
    /// # Errors
    /// Errors of the disk.
    fn release_idle(&self) -> LocalBoxFuture<'_, Result<(), Error>>;

    /// Writes back the checksums of areas without writes since the last call. Corruption of their
    /// rows is then detected even after a power failure.
    ///
    /// # Errors
    /// Errors of the disk.
    fn write_back_cold(&self) -> LocalBoxFuture<'_, Result<(), Error>>;

    /// Forgets what is cached of the unit that contains `row`, because it comes from another owner.
    /// Areas on the dirty list stay; after [`Self::release_unit`] there are none.
    fn forget_unit(&self, row: u64);
}

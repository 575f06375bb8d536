//! Checksums below an array, as the array sees them.

use std::fmt;
use std::pin::Pin;

use block::Error;

/// What becomes of checksums in the end.
pub type Done<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// What checks the rows of a member: an array says which of them it uses. A unit is what the pool gives at once.
pub trait RowChecksums: fmt::Debug {
    /// The unit in which `row` lies goes to somebody else, or is nobody's: its checksums are written, and forgotten. Waits for
    /// whoever writes there.
    ///
    /// # Errors
    /// What the disk says.
    fn release(&self, row: u64) -> Done<'_>;

    /// The same of all units where nobody writes.
    ///
    /// # Errors
    /// What the disk says.
    fn release_idle(&self) -> Done<'_>;

    /// The checksums of areas where nobody has written since this was asked last are written: what becomes of their rows from now on
    /// is found out even if power fails.
    ///
    /// # Errors
    /// What the disk says.
    fn settle_quiet(&self) -> Done<'_>;

    /// The unit in which `row` lies comes from somebody else: what was known of it is nothing. What is on the list stays; after
    /// [`Self::release`] there is nothing of the kind.
    fn forget(&self, row: u64);
}

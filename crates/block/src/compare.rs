//! COMPARE AND WRITE below the volume.

use std::pin::Pin;

use crate::{Bufs, Ctx, Failure, Lba};

/// What a [`CompareAndWrite`] answers by and by.
pub type Compared<'a> = Pin<Box<dyn Future<Output = Result<(), Failure>> + 'a>>;

/// A device that is used in other places as well, so that holding a range here does not make a
/// comparison and the write after it one step: it does both by itself.
pub trait CompareAndWrite {
    /// Replaces the contents from `at` on by `write` if they are `compare`, which is as long.
    ///
    /// [`Failure::Miscompare`] names the first difference. `ctx` has memory for the comparison
    /// beside what a write needs.
    fn compare_and_write<'a>(
        &'a self,
        at: Lba,
        compare: &'a Bufs,
        write: &'a Bufs,
        fua: bool,
        ctx: &'a Ctx,
    ) -> Compared<'a>;
}

//! What a device does by itself that is used in other places as well.

use std::pin::Pin;

use crate::{Blocks, Bufs, Changes, Ctx, Error, Failure, Lba};

/// What a [`CompareAndWrite`] answers by and by.
pub type Compared<'a> = Pin<Box<dyn Future<Output = Result<(), Failure>> + 'a>>;

/// When a range has [settled](CompareAndWrite::settle).
pub type Settled<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

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

    /// What is changed of it here, whoever changes it: before a change is known to have happened anywhere, it has begun
    /// here.
    fn changes(&self) -> Changes;

    /// Ends once no change of `range` is under way that had begun here before: each has happened everywhere,
    /// or not at all.
    fn settle<'a>(&'a self, range: Blocks, ctx: &'a Ctx) -> Settled<'a>;
}

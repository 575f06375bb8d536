//! Interface of a device that other nodes write as well.

use std::pin::Pin;

use crate::{Blocks, Bufs, ChangeTracker, Ctx, Error, Lba, RequestError};

/// The future of [`ReplicatedDevice::compare_and_write`].
pub type CompareAndWriteFuture<'a> = Pin<Box<dyn Future<Output = Result<(), RequestError>> + 'a>>;

/// The future of [`ReplicatedDevice::await_commit`].
pub type CommitFuture<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// A device that other nodes write as well, so that locking a range here does not make a comparison
/// and the write after it atomic: the device does both itself.
pub trait ReplicatedDevice {
    /// Replaces the contents from `at` on by `write` if they equal `compare`, which is as long.
    ///
    /// [`RequestError::Miscompare`] gives the first difference. `ctx` has memory for the comparison
    /// in addition to that for a write.
    fn compare_and_write<'a>(
        &'a self,
        at: Lba,
        compare: &'a Bufs,
        write: &'a Bufs,
        fua: bool,
        ctx: &'a Ctx,
    ) -> CompareAndWriteFuture<'a>;

    /// Tracks changes on this node, whichever node made them: a change begins here before it is
    /// known to have happened on any node.
    fn change_tracker(&self) -> ChangeTracker;

    /// Ends once every change of `range` that had begun here before has happened on all replicas or
    /// never will.
    fn await_commit<'a>(&'a self, range: Blocks, ctx: &'a Ctx) -> CommitFuture<'a>;
}

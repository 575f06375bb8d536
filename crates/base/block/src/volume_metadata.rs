//! The metadata area of a volume: a few blocks outside its address range, where its owner keeps
//! state that all nodes serving it share.
//!
//! These blocks are written, mirrored, resynchronised and verified like any others, but clients
//! cannot reach them.

use std::fmt;
use std::pin::Pin;

use crate::{Blocks, Bufs, Lba};

/// First block of the metadata area: behind the end of the largest volume.
pub const METADATA_LBA: Lba = Lba(1 << 48);

/// Size of the metadata area in bytes, if there is one.
pub const METADATA_BYTES: u32 = 88 << 10;

/// The owner of the metadata area of a replicated volume.
pub trait MetadataObserver: fmt::Debug {
    /// `range` of the metadata area was changed on this node, though perhaps not yet on all: to
    /// `data`, or to zeroes if that is empty.
    fn on_applied(&self, range: Blocks, data: &Bufs);

    /// Ends when every [applied](Self::on_applied) change is known to hold on all replicas or on
    /// none, and all work that it forbids has ended on this node. May be dropped.
    fn wait_in_force(&self) -> Pin<Box<dyn Future<Output = ()> + '_>>;
}

/// No owner: the metadata area is unused.
impl MetadataObserver for () {
    fn on_applied(&self, _: Blocks, _: &Bufs) {}

    fn wait_in_force(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(std::future::ready(()))
    }
}

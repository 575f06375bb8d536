//! Where the mirror learns how much space is free.

use std::fmt;
use std::pin::Pin;

/// Tells how much space is free for a replica.
pub trait FreeSpace: fmt::Debug {
    /// Bytes free where the replica is stored; `None` if unknown.
    fn free_bytes(&self) -> FreeBytesFuture<'_>;
}

/// The future of [`FreeSpace::free_bytes`].
pub type FreeBytesFuture<'a> = Pin<Box<dyn Future<Output = Option<u64>> + 'a>>;

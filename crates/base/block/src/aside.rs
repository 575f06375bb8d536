//! The blocks beside a volume: a few that belong to it and are no part of it, where its owner keeps
//! what all who serve it must know alike.
//!
//! They are written, mirrored, brought in sync and verified as any other block, and clients cannot
//! reach them.

use std::fmt;
use std::pin::Pin;

use crate::{Blocks, Bufs, Lba};

/// The first block beside a volume: behind the end of the largest one.
pub const ASIDE: Lba = Lba(1 << 48);

/// What lies beside a volume, in bytes, where there is anything.
pub const ASIDE_BYTES: u32 = 88 << 10;

/// Whoever keeps something beside a volume that is used in other places as well.
pub trait Aside: fmt::Debug {
    /// `range` beside the volume holds something else here now, which may not be so everywhere:
    /// `data`, or zeroes if there is none.
    fn changed(&self, range: Blocks, data: &Bufs);

    /// Ends when what was [changed](Self::changed) before is known to hold everywhere or not at all, and
    /// whatever it forbids has come to its end here. May be dropped.
    fn settled(&self) -> Pin<Box<dyn Future<Output = ()> + '_>>;
}

/// Nobody keeps anything there.
impl Aside for () {
    fn changed(&self, _: Blocks, _: &Bufs) {}

    fn settled(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(std::future::ready(()))
    }
}

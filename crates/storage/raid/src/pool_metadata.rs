//! What an array asks of the metadata of its pool.

use std::fmt;
use std::ops::Range;
use std::pin::Pin;

use block::Error;
use geometry::DamageKind;

/// Makes durable what an array learns about its members.
pub trait PoolMetadata: fmt::Debug {
    /// Makes durable, on all attached members, that `member` is detached: it misses every write
    /// from now on. On failure the array stops writing.
    fn detach_member(&self, member: u16) -> MetadataFuture<'_>;

    /// Makes durable that the detached columns of an extent are stale in these
    /// [regions](geometry::REGIONS).
    fn mark_regions_stale(&self, extent: u64, regions: u32) -> MetadataFuture<'_>;

    /// Asks to detach a member that has been unresponsive for long; `silent` are all members that
    /// are unresponsive now, itself included. Detaches it as [`Self::detach_member`] does, unless
    /// data would be lost without all of `silent`. Returns whether it is detached.
    fn detach_unresponsive(&self, member: u16, silent: u128) -> DetachFuture<'_>;

    /// Reports that a member became slow, or recovered. Called once per change.
    fn set_slow(&self, member: u16, is_slow: bool);

    /// Reports damage, block by block; the implementation combines reports.
    fn report_damage(&self, damage: Damage);
}

/// Damaged blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// What is wrong with them.
    pub kind: DamageKind,
    /// The member concerned, if known.
    pub member: Option<u16>,
    /// Number of the extent.
    pub extent: u64,
    /// Rows of the extent's data that contain them, or whose parity they are.
    pub rows: Range<u32>,
}

/// The future of a change to [`PoolMetadata`].
pub type MetadataFuture<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// The future of a request to [`PoolMetadata`]; true if it was done.
pub type DetachFuture<'a> = Pin<Box<dyn Future<Output = Result<bool, Error>> + 'a>>;

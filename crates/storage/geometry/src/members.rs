//! Members of a pool, and what is found wrong with what they hold.

/// Most members.
pub const MAX_MEMBERS: u16 = 128;

/// A piece of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Number of the member in its array.
    pub member: u16,
    /// Where it begins on that, in rows of 4 KiB.
    pub at: u64,
}

/// What is wrong with blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DamageKind {
    /// The disk does not give them back.
    Unreadable,
    /// It gives back what was not written there.
    Corrupt,
    /// They do not fit their parity, or their copies, and nobody knows which of them is wrong.
    Inconsistent,
}

/// What has been found in an extent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Rows of strips that were wrong, or could not be read, and are right now.
    pub repaired: u64,
    /// Rows of which something is wrong, and nobody knows what; or that are lost.
    pub unrepairable: u64,
}

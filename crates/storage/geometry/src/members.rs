//! Members of a pool, and kinds of damage to their data.

/// Largest number of members.
pub const MAX_MEMBERS: u16 = 128;

/// The part of a member that belongs to an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Number of the member in its array.
    pub member: u16,
    /// Its first row on that member, in rows of 4 KiB.
    pub first_row: u64,
}

/// What is wrong with blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DamageKind {
    /// The disk returns an error.
    Unreadable,
    /// The disk returns data that does not match its checksum.
    Corrupt,
    /// Data and parity, or copies, disagree, and it is unknown which of them is wrong.
    Inconsistent,
}

/// The result of scrubbing an extent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubResult {
    /// Rows of strips that were wrong or unreadable, and are repaired.
    pub repaired: u64,
    /// Rows that are lost, or inconsistent without knowing which strip is wrong.
    pub unrecoverable: u64,
}

//! Mistakes that a pool can be told to make, so that tests can show that they are found.

/// One mistake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// A disk that was set back is believed to have all that was written since.
    BelievesSetBack,
    /// Disks that were set back are believed against one that proves that more was committed.
    IgnoresProofs,
    /// No version is written when the pool is closed.
    ClosesUnversioned,
    /// Nor while it is in use.
    WritesUnversioned,
}

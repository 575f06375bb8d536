//! Planted mistakes, which tests must find.

/// One mistake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// Accepts a rolled-back disk as if it had all later writes.
    TrustsRolledBackDisks,
    /// Opens rolled-back disks although another disk proves a commit that they lack.
    IgnoresProvenCommits,
    /// Writes no version when the pool is closed.
    SkipsVersionOnClose,
    /// Writes no periodic versions.
    SkipsPeriodicVersions,
}

//! Planted mistakes, which tests must find.

use pool_metadata::quorum;

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

impl Mistake {
    /// The mistake in the quorum rules that this one is.
    pub(super) fn in_quorum_rules(self) -> quorum::Mistake {
        match self {
            Self::TrustsRolledBackDisks => quorum::Mistake::TrustsRolledBackDisks,
            Self::IgnoresProvenCommits => quorum::Mistake::IgnoresProvenCommits,
            Self::None | Self::SkipsVersionOnClose | Self::SkipsPeriodicVersions => {
                quorum::Mistake::None
            }
        }
    }
}

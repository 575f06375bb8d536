//! What a connection between two replicas is for.

use std::fmt;

use crate::Lane;
use crate::frame::Type;

/// A connection's purpose (RFD 0010, 8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Line {
    /// A lane of a session.
    Lane(Lane),
    /// Leases alone, over another pair of addresses than the session's.
    Lease,
}

impl Line {
    /// Whether frames of type `kind`, whose lane is `lane`, may be on it.
    pub(crate) fn carries(self, lane: Lane, kind: Type) -> bool {
        match self {
            Self::Lane(own) => own == lane,
            Self::Lease => matches!(
                kind,
                Type::Renew | Type::Promise | Type::Newer | Type::Yield | Type::Yielded
            ),
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lane(Lane::Control) => "control",
            Self::Lane(Lane::Down) => "down",
            Self::Lane(Lane::Up) => "up",
            Self::Lease => "lease",
        })
    }
}

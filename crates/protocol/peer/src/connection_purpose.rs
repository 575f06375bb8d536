//! The purposes of connections between two replicas.

use std::fmt;

use crate::Lane;
use crate::frame::FrameType;

/// The purpose of a connection (RFD 0010, 8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConnectionPurpose {
    /// A lane of a session.
    Lane(Lane),
    /// Lease messages only, over other addresses than the session's.
    Lease,
}

impl ConnectionPurpose {
    /// Whether frames of type `kind`, whose lane is `lane`, may travel on it.
    pub(crate) fn carries(self, lane: Lane, kind: FrameType) -> bool {
        match self {
            Self::Lane(this_lane) => this_lane == lane,
            Self::Lease => matches!(
                kind,
                FrameType::LeaseRequest
                    | FrameType::LeaseGrant
                    | FrameType::NewerEpoch
                    | FrameType::RevokeLease
                    | FrameType::LeaseRevoked
            ),
        }
    }
}

impl fmt::Display for ConnectionPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lane(Lane::Control) => "control",
            Self::Lane(Lane::Replication) => "replication",
            Self::Lane(Lane::Requests) => "requests",
            Self::Lease => "lease",
        })
    }
}

//! What a server tells all its connections.

use crate::catalog::VolumeId;

/// A notice to all connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionNotice {
    /// The catalog was replaced: access may have been revoked or granted.
    CatalogChanged,
    /// A volume has grown.
    VolumeResized(VolumeId),
    /// The node is about to stop: finish what is in flight, then close.
    Drain,
    /// Close now.
    Close,
}

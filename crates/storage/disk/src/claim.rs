//! Multihost protection: one machine at a time uses a disk ([RFD
//! 0034](../../../../docs/rfd/0034-one-disk-two-machines.md)).
//!
//! Another machine that reaches the same disk does not see this machine's locks and exclusive
//! opens. So the disk itself names its owner: in an owner record, kept in two copies, with a
//! heartbeat beside it ([format](../../../../docs/format/owner.md)).
//!
//! | module | subject |
//! |---|---|
//! | `record` | the owner record, as stored |
//! | `decision` | whether a disk may be claimed, and after which waits: pure |
//! | `lease` | how long this machine may use the disk, for all cores |
//! | `disk_claim` | claims a disk, renews the heartbeat, releases the claim |
//!
//! A machine may use a disk until [`LEASE_DURATION`] after it last read its own claim there.
//! Another machine that claims the disk waits longer than that after writing its claim, so the two
//! never write at the same time, as long as their clocks run at rates within a quarter of each
//! other. Wall clocks are not compared.

mod decision;
mod disk_claim;
mod lease;
mod record;

use std::time::Duration;

pub use decision::{ClaimRefusal, ClaimStep, ObservedOwner, next_step};
pub use disk_claim::clear_records;
pub use disk_claim::{ClaimError, DiskClaim, LostClaim, check_unclaimed};
pub use lease::{DiskLease, LeaseGate};
pub use lease::{check_not_revoked, wait_valid};
pub use record::{
    NodeIdentity, OWNER_RECORD_BYTES, OwnerRecord, OwnerRecordError, OwnerRecordKind, OwnerState,
    format_utc,
};

/// How often the heartbeat is renewed.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);

/// How long a machine may use a disk after it last read its own claim.
pub const LEASE_DURATION: Duration = Duration::from_secs(5);

/// Offset of the first copy of the claim, in bytes; the heartbeat follows it.
pub const CLAIM_OFFSET: u64 = 128 << 10;

/// Offset of the heartbeat, in bytes.
pub const HEARTBEAT_OFFSET: u64 = CLAIM_OFFSET + OWNER_RECORD_BYTES as u64;

/// Offset of the second copy of the claim, in bytes.
pub const CLAIM_COPY_OFFSET: u64 = 384 << 10;

/// The node that wants a disk, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimRequest {
    /// This node.
    pub node: NodeIdentity,
    /// Take the disk from an owner that has not released it, unless that one still uses it; only on
    /// the operator's request.
    pub take_over: bool,
    /// A planted mistake, in tests.
    #[cfg(feature = "testing")]
    pub mistake: Mistake,
}

/// Planted mistakes, which tests must find.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// Claims a disk whatever its owner, without watching its heartbeat and without waiting.
    IgnoresHeartbeat,
}

impl ClaimRequest {
    /// Whether the heartbeat is ignored; only in tests.
    #[cfg(feature = "testing")]
    fn ignores_heartbeat(&self) -> bool {
        self.mistake == Mistake::IgnoresHeartbeat
    }

    #[cfg(not(feature = "testing"))]
    #[expect(clippy::unused_self, reason = "the same as in tests")]
    fn ignores_heartbeat(&self) -> bool {
        false
    }

    /// The claim of `node` on a disk that it owned last, or that has no owner.
    #[must_use]
    pub fn for_node(node: NodeIdentity) -> Self {
        Self {
            node,
            take_over: false,
            #[cfg(feature = "testing")]
            mistake: Mistake::None,
        }
    }
}

/// What a disk belongs to: a pool and its member, or a volume and its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimSubject {
    /// The pool or the volume.
    pub set_id: uuid::Uuid,
    /// The member or the image.
    pub part_id: uuid::Uuid,
}

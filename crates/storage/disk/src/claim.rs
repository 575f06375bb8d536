//! Multihost protection: one machine at a time uses a disk ([RFD 0034](../../../../docs/rfd/0034-one-disk-two-machines.md)).
//!
//! Locks and exclusive opens of one machine are unknown to another one that reaches the same disk. So a disk says itself who has
//! it: an owner record, in two copies, and a heartbeat beside it ([format](../../../../docs/format/owner.md)).
//!
//! | module | subject |
//! |---|---|
//! | `record` | the owner record as it lies on the disk |
//! | `judge` | whether a disk may be taken, and after which waits: pure |
//! | `lease` | until when this machine may use the disk, as every core sees it |
//! | `hold` | takes a disk, renews the heartbeat, gives it back |
//!
//! A machine may use a disk until [`STOP`] after the last time that it has read its own claim there. Another one that claims the
//! disk waits longer than that after its claim lies there, so the two never write at the same time, as far as both count time
//! alike within a quarter. No wall clocks are compared.

mod hold;
mod judge;
mod lease;
mod record;

use std::time::Duration;

pub use hold::clear_records;
pub use hold::{Hold, Lost, NotTaken, check_free};
pub use judge::{Refusal, Seen, Step, judge};
pub use lease::{Gate, Lease};
pub use lease::{check, pass};
pub use record::{BadRecord, Copy, NodeIdentity, OWNER_BYTES, OwnerRecord, State, utc};

/// How often the heartbeat is renewed.
pub const INTERVAL: Duration = Duration::from_secs(2);

/// How long after it has last read its own claim a machine uses a disk.
pub const STOP: Duration = Duration::from_secs(5);

/// Where the first copy of the claim lies, in bytes from the start of the disk; the heartbeat lies behind it.
pub const CLAIM_AT: u64 = 128 << 10;

/// Where the heartbeat lies.
pub const BEAT_AT: u64 = CLAIM_AT + OWNER_BYTES as u64;

/// Where the second copy of the claim lies.
pub const SECOND_AT: u64 = 384 << 10;

/// Who wants a disk, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// This node.
    pub node: NodeIdentity,
    /// Take it from an owner that has not given it back, unless that one still uses it: what a person says explicitly.
    pub take_over: bool,
    /// What is done wrongly, in tests.
    #[cfg(feature = "testing")]
    pub mistake: Mistake,
}

/// Mistakes that whoever takes a disk can be told to make, so that tests can show that they are found.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// A disk is taken whoever has it, without watching its heartbeat and without a wait.
    IgnoresHeartbeat,
}

impl Claim {
    /// Whether the heartbeat is ignored; never, but in tests.
    #[cfg(feature = "testing")]
    fn ignores_heartbeat(&self) -> bool {
        self.mistake == Mistake::IgnoresHeartbeat
    }

    #[cfg(not(feature = "testing"))]
    #[expect(clippy::unused_self, reason = "the same as in tests")]
    fn ignores_heartbeat(&self) -> bool {
        false
    }

    /// The claim of `node` on what it had last, or what nobody has.
    #[must_use]
    pub fn of(node: NodeIdentity) -> Self {
        Self {
            node,
            take_over: false,
            #[cfg(feature = "testing")]
            mistake: Mistake::None,
        }
    }
}

/// What a disk is a part of: a pool and its member, or a volume and its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The pool or the volume.
    pub set: uuid::Uuid,
    /// The member or the image.
    pub part: uuid::Uuid,
}

//! A pool for tests.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test fails where it unwraps nothing"
)]

use geometry::{ROW_BYTES, RaidGeometry, Redundancy};
use uuid::Uuid;
use wire::ShortText;

use crate::metadata::{Change, MemberId, Metadata};

/// Blocks of a member's snapshot area.
pub const SNAPSHOT_BLOCKS: u32 = 1024;

/// Physical extents of a member.
pub const PHYSICAL_EXTENTS: u32 = 6;

/// A RAID 5 over so many columns of 16 MiB.
#[must_use]
pub fn raid5(columns: u16) -> RaidGeometry {
    RaidGeometry::new(Redundancy::Parity, columns, 16, (16 << 20) / 16 / ROW_BYTES).unwrap()
}

/// Adds member `n`.
#[must_use]
pub fn add_member(n: u16) -> Change {
    Change::AddMember {
        member: MemberId(n),
        uuid: Uuid::from_u128(100 + u128::from(n)),
        serial: ShortText::new(&format!("S{n}")),
        physical_extents: PHYSICAL_EXTENTS,
        snapshot_blocks: SNAPSHOT_BLOCKS,
        extents_at: 1 << 20,
        is_spare: false,
    }
}

/// A pool of so many members in version 1, which is not committed yet.
#[must_use]
pub fn pool(members: u16) -> Metadata {
    let mut pool = Metadata::new(Uuid::from_u128(1), ShortText::new("tank"), raid5(3), 16);
    pool.begin_version(0).unwrap();
    pool.apply(&Change::StartTerm { term_id: Uuid::from_u128(10), is_forced: false }).unwrap();
    (0..members).for_each(|n| pool.apply(&add_member(n)).unwrap());
    pool
}

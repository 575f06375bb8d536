//! How a pool's data is laid out on its disks: what arrays, checksums and pools must agree on.
//! Pure.

mod checksums;
mod members;
mod raid_geometry;
mod rows;
mod slot_set;

pub use checksums::RowChecksums;
pub use members::{Column, DamageKind, MAX_MEMBERS, ScrubResult};
pub use raid_geometry::*;
pub use rows::RowSet;
pub use slot_set::SlotSet;

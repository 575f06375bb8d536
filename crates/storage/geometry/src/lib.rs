//! How the data of a pool is laid out on its disks: what arrays, checksums and pools must agree on. Pure.

mod checksums;
mod members;
mod places;
mod rows;
mod shape;

pub use checksums::{Done, RowChecksums};
pub use members::{Column, DamageKind, MAX_MEMBERS, Scrubbed};
pub use places::Places;
pub use rows::RowSet;
pub use shape::*;

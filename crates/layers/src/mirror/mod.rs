//! The mirror: one volume on two or three nodes, served by all of them.
//!
//! * [`log`]: which regions of an image may differ from other images of the volume.
//! * [`record`]: who has the volume, who is in sync, who is primary.
//!
//! Membership, the plans of reads and writes, opening after a death and resync will stand beside
//! it. Why the mirror is as it is: `docs/rfd/0010-the-mirror.md`.

pub mod log;
pub mod record;

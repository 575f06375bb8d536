//! The mirror: one volume on two or three nodes, served by all of them.
//!
//! * [`log`]: which regions of an image may differ from other images of the volume.
//! * [`record`]: who has the volume, who is in sync, who is primary.
//! * [`member`]: one replica's part: when it serves, and how the record comes to change.
//! * [`settle`]: what has to be made equal before a view opens.
//!
//! The plans of reads and writes and resync will stand beside them. Why the mirror is as it is:
//! `docs/rfd/0010-the-mirror.md`.

pub mod log;
pub mod member;
pub mod record;
pub mod settle;

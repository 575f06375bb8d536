//! Disks of virtual machines: the back end of vhost-user for virtio-blk (Virtio 1.2, 5.2; QEMU's vhost-user
//! specification).
//!
//! The other end, the *front end* of the protocol, is the virtual machine's monitor. It lends us the guest's
//! memory and the guest's rings in it, and two events for each ring; from then on the guest's driver and we speak by memory alone. The parts:
//!
//! * [`Server`] listens at a socket and serves one monitor after the other;
//! * `control` speaks with the monitor, on a thread of its own; what it is told is done on the core, by `session`;
//! * `ring` takes requests off a ring, has the volume do them, and puts answers back; `disk` is what all of them serve;
//! * [`request`] is what a guest may ask, read from memory that the guest may change at any time;
//! * `inflight` is a record, which the monitor keeps for us, of what has been taken and not answered;
//! * `memory` is the guest's memory, [`config`] what the guest is told of the disk.
//!
//! # Invariants
//! * No byte of a guest's memory is looked at twice where the second look would matter.
//! * A request is taken only while fewer are in flight than its ring has places.
//! * Nothing of a guest is touched after its monitor has gone, or has been told that a ring has stopped.

pub mod config;
mod control;
mod disk;
mod inflight;
pub mod memory;
pub mod request;
mod ring;
mod server;
mod session;

pub use disk::Outage;
pub use server::{Options, Server};

/// Most places of a ring. QEMU has no larger ones.
pub const MAX_RING_SIZE: u16 = 1024;

/// Most rings of a disk.
pub const MAX_RINGS: u16 = 64;

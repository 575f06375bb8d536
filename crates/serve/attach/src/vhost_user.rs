//! Disks of virtual machines: a vhost-user back end for virtio-blk (Virtio 1.2, 5.2; QEMU's
//! vhost-user specification).
//!
//! The peer, the protocol's *front end*, is the virtual machine monitor. It shares the guest's
//! memory with its rings, and two events for each ring; after that the guest's driver and we
//! communicate through memory alone. The parts:
//!
//! * [`Server`] listens at a socket and serves one monitor after the other;
//! * `control` talks to the monitor on a thread of its own; `session` executes its messages on the
//!   core;
//! * `virtqueue` takes requests off a ring, executes them on the volume, and returns the answers;
//!   `disk` is shared by all rings;
//! * [`request`] decodes requests from memory that the guest may change at any time;
//! * `inflight` is the record, stored by the monitor, of requests taken and not answered;
//! * `memory` is the guest's memory, [`config`] the disk's configuration as the guest sees it.
//!
//! # Invariants
//! * No byte of a guest's memory is read twice where the second read would matter.
//! * A request is taken only while fewer are in flight than its ring has entries.
//! * A guest's memory is not accessed after its monitor has disconnected, or has been told that a
//!   ring has stopped.

pub mod config;
mod control;
mod disk;
mod inflight;
pub mod memory;
pub mod request;
mod server;
mod session;
mod virtqueue;

pub use disk::OutagePolicy;
pub use server::{Options, Server};

/// Largest ring size. QEMU has no larger ones.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// Most rings of a disk.
pub const MAX_QUEUES: u16 = 64;

//! Volumes as devices of this machine ([RFD 0023](../../../../docs/rfd/0023-a-volume-as-a-local-device.md)): front ends
//! that give a [`volume::Volume`] to a consumer on the same machine.
//!
//! A front end is what a target is for initiators: it understands a protocol and asks a volume, on the
//! volume's core. What the volume stands on (a namespace of another node, a file, memory) it does not know.
//! Several front ends may serve one volume at once, as the volume puts overlapping commands in order.
//!
//! * [`vhost_user`]: disks of virtual machines, by shared memory.
//! * [`ublk`]: block devices of this machine.
//! * [`fuse`]: a file, by the kernel's FUSE.
//! * [`nbd`]: NBD at a Unix socket or by TCP (`docs/rfd/0025-nbd.md`).

mod absence;
mod failure;
pub mod fuse;
pub mod nbd;
mod parts;
mod settling;
pub mod ublk;
pub mod vhost_user;

pub use absence::Absence;
pub use settling::Settling;

//! Volumes as local devices ([RFD 0023](../../../../docs/rfd/0023-a-volume-as-a-local-device.md)):
//! front ends that give a [`volume::Volume`] to a consumer on the same machine.
//!
//! A front end is to local users what a target is to initiators: it implements a protocol and sends
//! requests to a volume, on the volume's core. It does not know what the volume is stored on (a
//! remote namespace, a file, memory). Several front ends may serve one volume at once, as the
//! volume orders overlapping commands.
//!
//! * [`vhost_user`]: disks of virtual machines, through shared memory.
//! * [`ublk`]: local block devices.
//! * [`fuse`]: a file, through the kernel's FUSE.
//! * [`nbd`]: NBD on a Unix socket or TCP (`docs/rfd/0025-nbd.md`).

mod failure;
pub mod fuse;
pub mod nbd;
mod outage;
mod request_split;
pub mod ublk;
pub mod vhost_user;
mod write_delay;

pub use outage::OutageSignal;
pub use write_delay::WriteDelay;

//! A local block device, through Linux's ublk driver (RFD 0023, 11): `/dev/ublkbN`, served by the
//! volume's core.
//!
//! A device outlives the process that serves it. Requests then wait in the kernel, including
//! unanswered ones, and the next process for the same volume continues.

mod abi;
mod device;
mod names;
mod request;
mod server;

pub use abi::{Parameters, State};
pub use device::{DeviceControl, Options, ServeError};
pub use request::{Command, DeviceLimits, decode};
pub use server::{ServeEnd, UblkServer};

//! A block device of this machine, by Linux's ublk driver (RFD 0023, 11): `/dev/ublkbN`, served by the volume's core.
//!
//! A device outlives the process that serves it. Requests wait in the kernel then, those that were not answered among
//! them, and the next process that comes for the same volume goes on.

mod abi;
mod device;
mod names;
mod request;
mod server;

pub use abi::{Parameters, State};
pub use device::{Door, Options, ServeError};
pub use request::{Command, Shape, decode};
pub use server::{End, Serving};

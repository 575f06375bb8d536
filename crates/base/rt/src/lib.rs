//! The only door to the operating system: cores, disks, sockets, memory and time.
//!
//! Code above this crate uses tokio's traits (`AsyncRead`, `AsyncWrite`, `spawn_local`,
//! `tokio::time`) and gets everything else from here, so that the same code runs on real cores
//! and under the deterministic simulator.

pub mod buf;
mod core;
pub mod disk;
pub mod event;
pub mod fault;
mod heap;
mod log_limit;
mod mailbox;
pub mod memory;
pub mod net;
mod network;
mod real;
mod ring;
#[cfg(feature = "sim")]
pub mod sim;
mod sys;
mod turn;
pub mod ublk;

pub use crate::core::Core;
pub use heap::Heap;
pub use log_limit::LogLimit;
pub use mailbox::{CoreHandle, NotTaken, Stopped};
pub use network::network;
pub use real::{Cores, CoresConfig, DiskEngine, Submission};
pub use sys::{ProcessorTime, processor_time, serves_disks};
pub use turn::give_way;

//! The only interface to the operating system: cores, disks, sockets, memory and time.
//!
//! Code above this crate uses tokio's traits (`AsyncRead`, `AsyncWrite`, `spawn_local`,
//! `tokio::time`) and gets everything else from here, so that the same code runs on real cores
//! and under the deterministic simulator.

mod allocator;
pub mod buf;
mod core;
pub mod disk;
mod disk_file;
mod driver_waker;
pub mod event;
pub mod fault_point;
pub mod flow;
mod listen_options;
mod log_limit;
mod mailbox;
pub mod memory;
pub mod net;
mod network_prefix;
mod real;
mod ring;
#[cfg(feature = "sim")]
pub mod sim;
mod sys;
pub mod ublk;
mod yield_now;

pub use crate::core::Core;
pub use allocator::MiMalloc;
pub use log_limit::LogLimit;
pub use mailbox::{CoreHandle, CoreStopped, PostError};
pub use network_prefix::network_prefix;
pub use real::{Cores, CoresConfig, DiskEngine};
pub use ring::SubmissionMode;
pub use sys::{ProcessorTime, processor_time, set_io_flusher};
pub use yield_now::yield_to_ready_tasks;

//! A file system with one file, whose bytes are a volume's (RFD 0023, 10), by the kernel's FUSE.
//!
//! * [`Server`] mounts it, and has the volume do what its users ask, on the volume's core;
//! * `door` is what the kernel speaks with, on a thread of its own: the library reads with blocking calls. It hands each
//!   request to the core, which answers it;
//! * `mount` puts the file system into its directory, and takes it away: ours, and nobody else's;
//! * `span` is which blocks a range of bytes covers, and which of them in part.
//!
//! # Invariants
//! * Nothing of the volume is kept in the kernel: what is read is what the volume says now, whoever has changed it.
//! * Of a block that is written in part the rest stays as it is, whoever of this process writes it at the same time.

mod door;
mod job;
mod mount;
mod server;
mod span;

pub use mount::MountError;
pub use server::{End, Options, Server, is_left};

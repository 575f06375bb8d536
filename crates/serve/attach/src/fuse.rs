//! A FUSE file system with one file, whose bytes are a volume's (RFD 0023, 10).
//!
//! * [`Server`] mounts it and executes its users' requests on the volume's core;
//! * `filesystem` handles the kernel's requests on a thread of its own, as the library reads with
//!   blocking calls. It hands each request to the core, which answers it;
//! * `mount` mounts the file system on its directory and unmounts it: only ours;
//! * `span` computes which blocks a range of bytes covers, fully or in part.
//!
//! # Invariants
//! * The kernel caches nothing of the volume: a read returns its current contents, even if
//!   another client changed them.
//! * A partial write of a block leaves the rest of it unchanged, even if another request of this
//!   process writes it at the same time.

mod filesystem;
mod job;
mod mount;
mod server;
mod span;

pub use mount::MountError;
pub use server::{Options, ServeEnd, Server, is_stale};

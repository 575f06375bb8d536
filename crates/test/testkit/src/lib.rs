//! What the tests of several crates share: real cores, temporary directories, memory for payloads,
//! bytes to and from protocol machines, scripts of arbitrary bytes, devices and file systems, and
//! tests that are skipped.
//!
//! It is used by tests only (`dev-dependencies`), and has nothing that only one crate needs.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test fails where something is not as it expects"
)]

mod cores;
mod directory;
pub mod machine;
mod payload;
mod script;
mod skip;
pub mod system;

pub use cores::{cores_config, on_first_core, wait};
pub use directory::TestDir;
pub use payload::{PayloadMemory, flat};
pub use script::Script;
pub use skip::{find_program, installed, skipped};

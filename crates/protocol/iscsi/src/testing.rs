//! A scripted initiator and a driver with a disk in memory: for tests, fuzzing and benchmarks.
//!
//! Nothing here negotiates or recovers; it says what it is told to say and shows what comes back.

mod driver;
mod harness;
pub mod hostile;
mod initiator;

pub use driver::{BLOCK, Driver};
pub use harness::{Harness, Portions};
pub use initiator::{Pdu, ScriptedInitiator};

//! A scripted initiator and a driver with a disk in memory: for tests, fuzzing and benchmarks.
//!
//! Nothing here negotiates or recovers; it says what it is told to say and shows what comes back.

mod driver;
pub mod hostile;
mod initiator;
mod lab;

pub use driver::{BLOCK, Driver};
pub use initiator::{Initiator, Pdu};
pub use lab::{Lab, Portions};

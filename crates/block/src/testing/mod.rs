//! What tests of layers, volumes and nodes share.
//!
//! * [`register`] judges reads: may this block hold that, after all that happened?
//! * [`faulty`] makes devices misbehave on purpose.
//! * [`conformance`] is the suite that every [`crate::Layer`] passes.

pub mod register;
mod rng;
mod stamp;

pub use rng::Rng;
pub use stamp::{Contents, Stamp};

//! What tests of layers, volumes and nodes share.
//!
//! * [`register`] judges reads: may this block hold that, after all that happened?
//! * [`faulty`] makes devices misbehave on purpose.
//! * [`workload`] sends random operations and lets the checker judge them.
//! * [`conformance`] is the suite that every [`crate::Layer`] passes.

mod client;
pub mod conformance;
pub mod faulty;
pub mod register;
mod rng;
mod seeds;
mod stamp;
pub mod workload;

pub use client::TestClient;
pub use rng::Rng;
pub use seeds::seeds;
pub use stamp::{Contents, Stamp};

//! Tests of the simulator: one program, as each would be linked with all that it tests.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod determinism;
mod disks;
mod full;
mod many_volumes;
mod mirrored;
mod network;
mod planted;
mod rejoins;
mod rules;
mod scenarios;
mod unreadable;

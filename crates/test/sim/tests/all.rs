//! Tests of the simulator, linked as one program to save link time.
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
mod sample;
mod scenarios;
mod unreadable;

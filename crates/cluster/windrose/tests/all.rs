//! Tests of the crate `windrose`, in one program, so that it is linked only once.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod attach;
mod bench;
mod cli;
mod cluster;
mod common;
mod loops;
mod multihost;
mod node;
mod open_ports;
mod records;
mod recovery;
mod repair;
mod rotation;
mod status_accuracy;

//! Tests of the crate `windrose`: one program, as each would be linked with all that it tests.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod attach;
mod bench;
mod cli;
mod cluster;
mod common;
mod loops;
mod multihost;
mod node;
mod records;
mod recovery;
mod repair;
mod rotation;
mod stranger;
mod truth;

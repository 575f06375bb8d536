//! Tests of the crate `initiator`: one program, as each would be linked with all that it tests.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod common;
mod hostile_controller;
mod iscsi;
mod nvme;
mod target_responses;
mod uri;

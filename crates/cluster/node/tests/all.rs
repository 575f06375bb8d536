//! Tests of the crate `node`, linked into one program.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod api;
mod common;
mod crash;
#[path = "../../../serve/attach/tests/common/guest.rs"]
#[allow(dead_code, reason = "the guest can do more than is asked of it here")]
mod guest;
mod guests;
mod isns;
mod mirror;
mod pools;
mod reserved_paths;
mod secrets;
mod targets;
mod tls;

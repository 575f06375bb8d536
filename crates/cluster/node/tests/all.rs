//! Tests of the crate `node`: one program, as each would be linked with all that it tests.
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
mod own_files;
mod pools;
mod secrets;
mod targets;
mod tls;

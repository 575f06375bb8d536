//! Tests of the crate `nbd`: one program, as each would be linked with all that it tests.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod client;
mod common;
mod pair;
mod server;

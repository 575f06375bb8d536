//! Tests of the crate `load`: one program, as each would be linked with all that it tests.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod job;
mod run;
mod verify;

//! Tests of the crate `pool`: one program, as each would be linked with all that it tests.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

#[path = "../../image/tests/common/mod.rs"]
mod common;
mod multihost;
mod pool;
mod pool_errors;
mod pool_lost;
mod pool_remove;
mod pool_reopen;

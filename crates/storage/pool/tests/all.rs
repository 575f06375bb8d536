//! Tests of the crate `pool`, as one program, so that its dependencies are linked once.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

#[path = "../../image/tests/common/mod.rs"]
mod common;
mod multihost;
mod pool;
mod pool_errors;
mod pool_lost;
mod pool_remove;
mod pool_reopen;

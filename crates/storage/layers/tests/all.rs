//! Tests of the crate `layers`: one program, as each would be linked with all that it tests.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod common;
mod file_conformance;
mod file_faults;
mod file_life;
mod file_on_dev;
mod file_real;
mod file_refusals;
mod intent_log;
mod multihost;
mod pool;
mod pool_errors;
mod pool_lost;
mod pool_remove;
mod pool_reopen;
mod raw_conformance;

//! Tests of the crates `disk` and `image`, as one program, so that their dependencies are linked
//! once.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod common;
mod conformance;
mod faults;
mod lifecycle;
mod on_dev;
mod raw;
mod real;
mod refusals;

//! Tests of the crate `intent-log` over images.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

#[path = "../../image/tests/common/mod.rs"]
mod common;
mod lifecycle;

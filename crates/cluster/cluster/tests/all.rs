//! Tests of the crate `cluster`, in one program, so that it is linked only once.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod common;
mod conformance;
mod etcd;

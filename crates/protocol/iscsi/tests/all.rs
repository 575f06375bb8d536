//! Tests of the crate `iscsi`: one program, as each would be linked with all that it tests.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod chap;
mod commands;
mod data_out;
mod digests;
mod hostile;
mod initiator;
mod login;
mod portions;
mod requests;

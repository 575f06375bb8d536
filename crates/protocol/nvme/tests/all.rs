//! Tests of the crate `nvme`: one program, as each would be linked with all that it tests.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test fails where it unwraps nothing")]

mod admin;
mod association;
mod auth;
mod common;
mod host;
mod io;
mod portions;
mod reservations;
mod script;
mod tls;
mod transport;

//! Scripts of what NBD clients send, in any fragments, and of the server driver's replies. The
//! player asserts the invariants; the property tests of `nbd` share it.

#[path = "../../crates/protocol/nbd/tests/fuzz_input/server.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| fuzz_input::run(script));
}

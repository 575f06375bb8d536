//! Scripts of what NBD clients send, in any fragments, and of the server driver's replies. The
//! player asserts the invariants; the property tests of `nbd` share it.

#[path = "../../crates/protocol/nbd/tests/play/server.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

//! Scripts of what NBD servers send, in any fragments, and of the client's requests. The player
//! asserts the invariants; the property tests of `nbd` share it.

#[path = "../../crates/protocol/nbd/tests/play/client.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

//! Scripts of what NBD clients send, in any portions, and of what a server's driver answers; what must hold
//! is asserted by the player, which the property tests of `nbd` share.

#[path = "../../crates/protocol/nbd/tests/play/server.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

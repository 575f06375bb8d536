//! Scripts of what NBD clients send, in any portions, and of what a server's driver answers; what must hold
//! is asserted by the player, which the property tests of `nbd` share.
#![no_main]

#[path = "../../crates/nbd/tests/play/server.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|script: &[u8]| play::play(script));

//! Scripts of what NBD servers send, in any portions, and of what a client submits; what must hold is
//! asserted by the player, which the property tests of `nbd` share.
#![no_main]

#[path = "../../crates/nbd/tests/play/client.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|script: &[u8]| play::play(script));

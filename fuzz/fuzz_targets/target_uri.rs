//! Any text as the name of what is attached or measured; what must hold is asserted by the player, which the property tests
//! of `initiator` share.
#![no_main]

#[path = "../../crates/initiator/tests/uri/play.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|text: &str| play::play(text));

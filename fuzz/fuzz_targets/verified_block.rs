//! Arbitrary bytes where blocks are that say what they are; what must hold is asserted by the player, which the property tests of
//! `load` share.
#![no_main]

#[path = "../../crates/load/tests/verify/play.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|script: &[u8]| play::play(script));

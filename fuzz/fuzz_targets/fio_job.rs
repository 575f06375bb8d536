//! Any text as a job file of fio; what must hold is asserted by the player, which the property tests of `load` share.
#![no_main]

#[path = "../../crates/load/tests/job/play.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|text: &str| play::play(text));

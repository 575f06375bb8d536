//! A guest's memory that is anything: descriptors, headers, ranges; what must hold is asserted by the player, which the
//! property tests of `attach` share.
#![no_main]

#[path = "../../crates/attach/tests/vhost_user/play.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|script: &[u8]| play::play(script));

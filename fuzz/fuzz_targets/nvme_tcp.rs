//! Scripts of what NVMe/TCP hosts send, in any portions, and of what a driver decides; what must
//! hold is asserted by the player, which the property tests of `nvme` share.
#![no_main]

#[path = "../../crates/nvme/tests/script/play.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|script: &[u8]| play::play(script));

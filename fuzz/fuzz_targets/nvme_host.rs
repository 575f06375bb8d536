//! Scripts of what NVMe/TCP controllers send, in any portions, and of what a host submits; what must
//! hold is asserted by the player, which the property tests of `nvme` share.
#![no_main]

#[path = "../../crates/nvme/tests/host/play.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|script: &[u8]| play::play(script));

//! A host and a controller that authenticate, and somebody between them who does not know the secrets;
//! what must hold is asserted by the player, which the property tests of `nvme` share.
#![no_main]

#[path = "../../crates/nvme/tests/auth/play.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    let _ = play::play(script);
});

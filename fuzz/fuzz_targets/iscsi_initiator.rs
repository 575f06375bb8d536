//! Scripts of what iSCSI targets send, in any portions, and of what an initiator submits; what must hold is
//! asserted by the player, which the property tests of `iscsi` share.
#![no_main]

#[path = "../../crates/iscsi/tests/initiator/play.rs"]
mod play;

libfuzzer_sys::fuzz_target!(|script: &[u8]| play::play(script));

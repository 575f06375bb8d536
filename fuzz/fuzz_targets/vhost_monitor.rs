//! A monitor that says anything, with memory, a record and rings that are anything; what must hold is asserted by the player,
//! which the property tests of `attach` share.
#![no_main]

#[path = "../../crates/attach/tests/vhost_user/monitor.rs"]
mod monitor;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    monitor::play(script);
});

//! A disk for guests: real memory, rings and events, a monitor and a driver in this process.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "vhost_user/fuzz_input.rs"]
mod fuzz_input;
#[path = "vhost_user/guests.rs"]
mod guests;
#[path = "vhost_user/hostile.rs"]
mod hostile;
#[path = "vhost_user/monitor.rs"]
mod monitor;
#[path = "vhost_user/node.rs"]
mod node;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// `fuzz/targets/virtio_blk.rs` runs the same scripts for longer.
    #[test]
    fn arbitrary_guest_memory_does_not_panic(script in prop::collection::vec(any::<u8>(), 0..400)) {
        fuzz_input::run(&script);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// `fuzz/targets/vhost_monitor.rs` runs the same scripts for longer.
    #[test]
    fn arbitrary_monitors_are_served_and_disconnected(script in prop::collection::vec(any::<u8>(), 0..900)) {
        monitor::run(&script);
    }
}

/// What scripts change is a guest whose requests are answered.
#[test]
fn an_empty_script_is_a_working_guest() {
    assert_eq!(monitor::run(&[]), monitor::ALL_ANSWERED);
}

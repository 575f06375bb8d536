//! A disk for guests: real memory, rings and events, a monitor and a driver in this process.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "vhost_user/guests.rs"]
mod guests;
#[path = "vhost_user/hostile.rs"]
mod hostile;
#[path = "vhost_user/monitor.rs"]
mod monitor;
#[path = "vhost_user/node.rs"]
mod node;
#[path = "vhost_user/play.rs"]
mod play;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// `fuzz/targets/virtio_blk.rs` plays the same scripts for longer.
    #[test]
    fn any_memory_is_a_request_or_is_none(script in prop::collection::vec(any::<u8>(), 0..400)) {
        play::play(&script);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// `fuzz/targets/vhost_monitor.rs` plays the same scripts for longer.
    #[test]
    fn any_monitor_is_served_and_let_go(script in prop::collection::vec(any::<u8>(), 0..900)) {
        monitor::play(&script);
    }
}

/// What scripts change is a guest whose requests are answered.
#[test]
fn a_script_of_nothing_is_a_guest_that_is_served() {
    assert_eq!(monitor::play(&[]), monitor::ALL_ANSWERED);
}

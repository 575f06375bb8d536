//! A monitor that sends anything, with arbitrary memory, inflight record and rings. The player
//! asserts the invariants; the property tests of `attach` share it.

#[path = "../../crates/serve/attach/tests/vhost_user/monitor.rs"]
mod monitor;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| {
        monitor::run(script);
    });
}

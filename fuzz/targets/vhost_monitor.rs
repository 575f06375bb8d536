//! A monitor that says anything, with memory, a record and rings that are anything; what must hold is asserted by the player,
//! which the property tests of `attach` share.

#[path = "../../crates/serve/attach/tests/vhost_user/monitor.rs"]
mod monitor;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| {
        monitor::play(script);
    });
}

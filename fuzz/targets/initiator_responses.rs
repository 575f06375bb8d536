//! What NVMe controllers, iSCSI targets and their units report: Identify, logs, lists, pages, sense
//! data, text. The player asserts the invariants; the property tests of `initiator` share it.

#[path = "../../crates/serve/initiator/tests/told/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

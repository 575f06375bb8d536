//! What NVMe controllers, iSCSI targets and their units say of themselves: Identify, logs, lists, pages, sense data, text.
//! What must hold is asserted by the player, which the property tests of `initiator` share.

#[path = "../../crates/serve/initiator/tests/told/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

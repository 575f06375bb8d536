//! Scripts of what iSCSI targets send, in any portions, and of what an initiator submits; what must hold is
//! asserted by the player, which the property tests of `iscsi` share.

#[path = "../../crates/protocol/iscsi/tests/initiator/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

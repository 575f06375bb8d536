//! Scripts of what iSCSI targets send, in any fragments, and of the initiator's requests. The
//! player asserts the invariants; the property tests of `iscsi` share it.

#[path = "../../crates/protocol/iscsi/tests/initiator/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

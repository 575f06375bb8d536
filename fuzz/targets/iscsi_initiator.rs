//! Scripts of what iSCSI targets send, in any fragments, and of the initiator's requests. The
//! player asserts the invariants; the property tests of `iscsi` share it.

#[path = "../../crates/protocol/iscsi/tests/initiator/fuzz_input.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| fuzz_input::run(script));
}

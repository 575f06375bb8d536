//! What NVMe controllers, iSCSI targets and their units report: Identify, logs, lists, pages, sense
//! data, text. The player asserts the invariants; the property tests of `initiator` share it.

#[path = "../../crates/serve/initiator/tests/target_responses/fuzz_input.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| fuzz_input::run(script));
}

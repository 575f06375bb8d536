//! Any text as the URI of a target. The player asserts the invariants; the property tests of
//! `initiator` share it.

#[path = "../../crates/serve/initiator/tests/uri/fuzz_input.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |text: &str| fuzz_input::run(text));
}

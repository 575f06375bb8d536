//! Arbitrary guest memory: descriptors, headers, ranges. The player asserts the invariants; the
//! property tests of `attach` share it.

#[path = "../../crates/serve/attach/tests/vhost_user/fuzz_input.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| fuzz_input::run(script));
}

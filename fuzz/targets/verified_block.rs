//! Arbitrary bytes in place of self-describing blocks. The player asserts the invariants; the
//! property tests of `load` share it.

#[path = "../../crates/serve/load/tests/verify/fuzz_input.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| fuzz_input::run(script));
}

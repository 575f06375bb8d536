//! Any text as an fio job file. The player asserts the invariants; the property tests of `load`
//! share it.

#[path = "../../crates/serve/load/tests/job/fuzz_input.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |text: &str| fuzz_input::run(text));
}

//! Any text as an fio job file. The player asserts the invariants; the property tests of `load`
//! share it.

#[path = "../../crates/serve/load/tests/job/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |text: &str| play::play(text));
}

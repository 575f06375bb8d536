//! Arbitrary bytes in place of self-describing blocks. The player asserts the invariants; the
//! property tests of `load` share it.

#[path = "../../crates/serve/load/tests/verify/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

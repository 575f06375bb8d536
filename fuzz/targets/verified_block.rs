//! Arbitrary bytes where blocks are that say what they are; what must hold is asserted by the player, which the property tests of
//! `load` share.

#[path = "../../crates/serve/load/tests/verify/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

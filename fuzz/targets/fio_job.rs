//! Any text as a job file of fio; what must hold is asserted by the player, which the property tests of `load` share.

#[path = "../../crates/serve/load/tests/job/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |text: &str| play::play(text));
}

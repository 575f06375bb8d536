//! Any text as the name of what is attached or measured; what must hold is asserted by the player, which the property tests
//! of `initiator` share.

#[path = "../../crates/serve/initiator/tests/uri/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |text: &str| play::play(text));
}

//! A guest's memory that is anything: descriptors, headers, ranges; what must hold is asserted by the player, which the
//! property tests of `attach` share.

#[path = "../../crates/serve/attach/tests/vhost_user/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

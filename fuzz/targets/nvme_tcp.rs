//! Scripts of what NVMe/TCP hosts send, in any portions, and of what a driver decides; what must
//! hold is asserted by the player, which the property tests of `nvme` share.

#[path = "../../crates/protocol/nvme/tests/script/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

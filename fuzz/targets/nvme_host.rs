//! Scripts of what NVMe/TCP controllers send, in any portions, and of what a host submits; what must
//! hold is asserted by the player, which the property tests of `nvme` share.

#[path = "../../crates/protocol/nvme/tests/host/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| play::play(script));
}

//! A host and a controller that authenticate, and somebody between them who does not know the secrets;
//! what must hold is asserted by the player, which the property tests of `nvme` share.

#[path = "../../crates/protocol/nvme/tests/auth/play.rs"]
mod play;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| {
        let _ = play::play(script);
    });
}

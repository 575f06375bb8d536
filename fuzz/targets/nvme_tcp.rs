//! Scripts of what NVMe/TCP hosts send, in any fragments, and of the driver's decisions. The player
//! asserts the invariants; the property tests of `nvme` share it.

#[path = "../../crates/protocol/nvme/tests/script/fuzz_input.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| fuzz_input::run(script));
}

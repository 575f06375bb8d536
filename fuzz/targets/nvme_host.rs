//! Scripts of what NVMe/TCP controllers send, in any fragments, and of the host's requests. The
//! player asserts the invariants; the property tests of `nvme` share it.

#[path = "../../crates/protocol/nvme/tests/host/fuzz_input.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| fuzz_input::run(script));
}

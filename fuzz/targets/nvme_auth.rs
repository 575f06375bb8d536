//! A host and a controller that authenticate, with a man in the middle who does not know the
//! secrets. The player asserts the invariants; the property tests of `nvme` share it.

#[path = "../../crates/protocol/nvme/tests/auth/fuzz_input.rs"]
mod fuzz_input;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| {
        let _ = fuzz_input::run(script);
    });
}

//! Peer links: a connection receives any bytes, or frames with valid checksums, in any fragments.
//! The script asserts the invariants; the property tests of `peer` share it.

#[path = "../../crates/protocol/peer/tests/script/feed.rs"]
mod script;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (u8, bool, u16, &[u8])| {
        let (line, made, portion, bytes) = input;
        script::feed(line, made, portion, bytes);
    });
}

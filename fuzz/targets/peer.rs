//! Peer links: a connection is fed anything, or frames whose checksums are right, in any portions; what
//! must hold is asserted by the script that the property tests of `peer` share.

#[path = "../../crates/protocol/peer/tests/script/feed.rs"]
mod script;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (u8, bool, u16, &[u8])| {
        let (line, made, portion, bytes) = input;
        script::feed(line, made, portion, bytes);
    });
}

//! Scripts of SCSI commands, volume failures and events. The oracle asserts the invariants; the
//! property tests of `scsi` share it.

#[path = "../../crates/protocol/scsi/tests/conformance/oracle.rs"]
mod oracle;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| oracle::run(script));
}

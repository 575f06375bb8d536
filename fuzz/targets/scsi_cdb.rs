//! Scripts of SCSI commands, failures of the volume and events; what must hold stands in the
//! oracle, which the property tests of `scsi` share.

#[path = "../../crates/protocol/scsi/tests/conformance/oracle.rs"]
mod oracle;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |script: &[u8]| oracle::play(script));
}

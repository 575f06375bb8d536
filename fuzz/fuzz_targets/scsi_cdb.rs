//! Scripts of SCSI commands, failures of the volume and events; what must hold stands in the
//! oracle, which the property tests of `scsi` share.
#![no_main]

#[path = "../../crates/scsi/tests/conformance/oracle.rs"]
mod oracle;

libfuzzer_sys::fuzz_target!(|script: &[u8]| oracle::play(script));

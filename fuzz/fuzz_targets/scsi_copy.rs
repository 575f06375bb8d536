//! Parameter lists of EXTENDED COPY of both formats; what must hold stands in the oracle, which a
//! property test of `scsi` shares.
#![no_main]

#[path = "../../crates/scsi/tests/conformance/copy_oracle.rs"]
mod copy_oracle;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| copy_oracle::play(bytes));

//! Parameter lists of EXTENDED COPY of both formats; what must hold stands in the oracle, which a
//! property test of `scsi` shares.

#[path = "../../crates/protocol/scsi/tests/conformance/copy_oracle.rs"]
mod copy_oracle;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |bytes: &[u8]| copy_oracle::play(bytes));
}

//! Parameter lists of EXTENDED COPY in both formats. The oracle asserts the invariants; a property
//! test of `scsi` shares it.

#[path = "../../crates/protocol/scsi/tests/conformance/copy_oracle.rs"]
mod copy_oracle;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |bytes: &[u8]| copy_oracle::run(bytes));
}

//! Hostile initiators in the full feature phase; `iscsi::testing::hostile` asserts the invariants.

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: &[u8]| iscsi::testing::hostile::full_feature(input));
}

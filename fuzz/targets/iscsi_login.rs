//! Logins of hostile initiators; what must hold stands in `iscsi::testing::hostile`.

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: &[u8]| iscsi::testing::hostile::login(input));
}

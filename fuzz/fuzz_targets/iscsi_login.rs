//! Logins of hostile initiators; what must hold stands in `iscsi::testing::hostile`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| iscsi::testing::hostile::login(input));

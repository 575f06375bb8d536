//! Hostile initiators in the full feature phase; what must hold stands in
//! `iscsi::testing::hostile`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| iscsi::testing::hostile::full_feature(input));

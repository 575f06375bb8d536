//! Blocks that say what they are, with any contents.

mod fuzz_input;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// `fuzz/targets/verified_block.rs` runs the same scripts for longer.
    #[test]
    fn arbitrary_blocks_verify_or_report_an_error(script in prop::collection::vec(any::<u8>(), 0..200)) {
        fuzz_input::run(&script);
    }
}

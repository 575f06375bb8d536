//! Blocks that say what they are, from anybody.

mod play;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// `fuzz/targets/verified_block.rs` plays the same scripts for longer.
    #[test]
    fn any_block_is_right_or_says_what_is_wrong(script in prop::collection::vec(any::<u8>(), 0..200)) {
        play::play(&script);
    }
}

//! What the peer reports about itself, whatever it is.

mod play;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// `fuzz/targets/initiator_told.rs` plays the same scripts for longer.
    #[test]
    fn nothing_is_believed_that_would_harm(script in prop::collection::vec(any::<u8>(), 0..400)) {
        play::play(&script);
    }
}

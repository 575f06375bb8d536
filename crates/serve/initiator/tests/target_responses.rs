//! What the peer reports about itself, whatever it is.

mod fuzz_input;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// `fuzz/targets/initiator_responses.rs` runs the same scripts for longer.
    #[test]
    fn invalid_responses_do_no_harm(script in prop::collection::vec(any::<u8>(), 0..400)) {
        fuzz_input::run(&script);
    }
}

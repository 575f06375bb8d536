//! Arbitrary scripts; `fuzz/targets/nvme_tcp.rs` runs the same ones for longer.

mod fuzz_input;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn nothing_breaks(script in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz_input::run(&script);
    }

    /// With the connections set up, so that what follows reaches the queues.
    #[test]
    fn nothing_breaks_behind_connect(
        eager in any::<bool>(),
        script in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let mut all = vec![u8::from(eager), 21, 27, 23, 59];
        if !eager {
            // Connect waits for memory and its decision.
            all.extend([15, 16, 0, 0, 27, 47, 48, 0, 0]);
        }
        all.extend(script);
        fuzz_input::run(&all);
    }
}

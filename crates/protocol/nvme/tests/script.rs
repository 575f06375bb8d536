//! Arbitrary scripts; `fuzz/targets/nvme_tcp.rs` plays the same ones for longer.

mod play;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn nothing_breaks(script in prop::collection::vec(any::<u8>(), 0..600)) {
        play::play(&script);
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
        play::play(&all);
    }
}

//! The initiator's machine: against our own target, against a hostile one, and against anything.
//! `fuzz/targets/iscsi_initiator.rs` plays the same scripts as `anything` for longer.

mod control;
mod hostile;
mod login;
mod pair;
mod play;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn nothing_breaks(script in prop::collection::vec(any::<u8>(), 0..1500)) {
        play::play(&script);
    }

    /// With a login first, so that what follows reaches the commands.
    #[test]
    fn nothing_breaks_behind_a_login(
        config in prop::array::uniform4(any::<u8>()),
        script in prop::collection::vec(any::<u8>(), 0..1500),
    ) {
        let mut all = config.to_vec();
        all.extend([play::LOGIN, 0]);
        all.extend(script);
        play::play(&all);
    }
}

//! The initiator's machine: against our own target, against a hostile one, and against anything.
//! `fuzz/fuzz_targets/iscsi_initiator.rs` plays the same scripts as `anything` for longer.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "initiator/control.rs"]
mod control;
#[path = "initiator/hostile.rs"]
mod hostile;
#[path = "initiator/login.rs"]
mod login;
#[path = "initiator/pair.rs"]
mod pair;
#[path = "initiator/play.rs"]
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

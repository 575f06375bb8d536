//! The initiator's machine: against our own target, against a hostile one, and against anything.
//! `fuzz/targets/iscsi_initiator.rs` runs the same scripts as `anything` for longer.

mod control;
mod fuzz_input;
mod hostile;
mod login;
mod pair;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn nothing_breaks(script in prop::collection::vec(any::<u8>(), 0..1500)) {
        fuzz_input::run(&script);
    }

    /// With a login first, so that what follows reaches the commands.
    #[test]
    fn nothing_breaks_behind_a_login(
        config in prop::array::uniform4(any::<u8>()),
        script in prop::collection::vec(any::<u8>(), 0..1500),
    ) {
        let mut all = config.to_vec();
        all.extend([fuzz_input::LOGIN, 0]);
        all.extend(script);
        fuzz_input::run(&all);
    }
}

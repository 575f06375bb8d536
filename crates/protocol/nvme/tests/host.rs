//! The host's machine: against our own controller, against a hostile one, and against anything.
//! `fuzz/targets/nvme_host.rs` runs the same scripts as `anything` for longer.

mod fuzz_input;
mod hostile;
mod pair;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn nothing_breaks(script in prop::collection::vec(any::<u8>(), 0..1500)) {
        fuzz_input::run(&script);
    }

    /// With ICResp first, so that what follows reaches the commands.
    #[test]
    fn nothing_breaks_behind_ic_resp(
        config in prop::array::uniform4(any::<u8>()),
        script in prop::collection::vec(any::<u8>(), 0..1500),
    ) {
        let mut all = config.to_vec();
        all.extend([fuzz_input::IC_RESP, 0, 0, 0]);
        all.extend(script);
        fuzz_input::run(&all);
    }
}

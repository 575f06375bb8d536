//! Hostile initiators and whimsical drivers; the fuzz targets run the same for longer.

use iscsi::testing::hostile;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn anything_during_a_login(input in prop::collection::vec(any::<u8>(), 0..600)) {
        hostile::login(&input);
    }

    #[test]
    fn anything_in_the_full_feature_phase(input in prop::collection::vec(any::<u8>(), 0..1500)) {
        hostile::full_feature(&input);
    }
}

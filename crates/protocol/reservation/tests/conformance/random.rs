//! Whatever is asked, the table and the clauses agree.

use proptest::prelude::*;
use reservation::{COPY_BYTES, Table};

use crate::oracle;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_script(script in prop::collection::vec(any::<u8>(), 0..1200)) {
        oracle::run(Table::default(), &script);
    }

    #[test]
    fn arbitrary_bytes_parse_or_are_refused(
        front in prop::collection::vec(any::<u8>(), 0..200),
        len in prop_oneof![Just(COPY_BYTES), 0..COPY_BYTES + 2],
    ) {
        let mut bytes = front;
        bytes.resize(len, 0);
        prop_assert!(Table::parse(&bytes).is_err() || bytes.iter().all(|&b| b == 0));
    }
}

//! What fuzz targets share. They are in the example `fuzz`, which is built with the tests' dependencies.

use arbitrary::{Arbitrary, Unstructured};

/// Makes of `bytes` what a target wants, if they are enough for that.
pub fn feed<'a, T: Arbitrary<'a>>(bytes: &'a [u8], run: impl FnOnce(T)) {
    if let Ok(input) = T::arbitrary_take_rest(Unstructured::new(bytes)) {
        run(input);
    }
}

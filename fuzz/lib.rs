//! Code that the fuzz targets share. They are in the example `fuzz`, built with the tests'
//! dependencies.

use arbitrary::{Arbitrary, Unstructured};

/// Builds a target's input from `bytes` and runs the target, if there are enough bytes.
pub fn feed<'a, T: Arbitrary<'a>>(bytes: &'a [u8], run: impl FnOnce(T)) {
    if let Ok(input) = T::arbitrary_take_rest(Unstructured::new(bytes)) {
        run(input);
    }
}

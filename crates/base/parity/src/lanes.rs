//! Vectors of bytes, and how a kernel runs over slices with them.

use crate::arch::{Bytes, Portable};

/// Vectors of some processor. A value proves that the processor has them, which makes their use
/// safe.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// Name of the engine that uses them.
    const NAME: &'static str;
    /// Length of a vector in bytes.
    const BYTES: usize;
    type Vector: Copy;
    /// A factor, prepared for [`Lanes::multiply`].
    type Factor: Copy;

    /// Runs `kernel` where the compiler may use these vectors' instructions.
    fn enter<K: Kernel>(self, kernel: &mut K);

    fn zero(self) -> Self::Vector;
    /// Loads the first [`Lanes::BYTES`] of `bytes`, which has as many.
    fn load(self, bytes: &[u8]) -> Self::Vector;
    /// Stores to the first [`Lanes::BYTES`] of `bytes`, which has as many.
    fn store(self, vector: Self::Vector, bytes: &mut [u8]);
    fn xor(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn or(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Every byte times the generator.
    fn double(self, a: Self::Vector) -> Self::Vector;
    /// Two steps of Horner's rule: four times `q`, twice `high`, and `low`.
    fn horner_step2(self, q: Self::Vector, high: Self::Vector, low: Self::Vector) -> Self::Vector;
    fn factor(self, factor: u8) -> Self::Factor;
    fn multiply(self, factor: Self::Factor, a: Self::Vector) -> Self::Vector;
    fn is_zero(self, a: Self::Vector) -> bool;
}

/// A computation over slices of one length, each byte independent of its neighbours.
pub(crate) trait Kernel {
    /// How many bytes of a slice to process before going on to the next one.
    const VISIT_BYTES: usize;

    /// The length of the slices.
    fn len_bytes(&self) -> usize;
    /// Computes `U` vectors from byte `at`.
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize);
}

/// Runs `kernel` over its whole length: several vectors at a time, then single ones, then shorter
/// vectors for the rest.
#[inline(always)]
pub(crate) fn drive<L: Lanes, K: Kernel>(lanes: L, kernel: &mut K) {
    // Where there are sixteen registers, more would leave none for anything else.
    let at = match K::VISIT_BYTES / L::BYTES {
        0 | 1 => 0,
        2 | 3 => strides::<L, K, 2>(lanes, kernel, 0),
        _ if L::BYTES == 16 => strides::<L, K, 2>(lanes, kernel, 0),
        _ => strides::<L, K, 4>(lanes, kernel, 0),
    };
    let at = strides::<L, K, 1>(lanes, kernel, at);
    if at < kernel.len_bytes() {
        drive_tail(kernel, at);
    }
}

/// The remainder that is shorter than a vector. Pages never have one.
#[inline(never)]
fn drive_tail<K: Kernel>(kernel: &mut K, at: usize) {
    let at = strides::<Portable, K, 1>(Portable, kernel, at);
    strides::<Bytes, K, 1>(Bytes, kernel, at);
}

/// As many steps of `U` vectors as fit, from `at`; returns where they end.
#[inline(always)]
fn strides<L: Lanes, K: Kernel, const U: usize>(lanes: L, kernel: &mut K, mut at: usize) -> usize {
    let stride = U * L::BYTES;
    while kernel.len_bytes() - at >= stride {
        kernel.step::<L, U>(lanes, at);
        at += stride;
    }
    at
}

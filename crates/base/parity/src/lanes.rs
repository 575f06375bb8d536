//! Vectors of bytes, and how a kernel goes over slices with them.

use crate::arch::{Bytes, Portable};

/// Vectors of some processor. A value shows that the processor has them, which is what makes their use safe.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// As an engine is called that uses them.
    const NAME: &'static str;
    /// Of a vector.
    const BYTES: usize;
    type Vector: Copy;
    /// A factor, prepared for [`Lanes::times`].
    type Factor: Copy;

    /// Runs `kernel` where the compiler may use these vectors' instructions.
    fn enter<K: Kernel>(self, kernel: &mut K);

    fn zero(self) -> Self::Vector;
    /// The first [`Lanes::BYTES`] of `bytes`, which has as many.
    fn load(self, bytes: &[u8]) -> Self::Vector;
    /// To the first [`Lanes::BYTES`] of `bytes`, which has as many.
    fn store(self, vector: Self::Vector, bytes: &mut [u8]);
    fn xor(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn or(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Every byte times the generator.
    fn double(self, a: Self::Vector) -> Self::Vector;
    /// Two steps of Horner's rule: four times `q`, twice `high`, and `low`.
    fn next(self, q: Self::Vector, high: Self::Vector, low: Self::Vector) -> Self::Vector;
    fn factor(self, factor: u8) -> Self::Factor;
    fn times(self, factor: Self::Factor, a: Self::Vector) -> Self::Vector;
    fn is_zero(self, a: Self::Vector) -> bool;
}

/// A computation over slices of one length, whose bytes do not depend on their neighbours.
pub(crate) trait Kernel {
    /// How many bytes of a slice are best looked at before it is the next one's turn.
    const VISIT: usize;

    /// The length of the slices.
    fn bytes(&self) -> usize;
    /// Computes `U` vectors from byte `at`.
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize);
}

/// Runs `kernel` over its whole length: in strides of several vectors, then by single ones, then by whatever fits into the rest.
#[inline(always)]
pub(crate) fn drive<L: Lanes, K: Kernel>(lanes: L, kernel: &mut K) {
    // More would not leave registers for anything else, where there are sixteen.
    let at = match K::VISIT / L::BYTES {
        0 | 1 => 0,
        2 | 3 => strides::<L, K, 2>(lanes, kernel, 0),
        _ if L::BYTES == 16 => strides::<L, K, 2>(lanes, kernel, 0),
        _ => strides::<L, K, 4>(lanes, kernel, 0),
    };
    let at = strides::<L, K, 1>(lanes, kernel, at);
    if at < kernel.bytes() {
        rest(kernel, at);
    }
}

/// What is shorter than a vector. Pages never come here.
#[inline(never)]
fn rest<K: Kernel>(kernel: &mut K, at: usize) {
    let at = strides::<Portable, K, 1>(Portable, kernel, at);
    strides::<Bytes, K, 1>(Bytes, kernel, at);
}

/// As many strides of `U` vectors as fit, from `at`; gives where they end.
#[inline(always)]
fn strides<L: Lanes, K: Kernel, const U: usize>(lanes: L, kernel: &mut K, mut at: usize) -> usize {
    let stride = U * L::BYTES;
    while kernel.bytes() - at >= stride {
        kernel.step::<L, U>(lanes, at);
        at += stride;
    }
    at
}

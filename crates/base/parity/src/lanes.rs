//! Vectors of bytes, and how a kernel runs over slices with them. The vectors here are plain
//! integers, which compilers turn into the target's vectors; those of `arch` are the processor's.

use crate::gf256::{self, POLYNOMIAL};

/// Words in a vector of [`Portable`].
const WORDS: usize = 4;
/// The lowest bit of each byte of a word.
const LOW_BITS: u64 = u64::MAX / 255;

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

/// Four words, eight bytes in each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

impl Lanes for Portable {
    const NAME: &'static str = "portable";
    const BYTES: usize = 8 * WORDS;
    type Vector = [u64; WORDS];
    type Factor = u8;

    fn enter<K: Kernel>(self, kernel: &mut K) {
        drive(self, kernel);
    }

    #[inline(always)]
    fn zero(self) -> Self::Vector {
        [0; WORDS]
    }

    #[inline(always)]
    fn load(self, bytes: &[u8]) -> Self::Vector {
        let (words, _) = bytes.as_chunks::<8>();
        let mut vector = [0; WORDS];
        for (word, bytes) in vector.iter_mut().zip(&words[..WORDS]) {
            *word = u64::from_le_bytes(*bytes);
        }
        vector
    }

    #[inline(always)]
    fn store(self, vector: Self::Vector, bytes: &mut [u8]) {
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (word, bytes) in vector.into_iter().zip(&mut words[..WORDS]) {
            *bytes = word.to_le_bytes();
        }
    }

    #[inline(always)]
    fn xor(self, mut a: Self::Vector, b: Self::Vector) -> Self::Vector {
        for (a, b) in a.iter_mut().zip(b) {
            *a ^= b;
        }
        a
    }

    #[inline(always)]
    fn or(self, mut a: Self::Vector, b: Self::Vector) -> Self::Vector {
        for (a, b) in a.iter_mut().zip(b) {
            *a |= b;
        }
        a
    }

    #[inline(always)]
    fn double(self, mut a: Self::Vector) -> Self::Vector {
        for a in &mut a {
            let high = *a >> 7 & LOW_BITS;
            // 255 in each byte whose highest bit is shifted out.
            let reduced = (high << 8).wrapping_sub(high) & (LOW_BITS * u64::from(POLYNOMIAL));
            *a = (*a << 1 & !LOW_BITS) ^ reduced;
        }
        a
    }

    #[inline(always)]
    fn horner_step2(self, q: Self::Vector, high: Self::Vector, low: Self::Vector) -> Self::Vector {
        let q = self.xor(self.double(q), high);
        self.xor(self.double(q), low)
    }

    #[inline(always)]
    fn factor(self, factor: u8) -> u8 {
        factor
    }

    #[inline(always)]
    fn multiply(self, factor: u8, mut a: Self::Vector) -> Self::Vector {
        let mut product = self.zero();
        for bit in 0..8 {
            if factor >> bit & 1 == 1 {
                product = self.xor(product, a);
            }
            a = self.double(a);
        }
        product
    }

    #[inline(always)]
    fn is_zero(self, a: Self::Vector) -> bool {
        a == self.zero()
    }
}

/// One byte at a time, for the remainder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes;

impl Lanes for Bytes {
    const NAME: &'static str = "bytes";
    const BYTES: usize = 1;
    type Vector = u8;
    type Factor = u8;

    fn enter<K: Kernel>(self, kernel: &mut K) {
        drive(self, kernel);
    }

    fn zero(self) -> u8 {
        0
    }

    fn load(self, bytes: &[u8]) -> u8 {
        bytes[0]
    }

    fn store(self, vector: u8, bytes: &mut [u8]) {
        bytes[0] = vector;
    }

    fn xor(self, a: u8, b: u8) -> u8 {
        a ^ b
    }

    fn or(self, a: u8, b: u8) -> u8 {
        a | b
    }

    fn double(self, a: u8) -> u8 {
        gf256::mul(2, a)
    }

    fn horner_step2(self, q: u8, high: u8, low: u8) -> u8 {
        let q = self.xor(self.double(q), high);
        self.xor(self.double(q), low)
    }

    fn factor(self, factor: u8) -> u8 {
        factor
    }

    fn multiply(self, factor: u8, a: u8) -> u8 {
        gf256::mul(factor, a)
    }

    fn is_zero(self, a: u8) -> bool {
        a == 0
    }
}

//! Vectors of plain integers, which compilers turn into the target's vectors.

use crate::{
    gf256::{self, POLYNOMIAL},
    lanes::{Kernel, Lanes, drive},
};

const WORDS: usize = 4;
const LOW_BITS: u64 = u64::MAX / 255;

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

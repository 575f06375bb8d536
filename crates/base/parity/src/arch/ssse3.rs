//! x86-64 with SSSE3: 16 bytes, multiplied by looking up nibbles.
#![allow(unsafe_code)]

use crate::{
    Engine,
    gf256::{self, POLYNOMIAL},
    lanes::{Kernel, Lanes, drive},
};
use std::arch::x86_64::{
    __m128i, _mm_add_epi8, _mm_and_si128, _mm_cmpeq_epi8, _mm_cmpgt_epi8, _mm_loadu_si128,
    _mm_movemask_epi8, _mm_or_si128, _mm_set1_epi8, _mm_setzero_si128, _mm_shuffle_epi8,
    _mm_srli_epi16, _mm_storeu_si128, _mm_xor_si128,
};

/// A value exists only if the processor has SSSE3.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ssse3(());

impl Ssse3 {
    pub(crate) fn detect() -> Option<&'static dyn Engine> {
        is_x86_feature_detected!("ssse3").then_some(&Self(()))
    }
}

impl Lanes for Ssse3 {
    const NAME: &'static str = "ssse3";
    const BYTES: usize = 16;
    type Vector = __m128i;
    /// Products with low nibbles, and with high ones.
    type Factor = [__m128i; 2];

    fn enter<K: Kernel>(self, kernel: &mut K) {
        #[target_feature(enable = "ssse3")]
        fn inside<K: Kernel>(lanes: Ssse3, kernel: &mut K) {
            drive(lanes, kernel);
        }
        // SAFETY: `self` shows that the processor has the instructions.
        unsafe { inside(self, kernel) }
    }

    #[inline(always)]
    fn zero(self) -> __m128i {
        // SAFETY: every x86-64 has SSE2.
        unsafe { _mm_setzero_si128() }
    }

    #[inline(always)]
    fn load(self, bytes: &[u8]) -> __m128i {
        let bytes = &bytes[..Self::BYTES];
        // SAFETY: every x86-64 has SSE2; there are as many bytes.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store(self, vector: __m128i, bytes: &mut [u8]) {
        let bytes = &mut bytes[..Self::BYTES];
        // SAFETY: every x86-64 has SSE2; there are as many bytes.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), vector) }
    }

    #[inline(always)]
    fn xor(self, a: __m128i, b: __m128i) -> __m128i {
        // SAFETY: every x86-64 has SSE2.
        unsafe { _mm_xor_si128(a, b) }
    }

    #[inline(always)]
    fn or(self, a: __m128i, b: __m128i) -> __m128i {
        // SAFETY: every x86-64 has SSE2.
        unsafe { _mm_or_si128(a, b) }
    }

    #[inline(always)]
    fn double(self, a: __m128i) -> __m128i {
        // SAFETY: every x86-64 has SSE2.
        unsafe {
            let is_high = _mm_cmpgt_epi8(_mm_setzero_si128(), a);
            let reduced = _mm_and_si128(is_high, _mm_set1_epi8(POLYNOMIAL.cast_signed()));
            _mm_xor_si128(_mm_add_epi8(a, a), reduced)
        }
    }

    #[inline(always)]
    fn horner_step2(self, q: __m128i, high: __m128i, low: __m128i) -> __m128i {
        let q = self.xor(self.double(q), high);
        self.xor(self.double(q), low)
    }

    #[inline(always)]
    fn factor(self, factor: u8) -> [__m128i; 2] {
        let table = &gf256::NIBBLES[usize::from(factor)];
        [self.load(&table[..16]), self.load(&table[16..])]
    }

    #[inline(always)]
    fn multiply(self, [low, high]: [__m128i; 2], a: __m128i) -> __m128i {
        // SAFETY: `self` shows that the processor has the instructions.
        unsafe {
            let nibble = _mm_set1_epi8(15);
            let of_low = _mm_shuffle_epi8(low, _mm_and_si128(a, nibble));
            let high_nibbles = _mm_and_si128(_mm_srli_epi16::<4>(a), nibble);
            _mm_xor_si128(of_low, _mm_shuffle_epi8(high, high_nibbles))
        }
    }

    #[inline(always)]
    fn is_zero(self, a: __m128i) -> bool {
        // SAFETY: every x86-64 has SSE2.
        unsafe { _mm_movemask_epi8(_mm_cmpeq_epi8(a, _mm_setzero_si128())) == 0xffff }
    }
}

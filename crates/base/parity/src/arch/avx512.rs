//! x86-64 with AVX-512 and GFNI: 64 bytes, multiplied by any factor in one instruction.
#![allow(unsafe_code)]

use crate::{
    Engine, gf256,
    lanes::{Kernel, Lanes, drive},
};
use std::arch::x86_64::{
    __m512i, _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512, _mm512_or_si512, _mm512_set1_epi64,
    _mm512_setzero_si512, _mm512_storeu_si512, _mm512_test_epi64_mask, _mm512_xor_si512,
};

/// A value exists only if the processor has these instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<&'static dyn Engine> {
        let has = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("gfni");
        has.then_some(&Self(()))
    }
}

impl Lanes for Avx512 {
    const NAME: &'static str = "avx512-gfni";
    const BYTES: usize = 64;
    type Vector = __m512i;
    type Factor = __m512i;

    fn enter<K: Kernel>(self, kernel: &mut K) {
        #[target_feature(enable = "avx512f,gfni")]
        fn inside<K: Kernel>(lanes: Avx512, kernel: &mut K) {
            drive(lanes, kernel);
        }
        // SAFETY: `self` shows that the processor has the instructions.
        unsafe { inside(self, kernel) }
    }

    #[inline(always)]
    fn zero(self) -> __m512i {
        // SAFETY: as in `enter`.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn load(self, bytes: &[u8]) -> __m512i {
        let bytes = &bytes[..Self::BYTES];
        // SAFETY: as in `enter`; there are as many bytes.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store(self, vector: __m512i, bytes: &mut [u8]) {
        let bytes = &mut bytes[..Self::BYTES];
        // SAFETY: as in `enter`; there are as many bytes.
        unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), vector) }
    }

    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as in `enter`.
        unsafe { _mm512_xor_si512(a, b) }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as in `enter`.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn double(self, a: __m512i) -> __m512i {
        self.multiply(self.factor(2), a)
    }

    #[inline(always)]
    fn horner_step2(self, q: __m512i, high: __m512i, low: __m512i) -> __m512i {
        let fresh = self.xor(self.double(high), low);
        self.xor(self.multiply(self.factor(4), q), fresh)
    }

    #[inline(always)]
    fn factor(self, factor: u8) -> __m512i {
        let matrix = gf256::MATRICES[usize::from(factor)];
        // SAFETY: as in `enter`.
        unsafe { _mm512_set1_epi64(matrix.cast_signed()) }
    }

    #[inline(always)]
    fn multiply(self, factor: __m512i, a: __m512i) -> __m512i {
        // SAFETY: as in `enter`.
        unsafe { _mm512_gf2p8affine_epi64_epi8::<0>(a, factor) }
    }

    #[inline(always)]
    fn is_zero(self, a: __m512i) -> bool {
        // SAFETY: as in `enter`.
        unsafe { _mm512_test_epi64_mask(a, a) == 0 }
    }
}

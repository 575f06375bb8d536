//! x86-64 with AVX2: 32 bytes. GFNI multiplies them by any factor in one instruction; without it,
//! nibbles are looked up.
#![allow(unsafe_code)]

use crate::{
    Engine,
    gf256::{self, POLYNOMIAL},
    lanes::{Kernel, Lanes, drive},
};
use std::arch::x86_64::{
    __m128i, __m256i, _mm_loadu_si128, _mm256_add_epi8, _mm256_and_si256,
    _mm256_broadcastsi128_si256, _mm256_cmpgt_epi8, _mm256_gf2p8affine_epi64_epi8,
    _mm256_loadu_si256, _mm256_or_si256, _mm256_set1_epi8, _mm256_set1_epi64x,
    _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_srli_epi16, _mm256_storeu_si256,
    _mm256_testz_si256, _mm256_xor_si256,
};

/// A value exists only if the processor has AVX2.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

/// A value exists only if the processor has AVX2 and GFNI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gfni(());

impl Avx2 {
    pub(crate) fn detect() -> Option<&'static dyn Engine> {
        is_x86_feature_detected!("avx2").then_some(&Self(()))
    }
}

impl Gfni {
    pub(crate) fn detect() -> Option<&'static dyn Engine> {
        let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("gfni");
        has.then_some(&Self(()))
    }
}

/// The code shared by both.
macro_rules! vectors {
    ($lanes:ident, $features:literal) => {
        const BYTES: usize = 32;
        type Vector = __m256i;

        fn enter<K: Kernel>(self, kernel: &mut K) {
            #[target_feature(enable = $features)]
            fn inside<K: Kernel>(lanes: $lanes, kernel: &mut K) {
                drive(lanes, kernel);
            }
            // SAFETY: `self` shows that the processor has the instructions.
            unsafe { inside(self, kernel) }
        }

        #[inline(always)]
        fn zero(self) -> __m256i {
            // SAFETY: as in `enter`.
            unsafe { _mm256_setzero_si256() }
        }

        #[inline(always)]
        fn load(self, bytes: &[u8]) -> __m256i {
            let bytes = &bytes[..Self::BYTES];
            // SAFETY: as in `enter`; there are as many bytes.
            unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
        }

        #[inline(always)]
        fn store(self, vector: __m256i, bytes: &mut [u8]) {
            let bytes = &mut bytes[..Self::BYTES];
            // SAFETY: as in `enter`; there are as many bytes.
            unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), vector) }
        }

        #[inline(always)]
        fn xor(self, a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: as in `enter`.
            unsafe { _mm256_xor_si256(a, b) }
        }

        #[inline(always)]
        fn or(self, a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: as in `enter`.
            unsafe { _mm256_or_si256(a, b) }
        }

        #[inline(always)]
        fn is_zero(self, a: __m256i) -> bool {
            // SAFETY: as in `enter`.
            unsafe { _mm256_testz_si256(a, a) == 1 }
        }
    };
}

impl Lanes for Avx2 {
    const NAME: &'static str = "avx2";
    /// Products with low nibbles, and with high ones.
    type Factor = [__m256i; 2];

    vectors!(Avx2, "avx2");

    #[inline(always)]
    fn double(self, a: __m256i) -> __m256i {
        // SAFETY: as in `enter`.
        unsafe {
            let is_high = _mm256_cmpgt_epi8(_mm256_setzero_si256(), a);
            let reduced = _mm256_and_si256(is_high, _mm256_set1_epi8(POLYNOMIAL.cast_signed()));
            _mm256_xor_si256(_mm256_add_epi8(a, a), reduced)
        }
    }

    #[inline(always)]
    fn horner_step2(self, q: __m256i, high: __m256i, low: __m256i) -> __m256i {
        let q = self.xor(self.double(q), high);
        self.xor(self.double(q), low)
    }

    #[inline(always)]
    fn factor(self, factor: u8) -> [__m256i; 2] {
        let (halves, _) = gf256::NIBBLES[usize::from(factor)].as_chunks::<16>();
        let half = |half: &[u8; 16]| {
            // SAFETY: as in `enter`; there are 16 bytes.
            unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(half.as_ptr().cast::<__m128i>())) }
        };
        [half(&halves[0]), half(&halves[1])]
    }

    #[inline(always)]
    fn multiply(self, [low, high]: [__m256i; 2], a: __m256i) -> __m256i {
        // SAFETY: as in `enter`.
        unsafe {
            let nibble = _mm256_set1_epi8(15);
            let of_low = _mm256_shuffle_epi8(low, _mm256_and_si256(a, nibble));
            let high_nibbles = _mm256_and_si256(_mm256_srli_epi16::<4>(a), nibble);
            _mm256_xor_si256(of_low, _mm256_shuffle_epi8(high, high_nibbles))
        }
    }
}

impl Lanes for Gfni {
    const NAME: &'static str = "avx2-gfni";
    type Factor = __m256i;

    vectors!(Gfni, "avx2,gfni");

    #[inline(always)]
    fn double(self, a: __m256i) -> __m256i {
        self.multiply(self.factor(2), a)
    }

    #[inline(always)]
    fn horner_step2(self, q: __m256i, high: __m256i, low: __m256i) -> __m256i {
        let fresh = self.xor(self.double(high), low);
        self.xor(self.multiply(self.factor(4), q), fresh)
    }

    #[inline(always)]
    fn factor(self, factor: u8) -> __m256i {
        let matrix = gf256::MATRICES[usize::from(factor)];
        // SAFETY: as in `enter`.
        unsafe { _mm256_set1_epi64x(matrix.cast_signed()) }
    }

    #[inline(always)]
    fn multiply(self, factor: __m256i, a: __m256i) -> __m256i {
        // SAFETY: as in `enter`.
        unsafe { _mm256_gf2p8affine_epi64_epi8::<0>(a, factor) }
    }
}

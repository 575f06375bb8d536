//! aarch64 with NEON: 16 bytes, multiplied by looking up nibbles.
#![allow(unsafe_code)]

use crate::{
    Engine,
    field::{self, POLYNOMIAL},
    lanes::{Kernel, Lanes, drive},
};
use std::arch::{
    aarch64::{
        uint8x16_t, vandq_u8, vcltzq_s8, vdupq_n_u8, veorq_u8, vld1q_u8, vmaxvq_u8, vorrq_u8,
        vqtbl1q_u8, vreinterpretq_s8_u8, vshlq_n_u8, vshrq_n_u8, vst1q_u8,
    },
    is_aarch64_feature_detected,
};

/// A value exists only if the processor has NEON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    pub(crate) fn detect() -> Option<&'static dyn Engine> {
        is_aarch64_feature_detected!("neon").then_some(&Self(()))
    }
}

impl Lanes for Neon {
    const NAME: &'static str = "neon";
    const BYTES: usize = 16;
    type Vector = uint8x16_t;
    /// Products with low nibbles, and with high ones.
    type Factor = [uint8x16_t; 2];

    fn enter<K: Kernel>(self, kernel: &mut K) {
        #[target_feature(enable = "neon")]
        fn inside<K: Kernel>(lanes: Neon, kernel: &mut K) {
            drive(lanes, kernel);
        }
        // SAFETY: `self` shows that the processor has the instructions.
        unsafe { inside(self, kernel) }
    }

    #[inline(always)]
    fn zero(self) -> uint8x16_t {
        // SAFETY: as in `enter`.
        unsafe { vdupq_n_u8(0) }
    }

    #[inline(always)]
    fn load(self, bytes: &[u8]) -> uint8x16_t {
        let bytes = &bytes[..Self::BYTES];
        // SAFETY: as in `enter`; there are as many bytes.
        unsafe { vld1q_u8(bytes.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, vector: uint8x16_t, bytes: &mut [u8]) {
        let bytes = &mut bytes[..Self::BYTES];
        // SAFETY: as in `enter`; there are as many bytes.
        unsafe { vst1q_u8(bytes.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn xor(self, a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: as in `enter`.
        unsafe { veorq_u8(a, b) }
    }

    #[inline(always)]
    fn or(self, a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: as in `enter`.
        unsafe { vorrq_u8(a, b) }
    }

    #[inline(always)]
    fn double(self, a: uint8x16_t) -> uint8x16_t {
        // SAFETY: as in `enter`.
        unsafe {
            let is_high = vcltzq_s8(vreinterpretq_s8_u8(a));
            veorq_u8(vshlq_n_u8::<1>(a), vandq_u8(is_high, vdupq_n_u8(POLYNOMIAL)))
        }
    }

    #[inline(always)]
    fn next(self, q: uint8x16_t, high: uint8x16_t, low: uint8x16_t) -> uint8x16_t {
        let q = self.xor(self.double(q), high);
        self.xor(self.double(q), low)
    }

    #[inline(always)]
    fn factor(self, factor: u8) -> [uint8x16_t; 2] {
        let table = &field::NIBBLES[usize::from(factor)];
        [self.load(&table[..16]), self.load(&table[16..])]
    }

    #[inline(always)]
    fn times(self, [low, high]: [uint8x16_t; 2], a: uint8x16_t) -> uint8x16_t {
        // SAFETY: as in `enter`.
        unsafe {
            let of_low = vqtbl1q_u8(low, vandq_u8(a, vdupq_n_u8(15)));
            veorq_u8(of_low, vqtbl1q_u8(high, vshrq_n_u8::<4>(a)))
        }
    }

    #[inline(always)]
    fn is_zero(self, a: uint8x16_t) -> bool {
        // SAFETY: as in `enter`.
        unsafe { vmaxvq_u8(a) == 0 }
    }
}

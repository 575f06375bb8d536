//! Vectors of processors, one file per architecture. Only these files have `unsafe`: a value of
//! their types exists only where the processor has the instructions, which makes each use safe.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod ssse3;

use crate::Engine;
use crate::lanes::Portable;

/// The engines this processor supports, the best first.
pub(crate) fn engines() -> impl Iterator<Item = &'static dyn Engine> {
    #[cfg(target_arch = "x86_64")]
    let special = [
        avx512::Avx512::detect(),
        avx2::Gfni::detect(),
        avx2::Avx2::detect(),
        ssse3::Ssse3::detect(),
    ];
    #[cfg(target_arch = "aarch64")]
    let special = [neon::Neon::detect()];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let special: [Option<&'static dyn Engine>; 0] = [];
    special.into_iter().flatten().chain([&Portable as &dyn Engine])
}

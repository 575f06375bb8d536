//! RAID 5 and 6 as their definition has them, byte by byte and bit by bit. Shares no code with the
//! kernels.

/// Multiplies in GF(2^8) modulo 0x11d, by shifting and adding.
pub(crate) fn mul(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b != 0 {
        if b & 1 == 1 {
            product ^= a;
        }
        let carry = a & 0x80 != 0;
        a <<= 1;
        if carry {
            a ^= 0x1d;
        }
        b >>= 1;
    }
    product
}

/// 2 to the power of `exponent`.
pub(crate) fn power(exponent: usize) -> u8 {
    (0..exponent).fold(1, |power, _| mul(power, 2))
}

/// P of `data`.
pub(crate) fn p(data: &[Vec<u8>], bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| data.iter().fold(0, |sum, member| sum ^ member[at])).collect()
}

/// Q of `data`.
pub(crate) fn q(data: &[Vec<u8>], bytes: usize) -> Vec<u8> {
    let powers: Vec<u8> = (0..data.len()).map(power).collect();
    let of = |at: usize| {
        data.iter().zip(&powers).fold(0, |sum, (member, power)| sum ^ mul(*power, member[at]))
    };
    (0..bytes).map(of).collect()
}

/// A stripe whose slices begin anywhere in memory, as pages do not.
pub(crate) struct Stripe {
    pub(crate) bytes: usize,
    pub(crate) data: Vec<Vec<u8>>,
    pub(crate) p: Vec<u8>,
    pub(crate) q: Vec<u8>,
}

impl Stripe {
    /// Of whatever `next` gives.
    pub(crate) fn new(members: usize, bytes: usize, mut next: impl FnMut() -> u8) -> Self {
        let mut member = || (0..bytes).map(|_| next()).collect();
        let data: Vec<Vec<u8>> = (0..members).map(|_| member()).collect();
        Self { bytes, p: p(&data, bytes), q: q(&data, bytes), data }
    }

    /// The members that are not lost.
    pub(crate) fn others(&self, lost: &[usize]) -> Vec<&[u8]> {
        let kept = self.data.iter().enumerate().filter(|(place, _)| !lost.contains(place));
        kept.map(|(_, member)| &member[..]).collect()
    }
}

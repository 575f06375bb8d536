//! The field GF(2^8) of RAID 6: polynomials over bits modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d),
//! with 2 as generator.
//!
//! All tables are computed at compile time. Addition is `^`.

/// x^8, reduced.
pub const POLYNOMIAL: u8 = 0x1d;

/// Number of different powers of the generator, and so the most data members of Q.
pub const GROUP_ORDER: usize = 255;

/// Powers of the generator, twice over: the sum of two logarithms is an index.
const EXP: [u8; 2 * GROUP_ORDER] = exponentials();
/// Logarithms to the base 2; that of 0 is undefined.
const LOG: [u8; 256] = logarithms();
/// Products with the sixteen low nibbles, then with the sixteen high ones, for every factor: tables
/// for byte shuffles.
pub(crate) static NIBBLES: [[u8; 32]; 256] = nibbles();
/// Multiplication by every factor as a matrix of bits, as the GFNI instructions take it.
#[cfg(target_arch = "x86_64")]
pub(crate) static MATRICES: [u64; 256] = matrices();

/// Twice `a`: the step from one power of the generator to the next.
const fn mul_by_generator(a: u8) -> u8 {
    (a << 1) ^ (POLYNOMIAL * (a >> 7))
}

const fn exponentials() -> [u8; 2 * GROUP_ORDER] {
    let (mut table, mut power, mut i) = ([0; 2 * GROUP_ORDER], 1, 0);
    while i < table.len() {
        table[i] = power;
        power = mul_by_generator(power);
        i += 1;
    }
    table
}

const fn logarithms() -> [u8; 256] {
    let (mut table, mut i) = ([0; 256], 0u8);
    while i < u8::MAX {
        table[EXP[i as usize] as usize] = i;
        i += 1;
    }
    table
}

const fn nibbles() -> [[u8; 32]; 256] {
    let (mut tables, mut factor) = ([[0; 32]; 256], 0);
    while factor < 256 {
        let mut nibble = 0;
        while nibble < 16 {
            tables[factor][nibble] = mul(factor as u8, nibble as u8);
            tables[factor][16 + nibble] = mul(factor as u8, (nibble as u8) << 4);
            nibble += 1;
        }
        factor += 1;
    }
    tables
}

#[cfg(target_arch = "x86_64")]
const fn matrices() -> [u64; 256] {
    let (mut matrices, mut factor) = ([0; 256], 0);
    while factor < 256 {
        matrices[factor] = matrix(factor as u8);
        factor += 1;
    }
    matrices
}

/// One row per bit of the product, bit 0 in the highest byte: bit `column` of a row says whether
/// that bit of the operand contributes.
#[cfg(target_arch = "x86_64")]
const fn matrix(factor: u8) -> u64 {
    let (mut matrix, mut column) = (0, 0);
    while column < 8 {
        let product = mul(factor, 1 << column);
        let mut row = 0;
        while row < 8 {
            let bit = (product >> row & 1) as u64;
            matrix |= bit << (8 * (7 - row) + column);
            row += 1;
        }
        column += 1;
    }
    matrix
}

/// The product of `a` and `b`.
#[must_use]
pub const fn mul(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    EXP[LOG[a as usize] as usize + LOG[b as usize] as usize]
}

/// The multiplicative inverse of `a`.
///
/// # Panics
/// If `a` is 0.
#[must_use]
pub const fn inverse(a: u8) -> u8 {
    assert!(a != 0, "0 has no inverse");
    EXP[GROUP_ORDER - LOG[a as usize] as usize]
}

/// The generator to the power of `exponent`: the coefficient of that data member in Q.
#[must_use]
pub const fn power(exponent: usize) -> u8 {
    EXP[exponent % GROUP_ORDER]
}

/// The logarithm of `a`.
///
/// # Panics
/// If `a` is 0.
#[must_use]
pub const fn log(a: u8) -> usize {
    assert!(a != 0, "0 is no power");
    LOG[a as usize] as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Multiplication by the definition: shift, add, reduce.
    fn by_bits(a: u8, b: u8) -> u8 {
        let mut product = 0u16;
        for bit in 0..8 {
            product ^= (u16::from(a) << bit) * (u16::from(b) >> bit & 1);
        }
        for bit in (8..16).rev() {
            product ^= (0x11d << (bit - 8)) * (product >> bit & 1);
        }
        u8::try_from(product).unwrap()
    }

    #[test]
    fn products_are_those_of_the_definition() {
        for a in 0..=u8::MAX {
            for b in 0..=u8::MAX {
                assert_eq!(mul(a, b), by_bits(a, b), "{a} times {b}");
            }
        }
    }

    #[test]
    fn inverses_logarithms_and_powers_agree() {
        for a in 1..=u8::MAX {
            assert_eq!(mul(a, inverse(a)), 1);
            assert_eq!(power(log(a)), a);
        }
        assert_eq!((power(0), power(8), power(GROUP_ORDER)), (1, POLYNOMIAL, 1));
    }

    #[test]
    fn nibble_tables_give_the_product() {
        for (factor, table) in (0..=u8::MAX).zip(&NIBBLES) {
            for b in 0..=u8::MAX {
                let sum = table[usize::from(b & 15)] ^ table[usize::from(16 + (b >> 4))];
                assert_eq!(sum, by_bits(factor, b));
            }
        }
    }
}

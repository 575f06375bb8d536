//! The checksum embedded in a structure on disk: CRC-32C of all its bytes, with those of the
//! checksum as zero, little-endian.

use core::ops::Range;

use crate::{Crc32c, crc32c};

fn checksum_range(at: usize) -> Range<usize> {
    at..at + size_of::<u32>()
}

/// Writes the checksum of `bytes` at byte `at` of them.
pub fn write_checksum(bytes: &mut [u8], at: usize) {
    bytes[checksum_range(at)].fill(0);
    let checksum = crc32c(bytes);
    bytes[checksum_range(at)].copy_from_slice(&checksum.to_le_bytes());
}

/// Computes the checksum for byte `at` of `bytes`; more data can be appended to it.
#[must_use]
pub fn begin_checksum(bytes: &[u8], at: usize) -> Crc32c {
    let Range { start, end } = checksum_range(at);
    Crc32c::new().update(&bytes[..start]).update(&[0; 4]).update(&bytes[end..])
}

/// Whether the checksum at byte `at` of `bytes` is correct.
#[must_use]
pub fn verify_checksum(bytes: &[u8], at: usize) -> bool {
    bytes[checksum_range(at)] == begin_checksum(bytes, at).value().to_le_bytes()
}

/// `bytes` with the correct checksum at byte `at`.
#[must_use]
pub fn with_checksum<const N: usize>(mut bytes: [u8; N], at: usize) -> [u8; N] {
    write_checksum(&mut bytes, at);
    bytes
}

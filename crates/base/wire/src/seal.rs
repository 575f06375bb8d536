//! The checksum that a structure on disk carries within itself: CRC-32C of all its bytes, those of the
//! checksum being zero, little-endian.

use core::ops::Range;

use crate::{Crc32c, crc32c};

fn field(at: usize) -> Range<usize> {
    at..at + size_of::<u32>()
}

/// Puts the checksum of `bytes` at byte `at` of them.
pub fn seal(bytes: &mut [u8], at: usize) {
    bytes[field(at)].fill(0);
    let checksum = crc32c(bytes);
    bytes[field(at)].copy_from_slice(&checksum.to_le_bytes());
}

/// The checksum that belongs at byte `at` of `bytes`, to which more that it covers can be added.
#[must_use]
pub fn checksum(bytes: &[u8], at: usize) -> Crc32c {
    let Range { start, end } = field(at);
    Crc32c::new().update(&bytes[..start]).update(&[0; 4]).update(&bytes[end..])
}

/// Whether the checksum at byte `at` of `bytes` is theirs.
#[must_use]
pub fn is_sealed(bytes: &[u8], at: usize) -> bool {
    bytes[field(at)] == checksum(bytes, at).value().to_le_bytes()
}

/// `bytes` with the checksum that fits them at byte `at`.
#[must_use]
pub fn sealed<const N: usize>(mut bytes: [u8; N], at: usize) -> [u8; N] {
    seal(&mut bytes, at);
    bytes
}

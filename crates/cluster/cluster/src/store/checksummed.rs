//! The stored form of a record, in a store or a file: a checksum over its name and contents.
//!
//! ```text
//! windrose-1 CCCCCCCC\n
//! CONTENTS
//! ```
//!
//! `CCCCCCCC` is the CRC-32C of the record's name (its key in the store, or its path in the data
//! directory), a zero byte and the contents, in eight lower-case hexadecimal digits. It detects
//! corruption and records stored under the wrong name.

use wire::crc32c;

/// Start of a record, with the version of this form.
const MAGIC: &[u8] = b"windrose-1 ";

/// Digits of the checksum.
const CHECKSUM_DIGITS: usize = 8;

/// Bytes before the contents.
const HEADER_LEN: usize = MAGIC.len() + CHECKSUM_DIGITS + 1;

/// Why a record is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChecksumError {
    /// The header is missing.
    #[error("it has no checksum: it is damaged, or another version of the program wrote it")]
    Missing,
    /// The checksum does not match the name and contents.
    #[error("its checksum does not match: it is damaged, or belongs to another record")]
    Mismatch,
}

fn checksum(name: &str, contents: &[u8]) -> [u8; CHECKSUM_DIGITS] {
    let sum = crc32c(&[name.as_bytes(), &[0], contents].concat());
    let mut digits = [0; CHECKSUM_DIGITS];
    for (digit, shift) in digits.iter_mut().zip((0..32).step_by(4).rev()) {
        *digit = b"0123456789abcdef"[(sum >> shift & 0xf) as usize];
    }
    digits
}

/// Encodes the record `name`.
#[must_use]
pub fn add_checksum(name: &str, contents: &[u8]) -> Vec<u8> {
    [MAGIC, &checksum(name, contents), b"\n", contents].concat()
}

/// Checks and decodes the record `name`; returns its contents.
///
/// # Errors
/// [`ChecksumError`].
pub fn verify_checksum<'a>(name: &str, stored: &'a [u8]) -> Result<&'a [u8], ChecksumError> {
    let (prefix, contents) = stored.split_at_checked(HEADER_LEN).ok_or(ChecksumError::Missing)?;
    let sum = prefix.strip_prefix(MAGIC).and_then(|rest| rest.strip_suffix(b"\n"));
    let sum = sum.ok_or(ChecksumError::Missing)?;
    if sum != checksum(name, contents) {
        return Err(ChecksumError::Mismatch);
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_opens_as_it_was_sealed() {
        let stored = add_checksum("volumes/1", b"{\"a\":1}");
        assert_eq!(stored, b"windrose-1 38eaf894\n{\"a\":1}");
        assert_eq!(verify_checksum("volumes/1", &stored), Ok(&b"{\"a\":1}"[..]));
        assert_eq!(verify_checksum("", &add_checksum("", b"")), Ok(&b""[..]));
    }

    #[test]
    fn no_bit_of_a_record_or_its_name_changes_unseen() {
        let (name, contents) = ("names/web", b"3d813cbb".as_slice());
        let stored = add_checksum(name, contents);
        for bit in 0..stored.len() * 8 {
            let mut bad = stored.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(verify_checksum(name, &bad).is_err(), "bit {bit}");
        }
        for bit in 0..name.len() * 8 {
            let mut other = name.as_bytes().to_vec();
            other[bit / 8] ^= 1 << (bit % 8);
            let Ok(other) = String::from_utf8(other) else { continue };
            assert_eq!(verify_checksum(&other, &stored), Err(ChecksumError::Mismatch), "bit {bit}");
        }
        for len in 0..stored.len() {
            assert!(verify_checksum(name, &stored[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn what_has_no_checksum_is_told_from_what_has_another() {
        assert_eq!(verify_checksum("k", b"{\"id\":1}"), Err(ChecksumError::Missing));
        assert_eq!(verify_checksum("k", b""), Err(ChecksumError::Missing));
        assert_eq!(verify_checksum("k", b"windrose-2 00000000\nx"), Err(ChecksumError::Missing));
        assert_eq!(verify_checksum("k", b"windrose-1 00000000\nx"), Err(ChecksumError::Mismatch));
    }
}

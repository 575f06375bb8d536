//! How a record stands in a store or a file: with a checksum over its contents and its name.
//!
//! ```text
//! windrose-1 CCCCCCCC\n
//! CONTENTS
//! ```
//!
//! `CCCCCCCC` is the CRC-32C of the record's name (its key in the store, or its path in the data
//! directory), a zero byte and the contents, in eight small hexadecimal digits. So no bit of a
//! record changes unseen, whatever keeps it, and no record is taken for another one.

use wire::crc32c;

/// What a record begins with: the version of this form.
const HEAD: &[u8] = b"windrose-1 ";

/// Digits of the checksum.
const DIGITS: usize = 8;

/// Bytes before the contents.
const PREFIX: usize = HEAD.len() + DIGITS + 1;

/// Why a record cannot be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// It does not begin as a record does.
    #[error("it has no checksum: it is damaged, or another version of the program wrote it")]
    NoChecksum,
    /// Its checksum is that of other contents, or of another record.
    #[error("its checksum does not match: it is damaged, or belongs to another record")]
    Checksum,
}

fn checksum(name: &str, contents: &[u8]) -> [u8; DIGITS] {
    let sum = crc32c(&[name.as_bytes(), &[0], contents].concat());
    let mut digits = [0; DIGITS];
    for (digit, shift) in digits.iter_mut().zip((0..32).step_by(4).rev()) {
        *digit = b"0123456789abcdef"[(sum >> shift & 0xf) as usize];
    }
    digits
}

/// The record called `name` as it is kept.
#[must_use]
pub fn seal(name: &str, contents: &[u8]) -> Vec<u8> {
    [HEAD, &checksum(name, contents), b"\n", contents].concat()
}

/// The contents of the record called `name`.
///
/// # Errors
/// [`Damage`].
pub fn open<'a>(name: &str, kept: &'a [u8]) -> Result<&'a [u8], Damage> {
    let (prefix, contents) = kept.split_at_checked(PREFIX).ok_or(Damage::NoChecksum)?;
    let sum = prefix.strip_prefix(HEAD).and_then(|rest| rest.strip_suffix(b"\n"));
    let sum = sum.ok_or(Damage::NoChecksum)?;
    if sum != checksum(name, contents) {
        return Err(Damage::Checksum);
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_opens_as_it_was_sealed() {
        let kept = seal("volumes/1", b"{\"a\":1}");
        assert_eq!(kept, b"windrose-1 38eaf894\n{\"a\":1}");
        assert_eq!(open("volumes/1", &kept), Ok(&b"{\"a\":1}"[..]));
        assert_eq!(open("", &seal("", b"")), Ok(&b""[..]));
    }

    #[test]
    fn no_bit_of_a_record_or_its_name_changes_unseen() {
        let (name, contents) = ("names/web", b"3d813cbb".as_slice());
        let kept = seal(name, contents);
        for bit in 0..kept.len() * 8 {
            let mut bad = kept.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(open(name, &bad).is_err(), "bit {bit}");
        }
        for bit in 0..name.len() * 8 {
            let mut other = name.as_bytes().to_vec();
            other[bit / 8] ^= 1 << (bit % 8);
            let Ok(other) = String::from_utf8(other) else { continue };
            assert_eq!(open(&other, &kept), Err(Damage::Checksum), "bit {bit}");
        }
        for len in 0..kept.len() {
            assert!(open(name, &kept[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn what_has_no_checksum_is_told_from_what_has_another() {
        assert_eq!(open("k", b"{\"id\":1}"), Err(Damage::NoChecksum));
        assert_eq!(open("k", b""), Err(Damage::NoChecksum));
        assert_eq!(open("k", b"windrose-2 00000000\nx"), Err(Damage::NoChecksum));
        assert_eq!(open("k", b"windrose-1 00000000\nx"), Err(Damage::Checksum));
    }
}

//! Sizes in text form, and the valid sizes of a volume.

use std::fmt;
use std::str::FromStr;

use crate::{BlockSize, InvalidValue};

/// A number of bytes that people read and write: `10G` and `10GiB` are 10 × 2³⁰, whatever the
/// unit's spelling. Decimal units are refused rather than guessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

const UNITS: [(char, u32, &str); 6] = [
    ('K', 10, "KiB"),
    ('M', 20, "MiB"),
    ('G', 30, "GiB"),
    ('T', 40, "TiB"),
    ('P', 50, "PiB"),
    ('E', 60, "EiB"),
];

const ALLOWED_FORMS: &str = "use whole bytes or a unit of 1024: 4096, 512M, 10G, 1.5TiB";

impl Size {
    /// Smallest volume, in bytes.
    pub const MIN_VOLUME: u64 = 1 << 20;
    /// Largest volume, in bytes.
    pub const MAX_VOLUME: u64 = 256 << 40;

    /// The exact form that parses back to the same number: the largest unit that divides it.
    #[must_use]
    pub fn to_exact_string(self) -> String {
        let whole = UNITS.iter().rev().find(|(_, shift, _)| {
            self.0 != 0 && self.0.trailing_zeros() >= *shift && self.0 >> shift > 0
        });
        match whole {
            Some((_, shift, unit)) => format!("{}{unit}", self.0 >> shift),
            None => self.0.to_string(),
        }
    }
}

/// Splits `1.5TiB` into its digits and the power of two of its unit.
fn split_unit(s: &str) -> Option<(&str, u32)> {
    let digits_end = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
    let (digits, unit) = s.split_at(digits_end);
    let unit = unit.trim_start().to_ascii_uppercase();
    if unit.is_empty() || unit == "B" {
        return Some((digits, 0));
    }
    let mut letters = unit.chars();
    let first = letters.next()?;
    let (_, shift, _) = UNITS.iter().find(|(letter, _, _)| *letter == first)?;
    matches!(letters.as_str(), "" | "IB" | "I").then_some((digits, *shift))
}

/// `digits × 2^shift`, or `None` if that is not a whole number.
fn scale(digits: &str, shift: u32) -> Option<u64> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() || fraction.len() > 18 || (digits.contains('.') && fraction.is_empty()) {
        return None;
    }
    let unit = 1u128 << shift;
    let whole = whole.parse::<u64>().ok()?;
    let mut bytes = u128::from(whole) * unit;
    if !fraction.is_empty() {
        let over = 10u128.pow(u32::try_from(fraction.len()).ok()?);
        let part = u128::from(fraction.parse::<u64>().ok()?) * unit;
        if !part.is_multiple_of(over) {
            return None;
        }
        bytes += part / over;
    }
    u64::try_from(bytes).ok()
}

impl FromStr for Size {
    type Err = InvalidValue;

    fn from_str(s: &str) -> Result<Self, InvalidValue> {
        let text = s.trim();
        let decimal = ["KB", "MB", "GB", "TB", "PB", "EB"]
            .iter()
            .any(|unit| text.to_ascii_uppercase().ends_with(unit));
        if decimal {
            return Err(InvalidValue::new(
                "size",
                s,
                format!("decimal units are not used; {ALLOWED_FORMS}"),
            ));
        }
        split_unit(text)
            .and_then(|(digits, shift)| scale(digits, shift))
            .map(Self)
            .ok_or_else(|| InvalidValue::new("size", s, ALLOWED_FORMS))
    }
}

/// For people: at most one decimal, in the largest unit that leaves a whole part.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match UNITS.iter().rev().find(|(_, shift, _)| self.0 >> shift > 0) {
            None => format!("{} B", self.0),
            Some((_, shift, unit)) => {
                let tenths = (u128::from(self.0) * 10) >> shift;
                if tenths.is_multiple_of(10) {
                    format!("{} {unit}", tenths / 10)
                } else {
                    format!("{}.{} {unit}", tenths / 10, tenths % 10)
                }
            }
        };
        f.pad(&text)
    }
}

/// Checks that `bytes` is a valid volume size.
///
/// # Errors
/// [`InvalidValue`] for a size outside 1 MiB to 256 TiB or one that is not whole blocks.
pub fn check_volume_size(bytes: u64, block_size: BlockSize) -> Result<(), InvalidValue> {
    let block = u64::from(block_size.bytes());
    let bad = |allowed: String| Err(InvalidValue::new("volume size", &bytes.to_string(), allowed));
    if !(Size::MIN_VOLUME..=Size::MAX_VOLUME).contains(&bytes) {
        bad(format!("use {} to {}", Size(Size::MIN_VOLUME), Size(Size::MAX_VOLUME)))
    } else if !bytes.is_multiple_of(block) {
        let down = bytes / block * block;
        bad(format!("use a multiple of the block size of {block} bytes, such as {down}"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_are_binary_and_exact() {
        for (text, bytes) in [
            ("0", 0),
            ("1", 1),
            ("512", 512),
            ("4096B", 4096),
            ("1k", 1024),
            ("10G", 10 << 30),
            ("10GiB", 10 << 30),
            ("10 gib", 10 << 30),
            ("1.5T", 3 << 39),
            ("0.5K", 512),
            ("256TiB", 256 << 40),
            ("15E", 15 << 60),
            (" 7M ", 7 << 20),
        ] {
            assert_eq!(text.parse::<Size>(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_ambiguous_inexact_or_too_large_is_refused() {
        for text in [
            "",
            "G",
            ".5G",
            "5.",
            "1.2.3",
            "-1",
            "+1",
            "10GB",
            "1kb",
            "10X",
            "10GiBs",
            "16E",
            "18446744073709551616",
            "0.1K",
            "1e9",
            "0x10",
            "１",
            "1.0000000000000000000G",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text:?}");
        }
        let e = "10GB".parse::<Size>().unwrap_err().to_string();
        assert!(e.contains("decimal units are not used"), "{e}");
    }

    #[test]
    fn people_read_one_decimal_at_most() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (10 << 30, "10 GiB"),
            ((10 << 30) - 1, "9.9 GiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn volume_sizes_have_bounds_and_whole_blocks() {
        let ok = |bytes, block| check_volume_size(bytes, block).is_ok();
        assert!(ok(1 << 20, BlockSize::B512) && ok(256 << 40, BlockSize::B4096));
        assert!(!ok((1 << 20) - 512, BlockSize::B512));
        assert!(!ok((256 << 40) + 4096, BlockSize::B4096));
        assert!(ok((1 << 20) + 512, BlockSize::B512));
        assert!(!ok((1 << 20) + 512, BlockSize::B4096));
    }

    proptest! {
        #[test]
        fn exact_text_parses_back(bytes: u64) {
            prop_assert_eq!(Size(bytes).to_exact_string().parse::<Size>(), Ok(Size(bytes)));
        }

        #[test]
        fn exact_text_of_whole_units_parses_back(n in 1u64..1 << 20, shift in 0u32..44) {
            let size = Size(n << shift);
            prop_assert_eq!(size.to_exact_string().parse::<Size>(), Ok(size));
        }

        #[test]
        fn no_text_makes_it_panic(s in ".{0,40}") {
            let _ = s.parse::<Size>();
        }

        #[test]
        fn no_number_with_a_unit_makes_it_panic(s in "[0-9.]{0,30} ?[kmgtpeKMGTPE]?i?[bB]?") {
            let _ = s.parse::<Size>();
        }
    }
}

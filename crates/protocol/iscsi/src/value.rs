//! Values of text keys (RFC 7143 6.1): numbers, yes or no, lists, binary.

use std::fmt;

/// `Yes`.
pub const YES: &str = "Yes";
/// `No`.
pub const NO: &str = "No";
/// Answer to an offer that cannot be accepted.
pub const REJECT: &str = "Reject";
/// Answer to a key that does not matter here.
pub const IRRELEVANT: &str = "Irrelevant";
/// Answer to a key that is not known.
pub const NOT_UNDERSTOOD: &str = "NotUnderstood";

/// Most bytes of a binary value: the longest CHAP challenge (RFC 7143 12.1.3).
pub const MAX_BINARY: usize = 1024;

/// A numerical value: decimal or, with `0x`, hexadecimal.
#[must_use]
pub fn number(value: &str) -> Option<u32> {
    let (digits, radix) = match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(hex) => (hex, 16),
        None => (value, 10),
    };
    // `from_str_radix` takes a sign.
    let proper = digits.bytes().all(|b| b.is_ascii_alphanumeric());
    if proper { u32::from_str_radix(digits, radix).ok() } else { None }
}

/// A boolean value.
#[must_use]
pub fn yes_no(value: &str) -> Option<bool> {
    match value {
        YES => Some(true),
        NO => Some(false),
        _ => None,
    }
}

/// How a boolean is written.
#[must_use]
pub fn from_bool(value: bool) -> &'static str {
    if value { YES } else { NO }
}

/// The first value of a list that `known` knows.
pub fn choose<T>(list: &str, known: impl Fn(&str) -> Option<T>) -> Option<T> {
    list.split(',').find_map(known)
}

/// A binary value of at most [`MAX_BINARY`] bytes: hexadecimal with `0x`, base64 with `0b`.
#[must_use]
pub fn binary(value: &str) -> Option<Vec<u8>> {
    let (prefix, digits) = value.split_at_checked(2)?;
    if digits.is_empty() || digits.len() > 2 * MAX_BINARY {
        return None;
    }
    let bytes = match prefix {
        "0x" | "0X" => hex(digits.as_bytes()),
        "0b" | "0B" => base64(digits.as_bytes()),
        _ => None,
    }?;
    (bytes.len() <= MAX_BINARY).then_some(bytes)
}

fn hex(digits: &[u8]) -> Option<Vec<u8>> {
    let digit = |b: u8| char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let (pairs, odd) = digits.as_rchunks::<2>();
    let mut out = Vec::with_capacity(digits.len().div_ceil(2));
    for &b in pairs {
        out.push(digit(b)?);
    }
    for &[high, low] in odd {
        out.push(digit(high)? << 4 | digit(low)?);
    }
    Some(out)
}

/// RFC 4648 4, with padding.
fn base64(digits: &[u8]) -> Option<Vec<u8>> {
    let sextet = |b: u8| match b {
        b'A'..=b'Z' => Some(b - b'A'),
        b'a'..=b'z' => Some(b - b'a' + 26),
        b'0'..=b'9' => Some(b - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    if !digits.len().is_multiple_of(4) {
        return None;
    }
    let pads = digits.iter().rev().take_while(|&&b| b == b'=').count();
    if pads > 2 {
        return None;
    }
    let mut out = Vec::with_capacity(digits.len() / 4 * 3);
    let (mut held, mut bits) = (0u32, 0);
    for &b in &digits[..digits.len() - pads] {
        held = held << 6 | u32::from(sextet(b)?);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push(u8::try_from(held >> bits & 0xff).ok()?);
        }
    }
    let rest = held & ((1 << bits) - 1);
    (rest == 0).then_some(out)
}

/// Bytes as a hexadecimal value.
#[derive(Clone, Copy, Debug)]
pub struct Hex<'a>(pub &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("0x")?;
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7143 6.1, "numerical-value".
    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        assert_eq!(number("262144"), Some(262_144));
        assert_eq!(number("0x40000"), Some(262_144));
        assert_eq!(number("0XfF"), Some(255));
        for bad in ["", "0x", "-1", "+1", "1 ", "1.5", "4294967296", "0x+1", "ten", "١"] {
            assert_eq!(number(bad), None, "{bad}");
        }
    }

    /// RFC 7143 6.1, "boolean-value" and "list-of-values".
    #[test]
    fn booleans_and_lists() {
        assert_eq!([yes_no("Yes"), yes_no("No"), yes_no("yes")], [Some(true), Some(false), None]);
        let known = |v: &str| (v == "None" || v == "CHAP").then(|| v.to_string());
        assert_eq!(choose("SRP,CHAP,None", known).as_deref(), Some("CHAP"));
        assert_eq!(choose("SRP,KRB5", known), None);
    }

    /// RFC 7143 6.1, "hex-constant" and "base64-constant"; RFC 4648 10 gives the examples.
    #[test]
    fn binary_values_are_hexadecimal_or_base64() {
        assert_eq!(binary("0x00ff10"), Some(vec![0, 255, 16]));
        assert_eq!(binary("0Xf10"), Some(vec![0x0f, 0x10]));
        for (text, bytes) in
            [("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYmFy", "foobar")]
        {
            assert_eq!(binary(&format!("0b{text}")).as_deref(), Some(bytes.as_bytes()));
        }
        assert_eq!(Hex(&[1, 0xab]).to_string(), "0x01ab");
    }

    #[test]
    fn malformed_binary_values_are_refused() {
        let long = format!("0x{}", "00".repeat(MAX_BINARY + 1));
        let longer = format!("0b{}", "AAAA".repeat(MAX_BINARY));
        for bad in ["", "0x", "0b", "0xg0", "0bZg=", "0bZg", "0bZ===", "0bZh==", "0b====", "17"] {
            assert_eq!(binary(bad), None, "{bad}");
        }
        assert_eq!((binary(&long), binary(&longer)), (None, None));
        assert!(binary(&long[..long.len() - 2]).is_some());
    }
}

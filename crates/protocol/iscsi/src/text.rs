//! `key=value` text (RFC 7143 6.1): what login and text PDUs carry.

use std::fmt::Display;

/// Longest key name in bytes.
pub const MAX_KEY: usize = 63;

/// Longest value taken, in bytes: a binary value of 1024 bytes in decimal fits.
pub const MAX_VALUE: usize = 4096;

/// Text that is not a sequence of `key=value` pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed text")]
pub struct BadText;

/// The pairs of a text, in order. Ends with the first error.
#[derive(Clone, Debug)]
pub struct Pairs<'a>(&'a [u8]);

impl<'a> Pairs<'a> {
    /// The pairs in `text`. Empty strings between delimiters are skipped: some initiators count
    /// padding as text.
    #[must_use]
    pub fn of(text: &'a [u8]) -> Self {
        Self(text)
    }
}

impl<'a> Iterator for Pairs<'a> {
    type Item = Result<(&'a str, &'a str), BadText>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.0.iter().position(|&b| b != 0)?;
        let text = &self.0[start..];
        let Some(end) = text.iter().position(|&b| b == 0) else {
            self.0 = &[];
            return Some(Err(BadText));
        };
        self.0 = &text[end..];
        let pair = split(&text[..end]);
        if pair.is_err() {
            self.0 = &[];
        }
        Some(pair)
    }
}

fn split(pair: &[u8]) -> Result<(&str, &str), BadText> {
    let pair = std::str::from_utf8(pair).map_err(|_| BadText)?;
    let (key, value) = pair.split_once('=').ok_or(BadText)?;
    let proper = (1..=MAX_KEY).contains(&key.len()) && key.bytes().all(is_key_byte);
    if proper && value.len() <= MAX_VALUE { Ok((key, value)) } else { Err(BadText) }
}

/// RFC 7143 6.1, "key-name": letters, digits and `.`, `-`, `+`, `@`, `_`; and `#`, which public
/// extension keys have (13.26).
fn is_key_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b".-+@_#".contains(&b)
}

/// Appends `key=value` to a text.
pub fn push(text: &mut Vec<u8>, key: &str, value: impl Display) {
    use std::io::Write;
    write!(text, "{key}={value}\0").expect("memory takes everything");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &[u8]) -> Result<Vec<(&str, &str)>, BadText> {
        Pairs::of(text).collect()
    }

    /// RFC 7143 6.1.
    #[test]
    fn pairs_come_in_order() {
        let text = b"A=1\0InitiatorAlias=\0\0\0X#com.example_a@+b=x=y\0\0";
        let expect = [("A", "1"), ("InitiatorAlias", ""), ("X#com.example_a@+b", "x=y")];
        assert_eq!(pairs(text).unwrap(), expect);
        assert!(pairs(b"").unwrap().is_empty());
        let mut out = Vec::new();
        push(&mut out, "MaxConnections", 1);
        push(&mut out, "ImmediateData", "Yes");
        assert_eq!(out, b"MaxConnections=1\0ImmediateData=Yes\0");
    }

    /// RFC 7143 6.1: every pair ends with a null; names have 1 to 63 characters.
    #[test]
    fn malformed_text_is_refused() {
        let long = format!("{}=1\0", "k".repeat(64));
        let value = format!("A={}\0", "v".repeat(MAX_VALUE + 1));
        let bad = [b"A=1".as_slice(), b"A\0", b"=1\0", b"A b=1\0", b"A=\xff\0", b"A=1\0B"];
        for text in bad.into_iter().chain([long.as_bytes(), value.as_bytes()]) {
            assert_eq!(pairs(text), Err(BadText), "{text:?}");
            let after_error = Pairs::of(text).skip_while(Result::is_ok).nth(1);
            assert_eq!(after_error, None, "an error is the end");
        }
    }
}

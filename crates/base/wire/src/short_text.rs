//! Short texts on disk: pool names, serial numbers.

use core::fmt;

/// Length in bytes of the field of a text.
pub const SHORT_TEXT_BYTES: usize = 64;

/// A text of at most [`SHORT_TEXT_BYTES`] without control characters: it is printed in messages,
/// and read from a disk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShortText {
    bytes: [u8; SHORT_TEXT_BYTES],
}

impl ShortText {
    /// `text` without control characters, trimmed and truncated if it is too long.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let (mut bytes, mut len) = ([0; SHORT_TEXT_BYTES], 0);
        for c in text.trim().chars().filter(|c| !c.is_control()) {
            let Some(field) = bytes.get_mut(len..len + c.len_utf8()) else { break };
            c.encode_utf8(field);
            len += c.len_utf8();
        }
        Self { bytes }
    }

    /// Decodes the field of a text; `None` if it is invalid.
    #[must_use]
    pub fn parse(bytes: &[u8; SHORT_TEXT_BYTES]) -> Option<Self> {
        let len = bytes.iter().position(|b| *b == 0).unwrap_or(SHORT_TEXT_BYTES);
        let text = core::str::from_utf8(&bytes[..len]).ok()?;
        let zero = bytes[len..].iter().all(|b| *b == 0);
        (zero && !text.chars().any(char::is_control)).then_some(Self { bytes: *bytes })
    }

    /// The encoded field.
    #[must_use]
    pub fn to_bytes(self) -> [u8; SHORT_TEXT_BYTES] {
        self.bytes
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let len = self.bytes.iter().position(|b| *b == 0).unwrap_or(SHORT_TEXT_BYTES);
        core::str::from_utf8(&self.bytes[..len]).unwrap_or_default()
    }

    /// Whether the text is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes[0] == 0
    }
}

impl fmt::Display for ShortText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for ShortText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn control_characters_are_refused() {
        assert_eq!(ShortText::new("  S3\x1b[2JX \n").as_str(), "S3[2JX");
        let mut bytes = ShortText::new("abc").to_bytes();
        assert_eq!(ShortText::parse(&bytes), Some(ShortText::new("abc")));
        bytes[1] = 0x1b;
        assert_eq!(ShortText::parse(&bytes), None);
        bytes[1] = 0;
        assert_eq!(ShortText::parse(&bytes), None, "something behind its end");
        assert_eq!(ShortText::parse(&[0xff; SHORT_TEXT_BYTES]), None);
    }

    proptest! {
        #[test]
        fn each_text_round_trips(text in ".*") {
            let text = ShortText::new(&text);
            prop_assert_eq!(ShortText::parse(&text.to_bytes()), Some(text));
        }

        #[test]
        fn arbitrary_text_bytes_do_not_panic(bytes in prop::array::uniform32(any::<u8>())) {
            let mut field = [0; SHORT_TEXT_BYTES];
            field[..32].copy_from_slice(&bytes);
            if let Some(text) = ShortText::parse(&field) {
                prop_assert_eq!(text.to_bytes(), field);
            }
        }
    }
}

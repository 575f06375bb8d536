//! Short texts on disk: names of pools, serial numbers.

use core::fmt;

/// Length in bytes of a text's place.
pub const TEXT_BYTES: usize = 64;

/// A text of at most [`TEXT_BYTES`] that has no control characters: it goes into messages, and comes from a disk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Text {
    bytes: [u8; TEXT_BYTES],
}

impl Text {
    /// `text` without control characters and blanks at its ends, cut off where it is too long.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let (mut bytes, mut len) = ([0; TEXT_BYTES], 0);
        for c in text.trim().chars().filter(|c| !c.is_control()) {
            let Some(place) = bytes.get_mut(len..len + c.len_utf8()) else { break };
            c.encode_utf8(place);
            len += c.len_utf8();
        }
        Self { bytes }
    }

    /// What stands in a text's place; none if that is no text.
    #[must_use]
    pub fn parse(bytes: &[u8; TEXT_BYTES]) -> Option<Self> {
        let len = bytes.iter().position(|b| *b == 0).unwrap_or(TEXT_BYTES);
        let text = core::str::from_utf8(&bytes[..len]).ok()?;
        let zero = bytes[len..].iter().all(|b| *b == 0);
        (zero && !text.chars().any(char::is_control)).then_some(Self { bytes: *bytes })
    }

    /// Its place.
    #[must_use]
    pub fn to_bytes(self) -> [u8; TEXT_BYTES] {
        self.bytes
    }

    /// Itself.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let len = self.bytes.iter().position(|b| *b == 0).unwrap_or(TEXT_BYTES);
        core::str::from_utf8(&self.bytes[..len]).unwrap_or_default()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes[0] == 0
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_would_move_a_cursor_is_no_text() {
        assert_eq!(Text::new("  S3\x1b[2JX \n").as_str(), "S3[2JX");
        let mut bytes = Text::new("abc").to_bytes();
        assert_eq!(Text::parse(&bytes), Some(Text::new("abc")));
        bytes[1] = 0x1b;
        assert_eq!(Text::parse(&bytes), None);
        bytes[1] = 0;
        assert_eq!(Text::parse(&bytes), None, "something behind its end");
        assert_eq!(Text::parse(&[0xff; TEXT_BYTES]), None);
    }

    proptest! {
        #[test]
        fn every_text_is_read_as_it_was_written(text in ".*") {
            let text = Text::new(&text);
            prop_assert_eq!(Text::parse(&text.to_bytes()), Some(text));
        }

        #[test]
        fn any_bytes_are_a_text_or_none(bytes in prop::array::uniform32(any::<u8>())) {
            let mut place = [0; TEXT_BYTES];
            place[..32].copy_from_slice(&bytes);
            if let Some(text) = Text::parse(&place) {
                prop_assert_eq!(text.to_bytes(), place);
            }
        }
    }
}

//! Arbitrary bytes as a script of what a test does.

/// A script, read from its start; zeroes behind its end.
#[derive(Debug)]
pub struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    /// A script of these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether it has been read to its end.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte, which is not read yet.
    #[must_use]
    pub fn peek(&self) -> u8 {
        self.0.first().copied().unwrap_or(0)
    }

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        let (&first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        first
    }

    /// This many bytes.
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        [(); N].map(|()| self.byte())
    }

    /// This many bytes.
    pub fn many(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.byte()).collect()
    }

    /// Two bytes as a number.
    pub fn half(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    /// Four bytes as a number.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    /// Eight bytes as a number.
    pub fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// One bit.
    pub fn flag(&mut self) -> bool {
        self.byte() & 1 != 0
    }

    /// Seldom true: for what ends a connection, so that most scripts come far.
    pub fn is_rare(&mut self) -> bool {
        self.byte() > 0xf8
    }

    /// Up to 255 bytes of it.
    pub fn some(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()).min(self.0.len());
        let (some, rest) = self.0.split_at(length);
        self.0 = rest;
        some
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

//! Sequence numbers that wrap around (RFC 7143 4.2.2.1, RFC 1982).

/// A 32-bit sequence number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SequenceNumber(pub u32);

impl SequenceNumber {
    /// Whether this precedes `other` in serial number arithmetic.
    #[must_use]
    pub fn is_before(self, other: Self) -> bool {
        other.0.wrapping_sub(self.0).cast_signed() > 0
    }

    /// The number `n` later.
    #[must_use]
    pub fn plus(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n))
    }

    /// How far `self` is after `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 1982 3.2.
    #[test]
    fn order_survives_wrapping() {
        let end = SequenceNumber(u32::MAX);
        assert!(end.is_before(end.plus(1)) && !end.plus(1).is_before(end));
        assert!(!end.is_before(end));
        assert!(
            SequenceNumber(5).is_before(SequenceNumber(0x8000_0004))
                && !SequenceNumber(5).is_before(SequenceNumber(5))
        );
        assert_eq!(end.plus(3).since(end), 3);
    }
}

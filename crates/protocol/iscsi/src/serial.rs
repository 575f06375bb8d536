//! Sequence numbers that wrap around (RFC 7143 4.2.2.1, RFC 1982).

/// A 32-bit sequence number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Serial(pub u32);

impl Serial {
    /// Whether this comes before `other`, going round at most half of the circle.
    #[must_use]
    pub fn is_before(self, other: Self) -> bool {
        other.0.wrapping_sub(self.0).cast_signed() > 0
    }

    /// The number `n` places on.
    #[must_use]
    pub fn plus(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n))
    }

    /// How many places `self` is behind `earlier`.
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
        let end = Serial(u32::MAX);
        assert!(end.is_before(end.plus(1)) && !end.plus(1).is_before(end));
        assert!(!end.is_before(end));
        assert!(Serial(5).is_before(Serial(0x8000_0004)) && !Serial(5).is_before(Serial(5)));
        assert_eq!(end.plus(3).since(end), 3);
    }
}

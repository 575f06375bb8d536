//! Byte ranges, and how they are split at the units of a disk. Pure.

/// A range of bytes, not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// Offset of its first byte.
    pub start: u64,
    /// Offset of the first byte after it.
    pub end: u64,
}

/// A part of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangePart {
    /// Whole units.
    Whole(ByteRange),
    /// A part of one unit.
    Partial(ByteRange),
}

impl ByteRange {
    /// Its length in bytes.
    #[must_use]
    pub fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The smallest range of whole units that contains this one.
    pub fn aligned_outward(self, unit: u64) -> Self {
        Self { start: self.start / unit * unit, end: self.end.next_multiple_of(unit) }
    }

    /// Its parts in order: a partial unit, whole ones, and another partial one, each where it
    /// exists.
    pub fn split_at_units(self, unit: u64) -> impl Iterator<Item = RangePart> {
        let mut at = self.start;
        std::iter::from_fn(move || {
            if at >= self.end {
                return None;
            }
            let whole_end = self.end / unit * unit;
            let (end, whole) = if at.is_multiple_of(unit) && at < whole_end {
                (whole_end, true)
            } else {
                (self.end.min((at / unit + 1) * unit), false)
            };
            let part = Self { start: at, end };
            at = end;
            Some(if whole { RangePart::Whole(part) } else { RangePart::Partial(part) })
        })
    }

    /// Parts of at most `step` bytes.
    pub fn chunks(self, step: u64) -> impl Iterator<Item = Self> {
        let mut at = self.start;
        std::iter::from_fn(move || {
            let piece = Self { start: at, end: self.end.min(at + step) };
            at = piece.end;
            (piece.start < piece.end).then_some(piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_range_once_with_correct_kinds() {
        for at in 0..20u64 {
            for end in at + 1..40 {
                let span = ByteRange { start: at, end };
                let parts: Vec<RangePart> = span.split_at_units(8).collect();
                assert!(parts.len() <= 3, "{span:?}: {parts:?}");
                let mut next = at;
                for part in parts {
                    let (p, whole) = match part {
                        RangePart::Whole(p) => (p, true),
                        RangePart::Partial(p) => (p, false),
                    };
                    assert_eq!(p.start, next);
                    let aligned = p.start.is_multiple_of(8) && p.end.is_multiple_of(8);
                    assert!(whole == aligned && p.start < p.end);
                    assert!(whole || p.start / 8 == (p.end - 1) / 8, "{p:?} is in one unit");
                    next = p.end;
                }
                assert_eq!(next, end);
                let wide = span.aligned_outward(8);
                assert!(wide.start <= at && wide.end >= end && wide.len() < span.len() + 15);
            }
        }
    }

    #[test]
    fn steps_cover_a_range_once() {
        let steps: Vec<_> =
            ByteRange { start: 3, end: 20 }.chunks(8).map(|s| (s.start, s.end)).collect();
        assert_eq!(steps, [(3, 11), (11, 19), (19, 20)]);
    }
}

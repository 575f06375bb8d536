//! Ranges of bytes, cut at the boundaries of what a disk takes at once. Pure.

/// A range of bytes, not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it begins.
    pub at: u64,
    /// The first byte behind it.
    pub end: u64,
}

/// A piece of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Whole units.
    Whole(Span),
    /// A part of one unit.
    Partial(Span),
}

impl Span {
    /// Its length in bytes.
    pub fn len(self) -> u64 {
        self.end - self.at
    }

    /// The smallest span of whole units that contains this one.
    pub fn widened(self, unit: u64) -> Self {
        Self { at: self.at / unit * unit, end: self.end.next_multiple_of(unit) }
    }

    /// The parts in order: at most a partial unit, whole ones, and another partial one.
    pub fn parts(self, unit: u64) -> impl Iterator<Item = Part> {
        let mut at = self.at;
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
            let part = Self { at, end };
            at = end;
            Some(if whole { Part::Whole(part) } else { Part::Partial(part) })
        })
    }

    /// Pieces of at most `step` bytes.
    pub fn steps(self, step: u64) -> impl Iterator<Item = Self> {
        let mut at = self.at;
        std::iter::from_fn(move || {
            let piece = Self { at, end: self.end.min(at + step) };
            at = piece.end;
            (piece.at < piece.end).then_some(piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_span_once_and_are_what_they_say() {
        for at in 0..20u64 {
            for end in at + 1..40 {
                let span = Span { at, end };
                let parts: Vec<Part> = span.parts(8).collect();
                assert!(parts.len() <= 3, "{span:?}: {parts:?}");
                let mut next = at;
                for part in parts {
                    let (p, whole) = match part {
                        Part::Whole(p) => (p, true),
                        Part::Partial(p) => (p, false),
                    };
                    assert_eq!(p.at, next);
                    let aligned = p.at.is_multiple_of(8) && p.end.is_multiple_of(8);
                    assert!(whole == aligned && p.at < p.end);
                    assert!(whole || p.at / 8 == (p.end - 1) / 8, "{p:?} is in one unit");
                    next = p.end;
                }
                assert_eq!(next, end);
                let wide = span.widened(8);
                assert!(wide.at <= at && wide.end >= end && wide.len() < span.len() + 15);
            }
        }
    }

    #[test]
    fn steps_cover_a_span_once() {
        let steps: Vec<_> = Span { at: 3, end: 20 }.steps(8).map(|s| (s.at, s.end)).collect();
        assert_eq!(steps, [(3, 11), (11, 19), (19, 20)]);
    }
}

//! Plurals in messages.

use core::fmt;

/// A number with its noun, as in messages: `1 node`, `2 nodes`, `2 copies`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plural<'a, N> {
    count: N,
    singular: &'a str,
}

/// `number` of the noun whose singular is `one`.
#[must_use]
pub const fn plural<N>(number: N, one: &str) -> Plural<'_, N> {
    Plural { count: number, singular: one }
}

impl<N: fmt::Display + Copy + TryInto<u64>> fmt::Display for Plural<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count: number, singular: one } = self;
        if (*number).try_into().is_ok_and(|number: u64| number == 1) {
            return write!(f, "{number} {one}");
        }
        let is_vowel = |c: char| "aeiou".contains(c);
        match one.strip_suffix('y') {
            Some(stem) if !stem.ends_with(is_vowel) => write!(f, "{number} {stem}ies"),
            _ if ["s", "x", "ch", "sh"].iter().any(|end| one.ends_with(end)) => {
                write!(f, "{number} {one}es")
            }
            _ => write!(f, "{number} {one}s"),
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::string::ToString;

    #[test]
    fn one_is_singular_and_all_else_is_plural() {
        assert_eq!(plural(1, "node").to_string(), "1 node");
        assert_eq!(plural(0_u8, "node").to_string(), "0 nodes");
        assert_eq!(plural(2_usize, "more disk").to_string(), "2 more disks");
        assert_eq!(plural(1_u64, "copy").to_string(), "1 copy");
        assert_eq!(plural(3_u16, "copy").to_string(), "3 copies");
        assert_eq!(plural(4_u32, "day").to_string(), "4 days");
        assert_eq!(plural(2, "address").to_string(), "2 addresses");
        assert_eq!(plural(u64::MAX, "byte").to_string(), "18446744073709551615 bytes");
    }
}

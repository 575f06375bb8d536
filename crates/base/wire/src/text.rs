//! Words of messages.

use core::fmt;

/// So many of something, as messages say it: `1 node`, `2 nodes`, `2 copies`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count<'a, N> {
    number: N,
    one: &'a str,
}

/// `number` of what is called `one` when there is one of it.
#[must_use]
pub const fn count<N>(number: N, one: &str) -> Count<'_, N> {
    Count { number, one }
}

impl<N: fmt::Display + Copy + TryInto<u64>> fmt::Display for Count<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, one } = self;
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
        assert_eq!(count(1, "node").to_string(), "1 node");
        assert_eq!(count(0_u8, "node").to_string(), "0 nodes");
        assert_eq!(count(2_usize, "more disk").to_string(), "2 more disks");
        assert_eq!(count(1_u64, "copy").to_string(), "1 copy");
        assert_eq!(count(3_u16, "copy").to_string(), "3 copies");
        assert_eq!(count(4_u32, "day").to_string(), "4 days");
        assert_eq!(count(2, "address").to_string(), "2 addresses");
        assert_eq!(count(u64::MAX, "byte").to_string(), "18446744073709551615 bytes");
    }
}

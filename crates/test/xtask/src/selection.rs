//! Which part of the tests a run does.
//!
//! Some tiers have more checks than a run has time for: they run a sample, which depends on the
//! commit. The sample's number is printed; `./run test --sample NUMBER` runs the same one again,
//! and `./run test --all` runs everything.

use anyhow::{Context, Result};
use std::{path::Path, process::Command};

/// Everything, or a numbered sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selection {
    All,
    Sample(u32),
}

impl Selection {
    /// The sample of the commit that is checked out in `root`; sample 0 where there is none.
    pub(crate) fn of_commit(root: &Path) -> Self {
        let head = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(root).output();
        let head = head.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let number = head.ok().and_then(|head| u32::from_str_radix(head.get(..8)?, 16).ok());
        Self::Sample(number.unwrap_or(0))
    }

    /// A sample by its number, as printed.
    pub(crate) fn parse(number: &str) -> Result<Self> {
        let number = u32::from_str_radix(number, 16);
        number
            .map(Self::Sample)
            .context("the number of a sample has up to eight hexadecimal digits")
    }

    /// The number of the sample; everything begins like sample 0.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::All => 0,
            Self::Sample(number) => number,
        }
    }

    /// The arguments that select the same in another run.
    pub(crate) fn arguments(self) -> Vec<String> {
        match self {
            Self::All => vec!["--all".to_owned()],
            Self::Sample(number) => vec!["--sample".to_owned(), format!("{number:08x}")],
        }
    }

    /// Chooses one of `parts` equal parts of the items called `what`. Each item is in exactly one
    /// part. Different kinds of items rotate independently.
    pub(crate) fn part_of<T>(
        self,
        what: &str,
        items: impl IntoIterator<Item = T>,
        parts: usize,
    ) -> Vec<T> {
        let Self::Sample(number) = self else { return items.into_iter().collect() };
        let part = usize::try_from(mix(number, what)).unwrap_or(0) % parts.max(1);
        let numbered = items.into_iter().enumerate();
        numbered.filter(|(index, _)| index % parts.max(1) == part).map(|(_, item)| item).collect()
    }
}

/// A hash of a sample's number and a name: FNV-1a, with the bits mixed as MurmurHash does at its
/// end, so that names that differ in one letter rotate independently.
fn mix(number: u32, name: &str) -> u32 {
    let bytes = number.to_le_bytes().into_iter().chain(name.bytes());
    let hash: u32 =
        bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
    let hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_repeated_by_its_number_and_all_samples_cover_all_items() {
        let items: Vec<u32> = (0..13).collect();
        let mut seen = std::collections::BTreeSet::new();
        for number in 0..40 {
            let sample = Selection::Sample(number);
            let chosen = sample.part_of("scenarios", items.iter().copied(), 3);
            assert!((4..=5).contains(&chosen.len()), "{chosen:?}");
            let words = sample.arguments();
            assert_eq!(Selection::parse(&words[1]).unwrap(), sample);
            assert_eq!(sample.part_of("scenarios", items.iter().copied(), 3), chosen);
            seen.extend(chosen);
        }
        assert!(seen.iter().eq(&items));
        assert_eq!(Selection::All.part_of("scenarios", items.clone(), 3), items);
        assert!(Selection::parse("no number").is_err());
    }
}

//! Sets of a log's pages. Pure.

use super::super::{CELLS_PER_PAGE, MAX_CELLS};

/// Some of a log's pages, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pages(u128);
const _: () = assert!(MAX_CELLS as usize / CELLS_PER_PAGE <= 128);

impl Pages {
    /// None.
    pub(super) const NONE: Self = Self(0);

    /// The first `count` pages.
    pub(super) fn first(count: u32) -> Self {
        (0..count).fold(Self::NONE, Self::with)
    }

    /// These and page number `page`.
    pub(super) fn with(self, page: u32) -> Self {
        Self(self.0 | 1 << page)
    }

    /// These and those.
    pub(super) fn and(self, those: Self) -> Self {
        Self(self.0 | those.0)
    }

    /// These without those.
    pub(super) fn without(self, those: Self) -> Self {
        Self(self.0 & !those.0)
    }

    /// Whether it has any of those.
    pub(super) fn touches(self, those: Self) -> bool {
        self.0 & those.0 != 0
    }

    /// The lowest `most` of these.
    pub(super) fn lowest(self, most: usize) -> Self {
        self.iter().take(most).fold(Self::NONE, Self::with)
    }

    fn contains(self, page: u32) -> bool {
        self.0 & 1 << page != 0
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// In ascending order.
    pub(super) fn iter(self) -> impl Iterator<Item = u32> {
        (0..u128::BITS).filter(move |&page| self.contains(page))
    }
}

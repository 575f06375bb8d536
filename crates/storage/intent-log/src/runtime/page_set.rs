//! Sets of pages of a log. Pure.

use super::super::{CELLS_PER_PAGE, MAX_CELLS};

/// Some pages of a log, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageSet(u128);
const _: () = assert!(MAX_CELLS as usize / CELLS_PER_PAGE <= 128);

impl PageSet {
    /// The empty set.
    pub(super) const NONE: Self = Self(0);

    /// The first `count` pages.
    pub(super) fn first_pages(count: u32) -> Self {
        (0..count).fold(Self::NONE, Self::with)
    }

    /// Adds page number `page`.
    pub(super) fn with(self, page: u32) -> Self {
        Self(self.0 | 1 << page)
    }

    /// The pages in either set.
    pub(super) fn union(self, those: Self) -> Self {
        Self(self.0 | those.0)
    }

    /// The pages not in `those`.
    pub(super) fn without(self, those: Self) -> Self {
        Self(self.0 & !those.0)
    }

    /// Whether the sets have a page in common.
    pub(super) fn intersects(self, those: Self) -> bool {
        self.0 & those.0 != 0
    }

    /// The lowest `most` pages.
    pub(super) fn lowest(self, most: usize) -> Self {
        self.iter().take(most).fold(Self::NONE, Self::with)
    }

    fn contains(self, page: u32) -> bool {
        self.0 & 1 << page != 0
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The pages in ascending order.
    pub(super) fn iter(self) -> impl Iterator<Item = u32> {
        (0..u128::BITS).filter(move |&page| self.contains(page))
    }
}

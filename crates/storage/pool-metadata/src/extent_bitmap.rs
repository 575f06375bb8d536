//! The allocated physical extents of a member.

use std::collections::BTreeMap;

const PAGE_BITS: u32 = 4096;
const PAGE_WORDS: usize = PAGE_BITS as usize / 64;

/// A set of physical extents, in pages that exist only while a bit is set in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExtentBitmap {
    pages: BTreeMap<u32, BitmapPage>,
    count: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct BitmapPage {
    bits: Box<[u64; PAGE_WORDS]>,
    count: u32,
}

/// Number of the page, the word in it, and the bit in that.
fn bit_position(index: u32) -> (u32, usize, u64) {
    let within = index % PAGE_BITS;
    (index / PAGE_BITS, (within / 64) as usize, 1 << (within % 64))
}

impl ExtentBitmap {
    /// How many are allocated.
    #[must_use]
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Whether `index` is allocated.
    #[must_use]
    pub(crate) fn is_allocated(&self, index: u32) -> bool {
        let (page, word, bit) = bit_position(index);
        self.pages.get(&page).is_some_and(|page| page.bits[word] & bit != 0)
    }

    /// Allocates `index`; returns whether it was free.
    pub(crate) fn allocate(&mut self, index: u32) -> bool {
        if self.is_allocated(index) {
            return false;
        }
        let (page, word, bit) = bit_position(index);
        let new = || BitmapPage { bits: Box::new([0; PAGE_WORDS]), count: 0 };
        let page = self.pages.entry(page).or_insert_with(new);
        page.bits[word] |= bit;
        page.count += 1;
        self.count += 1;
        true
    }

    /// Frees `index`; returns whether it was allocated.
    pub(crate) fn free(&mut self, index: u32) -> bool {
        if !self.is_allocated(index) {
            return false;
        }
        let (number, word, bit) = bit_position(index);
        if let Some(page) = self.pages.get_mut(&number) {
            page.bits[word] &= !bit;
            page.count -= 1;
            if page.count == 0 {
                self.pages.remove(&number);
            }
        }
        self.count -= 1;
        true
    }

    /// The lowest free one of the first `count`.
    #[must_use]
    pub(crate) fn lowest_free(&self, count: u32) -> Option<u32> {
        let mut number = 0;
        while let Some(page) = self.pages.get(&number).filter(|page| page.count == PAGE_BITS) {
            debug_assert!(page.bits.iter().all(|word| *word == u64::MAX));
            number += 1;
        }
        let within = self.pages.get(&number).map_or(0, BitmapPage::lowest_free);
        number.checked_mul(PAGE_BITS)?.checked_add(within).filter(|index| *index < count)
    }
}

impl BitmapPage {
    /// The lowest free one; [`PAGE_BITS`] if there is none.
    fn lowest_free(&self) -> u32 {
        let words = (0u32..).zip(self.bits.iter());
        let mut free = words.filter(|(_, word)| **word != u64::MAX);
        free.next().map_or(PAGE_BITS, |(n, word)| n * 64 + word.trailing_ones())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_set(steps in prop::collection::vec((any::<bool>(), 0u32..3 * PAGE_BITS), 0..300), solid in 0u32..2 * PAGE_BITS) {
            let mut units = ExtentBitmap::default();
            let mut set: BTreeSet<u32> = (0..solid).collect();
            for unit in 0..solid {
                prop_assert!(units.allocate(unit));
            }
            for (take, unit) in steps {
                if take {
                    prop_assert_eq!(units.allocate(unit), set.insert(unit));
                } else {
                    prop_assert_eq!(units.free(unit), set.remove(&unit));
                }
                prop_assert_eq!(units.is_allocated(unit), set.contains(&unit));
            }
            prop_assert_eq!(units.count() as usize, set.len());
            prop_assert_eq!(units.lowest_free(4 * PAGE_BITS), (0..).find(|unit| !set.contains(unit)));
            prop_assert_eq!(units.lowest_free(0), None);
        }
    }
}

//! All dirty bits of a log in memory.

use super::cell::{CELLS_PER_PAGE, Cell, CellError, WORDS_PER_CELL};
use super::{Geometry, LogId, Region, SLOTS, Slot};

/// The dirty regions, for each slot.
///
/// # Panics
/// Methods that take a [`Region`] panic if the volume has no such region: regions come from the
/// same [`Geometry`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotBitmaps {
    geometry: Geometry,
    /// Whole cells; bits after the last region are clear.
    slots: [Box<[u64]>; SLOTS],
}

impl SlotBitmaps {
    /// With no region dirty.
    #[must_use]
    pub fn none(geometry: Geometry) -> Self {
        let words = geometry.cell_count() as usize * WORDS_PER_CELL;
        Self { geometry, slots: std::array::from_fn(|_| vec![0; words].into_boxed_slice()) }
    }

    /// With every region dirty in every slot, as for a log that is lost.
    #[must_use]
    pub fn all(geometry: Geometry) -> Self {
        let mut bitmaps = Self::none(geometry);
        Slot::ALL.into_iter().for_each(|slot| bitmaps.set_all(slot));
        bitmaps
    }

    /// The regions of the volume.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Marks `region` dirty in `slot`.
    pub fn set(&mut self, slot: Slot, region: Region) {
        let (word, bit) = self.word_and_bit(region);
        self.slots[slot.index()][word] |= bit;
    }

    /// Marks `region` dirty in every slot.
    pub fn set_in_all_slots(&mut self, region: Region) {
        let (word, bit) = self.word_and_bit(region);
        self.slots.iter_mut().for_each(|words| words[word] |= bit);
    }

    /// Marks every region dirty in `slot`.
    pub fn set_all(&mut self, slot: Slot) {
        self.slots[slot.index()].fill(u64::MAX);
        self.clear_padding_bits();
    }

    /// Clears the dirty bit of `region` in `slot`.
    pub fn clear(&mut self, slot: Slot, region: Region) {
        let (word, bit) = self.word_and_bit(region);
        self.slots[slot.index()][word] &= !bit;
    }

    /// Whether `region` is dirty in `slot`.
    #[must_use]
    pub fn is_set(&self, slot: Slot, region: Region) -> bool {
        let (word, bit) = self.word_and_bit(region);
        self.slots[slot.index()][word] & bit != 0
    }

    /// Whether `region` is dirty in every slot.
    #[must_use]
    pub fn is_set_in_all_slots(&self, region: Region) -> bool {
        let (word, bit) = self.word_and_bit(region);
        let [a, b, c] = &self.slots;
        a[word] & b[word] & c[word] & bit != 0
    }

    /// Word number `word` of 64 regions: those that are dirty in every slot.
    pub(super) fn word_in_all_slots(&self, word: usize) -> u64 {
        self.slots.iter().fold(u64::MAX, |every, words| every & words[word])
    }

    /// The bits of `slot`, 64 regions per word, whole cells.
    pub(super) fn words(&self, slot: Slot) -> &[u64] {
        &self.slots[slot.index()]
    }

    /// Number of dirty regions in `slot`.
    #[must_use]
    pub fn count(&self, slot: Slot) -> u32 {
        self.slots[slot.index()].iter().map(|word| word.count_ones()).sum()
    }

    /// The dirty regions of `slot`, in ascending order.
    pub fn dirty_regions(&self, slot: Slot) -> impl Iterator<Item = Region> + '_ {
        self.slots[slot.index()]
            .iter()
            .enumerate()
            .flat_map(|(word, bits)| set_regions(word, *bits))
    }

    /// The regions that are dirty in any of `slots`, in ascending order.
    pub(super) fn dirty_in_any(&self, slots: &[Slot]) -> impl Iterator<Item = Region> {
        let any = |word: usize| slots.iter().fold(0, |any, s| any | self.slots[s.index()][word]);
        let words = self.slots[0].len();
        (0..words).flat_map(move |word| set_regions(word, any(word)))
    }

    /// Marks in `slot` the regions that are dirty in `from` of `theirs`.
    ///
    /// Their regions may have another size, as those of an image that is not converted yet: then
    /// every region that overlaps one of them is marked.
    pub fn union(&mut self, slot: Slot, theirs: &Self, from: Slot) {
        if self.geometry == theirs.geometry {
            let own = &mut self.slots[slot.index()];
            own.iter_mut().zip(&theirs.slots[from.index()]).for_each(|(own, word)| *own |= word);
            return;
        }
        let end = self.geometry.volume_bytes();
        for range in
            theirs.dirty_regions(from).filter_map(|region| theirs.geometry.region_range(region))
        {
            let len = range.end.min(end).saturating_sub(range.start);
            // The part after the end of the smaller volume concerns only the larger one.
            let touched = self.geometry.regions_in(range.start, len);
            touched.into_iter().flatten().for_each(|region| self.set(slot, region));
        }
    }

    /// The bits of `slot` for another node: bit `n % 8` of byte `n / 8` is whether region `n` is
    /// dirty. As many bytes as the regions need; bits after the last region are clear.
    #[must_use]
    pub fn to_bits(&self, slot: Slot) -> Vec<u8> {
        let len = self.geometry.bitmap_bytes();
        let bytes = self.slots[slot.index()].iter().flat_map(|word| word.to_le_bytes());
        bytes.take(len).collect()
    }

    /// Parses [`Self::to_bits`] of another node, for a volume with these regions, into `slot`; the
    /// other slots are empty. Bits after the last region are ignored. `None` if the number of bytes
    /// does not match.
    #[must_use]
    pub fn from_bits(geometry: Geometry, slot: Slot, bits: &[u8]) -> Option<Self> {
        if bits.len() != geometry.bitmap_bytes() {
            return None;
        }
        let mut bitmaps = Self::none(geometry);
        for (word, bytes) in bitmaps.slots[slot.index()].iter_mut().zip(bits.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(whole);
        }
        bitmaps.clear_padding_bits();
        Some(bitmaps)
    }

    /// Marks in `slot` the regions that are dirty in `other`.
    pub fn union_of(&mut self, slot: Slot, other: Slot) {
        for word in 0..self.slots[slot.index()].len() {
            self.slots[slot.index()][word] |= self.slots[other.index()][word];
        }
    }

    /// Marks in `slot` the regions that are dirty in any slot: the initial bits for an image that
    /// was unknown to the log.
    pub fn union_of_all(&mut self, slot: Slot) {
        for word in 0..self.slots[slot.index()].len() {
            let any = self.slots.iter().fold(0, |any, words| any | words[word]);
            self.slots[slot.index()][word] = any;
        }
    }

    /// Adds the cells of page number `page`, and returns the bad ones: all their regions are now
    /// dirty in all slots. Entries after the log's last cell are ignored.
    pub fn add_page(
        &mut self,
        page: u32,
        found: &[Result<Cell, CellError>; CELLS_PER_PAGE],
    ) -> Vec<(u32, CellError)> {
        let first = u64::from(page) * CELLS_PER_PAGE as u64;
        let entries = (first..u64::from(self.geometry.cell_count())).zip(found);
        let mut bad = Vec::new();
        for (index, found) in entries {
            let words = index as usize * WORDS_PER_CELL..(index as usize + 1) * WORDS_PER_CELL;
            for slot in Slot::ALL {
                let own = &mut self.slots[slot.index()][words.clone()];
                match found {
                    Ok(cell) => {
                        let theirs = &cell.slots[slot.index()];
                        own.iter_mut().zip(theirs).for_each(|(own, word)| *own |= word);
                    }
                    Err(_) => own.fill(u64::MAX),
                }
            }
            bad.extend(found.as_ref().err().map(|why| (index as u32, *why)));
        }
        self.clear_padding_bits();
        bad
    }

    /// The bits of cell number `index`. `None` if the log has no such cell.
    #[must_use]
    pub fn cell(&self, log: LogId, index: u32, generation: u64) -> Option<Cell> {
        let at = index as usize;
        let slots = self.slots.each_ref().map(|words| words.as_chunks().0.get(at).copied());
        let [Some(a), Some(b), Some(c)] = slots else { return None };
        Some(Cell { log_id: log, index, generation, slots: [a, b, c] })
    }

    /// The word of `region`, and its bit in that.
    fn word_and_bit(&self, region: Region) -> (usize, u64) {
        assert!(region.0 < self.geometry.region_count(), "a region of the volume");
        (region.0 as usize / 64, 1 << (region.0 % 64))
    }

    /// Clears the bits that belong to no region.
    fn clear_padding_bits(&mut self) {
        let regions = self.geometry.region_count() as usize;
        for words in &mut self.slots {
            let tail = &mut words[regions / 64..];
            // Empty if the regions fill the last cell.
            if let Some((partial, rest)) = tail.split_first_mut() {
                *partial &= (1 << (regions % 64)) - 1;
                rest.fill(0);
            }
        }
    }
}

/// The regions whose bits are set in word number `word`.
fn set_regions(word: usize, bits: u64) -> impl Iterator<Item = Region> {
    let first = u32::try_from(word * 64).expect("a word of regions");
    let (mut rest, mut found) = (bits, None);
    std::iter::from_fn(move || {
        rest &= !found.map_or(0, |bit: u32| 1 << bit);
        found = (rest != 0).then(|| rest.trailing_zeros());
        found.map(|bit| Region(first + bit))
    })
}

#[cfg(test)]
mod tests;

//! All bits of a log in memory.

use super::cell::{BadCell, CELLS_PER_PAGE, Cell, WORDS_PER_CELL};
use super::{Geometry, LogId, Region, SLOTS, Slot};

/// Which regions are marked, for each slot.
///
/// # Panics
/// Methods that take a [`Region`] panic if the volume has no such region: regions come from the
/// same [`Geometry`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marks {
    geometry: Geometry,
    /// Whole cells; bits behind the last region are clear.
    slots: [Box<[u64]>; SLOTS],
}

impl Marks {
    /// No region marked.
    #[must_use]
    pub fn none(geometry: Geometry) -> Self {
        let words = geometry.cells() as usize * WORDS_PER_CELL;
        Self { geometry, slots: std::array::from_fn(|_| vec![0; words].into_boxed_slice()) }
    }

    /// Every region marked in every slot: what is known of a log that is lost.
    #[must_use]
    pub fn all(geometry: Geometry) -> Self {
        let mut marks = Self::none(geometry);
        Slot::ALL.into_iter().for_each(|slot| marks.set_all(slot));
        marks
    }

    /// How the volume is cut into regions.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Marks `region` in `slot`.
    pub fn set(&mut self, slot: Slot, region: Region) {
        let (word, bit) = self.find(region);
        self.slots[slot.index()][word] |= bit;
    }

    /// Marks `region` in every slot.
    pub fn set_everywhere(&mut self, region: Region) {
        let (word, bit) = self.find(region);
        self.slots.iter_mut().for_each(|words| words[word] |= bit);
    }

    /// Marks every region in `slot`.
    pub fn set_all(&mut self, slot: Slot) {
        self.slots[slot.index()].fill(u64::MAX);
        self.trim();
    }

    /// Takes the mark of `region` from `slot`.
    pub fn clear(&mut self, slot: Slot, region: Region) {
        let (word, bit) = self.find(region);
        self.slots[slot.index()][word] &= !bit;
    }

    /// Whether `region` is marked in `slot`.
    #[must_use]
    pub fn is_set(&self, slot: Slot, region: Region) -> bool {
        let (word, bit) = self.find(region);
        self.slots[slot.index()][word] & bit != 0
    }

    /// Whether `region` is marked in every slot.
    #[must_use]
    pub fn is_set_everywhere(&self, region: Region) -> bool {
        let (word, bit) = self.find(region);
        let [a, b, c] = &self.slots;
        a[word] & b[word] & c[word] & bit != 0
    }

    /// For word number `word` of 64 regions, those that are marked in every slot.
    pub(super) fn word_everywhere(&self, word: usize) -> u64 {
        self.slots.iter().fold(u64::MAX, |every, words| every & words[word])
    }

    /// The bits of `slot`, 64 regions a word, whole cells.
    pub(super) fn words(&self, slot: Slot) -> &[u64] {
        &self.slots[slot.index()]
    }

    /// How many regions are marked in `slot`.
    #[must_use]
    pub fn count(&self, slot: Slot) -> u32 {
        self.slots[slot.index()].iter().map(|word| word.count_ones()).sum()
    }

    /// The regions that are marked in `slot`, in ascending order.
    pub fn marked(&self, slot: Slot) -> impl Iterator<Item = Region> + '_ {
        self.slots[slot.index()].iter().enumerate().flat_map(|(word, bits)| ones(word, *bits))
    }

    /// The regions that are marked in any of `slots`, in ascending order.
    pub(super) fn marked_in_any(&self, slots: &[Slot]) -> impl Iterator<Item = Region> {
        let any = |word: usize| slots.iter().fold(0, |any, s| any | self.slots[s.index()][word]);
        let words = self.slots[0].len();
        (0..words).flat_map(move |word| ones(word, any(word)))
    }

    /// Marks in `slot` what `theirs` has marked in `from`.
    ///
    /// Their regions may have another size, as those of an image that has not been converted yet:
    /// then every region that one of them touches is marked.
    pub fn union(&mut self, slot: Slot, theirs: &Self, from: Slot) {
        if self.geometry == theirs.geometry {
            let own = &mut self.slots[slot.index()];
            own.iter_mut().zip(&theirs.slots[from.index()]).for_each(|(own, word)| *own |= word);
            return;
        }
        let end = self.geometry.bytes();
        for range in theirs.marked(from).filter_map(|region| theirs.geometry.bytes_of(region)) {
            let len = range.end.min(end).saturating_sub(range.start);
            // What lies behind the smaller volume's end concerns only the larger one.
            let touched = self.geometry.regions_of(range.start, len);
            touched.into_iter().flatten().for_each(|region| self.set(slot, region));
        }
    }

    /// The bits of `slot` for somebody else: bit `n % 8` of byte `n / 8` tells whether region `n` is
    /// marked. As many bytes as the regions need; bits behind the last region are clear.
    #[must_use]
    pub fn to_bits(&self, slot: Slot) -> Vec<u8> {
        let len = self.geometry.bits_len();
        let bytes = self.slots[slot.index()].iter().flat_map(|word| word.to_le_bytes());
        bytes.take(len).collect()
    }

    /// What somebody else's [`Self::to_bits`] say about a volume that is cut into regions like this,
    /// as the marks of `slot`, with none in the others. Bits behind the last region are not looked at.
    /// `None` if there are not as many bytes as the regions need.
    #[must_use]
    pub fn of_bits(geometry: Geometry, slot: Slot, bits: &[u8]) -> Option<Self> {
        if bits.len() != geometry.bits_len() {
            return None;
        }
        let mut marks = Self::none(geometry);
        for (word, bytes) in marks.slots[slot.index()].iter_mut().zip(bits.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(whole);
        }
        marks.trim();
        Some(marks)
    }

    /// Marks in `slot` what is marked in `other`.
    pub fn union_of(&mut self, slot: Slot, other: Slot) {
        for word in 0..self.slots[slot.index()].len() {
            self.slots[slot.index()][word] |= self.slots[other.index()][word];
        }
    }

    /// Marks in `slot` what is marked in any slot: where the marks for an image begin that the log
    /// has not known.
    pub fn union_of_all(&mut self, slot: Slot) {
        for word in 0..self.slots[slot.index()].len() {
            let any = self.slots.iter().fold(0, |any, words| any | words[word]);
            self.slots[slot.index()][word] = any;
        }
    }

    /// Adds what was found in the places of page number `page`, and says which of the log's cells
    /// are bad there: all their regions are now marked in all slots. Places behind the log's last
    /// cell are not looked at.
    pub fn add_page(
        &mut self,
        page: u32,
        found: &[Result<Cell, BadCell>; CELLS_PER_PAGE],
    ) -> Vec<(u32, BadCell)> {
        let first = u64::from(page) * CELLS_PER_PAGE as u64;
        let places = (first..u64::from(self.geometry.cells())).zip(found);
        let mut bad = Vec::new();
        for (index, found) in places {
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
        self.trim();
        bad
    }

    /// The bits of cell number `index` as that cell of `log`. `None` if the log has no such cell.
    #[must_use]
    pub fn cell(&self, log: LogId, index: u32, generation: u64) -> Option<Cell> {
        let at = index as usize;
        let slots = self.slots.each_ref().map(|words| words.as_chunks().0.get(at).copied());
        let [Some(a), Some(b), Some(c)] = slots else { return None };
        Some(Cell { log, index, generation, slots: [a, b, c] })
    }

    /// The word of `region`, and its bit in it.
    fn find(&self, region: Region) -> (usize, u64) {
        assert!(region.0 < self.geometry.regions(), "a region of the volume");
        (region.0 as usize / 64, 1 << (region.0 % 64))
    }

    /// Clears the bits that belong to no region.
    fn trim(&mut self) {
        let regions = self.geometry.regions() as usize;
        for words in &mut self.slots {
            let behind = &mut words[regions / 64..];
            // Empty if the regions fill the last cell.
            if let Some((partial, rest)) = behind.split_first_mut() {
                *partial &= (1 << (regions % 64)) - 1;
                rest.fill(0);
            }
        }
    }
}

/// The regions whose bits are set in word number `word`.
fn ones(word: usize, bits: u64) -> impl Iterator<Item = Region> {
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

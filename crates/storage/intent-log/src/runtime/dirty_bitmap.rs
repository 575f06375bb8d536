//! The dirty bits in memory, and what is known about those on disk. Pure: pages are taken out to be
//! written, and the result is reported back.
//!
//! Care is needed when a bit is cleared and set again. As long as no page without it was submitted,
//! it is still set on disk, and nothing needs to be written. Once a page without it *was
//! submitted*, it may be lost, and only a later page write restores it. So `durable` has the bits
//! that are set in every page which the disk may hold after a crash: submitting a page removes bits
//! at once, and only a completed, synced write adds some.

use super::super::cell::WORDS_PER_CELL;
use super::super::{
    CELLS_PER_PAGE, Cell, Geometry, LogId, PAGE_BYTES, REGIONS_PER_CELL, Region, Slot, SlotBitmaps,
    page_to_bytes,
};
use super::page_set::PageSet;

/// Words of bits in a page, for one slot.
const WORDS_PER_PAGE: usize = WORDS_PER_CELL * CELLS_PER_PAGE;

/// What must happen until a dirty bit is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PersistNeed {
    /// Nothing: it is on disk.
    Nothing,
    /// It is in that page, which is in flight: a sync afterwards is enough.
    PageInFlight(u32),
    /// That page must be written.
    Page(u32),
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct DirtyBitmap {
    bitmaps: SlotBitmaps,
    log_id: LogId,
    /// Number of writes of each cell.
    generations: Vec<u64>,
    /// Regions that are dirty in every slot of every page that the disk may hold after a crash.
    durable: Vec<u64>,
    /// Pages with bits that changed since they were submitted.
    unwritten_pages: PageSet,
    /// Pages that were submitted and may not be durable, with the regions that are dirty in every
    /// slot of them.
    in_flight: Vec<(u32, Vec<u64>)>,
}

impl DirtyBitmap {
    /// A bitmap of which nothing is known to be on disk. `generations` is the number of writes of
    /// each cell.
    pub(super) fn new(bitmaps: SlotBitmaps, log_id: LogId, generations: Vec<u64>) -> Self {
        let words = bitmaps.geometry().cell_count() as usize * WORDS_PER_CELL;
        debug_assert_eq!(generations.len(), bitmaps.geometry().cell_count() as usize);
        let unwritten_pages = PageSet::first_pages(bitmaps.geometry().page_count());
        Self {
            bitmaps,
            log_id,
            generations,
            durable: vec![0; words],
            unwritten_pages,
            in_flight: Vec::new(),
        }
    }

    /// Notes that the disk durably holds page number `page` as it is in memory.
    pub(super) fn note_durable(&mut self, page: u32) {
        for word in self.words_of(page) {
            self.durable[word] = self.bitmaps.word_in_all_slots(word);
        }
        self.unwritten_pages = self.unwritten_pages.without(PageSet::NONE.with(page));
    }

    pub(super) fn bitmaps(&self) -> &SlotBitmaps {
        &self.bitmaps
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.bitmaps.geometry()
    }

    /// All pages of the log.
    pub(super) fn all_pages(&self) -> PageSet {
        PageSet::first_pages(self.geometry().page_count())
    }

    /// Pages that differ from those on disk.
    pub(super) fn unwritten_pages(&self) -> PageSet {
        self.unwritten_pages
    }

    /// Whether `region` is dirty in every slot, in memory and durably.
    pub(super) fn is_hot(&self, region: Region) -> bool {
        self.is_durable(region) && self.bitmaps.is_set_in_all_slots(region)
    }

    /// Marks `region` dirty in every slot; returns what must happen until that is durable.
    pub(super) fn mark(&mut self, region: Region) -> PersistNeed {
        self.bitmaps.set_in_all_slots(region);
        let (word, bit) = word_and_bit(region);
        if self.is_durable(region) {
            return PersistNeed::Nothing;
        }
        let page = page_of(region);
        let first = self.words_of(page).start;
        let in_flight = self.in_flight.iter().find(|(taken, _)| *taken == page);
        if in_flight.is_some_and(|(_, words)| words[word - first] & bit != 0) {
            return PersistNeed::PageInFlight(page);
        }
        self.unwritten_pages = self.unwritten_pages.with(page);
        PersistNeed::Page(page)
    }

    /// Clears the bit of `region` in `slot`, in memory. Whether it was set.
    pub(super) fn clear(&mut self, slot: Slot, region: Region) -> bool {
        let was_set = self.bitmaps.is_set(slot, region);
        if was_set {
            self.bitmaps.clear(slot, region);
            self.unwritten_pages = self.unwritten_pages.with(page_of(region));
        }
        was_set
    }

    /// Merges the dirty bits of `theirs` into `slot`; returns the pages that must be written for
    /// that.
    ///
    /// These include pages without a new bit: a bit that was set just now, or cleared and set
    /// again, may not be on disk.
    pub(super) fn merge(&mut self, slot: Slot, theirs: &SlotBitmaps) -> PageSet {
        let mut added = SlotBitmaps::none(self.geometry());
        added.union(slot, theirs, slot);
        self.bitmaps.union(slot, &added, slot);
        let is_affected =
            |page: &u32| added.words(slot)[self.words_of(*page)].iter().any(|w| *w != 0);
        self.all_pages().iter().filter(is_affected).fold(PageSet::NONE, PageSet::with)
    }

    /// Initializes the bits of `slot`; returns the pages that must be written for that: all of
    /// them.
    pub(super) fn initialize_slot(
        &mut self,
        slot: Slot,
        initialize: impl FnOnce(&mut SlotBitmaps, Slot),
    ) -> PageSet {
        initialize(&mut self.bitmaps, slot);
        self.all_pages()
    }

    /// The bytes of page number `page`, which are submitted now. No other write of it may be in
    /// flight.
    pub(super) fn take_page(&mut self, page: u32) -> [u8; PAGE_BYTES] {
        let words = self.words_of(page);
        let image: Vec<u64> = words.clone().map(|w| self.bitmaps.word_in_all_slots(w)).collect();
        for (durable, image) in self.durable[words].iter_mut().zip(&image) {
            *durable &= image;
        }
        self.in_flight.retain(|(taken, _)| *taken != page);
        self.in_flight.push((page, image));
        self.unwritten_pages = self.unwritten_pages.without(PageSet::NONE.with(page));
        let first = page * CELLS_PER_PAGE as u32;
        let last = self.geometry().cell_count().min(first + CELLS_PER_PAGE as u32);
        let cells: Vec<Cell> = (first..last).map(|index| self.next_cell(index)).collect();
        page_to_bytes(&cells)
    }

    /// Notes that all submitted pages are written, and if `synced` that they are durable.
    pub(super) fn pages_written(&mut self, synced: bool) {
        for (page, image) in std::mem::take(&mut self.in_flight) {
            if synced {
                let words = self.words_of(page);
                self.durable[words].copy_from_slice(&image);
            }
        }
    }

    fn next_cell(&mut self, index: u32) -> Cell {
        let generation = &mut self.generations[index as usize];
        *generation += 1;
        self.bitmaps.cell(self.log_id, index, *generation).expect("a cell of the log")
    }

    fn is_durable(&self, region: Region) -> bool {
        let (word, bit) = word_and_bit(region);
        self.durable[word] & bit != 0
    }

    fn words_of(&self, page: u32) -> std::ops::Range<usize> {
        let first = page as usize * WORDS_PER_PAGE;
        first..self.durable.len().min(first + WORDS_PER_PAGE)
    }
}

/// The word of `region`, and its bit in that.
fn word_and_bit(region: Region) -> (usize, u64) {
    (region.0 as usize / 64, 1 << (region.0 % 64))
}

fn page_of(region: Region) -> u32 {
    region.0 / REGIONS_PER_CELL / CELLS_PER_PAGE as u32
}

#[cfg(test)]
mod tests;

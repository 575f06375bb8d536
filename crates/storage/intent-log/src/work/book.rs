//! What the log knows of its bits: those in memory, and those that are on the disk whatever happens.
//! Pure: bytes of pages go out, and news of what became of them comes in.
//!
//! The one thing to be careful about is a mark that is taken, and set again. As long as no page has
//! gone out without it, the mark on the disk was never away, and nothing needs to be written. As soon
//! as a page without it *has gone out*, it may be gone, and only a page that goes out later brings it
//! back. So `durable` has the marks that every page has which the disk may hold after a crash: a page
//! that goes out takes from it at once, and only one that has come home and was synced adds to it.

use super::super::cell::WORDS_PER_CELL;
use super::super::{
    CELLS_PER_PAGE, Cell, Geometry, LogId, Marks, PAGE_BYTES, REGIONS_PER_CELL, Region, Slot,
    page_to_bytes,
};
use super::pages::Pages;

/// Words of bits, for one slot, in a page.
const WORDS_PER_PAGE: usize = WORDS_PER_CELL * CELLS_PER_PAGE;

/// What a mark waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// It is on the disk for sure.
    Nothing,
    /// It is in that page, which is on its way: if a sync follows, that is enough.
    PageOnItsWay(u32),
    /// A page has to go out that has it.
    Page(u32),
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Book {
    marks: Marks,
    log: LogId,
    /// How often each cell was written.
    generations: Vec<u64>,
    /// Regions that are marked in every slot of every page that the disk may hold after a crash.
    durable: Vec<u64>,
    /// Pages in which a mark was taken or set since they went out.
    dirty: Pages,
    /// Pages that have gone out and are not known to be durable, with the regions that are marked in
    /// every slot of them.
    out: Vec<(u32, Vec<u64>)>,
}

impl Book {
    /// With these marks, of which nothing is known to be on the disk. `generations` has how often each
    /// cell was written.
    pub(super) fn new(marks: Marks, log: LogId, generations: Vec<u64>) -> Self {
        let words = marks.geometry().cells() as usize * WORDS_PER_CELL;
        debug_assert_eq!(generations.len(), marks.geometry().cells() as usize);
        let dirty = Pages::first(marks.geometry().pages());
        Self { marks, log, generations, durable: vec![0; words], dirty, out: Vec::new() }
    }

    /// The disk holds page number `page` as the marks have it, durably.
    pub(super) fn found(&mut self, page: u32) {
        for word in self.words_of(page) {
            self.durable[word] = self.marks.word_everywhere(word);
        }
        self.dirty = self.dirty.without(Pages::NONE.with(page));
    }

    pub(super) fn marks(&self) -> &Marks {
        &self.marks
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.marks.geometry()
    }

    /// All pages there are.
    pub(super) fn pages(&self) -> Pages {
        Pages::first(self.geometry().pages())
    }

    /// Pages that the disk does not hold as they are here.
    pub(super) fn dirty(&self) -> Pages {
        self.dirty
    }

    /// Whether `region` is marked, here and durably, in every slot.
    pub(super) fn is_hot(&self, region: Region) -> bool {
        self.is_durable(region) && self.marks.is_set_everywhere(region)
    }

    /// Marks `region` in every slot; what has to happen until that is durable.
    pub(super) fn mark(&mut self, region: Region) -> Need {
        self.marks.set_everywhere(region);
        let (word, bit) = place(region);
        if self.is_durable(region) {
            return Need::Nothing;
        }
        let page = page_of(region);
        let first = self.words_of(page).start;
        let on_its_way = self.out.iter().find(|(out, _)| *out == page);
        if on_its_way.is_some_and(|(_, words)| words[word - first] & bit != 0) {
            return Need::PageOnItsWay(page);
        }
        self.dirty = self.dirty.with(page);
        Need::Page(page)
    }

    /// Takes the mark of `region` from `slot`, here; says whether it had one.
    pub(super) fn clear(&mut self, slot: Slot, region: Region) -> bool {
        let was = self.marks.is_set(slot, region);
        if was {
            self.marks.clear(slot, region);
            self.dirty = self.dirty.with(page_of(region));
        }
        was
    }

    /// Adds to `slot` what `theirs` has marked in it; the pages that have to go out for that.
    ///
    /// Also those in which nothing is new: a mark that somebody else has just set, or that was taken
    /// and set again, may not be on the disk.
    pub(super) fn merge(&mut self, slot: Slot, theirs: &Marks) -> Pages {
        let mut added = Marks::none(self.geometry());
        added.union(slot, theirs, slot);
        self.marks.union(slot, &added, slot);
        let has = |page: &u32| added.words(slot)[self.words_of(*page)].iter().any(|w| *w != 0);
        self.pages().iter().filter(has).fold(Pages::NONE, Pages::with)
    }

    /// Lets `slot` begin with `marks` of its own; all pages have to go out for that.
    pub(super) fn begin(&mut self, slot: Slot, marks: impl FnOnce(&mut Marks, Slot)) -> Pages {
        marks(&mut self.marks, slot);
        self.pages()
    }

    /// The bytes of page number `page`, which now go out. No other write of it may be on its way.
    pub(super) fn send(&mut self, page: u32) -> [u8; PAGE_BYTES] {
        let words = self.words_of(page);
        let image: Vec<u64> = words.clone().map(|w| self.marks.word_everywhere(w)).collect();
        for (durable, image) in self.durable[words].iter_mut().zip(&image) {
            *durable &= image;
        }
        self.out.retain(|(out, _)| *out != page);
        self.out.push((page, image));
        self.dirty = self.dirty.without(Pages::NONE.with(page));
        let first = page * CELLS_PER_PAGE as u32;
        let last = self.geometry().cells().min(first + CELLS_PER_PAGE as u32);
        let cells: Vec<Cell> = (first..last).map(|index| self.next_cell(index)).collect();
        page_to_bytes(&cells)
    }

    /// All pages that went out are home. `synced`: and durable.
    pub(super) fn home(&mut self, synced: bool) {
        for (page, image) in std::mem::take(&mut self.out) {
            if synced {
                let words = self.words_of(page);
                self.durable[words].copy_from_slice(&image);
            }
        }
    }

    fn next_cell(&mut self, index: u32) -> Cell {
        let generation = &mut self.generations[index as usize];
        *generation += 1;
        self.marks.cell(self.log, index, *generation).expect("a cell of the log")
    }

    fn is_durable(&self, region: Region) -> bool {
        let (word, bit) = place(region);
        self.durable[word] & bit != 0
    }

    fn words_of(&self, page: u32) -> std::ops::Range<usize> {
        let first = page as usize * WORDS_PER_PAGE;
        first..self.durable.len().min(first + WORDS_PER_PAGE)
    }
}

/// The word of `region`, and its bit in it.
fn place(region: Region) -> (usize, u64) {
    (region.0 as usize / 64, 1 << (region.0 % 64))
}

fn page_of(region: Region) -> u32 {
    region.0 / REGIONS_PER_CELL / CELLS_PER_PAGE as u32
}

#[cfg(test)]
mod tests;

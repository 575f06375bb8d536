//! What has been taken off rings and not answered, in memory that the monitor keeps while we are away (the
//! specification's *inflight I/O tracking*, split rings).
//!
//! For each ring of `n` places, at a multiple of 64 bytes, in the order of the machine:
//!
//! ```text
//!  0 features (8) | 8 version (2): 1 | 10 places (2) | 12 last_batch_head (2) | 14 used_idx (2)
//! 16 n times: inflight (1) | padding (5) | next (2) | counter (8)
//! ```
//!
//! The monitor, or whoever was here before us, may have left anything there: what is read is checked.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use super::memory::holds;
use super::{MAX_RING_SIZE, MAX_RINGS};

const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const ALIGNMENT: usize = 64;
const VERSION: u16 = 1;

/// Offsets in the header, and in an entry.
const AT_VERSION: usize = 8;
const AT_PLACES: usize = 10;
const AT_LAST: usize = 12;
const AT_USED: usize = 14;
const AT_NEXT: usize = 6;
const AT_COUNTER: usize = 8;

fn bytes_of_ring(places: u16) -> usize {
    (HEADER_BYTES + ENTRY_BYTES * usize::from(places)).next_multiple_of(ALIGNMENT)
}

/// The record of all rings.
#[derive(Clone, Debug)]
pub(super) struct Inflight {
    region: Arc<MmapRegion>,
    rings: u16,
    places: u16,
}

impl Inflight {
    /// An empty one, and the file that it is in.
    pub(super) fn create(rings: u16, places: u16) -> io::Result<(Self, File, u64)> {
        let bytes = Self::bytes(rings, places)?;
        let file = memfd_create("windrose-inflight", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes as u64)?;
        let file = File::from(file);
        let inflight = Self::open(file.try_clone()?, (bytes as u64, 0), (rings, places))?;
        Ok((inflight, file, bytes as u64))
    }

    /// One that was here before: `bytes` of `file` from `offset` on.
    pub(super) fn open(
        file: File,
        (bytes, offset): (u64, u64),
        (rings, places): (u16, u16),
    ) -> io::Result<Self> {
        let needed = Self::bytes(rings, places)?;
        if bytes < needed as u64 || !holds(&file, offset, needed as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let region = MmapRegion::from_file(FileOffset::new(file, offset), needed);
        let region = Arc::new(region.map_err(io::Error::other)?);
        Ok(Self { region, rings, places })
    }

    fn bytes(rings: u16, places: u16) -> io::Result<usize> {
        let known = (1..=MAX_RINGS).contains(&rings) && (1..=MAX_RING_SIZE).contains(&places);
        let bytes = usize::from(rings) * bytes_of_ring(places);
        if known { Ok(bytes) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// The record of a ring; `None` where it has no place, or fewer than the ring.
    pub(super) fn ring(&self, index: u16, places: u16) -> Option<RingRecord> {
        let fits = index < self.rings && places <= self.places;
        let at = usize::from(index) * bytes_of_ring(self.places);
        fits.then(|| RingRecord { region: Arc::clone(&self.region), at, places, counter: 0 })
    }
}

/// The record of one ring.
#[derive(Debug)]
pub(super) struct RingRecord {
    region: Arc<MmapRegion>,
    at: usize,
    places: u16,
    /// Of the request taken next.
    counter: u64,
}

impl RingRecord {
    /// The ring goes on where its driver has seen `used` answers: gives what was taken before and not answered, in the
    /// order in which it was taken.
    pub(super) fn resume(&mut self, used: u16) -> Vec<u16> {
        if self.half(AT_VERSION) != VERSION || self.half(AT_PLACES) != self.places {
            self.clear(used);
            return Vec::new();
        }
        // Answers that the driver may have seen, and that are not noted as given.
        let mut left = used.wrapping_sub(self.half(AT_USED));
        let mut head = self.half(AT_LAST);
        while left > 0 && left <= self.places && head < self.places {
            self.set_taken(head, false);
            head = self.half(self.entry(head) + AT_NEXT);
            left -= 1;
        }
        self.set_half(AT_USED, used);
        let taken = (0..self.places).filter(|&head| self.is_taken(head));
        let mut taken: Vec<_> = taken.map(|head| (self.counter_of(head), head)).collect();
        taken.sort_unstable();
        self.counter = taken.last().map_or(0, |(last, _)| last.wrapping_add(1));
        taken.into_iter().map(|(_, head)| head).collect()
    }

    fn clear(&mut self, used: u16) {
        (0..self.places).for_each(|head| self.set_taken(head, false));
        self.set_half(AT_PLACES, self.places);
        self.set_half(AT_LAST, 0);
        self.set_half(AT_USED, used);
        self.set_half(AT_VERSION, VERSION);
    }

    /// The request at `head` is about to be done.
    pub(super) fn take(&mut self, head: u16) {
        let at = self.entry(head) + AT_COUNTER;
        // An entry inside the region, at a multiple of its length: it cannot fail.
        let _ = self.view().store(self.counter, at, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
        self.set_taken(head, true);
    }

    /// The request at `head` is about to be answered.
    pub(super) fn answering(&self, head: u16) {
        let last = self.half(AT_LAST);
        self.set_half(self.entry(head) + AT_NEXT, last);
        self.set_half(AT_LAST, head);
    }

    /// It has been answered: the driver may have seen `used` answers.
    pub(super) fn answered(&self, head: u16, used: u16) {
        self.set_taken(head, false);
        self.set_half(AT_USED, used);
    }

    fn view(&self) -> VolatileSlice<'_> {
        let bytes = HEADER_BYTES + ENTRY_BYTES * usize::from(self.places);
        self.region.get_slice(self.at, bytes).expect("the region has room for all rings")
    }

    /// Offset of an entry.
    fn entry(&self, head: u16) -> usize {
        debug_assert!(head < self.places);
        HEADER_BYTES + ENTRY_BYTES * usize::from(head)
    }

    fn half(&self, at: usize) -> u16 {
        self.view().load(at, Ordering::Acquire).unwrap_or(0)
    }

    fn set_half(&self, at: usize, value: u16) {
        // Offsets are even and inside: it cannot fail.
        let _ = self.view().store(value, at, Ordering::Release);
    }

    fn counter_of(&self, head: u16) -> u64 {
        self.view().load(self.entry(head) + AT_COUNTER, Ordering::Acquire).unwrap_or(0)
    }

    fn is_taken(&self, head: u16) -> bool {
        self.view().load::<u8>(self.entry(head), Ordering::Acquire).is_ok_and(|taken| taken == 1)
    }

    fn set_taken(&self, head: u16, taken: bool) {
        // As above.
        let _ = self.view().store(u8::from(taken), self.entry(head), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(places: u16) -> (File, u64) {
        let (_, file, bytes) = Inflight::create(2, places).unwrap();
        (file, bytes)
    }

    fn ring(of: &(File, u64), places: u16) -> RingRecord {
        let (file, bytes) = of;
        let all = Inflight::open(file.try_clone().unwrap(), (*bytes, 0), (2, places)).unwrap();
        all.ring(1, places).unwrap()
    }

    #[test]
    fn what_was_taken_comes_again_in_order() {
        let file = pair(8);
        let mut before = ring(&file, 8);
        assert!(before.resume(0).is_empty());
        [3, 1, 7, 0].into_iter().for_each(|head| before.take(head));
        before.answering(1);
        before.answered(1, 1);
        assert_eq!(ring(&file, 8).resume(1), [3, 7, 0]);
        // It was taken anew: behind the others.
        before.take(1);
        assert_eq!(ring(&file, 8).resume(1), [3, 7, 0, 1]);
    }

    /// The process ends between the answer and its note: the driver has seen it.
    #[test]
    fn an_answer_that_was_not_noted_is_not_given_twice() {
        let file = pair(8);
        let mut before = ring(&file, 8);
        before.resume(u16::MAX);
        [2, 5, 6].into_iter().for_each(|head| before.take(head));
        before.answering(5);
        assert_eq!(ring(&file, 8).resume(u16::MAX), [2, 5, 6], "it was not given yet");
        before.answering(5);
        assert_eq!(ring(&file, 8).resume(0), [2, 6], "it was");
    }

    #[test]
    fn another_shape_begins_anew_and_nonsense_has_an_end() {
        let file = pair(8);
        let mut record = ring(&file, 8);
        record.resume(0);
        record.take(4);
        assert_eq!(ring(&file, 4).resume(0), [0; 0]);
        let mut record = ring(&file, 8);
        record.resume(0);
        record.take(4);
        for (used, next) in [(500, 9), (8, 4), (8, u16::MAX)] {
            record.set_half(AT_USED, 0);
            record.set_half(AT_LAST, 4);
            record.set_half(record.entry(4) + AT_NEXT, next);
            ring(&file, 8).resume(used);
        }
        assert!(Inflight::create(0, 8).is_err() && Inflight::create(1, 0).is_err());
        assert!(Inflight::create(1, u16::MAX).is_err());
        let (file, bytes) = pair(8);
        assert!(Inflight::open(file, (bytes - 1, 0), (2, 8)).is_err());
    }
}

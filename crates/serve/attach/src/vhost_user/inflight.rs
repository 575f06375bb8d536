//! Requests taken off rings and not answered, recorded in memory that the monitor keeps while we
//! are away (the specification's *inflight I/O tracking*, split rings).
//!
//! For each ring of `n` entries, at a multiple of 64 bytes, in native byte order:
//!
//! ```text
//!  0 features (8) | 8 version (2): 1 | 10 places (2) | 12 last_batch_head (2) | 14 used_idx (2)
//! 16 n times: inflight (1) | padding (5) | next (2) | counter (8)
//! ```
//!
//! The monitor or an earlier process may have left anything there: what is read is validated.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use super::memory::file_covers;
use super::{MAX_QUEUE_SIZE, MAX_QUEUES};

const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const ALIGNMENT: usize = 64;
const VERSION: u16 = 1;

/// Offsets in the header, and in an entry.
const VERSION_OFFSET: usize = 8;
const QUEUE_SIZE_OFFSET: usize = 10;
const LAST_BATCH_HEAD_OFFSET: usize = 12;
const USED_IDX_OFFSET: usize = 14;
const NEXT_OFFSET: usize = 6;
const COUNTER_OFFSET: usize = 8;

fn bytes_of_queue(places: u16) -> usize {
    (HEADER_BYTES + ENTRY_BYTES * usize::from(places)).next_multiple_of(ALIGNMENT)
}

/// The record of all rings.
#[derive(Clone, Debug)]
pub(super) struct Inflight {
    region: Arc<MmapRegion>,
    queues: u16,
    queue_size: u16,
}

impl Inflight {
    /// Creates an empty record. Returns also its file.
    pub(super) fn create(rings: u16, places: u16) -> io::Result<(Self, File, u64)> {
        let bytes = Self::bytes(rings, places)?;
        let file = memfd_create("windrose-inflight", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes as u64)?;
        let file = File::from(file);
        let inflight = Self::open(file.try_clone()?, (bytes as u64, 0), (rings, places))?;
        Ok((inflight, file, bytes as u64))
    }

    /// Opens an existing record: `bytes` of `file` from `offset` on.
    pub(super) fn open(
        file: File,
        (bytes, offset): (u64, u64),
        (rings, places): (u16, u16),
    ) -> io::Result<Self> {
        let needed = Self::bytes(rings, places)?;
        if bytes < needed as u64 || !file_covers(&file, offset, needed as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let region = MmapRegion::from_file(FileOffset::new(file, offset), needed);
        let region = Arc::new(region.map_err(io::Error::other)?);
        Ok(Self { region, queues: rings, queue_size: places })
    }

    fn bytes(rings: u16, places: u16) -> io::Result<usize> {
        let known = (1..=MAX_QUEUES).contains(&rings) && (1..=MAX_QUEUE_SIZE).contains(&places);
        let bytes = usize::from(rings) * bytes_of_queue(places);
        if known { Ok(bytes) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// The record of a ring; `None` if there is none, or it is too small for the ring.
    pub(super) fn queue_record(&self, index: u16, places: u16) -> Option<QueueRecord> {
        let fits = index < self.queues && places <= self.queue_size;
        let at = usize::from(index) * bytes_of_queue(self.queue_size);
        fits.then(|| QueueRecord {
            region: Arc::clone(&self.region),
            at,
            queue_size: places,
            counter: 0,
        })
    }
}

/// The record of one ring.
#[derive(Debug)]
pub(super) struct QueueRecord {
    region: Arc<MmapRegion>,
    at: usize,
    queue_size: u16,
    /// Sequence number of the next request.
    counter: u64,
}

impl QueueRecord {
    /// Resumes a ring whose driver has seen `used` answers. Returns the requests taken and not
    /// answered, in the order in which they were taken.
    pub(super) fn resume(&mut self, used: u16) -> Vec<u16> {
        if self.read_u16(VERSION_OFFSET) != VERSION
            || self.read_u16(QUEUE_SIZE_OFFSET) != self.queue_size
        {
            self.clear(used);
            return Vec::new();
        }
        // Answers that the driver may have seen but that are not recorded.
        let mut left = used.wrapping_sub(self.read_u16(USED_IDX_OFFSET));
        let mut head = self.read_u16(LAST_BATCH_HEAD_OFFSET);
        while left > 0 && left <= self.queue_size && head < self.queue_size {
            self.set_in_flight(head, false);
            head = self.read_u16(self.entry(head) + NEXT_OFFSET);
            left -= 1;
        }
        self.write_u16(USED_IDX_OFFSET, used);
        let taken = (0..self.queue_size).filter(|&head| self.is_in_flight(head));
        let mut taken: Vec<_> = taken.map(|head| (self.counter_of(head), head)).collect();
        taken.sort_unstable();
        self.counter = taken.last().map_or(0, |(last, _)| last.wrapping_add(1));
        taken.into_iter().map(|(_, head)| head).collect()
    }

    fn clear(&mut self, used: u16) {
        (0..self.queue_size).for_each(|head| self.set_in_flight(head, false));
        self.write_u16(QUEUE_SIZE_OFFSET, self.queue_size);
        self.write_u16(LAST_BATCH_HEAD_OFFSET, 0);
        self.write_u16(USED_IDX_OFFSET, used);
        self.write_u16(VERSION_OFFSET, VERSION);
    }

    /// Records that the request at `head` is about to be executed.
    pub(super) fn mark_in_flight(&mut self, head: u16) {
        let at = self.entry(head) + COUNTER_OFFSET;
        // An aligned entry inside the region: it cannot fail.
        let _ = self.view().store(self.counter, at, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
        self.set_in_flight(head, true);
    }

    /// Records that the request at `head` is about to be answered.
    pub(super) fn begin_completion(&self, head: u16) {
        let last = self.read_u16(LAST_BATCH_HEAD_OFFSET);
        self.write_u16(self.entry(head) + NEXT_OFFSET, last);
        self.write_u16(LAST_BATCH_HEAD_OFFSET, head);
    }

    /// Records that it was answered: the driver may have seen `used` answers.
    pub(super) fn end_completion(&self, head: u16, used: u16) {
        self.set_in_flight(head, false);
        self.write_u16(USED_IDX_OFFSET, used);
    }

    fn view(&self) -> VolatileSlice<'_> {
        let bytes = HEADER_BYTES + ENTRY_BYTES * usize::from(self.queue_size);
        self.region.get_slice(self.at, bytes).expect("the region holds all rings")
    }

    /// Offset of an entry.
    fn entry(&self, head: u16) -> usize {
        debug_assert!(head < self.queue_size);
        HEADER_BYTES + ENTRY_BYTES * usize::from(head)
    }

    fn read_u16(&self, at: usize) -> u16 {
        self.view().load(at, Ordering::Acquire).unwrap_or(0)
    }

    fn write_u16(&self, at: usize, value: u16) {
        // Offsets are even and in bounds: it cannot fail.
        let _ = self.view().store(value, at, Ordering::Release);
    }

    fn counter_of(&self, head: u16) -> u64 {
        self.view().load(self.entry(head) + COUNTER_OFFSET, Ordering::Acquire).unwrap_or(0)
    }

    fn is_in_flight(&self, head: u16) -> bool {
        self.view().load::<u8>(self.entry(head), Ordering::Acquire).is_ok_and(|taken| taken == 1)
    }

    fn set_in_flight(&self, head: u16, taken: bool) {
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

    fn ring(of: &(File, u64), places: u16) -> QueueRecord {
        let (file, bytes) = of;
        let all = Inflight::open(file.try_clone().unwrap(), (*bytes, 0), (2, places)).unwrap();
        all.queue_record(1, places).unwrap()
    }

    #[test]
    fn unanswered_requests_are_resubmitted_in_order() {
        let file = pair(8);
        let mut before = ring(&file, 8);
        assert!(before.resume(0).is_empty());
        [3, 1, 7, 0].into_iter().for_each(|head| before.mark_in_flight(head));
        before.begin_completion(1);
        before.end_completion(1, 1);
        assert_eq!(ring(&file, 8).resume(1), [3, 7, 0]);
        // Taken again, so ordered last.
        before.mark_in_flight(1);
        assert_eq!(ring(&file, 8).resume(1), [3, 7, 0, 1]);
    }

    /// The process ends between the answer and its record: the driver has seen it.
    #[test]
    fn an_unrecorded_answer_is_not_given_twice() {
        let file = pair(8);
        let mut before = ring(&file, 8);
        before.resume(u16::MAX);
        [2, 5, 6].into_iter().for_each(|head| before.mark_in_flight(head));
        before.begin_completion(5);
        assert_eq!(ring(&file, 8).resume(u16::MAX), [2, 5, 6], "it was not given yet");
        before.begin_completion(5);
        assert_eq!(ring(&file, 8).resume(0), [2, 6], "it was");
    }

    #[test]
    fn another_size_starts_empty_and_invalid_records_are_bounded() {
        let file = pair(8);
        let mut record = ring(&file, 8);
        record.resume(0);
        record.mark_in_flight(4);
        assert_eq!(ring(&file, 4).resume(0), [0; 0]);
        let mut record = ring(&file, 8);
        record.resume(0);
        record.mark_in_flight(4);
        for (used, next) in [(500, 9), (8, 4), (8, u16::MAX)] {
            record.write_u16(USED_IDX_OFFSET, 0);
            record.write_u16(LAST_BATCH_HEAD_OFFSET, 4);
            record.write_u16(record.entry(4) + NEXT_OFFSET, next);
            ring(&file, 8).resume(used);
        }
        assert!(Inflight::create(0, 8).is_err() && Inflight::create(1, 0).is_err());
        assert!(Inflight::create(1, u16::MAX).is_err());
        let (file, bytes) = pair(8);
        assert!(Inflight::open(file, (bytes - 1, 0), (2, 8)).is_err());
    }
}

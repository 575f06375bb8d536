//! Counters and latency histograms of one volume.

use std::cell::RefCell;
use std::time::Duration;

use block::{Error, Failure, Request};
use hdrhistogram::Histogram;

/// Kinds of commands that are measured apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Read, compare, verify and map.
    Read,
    /// Write, write same, zero, compare-and-write and or-write.
    Write,
    /// Unmap.
    Unmap,
    /// Flush.
    Flush,
}

impl Kind {
    /// All kinds, in the order of [`Snapshot::kinds`].
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Unmap, Self::Flush];

    /// The kind of `request`.
    #[must_use]
    pub fn of(request: &Request) -> Self {
        match request {
            Request::Read { .. }
            | Request::Compare { .. }
            | Request::Verify { .. }
            | Request::Map { .. }
            | Request::Settle { .. } => Self::Read,
            Request::Write { .. }
            | Request::WriteSame { .. }
            | Request::Zero { .. }
            | Request::CompareAndWrite { .. }
            | Request::OrWrite { .. } => Self::Write,
            Request::Unmap { .. } => Self::Unmap,
            Request::Flush => Self::Flush,
        }
    }
}

/// What a volume has done, of one kind.
#[derive(Clone, Debug, Default)]
pub struct KindStats {
    /// Commands completed, failed ones included.
    pub completed: u64,
    /// Commands that failed; a miscompare is an answer, not a failure.
    pub failed: u64,
    /// Those of them that failed for want of space.
    pub without_space: u64,
    /// Payload moved, in bytes.
    pub bytes: u64,
    /// Sum of all latencies.
    pub total: Duration,
    /// Latencies in microseconds, from acceptance to completion; `None` before the first command
    /// (an idle volume costs no histogram).
    pub latency_us: Option<Histogram<u32>>,
}

/// What a volume has done since it was opened.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// By kind, in the order of [`Kind::ALL`].
    pub kinds: [KindStats; 4],
    /// Commands accepted and not yet answered.
    pub in_flight: u64,
    /// Commands that were asked to abort.
    pub aborts: u64,
    /// Commands that had to wait for an overlapping one, or for a place among the range locks.
    pub overlaps: u64,
    /// Commands that had to wait for buffer memory.
    pub memory_waits: u64,
}

/// What is counted of a request when it ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measure {
    pub(crate) kind: Kind,
    /// Its payload.
    pub(crate) bytes: u64,
}

impl Measure {
    /// Of a request to a device with blocks of `block_size` bytes.
    pub(crate) fn of(request: &Request, block_size: u32) -> Self {
        let bytes = match request {
            Request::Read { range } | Request::Verify { range } => {
                range.count.saturating_mul(u64::from(block_size))
            }
            Request::Write { data, .. }
            | Request::Compare { data, .. }
            | Request::OrWrite { data, .. } => data.len() as u64,
            Request::CompareAndWrite { write, .. } => write.len() as u64,
            Request::WriteSame { .. }
            | Request::Zero { .. }
            | Request::Unmap { .. }
            | Request::Map { .. }
            | Request::Settle { .. }
            | Request::Flush => 0,
        };
        Self { kind: Kind::of(request), bytes }
    }
}

/// Longest latency told apart, in microseconds.
const LONGEST_US: u64 = 120_000_000;

#[derive(Debug, Default)]
pub(crate) struct Counters(RefCell<Snapshot>);

impl Counters {
    pub(crate) fn snapshot(&self) -> Snapshot {
        self.0.borrow().clone()
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.0.borrow().in_flight
    }

    pub(crate) fn update(&self, f: impl FnOnce(&mut Snapshot)) {
        f(&mut self.0.borrow_mut());
    }

    pub(crate) fn completed(&self, of: Measure, failure: Option<Failure>, took: Duration) {
        let Measure { kind, bytes } = of;
        let mut snapshot = self.0.borrow_mut();
        let k = &mut snapshot.kinds[kind as usize];
        k.completed += 1;
        // An abort is the initiator's wish, and who is fenced sends it to another node: neither is the disk's fault.
        let faulty =
            |f| matches!(f, Failure::Device(e) if !matches!(e, Error::Aborted | Error::Fenced));
        k.failed += u64::from(failure.is_some_and(faulty));
        let is_full = |f| matches!(f, Failure::Device(Error::NoSpace));
        k.without_space += u64::from(failure.is_some_and(is_full));
        k.bytes += if failure.is_none() { bytes } else { 0 };
        k.total += took;
        let us = u64::try_from(took.as_micros()).unwrap_or(LONGEST_US).clamp(1, LONGEST_US);
        k.latency_us
            .get_or_insert_with(|| {
                Histogram::new_with_bounds(1, LONGEST_US, 2).expect("constant, valid bounds")
            })
            .saturating_record(us);
    }
}

//! Counters and latency histograms of one volume.

use std::cell::RefCell;
use std::time::Duration;

use block::{Error, Request, RequestError};
use hdrhistogram::Histogram;

/// Kinds of commands that are measured separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommandKind {
    /// Read, compare, verify and map.
    Read,
    /// Write, write same, zero, compare-and-write and or-write.
    Write,
    /// Unmap.
    Unmap,
    /// Flush.
    Flush,
}

impl CommandKind {
    /// All kinds, in the order of [`VolumeStats::kinds`].
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Unmap, Self::Flush];

    /// The kind of `request`.
    #[must_use]
    pub fn of_request(request: &Request) -> Self {
        match request {
            Request::Read { .. }
            | Request::Compare { .. }
            | Request::Verify { .. }
            | Request::BlockStatus { .. }
            | Request::DrainWrites { .. } => Self::Read,
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

/// Statistics of one kind of commands.
#[derive(Clone, Debug, Default)]
pub struct CommandStats {
    /// Commands completed, failed ones included.
    pub completed: u64,
    /// Commands that failed; a miscompare is an answer, not a failure.
    pub failed: u64,
    /// Of these, failures for lack of space.
    pub no_space_failures: u64,
    /// Payload moved, in bytes.
    pub bytes: u64,
    /// Sum of all latencies.
    pub total_latency: Duration,
    /// Latencies in microseconds, from acceptance to completion; `None` before the first command
    /// (an idle volume costs no histogram).
    pub latency_us: Option<Histogram<u32>>,
}

/// Statistics of a volume since it was opened.
#[derive(Clone, Debug, Default)]
pub struct VolumeStats {
    /// By kind, in the order of [`CommandKind::ALL`].
    pub kinds: [CommandStats; 4],
    /// Commands accepted and not yet answered.
    pub in_flight: u64,
    /// Aborts requested.
    pub aborts: u64,
    /// Commands that waited for an overlapping one, or for a slot in the range lock table.
    pub range_waits: u64,
    /// Commands that waited for buffer memory.
    pub memory_waits: u64,
}

/// The sample that a request adds when it ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandSample {
    pub(crate) kind: CommandKind,
    /// Its payload in bytes.
    pub(crate) bytes: u64,
}

impl CommandSample {
    /// The sample of a request to a device with blocks of `block_size` bytes.
    pub(crate) fn of_request(request: &Request, block_size: u32) -> Self {
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
            | Request::BlockStatus { .. }
            | Request::DrainWrites { .. }
            | Request::Flush => 0,
        };
        Self { kind: CommandKind::of_request(request), bytes }
    }
}

/// Longest latency that is recorded exactly, in microseconds.
const MAX_LATENCY_US: u64 = 120_000_000;

#[derive(Debug, Default)]
pub(crate) struct Counters(RefCell<VolumeStats>);

impl Counters {
    pub(crate) fn snapshot(&self) -> VolumeStats {
        self.0.borrow().clone()
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.0.borrow().in_flight
    }

    pub(crate) fn update(&self, f: impl FnOnce(&mut VolumeStats)) {
        f(&mut self.0.borrow_mut());
    }

    pub(crate) fn completed(
        &self,
        of: CommandSample,
        failure: Option<RequestError>,
        took: Duration,
    ) {
        let CommandSample { kind, bytes } = of;
        let mut snapshot = self.0.borrow_mut();
        let k = &mut snapshot.kinds[kind as usize];
        k.completed += 1;
        // An abort is requested by the initiator, and a fenced command is sent to another node:
        // neither is the disk's fault.
        let faulty = |f| matches!(f, RequestError::Device(e) if !matches!(e, Error::Aborted | Error::Fenced));
        k.failed += u64::from(failure.is_some_and(faulty));
        let is_full = |f| matches!(f, RequestError::Device(Error::NoSpace));
        k.no_space_failures += u64::from(failure.is_some_and(is_full));
        k.bytes += if failure.is_none() { bytes } else { 0 };
        k.total_latency += took;
        let us = u64::try_from(took.as_micros()).unwrap_or(MAX_LATENCY_US).clamp(1, MAX_LATENCY_US);
        k.latency_us
            .get_or_insert_with(|| {
                Histogram::new_with_bounds(1, MAX_LATENCY_US, 2).expect("constant, valid bounds")
            })
            .saturating_record(us);
    }
}

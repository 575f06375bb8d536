//! SCSI commands in progress.

use std::time::Duration;

use hashbrown::HashMap;
use rt::buf::BufsMut;
use rustc_hash::FxBuildHasher;
use slab::Slab;
use smallvec::SmallVec;

use super::action::Direction;
use super::read_transfer::ReadTransfer;
use crate::pdu::NO_TAG;
use crate::stream::{Tag, TaskBuffers};

/// One SCSI command, from its arrival until its status has been sent.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) itt: u32,
    pub(super) lun: [u8; 8],
    /// Whether it counts in the command window.
    pub(super) numbered: bool,
    pub(super) direction: Direction,
    /// Bytes the initiator expects to transfer.
    pub(super) expected: u32,
    pub(super) phase: TaskPhase,
    pub(super) disposition: Disposition,
    /// Whether the driver was asked to abort it.
    pub(super) abort_requested: bool,
    /// Pending actions about it.
    pub(super) queued: u8,
    /// Task management requests that wait for its end, one bit each.
    pub(super) awaited_by: u8,
    /// Total bytes the command takes, as the driver says.
    pub(super) presented: u64,
    /// Bytes of its data to receive: what it takes and the initiator has.
    pub(super) receive_len: u32,
    /// Bytes of memory requested and granted.
    pub(super) memory_requested: u32,
    pub(super) memory_granted: u32,
    pub(super) data: BufsMut,
    /// Whether immediate data is arriving.
    pub(super) immediate: bool,
    /// Length of the unsolicited data, immediate data included.
    pub(super) unsolicited: u32,
    /// Sequences of Data-Out PDUs that are expected.
    pub(super) data_out_sequences: SmallVec<[DataOutSequence; 1]>,
    /// First byte neither received nor requested.
    pub(super) next_unrequested: u32,
    /// R2Ts sent.
    pub(super) r2ts: u32,
    /// When data last arrived or was requested.
    pub(super) last_data_at: Duration,
    /// Its status, while data is still expected.
    pub(super) deferred_status: Option<DeferredStatus>,
    /// Its read data, while the output has no space for it.
    pub(super) read_transfer: Option<Box<ReadTransfer>>,
}

/// Phase of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskPhase {
    /// Waits for the driver's admission.
    Arrived,
    /// Its data is being received.
    Admitted,
    /// The driver executes it.
    Running,
    /// Completed by the driver, or never reported to it.
    Ended,
}

/// Which outcome the initiator gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disposition {
    /// The driver's.
    Live,
    /// This failure, whatever the driver says.
    Failed(TransferFault),
    /// None: it was aborted.
    Aborted,
}

/// Additional sense code and qualifier of a fault in the transfer; the sense key is ABORTED
/// COMMAND (RFC 7143 11.4.7.2, SPC-4 annex D).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TransferFault(pub(super) u8, pub(super) u8);

impl TransferFault {
    /// UNEXPECTED UNSOLICITED DATA.
    pub(super) const UNEXPECTED_DATA: Self = Self(0x0c, 0x0c);
    /// NOT ENOUGH UNSOLICITED DATA; "incorrect amount of data" in the RFC.
    pub(super) const AMOUNT: Self = Self(0x0c, 0x0d);
    /// PROTOCOL SERVICE CRC ERROR.
    pub(super) const DIGEST: Self = Self(0x47, 0x05);
    /// INVALID TARGET PORT TRANSFER TAG RECEIVED.
    pub(super) const TRANSFER_TAG: Self = Self(0x4b, 0x01);
    /// DATA OFFSET ERROR.
    pub(super) const OFFSET: Self = Self(0x4b, 0x05);
    /// INITIATOR RESPONSE TIMEOUT.
    pub(super) const TIMEOUT: Self = Self(0x4b, 0x06);

    /// Fixed-format sense data (SPC-4 4.5.3).
    pub(super) fn sense(self) -> [u8; 18] {
        let mut sense = [0; 18];
        (sense[0], sense[2], sense[7]) = (0x70, 0x0b, 10);
        (sense[12], sense[13]) = (self.0, self.1);
        sense
    }
}

/// A sequence of Data-Out PDUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DataOutSequence {
    /// The R2T it answers; [`NO_TAG`] for unsolicited data.
    pub(super) ttt: u32,
    /// Next byte.
    pub(super) at: u32,
    /// End (exclusive).
    pub(super) end: u32,
    /// Number of the next PDU.
    pub(super) data_sn: u32,
}

/// Status of a completed command whose data is still expected.
#[derive(Clone, Debug)]
pub(super) struct DeferredStatus {
    pub(super) status: u8,
    pub(super) sense: Box<[u8]>,
}

impl Task {
    /// Whether data from the initiator is expected.
    pub(super) fn expects_data(&self) -> bool {
        self.immediate || !self.data_out_sequences.is_empty()
    }

    /// Whether data up to `end` can be received or discarded.
    pub(super) fn can_receive_to(&self, end: u32) -> bool {
        let undecided = match self.phase {
            TaskPhase::Arrived => true,
            TaskPhase::Admitted => self.memory_granted < self.receive_len.min(end),
            TaskPhase::Running | TaskPhase::Ended => false,
        };
        !undecided || self.disposition != Disposition::Live
    }

    /// Whether unsolicited data may still arrive.
    pub(super) fn is_unsolicited(&self) -> bool {
        self.immediate || self.data_out_sequences.iter().any(|t| t.ttt == NO_TAG)
    }

    /// Memory for the bytes from `at` on; `None` to discard them.
    fn space(&mut self, at: usize, max: usize) -> Option<&mut [u8]> {
        let wanted = (self.receive_len as usize).checked_sub(at).filter(|&n| n > 0)?;
        if self.disposition != Disposition::Live {
            return None;
        }
        let (mut start, max) = (at, max.min(wanted));
        for part in &mut self.data {
            if start < part.len() {
                let end = part.len().min(start + max);
                return Some(&mut part[start..end]);
            }
            start -= part.len();
        }
        None
    }
}

/// All commands in progress, by tag and by initiator task tag.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    slab: Slab<Task>,
    by_itt: HashMap<u32, Tag, FxBuildHasher>,
}

impl Tasks {
    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    pub(super) fn insert(&mut self, task: Task) -> Tag {
        let itt = task.itt;
        let tag = Tag(u32::try_from(self.slab.insert(task)).expect("bounded by the window"));
        self.by_itt.insert(itt, tag);
        tag
    }

    pub(super) fn remove(&mut self, tag: Tag) -> Option<Task> {
        let task = self.slab.try_remove(tag.0 as usize)?;
        self.by_itt.remove(&task.itt);
        Some(task)
    }

    pub(super) fn get(&mut self, tag: Tag) -> Option<&mut Task> {
        self.slab.get_mut(tag.0 as usize)
    }

    pub(super) fn find(&self, itt: u32) -> Option<Tag> {
        self.by_itt.get(&itt).copied()
    }

    /// Tags of all commands for which `which` holds.
    pub(super) fn select(&self, which: impl Fn(&Task) -> bool) -> Vec<Tag> {
        let tag = |key| Tag(u32::try_from(key).expect("tags are 32 bits"));
        self.slab.iter().filter(|(_, t)| which(t)).map(|(key, _)| tag(key)).collect()
    }

    /// Start of the longest wait among commands that expect Data-Out PDUs.
    pub(super) fn longest_wait(&self) -> Option<Duration> {
        let waiting = self.slab.iter().filter(|(_, t)| !t.data_out_sequences.is_empty());
        waiting.map(|(_, t)| t.last_data_at).min()
    }
}

impl TaskBuffers for Tasks {
    fn space(&mut self, tag: Tag, at: usize, max: usize) -> Option<&mut [u8]> {
        self.get(tag)?.space(at, max)
    }
}

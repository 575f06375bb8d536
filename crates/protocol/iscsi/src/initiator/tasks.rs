//! Requests in flight: a dense slab, so that a tag, and the task tag made from it, is an index.

use std::time::Duration;

use rt::buf::{Bufs, BufsMut};

use crate::pdu::NO_TAG;
use crate::sequence_number::SequenceNumber;
use crate::stream::{Tag, TaskBuffers};

/// Low bits of an initiator task tag, which select the slot; the others count its uses.
const SLOT_BITS: u32 = 12;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;

/// Kind of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum TaskKind {
    #[default]
    Scsi,
    /// ABORT TASK.
    Abort(Tag),
    /// LOGICAL UNIT RESET.
    ResetUnit([u8; 8]),
    Ping,
    /// A ping of the machine itself.
    KeepAlive,
    Text,
    Logout,
    /// A logout requested by the target.
    RequestedLogout,
}

impl TaskKind {
    /// Whether a caller waits for it.
    pub(super) fn is_from_caller(self) -> bool {
        !matches!(self, Self::KeepAlive | Self::RequestedLogout)
    }
}

#[derive(Debug, Default)]
pub(super) struct Task {
    pub(super) kind: TaskKind,
    pub(super) lun: [u8; 8],
    pub(super) cdb: [u8; 16],
    /// Position in the command order, once sent.
    pub(super) cmd_sn: SequenceNumber,
    /// Data for the target.
    pub(super) outgoing: Bufs,
    /// Bytes of it that were sent unsolicited or requested.
    pub(super) solicited_bytes: u32,
    /// R2Ts received, and those not fully answered.
    pub(super) r2ts: u32,
    pub(super) open_r2ts: u16,
    /// Data from the target.
    pub(super) incoming: BufsMut,
    /// Size of the buffers, and bytes received.
    pub(super) capacity: u32,
    pub(super) received_bytes: u32,
    /// Data-In PDUs received.
    pub(super) data_in_pdus: u32,
    /// Current buffer: its index and the offset where it begins.
    pub(super) cursor: (usize, usize),
    /// Position of its PDU in the output stream; `None`: not sent yet.
    pub(super) queued_at: Option<u64>,
    /// End of its queued data in the output stream.
    pub(super) queued_end: u64,
    /// Deadline of its answer.
    pub(super) deadline: Option<Duration>,
}

impl Task {
    /// Bytes of its data transferred.
    pub(super) fn transferred(&self) -> u32 {
        self.solicited_bytes.max(self.received_bytes)
    }

    /// Takes back its requested, unsent data: all from `first` on, and queued data beyond the first
    /// `sent` bytes of the stream. The target has not received it, whatever it says.
    pub(super) fn retract_unsent(&mut self, first: Option<u32>, sent: u64) {
        let unsent = u32::try_from(self.queued_end.saturating_sub(sent)).unwrap_or(u32::MAX);
        let asked = first.map_or(self.solicited_bytes, |first| self.solicited_bytes.min(first));
        self.solicited_bytes = asked.saturating_sub(unsent);
    }

    /// Total length of its data.
    pub(super) fn expected(&self) -> u32 {
        self.capacity.max(u32::try_from(self.outgoing.len()).expect("shorter than 4 GiB"))
    }

    /// Whether it is a command that was sent before the request that was sent `then`.
    pub(super) fn was_sent_before(&self, then: Option<u64>) -> bool {
        self.kind == TaskKind::Scsi
            && self.queued_at.is_some_and(|at| then.is_some_and(|then| at < then))
    }

    fn space(&mut self, at: usize, max: usize) -> Option<&mut [u8]> {
        if at < self.cursor.1 {
            self.cursor = (0, 0);
        }
        while let Some(part) = self.incoming.get(self.cursor.0)
            && at >= self.cursor.1 + part.len()
        {
            self.cursor = (self.cursor.0 + 1, self.cursor.1 + part.len());
        }
        let (index, begin) = self.cursor;
        let part = self.incoming.get_mut(index)?;
        let start = at - begin;
        let end = part.len().min(start.saturating_add(max));
        part.get_mut(start..end).filter(|space| !space.is_empty())
    }
}

/// Data still to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataOutSequence {
    pub(super) tag: Tag,
    /// The R2T it answers; [`NO_TAG`] for unsolicited data.
    pub(super) ttt: u32,
    /// The part of the command's data.
    pub(super) at: u32,
    pub(super) end: u32,
    /// Number of the next PDU.
    pub(super) data_sn: u32,
}

#[derive(Debug)]
struct Slot {
    itt: u32,
    task: Option<Task>,
}

/// The requests in flight.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Those that are SCSI commands.
    commands: usize,
}

impl Tasks {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// SCSI commands in flight.
    pub(super) fn commands(&self) -> usize {
        self.commands
    }

    /// Requests in flight that are no SCSI commands.
    pub(super) fn non_scsi(&self) -> usize {
        self.len() - self.commands
    }

    /// Occupies a slot. The caller limits their number.
    pub(super) fn insert(&mut self, task: Task) -> Tag {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = u32::try_from(self.slots.len()).expect("few thousand slots");
            self.slots.push(Slot { itt: index, task: None });
            index
        });
        let slot = &mut self.slots[index as usize];
        slot.itt = slot.itt.wrapping_add(1 << SLOT_BITS);
        if slot.itt == NO_TAG {
            slot.itt = slot.itt.wrapping_add(1 << SLOT_BITS);
        }
        self.commands += usize::from(task.kind == TaskKind::Scsi);
        slot.task = Some(task);
        Tag(index)
    }

    /// The request in flight with this task tag.
    pub(super) fn find(&self, itt: u32) -> Option<Tag> {
        let tag = Tag(itt & SLOT_MASK);
        let slot = self.slots.get(tag.0 as usize)?;
        (slot.itt == itt && slot.task.is_some()).then_some(tag)
    }

    /// The task tag of the request in a slot, or of the last one in it.
    pub(super) fn itt(&self, tag: Tag) -> u32 {
        self.slots.get(tag.0 as usize).map_or(NO_TAG, |slot| slot.itt)
    }

    pub(super) fn get(&mut self, tag: Tag) -> Option<&mut Task> {
        self.slots.get_mut(tag.0 as usize)?.task.as_mut()
    }

    /// Frees the slot of a request in flight.
    pub(super) fn remove(&mut self, tag: Tag) -> Option<Task> {
        let task = self.slots.get_mut(tag.0 as usize)?.task.take()?;
        self.free.push(tag.0);
        self.commands -= usize::from(task.kind == TaskKind::Scsi);
        Some(task)
    }

    /// Requests in flight for which `which` holds.
    pub(super) fn select(&self, which: impl Fn(&Task) -> bool) -> Vec<Tag> {
        let slots = self.slots.iter().zip(0u32..);
        let taken = slots.filter(|(slot, _)| slot.task.as_ref().is_some_and(&which));
        taken.map(|(_, index)| Tag(index)).collect()
    }

    /// The earliest deadline.
    pub(super) fn first_deadline(&self) -> Option<Duration> {
        self.slots.iter().filter_map(|s| s.task.as_ref()?.deadline).min()
    }
}

impl TaskBuffers for Tasks {
    fn space(&mut self, tag: Tag, at: usize, max: usize) -> Option<&mut [u8]> {
        self.get(tag)?.space(at, max)
    }
}

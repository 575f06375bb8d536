//! Requests in flight: a dense slab, so that a tag, and the task tag that is made of it, is an index.

use std::time::Duration;

use rt::buf::{Bufs, BufsMut};

use crate::pdu::NO_TAG;
use crate::serial::Serial;
use crate::stream::{Owners, Tag};

/// Bits of an initiator task tag that tell the slot; those above count how often it was used.
const SLOT_BITS: u32 = 12;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;

/// What a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Kind {
    #[default]
    Scsi,
    /// ABORT TASK.
    Abort(Tag),
    /// LOGICAL UNIT RESET.
    ResetUnit([u8; 8]),
    Ping,
    /// A ping that nobody has asked for.
    KeepAlive,
    Text,
    Logout,
    /// A logout that the target has asked for.
    Leave,
}

impl Kind {
    /// Whether a caller waits for the end.
    pub(super) fn is_asked(self) -> bool {
        !matches!(self, Self::KeepAlive | Self::Leave)
    }
}

#[derive(Debug, Default)]
pub(super) struct Task {
    pub(super) kind: Kind,
    pub(super) lun: [u8; 8],
    pub(super) cdb: [u8; 16],
    /// Place in the command order, once sent.
    pub(super) cmd_sn: Serial,
    /// Data for the target.
    pub(super) outgoing: Bufs,
    /// Bytes of it that were sent unasked or have been asked for.
    pub(super) asked: u32,
    /// R2Ts that have come, and those of them that have not been answered in full.
    pub(super) r2ts: u32,
    pub(super) open_r2ts: u16,
    /// Data from the target.
    pub(super) incoming: BufsMut,
    /// Bytes that there is room for, and those that have come.
    pub(super) room: u32,
    pub(super) filled: u32,
    /// Data-In PDUs that have come.
    pub(super) data_ins: u32,
    /// The buffer that data has come to: its index and where it begins.
    pub(super) cursor: (usize, usize),
    /// Where in what is sent its PDU begins; `None`: it waits for its turn.
    pub(super) at: Option<u64>,
    /// Where in what is sent ends what has been put there of it.
    pub(super) end: u64,
    /// When it has to be answered.
    pub(super) deadline: Option<Duration>,
}

impl Task {
    /// Bytes of its data that have been moved.
    pub(super) fn moved(&self) -> u32 {
        self.asked.max(self.filled)
    }

    /// Takes back what was asked for of its data and has not been sent: all from `first` on, and what has been put together
    /// of it behind the first `sent` bytes. The target does not have it, whatever it says.
    pub(super) fn withhold(&mut self, first: Option<u32>, sent: u64) {
        let unsent = u32::try_from(self.end.saturating_sub(sent)).unwrap_or(u32::MAX);
        let asked = first.map_or(self.asked, |first| self.asked.min(first));
        self.asked = asked.saturating_sub(unsent);
    }

    /// Bytes of its data in all.
    pub(super) fn expected(&self) -> u32 {
        self.room.max(u32::try_from(self.outgoing.len()).expect("shorter than 4 GiB"))
    }

    /// Whether it is a command that was sent before the request that was sent `then`.
    pub(super) fn was_sent_before(&self, then: Option<u64>) -> bool {
        self.kind == Kind::Scsi && self.at.is_some_and(|at| then.is_some_and(|then| at < then))
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

/// Data that is to be sent yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
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
    pub(super) fn others(&self) -> usize {
        self.len() - self.commands
    }

    /// Takes a slot. The caller bounds how many are taken.
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
        self.commands += usize::from(task.kind == Kind::Scsi);
        slot.task = Some(task);
        Tag(index)
    }

    /// The request in flight that has this task tag.
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
        self.commands -= usize::from(task.kind == Kind::Scsi);
        Some(task)
    }

    /// Those in flight for which `which` holds.
    pub(super) fn select(&self, which: impl Fn(&Task) -> bool) -> Vec<Tag> {
        let slots = self.slots.iter().zip(0u32..);
        let taken = slots.filter(|(slot, _)| slot.task.as_ref().is_some_and(&which));
        taken.map(|(_, index)| Tag(index)).collect()
    }

    /// When the first of them has to be answered.
    pub(super) fn first_deadline(&self) -> Option<Duration> {
        self.slots.iter().filter_map(|s| s.task.as_ref()?.deadline).min()
    }
}

impl Owners for Tasks {
    fn space(&mut self, tag: Tag, at: usize, max: usize) -> Option<&mut [u8]> {
        self.get(tag)?.space(at, max)
    }
}

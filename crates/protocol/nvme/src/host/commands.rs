//! Commands in flight: a dense slab, so that a tag, and the identifier made from it, is an index.

use std::time::Duration;

use block::Bufs;

use super::Payload;
use crate::stream::{CommandBuffers, IncomingData, Tag};

/// Low bits of a command identifier, which select the slot; the others count its uses.
const SLOT_BITS: u16 = 12;
const SLOT_MASK: u16 = (1 << SLOT_BITS) - 1;

#[derive(Debug, Default)]
pub(super) struct Command {
    /// Data for the controller.
    pub(super) outgoing: Bufs,
    /// Bytes of it that were sent in the capsule or requested.
    pub(super) solicited_bytes: u32,
    /// Data from the controller.
    pub(super) incoming: IncomingData,
    /// Size of the buffers in bytes.
    pub(super) capacity: u32,
    /// The last data PDU has arrived.
    pub(super) last_received: bool,
    /// Its SUCCESS flag was set.
    pub(super) success_flag: bool,
    /// Number of R2Ts not fully answered.
    pub(super) r2ts: u32,
    /// Position of its capsule in the output stream.
    pub(super) queued_at: u64,
    /// End of its queued data in the output stream.
    pub(super) queued_end: u64,
    /// Deadline of its answer.
    pub(super) deadline: Option<Duration>,
}

impl Command {
    /// Bytes of its data transferred.
    pub(super) fn transferred(&self) -> u32 {
        self.solicited_bytes.max(self.incoming.received)
    }

    /// Its queued bytes that are unsent when the stream has been sent up to `sent`.
    pub(super) fn unsent(&self, sent: u64) -> u32 {
        u32::try_from(self.queued_end.saturating_sub(sent)).unwrap_or(u32::MAX)
    }
}

/// An R2T not fully answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingR2t {
    pub(super) tag: Tag,
    /// The controller's tag.
    pub(super) ttag: u16,
    /// The part of the command's data still to be sent.
    pub(super) at: u32,
    pub(super) end: u32,
}

#[derive(Debug)]
struct Slot {
    cid: u16,
    command: Option<Command>,
}

/// The commands in flight.
#[derive(Debug, Default)]
pub(super) struct Commands {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

impl Commands {
    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Occupies a slot and returns the identifier. The caller limits their number.
    pub(super) fn insert(
        &mut self,
        payload: Payload,
        in_capsule: bool,
        at: u64,
        deadline: Option<Duration>,
    ) -> (Tag, u16) {
        let length = u32::try_from(payload.len()).expect("shorter than 4 GiB");
        let mut command = Command { queued_at: at, deadline, ..Command::default() };
        match payload {
            Payload::None => {}
            Payload::ToController(_) if in_capsule => command.solicited_bytes = length,
            Payload::ToController(data) => command.outgoing = data,
            Payload::ToHost(buffers) => {
                command.incoming = IncomingData::new(buffers);
                command.capacity = length;
            }
        }
        let index = self.free.pop().unwrap_or_else(|| {
            let index = u16::try_from(self.slots.len()).expect("a queue has at most 4095 entries");
            self.slots.push(Slot { cid: index, command: None });
            index
        });
        let slot = &mut self.slots[usize::from(index)];
        slot.cid = slot.cid.wrapping_add(1 << SLOT_BITS);
        slot.command = Some(command);
        (Tag(index), slot.cid)
    }

    /// The command in flight with this identifier, if it begins before byte `sent` of the output
    /// stream.
    pub(super) fn find(&self, cid: u16, sent: u64) -> Option<Tag> {
        let tag = Tag(cid & SLOT_MASK);
        let slot = self.slots.get(tag.index())?;
        let begins = slot.command.as_ref().is_some_and(|command| command.queued_at < sent);
        (slot.cid == cid && begins).then_some(tag)
    }

    /// The identifier of the command in a slot, or of the last one in it.
    pub(super) fn cid(&self, tag: Tag) -> u16 {
        self.slots[tag.index()].cid
    }

    pub(super) fn get_mut(&mut self, tag: Tag) -> Option<&mut Command> {
        self.slots.get_mut(tag.index())?.command.as_mut()
    }

    /// Records that the command's queued data ends at byte `end` of the output stream.
    pub(super) fn set_queued_end(&mut self, tag: Tag, end: u64) {
        if let Some(command) = self.get_mut(tag) {
            command.queued_end = end;
        }
    }

    /// An R2T of the command has been answered.
    pub(super) fn r2t_answered(&mut self, tag: Tag) {
        if let Some(command) = self.get_mut(tag) {
            command.r2ts -= 1;
        }
    }

    /// Frees the slot of a command in flight.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn remove(&mut self, tag: Tag) -> Command {
        let command = self.slots[tag.index()].command.take().expect("the command is in flight");
        self.free.push(tag.0);
        command
    }

    /// Removes all commands in flight.
    pub(super) fn drain(&mut self) -> Vec<(Tag, Command)> {
        let mut out = Vec::with_capacity(self.in_flight());
        for (slot, index) in self.slots.iter_mut().zip(0u16..) {
            if let Some(command) = slot.command.take() {
                out.push((Tag(index), command));
                self.free.push(index);
            }
        }
        out
    }

    /// The earliest deadline.
    pub(super) fn first_deadline(&self) -> Option<Duration> {
        self.slots.iter().filter_map(|s| s.command.as_ref()?.deadline).min()
    }
}

impl CommandBuffers for Commands {
    fn incoming(&mut self, tag: Tag) -> Option<&mut IncomingData> {
        self.get_mut(tag).map(|c| &mut c.incoming)
    }
}

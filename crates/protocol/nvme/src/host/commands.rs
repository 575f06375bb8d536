//! Commands in flight: a dense slab, so that a tag, and the identifier that is made of it, is an index.

use std::time::Duration;

use block::Bufs;

use super::Payload;
use crate::stream::{Incoming, Owners, Tag};

/// Bits of a command identifier that tell the slot; those above count how often it was used.
const SLOT_BITS: u16 = 12;
const SLOT_MASK: u16 = (1 << SLOT_BITS) - 1;

#[derive(Debug, Default)]
pub(super) struct Command {
    /// Data for the controller.
    pub(super) outgoing: Bufs,
    /// Bytes of it that were sent in the capsule or have been asked for.
    pub(super) asked: u32,
    /// Data from the controller.
    pub(super) incoming: Incoming,
    /// Bytes that there is room for.
    pub(super) room: u32,
    /// The last data PDU has come.
    pub(super) last: bool,
    /// It said that the command has succeeded.
    pub(super) succeeds: bool,
    /// R2Ts that have not been answered in full.
    pub(super) r2ts: u32,
    /// Where in what is sent its capsule begins.
    pub(super) at: u64,
    /// Where in what is sent ends what has been put there of it.
    pub(super) end: u64,
    /// When it has to be answered.
    pub(super) deadline: Option<Duration>,
}

impl Command {
    /// Bytes of its data that have been moved.
    pub(super) fn moved(&self) -> u32 {
        self.asked.max(self.incoming.filled)
    }

    /// Bytes that are still to be sent of what has been put together of it, when all before `sent` is sent.
    pub(super) fn unsent(&self, sent: u64) -> u32 {
        u32::try_from(self.end.saturating_sub(sent)).unwrap_or(u32::MAX)
    }
}

/// An R2T that has not been answered in full.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) tag: Tag,
    /// The controller's tag.
    pub(super) ttag: u16,
    /// The part of the command's data that is to be sent yet.
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

    /// Takes a slot, and gives its identifier. The caller bounds how many are taken.
    pub(super) fn insert(
        &mut self,
        payload: Payload,
        in_capsule: bool,
        at: u64,
        deadline: Option<Duration>,
    ) -> (Tag, u16) {
        let length = u32::try_from(payload.len()).expect("shorter than 4 GiB");
        let mut command = Command { at, deadline, ..Command::default() };
        match payload {
            Payload::None => {}
            Payload::ToController(_) if in_capsule => command.asked = length,
            Payload::ToController(data) => command.outgoing = data,
            Payload::ToHost(buffers) => {
                command.incoming = Incoming::new(buffers);
                command.room = length;
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

    /// The command in flight that has this identifier, if it begins before byte `sent` of what is sent.
    pub(super) fn find(&self, cid: u16, sent: u64) -> Option<Tag> {
        let tag = Tag(cid & SLOT_MASK);
        let slot = self.slots.get(tag.index())?;
        let begins = slot.command.as_ref().is_some_and(|command| command.at < sent);
        (slot.cid == cid && begins).then_some(tag)
    }

    /// The identifier of the command in a slot, or of the last one in it.
    pub(super) fn cid(&self, tag: Tag) -> u16 {
        self.slots[tag.index()].cid
    }

    pub(super) fn get_mut(&mut self, tag: Tag) -> Option<&mut Command> {
        self.slots.get_mut(tag.index())?.command.as_mut()
    }

    /// What has been put together of the command ends at byte `end` of what is sent.
    pub(super) fn ends(&mut self, tag: Tag, end: u64) {
        if let Some(command) = self.get_mut(tag) {
            command.end = end;
        }
    }

    /// An R2T of the command has been answered.
    pub(super) fn answered(&mut self, tag: Tag) {
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

    /// All that are in flight, and no more.
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

    /// When the first of them has to be answered.
    pub(super) fn first_deadline(&self) -> Option<Duration> {
        self.slots.iter().filter_map(|s| s.command.as_ref()?.deadline).min()
    }
}

impl Owners for Commands {
    fn incoming(&mut self, tag: Tag) -> Option<&mut Incoming> {
        self.get_mut(tag).map(|c| &mut c.incoming)
    }
}

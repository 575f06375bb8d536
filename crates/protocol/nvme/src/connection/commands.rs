//! Commands in flight on one connection: a dense slab, so that a tag is an index.

use std::time::Duration;

use super::Tag;
use crate::entry::Completion;
use crate::stream::{CommandBuffers, IncomingData};

/// Stage of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandStage {
    /// Waits for the driver to admit it.
    Arrived,
    /// Waits for memory.
    Granting,
    /// Its data is arriving.
    Receiving,
    /// Being executed.
    Running,
    /// Already answered; the driver does not know yet.
    Answered,
}

#[derive(Debug)]
pub(super) struct Command {
    pub(super) cid: u16,
    pub(super) stage: CommandStage,
    /// Whether the command returns data.
    pub(super) to_host: bool,
    /// Whether the capsule contains the data.
    pub(super) in_capsule: bool,
    /// Size in bytes of the buffer that the host described.
    pub(super) host_bytes: u32,
    /// When the R2T was sent.
    pub(super) r2t_sent_at: Duration,
    pub(super) incoming: IncomingData,
    /// Its completion, if known before all solicited data has arrived.
    pub(super) early_completion: Option<Completion>,
}

/// The commands in flight.
#[derive(Debug, Default)]
pub(super) struct Commands {
    slots: Vec<Option<Command>>,
    cids: Cids,
    free: Vec<u16>,
}

/// Identifiers in use, against which each new command is checked. A bitmap of 8 KiB, allocated with
/// the first command.
#[derive(Debug, Default)]
struct Cids(Vec<u64>);

impl Cids {
    fn contains(&self, cid: u16) -> bool {
        let word = self.0.get(usize::from(cid) / 64);
        word.is_some_and(|word| word & (1 << (cid % 64)) != 0)
    }

    fn set(&mut self, cid: u16, used: bool) {
        if self.0.is_empty() {
            self.0 = vec![0; (usize::from(u16::MAX) + 1) / 64];
        }
        let (word, bit) = (&mut self.0[usize::from(cid) / 64], 1 << (cid % 64));
        *word = if used { *word | bit } else { *word & !bit };
    }
}

impl Commands {
    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether a command in flight has this identifier.
    pub(super) fn contains(&self, cid: u16) -> bool {
        self.cids.contains(cid)
    }

    /// The command with this identifier: for the rare commands that name another.
    pub(super) fn find(&self, cid: u16) -> Option<Tag> {
        let is_it = |slot: &Option<Command>| slot.as_ref().is_some_and(|c| c.cid == cid);
        let index = self.slots.iter().position(is_it)?;
        u16::try_from(index).ok().map(Tag)
    }

    /// Occupies a slot. The caller limits their number (to at most 65,536).
    pub(super) fn insert(&mut self, command: Command) -> Tag {
        self.cids.set(command.cid, true);
        if let Some(index) = self.free.pop() {
            self.slots[usize::from(index)] = Some(command);
            return Tag(index);
        }
        let index = u16::try_from(self.slots.len()).expect("a queue has at most 65,536 entries");
        self.slots.push(Some(command));
        Tag(index)
    }

    pub(super) fn get_mut(&mut self, tag: Tag) -> Option<&mut Command> {
        self.slots.get_mut(tag.index())?.as_mut()
    }

    /// Frees the slot of a command in flight.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn remove(&mut self, tag: Tag) -> Command {
        let command = self.slots[tag.index()].take().expect("the command is in flight");
        self.cids.set(command.cid, false);
        self.free.push(tag.0);
        command
    }

    /// Frees the slots of commands that the driver has completed and that only wait for data of the
    /// host.
    pub(super) fn forget_ended(&mut self) {
        for (slot, index) in self.slots.iter_mut().zip(0u16..) {
            if let Some(ended) = slot.take_if(|c| c.early_completion.is_some()) {
                self.cids.set(ended.cid, false);
                self.free.push(index);
            }
        }
    }

    /// When the longest outstanding R2T was sent.
    pub(super) fn oldest_transfer(&self) -> Option<Duration> {
        let waits = |c: &&Command| c.stage == CommandStage::Receiving && !c.in_capsule;
        self.slots.iter().flatten().filter(waits).map(|c| c.r2t_sent_at).min()
    }
}

impl CommandBuffers for Commands {
    fn incoming(&mut self, tag: Tag) -> Option<&mut IncomingData> {
        self.get_mut(tag).map(|c| &mut c.incoming)
    }
}

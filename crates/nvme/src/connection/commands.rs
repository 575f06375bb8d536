//! Commands in flight on one connection: a dense slab, so that a tag is an index.

use std::time::Duration;

use super::Tag;
use crate::entry::Completion;
use crate::stream::{Incoming, Owners};

/// How far a command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits for the driver to admit it.
    Arrived,
    /// Waits for memory.
    Granting,
    /// Its data is on the way.
    Receiving,
    /// Being carried out.
    Running,
    /// The host has its answer already; the driver does not know yet.
    Told,
}

#[derive(Debug)]
pub(super) struct Command {
    pub(super) cid: u16,
    pub(super) stage: Stage,
    /// Whether the command returns data.
    pub(super) to_host: bool,
    /// Whether the capsule brings the data.
    pub(super) in_capsule: bool,
    /// Size in bytes of the buffer that the host described.
    pub(super) host_bytes: u32,
    /// When data was asked for by R2T.
    pub(super) since: Duration,
    pub(super) data: Incoming,
    /// How the command ended, when that was known before the host had sent what it was asked for.
    pub(super) outcome: Option<Completion>,
}

const FREE: u32 = u32::MAX;

/// The commands in flight.
#[derive(Debug, Default)]
pub(super) struct Commands {
    slots: Vec<Option<Command>>,
    /// Their identifiers, dense for a quick search; [`FREE`] where a slot is empty.
    cids: Vec<u32>,
    free: Vec<u16>,
}

impl Commands {
    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn find(&self, cid: u16) -> Option<Tag> {
        let index = self.cids.iter().position(|&c| c == u32::from(cid))?;
        u16::try_from(index).ok().map(Tag)
    }

    /// Takes a slot. The caller bounds how many are taken (to at most 65,536).
    pub(super) fn insert(&mut self, command: Command) -> Tag {
        let cid = u32::from(command.cid);
        if let Some(index) = self.free.pop() {
            self.slots[usize::from(index)] = Some(command);
            self.cids[usize::from(index)] = cid;
            return Tag(index);
        }
        let index = u16::try_from(self.slots.len()).expect("a queue has at most 65,536 entries");
        self.slots.push(Some(command));
        self.cids.push(cid);
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
        self.cids[tag.index()] = FREE;
        self.free.push(tag.0);
        command
    }

    /// Frees the slots of commands that the driver has ended and that only wait for their host.
    pub(super) fn forget_ended(&mut self) {
        for (slot, index) in self.slots.iter_mut().zip(0u16..) {
            if slot.as_ref().is_some_and(|c| c.outcome.is_some()) {
                *slot = None;
                self.cids[usize::from(index)] = FREE;
                self.free.push(index);
            }
        }
    }

    /// When the longest outstanding R2T was sent.
    pub(super) fn oldest_transfer(&self) -> Option<Duration> {
        let waits = |c: &&Command| c.stage == Stage::Receiving && !c.in_capsule;
        self.slots.iter().flatten().filter(waits).map(|c| c.since).min()
    }
}

impl Owners for Commands {
    fn incoming(&mut self, tag: Tag) -> Option<&mut Incoming> {
        self.get_mut(tag).map(|c| &mut c.data)
    }
}

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

/// The commands in flight.
#[derive(Debug, Default)]
pub(super) struct Commands {
    slots: Vec<Option<Command>>,
    cids: Cids,
    free: Vec<u16>,
}

/// Identifiers in use: each command that arrives is held against all that are in flight. A bit for
/// each there is, 8 KiB once one has come.
#[derive(Debug, Default)]
struct Cids(Vec<u64>);

impl Cids {
    fn has(&self, cid: u16) -> bool {
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
    pub(super) fn has(&self, cid: u16) -> bool {
        self.cids.has(cid)
    }

    /// The command with this identifier: for the rare ones that name another.
    pub(super) fn find(&self, cid: u16) -> Option<Tag> {
        let is_it = |slot: &Option<Command>| slot.as_ref().is_some_and(|c| c.cid == cid);
        let index = self.slots.iter().position(is_it)?;
        u16::try_from(index).ok().map(Tag)
    }

    /// Takes a slot. The caller bounds how many are taken (to at most 65,536).
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

    /// Frees the slots of commands that the driver has ended and that only wait for their host.
    pub(super) fn forget_ended(&mut self) {
        for (slot, index) in self.slots.iter_mut().zip(0u16..) {
            if let Some(ended) = slot.take_if(|c| c.outcome.is_some()) {
                self.cids.set(ended.cid, false);
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

//! Commands in flight: a dense slab, so that a tag, and the cookie made from it, is an index.

use std::time::Duration;

use block::BufsMut;

use crate::message::{Cmd, Errno};
use crate::{BlockStatusExtent, Tag};

/// Low bits of a cookie, which select the slot; the others count the slot's uses, so that cookies
/// of a connection are unique.
const SLOT_BITS: u32 = 16;

/// Most pieces, with gaps between them, in which a server may send a read.
const MAX_PIECES: usize = 1024;

/// A position in the buffers of a read: buffer index and offset in it.
pub(super) type BufferPosition = (usize, usize);

#[derive(Debug)]
pub(super) struct Command {
    pub(super) kind: Cmd,
    pub(super) at: u64,
    pub(super) len: u32,
    /// Buffers of a read.
    pub(super) buffers: BufsMut,
    pub(super) received: ReceivedRanges,
    pub(super) extent: Option<BlockStatusExtent>,
    pub(super) error: Option<Errno>,
    /// Whether a chunk of its reply has arrived.
    pub(super) begun: bool,
    pub(super) deadline: Option<Duration>,
}

impl Default for Command {
    fn default() -> Self {
        Self {
            kind: Cmd::Read,
            at: 0,
            len: 0,
            buffers: BufsMut::new(),
            received: ReceivedRanges::default(),
            extent: None,
            error: None,
            begun: false,
            deadline: None,
        }
    }
}

impl Command {
    /// The buffer position of byte `position` of the read.
    pub(super) fn position_of(&self, position: u32) -> BufferPosition {
        let mut offset = position as usize;
        for (index, buffer) in self.buffers.iter().enumerate() {
            if offset < buffer.len() {
                return (index, offset);
            }
            offset -= buffer.len();
        }
        (self.buffers.len(), 0)
    }

    /// Zeroes `len` bytes from `position` on.
    pub(super) fn zero(&mut self, position: u32, len: u32) {
        let (mut index, mut offset) = self.position_of(position);
        let mut left = len as usize;
        while left > 0
            && let Some(buffer) = self.buffers.get_mut(index)
        {
            let end = buffer.len().min(offset + left);
            buffer[offset..end].fill(0);
            left -= end - offset;
            (index, offset) = (index + 1, 0);
        }
    }
}

/// The received parts of a read, in order, with gaps between them.
#[derive(Debug, Default)]
pub(super) struct ReceivedRanges(Vec<(u32, u32)>);

impl ReceivedRanges {
    /// Records that `start..end` has arrived. False if a part of it had already, or if there are
    /// too many pieces.
    pub(super) fn add(&mut self, start: u32, end: u32) -> bool {
        let next = self.0.partition_point(|&(s, _)| s < start);
        let before = next.checked_sub(1).map(|i| self.0[i]);
        let after = self.0.get(next).copied();
        if before.is_some_and(|(_, e)| e > start) || after.is_some_and(|(s, _)| s < end) {
            return false;
        }
        match (before.filter(|b| b.1 == start), after.filter(|a| a.0 == end)) {
            (Some(_), Some((_, e))) => {
                self.0[next - 1].1 = e;
                self.0.remove(next);
            }
            (Some(_), None) => self.0[next - 1].1 = end,
            (None, Some(_)) => self.0[next].0 = start,
            (None, None) => self.0.insert(next, (start, end)),
        }
        self.0.len() <= MAX_PIECES
    }

    /// Whether all of `0..len` has arrived.
    pub(super) fn is_whole(&self, len: u32) -> bool {
        self.0 == [(0, len)]
    }
}

#[derive(Debug)]
struct Slot {
    uses: u64,
    command: Option<Command>,
}

/// The commands in flight.
#[derive(Debug, Default)]
pub(super) struct Commands {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

impl Commands {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds a command and returns its cookie. The caller limits their number.
    pub(super) fn insert(&mut self, command: Command) -> (Tag, u64) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { uses: 0, command: None });
            u16::try_from(self.slots.len() - 1).expect("there are at most 4096")
        });
        let slot = &mut self.slots[usize::from(index)];
        slot.uses += 1;
        slot.command = Some(command);
        (Tag(index), slot.uses << SLOT_BITS | u64::from(index))
    }

    /// The command in flight with this cookie.
    pub(super) fn find(&self, cookie: u64) -> Option<Tag> {
        let index = u16::try_from(cookie & ((1 << SLOT_BITS) - 1)).ok()?;
        let slot = self.slots.get(usize::from(index))?;
        (slot.uses == cookie >> SLOT_BITS && slot.command.is_some()).then_some(Tag(index))
    }

    pub(super) fn get_mut(&mut self, tag: Tag) -> Option<&mut Command> {
        self.slots.get_mut(tag.index())?.command.as_mut()
    }

    pub(super) fn remove(&mut self, tag: Tag) -> Option<Command> {
        let command = self.slots.get_mut(tag.index())?.command.take()?;
        self.free.push(tag.0);
        Some(command)
    }

    /// Removes all commands in flight.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Tag> {
        let mut out = Vec::with_capacity(self.len());
        for (slot, index) in self.slots.iter_mut().zip(0u16..) {
            if slot.command.take().is_some() {
                self.free.push(index);
                out.push(Tag(index));
            }
        }
        out.into_iter()
    }

    /// The earliest deadline.
    pub(super) fn first_deadline(&self) -> Option<Duration> {
        self.slots.iter().filter_map(|s| s.command.as_ref()?.deadline).min()
    }

    /// The buffer space from a position on, at most `left` bytes.
    pub(super) fn space(
        &mut self,
        tag: Tag,
        position: BufferPosition,
        left: u32,
    ) -> Option<&mut [u8]> {
        let buffer = self.get_mut(tag)?.buffers.get_mut(position.0)?;
        let end = buffer.len().min(position.1.saturating_add(left as usize));
        buffer.get_mut(position.1..end).filter(|s| !s.is_empty())
    }

    /// The position after `n` received bytes.
    pub(super) fn advance(
        &mut self,
        tag: Tag,
        position: BufferPosition,
        n: usize,
    ) -> BufferPosition {
        let full = self.get_mut(tag).and_then(|c| c.buffers.get(position.0)).map_or(0, |b| b.len());
        if position.1 + n >= full { (position.0 + 1, 0) } else { (position.0, position.1 + n) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_and_never_overlap() {
        let mut covered = ReceivedRanges::default();
        assert!(covered.add(10, 20) && covered.add(30, 40) && covered.add(0, 5));
        for (start, end) in [(0, 1), (4, 6), (9, 11), (15, 16), (19, 31), (5, 41), (39, 50)] {
            assert!(!covered.add(start, end), "{start}..{end}");
        }
        assert!(!covered.is_whole(40));
        assert!(covered.add(20, 30) && covered.add(5, 10));
        assert!(covered.is_whole(40) && !covered.is_whole(41));
        let mut covered = ReceivedRanges::default();
        assert!((0..1024).all(|i| covered.add(2 * i, 2 * i + 1)));
        assert!(!covered.add(4096, 4097), "too many pieces");
    }
}

//! What a driver is to copy, and how that can fail.

use std::rc::Rc;
use std::task::{Context, Poll};

use arrayvec::ArrayVec;
use block::{Failure, Info, Lba};

use super::list;
use super::operation::{Current, Operation};
use crate::sense::Sense;
use crate::vpd;

/// Longest designator that a descriptor has room for.
pub(super) const DESIGNATOR_MAX: usize = 20;

/// What one EXTENDED COPY asks for: its segments, in order, each when the one before is done.
#[derive(Debug)]
pub struct CopyPlan {
    ends: Vec<CopyEnd>,
    /// Where they begin in the parameter list.
    ends_at: u16,
    segments: Vec<CopySegment>,
    operation: Rc<Operation>,
}

/// A logical unit as a parameter list names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyEnd {
    pub(super) kind: u8,
    pub(super) code_set: u8,
    pub(super) id: ArrayVec<u8, DESIGNATOR_MAX>,
    pub(super) peripheral: u8,
    pub(super) block_length: u32,
}

/// One of the two ends of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// It is read.
    Source,
    /// It is written.
    Destination,
}

/// Whom a segment means by one of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose<'a> {
    /// The unit that the command was sent to.
    Commanded,
    /// The unit that this names, if the initiator may reach one.
    Named(&'a CopyEnd),
}

/// Blocks of one unit to be copied to a place in another, or in the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopySegment {
    pub(super) source: u16,
    pub(super) destination: u16,
    pub(super) count: u16,
    /// Whether `count` is of the destination's blocks.
    pub(super) counts_destination: bool,
    pub(super) from: Lba,
    pub(super) to: Lba,
}

/// A segment between two units that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyExtent {
    /// First block of the source.
    pub from: Lba,
    /// First block of the destination.
    pub to: Lba,
    /// Length, a multiple of both block sizes.
    pub bytes: u64,
}

/// How a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOutcome {
    /// Everything was copied.
    Done,
    /// It was given up because somebody asked for that.
    Aborted,
    /// It was given up; segments before this one are done, this one perhaps in part.
    Failed {
        /// Number of the segment, from 0.
        segment: u16,
        /// Why.
        fault: CopyFault,
        /// Whether the end that the fault is with is the unit that the command was sent to.
        commanded: bool,
    },
}

/// Why a segment was not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyFault {
    /// There is no such unit that the initiator may use.
    Unreachable(Side),
    /// The unit is not what the parameter list says it is.
    Mismatch(Side),
    /// The count is no whole number of blocks at both ends.
    Inexact,
    /// The unit has no such blocks.
    OutOfRange(Side),
    /// A read or a write failed, or was not allowed.
    Failed(Side, CopyTrouble),
}

/// How a read or a write of a copy failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyTrouble {
    /// The volume failed it.
    Failed(Failure),
    /// Another initiator has reserved the unit.
    Conflict,
    /// The unit does not take it as it is now.
    Refused(Sense),
    /// Another node is to be used for the unit.
    Elsewhere,
}

impl Side {
    /// The field of a segment descriptor that names the end.
    pub(super) fn index_field(self) -> u16 {
        match self {
            Self::Source => list::SOURCE_FIELD,
            Self::Destination => list::DESTINATION_FIELD,
        }
    }

    /// The field of its first block.
    pub(super) fn address_field(self) -> u16 {
        match self {
            Self::Source => list::FROM_FIELD,
            Self::Destination => list::TO_FIELD,
        }
    }
}

impl CopyPlan {
    pub(super) fn new(list: list::List, operation: Rc<Operation>) -> Self {
        let list::List { ends, ends_at, segments, .. } = list;
        Self { ends, ends_at, segments, operation }
    }

    /// The segments, in the order in which they are to be copied.
    #[must_use]
    pub fn segments(&self) -> &[CopySegment] {
        &self.segments
    }

    /// Whom `segment` means by its `side`; `None` for an index that names nobody.
    #[must_use]
    pub fn end(&self, segment: &CopySegment, side: Side) -> Option<Whose<'_>> {
        /// The logical unit that has the copy manager (SPC-4 6.4.6.1).
        const COMMANDED: u16 = 0xffff;
        match segment.index(side) {
            COMMANDED => Some(Whose::Commanded),
            index => self.ends.get(usize::from(index)).map(Whose::Named),
        }
    }

    /// To ask for the end of the copy, and to learn that somebody has.
    #[must_use]
    pub fn handle(&self) -> CopyHandle {
        CopyHandle(Rc::clone(&self.operation))
    }

    /// `segment` is under way from now on.
    pub fn segment_begins(&self, segment: &CopySegment) {
        let at = |side| {
            let index = segment.index(side);
            let known = usize::from(index) < self.ends.len();
            known.then(|| self.ends_at + index * list::END_LEN as u16)
        };
        self.operation.segment_begins(Current::new(at(Side::Source), at(Side::Destination)));
    }

    /// It comes to so many bytes, in such blocks where they are written.
    pub fn segment_is(&self, bytes: u64, block_size: u32) {
        let mut current = self.operation.current.borrow_mut();
        (current.bytes, current.block_size) = (bytes, block_size);
    }

    /// `len` bytes of it, from byte `at` on, are written.
    pub fn wrote(&self, at: u64, len: u64) {
        self.operation.wrote(at, len);
    }

    /// One of its ends has done a command.
    pub fn command_done(&self) {
        self.operation.commands.update(|n| n.wrapping_add(1));
    }
}

impl Drop for CopyPlan {
    /// Nobody may come to tell what became of it.
    fn drop(&mut self) {
        self.operation.abandon();
    }
}

/// A running copy.
#[derive(Clone, Debug)]
pub struct CopyHandle(Rc<Operation>);

impl CopyHandle {
    pub(super) fn new(operation: Rc<Operation>) -> Self {
        Self(operation)
    }

    /// Asks for the copy to be given up.
    pub fn abort(&self) {
        self.0.abort();
    }

    /// Whether that was asked for.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.is_aborted()
    }

    /// Ready once that was asked for. One task at a time may wait.
    pub fn poll_aborted(&self, cx: &Context<'_>) -> Poll<()> {
        self.0.poll_aborted(cx)
    }
}

impl CopyEnd {
    /// Whether it names the unit of the volume with this identity.
    #[must_use]
    pub fn names(&self, uuid: &[u8; 16]) -> bool {
        vpd::unit_designators(uuid)
            .iter()
            .any(|d| (d.kind, d.code_set) == (self.kind, self.code_set) && d.id == self.id[..])
    }

    /// Whether it is said to be a disk with blocks of this size, or not said what size.
    #[must_use]
    pub fn is_of(&self, block_size: u32) -> bool {
        const DISK: u8 = 0x00;
        self.peripheral == DISK && [0, block_size].contains(&self.block_length)
    }
}

impl CopySegment {
    fn index(&self, side: Side) -> u16 {
        match side {
            Side::Source => self.source,
            Side::Destination => self.destination,
        }
    }

    /// What it comes to between these two.
    ///
    /// # Errors
    /// [`CopyFault::Inexact`] and [`CopyFault::OutOfRange`].
    pub fn extent(&self, source: &Info, destination: &Info) -> Result<CopyExtent, CopyFault> {
        let counted = if self.counts_destination { destination } else { source };
        let bytes = u64::from(self.count) * u64::from(counted.block_size);
        let fits = |info: &Info, at: Lba, side| {
            let size = u64::from(info.block_size);
            if !bytes.is_multiple_of(size) {
                return Err(CopyFault::Inexact);
            }
            match at.0.checked_add(bytes / size) {
                Some(end) if end <= info.blocks => Ok(()),
                _ => Err(CopyFault::OutOfRange(side)),
            }
        };
        fits(source, self.from, Side::Source)?;
        fits(destination, self.to, Side::Destination)?;
        Ok(CopyExtent { from: self.from, to: self.to, bytes })
    }
}

impl CopyExtent {
    /// Where pieces of `step` bytes begin, and how long each is; the first is of `first` bytes, the last of what is left.
    /// Within one unit of blocks of `overlaps` bytes they come from the end that is not overwritten before it is read.
    pub fn pieces(
        &self,
        first: u64,
        step: u64,
        overlaps: Option<u32>,
    ) -> impl Iterator<Item = (u64, u64)> {
        let backwards = self.overlaps(overlaps) && self.to > self.from;
        let bytes = self.bytes;
        let count = u64::from(bytes > 0) + bytes.saturating_sub(first).div_ceil(step);
        (0..count).map(move |n| {
            let n = if backwards { count - 1 - n } else { n };
            let (at, most) = if n == 0 { (0, first) } else { (first + (n - 1) * step, step) };
            (at, most.min(bytes - at))
        })
    }

    /// Whether it overwrites what it reads, within one unit of blocks of `within` bytes.
    #[must_use]
    pub fn overlaps(&self, within: Option<u32>) -> bool {
        let Some(block_size) = within else { return false };
        self.from.0.abs_diff(self.to.0).saturating_mul(u64::from(block_size)) < self.bytes
    }
}

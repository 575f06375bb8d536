//! The plan of a copy for the driver, and its failures.

use std::rc::Rc;
use std::task::{Context, Poll};

use block::{Info, Lba, RequestError};

use super::cscd::{CSCD_LEN, Cscd};
use super::operation::{CopyOperation, CurrentSegment};
use crate::sense::Sense;

/// The plan of one EXTENDED COPY: its segments, to be copied in order, one after the other.
#[derive(Debug)]
pub struct CopyPlan {
    cscds: Vec<Cscd>,
    /// Offset of the CSCD descriptors in the parameter list.
    cscds_offset: u16,
    segments: Vec<CopySegment>,
    operation: Rc<CopyOperation>,
}

/// The source or the destination of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// It is read.
    Source,
    /// It is written.
    Destination,
}

/// The logical unit that a segment means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CscdTarget<'a> {
    /// The unit that received the command.
    ThisUnit,
    /// The unit with this designator, if the initiator may use it.
    Named(&'a Cscd),
}

/// Blocks of one unit to be copied to another unit, or within one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopySegment {
    pub(super) source: u16,
    pub(super) destination: u16,
    pub(super) count: u16,
    /// Whether `count` is in blocks of the destination.
    pub(super) counts_destination: bool,
    pub(super) from: Lba,
    pub(super) to: Lba,
}

/// The range of a segment between two known units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
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
    /// It was aborted on request.
    Aborted,
    /// It failed; earlier segments are complete, this one possibly in part.
    Failed {
        /// The failed segment, from 0.
        segment: u16,
        /// Why.
        fault: CopyFault,
        /// Whether the failed source or destination is the unit that received the command.
        on_this_unit: bool,
    },
}

/// Why a segment was not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyFault {
    /// There is no such unit, or the initiator may not use it.
    Unreachable(Side),
    /// The unit differs from its description in the parameter list.
    Mismatch(Side),
    /// The count is not a whole number of blocks on both sides.
    Inexact,
    /// The unit has no such blocks.
    OutOfRange(Side),
    /// A read or write failed, or was not allowed.
    Io(Side, CopyIoError),
}

/// How a read or a write of a copy failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyIoError {
    /// The volume failed it.
    Volume(RequestError),
    /// Another initiator has reserved the unit.
    ReservationConflict,
    /// The unit rejects it in its current state.
    CheckCondition(Sense),
    /// The unit must be used through another node.
    PathUnavailable,
}

impl CopyPlan {
    /// `cscds_offset`: the offset of the descriptors of `cscds` in the parameter list.
    pub(crate) fn new(
        cscds: Vec<Cscd>,
        cscds_offset: u16,
        segments: Vec<CopySegment>,
        operation: Rc<CopyOperation>,
    ) -> Self {
        Self { cscds, cscds_offset, segments, operation }
    }

    /// The segments, in copy order.
    #[must_use]
    pub fn segments(&self) -> &[CopySegment] {
        &self.segments
    }

    /// The unit that `segment` means by `side`; `None` for an invalid index.
    #[must_use]
    pub fn cscd(&self, segment: &CopySegment, side: Side) -> Option<CscdTarget<'_>> {
        /// The logical unit that has the copy manager (SPC-4 6.4.6.1).
        const CSCD_THIS_UNIT: u16 = 0xffff;
        match segment.index(side) {
            CSCD_THIS_UNIT => Some(CscdTarget::ThisUnit),
            index => self.cscds.get(usize::from(index)).map(CscdTarget::Named),
        }
    }

    /// A handle for aborting the copy, and for detecting that.
    #[must_use]
    pub fn handle(&self) -> CopyHandle {
        CopyHandle(Rc::clone(&self.operation))
    }

    /// Records that `segment` is in progress.
    pub fn begin_segment(&self, segment: &CopySegment) {
        let at = |side| {
            let index = segment.index(side);
            let known = usize::from(index) < self.cscds.len();
            known.then(|| self.cscds_offset + index * CSCD_LEN as u16)
        };
        self.operation.begin_segment(CurrentSegment::new(at(Side::Source), at(Side::Destination)));
    }

    /// Records its length in bytes, and the block size of the destination.
    pub fn set_segment_size(&self, bytes: u64, block_size: u32) {
        let mut current = self.operation.current.borrow_mut();
        (current.bytes, current.block_size) = (bytes, block_size);
    }

    /// Records `len` bytes written at byte `at` of it.
    pub fn record_written(&self, at: u64, len: u64) {
        self.operation.record_written(at, len);
    }

    /// Records a command completed by the source or destination.
    pub fn record_command(&self) {
        self.operation.commands_completed.update(|n| n.wrapping_add(1));
    }
}

impl Drop for CopyPlan {
    /// The driver may end without reporting a result.
    fn drop(&mut self) {
        self.operation.abandon();
    }
}

/// A handle to a running copy.
#[derive(Clone, Debug)]
pub struct CopyHandle(Rc<CopyOperation>);

impl CopyHandle {
    pub(super) fn new(operation: Rc<CopyOperation>) -> Self {
        Self(operation)
    }

    /// Requests the abort of the copy.
    pub fn abort(&self) {
        self.0.abort();
    }

    /// Whether an abort was requested.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.is_aborted()
    }

    /// Ready once an abort was requested. One task at a time may wait.
    pub fn poll_aborted(&self, cx: &Context<'_>) -> Poll<()> {
        self.0.poll_aborted(cx)
    }
}

impl CopySegment {
    fn index(&self, side: Side) -> u16 {
        match side {
            Side::Source => self.source,
            Side::Destination => self.destination,
        }
    }

    /// The range to copy between these two devices.
    ///
    /// # Errors
    /// [`CopyFault::Inexact`] and [`CopyFault::OutOfRange`].
    pub fn range(&self, source: &Info, destination: &Info) -> Result<CopyRange, CopyFault> {
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
        Ok(CopyRange { from: self.from, to: self.to, bytes })
    }
}

impl CopyRange {
    /// Offsets and lengths of the pieces of `step` bytes; the first has `first` bytes, the last the
    /// rest. Within one unit with blocks of `overlaps` bytes they are in the order in which no
    /// source is overwritten before it is read.
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

    /// Whether it overwrites its own source, within one unit with blocks of `within` bytes.
    #[must_use]
    pub fn overlaps(&self, within: Option<u32>) -> bool {
        let Some(block_size) = within else { return false };
        self.from.0.abs_diff(self.to.0).saturating_mul(u64::from(block_size)) < self.bytes
    }
}

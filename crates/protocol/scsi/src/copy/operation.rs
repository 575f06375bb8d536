//! The state of a copy that initiators can query, while it runs and afterwards (SPC-4 5.17.4,
//! 5.17.5).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::rod::RodToken;
use crate::reply::{Refusal, Reply};
use crate::sense::{CopyFieldPointer, Sense, SenseBytes, SenseCode};
use crate::status::Status;

/// Most identified operations kept per initiator.
pub(crate) const MAX_OPERATIONS: usize = 16;

/// One EXTENDED COPY. Shared by its driver and by the nexus that may query it.
#[derive(Debug)]
pub(crate) struct CopyOperation {
    id: Option<u32>,
    /// Offset of the identifier in the parameter list.
    id_field: u16,
    pub(crate) service_action: u8,
    /// Whether success is reported in sense data (G_SENSE).
    pub(crate) g_sense: bool,
    /// Commands completed by its source and destination, modulo 2^16.
    pub(crate) commands_completed: Cell<u16>,
    /// Bytes written contiguously.
    pub(crate) bytes_written: Cell<u64>,
    /// Segments completed, and the one in progress.
    pub(crate) segments_processed: Cell<u16>,
    pub(crate) current: RefCell<CurrentSegment>,
    pub(crate) state: RefCell<CopyState>,
    /// Whether RECEIVE COPY STATUS(LID1) has reported the result.
    pub(crate) status_reported: Cell<bool>,
    /// Whether RECEIVE COPY FAILURE DETAILS(LID1) has reported it.
    pub(crate) details_reported: Cell<bool>,
    /// The token that it has created.
    pub(crate) token: RefCell<Option<RodToken>>,
    aborted: Cell<bool>,
    /// Whether COPY OPERATION ABORT has ended it.
    cleared: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

#[derive(Clone, Debug)]
pub(crate) enum CopyState {
    Running,
    Done,
    Aborted { status: Status, sense: SenseBytes },
    Failed { status: Status, sense: SenseBytes },
}

/// The segment in progress.
#[derive(Debug, Default)]
pub(crate) struct CurrentSegment {
    /// Offset of its CSCD descriptors in the parameter list.
    source: Option<u16>,
    destination: Option<u16>,
    /// Its length in bytes, and the block size of the destination.
    pub(crate) bytes: u64,
    pub(crate) block_size: u32,
    /// End of the contiguously written part.
    contiguous_end: u64,
    /// Written parts beyond that: offset and length.
    out_of_order: BTreeMap<u64, u64>,
}

impl CurrentSegment {
    pub(crate) fn new(source: Option<u16>, destination: Option<u16>) -> Self {
        Self { source, destination, ..Self::default() }
    }

    /// Records `len` bytes written at byte `at` of the segment. Returns by how many bytes the
    /// contiguous part has grown.
    fn record_written(&mut self, at: u64, len: u64) -> u64 {
        let (mut at, mut len) = (at, len);
        if let Some(next) = self.out_of_order.remove(&(at + len)) {
            len += next;
        }
        if let Some((&before, &its)) = self.out_of_order.range(..at).next_back()
            && before + its == at
        {
            (at, len) = (before, its + len);
        }
        self.out_of_order.insert(at, len);
        let more = self.out_of_order.remove(&self.contiguous_end).unwrap_or(0);
        self.contiguous_end += more;
        more
    }

    /// The number of blocks not written contiguously, if any (SPC-4 5.17.7.4).
    pub(crate) fn residual(&self) -> Option<u64> {
        let any = self.contiguous_end > 0 || !self.out_of_order.is_empty();
        any.then(|| {
            self.bytes.saturating_sub(self.contiguous_end) / u64::from(self.block_size.max(1))
        })
    }

    /// The descriptor of the destination, or of the source.
    pub(crate) fn cscd_field(&self, destination: bool) -> Option<CopyFieldPointer> {
        let byte = if destination { self.destination } else { self.source };
        byte.map(CopyFieldPointer::List)
    }
}

impl CopyOperation {
    pub(crate) fn new(id: Option<u32>, id_field: u16, service_action: u8, tells: bool) -> Self {
        Self {
            id,
            id_field,
            service_action,
            g_sense: tells,
            commands_completed: Cell::new(0),
            bytes_written: Cell::new(0),
            segments_processed: Cell::new(0),
            current: RefCell::default(),
            state: RefCell::new(CopyState::Running),
            status_reported: Cell::new(false),
            details_reported: Cell::new(false),
            token: RefCell::default(),
            aborted: Cell::new(false),
            cleared: Cell::new(false),
            waker: RefCell::default(),
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(*self.state.borrow(), CopyState::Running)
    }

    pub(crate) fn begin_segment(&self, current: CurrentSegment) {
        self.segments_processed.update(|n| n.saturating_add(1));
        self.current.replace(current);
    }

    pub(crate) fn record_written(&self, at: u64, len: u64) {
        let more = self.current.borrow_mut().record_written(at, len);
        self.bytes_written.update(|n| n.saturating_add(more));
    }

    /// Records the reply to its command.
    pub(crate) fn complete(&self, reply: &Reply, aborted: bool) {
        let (status, sense) = (reply.status, reply.sense.clone());
        *self.state.borrow_mut() = match status {
            Status::Good => CopyState::Done,
            status if aborted => CopyState::Aborted { status, sense },
            status => CopyState::Failed { status, sense },
        };
    }

    /// It is no longer carried out. If its command is answered all the same, that answer is
    /// recorded.
    pub(crate) fn abandon(&self) {
        if self.is_running() {
            let (status, sense) = (Status::TaskAborted, SenseBytes::new());
            self.state.replace(CopyState::Aborted { status, sense });
        }
    }

    /// Ends it as COPY OPERATION ABORT does.
    pub(crate) fn clear(&self) {
        self.cleared.set(true);
        self.abort();
    }

    pub(crate) fn is_cleared(&self) -> bool {
        self.cleared.get()
    }

    pub(crate) fn abort(&self) {
        self.aborted.set(true);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.get()
    }

    pub(crate) fn poll_aborted(&self, cx: &Context<'_>) -> Poll<()> {
        if self.is_aborted() {
            return Poll::Ready(());
        }
        self.waker.replace(Some(cx.waker().clone()));
        Poll::Pending
    }
}

/// The identified operations of one nexus, oldest first.
#[derive(Debug, Default)]
pub(crate) struct CopyOperations(Vec<Rc<CopyOperation>>);

impl CopyOperations {
    /// Adds an operation; an ended one with the same identifier is forgotten.
    pub(crate) fn insert(&mut self, operation: &Rc<CopyOperation>) -> Result<(), Refusal> {
        let Some(id) = operation.id else { return Ok(()) };
        match self.find(id) {
            Some(known) if known.is_running() => {
                let same = known.service_action == operation.service_action;
                return Err(if same {
                    Sense::illegal(SenseCode::OPERATION_IN_PROGRESS).into()
                } else {
                    Sense::parameter(operation.id_field, None).into()
                });
            }
            _ => self.0.retain(|o| o.id != Some(id)),
        }
        if self.0.len() >= MAX_OPERATIONS {
            let oldest = self.0.iter().position(|o| !o.is_running());
            self.0.remove(oldest.ok_or(Status::Busy)?);
        }
        self.0.push(Rc::clone(operation));
        Ok(())
    }

    pub(crate) fn find(&self, id: u32) -> Option<Rc<CopyOperation>> {
        self.0.iter().find(|o| o.id == Some(id)).map(Rc::clone)
    }

    /// SPC-4 5.17.5: aborts running operations and forgets all.
    pub(crate) fn reset(&mut self) {
        self.0.drain(..).for_each(|operation| operation.clear());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SPC-4 6.24, 5.17.7.4: only the contiguous part counts.
    #[test]
    fn pieces_come_in_any_order() {
        let mut current =
            CurrentSegment { bytes: 4096, block_size: 512, ..CurrentSegment::default() };
        assert_eq!(current.residual(), None);
        for (at, len, more, residual) in [
            (1024, 512, 0, 8),
            (2048, 512, 0, 8),
            (1536, 512, 0, 8),
            (0, 512, 512, 7),
            (512, 512, 2048, 3),
            (3584, 512, 0, 3),
            (2560, 1024, 1536, 0),
        ] {
            assert_eq!(
                (current.record_written(at, len), current.residual()),
                (more, Some(residual))
            );
        }
        assert!(current.out_of_order.is_empty(), "{current:?}");
    }
}

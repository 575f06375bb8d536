//! What initiators can ask of a copy, while it runs and afterwards (SPC-4 5.17.4, 5.17.5).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::{MAX_OPERATIONS, RodToken};
use crate::reply::{Refusal, Reply, Status};
use crate::sense::{Code, CopyField, Sense, SenseBytes};

/// One EXTENDED COPY. Shared by whoever carries it out and by the nexus that may ask for it.
#[derive(Debug)]
pub(crate) struct Operation {
    id: Option<u32>,
    /// Where the identifier is in the parameter list.
    id_field: u16,
    pub(super) service_action: u8,
    /// Whether success is told in sense data (G_SENSE).
    pub(super) tells: bool,
    /// Commands that its ends have completed, modulo 2^16.
    pub(super) commands: Cell<u16>,
    /// What is written, as far as it is written in order.
    pub(super) bytes: Cell<u64>,
    /// Segments that are done, and the one under way.
    pub(super) segments: Cell<u16>,
    pub(super) current: RefCell<Current>,
    pub(super) state: RefCell<State>,
    /// Whether RECEIVE COPY STATUS(LID1) has told how it ended.
    pub(super) status_told: Cell<bool>,
    /// Whether RECEIVE COPY FAILURE DETAILS(LID1) has.
    pub(super) details_told: Cell<bool>,
    /// The token that it has made.
    pub(super) token: RefCell<Option<RodToken>>,
    aborted: Cell<bool>,
    /// Whether COPY OPERATION ABORT has ended it.
    cleared: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

#[derive(Clone, Debug)]
pub(super) enum State {
    Running,
    Done,
    Aborted { status: Status, sense: SenseBytes },
    Failed { status: Status, sense: SenseBytes },
}

/// The segment under way.
#[derive(Debug, Default)]
pub(super) struct Current {
    /// Where its ends are described in the parameter list.
    source: Option<u16>,
    destination: Option<u16>,
    /// Its length in bytes, and the size of what is written.
    pub(super) bytes: u64,
    pub(super) block_size: u32,
    /// Up to where everything is written.
    front: u64,
    /// What is written beyond that: where it begins, and its length.
    beyond: BTreeMap<u64, u64>,
}

impl Current {
    pub(super) fn new(source: Option<u16>, destination: Option<u16>) -> Self {
        Self { source, destination, ..Self::default() }
    }

    /// `len` bytes from byte `at` of the segment on are written. How many more bytes are written in
    /// order now.
    fn wrote(&mut self, at: u64, len: u64) -> u64 {
        let (mut at, mut len) = (at, len);
        if let Some(next) = self.beyond.remove(&(at + len)) {
            len += next;
        }
        if let Some((&before, &its)) = self.beyond.range(..at).next_back()
            && before + its == at
        {
            (at, len) = (before, its + len);
        }
        self.beyond.insert(at, len);
        let more = self.beyond.remove(&self.front).unwrap_or(0);
        self.front += more;
        more
    }

    /// How many blocks are missing, if there are any that are not (SPC-4 5.17.7.4).
    pub(super) fn residual(&self) -> Option<u64> {
        let any = self.front > 0 || !self.beyond.is_empty();
        any.then(|| self.bytes.saturating_sub(self.front) / u64::from(self.block_size.max(1)))
    }

    /// The descriptor of the end that is the destination, or of the source.
    pub(super) fn end(&self, destination: bool) -> Option<CopyField> {
        let byte = if destination { self.destination } else { self.source };
        byte.map(CopyField::List)
    }
}

impl Operation {
    pub(super) fn new(id: Option<u32>, id_field: u16, service_action: u8, tells: bool) -> Self {
        Self {
            id,
            id_field,
            service_action,
            tells,
            commands: Cell::new(0),
            bytes: Cell::new(0),
            segments: Cell::new(0),
            current: RefCell::default(),
            state: RefCell::new(State::Running),
            status_told: Cell::new(false),
            details_told: Cell::new(false),
            token: RefCell::default(),
            aborted: Cell::new(false),
            cleared: Cell::new(false),
            waker: RefCell::default(),
        }
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(*self.state.borrow(), State::Running)
    }

    pub(super) fn segment_begins(&self, current: Current) {
        self.segments.update(|n| n.saturating_add(1));
        self.current.replace(current);
    }

    pub(super) fn wrote(&self, at: u64, len: u64) {
        let more = self.current.borrow_mut().wrote(at, len);
        self.bytes.update(|n| n.saturating_add(more));
    }

    /// Its command is answered so.
    pub(super) fn end(&self, reply: &Reply, aborted: bool) {
        let (status, sense) = (reply.status, reply.sense.clone());
        *self.state.borrow_mut() = match status {
            Status::Good => State::Done,
            status if aborted => State::Aborted { status, sense },
            status => State::Failed { status, sense },
        };
    }

    /// Nobody carries it out any more. If its command is answered all the same, that answer counts.
    pub(super) fn abandon(&self) {
        if self.is_running() {
            let (status, sense) = (Status::TaskAborted, SenseBytes::new());
            self.state.replace(State::Aborted { status, sense });
        }
    }

    /// Ends it as COPY OPERATION ABORT does.
    pub(super) fn clear(&self) {
        self.cleared.set(true);
        self.abort();
    }

    pub(super) fn is_cleared(&self) -> bool {
        self.cleared.get()
    }

    pub(super) fn abort(&self) {
        self.aborted.set(true);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.get()
    }

    pub(super) fn poll_aborted(&self, cx: &Context<'_>) -> Poll<()> {
        if self.is_aborted() {
            return Poll::Ready(());
        }
        self.waker.replace(Some(cx.waker().clone()));
        Poll::Pending
    }
}

/// The operations of one nexus that have identifiers, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Copies(Vec<Rc<Operation>>);

impl Copies {
    /// Enters an operation; one of the same identifier that has ended is forgotten.
    pub(super) fn begin(&mut self, operation: &Rc<Operation>) -> Result<(), Refusal> {
        let Some(id) = operation.id else { return Ok(()) };
        match self.find(id) {
            Some(known) if known.is_running() => {
                let same = known.service_action == operation.service_action;
                return Err(if same {
                    Sense::illegal(Code::OPERATION_IN_PROGRESS).into()
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

    pub(super) fn find(&self, id: u32) -> Option<Rc<Operation>> {
        self.0.iter().find(|o| o.id == Some(id)).map(Rc::clone)
    }

    /// SPC-4 5.17.5: what runs is aborted, and nothing is known any more.
    pub(crate) fn reset(&mut self) {
        self.0.drain(..).for_each(|operation| operation.clear());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SPC-4 6.24, 5.17.7.4: what counts is what is written in order.
    #[test]
    fn pieces_come_in_any_order() {
        let mut current = Current { bytes: 4096, block_size: 512, ..Current::default() };
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
            assert_eq!((current.wrote(at, len), current.residual()), (more, Some(residual)));
        }
        assert!(current.beyond.is_empty(), "{current:?}");
    }
}

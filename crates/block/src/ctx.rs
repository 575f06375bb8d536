//! What travels with an operation beside its arguments.

use std::cell::Cell;
use std::rc::Rc;

use rt::buf::{BufsMut, Credit};

/// Number of a configuration of a replicated volume; 0 where nothing is replicated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// One command's context: its memory, its epoch and whether somebody asked to abort it. Cheap to
/// clone; all operations that a command is made of share it.
#[derive(Clone, Debug)]
pub struct Ctx(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    credit: Credit,
    epoch: Epoch,
    aborted: Cell<bool>,
}

impl Ctx {
    /// A context that takes its memory from `credit`.
    #[must_use]
    pub fn new(credit: Credit, epoch: Epoch) -> Self {
        Self(Rc::new(Inner { credit, epoch, aborted: Cell::new(false) }))
    }

    /// Buffers of `len` bytes in all out of the command's credit; their contents are undefined.
    #[must_use]
    pub fn alloc(&self, len: usize) -> BufsMut {
        self.0.credit.alloc(len)
    }

    /// The command's credit.
    #[must_use]
    pub fn credit(&self) -> &Credit {
        &self.0.credit
    }

    /// The epoch the command was issued in.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.0.epoch
    }

    /// Asks for the command to be abandoned. Layers look at [`Self::is_aborted`] before they
    /// start a step; what has started, finishes.
    pub fn abort(&self) {
        self.0.aborted.set(true);
    }

    /// Whether [`Self::abort`] was called.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.aborted.get()
    }
}

//! The context of an operation: memory, epoch, abort flag.

use std::cell::Cell;
use std::rc::Rc;

use rt::buf::{BufsMut, Credit};

/// Number of a configuration of a replicated volume; 0 if the volume is not replicated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// The context of a command: its memory, its epoch and whether an abort was requested. Cheap to
/// clone; all operations of a command share it.
#[derive(Clone, Debug)]
pub struct Ctx {
    shared: Rc<Inner>,
    shielded: bool,
}

#[derive(Debug)]
struct Inner {
    credit: Credit,
    epoch: Epoch,
    aborted: Cell<bool>,
}

impl Ctx {
    /// A context with the memory of `credit`.
    #[must_use]
    pub fn new(credit: Credit, epoch: Epoch) -> Self {
        let shared = Rc::new(Inner { credit, epoch, aborted: Cell::new(false) });
        Self { shared, shielded: false }
    }

    /// The same context without [`Self::abort`]: for steps of a layer that must all happen once the
    /// first has, such as the second leg of a mirrored write.
    #[must_use]
    pub fn shielded(&self) -> Self {
        Self { shared: Rc::clone(&self.shared), shielded: true }
    }

    /// Allocates `len` bytes from the command's credit; their contents are undefined.
    #[must_use]
    pub fn alloc(&self, len: usize) -> BufsMut {
        self.shared.credit.alloc(len)
    }

    /// The command's credit.
    #[must_use]
    pub fn credit(&self) -> &Credit {
        &self.shared.credit
    }

    /// Whether both contexts belong to the same command.
    #[must_use]
    pub fn is_same_command(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.shared, &other.shared)
    }

    /// The epoch in which the command was issued.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.shared.epoch
    }

    /// Requests that the command be abandoned. Layers check [`Self::is_aborted`] before each step;
    /// a step that has started runs to its end.
    pub fn abort(&self) {
        self.shared.aborted.set(true);
    }

    /// Whether [`Self::abort`] was called.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        !self.shielded && self.shared.aborted.get()
    }
}

#[cfg(test)]
mod tests {
    use rt::buf::{BufferPool, MemoryClass};

    use super::*;

    #[test]
    fn an_abort_reaches_every_clone_but_a_shielded_one() {
        let pool = BufferPool::new(1 << 16).unwrap();
        let credit = pool.account().try_credit(8192, MemoryClass::LocalIo).unwrap();
        let ctx = Ctx::new(credit, Epoch(7));
        let (clone, shielded) = (ctx.clone(), ctx.shielded());
        ctx.abort();
        assert!(clone.is_aborted() && !shielded.is_aborted() && !shielded.clone().is_aborted());
        assert_eq!(shielded.epoch(), Epoch(7));
        assert_eq!(shielded.credit().left(), clone.credit().left());
    }
}

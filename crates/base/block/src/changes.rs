//! Who has to know whether blocks have changed since a moment.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};

use crate::{Blocks, Op};

/// What is changed of one device, for those who watch parts of it. Cheap to clone. While nobody watches, a
/// change costs one look at a flag.
#[derive(Clone, Default)]
pub struct Changes(Rc<State>);

#[derive(Default)]
struct State {
    watched: Cell<bool>,
    /// Those whose blocks nobody has changed.
    watches: RefCell<Vec<Weak<Watched>>>,
}

struct Watched {
    ranges: Vec<Blocks>,
    intact: Cell<bool>,
}

/// Watches some blocks of a device until it is dropped.
pub struct Watch {
    watched: Rc<Watched>,
    changes: Changes,
}

impl Changes {
    /// Watches `ranges` from now on. What is under way already may change them unseen.
    #[must_use]
    pub fn watch(&self, ranges: Vec<Blocks>) -> Watch {
        let watched = Rc::new(Watched { ranges, intact: Cell::new(true) });
        self.0.watches.borrow_mut().push(Rc::downgrade(&watched));
        self.0.watched.set(true);
        Watch { watched, changes: self.clone() }
    }

    /// `op` is about to begin.
    pub(crate) fn begins(&self, op: &Op, block_size: u32) {
        if self.0.watched.get() && op.writes() {
            op.range(block_size).into_iter().for_each(|range| self.changed(range));
        }
    }

    fn changed(&self, range: Blocks) {
        self.keep(|watched| {
            let touched = watched.ranges.iter().any(|r| r.overlaps(&range));
            watched.intact.set(watched.intact.get() && !touched);
            !touched
        });
    }

    fn keep(&self, stays: impl Fn(&Watched) -> bool) {
        let mut watches = self.0.watches.borrow_mut();
        watches.retain(|watch| watch.upgrade().is_some_and(|watched| stays(&watched)));
        self.0.watched.set(!watches.is_empty());
    }
}

impl Watch {
    /// Whether no change of its blocks has begun since it was made.
    #[must_use]
    pub fn is_intact(&self) -> bool {
        self.watched.intact.get()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watched.intact.set(false);
        self.changes.keep(|watched| watched.intact.get());
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes").field("watches", &self.0.watches.borrow().len()).finish()
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Watched { ranges, intact } = &*self.watched;
        f.debug_struct("Watch").field("ranges", ranges).field("intact", intact).finish()
    }
}

#[cfg(test)]
mod tests {
    use rt::buf::Bufs;

    use super::*;
    use crate::Lba;

    fn write(at: u64, blocks: usize) -> Op {
        Op::Write { at: Lba(at), data: Bufs::zeroes(512 * blocks), fua: false }
    }

    #[test]
    fn a_watch_sees_every_change_of_its_blocks_and_no_other() {
        let changes = Changes::default();
        let ranges = || vec![Blocks::new(Lba(10), 2), Blocks::new(Lba(30), 1)];
        let (at, blocks) = (Lba(11), 1);
        let harmless = [
            write(8, 2),
            write(12, 18),
            write(31, 1),
            Op::Read { at, blocks },
            Op::Map { at, blocks },
            Op::Flush,
        ];
        let harmful = [
            write(0, 11),
            write(30, 1),
            Op::Unmap { at, blocks },
            Op::Zero { at, blocks, unmap: true, fua: true },
        ];
        for op in harmful {
            let watch = changes.watch(ranges());
            harmless.iter().for_each(|op| changes.begins(op, 512));
            assert!(watch.is_intact() && changes.0.watched.get());
            changes.begins(&op, 512);
            assert!(!watch.is_intact(), "{op:?}");
            assert!(!changes.0.watched.get(), "nothing is left to be watched");
        }
        let (one, two) = (changes.watch(ranges()), changes.watch(ranges()));
        drop(one);
        assert!(two.is_intact() && changes.0.watched.get());
        drop(two);
        assert!(!changes.0.watched.get());
    }
}

//! Tells watchers whether blocks have changed since a moment.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};

use crate::{Blocks, Op};

/// Tracks the changes of one device for those who watch parts of it. Cheap to clone. Without
/// watchers a change costs one check of a flag.
#[derive(Clone, Default)]
pub struct ChangeTracker(Rc<State>);

#[derive(Default)]
struct State {
    has_watches: Cell<bool>,
    /// Watches whose blocks have not changed yet.
    watches: RefCell<Vec<Weak<WatchedRanges>>>,
}

struct WatchedRanges {
    ranges: Vec<Blocks>,
    is_unchanged: Cell<bool>,
}

/// Watches some blocks of a device until it is dropped.
pub struct ChangeWatch {
    watched: Rc<WatchedRanges>,
    changes: ChangeTracker,
}

impl ChangeTracker {
    /// Watches `ranges` from now on. Changes already in flight may go unseen.
    #[must_use]
    pub fn watch(&self, ranges: Vec<Blocks>) -> ChangeWatch {
        let watched = Rc::new(WatchedRanges { ranges, is_unchanged: Cell::new(true) });
        self.0.watches.borrow_mut().push(Rc::downgrade(&watched));
        self.0.has_watches.set(true);
        ChangeWatch { watched, changes: self.clone() }
    }

    /// `op` is about to begin.
    pub(crate) fn on_begin(&self, op: &Op, block_size: u32) {
        if self.0.has_watches.get() && op.is_write() {
            op.range(block_size).into_iter().for_each(|range| self.invalidate(range));
        }
    }

    fn invalidate(&self, range: Blocks) {
        self.retain_watches(|watched| {
            let touched = watched.ranges.iter().any(|r| r.overlaps(&range));
            watched.is_unchanged.set(watched.is_unchanged.get() && !touched);
            !touched
        });
    }

    fn retain_watches(&self, stays: impl Fn(&WatchedRanges) -> bool) {
        let mut watches = self.0.watches.borrow_mut();
        watches.retain(|watch| watch.upgrade().is_some_and(|watched| stays(&watched)));
        self.0.has_watches.set(!watches.is_empty());
    }
}

impl ChangeWatch {
    /// Whether no change of its blocks has begun since the watch was made.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        self.watched.is_unchanged.get()
    }
}

impl Drop for ChangeWatch {
    fn drop(&mut self) {
        self.watched.is_unchanged.set(false);
        self.changes.retain_watches(|watched| watched.is_unchanged.get());
    }
}

impl fmt::Debug for ChangeTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChangeTracker").field("watches", &self.0.watches.borrow().len()).finish()
    }
}

impl fmt::Debug for ChangeWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WatchedRanges { ranges, is_unchanged } = &*self.watched;
        f.debug_struct("ChangeWatch")
            .field("ranges", ranges)
            .field("is_unchanged", is_unchanged)
            .finish()
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
        let changes = ChangeTracker::default();
        let ranges = || vec![Blocks::new(Lba(10), 2), Blocks::new(Lba(30), 1)];
        let (at, blocks) = (Lba(11), 1);
        let harmless = [
            write(8, 2),
            write(12, 18),
            write(31, 1),
            Op::Read { at, blocks },
            Op::BlockStatus { at, blocks },
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
            harmless.iter().for_each(|op| changes.on_begin(op, 512));
            assert!(watch.is_unchanged() && changes.0.has_watches.get());
            changes.on_begin(&op, 512);
            assert!(!watch.is_unchanged(), "{op:?}");
            assert!(!changes.0.has_watches.get(), "nothing is left to be watched");
        }
        let (one, two) = (changes.watch(ranges()), changes.watch(ranges()));
        drop(one);
        assert!(two.is_unchanged() && changes.0.has_watches.get());
        drop(two);
        assert!(!changes.0.has_watches.get());
    }
}

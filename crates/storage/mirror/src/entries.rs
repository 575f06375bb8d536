//! The writes of the leg that have a place in the order and are not known to be committed.
//!
//! An entry keeps its range locked, so that readers wait for it (RFD 0010, 4.1), and is what a
//! member tells when a view begins (5.7).

use std::collections::hash_map;

use block::{Blocks, Error, Lba, RangeLock};
use intent_log::Touch;
use peer::{Entry, Seq, Tag, View};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// A write's name among the entries of all views.
pub(super) type Place = (View, Seq);

/// The entries of one leg.
#[derive(Default)]
pub(super) struct Entries {
    /// In no order: each is looked up several times while it is here, and they are listed when a view begins.
    table: FxHashMap<Place, Held>,
    /// How many are on their way to the disk.
    applying: usize,
    /// Whether there may be some whose range a copy has taken over.
    yielded: bool,
}

struct Held {
    entry: Entry,
    /// Readers wait behind it. None while the writer itself still waits for it, and none of an
    /// entry whose range a copy has taken over.
    lock: Option<RangeLock>,
    state: State,
    /// Whether a leg has no space for it: what is in its range, here at least, is not what it brings, and is nobody's to
    /// tell before all members have the same there (RFD 0040).
    refused: bool,
    /// Whether it brings what some members have to all.
    copy: bool,
    /// Its regions are in use until it is committed: others may have yet to apply it.
    _touch: Touch,
    /// Whether it ends as soon as the leg has it: nobody asks for it any more, as for a joiner's
    /// copies.
    passing: bool,
}

/// A write that all members have, or that all have refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) entry: Entry,
    /// Whether they have refused it, and have the same in its range.
    pub(super) refused: bool,
}

/// Where an entry comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    /// A client's write.
    Client,
    /// The settling of a view.
    Settling,
    /// A joiner's resync.
    Resync,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Applying,
    Applied,
    Failed(Error),
}

impl Entries {
    /// A write has got its place; it is on its way to the disk.
    pub(super) fn insert(&mut self, entry: Entry, lock: Option<RangeLock>, touch: Touch, of: Of) {
        self.yielded &= !self.table.is_empty();
        let (copy, passing) = (of != Of::Client, of == Of::Resync);
        let state = State::Applying;
        let held = Held { entry, lock, state, refused: false, _touch: touch, copy, passing };
        self.applying += 1;
        let twin = self.table.insert((entry.view, entry.seq), held);
        assert!(twin.is_none(), "{entry:?} has the place of another");
    }

    /// Hands over the lock of a write that had to wait for it.
    pub(super) fn locked(&mut self, place: Place, lock: RangeLock) {
        if let Some(held) = self.table.get_mut(&place) {
            held.lock = Some(lock);
        }
    }

    /// The leg has it.
    pub(super) fn applied(&mut self, place: Place) {
        self.turns(place, State::Applied);
    }

    /// The leg refused it: its range holds old and new.
    pub(super) fn failed(&mut self, place: Place, e: Error) {
        self.turns(place, State::Failed(e));
    }

    /// One that nobody asks for any more ends, whatever became of it: what stands behind it would never get its
    /// turn.
    fn turns(&mut self, place: Place, state: State) {
        let hash_map::Entry::Occupied(mut at) = self.table.entry(place) else { return };
        let held = at.get_mut();
        debug_assert_eq!(held.state, State::Applying, "{:?} ends twice", held.entry);
        held.state = state;
        self.applying -= 1;
        if held.passing {
            at.remove();
        }
    }

    /// The leg has no space for it: its range holds old and new. Says whether it can wait here for what all are to have there
    /// instead; one that nobody asks for any more ends.
    pub(super) fn refuse(&mut self, place: Place) -> bool {
        self.turns(place, State::Applied);
        let waits = self.table.get_mut(&place);
        waits.is_some_and(|held| {
            held.refused = true;
            true
        })
    }

    /// What all members are to have in its range instead is on its way to the disk, if it waits for that: says whether it
    /// does.
    pub(super) fn replace(&mut self, entry: &Entry) -> bool {
        let Some(held) = self.table.get_mut(&(entry.view, entry.seq)) else { return false };
        let waits = held.state == State::Applied && !held.copy;
        if !waits || (held.entry.tag, held.entry.range) != (entry.tag, entry.range) {
            return false;
        }
        held.state = State::Applying;
        held.refused = true;
        self.applying += 1;
        true
    }

    /// The write at `place`, and whether a leg has no space for it.
    pub(super) fn get(&self, place: Place) -> Option<Ended> {
        let held = self.table.get(&place)?;
        Some(Ended { entry: held.entry, refused: held.refused })
    }

    /// Those that were refused stay so: nobody has said that all members have the same in their ranges. Says whether there
    /// are any.
    pub(super) fn fail_refused(&mut self) -> bool {
        let mut any = false;
        for held in self.table.values_mut().filter(|held| held.refused) {
            any = true;
            // One that is on its way to the disk tells of itself when it has come there.
            if held.state == State::Applied {
                held.refused = false;
                held.state = State::Failed(Error::NoSpace);
            }
        }
        any
    }

    /// All who count have it: readers may see it, once this leg has it as well. (A joiner may be given
    /// what an attempt of its own brought that nobody waits for any more.)
    pub(super) fn commit(&mut self, place: Place) -> Option<Ended> {
        let hash_map::Entry::Occupied(mut at) = self.table.entry(place) else { return None };
        let held = at.get_mut();
        let ended = Ended { entry: held.entry, refused: held.refused };
        if held.state == State::Applying {
            held.passing = true;
        } else {
            at.remove();
        }
        Some(ended)
    }

    /// The name of the write at `place`.
    pub(super) fn tag(&self, place: Place) -> Option<Tag> {
        self.table.get(&place).map(|held| held.entry.tag)
    }

    /// Whether no write of `view` but copies meets `range`.
    pub(super) fn are_copies(&self, view: View, range: Blocks) -> bool {
        let of_view = |held: &&Held| held.entry.view == view && !held.copy;
        !self.table.values().filter(of_view).any(|held| held.entry.range.overlaps(&range))
    }

    /// Whether there is a write at `place`.
    pub(super) fn has(&self, place: Place) -> bool {
        self.table.contains_key(&place)
    }

    /// Whether a range that nobody has locked may have entries all the same.
    pub(super) fn have_yielded(&self) -> bool {
        self.yielded
    }

    /// Those that `range` meets, in their order.
    pub(super) fn overlapped(&self, range: Blocks) -> SmallVec<[Place; 2]> {
        let met = self.table.iter().filter(|(_, held)| held.entry.range.overlaps(&range));
        let mut places: SmallVec<_> = met.map(|(place, _)| *place).collect();
        places.sort_unstable();
        places
    }

    /// The first range from `at` on that one of them changes.
    pub(super) fn next(&self, at: Lba) -> Option<Blocks> {
        let ranges = self.table.values().map(|held| held.entry.range);
        ranges.filter(|r| r.end().is_none_or(|end| end > at.0)).min_by_key(|r| r.at)
    }

    /// A copy takes over `range`: those that hold a part of it give up their locks, and stay
    /// entries. Nobody gets in between, for nobody else may enter before the view is open.
    pub(super) fn yield_to(&mut self, range: Blocks) {
        self.yielded = !self.table.is_empty();
        for held in self.table.values_mut().filter(|h| h.entry.range.overlaps(&range)) {
            held.lock = None;
        }
    }

    /// Ends all up to `last`; they are committed, or nobody has them any more.
    pub(super) fn end_through(&mut self, last: Place) {
        self.table.retain(|place, _| *place > last);
        // What is left are writes of the view that is open now: copies came before them.
        self.yielded = false;
        self.applying = self.table.values().filter(|h| h.state == State::Applying).count();
    }

    /// Ends those that the leg refused, and tells why, in their order: their contents are nobody's.
    pub(super) fn end_failed(&mut self) -> Vec<(Tag, Error)> {
        let mut failed = Vec::new();
        self.table.retain(|place, held| {
            if let State::Failed(e) = held.state {
                failed.push((*place, held.entry.tag, e));
            }
            !matches!(held.state, State::Failed(_))
        });
        failed.sort_unstable_by_key(|(place, ..)| *place);
        failed.into_iter().map(|(_, tag, e)| (tag, e)).collect()
    }

    /// Ends all but those on their way to the disk.
    pub(super) fn end_applied(&mut self) {
        self.table.retain(|_, held| held.state == State::Applying);
    }

    /// Ends all.
    pub(super) fn clear(&mut self) {
        self.table.clear();
        self.applying = 0;
    }

    /// What is told when a view begins, in its order.
    pub(super) fn list(&self) -> Vec<Entry> {
        let told = self.table.values().filter(|h| !h.passing);
        let mut entries: Vec<_> = told.map(|h| h.entry).collect();
        entries.sort_unstable_by_key(|entry| (entry.view, entry.seq));
        entries
    }

    /// Whether nothing is on its way to the disk.
    pub(super) fn is_drained(&self) -> bool {
        self.applying == 0
    }

    /// Blocks of those that are on their way to the disk.
    pub(super) fn applying_blocks(&self) -> u64 {
        let applying = self.table.values().filter(|held| held.state == State::Applying);
        applying.map(|held| held.entry.range.count).fold(0, u64::saturating_add)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }
}

//! The stripe map: the slot of each stripe of an extent. A full-stripe write goes to a free slot,
//! which then becomes the stripe's.

use std::cell::RefCell;
use std::collections::VecDeque;

use tokio::sync::{Mutex, Notify};

/// The slot of each stripe of an extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripeMap {
    /// The log generation that the entry numbers belong to.
    log_generation: u64,
    /// By stripe.
    stripes: Vec<StripeLocation>,
    /// Free slots, in the order in which they are used.
    free_slots: VecDeque<u32>,
}

/// Where a stripe lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeLocation {
    /// Its slot.
    pub slot: u32,
    /// Number of the log entry that moved it there; 0 if that was in an earlier log generation.
    pub entry_number: u64,
}

impl StripeMap {
    /// Each stripe in the slot of its own number; the slots after them are free.
    #[must_use]
    pub fn new(stripes: u32, slots: u32) -> Self {
        let locations = (0..stripes).map(|slot| StripeLocation { slot, entry_number: 0 }).collect();
        Self { log_generation: 0, stripes: locations, free_slots: (stripes..slots).collect() }
    }

    /// The map with these locations. None if two stripes share a slot, or a slot does not exist.
    #[must_use]
    pub fn from_locations(
        generation: u64,
        stripes: Vec<StripeLocation>,
        slots: u32,
    ) -> Option<Self> {
        let mut taken = vec![false; slots as usize];
        for location in &stripes {
            let is_taken = taken.get_mut(location.slot as usize)?;
            if std::mem::replace(is_taken, true) {
                return None;
            }
        }
        let free = (0..slots).filter(|slot| !taken[*slot as usize]).collect();
        Some(Self { log_generation: generation, stripes, free_slots: free })
    }

    /// The log generation of the entry numbers in [`Self::stripes`].
    #[must_use]
    pub fn log_generation(&self) -> u64 {
        self.log_generation
    }

    /// The locations of the stripes, in order.
    #[must_use]
    pub fn stripes(&self) -> &[StripeLocation] {
        &self.stripes
    }

    fn slot_of(&self, stripe: u32) -> Option<u32> {
        self.stripes.get(stripe as usize).map(|location| location.slot)
    }

    /// Applies the move of a stripe to `slot`, by entry `number` of this generation. Whether it is
    /// newer than what is known; the stripe's old slot becomes free.
    fn apply_move(&mut self, generation: u64, number: u64, stripe: u32, slot: u32) -> bool {
        if generation > self.log_generation {
            self.log_generation = generation;
            self.stripes.iter_mut().for_each(|location| location.entry_number = 0);
        }
        let Some(location) = self.stripes.get_mut(stripe as usize) else { return false };
        if generation < self.log_generation || number <= location.entry_number {
            return false;
        }
        let old = std::mem::replace(location, StripeLocation { slot, entry_number: number });
        self.free_slots.retain(|free| *free != slot);
        if old.slot != slot {
            self.free_slots.push_back(old.slot);
        }
        true
    }
}

/// The stripe map of an extent in use.
#[derive(Debug)]
pub(super) struct LiveStripeMap {
    map: RefCell<StripeMap>,
    slot_freed: Notify,
    /// Sequence number of the last saved map.
    pub(super) saved_sequence: Mutex<u64>,
}

impl LiveStripeMap {
    pub(super) fn new(map: StripeMap, saved: u64) -> Self {
        Self {
            map: RefCell::new(map),
            slot_freed: Notify::new(),
            saved_sequence: Mutex::new(saved),
        }
    }

    pub(super) fn snapshot(&self) -> StripeMap {
        self.map.borrow().clone()
    }

    pub(super) fn slot_of(&self, stripe: u32) -> Option<u32> {
        self.map.borrow().slot_of(stripe)
    }

    /// The stripe in a slot.
    pub(super) fn stripe_at(&self, slot: u32) -> Option<u32> {
        let map = self.map.borrow();
        let found = map.stripes.iter().position(|location| location.slot == slot);
        found.and_then(|stripe| u32::try_from(stripe).ok())
    }

    /// Whether the slot exists and is neither used nor reserved.
    pub(super) fn is_free(&self, slot: u32) -> bool {
        self.map.borrow().free_slots.contains(&slot)
    }

    /// Waits for a free slot and reserves it. A caller with a reservation must not wait for
    /// another.
    pub(super) async fn reserve_slot(&self) -> SlotReservation<'_> {
        loop {
            let freed = self.slot_freed.notified();
            if let Some(slot) = self.map.borrow_mut().free_slots.pop_front() {
                return SlotReservation { map: self, slot, is_used: false };
            }
            freed.await;
        }
    }

    /// As [`StripeMap::apply_move`].
    pub(super) fn apply_move(&self, generation: u64, number: u64, stripe: u32, slot: u32) -> bool {
        let is_new = self.map.borrow_mut().apply_move(generation, number, stripe, slot);
        self.slot_freed.notify_waiters();
        is_new
    }
}

/// A reserved slot; free again when this is dropped without a commit.
#[derive(Debug)]
pub(super) struct SlotReservation<'a> {
    map: &'a LiveStripeMap,
    pub(super) slot: u32,
    is_used: bool,
}

impl SlotReservation<'_> {
    /// Moves a stripe to the slot, by entry `number` of this generation.
    pub(super) fn commit(mut self, generation: u64, number: u64, stripe: u32) {
        self.is_used = true;
        self.map.apply_move(generation, number, stripe, self.slot);
    }
}

impl Drop for SlotReservation<'_> {
    fn drop(&mut self) {
        if !self.is_used {
            self.map.map.borrow_mut().free_slots.push_back(self.slot);
            self.map.slot_freed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_moved_stripe_frees_its_old_slot() {
        let map = LiveStripeMap::new(StripeMap::new(2, 3), 0);
        let reservation = map.reserve_slot().now_or_never().unwrap();
        assert_eq!(reservation.slot, 2);
        assert!(map.reserve_slot().now_or_never().is_none());
        reservation.commit(1, 7, 0);
        assert_eq!((map.slot_of(0), map.slot_of(2)), (Some(2), None));
        let reservation = map.reserve_slot().now_or_never().unwrap();
        assert_eq!(reservation.slot, 0);
        drop(reservation);
        assert_eq!(map.reserve_slot().now_or_never().unwrap().slot, 0, "it was not used");
    }

    #[test]
    fn entries_of_an_older_generation_are_ignored() {
        let mut map = StripeMap::new(2, 4);
        assert!(map.apply_move(1, 5, 0, 2) && map.apply_move(1, 6, 0, 3));
        assert!(!map.apply_move(1, 5, 0, 2) && !map.apply_move(0, 9, 0, 2), "older");
        assert!(map.apply_move(1, 4, 1, 2), "another stripe's");
        assert!(map.apply_move(2, 1, 0, 0), "a new era counts anew");
        assert!(!map.apply_move(2, 9, 2, 1), "no such stripe");
        let again =
            StripeMap::from_locations(map.log_generation(), map.stripes().to_vec(), 4).unwrap();
        assert_eq!(again.stripes(), map.stripes());
        assert_eq!(again.free_slots, [1, 3]);
    }

    #[test]
    fn an_inconsistent_map_is_rejected() {
        let location = |slot| StripeLocation { slot, entry_number: 0 };
        assert!(StripeMap::from_locations(1, vec![location(1), location(1)], 4).is_none());
        assert!(StripeMap::from_locations(1, vec![location(4)], 4).is_none());
    }
}

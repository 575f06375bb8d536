//! Where the stripes of an extent lie: whole ones are written to a spare place, and then that is their place.

use std::cell::RefCell;
use std::collections::VecDeque;

use tokio::sync::{Mutex, Notify};

/// Where each stripe of an extent lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    /// The era of the log whose entries the numbers are of.
    era: u64,
    /// Stripes in order.
    stripes: Vec<Placed>,
    /// Places that no stripe has, in the order in which they are taken.
    free: VecDeque<u32>,
}

/// Where one stripe lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its place.
    pub place: u32,
    /// Number of the entry of the log by which it came there; 0 if that was in an earlier era.
    pub number: u64,
}

impl Map {
    /// Each stripe at the place of its own number, and the places behind them free.
    #[must_use]
    pub fn new(stripes: u32, places: u32) -> Self {
        let placed = (0..stripes).map(|place| Placed { place, number: 0 }).collect();
        Self { era: 0, stripes: placed, free: (stripes..places).collect() }
    }

    /// The map in which the stripes lie so. None if two of them have one place, or one lies behind the end.
    #[must_use]
    pub fn of(era: u64, stripes: Vec<Placed>, places: u32) -> Option<Self> {
        let mut taken = vec![false; places as usize];
        for placed in &stripes {
            let place = taken.get_mut(placed.place as usize)?;
            if std::mem::replace(place, true) {
                return None;
            }
        }
        let free = (0..places).filter(|place| !taken[*place as usize]).collect();
        Some(Self { era, stripes, free })
    }

    /// The era that the numbers of [`Self::stripes`] are of.
    #[must_use]
    pub fn era(&self) -> u64 {
        self.era
    }

    /// Where the stripes lie, in order.
    #[must_use]
    pub fn stripes(&self) -> &[Placed] {
        &self.stripes
    }

    fn place_of(&self, stripe: u32) -> Option<u32> {
        self.stripes.get(stripe as usize).map(|placed| placed.place)
    }

    /// By entry `number` of an era a stripe lies at `place`. Whether that is news; what it leaves is free then.
    fn moves(&mut self, era: u64, number: u64, stripe: u32, place: u32) -> bool {
        if era > self.era {
            self.era = era;
            self.stripes.iter_mut().for_each(|placed| placed.number = 0);
        }
        let Some(placed) = self.stripes.get_mut(stripe as usize) else { return false };
        if era < self.era || number <= placed.number {
            return false;
        }
        let before = std::mem::replace(placed, Placed { place, number });
        self.free.retain(|free| *free != place);
        if before.place != place {
            self.free.push_back(before.place);
        }
        true
    }
}

/// The map of an extent that is in use.
#[derive(Debug)]
pub(super) struct Placement {
    map: RefCell<Map>,
    freed: Notify,
    /// The sequence of what is durable of it.
    pub(super) saved: Mutex<u64>,
}

impl Placement {
    pub(super) fn new(map: Map, saved: u64) -> Self {
        Self { map: RefCell::new(map), freed: Notify::new(), saved: Mutex::new(saved) }
    }

    pub(super) fn map(&self) -> Map {
        self.map.borrow().clone()
    }

    pub(super) fn place_of(&self, stripe: u32) -> Option<u32> {
        self.map.borrow().place_of(stripe)
    }

    /// The stripe that lies at a place.
    pub(super) fn stripe_at(&self, place: u32) -> Option<u32> {
        let map = self.map.borrow();
        let found = map.stripes.iter().position(|placed| placed.place == place);
        found.and_then(|stripe| u32::try_from(stripe).ok())
    }

    /// Whether there is such a place, and no stripe has it, or is about to.
    pub(super) fn is_free(&self, place: u32) -> bool {
        self.map.borrow().free.contains(&place)
    }

    /// Waits for a place that no stripe has. Whoever has one waits for no other.
    pub(super) async fn take(&self) -> Spare<'_> {
        loop {
            let freed = self.freed.notified();
            if let Some(place) = self.map.borrow_mut().free.pop_front() {
                return Spare { placement: self, place, is_used: false };
            }
            freed.await;
        }
    }

    /// As [`Map::moves`].
    pub(super) fn moves(&self, era: u64, number: u64, stripe: u32, place: u32) -> bool {
        let is_news = self.map.borrow_mut().moves(era, number, stripe, place);
        self.freed.notify_waiters();
        is_news
    }
}

/// A place that has been taken; free again when this is dropped without a stripe having moved there.
#[derive(Debug)]
pub(super) struct Spare<'a> {
    placement: &'a Placement,
    pub(super) place: u32,
    is_used: bool,
}

impl Spare<'_> {
    /// A stripe lies there now, by entry `number` of an era.
    pub(super) fn moved(mut self, era: u64, number: u64, stripe: u32) {
        self.is_used = true;
        self.placement.moves(era, number, stripe, self.place);
    }
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        if !self.is_used {
            self.placement.map.borrow_mut().free.push_back(self.place);
            self.placement.freed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn what_a_stripe_leaves_is_free() {
        let placement = Placement::new(Map::new(2, 3), 0);
        let spare = placement.take().now_or_never().unwrap();
        assert_eq!(spare.place, 2);
        assert!(placement.take().now_or_never().is_none());
        spare.moved(1, 7, 0);
        assert_eq!((placement.place_of(0), placement.place_of(2)), (Some(2), None));
        let spare = placement.take().now_or_never().unwrap();
        assert_eq!(spare.place, 0);
        drop(spare);
        assert_eq!(placement.take().now_or_never().unwrap().place, 0, "it was not used");
    }

    #[test]
    fn old_entries_are_no_news() {
        let mut map = Map::new(2, 4);
        assert!(map.moves(1, 5, 0, 2) && map.moves(1, 6, 0, 3));
        assert!(!map.moves(1, 5, 0, 2) && !map.moves(0, 9, 0, 2), "older");
        assert!(map.moves(1, 4, 1, 2), "another stripe's");
        assert!(map.moves(2, 1, 0, 0), "a new era counts anew");
        assert!(!map.moves(2, 9, 2, 1), "no such stripe");
        let again = Map::of(map.era(), map.stripes().to_vec(), 4).unwrap();
        assert_eq!(again.stripes(), map.stripes());
        assert_eq!(again.free, [1, 3]);
    }

    #[test]
    fn a_map_that_contradicts_itself_is_none() {
        let placed = |place| Placed { place, number: 0 };
        assert!(Map::of(1, vec![placed(1), placed(1)], 4).is_none());
        assert!(Map::of(1, vec![placed(4)], 4).is_none());
    }
}

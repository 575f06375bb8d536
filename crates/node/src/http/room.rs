//! Room for connections: where it is full, one makes room that has not shown who it is.
//!
//! Else whoever opens enough of them, and says nothing, keeps the administrator out.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// In all.
    pub most: usize,
    /// That have not shown who they are.
    pub unknown: usize,
    /// Of those, from one address.
    pub of_one: usize,
    /// How long one of those may stay.
    pub patience: Option<Duration>,
}

impl Capacity {
    /// So many in all, whoever they are.
    #[must_use]
    pub fn of(most: usize) -> Self {
        Self { most, unknown: most, of_one: most, patience: None }
    }
}

/// Room for so many connections.
#[derive(Debug)]
pub(super) struct Room {
    capacity: Capacity,
    inside: Mutex<Inside>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Inside {
    next: u64,
    /// In the order in which they have come.
    guests: BTreeMap<u64, Guest>,
}

#[derive(Debug)]
struct Guest {
    /// Where it comes from; nobody makes room that comes by a Unix socket.
    from: Option<IpAddr>,
    known: Arc<AtomicBool>,
    leave: Arc<Notify>,
    leaves: bool,
}

/// A connection's place; free again when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    room: Arc<Room>,
    number: u64,
    known: Arc<AtomicBool>,
    leave: Arc<Notify>,
}

impl Room {
    pub(super) fn new(capacity: Capacity) -> Arc<Self> {
        let (inside, freed) = (Mutex::default(), Notify::new());
        Arc::new(Self { capacity, inside, freed })
    }

    /// A place for a connection; waits while all are taken by others that are known.
    pub(super) async fn enter(self: &Arc<Self>, from: Option<IpAddr>) -> Place {
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            if let Some(place) = self.try_enter(from) {
                return place;
            }
            freed.await;
        }
    }

    fn try_enter(self: &Arc<Self>, from: Option<IpAddr>) -> Option<Place> {
        let mut inside = self.inside();
        let from = from.map(|from| from.to_canonical());
        if inside.is_full(&self.capacity, from) {
            return None;
        }
        let number = inside.next;
        inside.next += 1;
        let (known, leave) = (Arc::<AtomicBool>::default(), Arc::new(Notify::new()));
        let leaves = false;
        let guest = Guest { from, known: Arc::clone(&known), leave: Arc::clone(&leave), leaves };
        inside.guests.insert(number, guest);
        drop(inside);
        Some(Place { room: Arc::clone(self), number, known, leave })
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    /// Whether there is no place for one from `from`; then one is asked to leave.
    fn is_full(&mut self, capacity: &Capacity, from: Option<IpAddr>) -> bool {
        let Capacity { most, unknown, of_one, .. } = *capacity;
        if self.guests.len() < most.min(unknown).min(of_one) {
            return false;
        }
        let by_address = self.unknown();
        let own = from.and_then(|from| by_address.get(&from)).copied();
        let all_unknown: usize = by_address.values().map(|(count, _)| count).sum();
        let leaves = match own {
            Some((count, oldest)) if count >= of_one => Some(oldest),
            _ if self.guests.len() < most && all_unknown < unknown => return false,
            // Whoever floods the node is in his own way first.
            _ => by_address
                .into_values()
                .max_by_key(|(count, oldest)| (*count, u64::MAX - oldest))
                .map(|(_, oldest)| oldest),
        };
        if !self.guests.values().any(|guest| guest.leaves)
            && let Some(guest) = leaves.and_then(|number| self.guests.get_mut(&number))
        {
            guest.leaves = true;
            guest.leave.notify_one();
        }
        true
    }

    /// How many that are not known there are of each address, and the oldest of them.
    fn unknown(&self) -> HashMap<IpAddr, (usize, u64)> {
        let mut by_address: HashMap<IpAddr, (usize, u64)> = HashMap::new();
        for (number, guest) in &self.guests {
            if let (Some(from), false) = (guest.from, guest.known.load(Ordering::Relaxed)) {
                by_address.entry(from).or_insert((0, *number)).0 += 1;
            }
        }
        by_address
    }
}

impl Place {
    /// What is set once the connection is known.
    pub(super) fn known(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.known)
    }

    /// Waits until the connection has to make room for another one.
    pub(super) async fn is_wanted(&self) {
        self.leave.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.room.inside().guests.remove(&self.number);
        self.room.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    fn address(n: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, n]))
    }

    async fn is_wanted(place: &Place) -> bool {
        timeout(Duration::from_millis(1), place.is_wanted()).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn who_floods_makes_room_and_nobody_else() {
        let room = Room::new(Capacity::of(4));
        let known = room.enter(address(1)).await;
        known.known().store(true, Ordering::Relaxed);
        let other = room.enter(address(2)).await;
        let (first, second) = (room.enter(address(3)).await, room.enter(address(3)).await);
        let newcomer = tokio::spawn({
            let room = Arc::clone(&room);
            async move { room.enter(address(4)).await }
        });
        assert!(is_wanted(&first).await);
        for stays in [&known, &other, &second] {
            assert!(!is_wanted(stays).await);
        }
        drop(first);
        let newcomer = newcomer.await.unwrap();
        assert_eq!(room.inside().guests.len(), 4);
        drop((newcomer, known, other, second));
        assert!(room.inside().guests.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_are_known_are_waited_for() {
        let room = Room::new(Capacity::of(1));
        let known = room.enter(address(1)).await;
        known.known().store(true, Ordering::Relaxed);
        assert!(timeout(Duration::from_secs(9), room.enter(address(2))).await.is_err());
        assert!(!is_wanted(&known).await);
        drop(known);
        let unix = room.enter(None).await;
        assert!(timeout(Duration::from_secs(9), room.enter(None)).await.is_err());
        assert!(!is_wanted(&unix).await);
    }

    #[tokio::test(start_paused = true)]
    async fn one_address_has_few_places_and_those_who_are_known_do_not_count() {
        let capacity = Capacity { most: 9, unknown: 4, of_one: 2, patience: None };
        let room = Room::new(capacity);
        let known = [room.enter(address(1)).await, room.enter(address(1)).await];
        known.iter().for_each(|place| place.known().store(true, Ordering::Relaxed));
        let (first, second) = (room.enter(address(1)).await, room.enter(address(1)).await);
        let other = room.enter(address(2)).await;
        assert!(timeout(Duration::from_secs(9), room.enter(address(1))).await.is_err());
        assert!(is_wanted(&first).await && !is_wanted(&second).await && !is_wanted(&other).await);
        drop(first);
        let _more = (room.enter(address(3)).await, room.enter(address(4)).await);
        // Nobody has more than his share, and together they have all that there is.
        assert!(timeout(Duration::from_secs(9), room.enter(address(5))).await.is_err());
        assert!(is_wanted(&second).await);
        drop(second);
        room.enter(address(5)).await;
        for place in &known {
            assert!(!is_wanted(place).await);
        }
    }
}
